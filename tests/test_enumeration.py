"""Nothing is lost, by enumeration: a recursion over rounds whose length adapts, and every path through the shipped loop.

Models here are tables of a random law for every prefix, in float64, some with ids of probability 0. What they leave is
rounding: a total variation below 1e-12 from the target's own law. Nothing is sampled, so nothing is left to chance.
"""

import itertools
from collections import defaultdict

import pytest
import torch
from kit import Prefixes, every_outcome, rows

import specdec
from specdec import ModelDraft, PromptLookup, Sampling
from specdec.costmodel import AdaptiveK, Costs
from specdec.verification import RULES, law

rules = pytest.mark.parametrize("rule", RULES)

# Drafting is cheap beside a pass, and v grows fast: the best K is small, and moves at once with what was kept.
ADAPTIVE = AdaptiveK(Costs(c=0.12, v={1: 1.0, 2: 1.2, 3: 1.45, 4: 1.7}), 3)


def variation(found, expected):
    """Total variation between two laws, each a dict from outcome to probability."""
    return sum(abs(found.get(x, 0) - expected.get(x, 0)) for x in found.keys() | expected.keys()) / 2


# Level 1: the law of verification, over rounds


def drafts(q, text, room, adaptive, running, confident):
    """Every draft behind ``text``, as (tokens, confidences); one that is confident stops at different lengths."""
    length, speedup = adaptive.choose(running)
    size, length = len(q[0]), min(adaptive.k_max if confident and length else length, room)
    growing = [((), ())]
    while growing:
        tokens, told = growing.pop()
        if len(tokens) == length or (confident and tokens and adaptive.enough(running, speedup, told)):
            yield tokens, told
            continue
        row = q[len(text) + len(tokens)][text + tokens]
        confidence = float(row.max()) if confident else 1.0
        growing += [((*tokens, token), (*told, confidence)) for token in range(size) if row[token]]


def over_rounds(p, q, adaptive, rule, confident):
    """The law of the first n = len(p) tokens, round by round, and what K was at each number of tokens so far.

    States are (tokens so far, running counts), so paths that lead to the same state go on as one.
    """
    size, end = len(p[0]), len(p)
    states, answers, lengths = {((), (0.0, 0.0, 0.0)): 1.0}, defaultdict(float), defaultdict(set)
    for done in range(end):
        reached = [state for state in states if len(state[0]) == done]
        for text, running in reached:
            weight = states.pop((text, running))
            for drafted, told in drafts(q, text, end - done - 1, adaptive, running, confident):
                count = len(drafted)
                lengths[done].add(count)
                seen = [text + drafted[:i] for i in range(count + 1)]
                q_rows = torch.stack([q[done + i][seen[i]] for i in range(count)]) if count else p[0].new_empty(0, size)
                chance = float(q_rows[torch.arange(count), list(drafted)].prod())
                p_rows = torch.stack([p[done + i][seen[i]] for i in range(count + 1)])
                stop, following = law(p_rows, q_rows, torch.tensor(drafted, dtype=torch.long), rule)
                for kept, token in itertools.product(range(count + 1), range(size)):
                    mass = weight * chance * float(stop[kept] * following[kept, token])
                    if mass:
                        now = seen[kept] + (token,)
                        if len(now) == end:
                            answers[now] += mass
                        else:
                            state = now, adaptive.after(running, told, kept)
                            states[state] = states.get(state, 0.0) + mass
    assert not states
    return answers, lengths


@rules
@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize(("size", "tokens", "zeros"), [(2, 6, 0), (3, 4, 0), (3, 4, 0.4)])
def test_an_adaptive_k_keeps_the_joint_law_over_rounds(rule, confident, size, tokens, zeros):
    p, q = rows(0, size, tokens, zeros), rows(1, size, tokens, zeros)
    found, lengths = over_rounds(p, q, ADAPTIVE, rule, confident)
    expected = {}
    for answer in itertools.product(range(size), repeat=tokens):
        expected[answer] = float(torch.stack([p[i][answer[: i + 1]] for i in range(tokens)]).prod())
    assert max(map(len, lengths.values())) > 1, "K is the same whatever was kept"
    assert variation(found, expected) < 1e-12


# The loop itself


def target_law(target, prompt, sampling, ends, length):
    """The law of whole answers: each token from the target's own row, until an end token or ``length``."""
    answers, open_ = {}, {(): 1.0}
    for _ in range(length):
        going = {}
        for answer, mass in open_.items():
            text = (*prompt, *answer)
            row = sampling.probabilities(target.law(text).log()[None], [text])[0].tolist()
            for token, p in enumerate(row):
                if p:
                    (answers if token in ends else going)[*answer, token] = mass * p
        open_ = going
    return answers | open_


def enumerated(monkeypatch, target, draft, prompt, k, max_new, sampling=Sampling(), eos=None, rule="token"):
    """Total variation of the loop's answers from the target's law, and the rounds of every path.

    Target and draft are the same two objects on every path: whatever one call left to the next would show.
    """

    def call():
        return specdec.speculative(target, draft, prompt, k, max_new, sampling=sampling, eos=eos, rule=rule)

    found, paths = defaultdict(float), []
    for out, mass in every_outcome(monkeypatch, call):
        found[tuple(out.tokens)] += mass
        paths.append(out)
    length = min(max_new, target.max_context - len(prompt))
    expected = target_law(target, prompt, sampling, eos or (), length)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-12)
    return variation(found, expected), paths


@rules
@pytest.mark.parametrize(("K", "tokens"), [(0, 4), (1, 4), (2, 4), (5, 3)])
@pytest.mark.parametrize("zeros", [0, 0.2])
def test_a05_a11_a17_every_path_of_the_loop(monkeypatch, rule, K, tokens, zeros):
    """Rounds are cut by the end of the answer at every length; K = 5 is more than there is ever room for."""
    target, draft = Prefixes(0, 3, zeros), ModelDraft(Prefixes(3, 3, zeros))
    error, paths = enumerated(monkeypatch, target, draft, [1], K, tokens, rule=rule)
    assert error < 1e-12
    assert zeros or len({tuple(out.tokens) for out in paths}) == 3**tokens
    assert {r.accepted for out in paths for r in out.rounds} == set(range(min(K, tokens - 1) + 1))


@rules
def test_float32_leaves_its_own_rounding(monkeypatch, rule):
    """As shipped: logits come as float32, whose laws sum to 1 up to 1e-7 a row, and an answer reads about six rows."""
    target, draft = (Prefixes(seed, 3, dtype=torch.float32) for seed in (0, 1))
    error, _ = enumerated(monkeypatch, target, ModelDraft(draft), [1], 2, 3, rule=rule)
    assert 0 < error < 1e-6


class Silent(ModelDraft):
    """It does not tell how confident it is, as on a GPU: K is chosen before the round."""

    confident = False


@rules
@pytest.mark.parametrize("kind", [ModelDraft, Silent])
def test_every_path_with_an_adaptive_k(monkeypatch, rule, kind):
    error, paths = enumerated(monkeypatch, Prefixes(0, 2), kind(Prefixes(1, 2)), [1], ADAPTIVE, 5, rule=rule)
    assert error < 1e-12
    lengths = defaultdict(set)
    for r in (r for out in paths for r in out.rounds):
        lengths[r.start].add(r.drafted)
    assert max(map(len, lengths.values())) > 1, "K is the same on every path"


FILTERS = {
    "penalty": {"repetition_penalty": 2.5},
    "reward": {"repetition_penalty": 0.4},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.4, "temperature": 0.7},
    "all": {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.8},
    "one": {"top_k": 1},
    "greedy": {"temperature": 0},
}


@rules
@pytest.mark.parametrize("filters", FILTERS)
def test_a06_a26_every_path_under_filters(monkeypatch, rule, filters):
    """A penalty in the draft is not that of the target: each sees the prompt, the answer and the drafts before it."""
    sampling = Sampling(**FILTERS[filters])
    target, draft = Prefixes(0, 4), ModelDraft(Prefixes(1, 4))
    error, _ = enumerated(monkeypatch, target, draft, [1, 3], 2, 3 if sampling.top_k else 2, sampling, rule=rule)
    assert error < 1e-12


@rules
@pytest.mark.parametrize("ends", [{0}, {0, 2}])
def test_a13_a14_a15_every_path_with_end_tokens(monkeypatch, rule, ends):
    error, paths = enumerated(monkeypatch, Prefixes(0, 3), ModelDraft(Prefixes(1, 3)), [1], 2, 3, eos=ends, rule=rule)
    assert error < 1e-12
    assert all(not ends & set(out.tokens[:-1]) for out in paths)
    assert any(r.ended and 0 < r.accepted < r.drafted for out in paths for r in out.rounds)  # inside a block


@rules
def test_every_path_of_prompt_lookup(monkeypatch, rule):
    error, paths = enumerated(monkeypatch, Prefixes(0, 3, 0.2), PromptLookup(), [0, 1, 2, 0, 1], 3, 4, rule=rule)
    assert error < 1e-12
    assert {r.drafted for out in paths for r in out.rounds} >= {0, 1, 3}


@rules
@pytest.mark.parametrize("window", [1, 2, 9])
def test_a19_every_path_to_the_end_of_a_window(monkeypatch, rule, window):
    """The target's window ends after 3 tokens, in a block; the draft's ends before it, or not at all."""
    target, draft = Prefixes(0, 3, max_context=5), ModelDraft(Prefixes(1, 3, max_context=window))
    error, paths = enumerated(monkeypatch, target, draft, [1, 0], 2, 9, rule=rule)
    assert error < 1e-12 and {out.stop for out in paths} == {"context"}
    assert all(r.drafted == min(r.asked, max(0, window + 1 - r.start)) for out in paths for r in out.rounds)


@rules
@pytest.mark.parametrize("size", [2, 4])
def test_a01_every_path_with_unequal_vocabularies(monkeypatch, rule, size):
    error, _ = enumerated(monkeypatch, Prefixes(0, 3), ModelDraft(Prefixes(1, size)), [2, 1], 2, 3, rule=rule)
    assert error < 1e-12


class Cautious(ModelDraft):
    """Stops at a token it is not sure of. ``keep``: with that token, or after it was drawn and thrown away?"""

    def __init__(self, model, keep):
        super().__init__(model)
        self.keep = keep

    def propose(self, context, k, sampling, generator):
        ids, q = super().propose(context, k, sampling, generator)
        unsure = (q[torch.arange(len(ids)), ids] < 0.4).nonzero()
        if len(unsure):
            stop = int(unsure[0]) + self.keep
            ids, q = ids[:stop], q[:stop]
        return ids, q


@rules
def test_a_draft_may_stop_after_a_token_but_not_drop_one(monkeypatch, rule):
    """What was drawn has to be verified: to drop tokens by their q is to draw from another law than q."""
    errors = {}
    for keep in (True, False):
        draft = Cautious(Prefixes(5, 2), keep)
        errors[keep], paths = enumerated(monkeypatch, Prefixes(0, 2), draft, [1], 2, 4, rule=rule)
        assert len({r.drafted for out in paths for r in out.rounds if r.asked == 2}) > 1
    assert errors[True] < 1e-12 and errors[False] > 0.1
