"""The cost model against enumeration and hand-worked numbers."""

import math
from itertools import product

import numpy as np
import pytest

from specdec import costmodel as cm


def enumerate_tokens(law):
    """E[tokens a round] from a joint law of K accept flags {(0 or 1, ...): probability}, counted outcome by outcome."""
    return sum(probability * (1 + int(np.cumprod(flags).sum())) for flags, probability in law.items())


def independent(chances):
    return {
        flags: float(np.prod([a if flag else 1 - a for a, flag in zip(chances, flags, strict=True)]))
        for flags in product((0, 1), repeat=len(chances))
    }


@pytest.mark.parametrize("a", [0.0, 0.3, 0.8, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("k", [0, 1, 2, 6])
def test_closed_form_is_the_enumeration(a, k):
    assert cm.closed_form(a, k) == pytest.approx(enumerate_tokens(independent([a] * k)))
    assert cm.closed_form(a, k) == pytest.approx(cm.expected_tokens(a ** np.arange(1, k + 1)))
    if a < 0.9:
        assert cm.closed_form(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))


def test_closed_form_limit():
    assert cm.closed_form(1, 6) == 7 and cm.closed_form(0, 6) == 1 and cm.closed_form(0.7, 0) == 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_expected_tokens_hold_under_any_dependence(seed):
    weights = np.random.default_rng(seed).dirichlet(np.full(16, 0.3))
    law = dict(zip(product((0, 1), repeat=4), weights, strict=True))
    survival = [sum(w for flags, w in law.items() if all(flags[:k])) for k in range(1, 5)]
    assert cm.expected_tokens(survival) == pytest.approx(enumerate_tokens(law))
    tokens, cost = enumerate_tokens(law), 4 * 0.2 + 1.3 + 0.05
    assert cm.speedup(survival, c=0.2, v=1.3, overhead=0.05) == pytest.approx(tokens / cost)


def test_heterogeneous_rounds_break_the_closed_form():
    """Half of the rounds accept with 0.9, half with 0.3: a = tested acceptance is not enough, S_k is."""
    laws = [independent([0.9] * 4), independent([0.3] * 4)]
    mixed = {flags: (laws[0][flags] + laws[1][flags]) / 2 for flags in laws[0]}
    survival = [(0.9**k + 0.3**k) / 2 for k in range(1, 5)]
    assert cm.expected_tokens(survival) == pytest.approx(enumerate_tokens(mixed))
    tested = sum([1, *survival[:-1]])  # mean number of tested tokens, position by position
    assert cm.closed_form(sum(survival) / tested, 4) > 1.03 * cm.expected_tokens(survival)


def test_speedup_by_hand():
    assert cm.speedup([], c=0.5, v=1) == 1  # K = 0 is target-only decoding
    assert cm.speedup([0.5], c=0.25, v=1.25) == 1
    assert cm.speedup(np.array([0.8, 0.6]), 0.1, 1.2, overhead=0.2) == pytest.approx(2.4 / 1.6)
    assert cm.speedup([1.0] * 3, c=0, v=1) == 4
    assert isinstance(cm.speedup([0.5], 0.25, np.float32(1.25)), float)


def test_best_k():
    survival = [0.7, 0.5, 0.35, 0.25, 0.18]
    v = {1: 1.0, 2: 1.1, 4: 1.3, 9: 1.8}
    by_hand = [cm.speedup(survival[:k], 0.1, at, 0.02) for k, at in enumerate([1.1, 1.2, 1.3, 1.4, 1.5], start=1)]
    k, predicted = cm.best_k(survival, 0.1, v, overhead=0.02)
    assert (k, predicted) == (1 + int(np.argmax(by_hand)), pytest.approx(max(by_hand)))
    assert 1 < k < 5  # neither end: the search is put to use
    # A verification that is serial, or a draft as slow as its target: do not draft.
    assert cm.best_k(survival, 0.1, {n: float(n) for n in range(1, 7)}) == (0, 1.0)
    assert cm.best_k(survival, 1.0, v) == (0, 1.0)
    assert cm.best_k([], 0.1, {}) == (0, 1.0)
    assert cm.best_k([1.0], 0.5, {2: 1.5}) == (0, 1.0)  # a tie: the smaller K


def test_break_even():
    survival = [0.7, 0.5, 0.35]
    c = cm.break_even_c(cm.expected_tokens(survival), 3, v=1.3, overhead=0.05)
    assert c == pytest.approx((2.55 - 1.35) / 3)
    assert cm.speedup(survival, c, 1.3, 0.05) == pytest.approx(1)
    assert cm.break_even_c(1.1, 1, v=2) < 0  # no draft is fast enough


@pytest.mark.parametrize(("k", "c", "v"), [(1, 0.3, 1.1), (4, 0.2, 1.0), (6, 0.1, 2.5)])
def test_break_even_acceptance(k, c, v):
    a = cm.break_even_acceptance(k, c, v, overhead=0.05)
    assert 0 < a < 1 and cm.speedup(a ** np.arange(1, k + 1), c, v, 0.05) == pytest.approx(1)


def test_break_even_acceptance_at_its_ends():
    assert cm.break_even_acceptance(4, 0, 0.9) == 0  # a round as cheap as a pass pays whatever it keeps
    assert cm.break_even_acceptance(4, 0, 1) == 0
    assert cm.break_even_acceptance(4, 0.5, 3) == pytest.approx(1)  # only if everything is kept
    assert cm.break_even_acceptance(4, 0.5, 3.01) == np.inf
    for k in (0, 1.5):
        with pytest.raises(ValueError, match="k must be"):
            cm.break_even_acceptance(k, 0.1, 1)


@pytest.mark.parametrize("bad", [[0.5, 0.6], [1.1], [-0.1], [np.nan], [[0.5]], 0.5])
def test_bad_survival(bad):
    for call in (
        lambda: cm.expected_tokens(bad),
        lambda: cm.speedup(bad, 0.1, 1.1),
        lambda: cm.best_k(bad, 0.1, {1: 1, 9: 2}),
    ):
        with pytest.raises(ValueError, match="survival"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cm.speedup([0.5], -0.1, 1), "c must"),
        (lambda: cm.speedup([0.5], np.nan, 1), "c must"),
        (lambda: cm.speedup([0.5], 0.1, -1), "v must"),
        (lambda: cm.speedup([0.5], 0.1, np.inf), "v must"),
        (lambda: cm.speedup([0.5], 0.1, 1, -0.1), "overhead"),
        (lambda: cm.speedup([0.5], 0, 0), "costs nothing"),
        (lambda: cm.best_k([0.5, 0.4], 0.1, {1: 1.0, 2: 1.1}), "measured"),  # never extrapolated
        (lambda: cm.best_k([0.5], 0.1, {3: 1.1, 5: 1.2}), "measured"),
        (lambda: cm.best_k([0.5], 0.1, {}), "measured"),
        (lambda: cm.best_k([0.5], 0.1, {1: 1.0, 2: np.nan}), r"v\(2\)"),
        (lambda: cm.best_k([0.5], -0.1, {1: 1.0, 2: 1.1}), "c must"),
        (lambda: cm.break_even_c(1, 0, 1), "k must"),
        (lambda: cm.break_even_c(3.5, 2, 1), "1 to 3 tokens"),
        (lambda: cm.break_even_c(np.nan, 2, 1), "1 to 3 tokens"),
        (lambda: cm.break_even_c(1.5, 1, -1), "v must"),
        (lambda: cm.closed_form(1.1, 2), "a must"),
        (lambda: cm.closed_form(np.nan, 2), "a must"),
        (lambda: cm.closed_form(0.5, -1), "k must"),
        (lambda: cm.closed_form(0.5, 1.5), "k must"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


COSTS = cm.Costs(c=0.3, v={1: 1.0, 2: 1.02, 9: 1.2}, overhead=0.02)


def test_adaptive_k_follows_acceptance():
    chooser = cm.AdaptiveK(COSTS, 8)
    lengths = [chooser.choose((10.0, 10.0 * rate, 10.0))[0] for rate in (0, 0.25, 0.5, 0.75, 0.9, 1)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] == 8
    assert chooser.choose((0.0, 0.0, 0.0))[0] > 0  # what has not been tried is tried
    slow = cm.AdaptiveK(cm.Costs(c=1.2, v={1: 1.0, 9: 9.0}), 8)
    assert slow.choose((100.0, 100.0, 100.0))[0] == 0  # no acceptance pays for such costs


def drafted(chooser, running, confidences):
    """How many tokens of such confidences are drawn."""
    speedup, longest = chooser.choose(running)[1], len(confidences)
    return next((n for n in range(1, longest) if chooser.enough(running, speedup, confidences[:n])), longest)


def test_adaptive_k_stops_where_the_draft_is_in_doubt():
    chooser = cm.AdaptiveK(COSTS, 8)
    lengths = [drafted(chooser, chooser.start, [0.99, 0.99, doubt] + [0.99] * 5) for doubt in (0.05, 0.4, 0.99)]
    assert lengths == [3, 3, 8]


@pytest.mark.parametrize("confidence", [0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9, 0.97])
def test_adaptive_k_of_a_draft_that_is_always_equally_sure(rate, confidence):
    """Too sure or too little: going on token by token ends at the K that is best beforehand."""
    running = (1000.0, 1000 * rate, -1000 * math.log(confidence))
    for v in ({1: 1.0, 9: 1.4}, {1: 1.0, 4: 1.1, 5: 1.5, 8: 1.6, 9: 2.0}, {1: 1.0, 9: 3.0}):
        chooser = cm.AdaptiveK(cm.Costs(c=0.1, v=v), 8)
        length = chooser.choose(running)[0]
        if length and confidence < 1:
            assert drafted(chooser, running, [confidence] * 8) == length
        assert np.isfinite(chooser.after(running, [confidence] * 8, 3)).all()


def test_adaptive_k_goes_over_a_step_that_pays_later():
    """A pass over two to four tokens costs the same: having paid for two, the draft goes on to use the rest."""
    chooser = cm.AdaptiveK(cm.Costs(c=0.02, v={1: 1.0, 2: 1.8, 4: 1.8, 5: 2.6, 8: 2.6}), 7)
    assert drafted(chooser, (1000.0, 700.0, -1000 * math.log(0.7)), [0.7] * 7) == 3
    assert drafted(chooser, (1000.0, 950.0, -1000 * math.log(0.95)), [0.95] * 7) == 7


def test_adaptive_k_counts_what_was_tested():
    """A rejected token was tested, those behind it were not; and what was counted before weighs a tenth less."""
    chooser, e = cm.AdaptiveK(COSTS, 8), math.exp(-1)
    assert chooser.after((0.0, 0.0, 0.0), [e, e**2, e**4, 0.9], kept=2) == pytest.approx((3, 2, 7))
    assert chooser.after((3.0, 2.0, 1.0), [e] * 4, kept=4) == pytest.approx((6.7, 5.8, 4.9))
    assert chooser.after((10.0, 8.0, 9.0), [], kept=0) == pytest.approx((9, 7.2, 8.1))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0.3, 4), TypeError),
        ((COSTS, 0), ValueError),
        ((COSTS, 2.0), ValueError),
        ((COSTS, True), ValueError),
        ((COSTS, 9), ValueError),  # v(10) was not measured
        ((cm.Costs(c=float("nan"), v={1: 1.0, 9: 1.0}), 4), ValueError),
    ],
)
def test_adaptive_k_refuses(arguments, error):
    with pytest.raises(error):
        cm.AdaptiveK(*arguments)
