"""Any transformers causal language model, with a cache that can be rolled back."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from specdec import devices

# Layers whose cache is keys and values by position. Others (convolutions, linear attention) keep a running state.
_ROLLS_BACK = {"full_attention", "sliding_attention", "chunked_attention"}


class TorchModel:
    """A transformers causal language model on the device and in the dtype where it already lives.

    The cache holds one sequence (batch size one). :meth:`logits` appends to it, :meth:`drop_last` takes back.

    Args:
        model: a ``PreTrainedModel`` with a language-modelling head. It is set to evaluation mode.
        tokenizer: its tokenizer, if texts are to be read, or a pair's vocabularies compared.
        name: what error messages and records call it.

    Attributes:
        vocab_size: rows of the head, V; max_context: positions the model was made for; eos: all end-token ids that its
        configs and its tokenizer name; length: ids in the cache; device: where ids are sent.

    Raises:
        TypeError: not a transformers model.
        ValueError: a model whose state cannot be rolled back (recurrent, hybrid), that is not decoder-only, or that
            looks ahead (as BERT does without ``is_decoder``).
    """

    def __init__(self, model: PreTrainedModel, tokenizer=None, name: str | None = None):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"expected a transformers model with a language-modelling head, not {type(model).__name__}")
        self.name = name or type(model).__name__
        if model._is_stateful:
            raise ValueError(
                f"{self.name} keeps a recurrent state, which cannot be rolled back after a rejected draft token"
            )
        if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
            raise ValueError(f"{self.name} is not a decoder-only language model")
        if not _is_causal(model.get_decoder()):
            raise ValueError(f"{self.name} looks ahead: a row of its logits depends on the tokens after it")
        self.model = model.eval()
        self.tokenizer = tokenizer
        config = model.config.get_text_config(decoder=True)
        unlike = set(getattr(config, "layer_types", None) or ()) - _ROLLS_BACK
        if unlike:
            raise ValueError(f"{self.name} has layers whose state cannot be rolled back: {', '.join(sorted(unlike))}")
        self.vocab_size = model.get_output_embeddings().out_features
        self.max_context = _window(config)
        self.eos = _end_tokens(config, model.generation_config, tokenizer)
        self.device = model.get_input_embeddings().weight.device
        self._cache = DynamicCache()

    @property
    def length(self) -> int:
        """How many ids the cache holds."""
        return self._cache.get_seq_length()

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Append n ids to the cache; (n, V) float32 on the CPU, row i predicts what follows ids[i].

        Row i depends on the cache and on ids[:i + 1] only.
        """
        return self.rows(ids).cpu()

    def rows(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """What :meth:`logits` gives, left on the model's device and not waited for; used up before the next call."""
        return self._forward(ids, rows=len(ids)).float()

    def prefill(self, ids: Sequence[int]) -> None:
        """Append ids to the cache without computing their logits."""
        if len(ids):
            self._forward(ids, rows=1)

    def drop_last(self, n: int) -> None:
        """Take the last n ids back out of the cache.

        Raises:
            ValueError: n is negative or more than the cache holds.
        """
        self._check_drop(n)
        if n == self.length:
            self._cache = DynamicCache()
        elif n:
            self._cache.crop(-n)  # transformers 5.24: only negative counts, "drop n"

    def twin(self) -> TorchModel:
        """The same weights with an empty cache of its own."""
        other = copy.copy(self)
        other._cache = DynamicCache()
        return other

    @torch.inference_mode()
    def _forward(self, ids, rows):
        start = self.length
        self._check_room(len(ids))
        input_ids = devices.send(torch.as_tensor(ids, dtype=torch.long), self.device)[None]
        # No sliding layers in the cache: it keeps every position, the mask still hides those outside the window,
        # and so rolling back is exact there too. Positions are given, since a rolled-back cache is the point here.
        positions = torch.arange(start, start + len(ids), device=self.device)[None]
        output = self.model(
            input_ids=input_ids, position_ids=positions, cache=self._cache, use_cache=True, logits_to_keep=rows
        )
        if self.length != start + len(ids):
            raise ValueError(f"{self.name} does not use the cache it is given")
        return output.logits[0]

    def _check_drop(self, n):
        if not 0 <= n <= self.length:
            raise ValueError(f"cannot drop {n} ids from a cache that holds {self.length}")

    def _check_room(self, n):
        if self.length + n > self.max_context:
            raise ValueError(f"{self.name}: {self.length} + {n} ids do not fit its context of {self.max_context}")


def _is_causal(decoder) -> bool:
    """What transformers says of a decoder's self-attention; a part that is not causal may be its cross-attention."""
    parts = [part.is_causal for part in decoder.modules() if hasattr(part, "is_causal")]
    said = any(parts) if parts else getattr(decoder.config, "is_decoder", True)
    return said and getattr(decoder.config, "is_causal", True)


def _window(config) -> int:
    """How many positions have one meaning each."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Past its first window longrope rotates all positions anew, while the cache holds them as they were.
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def _end_tokens(config, generation_config, tokenizer) -> tuple[int, ...]:
    """The union of what configs and tokenizer call an end token, sorted."""
    found = set()
    for source in (config, generation_config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return tuple(sorted(found))
