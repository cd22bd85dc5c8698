"""When does speculative decoding pay? Expected tokens, predicted speedup, best K and break-even; no torch.

Time is counted in target passes over one token, t_target(1): a round of K draft tokens costs K c + v(K + 1) + overhead,
with the latency ratio c = t_draft / t_target(1) and the verification cost v(n) = t_target(n) / t_target(1). It emits
1 + sum S_k tokens on average, S_k = P(at least k accepted), exactly and whatever the dependence between positions.
After Leviathan et al., arXiv:2211.17192, theorem 3.8, without its assumptions of i.i.d. acceptance and v = 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq


def expected_tokens(survival: ArrayLike) -> float:
    """Tokens per target pass, 1 + sum S_k, of a round that the end of the answer does not cut.

    Args:
        survival: (K,), S_1..S_K; K = 0 gives 1.

    Raises:
        ValueError: not (K,), outside [0, 1], or increasing.
    """
    return float(1 + _survival(survival).sum())


def closed_form(a: float, k: int) -> float:
    """Tokens per target pass if every draft token were accepted with the same probability, independently.

    (1 - a^(k+1)) / (1 - a), and k + 1 at a = 1 (arXiv:2211.17192, eq. 1). It depends on the estimator taken for a.

    Raises:
        ValueError: a outside [0, 1], or k not a whole number >= 0.
    """
    if not 0 <= a <= 1:
        raise ValueError(f"a must lie in [0, 1], not {a!r}")
    if k < 0 or k != int(k):
        raise ValueError(f"k must be a whole number >= 0, not {k!r}")
    return float((float(a) ** np.arange(int(k) + 1)).sum())  # the geometric series itself needs no case for a = 1


def round_cost(k: int, c: float, v: float, overhead: float = 0.0) -> float:
    """What a round of K = k costs, in target passes of one token: k c + v(k + 1) + overhead.

    Raises:
        ValueError: a cost that is negative or not finite.
    """
    return k * _cost(c, "c") + _cost(v, "v") + _cost(overhead, "overhead")


def speedup(survival: ArrayLike, c: float, v: float, overhead: float = 0.0) -> float:
    """Predicted speedup over target-only decoding at K = len(survival): (1 + sum S_k) / (K c + v + overhead).

    Args:
        survival: (K,), S_1..S_K.
        c: latency ratio.
        v: v(K + 1), a number.
        overhead: per round, in t_target(1).

    Raises:
        ValueError: bad survival, a cost that is negative or not finite, or a round that costs nothing.
    """
    survival = _survival(survival)
    cost = round_cost(len(survival), c, v, overhead)
    if cost == 0:
        raise ValueError("a round that costs nothing has no speedup: c, v and overhead are all 0")
    return expected_tokens(survival) / cost


def best_k(survival: ArrayLike, c: float, v_by_n: Mapping[int, float], overhead: float = 0.0) -> tuple[int, float]:
    """The draft length with the largest predicted speedup, and that speedup; K = 0 (do not draft) has 1.0.

    Of equal speedups the smallest K is taken. S_k must hold for every K <= Kmax, as it does for a fixed-K draft. The
    largest of several estimates flatters itself: choose K on one prompt set, report on another.

    Args:
        survival: (Kmax,), the longest known S_1..S_Kmax.
        c, overhead: as for :func:`speedup`.
        v_by_n: n -> v(n), linear between the measured n; these must reach from 2 or less to Kmax + 1.

    Raises:
        ValueError: as :func:`speedup`; or v is not measured as far as needed: it is never extrapolated.
    """
    survival = _survival(survival)
    best = (0, 1.0)
    if not len(survival):
        return best
    measured = sorted(v_by_n)
    if not measured or measured[0] > 2 or measured[-1] < len(survival) + 1:
        raise ValueError(f"v must be measured from n <= 2 to n >= {len(survival) + 1}, not only at {measured}")
    for k, v in enumerate(_v(v_by_n, np.arange(2, len(survival) + 2)), start=1):
        predicted = speedup(survival[:k], c, v, overhead)
        if predicted > best[1]:
            best = (k, predicted)
    return best


@dataclass(frozen=True)
class Costs:
    """What a round costs, in target passes of one token: latency ratio c, verification cost v by n, overhead o."""

    c: float
    v: Mapping[int, float]
    overhead: float = 0.0


@dataclass(frozen=True)
class AdaptiveK:
    """A draft length that follows acceptance: long where drafts are kept, short or none where not.

    Before a round the K with the largest predicted speedup is taken, for S_k = a^k with a the running acceptance of this
    answer (:meth:`choose`). Where that is not 0, a draft that tells how confident it is goes on token by token until no
    longer draft would pay (:meth:`enough`); to stop where the draft is in doubt is after Zhang et al., arXiv:2411.18462.
    Nothing is lost: whether to go on is decided by laws and tokens that are known before the next token is drawn, and each
    token, once drawn, is verified. Costs are given, never read from a clock: the same seed gives the same tokens.

    What is known of an answer so far, ``running``, is (tested, accepted, doubt): draft tokens that the target looked at,
    those it kept, and the sum of -ln confidence over those it looked at, weighted by age.

    Args:
        costs: measured on the machine at hand; v as for :func:`best_k`.
        k_max: the longest draft, >= 1.

    Raises:
        TypeError: costs are not :class:`Costs`.
        ValueError: costs do not reach ``k_max``, or ``k_max`` is not an int >= 1.
    """

    costs: Costs
    k_max: int

    # Each round weighs that much less than the one after it: text changes, and where nothing was drafted for a while
    # the estimate goes back to ``unknown``, so that drafting is tried again.
    memory: ClassVar[float] = 0.9
    # An answer starts as if six had been tested: a draft that is too short loses more where drafts are good than one that
    # is too long loses where they are not, so the first guess is good and yields slowly. A confidence is a chance at first.
    start: ClassVar[tuple[float, float, float]] = (6.0, 4.8, -6 * math.log(0.8))
    unknown: ClassVar[tuple[float, float, float]] = (0.5, 0.4, -0.5 * math.log(0.8))

    def __post_init__(self):
        if not isinstance(self.costs, Costs):
            raise TypeError(f"costs must be specdec.costmodel.Costs, not {self.costs!r}")
        if isinstance(self.k_max, bool) or not isinstance(self.k_max, Integral) or self.k_max < 1:
            raise ValueError(f"k_max must be an int >= 1, not {self.k_max!r}")
        self.choose(self.start)

    def choose(self, running: tuple[float, float, float]) -> tuple[int, float]:
        """K for the next round, 0..k_max, and the speedup predicted for it; (0, 1.0): no draft pays."""
        survival = self._acceptance(running) ** np.arange(1, self.k_max + 1)
        return best_k(survival, self.costs.c, self.costs.v, self.costs.overhead)

    def enough(self, running: tuple[float, float, float], speedup: float, confidences: Sequence[float]) -> bool:
        """Whether this round's draft, whose tokens have such ``confidences``, is long enough.

        A token that is not drawn yet has the running acceptance a for its chance to be kept; one that is drawn has the
        more, the less it is in doubt: a^(doubt / mean doubt), doubt = -ln confidence. So a draft that is surer, or less
        sure, than it should be is seen through, and one that is always equally sure is stopped at the K of :meth:`choose`.
        Going on pays where the tokens that it is expected to add outweigh its cost, at the ``speedup`` that
        :meth:`choose` predicts for this round.
        """
        a, drawn = self._acceptance(running), len(confidences)
        mean_doubt = (running[2] + self.unknown[2]) / (running[0] + self.unknown[0])
        kept = a ** (-np.log(confidences).sum() / mean_doubt)
        more = np.arange(1, self.k_max - drawn + 1)
        v = _v(self.costs.v, drawn + 1 + np.append(0, more))
        added = kept * (a**more).cumsum()
        return not (added > speedup * (more * self.costs.c + v[1:] - v[0])).any()

    def after(
        self, running: tuple[float, float, float], confidences: Sequence[float], kept: int
    ) -> tuple[float, float, float]:
        """``running`` after one more round, which kept the first ``kept`` of its tokens; the next one was tested too.

        ``confidences``: of all its tokens; 1 for each token of a draft that does not tell.
        """
        tested = confidences[: kept + 1]
        new = len(tested), kept, -sum(map(math.log, tested))
        return tuple(self.memory * before + one for before, one in zip(running, new, strict=True))

    def _acceptance(self, running):
        return (running[1] + self.unknown[1]) / (running[0] + self.unknown[0])


def break_even_c(tokens: float, k: int, v: float, overhead: float = 0.0) -> float:
    """The latency ratio c at which the speedup is 1, if a round of K = k gives so many ``tokens``: (tokens - v - overhead) / k.

    A draft pays below it. Where it is <= 0 no draft pays, however fast.

    Raises:
        ValueError: tokens not in 1..k + 1, k < 1, or a cost that is negative or not finite.
    """
    _check_length(k)
    if not 1 <= tokens <= k + 1:
        raise ValueError(f"a round of K = {k} gives 1 to {k + 1} tokens, not {tokens!r}")
    return (tokens - _cost(v, "v") - _cost(overhead, "overhead")) / k


def break_even_acceptance(k: int, c: float, v: float, overhead: float = 0.0) -> float:
    """The acceptance a at which the speedup is 1 at K = k, if every draft token were kept with the same probability.

    Solves :func:`closed_form` (a, k) = k c + v + overhead. A draft pays above it; ``inf`` where a round costs more than
    the k + 1 tokens that it can give at most: no draft pays, however good.

    Raises:
        ValueError: k < 1, or a cost that is negative or not finite.
    """
    _check_length(k)
    cost = round_cost(k, c, v, overhead)
    if cost > k + 1:
        return float("inf")
    if cost <= 1:
        return 0.0
    return float(brentq(lambda a: closed_form(a, k) - cost, 0, 1))


def _check_length(k):
    if k < 1 or k != int(k):
        raise ValueError(f"k must be a whole number >= 1, not {k!r}")


def _survival(survival):
    survival = np.asarray(survival, dtype=float)
    if survival.ndim != 1:
        raise ValueError(f"survival must be (K,), not of shape {survival.shape}")
    if not ((survival >= 0) & (survival <= 1)).all():  # NaN too
        raise ValueError("survival must lie in [0, 1]")
    if (np.diff(survival) > 1e-12).any():
        raise ValueError("survival must not increase: S_k counts rounds with at least k accepted (these may be a_k)")
    return survival


def _v(v_by_n, n):
    """v at each n, linear between those measured."""
    measured = sorted(v_by_n)
    return np.interp(n, measured, [_cost(v_by_n[m], f"v({m})") for m in measured])


def _cost(value, name):
    value = float(value)
    if not (np.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be >= 0 and finite, not {value!r}")
    return value
