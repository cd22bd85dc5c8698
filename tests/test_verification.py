"""Nothing is lost: the exact law of verification by enumeration, both rules, and draws that follow it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import exact, rows

from specdec.equivalence import one_sample_chi2
from specdec.verification import RULES, acceptance, law, residual, verify

SIZES = st.tuples(st.integers(2, 4), st.integers(0, 4)).filter(lambda s: s[0] ** s[1] <= 100)  # V, K; 4 and 4 below


def disjoint(size, count):
    """p lives on the lower half of the ids, q on the upper."""
    upper = torch.arange(size) >= size // 2
    p, q = rows(0, size, count + 1), rows(1, size, count)
    p, q = [r * ~upper for r in p], [r * upper for r in q]
    return [[r / r.sum(-1, keepdim=True) for r in side] for side in (p, q)]


def some(rng, size):
    """(V,) bool, neither all nor none."""
    return rng.permutation(size) < rng.integers(1, size)


def tiny(rng, row):
    """``row`` with some ids made next to impossible, as far down as numbers go."""
    return np.where(some(rng, len(row)), row * 10.0 ** -rng.uniform(15, 320, len(row)), row)


# How a row of q may lie to that of p: (rng, p, q) -> (p, q), not normalised.
KINDS = {
    "any": lambda rng, p, q: (p, q),
    "zeros": lambda rng, p, q: (p * some(rng, len(p)), q * some(rng, len(p))),
    "near": lambda rng, p, q: (p, p * (1 + 1e-7 * rng.normal(size=len(p)))),
    "ulp": lambda rng, p, q: (p, np.nextafter(p, rng.integers(2, size=len(p)))),
    "equal": lambda rng, p, q: (p, p),
    "disjoint": lambda rng, p, q: (lambda here: (p * here, q * ~here))(some(rng, len(p))),
    "one-hot p": lambda rng, p, q: (np.eye(len(p))[rng.integers(len(p))], q),
    "one-hot q": lambda rng, p, q: (p, np.eye(len(p))[rng.integers(len(p))]),
    "tiny": lambda rng, p, q: (tiny(rng, p), tiny(rng, q)),
}
kinds = st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3, unique=True)


def pair(seed, size, count, names):
    """K + 1 tables of p and K of q: each row of q lies to its row of p in one of the ways of ``names``."""
    rng = np.random.default_rng(seed)
    p, q = rows(seed, size, count + 1), rows(seed + 1, size, count)
    for i in range(count):
        for prefix in np.ndindex(p[i].shape[:-1]):
            both = KINDS[rng.choice(names)](rng, p[i][prefix].numpy(), q[i][prefix].numpy())
            p[i][prefix], q[i][prefix] = (torch.as_tensor(row / row.sum()) for row in both)
    return p, q


def checked(p, q, drafted, rule):
    """``law``, whose answer is looked at."""
    stop, following = law(p, q, drafted, rule)
    assert (stop >= 0).all() and abs(float(stop.sum()) - 1) < 1e-12
    assert (following >= 0).all() and ((following.sum(-1) - 1).abs() < 1e-12).all()
    assert not following[p == 0].any() and torch.equal(following[-1], p[-1])
    # Where nothing is left p stands in: there p and q are alike up to rounding, or no path leads there.
    barred, apart = (following[:-1] * (p[:-1] <= q)).sum(-1), (p[:-1] - q).abs().sum(-1)
    assert not barred[(apart > 1e-12) & (stop[:-1] > 1e-12)].any()
    return stop, following


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=150)
@given(sizes=SIZES, seed=st.integers(0, 2**32 - 2), names=kinds)
def test_the_joint_law_is_the_targets(rule, sizes, seed, names):
    error, kept = exact(checked, *pair(seed, *sizes, names), rule)
    assert error < 1e-12 and 0 <= kept <= sizes[1] + 1e-12


@settings(deadline=None, max_examples=100)
@given(size=st.integers(2, 40), count=st.integers(1, 8), seed=st.integers(0, 2**32 - 2), names=kinds)
def test_one_draft_of_any_size_gives_laws(size, count, seed, names):
    """Longer drafts over more ids than can be enumerated, each drawn from its q."""
    rng = np.random.default_rng(seed)
    both = [KINDS[rng.choice(names)](rng, *rng.exponential(size=(2, size))) for _ in range(count)]
    p, q = (torch.as_tensor(np.stack([row / row.sum() for row in side])) for side in zip(*both, strict=True))
    drafted = torch.tensor([rng.choice(size, p=row) for row in q.numpy()])
    p = torch.cat([p, p[:1]])
    for rule in RULES:
        checked(p, q, drafted, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("zeros", [0, 0.5])
def test_the_joint_law_is_the_targets_at_full_size(rule, zeros):
    error, _ = exact(law, rows(0, 4, 5, zeros), rows(1, 4, 4, zeros), rule)
    assert error < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_equal_laws_keep_everything_and_disjoint_ones_nothing(rule, size, count):
    p = rows(size, size, count + 1, zeros=0.3)
    error, kept = exact(law, p, p[:-1], rule)
    assert error < 1e-12 and kept == pytest.approx(count, abs=1e-12)
    error, kept = exact(law, *disjoint(size, count), rule)
    assert error < 1e-12 and kept == 0


@pytest.mark.parametrize("rule", RULES)
def test_one_hot_drafts_are_exact(rule):
    """Prompt lookup and temperature 0: all of q on one id, there being nothing else."""
    p = rows(0, 3, 4)
    q = [torch.nn.functional.one_hot(r.argmin(-1), 3).double() for r in p[:-1]]
    error, kept = exact(law, p, q, rule)
    assert error < 1e-12 and 0 < kept < 3
    target = [torch.nn.functional.one_hot(r.argmax(-1), 3).double() for r in p]
    assert exact(law, target, rows(1, 3, 3), rule)[0] < 1e-12
    assert exact(law, target, q, rule)[0] < 1e-12


@settings(deadline=None, max_examples=100)
@given(sizes=SIZES, seed=st.integers(0, 2**32 - 2), names=kinds)
def test_the_block_rule_never_keeps_fewer(sizes, seed, names):
    p, q = pair(seed, *sizes, names)
    assert exact(law, p, q, "block")[1] >= exact(law, p, q, "token")[1] - 1e-12


def test_the_block_rule_can_keep_more():
    p, q = rows(0, 3, 4), rows(1, 3, 3)
    assert exact(law, p, q, "block")[1] > exact(law, p, q, "token")[1] + 0.01


def test_the_published_example_of_the_block_rule():
    """The motivating example of Sun et al., arXiv:2403.10444: p = (1/3, 2/3), q = (2/3, 1/3), K = 2: 10/9 tokens kept against 11/9."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    tables = [p, p.expand(2, 2), p.expand(2, 2, 2)], [q, q.expand(2, 2)]
    assert exact(law, *tables, "token")[1] == pytest.approx(10 / 9)
    assert exact(law, *tables, "block")[1] == pytest.approx(11 / 9)


def test_acceptance_is_the_capped_ratio():
    p = torch.tensor([[0.5, 0.5], [0.1, 0.9], [1, 0]], dtype=torch.float64)
    q = torch.tensor([[0.8, 0.2], [0.1, 0.9]], dtype=torch.float64)
    for drafted, expected in [((0, 1), (0.625, 1)), ((1, 0), (1, 1))]:
        assert acceptance(p, q, torch.tensor(drafted)).tolist() == pytest.approx(list(expected))


def test_a08_a_rejection_gives_only_ids_with_more_p_than_q():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25] * 4])
    q = torch.tensor([[0.1, 0.3, 0.25, 0.35]])
    assert residual(p[0], q[0]).tolist() == [1, 0, 0, 0]
    generator = torch.Generator().manual_seed(0)
    outcomes = [verify(p, q, torch.tensor([3]), generator) for _ in range(1000)]
    replaced = [token for accepted, token in outcomes if accepted == 0]
    assert 600 < len(replaced) < 830 and set(replaced) == {0}  # rejected with 1 - 0.1 / 0.35


@pytest.mark.parametrize("rule", RULES)
def test_a09_an_empty_residual_is_p(rule):
    weights = np.random.default_rng(0).normal(size=151_936)
    p = torch.as_tensor(weights, dtype=torch.float64).softmax(0).float()
    q = p * (1 + 1e-7)
    assert (p / q < 1).all() and (p - q).clamp(min=0).sum() == 0  # a rejection that leaves nothing can be reached
    drafted = torch.tensor([int(p.argmax())])
    assert torch.equal(residual(p, q), p)
    stop, following = law(torch.stack([p, p]), q[None], drafted, rule)
    assert stop[0] < 1e-6 and stop.isfinite().all() and following.isfinite().all()
    torch.testing.assert_close(following.double().sum(-1), torch.ones(2, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        accepted, token = verify(torch.stack([p, p]), q[None], drafted, generator, rule)
        assert accepted == 1 and 0 <= token < len(p)


@pytest.mark.parametrize("rule", RULES)
def test_an_id_that_q_cannot_give_is_refused(rule):
    p, q = torch.full((3, 4), 0.25), torch.tensor([[0.25] * 4, [0.5, 0, 0.5, 0]])
    for call in (law, lambda *given: verify(*given[:3], torch.Generator(), given[3])):
        with pytest.raises(ValueError, match="token 3 at position 1"):
            call(p, q, torch.tensor([0, 3]), rule)
    with pytest.raises(ValueError, match="token 3 at position 1"):
        acceptance(p, q, torch.tensor([0, 3]))


@pytest.mark.parametrize("rule", RULES)
def test_nothing_drafted(rule):
    p = torch.tensor([[0.0, 1, 0]])
    nothing = torch.empty(0, 3), torch.empty(0, dtype=torch.long)
    stop, following = law(p, *nothing, rule)
    assert stop.tolist() == [1] and torch.equal(following, p)
    assert verify(p, *nothing, torch.Generator(), rule) == (0, 1)


def test_shapes_and_rules_that_do_not_fit():
    p, q, drafted = torch.full((3, 4), 0.25), torch.full((2, 4), 0.25), torch.tensor([0, 1])
    for bad in [
        (p[:2], q, drafted),
        (p, q[:1], drafted),
        (p, q, drafted[:1]),
        (p[:, :3], q, drafted),
        (p[0], q, drafted),
    ]:
        with pytest.raises(ValueError, match=r"K \+ 1, V"):
            law(*bad)
    with pytest.raises(ValueError, match="token.*block"):
        law(p, q, drafted, "typical")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_are_kept(rule, dtype):
    p, q = torch.full((3, 4), 0.25, dtype=dtype), torch.full((2, 4), 0.25, dtype=dtype)
    drafted = torch.tensor([0, 1])
    results = [*law(p, q, drafted, rule), acceptance(p, q, drafted), residual(p[0], q[0])]
    assert [r.dtype for r in results] == [dtype] * 4


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=50)
@given(sizes=SIZES, seed=st.integers(0, 2**32 - 2), names=kinds)
def test_float32_is_exact_to_its_rounding(rule, sizes, seed, names):
    """Laws that sum to 1 up to 6e-8 a row, five rows at most; near-equal rows leave residuals of nothing but rounding."""
    p, q = ([r.float() for r in side] for side in pair(seed, *sizes, names))
    error, _ = exact(law, p, q, rule)
    assert error < 1e-6


P = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.1, 0.2, 0.7]])
Q = torch.tensor([[0.1, 0.7, 0.2], [0.2, 0.2, 0.6]])
DRAFTED = torch.tensor([1, 2])


@pytest.mark.parametrize("rule", RULES)
def test_verify_draws_from_law(rule):
    stop, following = law(P, Q, DRAFTED, rule)
    generator = torch.Generator().manual_seed(0)
    counts = np.zeros((3, 3))
    for _ in range(10_000):
        counts[verify(P, Q, DRAFTED, generator, rule)] += 1
    expected = (stop[:, None] * following).numpy()
    assert (stop > 0.02).all()  # every number of kept tokens is on trial
    assert one_sample_chi2(counts.ravel(), expected.ravel()).pvalue > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [1, 1e-3, 1e-7])
def test_no_probability_is_negative(rule, spread):
    """Also where p and q differ by rounding only: a cumulative sum that falls cannot be searched."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        logits = torch.randn(6, 50, generator=generator)
        p, q = (logits + spread * torch.randn(6, 50, generator=generator)).softmax(-1), logits[:5].softmax(-1)
        stop, following = law(p, q, torch.multinomial(q, 1, generator=generator)[:, 0], rule)
        assert (stop >= 0).all() and (following >= 0).all()
        assert float(stop.double().sum()) == pytest.approx(1, abs=1e-6)


def test_verify_reads_only_its_generator():
    before = torch.get_rng_state()
    runs = [[verify(P, Q, DRAFTED, g) for _ in range(30)] for g in (torch.Generator().manual_seed(1) for _ in range(2))]
    assert runs[0] == runs[1] and len(set(runs[0])) > 3 and torch.equal(torch.get_rng_state(), before)
