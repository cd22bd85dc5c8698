"""What the equivalence chapter reads from the real pair: rows of one round, rows of whole answers, answers by transformers."""

import numpy as np
import pytest
import torch
from kit import markov_llama, noisy, pair_pvalue, random_law, tiny
from transformers import GenerationConfig

import specdec
from specdec import ModelDraft, TorchModel, verification
from specdec.study import reference, rows
from specdec.study.teeth import planted

T1 = specdec.Sampling()


def laws(count, size, zeros=0.0):
    rng = np.random.default_rng(count)
    weights = rng.exponential(size=(count, size)) ** 3 * (rng.random((count, size)) >= zeros)
    return torch.as_tensor(weights / weights.sum(-1, keepdims=True))


@pytest.mark.parametrize("zeros", [0, 0.5])
def test_the_emitted_law_is_the_targets(zeros):
    for p, q in zip(laws(20, 300, zeros), laws(21, 300, zeros)[1:], strict=True):
        assert (rows.emitted_law(p, q) - p).abs().max() < 1e-15


def test_the_emitted_law_sees_a_fault(monkeypatch):
    p, q = laws(2, 300)
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    assert (rows.emitted_law(p, q) - p).abs().max() > 1e-3


def test_one_step_describes_each_position_of_a_round():
    p, q = laws(3, 40), laws(4, 40)[:2]
    found = list(rows.one_step(p, q, 5000, torch.Generator().manual_seed(0)))
    assert [row["position"] for row in found] == [1, 2, 3]
    assert [row["tv"] for row in found[:2]] == pytest.approx(((p[:2] - q).abs().sum(-1) / 2).tolist())
    assert found[2]["tv"] is None
    assert all(row["law_error"] < 1e-15 and row["pvalue"] > 1e-3 and row["dof"] > 10 for row in found)


def test_one_step_draws_with_the_shipped_verify(monkeypatch):
    p, q = laws(3, 40), laws(4, 40)[:2]
    monkeypatch.setattr(verification, "verify", lambda p, q, drafted, generator: (len(drafted), 0))
    found = list(rows.one_step(p, q, 5000, torch.Generator().manual_seed(0)))
    assert max(row["pvalue"] for row in found) < 1e-6


def test_a_frozen_round_has_the_rows_of_the_loop():
    target, draft = TorchModel(tiny(0)), ModelDraft(TorchModel(tiny(1, vocab=89)))
    p, q, drafted = rows.frozen_round(target, draft, [5, 6, 7], 3, torch.Generator().manual_seed(0))
    assert p.shape == (4, 97) and q.shape == (3, 97) and len(drafted) == 3
    fresh = TorchModel(tiny(0)).logits([5, 6, 7, *drafted.tolist()])[2:]
    assert torch.allclose(p, T1.probabilities(fresh), atol=1e-5)
    assert target.length == 0 and not q[:, 89:].any()


def answer(loop=specdec, dense=None):
    target = TorchModel(tiny(0, window=256))
    watched = rows.recorded(target)
    out = loop.speculative(watched, ModelDraft(TorchModel(noisy(target.model, 0.05))), [5, 6, 7], 3, 40)
    return list(rows.passes(target, [5, 6, 7], out.tokens, watched.blocks, dense)), out


def test_passes_look_at_every_row_an_answer_was_drawn_from():
    found, out = answer()
    assert [row["position"] for row in found] == list(range(40)) and {r.accepted for r in out.rounds} >= {0, 3}
    for row in found:
        assert max(row["error_block"], row["error_single"]) < 1e-4 and row["tv"] < 1e-5
        assert row["gap"] > 0 and not row["flipped"]


def test_passes_compare_with_the_dense_target():
    assert {(row["tv_dense"], row["agrees_dense"]) for row in answer()[0]} == {(None, None)}
    dense = TorchModel(tiny(0, window=256))
    dense.logits([1, 2])  # whatever its cache holds
    assert all(row["tv_dense"] < 1e-5 and row["agrees_dense"] for row in answer(dense=dense)[0])
    far = answer(dense=TorchModel(tiny(1, window=256)))[0]
    assert min(row["tv_dense"] for row in far) > 1e-3 and not all(row["agrees_dense"] for row in far)


@pytest.mark.parametrize("wrong", ["max(0, target.length - len(context))", "target.length - (len(context) - 2)", "0"])
def test_passes_see_a_wrong_rollback(wrong):
    with pytest.raises(ValueError, match="no recorded row"):
        answer(planted("specdec.decoding", "target.length - (len(context) - 1)", wrong))


def test_passes_see_rows_that_are_off(monkeypatch):
    forward = TorchModel._forward
    monkeypatch.setattr(
        TorchModel,
        "_forward",
        lambda self, ids, rows: forward(self, ids, rows) + 0.01 * (len(ids) > 1) * torch.arange(97),
    )
    found, _ = answer()
    assert max(row["error_single"] for row in found) > 0.5


def test_answers_by_transformers_follow_the_law_whatever_the_model_says():
    law = random_law(0, 16)
    model = markov_llama(law)
    model.generation_config = own = GenerationConfig(top_k=2, repetition_penalty=1.3, temperature=0.5, max_length=5)
    state = torch.get_rng_state()
    target = TorchModel(model)
    found = reference.generate(target, [7, 3], 3000, 4, seed=1)
    assert np.shape(found) == (3000, 4) and target.length == 0
    assert 3 * min(pair_pvalue(found, law, 3, at) for at in range(3)) > 1e-3
    assert model.generation_config is own and torch.get_rng_state().equal(state)
    assert reference.generate(target, [7, 3], 3000, 4, seed=1) == found
    assert reference.generate(target, [7, 3], 3000, 4, seed=2) != found


def test_answers_by_transformers_go_past_end_tokens():
    law = random_law(0, 16)
    model = markov_llama(law, eos=3)
    found = reference.generate(TorchModel(model), [7, 3], 50, 20, seed=1)
    assert np.shape(found) == (50, 20) and any(3 in tokens[:-1] for tokens in found)


def test_answers_by_transformers_read_the_whole_prompt():
    model = tiny(0)
    logits = TorchModel(model).logits([5, 6, 7])[-1:]
    law = T1.probabilities(logits)[0].numpy()
    counts = np.bincount(
        [t[0] for t in reference.generate(TorchModel(model), [5, 6, 7], 5000, 1, seed=0)], minlength=97
    )
    assert specdec.equivalence.one_sample_chi2(counts, law).pvalue > 1e-3
