"""Do two samplers follow the same law? Tests, their calibration and their power; no torch.

Tokens of one answer depend on each other and prompts differ, so a chi-squared over pooled tokens has no known null. It
is here for independent draws, and, for answers, with its own null from :func:`permutation_test`. What stands dependence
by construction reads the columns of ``tokens.csv`` that ``specdec.score`` wrote: :func:`pit` with :func:`uniformity`,
:func:`likelihood_z`, and :func:`tost`, which can *show* equality up to a margin instead of merely not denying it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import special, stats

# Rows of probabilities come as float32: sums and cumulative sums are off by about 1e-6.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class ChiSquared:
    """Pearson's statistic, its degrees of freedom (cells after pooling, less one) and p-value."""

    statistic: float
    dof: int
    pvalue: float


@dataclass(frozen=True)
class Permutation:
    """A statistic beside its own null: ``null`` (B,) are its values under B exchanges of arm labels."""

    statistic: float
    dof: int
    pvalue: float
    null: np.ndarray = field(repr=False, compare=False)


@dataclass(frozen=True)
class Likelihood:
    """Z and its p-value; ``mean`` of log p + H and its ``standard_error`` under the null, nat per token; ``tokens``."""

    statistic: float
    pvalue: float
    mean: float
    standard_error: float
    tokens: int


@dataclass(frozen=True)
class Equivalence:
    """``pvalue`` small: equal up to ``margin`` (nat per token). ``power``: P(declared at ``level`` | no difference)."""

    pvalue: float
    power: float
    mean: float
    standard_error: float
    margin: float
    level: float


def two_sample_chi2(counts_a: ArrayLike, counts_b: ArrayLike, min_expected: float = 5) -> ChiSquared:
    """Pearson's chi-squared of homogeneity, for two samples of independent draws over the same V categories.

    A category is a cell of its own when *both* arms expect at least ``min_expected`` under the pooled proportions; all
    others form one rest cell, which joins the smallest kept cell if it falls short too. No count is dropped.

    Args:
        counts_a, counts_b: (V,) whole numbers.

    Returns:
        ChiSquared; where one cell is left it has statistic 0, dof 0, p 1 (nothing can be said).

    Raises:
        ValueError: shapes or indices differ, an empty sample, counts that are negative, not finite or not whole.
    """
    _same_index(counts_a, counts_b)
    a, b = _counts(counts_a, "counts_a"), _counts(counts_b, "counts_b")
    if a.shape != b.shape:
        raise ValueError(f"counts_a and counts_b must have the same shape, not {a.shape} and {b.shape}")
    pooled = a + b
    cells = _cells(pooled * min(a.sum(), b.sum()) / pooled.sum(), min_expected)
    table = np.stack([np.bincount(cells, a), np.bincount(cells, b)])
    # No continuity correction: scipy would apply it to two cells only, and not to the others.
    statistic, pvalue, dof, _ = stats.chi2_contingency(table, correction=False)
    return ChiSquared(float(statistic), int(dof), float(pvalue))


def one_sample_chi2(counts: ArrayLike, probabilities: ArrayLike, min_expected: float = 5) -> ChiSquared:
    """Pearson's chi-squared of fit, for independent draws from a known law; pooling as in :func:`two_sample_chi2`.

    For a law that was itself estimated from a sample this rejects far too often: take the two-sample form.

    Args:
        counts: (V,) whole numbers.
        probabilities: (V,), sum 1 up to float32 rounding.

    Returns:
        ChiSquared; where one cell is left it has statistic 0, dof 0, p 1. A count where the probability is 0 refutes
        the law: statistic inf, p 0, and the barred categories count as one cell.

    Raises:
        ValueError: shapes or indices differ, an empty sample, bad counts, probabilities that are no law.
    """
    _same_index(counts, probabilities)
    observed, law = _counts(counts, "counts"), np.asarray(probabilities, dtype=float)
    if law.shape != observed.shape:
        raise ValueError(f"counts and probabilities must have the same shape, not {observed.shape} and {law.shape}")
    if not np.isfinite(law).all() or (law < 0).any() or abs(law.sum() - 1) > _ROUNDING:
        raise ValueError(f"probabilities must be finite, >= 0 and sum to 1 (sum: {law.sum():.6g})")
    expected = observed.sum() * law / law.sum()  # chisquare asks for equal sums to 1e-8
    cells = _cells(expected, min_expected)
    dof = int(cells.max())
    if observed[law == 0].any():
        return ChiSquared(np.inf, dof + 1, 0.0)
    if dof == 0:
        return ChiSquared(0.0, 0, 1.0)
    statistic, pvalue = stats.chisquare(np.bincount(cells, observed), np.bincount(cells, expected))
    return ChiSquared(float(statistic), dof, float(pvalue))


def chi2_statistic(counts_a: np.ndarray, counts_b: np.ndarray) -> np.ndarray:
    """Pearson's two-sample statistic of many tables at once: (..., C) and (..., C) counts -> (...,); no pooling.

    The value of ``scipy.stats.chi2_contingency``, which takes one table a call: too slow for a permutation null.
    """
    total_a, total_b = counts_a.sum(-1, keepdims=True), counts_b.sum(-1, keepdims=True)
    difference = counts_a * total_b - counts_b * total_a
    return (difference**2 / (total_a * total_b * (counts_a + counts_b))).sum(-1)


def total_variation(p: ArrayLike, q: ArrayLike) -> np.ndarray | float:
    """Total-variation distance, half the sum of ``|p - q|``: (..., V) and (..., V) -> (...,), in [0, 1].

    Rows are normalised first, so counts serve too. Between two samples it is biased upwards: compare it with the
    distance between two samples of one law.

    Raises:
        ValueError: shapes or indices differ, values that are negative or not finite, or a row that is all 0.
    """
    _same_index(p, q)
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    if p.shape != q.shape or p.ndim == 0:
        raise ValueError(f"p and q must have the same shape (..., V), not {p.shape} and {q.shape}")
    for name, law in (("p", p), ("q", q)):
        if not np.isfinite(law).all() or (law < 0).any() or (law.sum(-1) <= 0).any():
            raise ValueError(f"{name} must be finite and >= 0, with mass in every row")
    return np.abs(p / p.sum(-1, keepdims=True) - q / q.sum(-1, keepdims=True)).sum(-1) / 2


def permutation_test(
    tokens: pd.DataFrame,
    statistic: Callable[[np.ndarray, np.ndarray], np.ndarray] = chi2_statistic,
    permutations: int = 999,
    seed: int = 0,
    min_expected: float = 5,
) -> Permutation:
    """Compare two arms by exchanging whole answers to the same prompt, whatever the dependence inside an answer.

    Under the null the answers to one prompt are exchangeable, so p = (1 + #{null >= observed}) / (1 + B) is valid
    (Phipson and Smyth 2010, doi:10.2202/1544-6115.1585). Wants 5 answers or more per prompt and arm: two answers allow
    only two labellings.

    Args:
        tokens: one row a token; columns ``arm`` (two values), ``prompt``, ``answer`` (a name within arm and prompt),
            ``token`` (id).
        statistic: (B, C) and (B, C) cell counts of the two arms -> (B,), large for unlike arms; e.g. also
            :func:`total_variation`.
        permutations: B.
        seed: of the exchanges.
        min_expected: rare tokens are pooled as in :func:`two_sample_chi2`. The cells come from counts pooled over the
            arms, so they do not move with the labels. Where an arm's share of the tokens is its share of the answers
            (answers of one length), the observed statistic is that of :func:`two_sample_chi2`.

    Returns:
        Permutation; dof is the number of cells less one.

    Raises:
        ValueError: a column is missing or has gaps, not two arms, a prompt with answers of one arm only, B < 1.
    """
    if permutations < 1:
        raise ValueError(f"permutations must be >= 1, not {permutations!r}")
    keys = ["arm", "prompt", "answer"]
    _columns(tokens, *keys, "token")
    row = tokens.groupby(keys, observed=True).ngroup().to_numpy()
    answers = tokens[keys].drop_duplicates().sort_values(keys)  # in the order of ngroup
    arms = answers["arm"].unique()
    if len(arms) != 2:
        raise ValueError(f"tokens must hold two arms, not {len(arms)}: {list(arms)}")
    one_armed = answers.groupby("prompt", observed=True)["arm"].nunique() < 2
    if one_armed.any():
        raise ValueError(f"prompts with answers of one arm only: {list(one_armed.index[one_armed])}")
    in_a = (answers["arm"] == arms[0]).to_numpy()

    ids, _ = pd.factorize(tokens["token"], sort=True)  # sorted: row order must not reach the sums
    # The arms' shares of *answers*, not of tokens: an exchange leaves them alone, and so the cells.
    share = min(in_a.mean(), 1 - in_a.mean())
    cells = _cells(np.bincount(ids) * share, min_expected)
    width = int(cells.max()) + 1
    counts = np.bincount(row * width + cells[ids], minlength=len(answers) * width).reshape(-1, width).astype(float)

    rng = np.random.default_rng(seed)
    labels = np.tile(in_a, (permutations + 1, 1))  # row 0 stays as observed
    for members in answers.reset_index(drop=True).groupby("prompt", observed=True).indices.values():
        labels[1:, members] = rng.permuted(labels[1:, members], axis=1)
    counts_a = labels.astype(float) @ counts
    values = np.asarray(statistic(counts_a, counts.sum(0) - counts_a), dtype=float)
    observed, null = float(values[0]), values[1:]
    # Ties count as "at least as large"; a swap of the arms gives the same value only up to rounding.
    reached = null >= observed - 1e-9 * abs(observed)
    return Permutation(observed, width - 1, (1 + int(reached.sum())) / (1 + permutations), null)


def pit(tokens: pd.DataFrame, seed: int = 0, by: str = "rank") -> np.ndarray:
    """Randomised probability-integral transform: u = F(x-) + V p(x), F the target's conditional CDF at each prefix.

    Under the null u is i.i.d. uniform whatever the dependence between tokens (Rosenblatt 1952,
    doi:10.1214/aoms/1177729394). A subset may be taken only by what is fixed beforehand (position, round), never by
    accepted or rejected.

    Args:
        tokens: columns ``probability`` and ``cdf_rank`` or ``cdf_id`` (mass before the token).
        seed: of the V.
        by: "rank" (tokens in descending probability: the power is here) or "id".

    Returns:
        (n,) in [0, 1].

    Raises:
        ValueError: another ``by``, a column that is missing, not finite or outside [0, 1], no tokens.
    """
    if by not in ("rank", "id"):
        raise ValueError(f"by must be 'rank' or 'id', not {by!r}")
    below, probability = _numbers(tokens, f"cdf_{by}", "probability")
    upper = below + probability
    if below.min() < -_ROUNDING or probability.min() < 0 or upper.max() > 1 + _ROUNDING:
        raise ValueError(f"cdf_{by}, probability and their sum must lie in [0, 1]")
    uniform = np.random.default_rng(seed).random(len(below))
    return np.clip(below + uniform * probability, 0, 1)


def uniformity(u: ArrayLike):
    """Kolmogorov-Smirnov test of (n,) values against the uniform law on [0, 1]; scipy's result, .statistic .pvalue.

    Raises:
        ValueError: not (n,), empty, or values that are not finite.
    """
    u = np.asarray(u, dtype=float)
    if u.ndim != 1 or not u.size or not np.isfinite(u).all():
        raise ValueError(f"u must be (n,) finite values, n > 0, not of shape {u.shape}")
    return stats.kstest(u, "uniform")


def likelihood_z(tokens: pd.DataFrame) -> Likelihood:
    """Are the tokens as likely as the target's own? Z = sum(log p + H) / sqrt(sum Var), two-sided normal p.

    log p(x_t) + H_t has mean 0 and variance Var_t given the prefix, so its sum is a martingale: dependence and answers
    that stop early are allowed (martingale central limit theorem; Hall and Heyde 1980, ch. 3). Blind to faults that
    leave the mean log-likelihood as it is.

    Args:
        tokens: columns ``logp`` (nat), ``entropy`` (nat), ``varentropy`` (nat^2), all of the target's law.

    Returns:
        Likelihood; of nothing but certain tokens (greedy) it has statistic 0, p 1, of a token of probability 0 (logp
        -inf), or one that is not the certain one, statistic infinite, p 0.

    Raises:
        ValueError: a column is missing or not finite (logp may be -inf), a sign is impossible, no tokens.
    """
    mean, standard_error, count = _martingale(tokens)
    if standard_error > 0:
        statistic = mean / standard_error
    else:
        statistic = np.copysign(np.inf, mean) if mean else 0.0
    return Likelihood(float(statistic), float(2 * stats.norm.sf(abs(statistic))), mean, standard_error, count)


def tost(tokens: pd.DataFrame, margin: float, level: float = 0.05) -> Equivalence:
    """Two one-sided tests of ``|mean(log p + H)| < margin`` (Schuirmann 1987, doi:10.1007/BF01068419).

    The standard error is the one of :func:`likelihood_z`. The margin is fixed before the run, and so is N: see
    :func:`tost_power`.

    Args:
        tokens: as for :func:`likelihood_z`.
        margin: nat per token, > 0.
        level: of the declaration, for the power.

    Returns:
        Equivalence; equal up to the margin is declared where pvalue <= level.

    Raises:
        ValueError: as :func:`likelihood_z` and :func:`tost_power`.
    """
    mean, standard_error, _ = _martingale(tokens)
    power = tost_power(margin, standard_error, level)
    gap = margin - abs(mean)  # the nearer bound decides: the larger of the two p-values
    pvalue = stats.norm.sf(gap / standard_error) if standard_error > 0 else float(gap <= 0)
    return Equivalence(float(pvalue), power, mean, standard_error, float(margin), float(level))


def tost_power(margin: float, standard_error: float, level: float = 0.05) -> float:
    """P(:func:`tost` declares equivalence | no difference) = max(0, 2 Phi(margin / SE - z_(1 - level)) - 1).

    80 % at level 5 % asks for a margin of 2.93 standard errors; SE = sqrt(mean varentropy / N) plans N.

    Raises:
        ValueError: margin not > 0 and finite, standard_error negative or not finite, level outside (0, 1/2).
    """
    if not (np.isfinite(margin) and margin > 0):
        raise ValueError(f"margin must be > 0 and finite (nat per token), not {margin!r}")
    if not (np.isfinite(standard_error) and standard_error >= 0):
        raise ValueError(f"standard_error must be >= 0 and finite, not {standard_error!r}")
    if not 0 < level < 0.5:
        raise ValueError(f"level must lie in (0, 1/2), not {level!r}")
    if standard_error == 0:
        return 1.0
    return float(max(0.0, 2 * stats.norm.cdf(margin / standard_error - stats.norm.isf(level)) - 1))


def chi2_reach(dof: int, tokens_a: int, tokens_b: int, level: float = 0.05, power: float = 0.8) -> float:
    """The total variation from which :func:`two_sample_chi2` sees a difference with ``power``, whatever its shape.

    From the noncentral chi-squared law. Two laws at distance d have a noncentrality of at least
    4 d^2 / (1 / tokens_a + 1 / tokens_b), reached where the difference is in proportion to the counts. For independent
    draws, and differences between cells: what lies inside the rest cell is not seen at all. At most 1.

    Raises:
        ValueError: dof < 1 (one cell sees nothing), an empty sample, level or power outside (0, 1), power < level.
    """
    if not (dof >= 1 and tokens_a > 0 and tokens_b > 0):
        raise ValueError(f"dof must be >= 1 and both samples hold tokens, not {dof}, {tokens_a} and {tokens_b}")
    _level_and_power(level, power)
    noncentrality = special.chndtrinc(stats.chi2.isf(level, dof), dof, 1 - power)
    return float(min(1, np.sqrt(noncentrality * (1 / tokens_a + 1 / tokens_b) / 4)))


def mean_reach(standard_error: float, level: float = 0.05, power: float = 0.8) -> float:
    """The shift of the mean of log p + H (nat per token) that :func:`likelihood_z` sees with ``power``: 2.8 SE."""
    _level_and_power(level, power)
    return float((stats.norm.isf(level / 2) + stats.norm.ppf(power)) * standard_error)


def temperature_reach(tokens: pd.DataFrame, level: float = 0.05, power: float = 0.8) -> float:
    """The temperature T < 1, in units of the right one, from which down :func:`likelihood_z` sees with ``power``.

    To first order, drawing at T moves the mean of log p by (1 / T - 1) times the mean varentropy. Of nothing but certain
    tokens 0: no temperature changes them.
    """
    _, standard_error, _ = _martingale(tokens)
    varentropy = tokens["varentropy"].mean()
    return float(1 / (1 + mean_reach(standard_error, level, power) / varentropy)) if varentropy > 0 else 0.0


def holm(pvalues: ArrayLike) -> np.ndarray:
    """Holm's adjusted p-values of one family, (m,) -> (m,) in the given order; <= level rejects (Holm 1979).

    The family is listed before the run. "All lossless" is denied where the smallest adjusted p-value is <= level.

    Raises:
        ValueError: not (m,), or a value outside [0, 1] (a NaN too: a test that could not be done is not a pass).
    """
    p = np.asarray(pvalues, dtype=float)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise ValueError("pvalues must be (m,) and lie in [0, 1]")
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return adjusted


def _cells(expected, min_expected):
    """The cell, 0..C - 1, of each of V categories, given the (V,) counts expected of them."""
    if not (np.isfinite(min_expected) and min_expected >= 0):
        raise ValueError(f"min_expected must be >= 0 and finite, not {min_expected!r}")
    kept = (expected >= min_expected) & (expected > 0)
    if not kept.any():
        return np.zeros(len(expected), dtype=int)
    cells = np.cumsum(kept) - 1
    rest = expected[~kept].sum()
    own_cell = rest > 0 and rest >= min_expected
    cells[~kept] = kept.sum() if own_cell else cells[np.where(kept, expected, np.inf).argmin()]
    return cells


def _counts(counts, name):
    counts = np.asarray(counts, dtype=float)
    if counts.ndim != 1:
        raise ValueError(f"{name} must be (V,), not of shape {counts.shape}")
    if not np.isfinite(counts).all() or (counts < 0).any() or (counts % 1 != 0).any():
        raise ValueError(f"{name} must be finite whole numbers >= 0")
    if counts.sum() == 0:
        raise ValueError(f"{name} is an empty sample")
    return counts


def _same_index(a, b):
    # Two value_counts() are sorted by frequency, each in its own order: as bare arrays they would be compared wrongly.
    if isinstance(a, pd.Series) and isinstance(b, pd.Series) and not a.index.equals(b.index):
        raise ValueError("the two Series have different indices: reindex them to the same categories")


def _level_and_power(level, power):
    if not 0 < level <= power < 1:
        raise ValueError(f"level and power must lie in (0, 1), power no less than level, not {level!r} and {power!r}")


def _columns(tokens, *names):
    missing = [name for name in names if name not in tokens]
    if missing:
        raise ValueError(f"tokens lack the columns {missing}")
    if tokens.empty:
        raise ValueError("tokens is empty")
    gaps = [name for name in names if tokens[name].isna().any()]
    if gaps:
        raise ValueError(f"tokens have gaps (NaN) in the columns {gaps}")


def _numbers(tokens, *names):
    _columns(tokens, *names)
    columns = [tokens[name].to_numpy(dtype=float) for name in names]
    for name, column in zip(names, columns, strict=True):
        if name != "logp" and not np.isfinite(column).all():
            raise ValueError(f"column {name!r} must be finite")
    return columns


def _martingale(tokens):
    """Mean of log p + H, its standard error under the null (nat per token), and the number of tokens."""
    logp, entropy, varentropy = _numbers(tokens, "logp", "entropy", "varentropy")
    if logp.max() > _ROUNDING or entropy.min() < -_ROUNDING or varentropy.min() < -_ROUNDING:
        raise ValueError("logp must be <= 0, entropy and varentropy >= 0")
    variance = max(0.0, varentropy.sum())
    return float((logp + entropy).mean()), float(np.sqrt(variance) / len(logp)), len(logp)
