"""What a draft proposes, the cache it keeps meanwhile, and the pairs it refuses."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import AR, G, Table, chain, markov_llama, noisy, pair_pvalue, positions, random_law, tiny, watched, words

from specdec import ModelDraft, PromptLookup, Sampling, TorchModel, speculative

PROMPT = [5, 6, 7, 8]


@pytest.mark.parametrize("K", [1, 2, 3, 5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}])
def test_a20_the_draft_cache_is_right_after_every_round(K, filters):
    """The draft is the target with noise: rounds of every length, each followed by a look at the cache."""
    target = tiny(0, window=256)
    drafter = watched(ModelDraft)(TorchModel(noisy(target)))
    _, out = G(target, drafter, PROMPT, K, 150, **filters)
    assert drafter.error < 1e-5
    assert {r.accepted for r in out.rounds} == set(range(K + 1))


@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize("K", range(1, 9))
def test_a21_a_self_draft_is_always_accepted(K, T):
    target = TorchModel(tiny(0))
    drafter = watched(ModelDraft)(target)
    tokens, out = G(target, drafter, PROMPT, K, 40, T=T)
    assert drafter.error < 1e-5
    assert all(r.accepted == r.drafted == r.asked for r in out.rounds) and len(tokens) == 40
    assert [r.drafted for r in out.rounds[:-1]] == [K] * (len(out.rounds) - 1)
    if T == 0:
        assert tokens == AR(target, PROMPT, 40, T=0)


def test_a21_a_real_self_draft_is_always_accepted(smollm2):
    _, out = G(smollm2, smollm2, [504, 3575, 282, 4649, 314], 3, 12, T=1)
    assert [r.accepted for r in out.rounds] == [3, 3, 3]


def test_a_draft_can_be_used_again():
    """No answer depends on the one before, even one that an error cut short."""
    target, drafter = TorchModel(tiny(0)), ModelDraft(TorchModel(tiny(1)))
    first = G(target, drafter, PROMPT, 3, 20, seed=1)[0]
    G(target, drafter, [9, 9, 9, 9, 9], 5, 20, seed=2)
    with pytest.raises(FloatingPointError):
        drafter.propose(PROMPT, 3, _Failing(), torch.Generator())
    assert G(target, drafter, PROMPT, 3, 20, seed=1)[0] == first


class _Failing(Sampling):
    def probabilities(self, *_, **__):
        raise FloatingPointError


def test_filters_are_in_q():
    """The row that comes back is the law of the draw: top_k of it is all there is, and it sums to 1."""
    ids, q = ModelDraft(TorchModel(tiny(0))).propose(PROMPT, 6, Sampling(top_k=4), torch.Generator())
    assert q.shape == (6, 97) and q.dtype == torch.float32
    assert ((q > 0).sum(-1) == 4).all() and (q[torch.arange(6), ids] > 0).all()
    torch.testing.assert_close(q.sum(-1), torch.ones(6))
    ids, q = ModelDraft(TorchModel(tiny(0))).propose(PROMPT, 6, Sampling(0), torch.Generator())
    assert torch.equal(q, torch.nn.functional.one_hot(ids, 97).float())


def test_draft_seconds_count_forwards_only_of_the_draft():
    drafter = ModelDraft(TorchModel(tiny(0)))
    assert drafter.forward_seconds == 0
    drafter.propose(PROMPT, 1, Sampling(), torch.Generator())
    once = drafter.forward_seconds
    drafter.propose(PROMPT, 5, Sampling(), torch.Generator())
    assert 0 < once < drafter.forward_seconds


def test_a_draft_window_shorter_than_the_targets():
    target, short = tiny(0, window=64), tiny(1, window=16)
    with positions(short) as seen:
        tokens, out = G(target, short, PROMPT, 4, 40, T=0)
    assert tokens == AR(target, PROMPT, 40, T=0) and max(seen) == 15
    for r in out.rounds:
        assert r.drafted == max(0, min(r.asked, 17 - r.start))
    with positions(short) as seen:
        assert G(target, short, list(range(3, 33)), 4, 10, T=0)[0] == AR(target, list(range(3, 33)), 10, T=0)
    assert max(seen) <= 15


# Vocabularies (A1) and tokenizers (A2)


@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize(("target_size", "draft_size"), [(97, 101), (101, 97)])
def test_a01_padded_vocabularies_work_both_ways(target_size, draft_size, T):
    target, drafter = TorchModel(tiny(0, vocab=target_size)), ModelDraft(TorchModel(tiny(1, vocab=draft_size)))
    prompt = [*PROMPT, target_size - 1]  # the target's last id, which the smaller draft does not know
    tokens, out = G(target, drafter, prompt, 4, 40, T=T)
    assert len(tokens) == 40 and sum(r.drafted for r in out.rounds) > 0
    if T == 0:
        assert tokens == AR(target, prompt, 40, T=0)
    _, q = drafter.propose(prompt, 8, Sampling(), torch.Generator())
    assert q.shape == (8, 97)


@pytest.mark.parametrize(("target_size", "draft_size"), [(8, 12), (12, 8)])
def test_a01_the_law_is_the_targets(target_size, draft_size):
    law, other = random_law(0, target_size), random_law(1, draft_size)
    target, drafter = Table(law), ModelDraft(Table(other))
    answers = [G(target, drafter, [3], 2, 4, seed=seed)[0] for seed in range(2000)]
    assert min(pair_pvalue(answers, law, 3, at) for at in (0, 2)) > 1e-3


def test_a01_padding_rows_of_the_draft_are_never_proposed():
    """Both heads are padded, the tokenizer ends before them: ids that are no token are barred from drafts."""
    names = [f"w{i}" for i in range(6)]
    target, drafted = tiny(0, vocab=8), tiny(1, vocab=12)
    drafted.lm_head.weight.data[6:] *= 100
    pair = TorchModel(target, words(names)), ModelDraft(TorchModel(drafted, words(names)))
    assert len(G(*pair, [1, 2], 4, 30)[0]) == 30
    ids, q = pair[1].propose([1, 2], 8, Sampling(), torch.Generator())
    assert q.shape[1] == 6 and ids.max() < 6


def test_a02_tokenizers_that_disagree_are_refused():
    names = [f"w{i}" for i in range(20)]
    swapped = [*names[:3], "w4", "w3", *names[5:]]
    target = TorchModel(tiny(0), words(names))
    with pytest.raises(ValueError, match="id 3 is 'w4' to the draft and 'w3' to the target"):
        G(target, TorchModel(tiny(1), words(swapped)), PROMPT, 4, 8)
    assert target.length == 0  # before any work


@pytest.mark.parametrize("longer", ["draft", "target"])
def test_a02_one_added_token_is_accepted_and_barred(longer):
    names = [f"w{i}" for i in range(20)]
    more = words(names)
    more.add_tokens(["w20"])
    tokenizers = (words(names), more) if longer == "draft" else (more, words(names))
    target = TorchModel(tiny(0, vocab=21), tokenizers[0])
    loves_the_last = tiny(1, vocab=21)
    loves_the_last.lm_head.weight.data[20] *= 100
    drafter = ModelDraft(TorchModel(loves_the_last, tokenizers[1]))
    assert G(target, drafter, [3, 4], 4, 30, T=0)[0] == AR(target, [3, 4], 30, T=0)
    ids, q = drafter.propose([3, 4], 8, Sampling(), torch.Generator())
    assert q.shape[1] == 20 and ids.max() < 20


@pytest.mark.parametrize("drafts", [1, 3])
def test_a26_a_draft_penalises_the_ids_before_each_of_its_tokens(drafts):
    """Its history is the context and its own tokens so far; an id that it does not know is not taken for its last one."""
    model, sampling = Table(random_law(1, 8)), Sampling(repetition_penalty=3.0)
    drafter = ModelDraft(model)
    drafter.start([3, 11], Table(random_law(0, 12)))
    ids, q = drafter.propose([3, 11, 2], drafts, sampling, torch.Generator())
    for i in range(drafts):
        row = model.rows[[[2, *ids.tolist()][i]]]
        assert torch.equal(q[i], sampling.probabilities(row, [[3, 2, *ids[:i].tolist()]])[0])
        misread = sampling.probabilities(row, [[3, 7, 2, *ids[:i].tolist()]])[0]
        assert 7 in ids[:i] or not torch.equal(q[i], misread)


def test_one_cache_cannot_be_draft_and_target():
    table = Table(random_law(0, 8))  # offers no twin
    with pytest.raises(ValueError, match="share one cache"):
        G(table, ModelDraft(table), [1], 2, 4)
    model = TorchModel(tiny(0))
    assert G(model, ModelDraft(model), PROMPT, 2, 6, T=0)[0] == AR(model, PROMPT, 6, T=0)


# Prompt lookup


def propose(context, k=4, max_ngram=3):
    ids, q = PromptLookup(max_ngram).propose(context, k, Sampling(), torch.Generator())
    assert q.shape == (len(ids), max(context) + 1)
    assert torch.equal(q, torch.nn.functional.one_hot(ids, max(context) + 1).float())
    return ids.tolist()


def test_prompt_lookup_copies_what_followed():
    assert propose([1, 2, 3, 9, 8, 7, 1, 2, 3]) == [9, 8, 7, 1]
    assert propose([1, 2, 3, 9, 8, 7, 1, 2, 3], k=2) == [9, 8]
    assert propose([4, 9, 4, 8, 4]) == [8, 4]  # the last occurrence, and no further than the context goes
    assert propose([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], k=1) == [9]  # a longer n-gram before a later one
    assert propose([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], k=1, max_ngram=1) == [8]
    assert propose([6, 6, 6]) == [6]  # an occurrence may overlap the end


def test_prompt_lookup_without_an_earlier_occurrence():
    assert propose([1, 2, 3]) == propose([7]) == propose([5, 5], k=0) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 6), st.integers(1, 4))
def test_prompt_lookup_in_general(context, k, max_ngram):
    ids = propose(context, k, max_ngram)
    places = [
        (size, end)
        for size, end in itertools.product(range(max_ngram, 0, -1), range(len(context) - 1, 0, -1))
        if size <= end and context[end - size : end] == context[-size:]
    ]
    assert ids == (context[places[0][1] :][:k] if places else [])


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "3", None])
def test_prompt_lookup_refuses(bad):
    with pytest.raises(ValueError, match="max_ngram"):
        PromptLookup(bad)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_prompt_lookup_keeps_the_law(rule):
    law = random_law(0, 4)
    prompt = [1, 2, 3, 0, 2, 1, 3, 0]
    target = Table(law)
    answers = [G(target, PromptLookup(), prompt, 2, 4, seed=seed, rule=rule)[0] for seed in range(2000)]
    assert min(pair_pvalue(answers, law, 0, at) for at in (0, 1, 2)) > 1e-3


def test_prompt_lookup_follows_a_loop():
    target = markov_llama(chain(8, [3, 4, 5, 3]))
    tokens, out = G(target, PromptLookup(), [3, 4, 5, 3, 4, 5], 4, 20, T=0)
    assert tokens == [3, 4, 5] * 6 + [3, 4]
    # An occurrence overlaps the end, so that at most three tokens can be copied.
    assert all(r.accepted == r.drafted == min(3, r.asked) for r in out.rounds)
    assert all(r.draft_seconds > 0 and r.forward_seconds == r.verify_seconds for r in out.rounds if r.asked)


# Drafts of a user's own


class Fixed:
    """Proposes what it is told to."""

    def __init__(self, ids, q):
        self.given = torch.tensor(ids, dtype=torch.long), q

    def propose(self, context, k, sampling, generator):
        return self.given


@pytest.mark.parametrize(
    ("ids", "shape"),
    [([1, 2, 3], (3, 8)), ([1], (2, 8)), ([1], (1, 9)), ([1], (8,))],
    ids=["many", "rows", "wide", "flat"],
)
def test_a_proposal_that_does_not_fit_is_refused(ids, shape):
    with pytest.raises(ValueError, match="the draft gave"):
        G(Table(random_law(0, 8)), Fixed(ids, torch.full(shape, 1 / 8)), [1], 2, 8)


def test_a_proposal_that_q_cannot_give_is_refused():
    with pytest.raises(ValueError, match="q = 0"):
        G(Table(random_law(0, 8)), Fixed([1], torch.eye(8)[:1]), [1], 2, 8)


def test_a_proposal_may_be_short_and_narrow():
    tokens, out = G(Table(random_law(0, 8)), Fixed([1], torch.eye(2)[1:]), [1], 3, 30)
    assert len(tokens) == 30 and {r.drafted for r in out.rounds if r.asked} == {1}
    nothing = Fixed([], torch.empty(0, 8))
    assert G(Table(random_law(0, 8)), nothing, [1], 3, 30)[0] == AR(Table(random_law(0, 8)), [1], 30)


def test_a_speculative_call_needs_a_draft():
    for wrong in (None, "prompt lookup", TorchModel(tiny(1)), tiny(1)):
        with pytest.raises(TypeError, match="propose"):
            speculative(TorchModel(tiny(0)), wrong, PROMPT, k=2, max_new_tokens=4)
