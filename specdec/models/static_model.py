"""A transformers model whose short passes are launched as one: static cache, fixed shapes, CUDA graphs."""

from __future__ import annotations

import torch
from transformers import Cache, PreTrainedModel, StaticLayer

from specdec import devices
from specdec.models.torch_model import TorchModel

CONTEXT = 4096  # positions for which a cache is set aside
# Passes of at most so many tokens are captured, one graph for each length: one token for a draft, K + 1 for a target.
LONGEST = 17
# Angles that depend on the position alone; others look at the longest position so far, and so would wait for it.
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


class StaticModel(TorchModel):
    """As :class:`~specdec.models.torch_model.TorchModel`, with a cache of fixed size, in which a pass can be captured and replayed.

    The cache is written at a place that is itself a tensor, and rolled back by moving that place. A pass attends to the
    whole cache behind a mask, so that its shape never changes.

    Args:
        model, tokenizer, name: as for :class:`~specdec.models.torch_model.TorchModel`.
        max_context: positions to set aside, at most those that the model was made for.

    Raises:
        ValueError: also where a layer looks at a window only, or its angles follow the longest position.
    """

    def __init__(self, model: PreTrainedModel, tokenizer=None, name: str | None = None, max_context: int = CONTEXT):
        super().__init__(model, tokenizer, name)
        config = model.config.get_text_config(decoder=True)
        self.max_context = min(self.max_context, max_context)
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if windows or rope not in _FIXED_ROPE:
            raise ValueError(
                f"{self.name} has no passes of fixed shape: {', '.join(sorted(windows)) or f'rope {rope}'}"
            )
        self._length, self._passes = 0, {}
        self._cache = Cache(layers=[StaticLayer(self.max_context) for _ in range(config.num_hidden_layers)])
        self._start = torch.zeros((), dtype=torch.long, device=self.device)
        self._places = torch.arange(self.max_context, device=self.device)

    @property
    def length(self) -> int:
        """How many ids the cache holds."""
        return self._length

    @torch.inference_mode()
    def drop_last(self, n: int) -> None:
        """Take the last n ids back out of the cache.

        Raises:
            ValueError: n is negative or more than the cache holds.
        """
        self._check_drop(n)
        self._length -= n
        if n and self._length == 0:
            self._cache.reset()  # what lies behind the mask counts for nothing unless it is NaN

    def twin(self) -> StaticModel:
        """The same weights with an empty cache of its own."""
        return StaticModel(self.model, self.tokenizer, self.name, self.max_context)

    @torch.inference_mode()
    def _forward(self, ids, rows):
        n = len(ids)
        self._check_room(n)
        self._start.fill_(self._length)
        ids = devices.send(torch.as_tensor(ids, dtype=torch.long), self.device)[None]
        if n > LONGEST:
            logits = self._run(ids, rows)
        else:
            if n not in self._passes:
                self._passes[n] = self._prepared(ids.clone())
            here, replay = self._passes[n]
            here.copy_(ids)
            logits = replay()[-rows:]
        self._length += n
        return logits

    def _prepared(self, here):
        """A place for ids, and the pass that reads them there."""
        n = here.shape[1]
        return here, devices.captured(lambda: self._run(here, n), self.device, f"{self.name}: a pass of {n} tokens")

    def _run(self, ids, rows):
        """One pass, all of it on the device: nothing here may depend on a value that only the device knows."""
        positions = self._start + self._places[: ids.shape[1]]
        for layer in self._cache.layers:
            layer.cumulative_length = self._start.clone()  # where it writes; it then counts on by itself
        mask = (self._places <= positions[:, None])[None, None]
        output = self.model(
            input_ids=ids,
            position_ids=positions[None],
            attention_mask=mask,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=rows,
        )
        return output.logits[0].float()
