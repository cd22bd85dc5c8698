"""The loops: known faults one by one, the law of whole answers, and the record of each round."""

import gc
import itertools
import random

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import (
    AR,
    GREEDY,
    G,
    Table,
    chain,
    draft,
    fresh,
    markov_llama,
    noisy,
    pair_pvalue,
    positions,
    random_law,
    recorded,
    rows_error,
    tiny,
    top,
    words,
)
from scipy import stats
from tokenizers.processors import TemplateProcessing

import specdec
from specdec import ModelDraft, PromptLookup, Sampling, TorchModel, autoregressive, score, speculative
from specdec.costmodel import Costs
from specdec.drafts import first_layers
from specdec.equivalence import one_sample_chi2
from specdec.study.pairs import prompt_ids

PROMPT = [5, 6, 7, 8]


def check_rounds(prompt, out, k):
    """What the records of one answer have to satisfy among themselves."""
    begin = len(prompt)
    for i, r in enumerate(out.rounds):
        assert r.start == begin
        assert 0 <= r.accepted <= r.drafted <= r.asked <= k
        assert r.emitted == r.accepted + (not r.ended)
        assert not r.ended or (i == len(out.rounds) - 1 and out.stop == "eos")
        assert 0 <= r.draft_seconds and 0 < r.verify_seconds <= r.forward_seconds
        assert r.draft_seconds + r.verify_seconds <= r.seconds and r.forward_seconds <= r.seconds
        begin += r.emitted
    assert begin == len(prompt) + len(out.tokens)


@settings(deadline=None, max_examples=60)
@given(
    k=st.integers(0, 6),
    max_new=st.integers(0, 20),
    eos=st.one_of(st.none(), st.integers(0, 7), st.sets(st.integers(0, 7), max_size=3)),
    seed=st.integers(0, 2**32),
    rule=st.sampled_from(["token", "block"]),
    window=st.integers(3, 30),
    lookup=st.booleans(),
)
def test_rounds_add_up(k, max_new, eos, seed, rule, window, lookup):
    target = Table(random_law(0, 8), window)
    drafter = PromptLookup() if lookup else Table(random_law(1, 8, 0.5))
    tokens, out = G(target, drafter, [1, 2, 1], k, max_new, seed=seed, eos=eos, rule=rule)
    check_rounds([1, 2, 1], out, k)
    ends = {eos} if isinstance(eos, int) else eos or set()
    assert not ends & set(tokens[:-1])
    if out.stop == "eos":
        assert tokens[-1] in ends
    else:
        assert len(tokens) == min(max_new, window - 3)
        assert out.stop == ("length" if len(tokens) == max_new else "context")
    if out.rounds:
        assert target.ids == ([1, 2, 1] + tokens)[:-1]  # the cache agrees with what was kept


# Equal to target-only decoding


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("K", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_equals_target_only(seed, K, rule):
    target = tiny(seed)
    reference = AR(target, PROMPT, 40, T=0)
    accepted = []
    for drafter in (noisy(target), tiny(100), target, PromptLookup()):
        tokens, out = G(target, drafter, PROMPT, K, 40, T=0, rule=rule)
        assert tokens == reference
        check_rounds(PROMPT, out, K)
        accepted.append(sum(r.accepted for r in out.rounds))
    assert accepted[1] < accepted[0] <= accepted[2]


@pytest.fixture(scope="module")
def real(smollm2):
    """SmolLM2 with its records on, a prompt that prompt lookup can copy from, and the greedy answer."""
    target = recorded(smollm2)
    prompt = smollm2.tokenizer("one two three four, one two three four, one two")["input_ids"]
    answer = autoregressive(target, prompt, 16, GREEDY).tokens
    assert len(set(answer)) > 3
    return target, prompt, answer


@pytest.mark.parametrize(("layers", "K"), [(25, 4), (None, 4), (None, 7)])
def test_greedy_equals_target_only_in_a_real_model(real, layers, K):
    target, prompt, answer = real
    drafter = ModelDraft(first_layers(target, layers)) if layers else PromptLookup()
    tokens, out = G(target, drafter, prompt, K, 16, T=0)
    assert tokens == answer
    check_rounds(prompt, out, K)
    assert sum(r.drafted for r in out.rounds) > 0


def test_every_row_agrees_with_a_pass_without_a_cache(real):
    """Positions and rollback: no histogram sees a cache that is off by one, this does."""
    target, prompt, _ = real
    for drafter in (PromptLookup(), ModelDraft(first_layers(target, 25))):
        target.blocks.clear()
        tokens, out = G(target, drafter, prompt, 3, 12, seed=1)
        assert any(r.accepted for r in out.rounds) and any(r.accepted < r.drafted for r in out.rounds)
        assert rows_error(target, prompt, tokens) < 2e-3  # logits of about 20, 30 layers of float32


@pytest.mark.parametrize("T", [0, 1])
def test_every_row_agrees_with_a_pass_without_a_cache_over_many_rounds(T):
    target = recorded(TorchModel(tiny(0, window=256)))
    tokens, out = G(target, noisy(target.model), PROMPT, 4, 200, T=T)
    assert {r.accepted for r in out.rounds} == set(range(5))
    assert rows_error(target, PROMPT, tokens) < 1e-5


# The law of whole answers


def answers(target, drafter, start, runs, **given):
    target = TorchModel(target) if isinstance(target, torch.nn.Module) else target
    drafter = draft(drafter)
    return [G(target, drafter, [start], seed=seed, **given)[0] for seed in range(runs)]


def test_the_law_of_answers_is_the_targets():
    """3,000 answers of four tokens at K = 2: the pairs reach from the first token to indices K and K + 1."""
    law, other = random_law(0, 8), random_law(1, 8)
    found = answers(markov_llama(law), markov_llama(other), 3, 3000, K=2, max_new=4)
    assert min(pair_pvalue(found, law, 3, at) for at in (0, 1, 2)) > 1e-3 / 3


@pytest.mark.parametrize("K", [2, 3])
def test_the_law_of_answers_is_the_targets_under_the_block_rule(K):
    law, other = random_law(2, 8), random_law(3, 8)
    found = answers(Table(law), Table(other), 3, 3000, K=K, max_new=5, rule="block")
    assert min(pair_pvalue(found, law, 3, at) for at in range(4)) > 1e-3 / 4


ADAPTIVE = specdec.AdaptiveK(Costs(c=0.3, v={1: 1.0, 2: 1.05, 9: 1.5}), 6)


def test_adaptive_k_keeps_the_law_and_the_seed():
    """How much is drafted follows what was kept; the answers follow the target's law all the same."""
    law, other = random_law(4, 8), random_law(5, 8)
    found = answers(Table(law), Table(other), 3, 3000, K=ADAPTIVE, max_new=8)
    assert min(pair_pvalue(found, law, 3, at) for at in range(7)) > 1e-3 / 7
    lengths = set()
    for seed in range(20):
        (tokens, out), (again, _) = (G(Table(law), Table(other), [3], ADAPTIVE, 60, seed=seed) for _ in range(2))
        assert tokens == again
        lengths |= {r.drafted for r in out.rounds[:-6]}  # the last rounds are short for want of room
    assert len(lengths) > 2


def test_adaptive_k_follows_the_draft():
    target = tiny(0, window=256)
    reference = AR(target, PROMPT, 100, T=0)
    mean = []
    for drafter in (tiny(100, window=256), noisy(target), target):
        tokens, out = G(target, drafter, PROMPT, ADAPTIVE, 100, T=0)
        assert tokens == reference
        mean.append(np.mean([r.drafted for r in out.rounds]))
    assert mean[0] < 2 < mean[2] and mean == sorted(mean)


def exact_law(law, start, length, sampling):
    """(V,) * length: the probability of every answer, each step under all filters."""
    size = len(law)
    rows = torch.as_tensor(law).log()
    probability = np.zeros((size,) * length)
    for tokens in itertools.product(range(size), repeat=length):
        text, p = [start, *tokens], 1.0
        for i in range(length):
            p *= float(sampling.probabilities(rows[[text[i]]], [text[: i + 1]])[0, tokens[i]])
        probability[tokens] = p
    return probability


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "filters",
    [{"repetition_penalty": 1.7}, {"T": 0.7, "top_k": 3}, {"top_p": 0.8, "min_p": 0.1, "repetition_penalty": 0.8}],
    ids=lambda f: "-".join(f),
)
def test_a06_a26_the_law_of_answers_under_filters(filters, rule):
    law, other = random_law(0, 4), random_law(1, 4)
    expected = exact_law(law, 1, 4, Sampling(**{"temperature" if n == "T" else n: v for n, v in filters.items()}))
    counts = np.zeros(expected.shape)
    for tokens in answers(Table(law), Table(other), 1, 2000, K=2, max_new=4, rule=rule, **filters):
        counts[tuple(tokens)] += 1
    assert one_sample_chi2(counts.ravel(), expected.ravel()).pvalue > 1e-3


# A-I. Vocabulary, tokenizer, prompt (A1 and A2: test_drafts.py)


@pytest.mark.parametrize("adds", [True, False])
def test_a03_one_start_token(adds):
    tokenizer = words(["<s>", "hello", "bye"], bos_token="<s>")
    tokenizer.chat_template = "{{ bos_token }} {{ messages[0]['content'] }}"
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        assert tokenizer("<s>")["input_ids"] == [0, 0]  # what has to be avoided
    assert prompt_ids(tokenizer, "hello") == [0, 1]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        prompt_ids(tokenizer, "hello")


def test_a03_one_start_token_in_a_real_template(smollm2):
    ids, bos = prompt_ids(smollm2.tokenizer, "Hello"), smollm2.tokenizer.bos_token_id
    assert ids[0] == bos and ids[:2] != [bos, bos]


@pytest.mark.parametrize("T", [0, 1])
def test_a04_one_token_prompt(T):
    target, bad = tiny(0), tiny(1)
    for ids in ([5], (5,), torch.tensor([5]), np.array([5]), [np.int64(5)], [torch.tensor(5)]):
        tokens, out = G(target, bad, ids, 4, 8, T=T)
        assert len(tokens) == 8 and out.rounds[0].start == 1
        alone = fresh(target, [5, *tokens])[:-1].argmax(-1).tolist()  # no loop, no cache
        assert T or tokens == AR(target, [5], 8, T=0) == alone


@pytest.mark.parametrize("empty", [[], torch.empty(0, dtype=torch.long)])
def test_a04_empty_prompt(empty):
    for call in (
        lambda: G(tiny(0), tiny(1), empty, 4, 8),
        lambda: AR(tiny(0), empty, 8),
        lambda: G(tiny(0), None, empty, 0, 8),
    ):
        with pytest.raises(ValueError, match="prompt_ids is empty"):
            call()


# A-II. The accept/reject law (A8: test_verification.py)


class GreedyDraft(ModelDraft):
    """Draws at temperature 0 whatever the target does, and says so in q."""

    def propose(self, context, k, sampling, generator):
        return super().propose(context, k, GREEDY, generator)


def test_a05_a_greedy_draft_with_its_one_hot_law():
    law, other = random_law(0, 8), random_law(1, 8)
    found = answers(Table(law), GreedyDraft(Table(other)), 3, 3000, K=2, max_new=4)
    assert min(pair_pvalue(found, law, 3, at) for at in (0, 1, 2)) > 1e-3 / 3


def test_a06_top_k_is_in_p_and_q():
    law, other = random_law(0, 16), random_law(1, 16)
    found = answers(Table(law), Table(other), 3, 2000, K=2, max_new=4, top_k=4)
    assert min(pair_pvalue(found, top(law, 4), 3, at) for at in (0, 1, 2)) > 1e-3 / 3


@pytest.mark.parametrize("filters", [{"top_k": k, "top_p": 0.8} for k in (1, 2, 4, 97)] + [{"min_p": 0.3, "T": 0.7}])
def test_a07_filters_on_both_sides(filters):
    target = TorchModel(tiny(0))
    _, out = G(target, target, PROMPT, 4, 50, **filters)
    assert all(r.accepted == r.drafted for r in out.rounds)


@pytest.mark.parametrize("T", [1e-4, 1])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a09_equal_laws_leave_no_residual(T, rule):
    law = random_law(0, 8)
    _, out = G(Table(law), Table(law), [3], 8, 9000, T=T, rule=rule)
    assert all(r.accepted == r.drafted for r in out.rounds)


@pytest.mark.parametrize("T", [0, 1])
def test_a10_acceptance_stops_at_the_first_rejection(T):
    target, drafter = chain(12, [3, 4, 5, 6, 7, 8, 9]), chain(12, [3, 4, 10, 6, 7, 8])
    tokens, out = G(markov_llama(target), markov_llama(drafter), [1, 3], 4, 6, T=T)
    first = out.rounds[0]
    assert (first.drafted, first.accepted, first.emitted) == (4, 1, 2)
    assert tokens == [4, 5, 6, 7, 8, 9]


def test_a11_the_acceptance_rate_is_the_overlap():
    p, q = np.array([0.7, 0.1, 0.1, 0.1]), np.array([0.05, 0.75, 0.1, 0.1])
    _, out = G(Table(np.tile(p, (4, 1))), Table(np.tile(q, (4, 1))), [0], 1, 4000)
    rounds = [r for r in out.rounds if r.drafted]
    low, high = stats.binom.interval(0.999, len(rounds), np.minimum(p, q).sum())
    assert low <= sum(r.accepted for r in rounds) <= high


@pytest.mark.parametrize("T", [0, 1e-40, 1e-12, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a12_tiny_temperatures_are_greedy(T, dtype):
    target = TorchModel(tiny(0).to(dtype))
    tokens, out = G(target, target, PROMPT, 3, 12, T=T)
    assert len(tokens) == 12 and all(r.accepted == r.drafted for r in out.rounds)
    if dtype == torch.float32:  # others: only at the same shape of block, see A24
        assert tokens == AR(target, PROMPT, 12, T=0)


@pytest.mark.parametrize("T", [-1, float("nan"), float("inf")])
def test_a12_temperatures_that_are_none(T):
    with pytest.raises(ValueError, match="temperature"):
        G(tiny(0), tiny(1), PROMPT, 3, 12, T=T)


# A-III. Where the answer ends (A16, stop strings, is not offered: below)


@pytest.mark.parametrize("K", [1, 5])
@pytest.mark.parametrize("drafted_by", [0, 1])
def test_a13_an_end_token_anywhere_in_the_block(K, drafted_by):
    target = TorchModel(tiny(0))
    reference = AR(target, PROMPT, 12, T=0)
    for eos in dict.fromkeys(reference):
        end = reference.index(eos) + 1
        tokens, out = G(target, tiny(drafted_by), PROMPT, K, 12, T=0, eos=eos)
        assert tokens == reference[:end] == AR(target, PROMPT, 12, T=0, eos=eos) and out.stop == "eos"
        G(target, tiny(drafted_by), PROMPT, K, 12, T=0, eos=eos)
        assert target.length == len(PROMPT) + end - 1  # nothing past the end stays in the cache
        check_rounds(PROMPT, out, K)


def test_a13_accepted_counts_only_what_is_kept():
    law = chain(12, [3, 4, 5, 9, 7, 8])
    tokens, out = G(markov_llama(law), markov_llama(law), [3], 5, 12, eos=9)
    assert tokens == [4, 5, 9]
    assert [(r.drafted, r.accepted, r.emitted, r.ended) for r in out.rounds] == [(5, 3, 3, True)]
    # The target's own token may also be the end: then the round is whole, and a bonus that is one counts as such.
    tokens, out = G(markov_llama(law), markov_llama(law), [3], 2, 12, eos=9)
    assert tokens == [4, 5, 9]
    assert [(r.drafted, r.accepted, r.emitted, r.ended) for r in out.rounds] == [(2, 2, 3, False)]


@pytest.mark.parametrize("T", [0, 1])
def test_a14_a_drafted_end_token_is_only_a_proposal(T):
    target, drafter = chain(12, [3, 4, 5, 6, 7, 8]), chain(12, [3, 4, 9, 9, 9])
    drafter[5:9] = chain(12, [5, 6, 7, 8])[5:9]
    model = markov_llama(drafter, eos=9)
    tokens, out = G(markov_llama(target, eos=9), model, [3], 4, 5, T=T, eos=9)
    assert tokens == [4, 5, 6, 7, 8] and out.stop == "length" and out.rounds[0].accepted == 1


def test_a15_several_end_tokens():
    law = chain(16, [3, 4, 5, 12, 6, 7])
    for eos in ([9, 12], (12, 9), {9, 12}, frozenset([12]), 12, np.int64(12), iter([9, 12])):
        tokens, out = G(markov_llama(law, eos=7), markov_llama(law, eos=4), [3], 4, 12, eos=eos)
        assert tokens == [4, 5, 12] and out.stop == "eos"
    for eos in (torch.tensor(12), torch.tensor([9, 12]), np.array(12), np.array([9, 12])):
        assert AR(markov_llama(law), [3], 12, eos=eos) == [4, 5, 12]
    tokens, _ = G(markov_llama(law, eos=12), markov_llama(law, eos=4), [3], 4, 5, eos=None)
    assert tokens == [4, 5, 12, 6, 7]  # None never stops, whatever the models' configs say
    target = TorchModel(markov_llama(law, eos=[9, 12]))
    assert G(target, target, [3], 4, 12, eos=target.eos)[0] == [4, 5, 12]


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("T", [0, 1])
def test_a17_max_new_tokens_is_exact(K, T):
    target = TorchModel(tiny(0))
    for max_new in (0, 1, 2, K - 1, K, K + 1, 2 * K + 1):
        tokens, out = G(target, target, PROMPT, K, max_new, T=T)
        assert len(tokens) == max_new and out.stop == "length"
        assert all(r.asked == min(K, max_new - (r.start - len(PROMPT)) - 1) for r in out.rounds)
        if T == 0:
            assert tokens == AR(target, PROMPT, max_new, T=0)


class Never:
    """A draft that must not be asked."""

    def propose(self, *_):
        raise AssertionError("the draft was asked")


@pytest.mark.parametrize("T", [0, 1])
def test_a18_nothing_to_draft_is_target_only(T):
    for drafter in (None, Never()):
        tokens, out = G(tiny(0), drafter, PROMPT, 0, 20, T=T, seed=3)
        assert tokens == AR(tiny(0), PROMPT, 20, T=T, seed=3)
        assert all((r.asked, r.drafted, r.draft_seconds) == (0, 0, 0) for r in out.rounds) and len(out.rounds) == 20
    assert len(G(tiny(0), Never(), PROMPT, 4, 1, T=T)[0]) == 1  # no room for a draft


def test_numbers_from_arrays_are_numbers():
    """As they come out of a table of settings."""
    target, drafter = TorchModel(tiny(0)), ModelDraft(TorchModel(tiny(1)))
    plain = G(target, drafter, PROMPT, 3, 12, top_k=20, seed=5, eos=9)[0]
    found = G(
        target,
        drafter,
        np.array(PROMPT),
        np.int64(3),
        np.int32(12),
        top_k=np.int64(20),
        seed=np.int64(5),
        eos=np.int64(9),
    )
    assert found[0] == plain
    assert PromptLookup(np.int64(2)).max_ngram == 2
    adaptive = [specdec.AdaptiveK(ADAPTIVE.costs, k) for k in (4, np.int64(4))]
    assert len({tuple(G(target, drafter, PROMPT, k, 12)[0]) for k in adaptive}) == 1


@pytest.mark.parametrize("K", [1, 5, 100])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_a19_a32_windows_of_next_to_nothing(K, window):
    """The smallest windows there can be, in the target and in the draft: what fits is drafted, no more."""
    target, short = tiny(0, window=8), tiny(1, window=window)
    for prompt in ([5], [5, 6], [5, 6, 7], [5] * 7):
        with positions(target) as seen, positions(short) as drafted:
            tokens, out = G(target, short, prompt, K, 100, T=0)
            assert tokens == AR(target, prompt, 100, T=0) and len(tokens) == 8 - len(prompt)
        assert max(seen) == 7 - 1 and max(drafted, default=0) < window
        assert [r.drafted for r in out.rounds] == [min(r.asked, max(0, window + 1 - r.start)) for r in out.rounds]
    assert G(short, target, [5] * window, K, 4)[1].stop == "context"


def test_a18_more_than_there_is_room_for():
    target = TorchModel(tiny(0))
    for K in (7, 8, 13, 1000, np.int64(9)):
        assert G(target, target, PROMPT, K, 8, T=0)[0] == AR(target, PROMPT, 8, T=0)


@pytest.mark.parametrize("length", range(58, 65))
@pytest.mark.parametrize("T", [0, 1])
def test_a19_the_end_of_the_window(length, T):
    target, drafter = tiny(0), tiny(1)
    prompt = [3 + i % 90 for i in range(length)]
    with positions(target) as seen, positions(drafter) as drafted:
        tokens, out = G(target, drafter, prompt, 8, 20, T=T)
    assert len(tokens) == 64 - length and out.stop == "context"
    assert max(seen + drafted, default=0) < 64
    assert T or tokens == AR(target, prompt, 20, T=0)
    if length < 64:
        assert G(target, drafter, prompt, 8, 64 - length, T=T)[1].stop == "length"


def test_a19_a_prompt_that_does_not_fit():
    target, drafter = tiny(0), tiny(1)
    with positions(target) as seen, positions(drafter) as drafted:
        for length in (65, 66):
            with pytest.raises(ValueError, match=f"{length} ids, the target's context holds 64"):
                G(target, drafter, [3] * length, 8, 20)
    assert seen == drafted == []


# A-IV. Cache (A20, A21: test_drafts.py; A22, A23: models/test_torch_model.py)


def test_a24_bfloat16_differs_only_where_two_tokens_are_as_good_as_equal():
    """A pass of K + 1 rows and one of a single row round differently; four units in the last place are allowed."""
    diverged = 0
    for seed in range(15):
        target = TorchModel(tiny(seed).bfloat16())
        one = AR(target, PROMPT, 40, T=0)
        many = G(target, tiny(seed + 100), PROMPT, 4, 40, T=0)[0]
        at = next((i for i in range(40) if one[i] != many[i]), None)
        if at is None:
            continue
        diverged += 1
        target.drop_last(target.length)
        row = [target.logits([i]) for i in PROMPT + one[:at]][-1][0]
        high, low = row.topk(2).values
        ulp = 2.0 ** (int(high.log2().floor()) - 7)
        assert high - low <= 4 * ulp, (seed, at)
    assert 0 < diverged < 8


def test_a25_memory_does_not_grow():
    target, drafter = TorchModel(tiny(0)), ModelDraft(TorchModel(tiny(1)))
    broken = TorchModel(tiny(2))
    broken.model.model.embed_tokens.weight.data[9] = float("nan")
    tensors, resident = [], []
    for seed in range(50):
        G(target, drafter, PROMPT, 4, 20, seed=seed)
        with pytest.raises(FloatingPointError):
            G(broken, drafter, [5, 9], 4, 20, seed=seed)
        if seed % 5 == 4:
            gc.collect()
            tensors.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            resident.append(psutil.Process().memory_info().rss)
    assert len(set(tensors)) == 1
    assert resident[-1] - resident[0] < 8 * 2**20


# A-V. Processors, seeds, batch, device


@pytest.mark.parametrize("K", range(1, 9))
@pytest.mark.parametrize("penalty", [1.5, 0.7])
def test_a26_a_penalty_sees_every_token_before(K, penalty):
    loop = np.full((8, 8), 0.075)
    for here, following, instead in ((3, 4, 5), (4, 3, 6)):  # instead: what a penalty can lead to
        loop[here, following], loop[here, instead] = 0.3, 0.25
    for target, prompt in ((markov_llama(loop), [3, 4, 3]), (tiny(0), PROMPT)):
        reference = AR(target, prompt, 30, T=0, repetition_penalty=penalty)
        assert penalty < 1 or reference != AR(target, prompt, 30, T=0)
        for drafter in (target, tiny(1, vocab=target.config.vocab_size), PromptLookup()):
            assert G(target, drafter, prompt, K, 30, T=0, repetition_penalty=penalty)[0] == reference


@pytest.mark.parametrize("T", [0, 1])
def test_a27_a_generation_config_changes_nothing(T):
    target, drafter = tiny(0), tiny(1)
    before = G(target, drafter, PROMPT, 3, 30, T=T)[0], AR(target, PROMPT, 30, T=T)
    for changed in (target, drafter):
        settings = {"repetition_penalty": 1.3, "top_k": 2, "temperature": 0.1, "do_sample": True, "min_new_tokens": 40}
        changed.generation_config.update(**settings, max_new_tokens=2, eos_token_id=before[0][1])
    assert (G(target, drafter, PROMPT, 3, 30, T=T)[0], AR(target, PROMPT, 30, T=T)) == before


def test_a28_seeds():
    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    target, drafter, before = TorchModel(tiny(0)), ModelDraft(TorchModel(tiny(1))), state()
    runs = {}
    for seed in (0, 1, -1, 1, 0):
        torch.rand(()) if seed == 1 else None  # what others draw does not matter
        tokens = G(target, drafter, PROMPT, 3, 30, seed=seed)[0], AR(target, PROMPT, 30, seed=seed)
        assert runs.setdefault(seed, tokens) == tokens
    assert len({t for pair in runs.values() for t in map(tuple, pair)}) == 6
    assert len({tuple(G(target, drafter, PROMPT, 3, 30, T=0, seed=seed)[0]) for seed in range(3)}) == 1
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
    before = state()
    G(target, drafter, PROMPT, 3, 30), AR(target, PROMPT, 30), score(target, PROMPT, [1, 2])
    assert state() == before


@pytest.mark.parametrize(
    "batch",
    [[[5, 6], [7, 8]], [[5, 6]], torch.tensor([[5, 6]]), [torch.tensor([5, 6])], torch.tensor(5), np.array([[5, 6]])],
)
def test_a29_batches_are_refused_in_so_many_words(batch):
    for call in (
        lambda: G(tiny(0), tiny(1), batch, 2, 4),
        lambda: AR(tiny(0), batch, 4),
        lambda: score(TorchModel(tiny(0)), batch, [1]),
    ):
        with pytest.raises(ValueError, match="batch size one"):
            call()


@pytest.mark.parametrize("dtypes", list(itertools.product([torch.float32, torch.bfloat16, torch.float16], repeat=2)))
def test_a30_draft_and_target_of_unlike_dtypes(dtypes):
    target, drafter = TorchModel(tiny(0).to(dtypes[0])), tiny(0).to(dtypes[1])
    tokens, out = G(target, drafter, PROMPT, 3, 30, T=0)
    assert len(tokens) == 30 and sum(r.accepted for r in out.rounds) > 10
    if dtypes[0] == torch.float32:
        assert tokens == AR(target, PROMPT, 30, T=0)
    assert len(G(target, drafter, PROMPT, 3, 30, rule="block")[0]) == 30


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a30_draft_and_target_on_unlike_devices(devices):
    target, drafter = TorchModel(tiny(0).to(devices[0])), tiny(0).to(devices[1])
    tokens, out = G(target, drafter, PROMPT, 3, 30, T=0)
    assert len(tokens) == 30 and sum(r.accepted for r in out.rounds) > 10
    assert len(G(target, drafter, PROMPT, 3, 30)[0]) == 30


# A-VI (A33, A34: test_equivalence.py; A35: test_latency.py; A37: the notebooks' tests)


@pytest.mark.parametrize("K", [1, 2, 5])
def test_a36_k_reaches_the_draft(K):
    _, out = G(tiny(0), tiny(1), PROMPT, K, 40)
    assert all(r.asked == r.drafted == min(K, 39 - (r.start - len(PROMPT))) for r in out.rounds)
    assert all(r.draft_seconds > 0 and r.forward_seconds > r.verify_seconds for r in out.rounds if r.asked)
    assert out.prefill_seconds > 0


# Bad arguments and bad logits


@pytest.mark.parametrize(
    "option", ["stop", "stop_strings", "min_new_tokens", "batch_size", "num_return_sequences", "temperature"]
)
def test_a16_a26_a29_what_is_not_offered_is_an_error(option):
    for call in (
        lambda **given: speculative(Table(random_law(0, 8)), Never(), [1], k=2, max_new_tokens=4, **given),
        lambda **given: autoregressive(Table(random_law(0, 8)), [1], max_new_tokens=4, **given),
    ):
        with pytest.raises(TypeError, match=option):
            call(**{option: 2})


BAD = [
    *[({"k": k}, ValueError, "k must") for k in (-1, 1.5, "4", None, True)],
    *[({"max_new_tokens": n}, ValueError, "max_new_tokens") for n in (-1, 1.5, "4", None)],
    ({"prompt_ids": "a text"}, TypeError, "tokenise"),
    ({"prompt_ids": [1.5]}, TypeError, "ints"),
    ({"prompt_ids": torch.tensor([1.0])}, TypeError, "ints"),
    ({"prompt_ids": {"input_ids": [1]}}, TypeError, "ints"),
    ({"prompt_ids": None}, TypeError, "."),
    ({"prompt_ids": [1, 8]}, ValueError, "id 8; the target knows ids 0 to 7"),
    ({"prompt_ids": [-1]}, ValueError, "id -1"),
    ({"sampling": None}, TypeError, "Sampling"),
    ({"sampling": {"temperature": 1}}, TypeError, "Sampling"),
    ({"eos": "</s>"}, TypeError, "eos"),
    ({"eos": 1.5}, TypeError, "eos"),
    ({"eos": [None]}, TypeError, "eos"),
    ({"rule": "typical"}, ValueError, "token.*block"),
    ({"seed": "0"}, TypeError, "."),
    ({"seed": 0.5}, TypeError, "."),
    ({"seed": 2**64}, ValueError, "."),
]


@pytest.mark.parametrize(("given", "error", "words"), BAD, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_bad_arguments_are_refused_before_any_work(given, error, words):
    class Idle(Table):
        def logits(self, ids):
            raise AssertionError("work was done")

    good = {"prompt_ids": [1], "k": 2, "max_new_tokens": 4}
    with pytest.raises(error, match=words):
        speculative(Idle(random_law(0, 8)), Never(), **good | given)
    if "rule" not in given and "k" not in given:
        del good["k"]
        with pytest.raises(error, match=words):
            autoregressive(Idle(random_law(0, 8)), **good | given)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits_name_model_and_position(value):
    bad = tiny(0)
    bad.lm_head.weight.data[1] = value
    target, drafter = TorchModel(bad, name="big one"), TorchModel(tiny(1), name="small one")
    with pytest.raises(FloatingPointError, match="target model big one: .* position 4 "):
        G(target, drafter, PROMPT, 2, 4)
    with pytest.raises(FloatingPointError, match="draft model big one: .* position 4 "):
        G(drafter, target, PROMPT, 2, 4)
    with pytest.raises(FloatingPointError, match="target model big one: .* position 4 "):
        AR(target, PROMPT, 4)
    with pytest.raises(FloatingPointError, match="big one: .* position 4 "):
        score(target, PROMPT, [1, 2])
    bad.lm_head.weight.data[1] = 0
    assert G(target, drafter, PROMPT, 2, 4, T=0)[0] == AR(target, PROMPT, 4, T=0)  # usable again


@pytest.mark.parametrize("rule", ["token", "block"])
def test_bad_logits_in_the_middle_of_a_block(rule):
    law = chain(12, [3, 4, 5, 6, 7])
    bad = Table(law)
    bad.rows[6] = float("nan")
    with pytest.raises(FloatingPointError, match="target model Table: .* position 4 "):
        G(bad, Table(law), [3], 4, 8, rule=rule)


def test_a_user_written_model_needs_six_members_only():
    class Bare:
        vocab_size, max_context, eos, length = 4, 100, (), 0

        def logits(self, ids):
            self.length += len(ids)
            return torch.zeros(len(ids), 4)

        def drop_last(self, n):
            self.length -= n

    assert len(G(Bare(), ModelDraft(Bare()), [1], 2, 8)[0]) == len(AR(Bare(), [1], 8)) == 8
    records = score(Bare(), [1], [2, 3])
    assert [(r.probability, r.cdf_id, r.cdf_rank) for r in records] == [(0.25, 0.5, 0.5), (0.25, 0.75, 0.75)]


# The score of an answer


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7, top_k=20), Sampling(top_p=0.9, repetition_penalty=1.5), GREEDY], ids=str
)
def test_score_equals_a_direct_computation(sampling):
    model = TorchModel(tiny(0))
    tokens = AR(model, PROMPT, 10, T=sampling.temperature) + [3, 3]
    text = PROMPT + tokens
    with torch.inference_mode():
        logits = model.model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    records = score(model, PROMPT, tokens, sampling)
    assert model.length == 0 and [r.token for r in records] == tokens
    for i, r in enumerate(records):
        at = len(PROMPT) + i
        p = sampling.probabilities(logits[at - 1 : at], [text[:at]])[0].double().numpy()
        with np.errstate(divide="ignore"):
            logp = np.log(p)
        surprise = -logp[p > 0]
        order = np.lexsort((np.arange(97), -p))
        below = order[: list(order).index(r.token)]
        entropy = p[p > 0] @ surprise
        expected = (logp[r.token], entropy, p[p > 0] @ surprise**2 - entropy**2, p[: r.token].sum(), p[below].sum())
        found = (r.logp, r.entropy, r.varentropy, r.cdf_id, r.cdf_rank)
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-4)
        assert r.probability == pytest.approx(p[r.token], abs=1e-6)


def test_score_depends_on_nothing_before_it():
    model = TorchModel(tiny(0))
    once = score(model, PROMPT, [1, 2, 3])
    G(model, tiny(1), [9, 9, 9], 3, 10)
    assert score(model, torch.tensor(PROMPT), torch.tensor([1, 2, 3])) == once
    assert score(model, PROMPT, [1, 2]) == once[:2] or score(model, PROMPT, [1, 2])[0].logp == pytest.approx(
        once[0].logp
    )


def test_score_of_the_answers_agrees_with_their_law():
    """The mean of log p + H over sampled answers is zero: the tokens come from the law that scores them."""
    target = TorchModel(tiny(0))
    z = []
    for seed in range(40):
        tokens = G(target, tiny(1), PROMPT, 3, 20, seed=seed)[0]
        records = score(target, PROMPT, tokens)
        z.append((sum(r.logp + r.entropy for r in records), sum(r.varentropy for r in records)))
    drift, variance = np.sum(z, axis=0)
    assert abs(drift) < 3.3 * variance**0.5


@pytest.mark.parametrize(
    ("given", "error"),
    [(([], [1]), ValueError), (([1], [97]), ValueError), (([1], "x"), TypeError), (([1] * 60, [2] * 6), ValueError)],
    ids=["empty", "unknown", "text", "long"],
)
def test_score_refuses(given, error):
    with pytest.raises(error):
        score(TorchModel(tiny(0)), *given)


def test_score_edges():
    model = TorchModel(tiny(0))
    assert score(model, [1], []) == []
    assert len(score(model, [1] * 60, [2] * 5)) == 5  # the last token needs no place in the window
    with pytest.raises(TypeError, match="Sampling"):
        score(model, [1], [2], sampling=0.7)


def test_public_names():
    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        specdec.nothing_like_it  # noqa: B018
