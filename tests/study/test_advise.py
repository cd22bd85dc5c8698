"""`make advise`: what it looks at, what it measures, what it says."""

import numpy as np
import pytest
import torch

import specdec
from specdec import costmodel
from specdec.study import advise, configurations, pairs


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(advise, "TOKENS", 24)
    monkeypatch.setattr(advise, "PROMPTS", {"code": 1})
    monkeypatch.setattr(advise, "REPEATS", 2)


def found(name="pair", k=4, low=1.2, speedup=1.5, tokens_per_second=15.0):
    return advise.Forecast(name, 0.2, 1.1, k, speedup, low, 1.8, tokens_per_second, 10.0)


@pytest.mark.parametrize(
    ("forecasts", "verdict"),
    [
        ([found()], "Speculation pays here: pair at K = 4, about 1.50 times"),
        ([found(low=0.9)], "may pay here: pair at K = 4, but the interval holds 1"),
        ([found(k=0, speedup=1.0, tokens_per_second=10.0)], "does not pay here"),
        ([found("slow", tokens_per_second=9.0), found("fast", tokens_per_second=20.0)], "pays here: fast at"),
    ],
)
def test_the_verdict_follows_the_forecasts(forecasts, verdict):
    text = advise.advice(forecasts)
    assert verdict in text
    rows = text.splitlines()[1 : 1 + len(forecasts)]
    assert [row.split()[0] for row in rows] == [f.name for f in sorted(forecasts, key=lambda f: -f.tokens_per_second)]
    assert "none pays" in rows[0] if forecasts[0].k == 0 else "(" in rows[0]


def test_the_studys_own_configurations_by_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    names = set(advise.candidates(None, None))
    declared = configurations.study().configurations
    assert {declared[n].target for n in names} == {"qwen2.5-coder-1.5b"}
    assert {"cpu-bf16", "prompt-lookup"} <= names <= set(configurations.study().profiles["quick"])
    assert "cpu-fp32" not in names and "cuda-bf16" not in names
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert set(advise.candidates(None, None)) == {"mps-fp16"}


def test_a_pair_of_ones_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert set(advise.candidates("a/big", None)) == {"prompt lookup"}
    own = advise.candidates("a/big", "a/small")
    assert set(own) == {"prompt lookup", "a/small, dense", "a/small, int8"}
    assert {one.target for one in own.values()} == {"a/big"} and own["a/small, int8"].draft.format == "int8"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert set(advise.candidates("a/big", "a/small")) == {"prompt lookup", "a/small, dense"}


def test_a_draft_alone_is_refused(capsys):
    assert advise.main(["--draft", "smollm2-135m"]) == 1
    assert "DRAFT needs a TARGET" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(capsys, short):
    assert advise.main(["--target", "nowhere"]) == 1
    assert "'nowhere' is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smoke-lookup", "smoke-layers"])
def test_a_forecast_is_the_cost_model_on_what_was_measured(smollm2, short, monkeypatch, name):
    costs, kept = [], costmodel.Costs
    monkeypatch.setattr(costmodel, "Costs", lambda **values: costs.append(kept(**values)) or costs[-1])
    configuration = configurations.study().configurations[name]
    one = advise.forecast(name, configuration, advise.alone(configuration))
    [cost] = costs
    assert (cost.c > 0) == (name == "smoke-layers") and set(cost.v) == set(range(2, advise.K_MAX + 2))
    assert (one.c, one.v) == (cost.c, cost.v.get(one.k + 1, 1.0))
    assert one.low <= one.speedup <= one.high or one.k == 0
    assert one.tokens_per_second == pytest.approx(one.speedup * one.alone)
    assert one.speedup == 1 if one.k == 0 else one.speedup > 1


@pytest.mark.parametrize("name", ["smoke-lookup", "smoke-layers"])
def test_a_replayed_round_is_a_decoded_one(smollm2, short, monkeypatch, name):
    monkeypatch.setattr(advise, "TOKENS", 48)
    configuration = configurations.study().configurations[name]
    target = advise.alone(configuration)
    draft = pairs.load_draft(configuration, target.model)
    greedy = specdec.Sampling(temperature=0)
    [out] = [specdec.speculative(target.model, draft, ids, advise.K_MAX, advise.TOKENS, greedy) for ids in target.work]
    assert out.tokens == target.answers[0]
    decoded = [(r.drafted, r.accepted) for r in out.rounds]
    found = advise.replayed(draft, target).tolist()
    assert len(found) > 3 and any(accepted for _, accepted in found) and not all(d == a for d, a in found)
    assert found == [list(round) for round in decoded[: len(found)]] and len(decoded) - len(found) <= advise.K_MAX


def test_answers_without_room_for_a_round_are_refused():
    target = advise.Alone(None, [[1, 2]], [[3] * advise.K_MAX], {1: 1.0}, 1.0, 0.0)
    with pytest.raises(ValueError, match="no room for a prompt and 9 tokens"):
        advise.replayed(specdec.PromptLookup(), target)


def test_a_target_is_measured_once(monkeypatch, capsys):
    declared, targets = configurations.study().configurations, []
    chosen = {name: declared[name] for name in ("cpu-bf16", "gguf-int8", "prompt-lookup", "int8-both")}
    monkeypatch.setattr(advise, "candidates", lambda target, draft: chosen)
    monkeypatch.setattr(
        advise, "alone", lambda configuration: targets.append(configuration.format) or configuration.format
    )
    monkeypatch.setattr(
        advise,
        "forecast",
        lambda name, configuration, target: found(name, low=float(target == configuration.format) * 2),
    )
    assert advise.main([]) == 0
    assert sorted(targets) == ["dense", "int8"]
    out = capsys.readouterr()
    assert "pays here" in out.out and out.err.count("4 of 4") == 1


def test_no_draft_is_a_speedup_of_one():
    cost = costmodel.Costs(c=0.2, v={2: 1.0})
    assert advise.speedup_at(0, np.array([0.9]), cost) == 1
    assert advise.speedup_at(1, np.array([0.9]), cost) == pytest.approx(1.9 / 1.2)
