"""Planted faults are caught: each is a change to the shipped source, and a change that no longer applies fails.

The unchanged code passes the same checks in test_verification.py, test_drafts.py and test_decoding.py; here it runs
beside its faults once more.
"""

import numpy as np
import pytest
import torch
from kit import G, Recorded, Table, exact, noisy, pair_pvalue, planted, random_law, rows, rows_error, tiny, top, watched

import specdec
from specdec import ModelDraft, TorchModel, decoding, drafts, verification
from specdec.equivalence import one_sample_chi2

# Level 1, exact: rule, what the source says, what the fault says
LAW = {
    "residual through softmax": ("token", "torch.where(total > 0, excess / total, p)", "excess.softmax(-1)"),
    "p instead of the residual": ("token", "torch.where(total > 0, excess / total, p)", "p"),
    "u fixed at 0, all accepted": ("token", "_ratio(p, q, drafted).clamp(max=1)", "torch.ones_like(p[:-1, 0])"),
    "accepted counted past the first rejection": (
        "token",
        "stop = torch.cat([one, keep.cumprod(0)]) * torch.cat([1 - keep, one])",
        "stop = one\n"
        "        for a in keep:\n"
        "            stop = torch.cat([stop * (1 - a), one * 0]) + torch.cat([one * 0, stop * a])",
    ),
    "bonus token from the row before": ("token", "residual(p[:-1], q, weight), p[-1:]]", "residual(p[:-1], q, weight), p[-2:-1]]"),
    "replacement from the next row": ("token", "residual(p[:-1], q, weight), p[-1:]]", "residual(p[1:], q, weight), p[-1:]]"),
    "5 % lenience": ("token", "return _ratio(p, q, drafted).clamp(max=1)", "return (1.05 * _ratio(p, q, drafted)).clamp(max=1)"),
    "block: residual without its weight": ("block", "(weight * p - q)", "(p - q)"),
    "block: never capped": ("block", "(reach[-1] * ratio).clamp(max=1)", "(reach[-1] * ratio)"),
    "block: each position for itself": ("block", "(reach[-1] * ratio).clamp(max=1)", "ratio.clamp(max=1)"),
    "block: stop without excess": ("block", "slack = excess + (1 - weight[:, 0])", "slack = excess + 1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LAW)
def test_the_exact_law_sees(fault):
    rule, old, new = LAW[fault]
    tables = [(rows(seed, 3, 4), rows(seed + 100, 3, 3)) for seed in range(5)]
    assert max(exact(verification.law, *pair, rule)[0] for pair in tables) < 1e-12
    assert max(exact(planted("specdec.verification", old, new).law, *pair, rule)[0] for pair in tables) > 1e-3


# Level 2: drawing from a right law
P = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.1, 0.2, 0.7]])
Q = torch.tensor([[0.1, 0.7, 0.2], [0.2, 0.2, 0.6]])
VERIFY = {
    "all accepted": ("accepted = draw(stop, generator)", "accepted = len(drafted)"),
    "bonus row whatever was kept": ("draw(following[accepted], generator)", "draw(following[-1], generator)"),
    "one uniform for both draws": (
        "return accepted, draw(following[accepted], generator)",
        "return accepted, draw(following[accepted], torch.Generator().manual_seed(accepted))",
    ),
}


def draws_pvalue(verify, runs=3000):
    drafted = torch.tensor([1, 2])
    stop, following = verification.law(P, Q, drafted)
    counts, generator = np.zeros((3, 3)), torch.Generator().manual_seed(0)
    for _ in range(runs):
        counts[verify(P, Q, drafted, generator)] += 1
    return one_sample_chi2(counts.ravel(), (stop[:, None] * following).numpy().ravel()).pvalue


@pytest.mark.parametrize("fault", VERIFY)
def test_draws_see(fault):
    assert draws_pvalue(planted("specdec.verification", *VERIFY[fault]).verify) < 1e-6


def test_draws_pass_without_a_fault():
    assert draws_pvalue(verification.verify) > 1e-3


# End to end: what the draft says of its tokens. 3,000 answers, indices up to K + 1
DRAFT = {
    "q before the filters": (
        "ids[i] = draw(q[i], generator)",
        "ids[i] = draw(q[i], generator); q[i] = Sampling().probabilities(logits[:, : self._limit])",
    ),
    "a greedy draft with a soft q": ("ids[i] = draw(q[i], generator)", "ids[i] = q[i].argmax()"),
}


def answers_pvalue(module, runs=3000):
    law, other = random_law(0, 16), random_law(1, 16)
    target, draft = Table(law), module.ModelDraft(Table(other))
    filters = {"top_k": 6}
    found = [G(target, draft, [3], 2, 4, seed=seed, **filters)[0] for seed in range(runs)]
    return 3 * min(pair_pvalue(found, top(law, 6), 3, at) for at in (0, 1, 2))


@pytest.mark.parametrize("fault", DRAFT)
def test_answers_see(fault):
    assert answers_pvalue(planted("specdec.drafts", *DRAFT[fault]), 1000) < 1e-6


def test_answers_pass_without_a_fault():
    assert answers_pvalue(drafts) > 1e-3


# Caches: rows of the target and laws of the draft against passes without a cache, over rounds of every length
TARGET = {
    "rolled back one too few": "target.drop_last(max(0, target.length - len(context)))",
    "rolled back one too many": "target.drop_last(target.length - (len(context) - 2))",
    "never rolled back": "pass",
}
DRAFT_CACHE = {
    "rolled back one too many": "self.model.drop_last(min(self.model.length, len(self._cached) - shared + 1))",
    "rolled back one too few": "self.model.drop_last(max(0, len(self._cached) - shared - 1))",
    "never rolled back": "pass",
}


def decode(loop, draft):
    target = Recorded(tiny(0, window=256))
    drafter = draft(TorchModel(noisy(target.model)))
    out = loop.speculative(target, drafter, [5, 6, 7], 3, 60, specdec.Sampling(), seed=0)
    return rows_error(target, [5, 6, 7], out.tokens), out


@pytest.mark.parametrize("fault", TARGET)
def test_target_rows_see(fault):
    module = planted("specdec.decoding", "target.drop_last(target.length - (len(context) - 1))", TARGET[fault])
    assert decode(module, ModelDraft)[0] > 1e-2


@pytest.mark.parametrize("fault", DRAFT_CACHE)
def test_draft_laws_see(fault):
    module = planted("specdec.drafts", "self.model.drop_last(len(self._cached) - shared)", DRAFT_CACHE[fault])
    with pytest.raises(AssertionError, match="cache holds|law of a fresh pass"):
        decode(decoding, watched(module.ModelDraft))


def test_caches_pass_without_a_fault():
    error, out = decode(decoding, watched(ModelDraft))
    assert error < 1e-5 and {r.accepted for r in out.rounds} == {0, 1, 2, 3}


def test_a_patch_that_no_longer_applies_fails():
    with pytest.raises(AssertionError, match="no longer applies"):
        planted("specdec.verification", "a line that is not there", "")


def test_a_planted_module_without_a_fault_is_the_module():
    module = planted("specdec.drafts", "class PromptLookup:", "class PromptLookup:")
    assert module.ModelDraft is not ModelDraft
    assert answers_pvalue(module, 300) == answers_pvalue(drafts, 300)
