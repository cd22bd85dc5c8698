"""Where draft tokens come from.

A draft has ``propose(context, k, sampling, generator) -> (ids (k',), q (k', V'))`` with 0 <= k' <= k and V' at most the
target's V. One function both draws a token and returns the law it was drawn from: q is never computed a second time.
A draft may also have ``start(context, target)``, called before each answer with the prompt but its last token,
``forward_seconds``, the time it has spent in forward passes so far, and ``device``, where ids and q are and its work is
timed; on a GPU nothing has to have been waited for. Where its ``confident`` is true, ``propose`` takes one argument more,
``enough``: called after each token with the draft's confidence, it returns True to end the draft there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from numbers import Integral

import torch

from specdec import devices
from specdec.models.torch_model import TorchModel
from specdec.sampling import Sampling, draw


class ModelDraft:
    """Draft tokens from a smaller model with the target's vocabulary.

    The draft keeps a cache of its own, even when it is given the very object that is also the target. At the next call it
    is brought in line with the context: rejected tokens are dropped, and tokens it has not seen yet are fed, among them
    its own last draft token after a full acceptance.

    Args:
        model: a ``specdec`` model (``specdec.models``).

    Raises (from ``start``):
        ValueError: the tokenizers of draft and target disagree about an id.
    """

    def __init__(self, model):
        self.model = model.twin() if hasattr(model, "twin") else model
        self.device = getattr(self.model, "device", None)
        self._forwards: list[tuple] = []  # marks around passes
        self._seconds = 0.0
        self._cached: list[int] = []
        self._fed = torch.empty(0, dtype=torch.long)  # cached too; on a GPU their values are known later
        self._limit = model.vocab_size

    @property
    def forward_seconds(self) -> float:
        """Seconds spent in forward passes so far; to be read when the device has been waited for."""
        self._seconds += sum(devices.seconds_between(*marks) for marks in self._forwards)
        self._forwards.clear()
        return self._seconds

    def start(self, context: Sequence[int], target) -> None:
        """Forget the last answer, check the pair, read ``context``."""
        if target is self.model:
            raise ValueError("draft and target share one cache: wrap the model a second time for the draft")
        draft_tokenizer, target_tokenizer = (getattr(m, "tokenizer", None) for m in (self.model, target))
        if draft_tokenizer is not None and target_tokenizer is not None and draft_tokenizer is not target_tokenizer:
            known = _shared_ids(draft_tokenizer, len(draft_tokenizer), target_tokenizer, len(target_tokenizer))
        else:
            known = min(len(t) for t in (draft_tokenizer, target_tokenizer, range(target.vocab_size)) if t is not None)
        # Ids that only the draft knows are barred before the draw, so q is the law of what is drawn.
        self._limit = min(self.model.vocab_size, target.vocab_size, known)
        self.model.drop_last(self.model.length)
        self._cached, self._fed = [], self._fed[:0]
        context = self._readable(context)[: self.model.max_context]
        _read(self.model, context)
        self._cached = context

    @property
    def confident(self) -> bool:
        """Whether :meth:`propose` takes ``enough``: not on a GPU, which would be waited for at every token."""
        return not devices.is_gpu(self.device)

    def propose(
        self,
        context: Sequence[int],
        k: int,
        sampling: Sampling,
        generator: torch.Generator,
        enough: Callable[[float], bool] | None = None,
    ):
        """Draw up to k tokens, each from this model's law after the context and the drafts before it.

        Fewer where the draft's own window ends, or ``enough`` says so. The confidence it is told is the largest
        probability of the model's own law, unfiltered: it says nothing of which token was drawn, so it may decide whether
        another is. See the module's text for what comes back.
        """
        readable = self._readable(context)
        k = max(0, min(k, self.model.max_context - len(context) + 1))
        if k == 0:
            return torch.empty(0, dtype=torch.long), torch.empty(0, self._limit)
        self._cached, self._fed = self._cached + self._fed.tolist(), self._fed[:0]
        shared = common_prefix(self._cached, readable[:-1])
        self.model.drop_last(len(self._cached) - shared)
        self._cached = self._cached[:shared]
        block = torch.tensor(readable[shared:])
        for i in range(k):
            begin = devices.mark(self.device)
            logits = devices.rows(self.model, block)[-1:]
            self._forwards.append((begin, devices.mark(self.device)))
            if i == 0:
                self._cached, ids = readable, torch.empty(k, dtype=torch.long, device=logits.device)
            self._fed = ids[:i]
            history = [[*context, *ids[:i].tolist()]] if sampling.repetition_penalty != 1 else None
            [row] = sampling.probabilities(
                logits[:, : self._limit], history, where=f"draft model {_name(self.model)}", start=len(context) + i
            )
            if i == 0:
                q = row.new_empty(k, self._limit)
            q[i] = row
            ids[i] = draw(q[i], generator)
            block = ids[i : i + 1]
            if enough and enough(float(logits[0, : self._limit].float().softmax(-1).max())):
                return ids[: i + 1], q[: i + 1]
        return ids, q

    def _readable(self, context):
        """Ids that only the target knows are shown to the draft as its last one: a worse guess, never a wrong law."""
        last = self.model.vocab_size - 1
        return [min(int(i), last) for i in context]


class PromptLookup:
    """Draft tokens copied from the context: what followed the last earlier occurrence of its final n-gram.

    Costs no forward pass. q is one-hot (Saxena, "Prompt Lookup Decoding", 2023). The longest n-gram is tried first.

    Args:
        max_ngram: length of the longest final n-gram looked for; >= 1.

    Raises:
        ValueError: ``max_ngram`` is not an int >= 1.
    """

    forward_seconds = 0.0

    def __init__(self, max_ngram: int = 3):
        if isinstance(max_ngram, bool) or not isinstance(max_ngram, Integral) or max_ngram < 1:
            raise ValueError(f"max_ngram must be an int >= 1, not {max_ngram!r}")
        self.max_ngram = max_ngram

    def propose(self, context: Sequence[int], k: int, sampling: Sampling, generator: torch.Generator):
        """Up to k copied tokens; none when no final n-gram occurred before. Neither argument after k is read."""
        ids = torch.tensor(self._copied(list(context), k), dtype=torch.long)
        return ids, torch.nn.functional.one_hot(ids, max(context) + 1).float()

    def _copied(self, context, k):
        for size in range(min(self.max_ngram, len(context) - 1), 0, -1):
            final = context[-size:]
            for begin in range(len(context) - size - 1, -1, -1):
                if context[begin : begin + size] == final:
                    return context[begin + size : begin + size + k]
        return []


def first_layers(model: TorchModel, count: int) -> TorchModel:
    """A draft model made of the target's own first layers, its norm and its head; the weights are shared.

    Raises:
        ValueError: count is not in 1 .. number of layers.
    """
    whole = model.model
    if not 1 <= count <= whole.config.num_hidden_layers:
        raise ValueError(f"count must lie in 1..{whole.config.num_hidden_layers}, not {count!r}")
    # Copied are the modules that hold others; what holds weights is shared, whatever form these have.
    leaves = (module for module in whole.modules() if not any(module.children()))
    small = copy.deepcopy(whole, {id(part): part for part in (*leaves, *whole.parameters(), *whole.buffers())})
    del _stack(small)[count:]
    small.config.num_hidden_layers = count
    if getattr(small.config, "layer_types", None):
        small.config.layer_types = small.config.layer_types[:count]
    return TorchModel(small, model.tokenizer, f"{model.name}, first {count} layers")


def _stack(model) -> torch.nn.ModuleList:
    """The decoder layers of a transformers model."""
    lists = (module for module in model.get_decoder().modules() if isinstance(module, torch.nn.ModuleList))
    return next(layers for layers in lists if len(layers) == model.config.num_hidden_layers)


def _read(model, ids) -> None:
    """Put ids in the cache; a user's model need not offer ``prefill``."""
    if len(ids):
        getattr(model, "prefill", model.logits)(ids)


def _name(model) -> str:
    return getattr(model, "name", type(model).__name__)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences share from their start on."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])


@functools.lru_cache(maxsize=8)
def _shared_ids(draft_tokenizer, draft_length, target_tokenizer, target_length) -> int:
    """How many ids, from 0, both tokenizers know under the same token; ValueError at the first that differs."""
    names = [{i: t for t, i in tokenizer.get_vocab().items()} for tokenizer in (draft_tokenizer, target_tokenizer)]
    shared = min(draft_length, target_length)
    for i in range(shared):
        if names[0].get(i) != names[1].get(i):
            raise ValueError(
                f"draft and target have unlike tokenizers: id {i} is {names[0].get(i)!r} to the draft "
                f"and {names[1].get(i)!r} to the target"
            )
    return shared
