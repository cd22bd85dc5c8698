"""Every test of the house is itself tested: calibrated under an exact null, able to see a planted difference.

Seeds are 0, 1, 2, ... in the order of the tests; none was chosen by its result.
"""

import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from specdec import equivalence as eq
from specdec.study.toys import heated, scored, sticky, walks, zipf

ONE_PERCENT = range(2, 21)  # rejections in 1000 at 1 %: outside with probability 0.002


def chain(law, answers, length, rng):
    """Tokens (answers, length) of a Markov chain with the (V, V) law, begun in a uniform state, and their prefixes."""
    start = rng.integers(len(law), size=(answers, 1))
    tokens = walks(law, start, length, rng)
    return tokens, np.hstack([start, tokens[:, :-1]])


def records(arm, tokens, prompts):
    """Rows of arm, prompt, answer, token for (answers, length) ids; answers go round the prompts."""
    answers, length = tokens.shape
    answer = np.arange(answers).repeat(length)
    return pd.DataFrame({"arm": arm, "prompt": answer % prompts, "answer": answer // prompts, "token": tokens.ravel()})


def rough_law(size, rng):
    """A (V, V) law whose rows differ, peaked as those of a language model are."""
    return heated(np.exp(2 * rng.normal(size=(size, size))), 1)


# --- chi-squared --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "law", "draws"), [(0, zipf(20), 500), (1, zipf(5000), 2000), (2, np.full(8, 1 / 8), 200)]
)
def test_a33_one_sample_is_calibrated(seed, law, draws):
    samples = np.random.default_rng(seed).multinomial(draws, law, size=1000)
    pvalues = [eq.one_sample_chi2(sample, law).pvalue for sample in samples]
    assert sum(p < 0.01 for p in pvalues) in ONE_PERCENT


@pytest.mark.parametrize(
    ("seed", "law", "draws"), [(3, zipf(20), (500, 500)), (4, zipf(5000), (2000, 2000)), (5, zipf(300), (4000, 500))]
)
def test_a33_two_sample_is_calibrated(seed, law, draws):
    rng = np.random.default_rng(seed)
    pairs = zip(*(rng.multinomial(n, law, size=1000) for n in draws), strict=True)
    pvalues = [eq.two_sample_chi2(a, b).pvalue for a, b in pairs]
    assert sum(p < 0.01 for p in pvalues) in ONE_PERCENT


def test_a33_a_sample_is_no_law():
    """Another sample taken for the law rejects a true null; this is what the two-sample form is for."""
    rng = np.random.default_rng(6)
    a, b = rng.multinomial(2000, zipf(200), size=(2, 200))
    as_law = [eq.one_sample_chi2(x, (y + 1e-9) / (y + 1e-9).sum()).pvalue for x, y in zip(a, b, strict=True)]
    as_sample = [eq.two_sample_chi2(x, y).pvalue for x, y in zip(a, b, strict=True)]
    assert np.mean(np.less(as_law, 0.01)) > 0.3
    assert np.mean(np.less(as_sample, 0.01)) < 0.05


def test_chi2_sees_a_difference():
    rng = np.random.default_rng(7)
    law, other = zipf(50), heated(zipf(50), 0.9)
    a, b = rng.multinomial(5000, other), rng.multinomial(5000, law)
    assert eq.one_sample_chi2(a, law).pvalue < 1e-3
    assert eq.two_sample_chi2(a, b).pvalue < 1e-3


def test_chi2_by_hand():
    # 30 and 20 stay, 3 + 3 = 6 become the rest cell.
    result = eq.one_sample_chi2([33, 18, 2, 3], np.array([30, 20, 3, 3]) / 56)
    assert result.dof == 2
    assert result.statistic == pytest.approx(9 / 30 + 4 / 20 + 1 / 6)
    assert result.pvalue == pytest.approx(stats.chi2.sf(result.statistic, 2))
    # Two by two, without the continuity correction.
    result = eq.two_sample_chi2([30, 10], [20, 20])
    assert result.dof == 1 and result.statistic == pytest.approx(80 * (30 * 20 - 10 * 20) ** 2 / (40 * 40 * 50 * 30))


def test_a33_rare_categories_are_pooled_not_dropped():
    # All of the difference lies in categories that are each too rare: only the rest cell can show it.
    a, b = np.r_[1000, np.ones(60, int), np.zeros(60, int)], np.r_[1060, np.zeros(120, int)]
    result = eq.two_sample_chi2(a, b)
    assert result.dof == 1 and result.pvalue < 1e-6
    assert eq.one_sample_chi2(a, np.r_[1059.9, np.full(120, 0.1 / 120)] / 1060).dof == 0  # the rest joins the kept cell


@pytest.mark.parametrize("min_expected", [0, 1, 5, 50, 1e9])
@pytest.mark.parametrize("seed", [8, 9])
def test_cells_hold_all_mass_and_expect_enough(seed, min_expected):
    expected = np.random.default_rng(seed).multinomial(500, zipf(100)).astype(float)
    cells = eq._cells(expected, min_expected)
    sums = np.bincount(cells, expected)
    assert sums.sum() == 500 and (sums > 0).all()
    assert sums.min() >= min_expected or len(sums) == 1


def test_both_arms_must_expect_enough():
    # The second category: 40 pooled, but the small arm expects 40 / 11 < 5 of them.
    assert eq.two_sample_chi2([60, 40, 900], [6, 0, 94]).dof == 1
    assert eq.two_sample_chi2([60, 40, 900], [60, 40, 900]).dof == 2


def test_one_cell_left_says_nothing():
    nothing = eq.ChiSquared(0.0, 0, 1.0)
    assert eq.two_sample_chi2([3, 0], [0, 3]) == nothing
    assert eq.two_sample_chi2([100], [50]) == nothing
    assert eq.one_sample_chi2([2, 1], [0.5, 0.5]) == nothing
    assert eq.one_sample_chi2([100, 0], [1, 0]) == nothing


def test_an_impossible_token_refutes_the_law():
    result = eq.one_sample_chi2([500, 500, 1], [0.5, 0.5, 0])
    assert result.statistic == np.inf and result.pvalue == 0 and result.dof == 2
    assert eq.one_sample_chi2([1, 1], [1, 0]).pvalue == 0  # also where one cell is left


def test_float32_probabilities_serve():
    law = np.random.default_rng(10).random(50_000).astype(np.float32)
    law /= law.sum()
    assert (
        eq.one_sample_chi2(np.random.default_rng(11).multinomial(10**6, law / law.sum(dtype=float)), law).dof > 10_000
    )


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1, 2], [1, 2, 3], "shape"),
        ([[1, 2]], [[1, 2]], "V"),
        ([1, -2], [1, 2], "counts_a"),
        ([1, 2], [1, np.nan], "counts_b"),
        ([1, 2], [1, np.inf], "counts_b"),
        ([0.5, 0.5], [1, 2], "whole"),
        ([0, 0], [1, 2], "empty"),
        ([], [], "empty"),
        (pd.Series([5, 4], index=[1, 2]), pd.Series([5, 4], index=[2, 1]), "indices"),
    ],
)
def test_two_sample_errors(a, b, message):
    with pytest.raises(ValueError, match=message):
        eq.two_sample_chi2(a, b)


@pytest.mark.parametrize(
    ("counts", "probabilities", "message"),
    [
        ([1, 2], [1.0], "shape"),
        ([1, 2], [0.5, 0.6], "sum"),
        ([1, 2], [50, 60], "sum"),  # another sample given as the law
        ([1, 2], [1.5, -0.5], "probabilities"),
        ([1, 2], [np.nan, 1], "probabilities"),
        ([1, -1], [0.5, 0.5], "counts"),
        ([0, 0], [0.5, 0.5], "empty"),
    ],
)
def test_one_sample_errors(counts, probabilities, message):
    with pytest.raises(ValueError, match=message):
        eq.one_sample_chi2(counts, probabilities)


@pytest.mark.parametrize("bad", [-1, np.nan, np.inf])
def test_min_expected_errors(bad):
    with pytest.raises(ValueError, match="min_expected"):
        eq.two_sample_chi2([5, 5], [5, 5], bad)


def test_chi2_statistic_is_scipys():
    a, b = np.random.default_rng(12).integers(1, 50, size=(2, 7, 9))
    own = eq.chi2_statistic(a.astype(float), b.astype(float))
    assert own == pytest.approx([stats.chi2_contingency([x, y]).statistic for x, y in zip(a, b, strict=True)])


def test_total_variation():
    assert eq.total_variation([0.5, 0.5, 0], [0.5, 0, 0.5]) == 0.5
    assert eq.total_variation([2, 2], [30, 10]) == pytest.approx(0.25)  # counts serve
    assert eq.total_variation([[1, 0], [1, 0]], [[1, 0], [0, 1]]).tolist() == [0, 1]
    for p, q in [([1], [0.5, 0.5]), ([1, -1], [1, 0]), ([0, 0], [1, 0]), ([np.nan, 1], [1, 0]), (1.0, 1.0)]:
        with pytest.raises(ValueError):
            eq.total_variation(p, q)


# --- permutation --------------------------------------------------------------------------------------------------


def two_arms(law_a, law_b, rng, prompts=4, answers=24, length=30):
    arms = [records(arm, chain(law, answers, length, rng)[0], prompts) for arm, law in (("a", law_a), ("b", law_b))]
    return pd.concat(arms, ignore_index=True)


def test_a33_permutation_is_calibrated_where_the_pooled_test_is_not():
    rng, law = np.random.default_rng(13), sticky(12, 0.8)
    permuted, pooled = [], []
    for repeat in range(300):
        tokens = two_arms(law, law, rng)
        result = eq.permutation_test(tokens, permutations=199, seed=repeat)
        permuted.append(result.pvalue)
        pooled.append(stats.chi2.sf(result.statistic, result.dof))
    assert stats.kstest(permuted, "uniform").pvalue > 0.001
    assert np.mean(np.less_equal(permuted, 0.05)) < 0.09  # 0.05 + 3 standard errors
    assert np.mean(np.less_equal(pooled, 0.05)) > 0.5


def test_permutation_sees_a_difference():
    rng, law = np.random.default_rng(14), sticky(12, 0.5)
    tokens = two_arms(law, sticky(12, 0.5)[:, ::-1], rng)
    for statistic in (eq.chi2_statistic, eq.total_variation):
        assert eq.permutation_test(tokens, statistic).pvalue == 0.001


def test_permutation_stays_within_prompts():
    """Prompts with unlike tokens, arms alike within each: an exchange across prompts would give a wider null."""
    tokens = pd.DataFrame(
        [
            (arm, prompt, answer, prompt)
            for arm in "ab"
            for prompt in range(5)
            for answer in range(6)
            for _ in range(10)
        ],
        columns=["arm", "prompt", "answer", "token"],
    )
    result = eq.permutation_test(tokens, permutations=99)
    assert (result.null == 0).all() and result.statistic == 0 and result.pvalue == 1 and result.dof == 4


def test_permutation_statistic_is_the_two_sample_one():
    tokens = two_arms(sticky(40, 0.3), sticky(40, 0.3), np.random.default_rng(15))
    counts = tokens.groupby(["arm", "token"]).size().unstack("token", fill_value=0)
    reference = eq.two_sample_chi2(counts.loc["a"], counts.loc["b"])
    result = eq.permutation_test(tokens, permutations=19)
    assert (result.statistic, result.dof) == (pytest.approx(reference.statistic), reference.dof)


def test_permutation_is_fast_and_reproducible():
    tokens = two_arms(sticky(500, 0.3), sticky(500, 0.3), np.random.default_rng(16), answers=50, length=64)
    start = time.perf_counter()
    first = eq.permutation_test(tokens, seed=0)
    assert time.perf_counter() - start < 2  # 0.05 s on an idle machine
    shuffled = tokens.sample(frac=1, random_state=0)
    assert np.array_equal(eq.permutation_test(shuffled, seed=0).null, first.null)  # the order of rows is no matter
    assert not np.array_equal(eq.permutation_test(tokens, seed=1).null, first.null)
    assert len(first.null) == 999 and first.pvalue >= 0.001


def test_permutation_with_unequal_arms_and_one_cell():
    tokens = records("a", np.array([[1, 1], [1, 2]]), 1)
    tokens = pd.concat([tokens, records("b", np.array([[2, 2, 2], [2, 1, 1], [1, 1, 1]]), 1)])
    result = eq.permutation_test(tokens)
    assert (result.statistic, result.dof, result.pvalue) == (0, 0, 1)
    assert 0 < eq.permutation_test(tokens, min_expected=1).pvalue <= 1


def test_permutation_errors():
    tokens = records("a", np.ones((4, 3), int), 2)
    both = pd.concat([tokens, tokens.assign(arm="b")])
    for bad, message in [
        (tokens, "two arms"),
        (both.drop(columns="answer"), "answer"),
        (both.iloc[:0], "empty"),
        (both.assign(token=np.nan), "gaps"),
        (both[(both["arm"] == "a") | (both["prompt"] == 0)], r"one arm only: \[1\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            eq.permutation_test(bad)
    with pytest.raises(ValueError, match="permutations"):
        eq.permutation_test(both, permutations=0)


# --- uniformity and likelihood ------------------------------------------------------------------------------------


def test_pit_by_hand():
    tokens = pd.DataFrame({"cdf_id": [0.0, 0.9], "cdf_rank": [0.5, 0.0], "probability": [0.25, 0.1]})
    v = np.random.default_rng(0).random(2)
    assert eq.pit(tokens, by="id") == pytest.approx([0.25 * v[0], 0.9 + 0.1 * v[1]])
    assert eq.pit(tokens) == pytest.approx([0.5 + 0.25 * v[0], 0.1 * v[1]])


@pytest.mark.parametrize("seed,stay", [(17, 0.0), (18, 0.9)])
@pytest.mark.parametrize("by", ["rank", "id"])
def test_pit_is_uniform_under_the_null(seed, stay, by):
    rng, law = np.random.default_rng(seed), sticky(12, stay)
    pvalues = [
        eq.uniformity(eq.pit(scored(law, *chain(law, 10, 30, rng)), seed=repeat, by=by)).pvalue for repeat in range(200)
    ]
    assert stats.kstest(pvalues, "uniform").pvalue > 0.001


def test_temperature_is_seen():
    rng = np.random.default_rng(19)
    law = rough_law(30, rng)
    tokens = scored(law, *chain(heated(law, 0.9), 100, 60, rng))
    assert eq.uniformity(eq.pit(tokens)).pvalue < 1e-3
    result = eq.likelihood_z(tokens)
    assert result.pvalue < 1e-3 and result.mean > 0  # colder: likelier tokens than the target's own


def test_pit_errors():
    good = pd.DataFrame({"cdf_rank": [0.5], "cdf_id": [0.5], "probability": [0.5]})
    for bad in (
        good.drop(columns="probability"),
        good.assign(cdf_rank=np.nan),
        good.assign(cdf_rank=0.8),
        good.assign(cdf_rank=-0.1),
        good.assign(probability=-0.1),
        good.iloc[:0],
    ):
        with pytest.raises(ValueError):
            eq.pit(bad)
    with pytest.raises(ValueError, match="by"):
        eq.pit(good, by="logit")
    for bad in ([], [np.nan], [[0.5]]):
        with pytest.raises(ValueError):
            eq.uniformity(bad)


@pytest.mark.parametrize("seed,stay", [(20, 0.0), (21, 0.6)])
def test_likelihood_z_is_standard_normal_under_the_null(seed, stay):
    rng, law = np.random.default_rng(seed), sticky(12, stay)
    results = [eq.likelihood_z(scored(law, *chain(law, 20, 30, rng))) for _ in range(300)]
    z = np.array([result.statistic for result in results])
    assert stats.kstest(z, "norm").pvalue > 0.001
    assert np.mean([result.pvalue < 0.05 for result in results]) < 0.09


def test_likelihood_allows_answers_that_end():
    """An end token that is drawn ends its answer: the number of tokens then depends on the tokens."""
    rng, law = np.random.default_rng(22), sticky(6, 0.3)
    z = []
    for _ in range(300):
        tokens, prefixes = chain(law, 20, 30, rng)
        going = (tokens == 5).cumsum(-1) - (tokens == 5) == 0
        z.append(eq.likelihood_z(scored(law, tokens[going], prefixes[going])).statistic)
    assert stats.kstest(z, "norm").pvalue > 0.001


def test_likelihood_by_hand_and_at_the_edges():
    tokens = pd.DataFrame({"logp": [-1.0, -2.0], "entropy": [1.5, 1.5], "varentropy": [0.5, 1.5]})
    result = eq.likelihood_z(tokens)
    assert (result.mean, result.tokens) == (0.0, 2) and result.standard_error == pytest.approx(np.sqrt(2) / 2)
    result = eq.likelihood_z(tokens.assign(logp=[-1.0, -1.0]))
    assert result.statistic == pytest.approx(1 / np.sqrt(2))
    assert result.pvalue == pytest.approx(2 * stats.norm.sf(1 / np.sqrt(2)))

    certain = pd.DataFrame({"logp": [0.0], "entropy": [0.0], "varentropy": [0.0]})
    assert (eq.likelihood_z(certain).statistic, eq.likelihood_z(certain).pvalue) == (0, 1)
    assert eq.tost(certain, 0.1).pvalue == 0
    impossible = eq.likelihood_z(tokens.assign(logp=[-np.inf, -1.0]))
    assert impossible.statistic == -np.inf and impossible.pvalue == 0
    assert eq.likelihood_z(certain.assign(logp=-np.inf)).pvalue == 0
    assert eq.tost(tokens.assign(logp=[-np.inf, -1.0]), 0.1).pvalue == 1

    for bad in (
        tokens.assign(logp=np.nan),
        tokens.assign(logp=np.inf),
        tokens.assign(logp=0.5),
        tokens.assign(entropy=-1.0),
        tokens.assign(varentropy=-1.0),
        tokens.assign(varentropy=np.inf),
        tokens.drop(columns="entropy"),
        tokens.iloc[:0],
    ):
        with pytest.raises(ValueError):
            eq.likelihood_z(bad)


def test_tost_declares_equivalence_only_where_it_is():
    rng = np.random.default_rng(23)
    law = rough_law(30, rng)
    null = scored(law, *chain(law, 100, 60, rng))
    margin = 6 * eq.likelihood_z(null).standard_error
    result = eq.tost(null, margin)
    assert result.pvalue < 0.05 and result.power > 0.99
    assert eq.tost(scored(law, *chain(heated(law, 0.8), 100, 60, rng)), margin).pvalue > 0.05
    # Too few tokens for the margin: no difference, no declaration, and the power says why.
    few = eq.tost(null.iloc[:60], margin)
    assert few.pvalue > 0.05 and few.power == 0


def test_tost_by_hand():
    tokens = pd.DataFrame({"logp": [-1.0, -1.0], "entropy": [1.2, 1.2], "varentropy": [0.02, 0.02]})  # 0.2 +- 0.1
    result = eq.tost(tokens, 0.5)
    assert result.pvalue == pytest.approx(max(stats.norm.sf(7), stats.norm.sf(3)))
    assert eq.tost(tokens, 0.1).pvalue == pytest.approx(stats.norm.cdf(1))
    assert eq.tost(tokens.assign(logp=-1.4), 0.5).pvalue == pytest.approx(result.pvalue)


def test_tost_power():
    assert eq.tost_power(2.93, 1.0) == pytest.approx(0.80, abs=0.002)
    assert eq.tost_power(1.6, 1.0) == 0 and eq.tost_power(1.0, 0.0) == 1
    rng, law = np.random.default_rng(24), sticky(12, 0.3)
    tests = [eq.tost(scored(law, *chain(law, 20, 30, rng)), 0.1) for _ in range(300)]
    declared = np.mean([test.pvalue <= 0.05 for test in tests])
    power = np.mean([test.power for test in tests])
    assert 0.2 < power < 0.95 and abs(declared - power) < 3.3 * np.sqrt(power * (1 - power) / 300)
    for arguments in [(0, 1), (-1, 1), (np.nan, 1), (np.inf, 1), (1, -1), (1, np.nan), (1, 1, 0.5), (1, 1, 0)]:
        with pytest.raises(ValueError):
            eq.tost_power(*arguments)


def test_a34_holm():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 = 0.02, 0.03, 0.06, 0.04; the last may not be below the third.
    assert eq.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert eq.holm([0.9, 0.8]).tolist() == [1, 1] and eq.holm([]).tolist() == []
    families = np.random.default_rng(25).random((2000, 10))
    assert np.mean([eq.holm(family).min() <= 0.05 for family in families]) < 0.065  # 0.05 + 3 standard errors
    for bad in ([0.5, np.nan], [1.5], [-0.1], [[0.5]]):
        with pytest.raises(ValueError):
            eq.holm(bad)


def test_no_torch():
    code = "import sys, specdec.equivalence, specdec.costmodel; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- reach --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "distance"), [(2_000, 0.117), (5_000, 0.074), (10_000, 0.053), (50_000, 0.0235)])
def test_reach_of_the_two_sample_test(tokens, distance):
    assert eq.chi2_reach(200, tokens, tokens) == pytest.approx(distance, rel=0.01)
    assert eq.chi2_reach(200, tokens, 10**9) == pytest.approx(distance / np.sqrt(2), rel=0.01)


@pytest.mark.parametrize(("seed", "spread"), [(26, True), (27, False)])
def test_what_lies_at_the_reach_is_seen_four_times_in_five(seed, spread):
    """The worst case, a difference in proportion to the counts, has just that power; one in two cells has more."""
    rng, size, draws = np.random.default_rng(seed), 20, 2000
    distance = eq.chi2_reach(size - 1, draws, draws)
    shift = np.full(size, distance / size) if spread else np.r_[np.full(2, distance / 2), np.zeros(size - 2)]
    shift[::2] *= -1
    p, q = 1 / size + shift, 1 / size - shift
    seen = [eq.two_sample_chi2(rng.multinomial(draws, p), rng.multinomial(draws, q)).pvalue < 0.05 for _ in range(400)]
    assert np.abs(np.mean(seen) - 0.8) < 0.08 if spread else np.mean(seen) > 0.95


def test_a_temperature_at_the_reach_is_seen_four_times_in_five():
    rng = np.random.default_rng(28)
    law = rough_law(30, rng)
    temperature = eq.temperature_reach(scored(law, *chain(law, 100, 60, rng)))
    assert 0.9 < temperature < 0.99
    own = heated(law, temperature)
    seen = [eq.likelihood_z(scored(law, *chain(own, 100, 60, rng))).pvalue < 0.05 for _ in range(200)]
    assert 0.68 < np.mean(seen) < 0.92  # four standard errors


def test_reach_by_hand_and_at_the_edges():
    assert eq.mean_reach(0.01) == pytest.approx(0.0280, abs=5e-5)
    assert eq.chi2_reach(200, 20, 20) == 1
    certain = pd.DataFrame({"logp": [0.0], "entropy": [0.0], "varentropy": [0.0]})
    assert eq.temperature_reach(certain) == 0
    for bad in ((0, 10, 10), (5, 0, 10), (5, 10, 10, 0.0), (5, 10, 10, 0.05, 1.0), (5, 10, 10, 0.5, 0.1)):
        with pytest.raises(ValueError):
            eq.chi2_reach(*bad)
    with pytest.raises(ValueError, match="power"):
        eq.mean_reach(1.0, power=2)
