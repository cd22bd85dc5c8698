"""Derived quantities against tables small enough to work out by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from specdec import costmodel, equivalence
from specdec.study import chapter, claims, configuration_pages, configurations, explore, records, tables


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
            length = max(k, 0)
            for i, accepted in enumerate(acceptance if k else (0, 0, 0)):
                half = {
                    "draft_seconds": 0.1 * length,
                    "verify_seconds": 0.5,
                    "forward_seconds": 0.5 + 0.1 * length,
                    "seconds": 0.6 + 0.1 * length,
                }
                rounds.append(
                    key
                    | {
                        "round": i,
                        "asked": length,
                        "drafted": length,
                        "accepted": min(accepted, length),
                        "emitted": min(accepted, length) + 1,
                        "ended": False,
                    }
                    | (
                        half
                        if length
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


def test_prediction_weighs_prompts_as_the_speedup_does(machine):
    """Two prompts, one of them with twice the rounds: each counts once."""
    make(machine, {0: [0.5, 0.5], 2: [0.4, 0.4]})
    rounds = pd.read_csv(machine / "cpu-bf16" / "rounds.csv")
    slow = (rounds.prompt == "code-01") & (rounds.k == 2)
    rounds.loc[slow, "accepted"] = 0
    records.write_csv(
        machine / "cpu-bf16" / "rounds.csv", [*rounds.to_dict("records"), *rounds[slow].to_dict("records")]
    )
    row = tables.predictions("box").query("domain == 'all'").iloc[0]
    assert row.tau == pytest.approx(np.sqrt(2 * 1))
    assert row.predicted == pytest.approx(np.sqrt(2) / costmodel.round_cost(2, row.c, row.v, row.overhead))


def test_a_half_is_predicted_from_the_other(machine):
    """Half of the prompts is twice as fast as their rounds say: the account of the others cannot know, and says so."""
    make(machine, {0: [0.5] * 8, 2: [0.5 / 1.2, 0.25 / 1.2] * 4})
    table = tables.held_out("box").query("domain == 'code'").set_index("half")
    predicted = tables.predictions("box").predicted.iloc[0]
    assert table.predicted.tolist() == pytest.approx([predicted] * 2)
    assert table.speedup.tolist() == pytest.approx([1.2, 2.4], rel=1e-5)
    assert table.ratio.tolist() == pytest.approx([predicted / 1.2, predicted / 2.4], rel=1e-5)
    assert (table.prompts == 4).all()
    factors = table.tau_miss * table.cost_miss * table.own_miss
    assert factors.tolist() == pytest.approx(table.ratio.tolist())
    make(machine, {0: [0.5] * 3, 2: [0.4] * 3}, name="cpu-fp32")
    assert set(tables.held_out("box").configuration) == {"cpu-bf16"}  # three prompts make no two halves


def test_fidelity_is_told_of_targets_that_are_not_dense(machine):
    rows = [{"tv_dense": tv, "agrees_dense": tv < 0.2} for tv in (0.1, 0.1, 0.1, 0.3)]
    records.write_csv(machine / "int8-target" / "passes.csv", rows)
    records.write_csv(machine / "cpu-bf16" / "passes.csv", [{"tv_dense": None, "agrees_dense": None}])
    [row] = tables.fidelity("box").itertuples()
    assert (row.configuration, row.rows, row.tv, row.tv_largest, row.agreement) == ("int8-target", 4, 0.1, 0.3, 0.75)
    assert row.low < 0.75 < row.high


def test_an_adaptive_k_is_held_against_the_k_of_the_other_half(machine):
    """K = 2 is the best on every second prompt, K = 4 on the others: each is judged where the other was chosen."""
    fast, slow = 0.4, 0.8
    seconds = {0: [1.0] * 8, 2: [fast, slow] * 4, 4: [slow, fast] * 4, configurations.ADAPTIVE: [0.5] * 8}
    make(machine, seconds)
    row = tables.adaptive("box").query("domain == 'code'").iloc[0]
    assert row.of_fixed == row.of_fixed_low == row.of_fixed_high == pytest.approx(slow / 0.5, rel=1e-5)
    assert row.speedup == pytest.approx(2.0, rel=1e-5) and row.ks == [2, 4] and row.prompts == 8
    assert set(tables.speedups("box").k) == {2, 4} and set(tables.predictions("box").k) == {2, 4}
    told = "2.00 (2.00 to 2.00) times over all domains and 2.00 (2.00 to 2.00) times on code"
    assert f"; with a K that adapts, {told}. " in claims.answer("box")
    assert configuration_pages._Account("box")._beside("cpu-bf16") == [f"Greedy, {told} with a $K$ that adapts."]
    make(machine, {0: [1.0] * 3, 2: [0.5] * 3, configurations.ADAPTIVE: [0.5] * 3}, name="cpu-fp32")
    assert set(tables.adaptive("box").configuration) == {"cpu-bf16"}  # three prompts make no two halves


def test_the_target_alone_is_held_against_itself(machine):
    make(machine, {0: [1.0, 1.1, 0.9, 1.0], 2: [0.5] * 4, configurations.CONTROL: [1.1, 1.0, 1.0, 0.9]})
    make(machine, {0: [1.0] * 4, configurations.CONTROL: [0.5, 0.51, 0.5, 0.49]}, name="cpu-fp32")
    make(machine, {0: [1.0], 2: [0.5]}, name="int8-draft")
    table = tables.controls("box").set_index("configuration")
    assert set(table.index) == {"cpu-bf16", "cpu-fp32"} and (table.prompts == 4).all()
    fair, unfair = table.loc["cpu-bf16"], table.loc["cpu-fp32"]
    assert fair.ratio_low < 1 < fair.ratio_high and unfair.ratio_low > 1.9
    logs = np.log([1.0 / 1.1, 1.1, 0.9, 1.0 / 0.9])
    half = stats.t.ppf(1 - 0.05 / 2 / 2, 3) * logs.std(ddof=1) / 2  # two cells share the level
    assert fair.ratio_high == pytest.approx(np.exp(logs.mean() + half), rel=1e-5)
    assert set(tables.speedups("box").k) == {2}


def test_machines_are_set_side_by_side(machine):
    make(machine, {0: [1.0, 1.0], 2: [0.8, 0.8], 4: [0.5, 0.5]})
    make(machine, {0: [1.0, 1.0], 2: [0.5, 0.5]}, name="int8-draft")
    make(machine.parent / "other", {0: [1.0, 1.0], 2: [2.0, 2.0], 4: [4.0, 4.0]}, v={1: 1.0, 3: 2.0, 5: 3.5})
    found = tables.across(["box", "other"]).set_index(["machine", "configuration"])
    assert set(found.index) == {("box", "cpu-bf16"), ("box", "int8-draft"), ("other", "cpu-bf16")}
    here, there = found.loc[("box", "cpu-bf16")], found.loc[("other", "cpu-bf16")]
    assert (here.k, here.speedup, here.v5, here.c) == pytest.approx((4, 2.0, 1.2, 0.2))
    assert (there.k, there.speedup, there.v5, there.c) == pytest.approx((2, 0.5, 3.5, 0.2))


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
    assert claims.main_tokens("box").empty
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


def test_a_four_bit_target_is_told_from_a_metal_one(machine):
    many = [1.0 + 0.01 * i for i in range(8)]
    make(machine, {0: many, 2: [p / 0.8 for p in many]}, v={1: 1.0, 3: 2.5, 5: 4.5}, name="gguf-q4")
    found = claims.verdicts("box")["serial-verification"]
    assert found.verdict == claims.UNTESTED and "`gguf-q4` v(5) = 4.50" in found.found
    make(machine, {0: many, 2: [p / 0.8 for p in many]}, v={1: 1.0, 3: 2.5, 5: 4.5}, name="gguf-metal")
    assert claims.verdicts("box")["quantised-cost"].verdict == claims.HOLDS


def test_every_configuration_has_a_page(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(configuration_pages, "FOLDER", tmp_path / "pages")
    many = [1.0 + 0.01 * i for i in range(8)]
    make(machine, {0: many, 2: [p / 1.5 for p in many], 4: [p / 0.8 for p in many]}, acceptance=(1, 0, 0))
    make(tmp_path / "theirs", {0: [1.0, 1.1], 2: [0.9, 1.0]}, name="prompt-lookup")
    for name in ("prompt-lookup", "gguf-q4"):
        make(tmp_path / "third", {0: [1.0, 1.1], 2: [0.9, 1.0]}, name=name)
    (machine / "skipped.json").write_text('{"cuda-bf16": "no CUDA device here"}')
    configuration_pages.write("box", "theirs", "third")
    pages = {path.stem: path.read_text() for path in (tmp_path / "pages").iterdir()}
    assert set(pages) == set(configurations.with_page()) and "toy" not in pages
    own = pages["cpu-bf16"]
    assert "CONFIGURATION=cpu-bf16" in own and "Not run on this machine" not in own
    assert "At its best $K$ = 2 it wins: 1.50 (1.50 to 1.50)" in own and "| 4 | " in own and "| only " in own
    assert "Not run on this machine (`box`): no CUDA device here." in pages["cuda-bf16"]
    lookup = pages["prompt-lookup"]
    assert (
        "Not run on this machine (`box`): not in the profile" in lookup and "The published machine `theirs`: " in lookup
    )
    assert "The published machine `third`: " in pages["gguf-q4"]


def test_a_draft_that_is_always_kept_has_its_pages(machine, tmp_path, monkeypatch):
    """exp(log 3) is more than 3: by that rounding, K = 2 gave more than all its tokens, and the pages refused it."""
    monkeypatch.setattr(configuration_pages, "FOLDER", tmp_path / "pages")
    make(machine, {0: [1.0, 1.0], 2: [0.5, 0.5]}, acceptance=(2, 2, 2))
    assert (tables.predictions("box").tau == 3).all()
    configuration_pages.write("box")
    assert explore.starts("box")[0]["a"] == 1


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


# --- equivalence --------------------------------------------------------------------------------------------------

LAW = np.array([0.4, 0.3, 0.2, 0.1])  # in descending order: the rank of a token is its id


def sampled(seed=0, **laws):
    """tokens.csv of four prompts, eight answers of 20 independent tokens an arm, drawn by the laws, scored by LAW."""
    rng, entropy = np.random.default_rng(seed), -(LAW * np.log(LAW)).sum()
    key = pd.MultiIndex.from_product([range(4), range(8), range(20)], names=["prompt", "answer", "position"])
    found = []
    for arm, law in laws.items():
        token = rng.choice(4, size=len(key), p=law)
        scores = {
            "logp": np.log(LAW[token]),
            "entropy": entropy,
            "varentropy": (LAW * (np.log(LAW) + entropy) ** 2).sum(),
            "cdf_rank": LAW.cumsum()[token] - LAW[token],
            "probability": LAW[token],
        }
        rows = key.to_frame(index=False).assign(arm=arm.replace("_", "-"), token=token, **scores)
        found.append(rows.assign(configuration="cpu-bf16"))
    return pd.concat(found, ignore_index=True)


THREE = {"target_only": LAW, "speculative": LAW, "transformers": LAW}


@pytest.mark.parametrize(("arms", "count"), [(2, 1 + 2 * 2), (3, 3 + 2 * 3)])
def test_the_family_holds_every_pair_and_every_arm(arms, count):
    tokens = sampled(**dict(list(THREE.items())[:arms]))
    tests = tables.family(tokens)
    assert len(tests) == count and not tests.duplicated(["test", "arms"]).any()
    assert tests.holm.tolist() == equivalence.holm(tests.pvalue).tolist() and tests.holm.min() > tables.ALPHA
    pair = tables.pooled(tokens).iloc[0]
    counts = pd.crosstab(tokens.token, tokens.arm)
    by_hand = equivalence.two_sample_chi2(counts["speculative"], counts["target-only"])
    assert (pair["first"], pair.second, pair.tokens_first) == ("speculative", "target-only", 640)
    assert (pair.statistic, pair.dof, pair.ratio) == (by_hand.statistic, 3, pytest.approx(by_hand.statistic / 3))
    assert pair.permuted.statistic == pytest.approx(pair.statistic)  # answers of one length
    assert "no difference" in claims.sampled(tokens) and "640 sampled tokens" in claims.sampled(tokens)


def test_a_wrong_arm_is_named_by_the_family():
    tokens = sampled(**THREE | {"speculative": LAW[::-1]})
    tests = tables.family(tokens)
    seen = tests[tests.holm <= tables.ALPHA]
    assert len(seen) == 4 and seen.arms.str.contains("speculative").all()  # two pairs, PIT, likelihood
    assert claims.sampled(tokens).startswith("a difference from")


def test_the_overview_and_the_chapter_read_the_same_tokens(machine):
    """Those of the leading configuration; of another where it has none."""
    prompts = [1.0 + 0.01 * i for i in range(8)]
    make(machine, {0: prompts, 2: [p / 2 for p in prompts]})
    make(machine, {0: prompts, 2: [2 * p for p in prompts]}, name="cpu-fp32")
    tokens = sampled(**THREE)
    records.write_csv(machine / "cpu-fp32" / "tokens.csv", tokens.drop(columns="configuration"))
    assert claims.main_tokens("box").configuration.unique().tolist() == ["cpu-fp32"]
    assert "Sampled text of `cpu-fp32`: no difference" in claims.answer("box")  # said, since another one leads
    records.write_csv(machine / "cpu-bf16" / "tokens.csv", tokens.drop(columns="configuration"))
    assert claims.main_tokens("box").configuration.unique().tolist() == ["cpu-bf16"]
    pair = tables.pooled(claims.main_tokens("box")).iloc[0]
    verdict = claims.verdicts("box")["pooled-test"]
    assert verdict.verdict == claims.HOLDS and f"chi-squared {pair.statistic:.1f}, 3 degrees" in verdict.found
    assert "calibrated tests in 640 sampled tokens" in claims.answer("box")
    assert "ampled text of" not in claims.answer("box")


def test_equality_is_claimed_only_where_it_is_shown():
    few = sampled(**THREE).query("answer < 2")
    assert claims.sampled(few).endswith("was not shown (power 0.00)")
    many = pd.concat([sampled(seed, **THREE).assign(answer=lambda d, s=seed: d.answer + 8 * s) for seed in range(20)])
    assert claims.sampled(many).endswith("nat a token was shown")


def test_batches_of_the_target_are_a_null_of_their_own():
    """Independent tokens: the statistic has its degrees of freedom as its mean."""
    batches = [sampled(seed, target_only=LAW).assign(batch=seed) for seed in range(1, 11)]
    batches = [
        b.groupby(["batch", "prompt", "answer"]).token.agg(ids=lambda t: " ".join(map(str, t))).reset_index()
        for b in batches
    ]
    null = tables.repeated(sampled(**THREE), pd.concat(batches))
    assert len(null) == 10 * 9 / 2 + 10 and (null.dof == 3).all()
    assert null.ratio.mean() == pytest.approx(1, abs=0.5)
    assert not set(null["first"]) & {"speculative", "transformers"}


def test_one_step_corrects_over_all_rows():
    steps = pd.DataFrame(
        {
            "configuration": "cpu-bf16",
            "position": [1, 1, 2, 2],
            "tv": [0.1, 0.3, 0.5, 0.5],
            "law_error": [1e-16, 3e-16, 2e-16, 1e-16],
            "draws": 1000,
            "pvalue": [0.9, 0.04, 0.01, 0.5],
        }
    )
    table = tables.one_step(steps).set_index("position")
    assert table.holm.tolist() == pytest.approx([0.12, 0.04])
    assert (table.rows[1], table.tv[1], table.law_error[1], table.pvalue[2]) == (2, pytest.approx(0.2), 3e-16, 0.01)


def test_the_gap_is_that_of_rows_whose_favourite_flipped():
    row = {"tv": 0.1, "error_block": 0.2, "error_single": 0.1}
    passes = pd.DataFrame(
        [
            {"configuration": "cpu-bf16", **row, "gap": 0.05, "flipped": True},
            {"configuration": "cpu-bf16", **row, "gap": 9.0, "flipped": False},
            {"configuration": "cpu-fp32", **row, "gap": 9.0, "flipped": False},
        ]
    )
    table = tables.block_shape(passes).set_index("configuration")
    assert (table.flipped["cpu-bf16"], table.gap["cpu-bf16"], table.rows["cpu-bf16"]) == (1, 0.05, 2)
    assert table.flipped["cpu-fp32"] == 0 and np.isnan(table.gap["cpu-fp32"])


def test_rates_have_exact_intervals():
    data = pd.DataFrame(
        [
            ("none", None, "draws", 3000, 200, 2, False),
            ("a", "drafts", "draws", 500, 100, 90, False),
            ("a", "drafts", "draws", 3000, 100, 100, False),
            ("b", "drafts", "draws", 3000, 300, 300, False),
            ("a", "drafts", "law", 1, 1, 1, True),
        ],
        columns=["fault", "module", "level", "size", "repeats", "detected", "certain"],
    )
    found = tables.detections(data).set_index(["fault", "level"])
    assert (found.repeats["a", "draws"], found.rate["a", "draws"]) == (100, 1)  # the largest sample
    assert found.low["a", "draws"] == pytest.approx(0.05 ** (1 / 100)) and found.low["a", "law"] == 1
    assert found[found.seen].index.tolist() == [("b", "draws"), ("a", "law")]  # 100 of 100 do not show 99 %
    assert found.planted.sum() == 3
    power = tables.level_power(data).set_index(["level", "size"])
    assert power.loc[("draws", 3000)].tolist() == [2, 1, 1, 0.01]
    assert power.rate["draws", 500] == 0.9 and np.isnan(power.alarms["draws", 500])


def test_false_alarms_are_called_so_only_beyond_chance():
    data = pd.DataFrame({"repeats": 100, "rejected": [0, 9, 50], "level": 0.05})
    alarms = tables.calibrated(data)
    assert (alarms.rate[0], alarms.low[0]) == (0, 0) and alarms.high[0] == pytest.approx(1 - 0.025 ** (1 / 100))
    assert (alarms.holm <= tables.ALPHA).tolist() == [False, False, True]


def test_each_refuting_observation_is_seen_where_it_is():
    steps = pd.DataFrame({"law_error": [1e-15, 1e-15], "pvalue": [0.3, 0.9]})
    passes = pd.DataFrame({"configuration": ["cpu-fp32", "cpu-bf16"], "error_block": [1e-5, 0.3], "error_single": 1e-5})
    greedy = pd.DataFrame({"configuration": ["cpu-fp32", "cpu-bf16"], "answers": 3, "identical": [3, 1]})
    right = {"tests": tables.family(sampled(**THREE)), "steps": steps, "passes": passes, "greedy": greedy}
    nothing = {name: frame.iloc[:0] for name, frame in right.items()}
    assert claims.refutations(**nothing).seen.isna().all()
    assert claims.refutations(**right).seen.tolist() == [False] * 5  # bfloat16 may differ
    wrong = [
        {"steps": steps.assign(law_error=[1e-15, 1e-3])},
        {"steps": steps.assign(pvalue=[0.02, 0.9])},
        {"passes": passes.assign(error_block=[1.0, 0.3])},
        {"greedy": greedy.assign(identical=[2, 1])},
        {"tests": tables.family(sampled(**THREE | {"speculative": LAW[::-1]}))},
    ]
    for i, one in enumerate(wrong):
        assert claims.refutations(**right | one).seen.tolist() == [j == i for j in range(5)]


def test_records_of_the_published_machine_stand_in_and_are_marked(machine):
    page = chapter.Chapter("box", "other", "notebooks/analyse/equivalence.ipynb")
    records.write_csv(machine.parent / "other" / "cpu-bf16" / "passes.csv", [{"tv": 0.5}])
    found, whose = page.records("passes")
    assert (whose, len(found)) == ("other", 1) and "`other`" in page.note(whose)
    records.write_csv(machine / "cpu-bf16" / "passes.csv", [{"tv": 0.1}, {"tv": 0.2}])
    found, whose = page.records("passes")
    assert (whose, len(found), page.note(whose)) == ("box", 2, "")
    found, whose = page.records("onestep")
    assert found.empty and whose == "box"  # nothing to mark
