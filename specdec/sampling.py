"""From logits to probabilities, and from probabilities to one token.

Draft and target both go through :class:`Sampling`, so that p and q are the laws *after* every filter: the rejection
rule is exact only for the law that a draft token was really drawn from (Leviathan et al., arXiv:2211.17192, app. A.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Below the smallest normal float32 a quotient by the temperature is no longer defined: such a law is greedy.
_GREEDY_BELOW = 2.0**-126


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the filters of transformers, in its order.

    Repetition penalty, temperature, top-k, top-p, min-p. The defaults leave the model's own law as it is.

    Args:
        temperature: 0 is greedy (all mass on the largest logit, the lowest id among equals); >= 0 and finite.
        top_k: keep the k largest logits, and what ties with the k-th; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p; in (0, 1].
        min_p: drop tokens less probable than min_p times the most probable one; in [0, 1].
        repetition_penalty: divide positive and multiply negative logits of ids already in the context; > 0.

    Raises:
        TypeError: a value is not a number (``top_k``: not an int).
        ValueError: a value is outside its range, NaN or infinite.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, not {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"{name} must be finite, not {value!r}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, Integral):
            raise TypeError(f"top_k must be an int, not {self.top_k!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0 (0 is greedy), not {self.temperature!r}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps all tokens), not {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p!r}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], not {self.min_p!r}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be > 0, not {self.repetition_penalty!r}")

    def probabilities(
        self,
        logits: torch.Tensor,
        history: Sequence[Sequence[int]] | None = None,
        where: str = "logits",
        start: int = 0,
    ) -> torch.Tensor:
        """The law of the next token after each of n prefixes.

        Args:
            logits: (n, V), any float type; -inf bars a token.
            history: for each row the ids before it (n sequences); read only by the repetition penalty.
            where, start: the model and the position of the first row, for error messages.

        Returns:
            (n, V) float32 (float64 for float64 logits); every row sums to 1.

        Raises:
            FloatingPointError: a row has NaN, +inf, or nothing but -inf. On a GPU nothing is waited for: all of that row
                is NaN then, and whoever reads it has to look.
            ValueError: logits are not (n, V), or history has not one sequence a row.
        """
        import torch

        from specdec import devices

        if logits.ndim != 2:
            raise ValueError(f"logits must be (n, V), not {tuple(logits.shape)}")
        # float16 and bfloat16 overflow or round before the maximum is taken off: up-cast first.
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.repetition_penalty != 1:
            scores = self._penalise(scores, history)
        top = scores.amax(-1, keepdim=True)  # NaN and +inf reach the maximum; so does -inf when nothing else is there
        if not devices.is_gpu(scores.device):
            _check_finite(top, where, start)
            return self._law(scores, top)
        return torch.where(top.isfinite(), self._law(scores, top), math.nan)

    def _law(self, scores, top):
        import torch

        if self.temperature < _GREEDY_BELOW:
            return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
        temperature = min(self.temperature, torch.finfo(scores.dtype).max)  # -inf over inf would be NaN
        scores = (scores - top) / temperature
        if self.top_k or self.top_p < 1:
            scores = self._keep_top(scores)
        probabilities = scores.softmax(-1)
        if self.min_p:
            weak = probabilities < self.min_p * probabilities.amax(-1, keepdim=True)
            probabilities = scores.masked_fill(weak, -math.inf).softmax(-1)
        return probabilities

    def _penalise(self, scores, history):
        import torch

        if history is None or len(history) != len(scores):
            raise ValueError(f"history must hold one sequence of ids for each of the {len(scores)} rows")
        scores = scores.clone()
        for row, before in zip(scores, history, strict=True):
            seen = torch.as_tensor(before, dtype=torch.long, device=scores.device).unique()
            seen = seen[seen < len(row)]  # ids that only the other model of a pair knows
            row[seen] = torch.where(
                row[seen] < 0, row[seen] * self.repetition_penalty, row[seen] / self.repetition_penalty
            )
        return scores

    def _keep_top(self, scores):
        """Top-k, then top-p among what is left: only the kept tokens are sorted, not the whole vocabulary."""
        size = scores.shape[-1]
        if self.top_k and self.top_k < size:
            kth = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < kth, -math.inf)
            if self.top_p < 1:
                size = int((scores >= kth).sum(-1).max())  # ties with the k-th are kept
        if self.top_p < 1:
            values, ids = scores.topk(size, dim=-1)
            tail = values.flip(-1).softmax(-1).cumsum(-1).flip(-1)  # mass of this token and all below it
            drop = tail <= 1 - self.top_p
            drop[:, 0] = False
            scores = scores.scatter(1, ids, values.masked_fill(drop, -math.inf))
        return scores


def _check_finite(top, where, start):
    if not bool(top.isfinite().all()):
        row = int((~top.isfinite()).nonzero()[0, 0])
        raise FloatingPointError(
            f"{where}: the logits at position {start + row} hold NaN, +inf or nothing but -inf (largest: {float(top[row])})"
        )


def draw(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One id from a (V,) law, where the law is; an id of probability 0 never comes out. Nothing is waited for.

    By a float64 uniform and the cumulative sum: with float32 uniforms some tokens of a large vocabulary could never be
    drawn. Where a device has no float64 (MPS), the id whose exponential clock of that rate rings first.

    Args:
        generator: on the CPU, whatever the device: the only source of randomness.

    Returns:
        (), on the device of the law.
    """
    import torch

    if probabilities.device.type == "mps":
        return _first_to_ring(probabilities, generator)
    cumulative = probabilities.to(torch.float64).cumsum(-1)
    uniform = torch.rand((), dtype=torch.float64, generator=generator).to(cumulative.device, non_blocking=True)
    index = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    last = torch.searchsorted(cumulative, cumulative[-1])  # the last id that is possible, if the product is rounded up
    return torch.minimum(index, last).clamp(max=len(cumulative) - 1)  # NaN, found later, is no index


def _first_to_ring(probabilities, generator):
    import torch

    # Drawn in float64: by float32 uniforms one of 150,000 clocks would ring at 0 in every hundredth draw.
    waits = torch.empty(probabilities.shape, dtype=torch.float64).exponential_(generator=generator).float()
    return (waits.to(probabilities.device, non_blocking=True) / probabilities).argmin()
