"""The committed records, and the book that is rendered from them without torch."""

import json

import numpy as np
import pytest
from PIL import Image

from specdec.study import claims, configurations, execute, records, tables, teeth
from specdec.study.configurations import ROOT

PUBLISHED = records.published()
MACHINE = next(iter(PUBLISHED), None)  # what the book shows where no other is asked for


def test_a_machine_is_published():
    assert MACHINE is not None


NAMES = [name for name in tables.runs(MACHINE) if name in configurations.with_page()]
RUNS = [(machine, name) for machine in PUBLISHED for name in tables.runs(machine) if name != "toy"]


def test_what_this_machine_can_run_is_published():
    declared = configurations.study()
    planned = {name for name in declared.profiles["standard"] if declared.configurations[name].device == "cpu"}
    assert {*NAMES, "toy"} == planned == set(tables.runs(MACHINE))


@pytest.mark.parametrize("machine", PUBLISHED)
def test_a_folder_holds_one_machine(machine):
    steps = [step for run in tables.runs(machine).values() for step in run["steps"].values()]
    kinds = {tuple(step["machine"].get(key) for key in ("name", "cpu", "vectors", "cores")) for step in steps}
    assert len(kinds) == 1 and kinds.pop()[0] == machine


@pytest.mark.parametrize(("machine", "name"), RUNS)
def test_records_are_whole(machine, name):
    run = tables.runs(machine)[name]
    plan = configurations.plan(run["profile"], name).steps()
    assert set(run["steps"]) == set(plan)
    for step, record in plan.items():
        assert run["steps"][step]["parameters"] == record.model_dump()
        assert len(run["steps"][step]["commit"]) == 40  # measured on a committed tree, so without a plus
    answers = tables.records(machine, "answers").query("configuration == @name")
    decode = plan["decode"]
    cells = sum(decode.prompts.values()) * len(decode.temperatures) * (3 + len(decode.ks))
    assert len(answers) == cells and not answers.duplicated(["prompt", "temperature", "k"]).any()
    assert answers.load.max() < run["steps"]["decode"]["machine"]["cores"] + 1  # the limit of the page Contribute
    assert (answers.tokens == decode.max_new_tokens).all()
    rounds = tables.records(machine, "rounds").query("configuration == @name")
    emitted = rounds.groupby(["prompt", "temperature", "k"]).emitted.sum()
    assert (emitted == decode.max_new_tokens).all()


def test_every_level_looked_at_every_planted_fault():
    run, plan = tables.runs(MACHINE)["toy"], configurations.plan("standard", "toy")
    assert set(run["steps"]) == {"teeth"} and run["profile"] == "standard"
    assert run["steps"]["teeth"]["parameters"] == plan.teeth.model_dump()
    assert len(run["steps"]["teeth"]["commit"]) == 40
    found, nulls = tables.records(MACHINE, "detection"), tables.records(MACHINE, "calibration")
    looked = [(fault.name, name) for fault, level in teeth.units() for name in level.names]
    assert list(zip(found.fault, found.level, strict=True)) == looked
    assert not nulls.duplicated(["test", "dependence", "level"]).any() and (nulls.repeats >= 1000).all()


def test_every_planted_fault_is_caught():
    found = tables.detections(tables.records(MACHINE, "detection"))
    faults = found[found.planted & (found.level != "pooled chi-squared")]  # which rejects a true null too
    assert set(faults.fault) == {fault.name for fault in teeth.FAULTS}
    assert faults.groupby("fault").seen.any().all()
    certain = found[~found.planted & found.certain]
    assert len(certain) and not certain.detected.any()


@pytest.mark.parametrize("machine", PUBLISHED)
def test_records_are_small(machine):
    files = [p for p in (records.RESULTS / machine).rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 10e6


@pytest.mark.parametrize("machine", PUBLISHED)
def test_no_two_answers_share_a_seed(machine):
    answers = tables.records(machine, "answers")
    assert not answers[answers.temperature > 0].duplicated(["seed"]).any()
    tokens = tables.records(machine, "tokens")
    assert tokens.empty or (tokens.groupby("seed").arm.nunique() == 1).all()


@pytest.mark.parametrize("machine", PUBLISHED)
def test_prompts_carry_the_length(machine):
    """End tokens are ignored in speed runs: that is harmless only where answers do not end by themselves."""
    alone = tables.records(machine, "answers").query("k == 0")
    assert alone.first_end.isna().mean() > 0.95


def test_the_leading_configuration_rests_on_enough_prompts_and_gains_on_code():
    best = tables.best(tables.speedups(MACHINE), claims.leading(MACHINE).configuration, "code")
    assert best.prompts >= tables.FEW
    assert best.speedup >= 1.5 and best.low > 1


@pytest.mark.parametrize("machine", PUBLISHED)
def test_the_control_shows_nothing(machine):
    table = tables.controls(machine)
    assert set(table.configuration) == {name for whose, name in RUNS if whose == machine}
    assert ((table.ratio_low < 1) & (1 < table.ratio_high)).all()


def test_the_loop_costs_little():
    """Time outside forward passes is at most 5 % of decoding, greedy and at T = 1."""
    rounds = tables.records(MACHINE, "rounds").query("configuration == 'cpu-bf16' and k > 0")
    share = (
        rounds.assign(outside=rounds.seconds - rounds.forward_seconds)
        .groupby("temperature")[["outside", "seconds"]]
        .sum()
    )
    assert set(share.index) == {0.0, 1.0}
    assert (share.outside / share.seconds < 0.05).all()


def test_float32_greedy_answers_are_the_targets():
    table = tables.greedy_agreement(MACHINE).query("configuration == 'cpu-fp32'")
    assert len(table) and (table.identical == table.answers).all()


def test_every_claim_has_a_verdict():
    verdicts = claims.verdicts(MACHINE)
    assert set(verdicts) == set(claims.paper()["claims"])
    assert {v.verdict for v in verdicts.values()} <= {claims.HOLDS, claims.FAILS, claims.UNTESTED}


def test_missing_devices_are_named():
    assert {"mps-fp16", "cuda-bf16"} <= set(tables.skipped(MACHINE)) | set(tables.runs(MACHINE))


def test_analysing_defaults_are_the_published_machine():
    for path in (ROOT / "notebooks" / "analyse").glob("*.ipynb"):
        settings = {n: e["default"] for n, e in execute._parameters(path).items()}
        assert settings == {"machine": f'"{MACHINE}"', "published": f'"{MACHINE}"'}, path.name


@pytest.fixture(scope="session")
def published_book(tmp_path_factory, published_checkout, run):
    """`html` in a fresh checkout where torch cannot be imported."""
    barred = tmp_path_factory.mktemp("barred")
    for name in ("torch", "transformers"):
        (barred / f"{name}.py").write_text(f"raise ImportError('{name} is not for rendering')\n")
    result = run(published_checkout, "html", profile=None, first=barred)
    assert result.returncode == 0, result.stdout + result.stderr
    return published_checkout


def test_the_published_book_renders_without_torch(published_book):
    text = (published_book / "_build" / "html" / "index.html").read_text()
    assert "On this machine speculative decoding" in text and MACHINE in text


def test_the_readme_shows_the_published_figure(published_book):
    """The README's figure is the only committed one: it must be the one that the records make."""
    committed = np.asarray(Image.open(ROOT / "book" / "_static" / "speedup-by-k.png").convert("L"), dtype=float)
    made = Image.open(published_book / "_build" / "figures" / "speedup-by-k.png").convert("L")
    made = np.asarray(made, dtype=float)
    assert made.shape == committed.shape
    assert np.abs(made - committed).mean() < 1
    origin = json.loads((published_book / "_build" / "figures" / "speedup-by-k.json").read_text())
    assert origin["machine"] == MACHINE
