"""Derived quantities against tables small enough to work out by hand."""

import numpy as np
import pandas as pd
import pytest

from specdec import costmodel
from specdec.study import claims, explore, records, tables


def make(folder, per_token, acceptance=(3, 1, 0), v=None, name="cpu-bf16"):
    """Records of one configuration: ``per_token[k]`` seconds a token on each prompt of one domain."""
    own = folder / name
    own.mkdir(parents=True)
    answers, rounds = [], []
    for k, prompts in per_token.items():
        for prompt, seconds in enumerate(prompts):
            key = {"domain": "code", "prompt": f"code-{prompt:02d}", "temperature": 0.0, "k": k}
            answers.append(
                key | {"tokens": 10, "seconds": 10 * seconds, "diverged_at": None, "top_gap": None, "top_logit": None}
            )
            for i, accepted in enumerate(acceptance if k else (0, 0, 0)):
                half = {
                    "draft_seconds": 0.1 * k,
                    "verify_seconds": 0.5,
                    "forward_seconds": 0.5 + 0.1 * k,
                    "seconds": 0.6 + 0.1 * k,
                }
                rounds.append(
                    key
                    | {
                        "round": i,
                        "asked": k,
                        "drafted": k,
                        "accepted": min(accepted, k),
                        "emitted": min(accepted, k) + 1,
                        "ended": False,
                    }
                    | (
                        half
                        if k
                        else {"draft_seconds": 0.0, "verify_seconds": 0.5, "forward_seconds": 0.5, "seconds": 0.5}
                    )
                )
    records.write_csv(own / "answers.csv", answers)
    records.write_csv(own / "rounds.csv", rounds)
    v = v or {1: 1.0, 3: 1.1, 5: 1.2}
    latency = [
        {"model": model, "n": n, "repeat": r, "context": 8, "seconds": scale * cost * (1 + r)}
        for model, scale in (("target", 0.5), ("draft", 0.1))
        for n, cost in v.items()
        for r in range(5)
    ]
    records.write_csv(own / "latency.csv", latency)
    records.write_csv(own / "bandwidth.csv", [{"repeat": r, "bytes_per_second": 2e9} for r in range(3)])
    records.update_run(
        folder / name, name, "quick", "latency", {"weight_bytes": {"target": 500_000_000, "draft": 100_000_000}}
    )


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return tmp_path / "box"


def test_a36_speedup_is_paired_by_prompt_with_a_t_interval(machine):
    make(machine, {0: [1.0, 4.0], 2: [0.5, 1.0]})
    row = tables.speedups("box").query("domain == 'all'").iloc[0]
    logs = np.log([2.0, 4.0])
    half = 12.7062 * logs.std(ddof=1) / np.sqrt(2)  # t with one degree of freedom, 97.5 %
    assert row.speedup == pytest.approx(np.sqrt(8))
    assert (row.low, row.high) == pytest.approx((np.exp(logs.mean() - half), np.exp(logs.mean() + half)), rel=1e-5)
    assert row.prompts == 2 and row.baseline_tokens_per_second == pytest.approx(0.625)


def test_a35_a36_baseline_against_itself_is_one(machine):
    make(machine, {0: [1.0, 2.0, 3.0], 2: [1.0, 2.0, 3.0]})
    row = tables.speedups("box").iloc[0]
    assert (row.speedup, row.low, row.high) == pytest.approx((1, 1, 1))


def test_costs_are_ratios_within_a_repeat(machine):
    """Each repeat is slower than the last by a factor that v must not see."""
    make(machine, {0: [1.0], 2: [1.0]})
    costs = tables.forward_costs("box").set_index(["model", "n"])
    assert costs.loc[("target", 5)].v == pytest.approx(1.2)
    assert costs.loc[("target", 5)].v_low == costs.loc[("target", 5)].v_high == pytest.approx(1.2)
    assert tables.latency_ratios("box")["median"].iloc[0] == pytest.approx(0.2)
    floor = tables.memory("box").set_index("model").loc["target"]
    assert floor.floor == pytest.approx(0.25) and floor.t1 == pytest.approx(1.5)


def test_survival_counts_whole_uncut_rounds_only():
    rounds = pd.DataFrame(
        {
            "k": [3] * 6,
            "asked": [3, 3, 3, 3, 3, 1],
            "drafted": [3, 3, 3, 3, 3, 1],
            "accepted": [3, 2, 1, 0, 3, 1],
            "ended": [False, False, False, False, True, False],
        }
    )
    table = tables.survival(rounds, ["k"])
    assert table.survival.tolist() == [0.75, 0.5, 0.25]
    assert table.at_risk.tolist() == [4, 3, 2]
    assert table.conditional.tolist() == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert ((table.low < table.survival) & (table.survival < table.high)).all()
    total = tables.acceptance(rounds, ["k"]).iloc[0]
    assert total.tau == pytest.approx(1 + table.survival.sum())
    assert total.draft_acceptance == pytest.approx(6 / 12)
    assert total.tested_acceptance == pytest.approx(6 / 9)  # one token tested beyond the kept ones in three rounds


def test_prediction_is_the_cost_model_on_measured_parts(machine):
    make(machine, {0: [0.5], 2: [0.4]})
    row = tables.predictions("box").query("domain == 'all'").iloc[0]
    curve = [2 / 3, 1 / 3]
    assert row.tau == pytest.approx(2)
    assert (row.c, row.v, row.overhead) == pytest.approx((0.2, 1.1, 0.2))
    assert row.predicted == pytest.approx(costmodel.speedup(curve, 0.2, 1.1, 0.2))


def test_few_values_give_no_interval():
    assert np.isnan(tables.median_interval([1, 2, 3]).low)
    five = tables.median_interval([5, 1, 4, 2, 3])
    assert (five["median"], five.low, five.high) == (3, 1, 5)


@pytest.mark.parametrize(("fast", "word"), [(0.5, "pays"), (2.0, "does not pay")])
def test_the_answer_follows_the_data(machine, fast, word):
    prompts = [1.0 + 0.01 * i for i in range(8)]
    make(machine, {0: prompts, 2: [fast * p * (1 + 0.001 * i) for i, p in enumerate(prompts)]})
    text = claims.answer("box")
    assert f"**{word}**" in text and "K = 2" in text and "indicative" not in text
    verdicts = claims.verdicts("box")
    assert set(verdicts) == set(claims.paper()["claims"])
    assert verdicts["some-decelerate"].verdict == (claims.HOLDS if fast > 1 else claims.FAILS)
    assert verdicts["best-speedup"].verdict == (claims.HOLDS if fast < 1 else claims.FAILS)
    assert verdicts["pooled-test"].verdict == claims.UNTESTED


def test_few_prompts_are_called_indicative(machine):
    make(machine, {0: [1.0, 1.1], 2: [0.5, 0.5]})
    assert "2 prompts, indicative" in claims.answer("box")


def test_a36_a_lucky_few_do_not_lead(machine):
    many = [1.0 + 0.01 * i for i in range(8)]
    make(machine, {0: many, 2: [p / 1.5 for p in many]})
    make(machine, {0: [1.0], 2: [0.1]}, name="prompt-lookup")
    assert claims.leading("box").configuration == "cpu-bf16"


def test_a_second_mechanism_verdict(machine):
    many = [1.0 + 0.01 * i for i in range(8)]
    make(machine, {0: many, 2: [p / 1.5 for p in many]})
    make(machine, {0: many, 2: [p / 0.8 for p in many]}, v={1: 1.0, 3: 2.0, 5: 3.0}, name="cpu-fp32")
    assert claims.verdicts("box")["mechanism"].verdict == claims.HOLDS
    assert claims.verdicts("box")["some-decelerate"].found.startswith("1 of 2")


def test_the_interactive_page_starts_from_what_was_measured(machine):
    make(machine, {0: [1.0, 1.0], 2: [0.5, 0.6], 4: [0.7, 0.8]})
    make(machine, {0: [1.0], 2: [0.5]}, name="prompt-lookup", v={1: 1.0, 2: 1.7, 3: 1.1, 5: 1.2})
    every, code, lookup, _ = explore.starts("box", note=" (there)")
    assert (every["name"], every["domain"], code["domain"]) == ("cpu-bf16 (there)", "all domains", "code")
    assert (every["k"], every["c"], every["o"], every["a"]) == (2, 0.2, 0.2, 0.62)  # a + a^2 = 1: two tokens a round
    assert every["v"] == [[1, 1.0], [3, pytest.approx(1.1)], [5, pytest.approx(1.2)]]
    assert explore.speedup(every, 2) == pytest.approx(2 / (2 * 0.2 + 1.1 + 0.2), rel=0.01)
    assert [(p["k"], p["few"], "low" in p) for p in every["points"]] == [(2, True, True), (4, True, True)]
    assert lookup["v"] == [[1, 1.0], [3, pytest.approx(1.1)]]  # at the measured K only
    assert "low" not in lookup["points"][0] and explore.html([lookup])  # JSON knows no NaN
