"""Filters equal transformers' own, bad values are refused, and draws follow the law."""

import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import GREEDY, tiny
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import Sampling
from specdec.equivalence import one_sample_chi2
from specdec.sampling import draw

INF, NAN = math.inf, math.nan


def processors(sampling):
    """The filters of ``sampling`` in transformers' words and order."""
    found = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature != 1:
        found.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p:
        found.append(MinPLogitsWarper(float(sampling.min_p)))
    return found


def transformers_law(sampling, logits, history):
    chosen = processors(sampling)
    laws = [
        chosen(torch.tensor([ids]), row[None].clone()).softmax(-1) for row, ids in zip(logits, history, strict=True)
    ]
    return torch.cat(laws)


def example(size, seed, dtype=torch.float64):
    """Three rows of logits and a history of unlike lengths, with repeated ids, for each."""
    rng = np.random.default_rng(seed)
    logits = torch.as_tensor(rng.normal(scale=3, size=(3, size)), dtype=dtype)
    return logits, [rng.integers(size, size=n).tolist() for n in (1, 7, 30)]


def test_the_order_of_the_filters_is_that_of_transformers():
    everything = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    theirs = tiny(0)._get_logits_processor(config, input_ids_seq_length=1)
    assert [type(p) for p in theirs] == [type(p) for p in processors(everything)]


@settings(deadline=None, max_examples=150)
@given(
    size=st.one_of(st.integers(2, 12), st.integers(2, 5000)),
    seed=st.integers(0, 2**32 - 1),
    temperature=st.one_of(st.just(1.0), st.floats(0.05, 5)),
    top_k=st.one_of(st.just(0), st.integers(1, 60), st.just(10_000)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)),
    penalty=st.one_of(st.just(1.0), st.floats(0.3, 3)),
)
def test_probabilities_equal_transformers(size, seed, temperature, top_k, top_p, min_p, penalty):
    # In float64, where a token at the very edge of a filter does not fall by rounding.
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    logits, history = example(size, seed)
    before = logits.clone()
    ours, theirs = sampling.probabilities(logits, history), transformers_law(sampling, logits, history)
    assert ours.dtype == torch.float64 and torch.equal(logits, before)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-15)
    assert torch.equal(ours > 0, theirs > 0)


@pytest.mark.parametrize("size", [2, 17, 1000, 5000])
@pytest.mark.parametrize(
    "filters", [f for n in range(6) for f in itertools.combinations(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), n)]
)  # fmt: skip
def test_every_combination_in_float32(size, filters):
    values = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3}
    sampling = Sampling(**{name: values[name] for name in filters})
    logits, history = example(size, 0, torch.float32)
    ours, theirs = sampling.probabilities(logits, history), transformers_law(sampling, logits, history)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(ours.sum(-1), torch.ones(3))


def test_ties_with_the_last_of_top_k_are_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert Sampling(top_k=2).probabilities(logits)[0].count_nonzero() == 3
    torch.testing.assert_close(
        Sampling(top_k=2).probabilities(logits), transformers_law(Sampling(top_k=2), logits, [[0]])
    )


def test_the_most_probable_token_is_always_kept():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(top_p=1e-12), Sampling(min_p=1), Sampling(top_k=1, top_p=1e-12, min_p=1)):
        assert torch.equal(sampling.probabilities(logits), GREEDY.probabilities(logits)), sampling


def test_barred_tokens_stay_barred():
    logits = torch.tensor([[0.0, -INF, 1.0, -INF]])
    for sampling in [
        Sampling(),
        GREEDY,
        Sampling(1e39),  # larger than float32 can hold
        Sampling(top_k=3),
        Sampling(top_p=0.999),
        Sampling(min_p=1e-6),
        Sampling(repetition_penalty=2),
    ]:
        law = sampling.probabilities(logits, [[0, 1, 2]])[0]
        assert law[1] == law[3] == 0 and law[0] + law[2] == 1, sampling


def test_ids_that_only_the_other_model_knows_take_no_penalty():
    logits, _ = example(5, 0)
    sampling = Sampling(repetition_penalty=1.5)
    assert torch.equal(sampling.probabilities(logits, [[1, 9]] * 3), sampling.probabilities(logits, [[1]] * 3))


@pytest.mark.parametrize(
    "bad",
    [
        *[{"temperature": t} for t in (-1, -1e-9, NAN, INF, -INF)],
        *[{"top_k": k} for k in (-1,)],
        *[{"top_p": p} for p in (0, -0.1, 1.1, NAN, INF)],
        *[{"min_p": p} for p in (-0.1, 1.1, NAN)],
        *[{"repetition_penalty": p} for p in (0, -1, NAN, INF)],
    ],
)
def test_values_outside_their_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": "1"},
        {"temperature": None},
        {"temperature": True},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_k": "4"},
    ]
    + [{"top_p": "0.9"}, {"min_p": None}, {"repetition_penalty": 1j}],
)
def test_values_of_the_wrong_type(bad):
    with pytest.raises(TypeError, match=next(iter(bad))):
        Sampling(**bad)


def test_options_that_do_not_exist_are_refused():
    for name in ("min_new_tokens", "typical_p", "num_beams"):
        with pytest.raises(TypeError, match=name):
            Sampling(**{name: 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0, 1e-46, 1e-40, 1e-38, 2e-38, 1e-12, 1e-5, 1e-3])
def test_a12_tiny_temperatures_are_greedy(temperature, dtype):
    logits = torch.tensor([[10, 9, -100], [-100, 9.5, 10]], dtype=dtype)
    law = Sampling(temperature).probabilities(logits)
    assert torch.equal(law, torch.tensor([[1.0, 0, 0], [0, 0, 1]]))


def test_temperature_0_takes_the_lowest_id_among_equals():
    assert GREEDY.probabilities(torch.tensor([[1.0, 3, 3, 2]]))[0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("row", [[1, NAN, 0], [1, INF, 0], [-INF, -INF, -INF], [NAN, -INF, -INF]])
def test_logits_that_are_no_law(row, temperature, dtype):
    logits = torch.tensor([[1, 2, 3], row], dtype=dtype)
    with pytest.raises(FloatingPointError, match="some model.* position 11"):
        Sampling(temperature).probabilities(logits, where="some model", start=10)


def test_a_penalty_that_overflows_is_no_law():
    with pytest.raises(FloatingPointError):
        Sampling(repetition_penalty=1e-40).probabilities(torch.tensor([[5.0, 4.0]]), [[0, 1]])


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"\(n, V\)"):
        Sampling().probabilities(torch.zeros(3))
    for history in (None, [], [[1]], [[1]] * 3):
        with pytest.raises(ValueError, match="2 rows"):
            Sampling(repetition_penalty=2).probabilities(torch.zeros(2, 4), history)


def test_draws_follow_the_law():
    law = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.25, 0.04, 0.01, 0.0])
    generator = torch.Generator().manual_seed(0)
    counts = np.bincount([draw(law, generator) for _ in range(20_000)], minlength=8)
    assert one_sample_chi2(counts, law.numpy()).pvalue > 1e-3


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-40, 1e-8, 1.0]), min_size=1, max_size=40).filter(any), st.integers(0, 2**32))
def test_an_id_of_probability_0_is_never_drawn(weights, seed):
    for dtype in (torch.float32, torch.float64):
        law = torch.tensor(weights, dtype=dtype)  # unnormalised: the sum is taken as it comes
        generator = torch.Generator().manual_seed(seed)
        assert all(law[draw(law, generator)] > 0 for _ in range(20))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval(uniform, monkeypatch):
    """No seed in reach gives these uniforms, yet they may come."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(uniform, dtype=torch.float64))
    for scale in (1.0, 0.3, 1e-7, 5e-324):  # the last: the product is rounded up to the total
        for weights in ([0, 1, 2, 0], [1, 0, 2], [0, 0, 3, 0, 0]):
            law = torch.tensor(weights, dtype=torch.float64) * scale
            expected = law.nonzero()[0 if uniform == 0 else -1]
            assert draw(law, torch.Generator()) == expected


def test_a31_draws_are_finer_than_float32():
    u = float(torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    for shift, drawn in ((2**-40, 0), (-(2**-40), 1)):
        law = torch.tensor([u + shift, 1 - u - shift], dtype=torch.float64)
        assert draw(law, torch.Generator().manual_seed(0)) == drawn


def test_a_draw_reads_only_its_own_generator():
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    law = torch.full((100,), 0.01)
    first = [int(draw(law, generator)) for generator in [torch.Generator().manual_seed(3)] for _ in range(50)]
    torch.manual_seed(99)
    torch.set_rng_state(states[0])
    again = [int(draw(law, generator)) for generator in [torch.Generator().manual_seed(3)] for _ in range(50)]
    assert first == again and len(set(first)) > 20
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1] and random.getstate() == states[2]


def test_import_loads_no_torch():
    code = (
        "import sys, specdec, specdec.sampling\n"
        "specdec.Sampling(temperature=0.5); specdec.costmodel; specdec.equivalence\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
