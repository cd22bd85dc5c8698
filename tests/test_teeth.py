"""Planted faults are caught: each is a change to the shipped source, and a change that no longer applies fails.

Sizes here are a fraction of the study's; the study counts how often each level sees each fault.
"""

import numpy as np
import pandas as pd
import pytest
from kit import G, Table, random_law

import specdec
from specdec.study import teeth, toys
from specdec.study.configurations import Teeth

SMALL = Teeth(runs=500, draws=2000, answers=3, repeats=1, power_repeats=1, calibration_repeats=200, seed=0)
LEVELS = {name: level for level in teeth.LEVELS for name in level.names}
UNFAULTED = {"exact law": 1e-12, "cache": 1e-5, "greedy": 0}  # largest error; tests: p above 0.001


@pytest.mark.parametrize("fault", teeth.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_seen_by_its_cheapest_level(fault):
    level = LEVELS[fault.level]
    found = level.look(teeth.code(fault), SMALL, 0)[fault.level]
    if level.bound is None:
        assert found < 1e-6
    else:
        assert found > max(1e-3, level.bound)  # far from rounding


@pytest.mark.parametrize("level", teeth.LEVELS, ids=lambda level: level.names[0])
@pytest.mark.parametrize("control", teeth.CONTROLS, ids=lambda control: control.name)
def test_no_false_alarm_without_a_fault(control, level):
    for name, found in level.look(teeth.code(control), SMALL, 0).items():
        if name == "pooled chi-squared":  # not calibrated for answers that depend: see below
            continue
        assert found <= UNFAULTED[name] if level.bound is not None else found > 1e-3


def test_rounds_of_every_length_are_looked_at():
    """A draft that is always or never right would hide faults from the certain levels."""
    hf, other = teeth._tiny_pair()
    for T in (0, 1):
        lengths = set()
        for prompt in teeth.TINY_PROMPTS:
            _, out = G(hf, other, prompt, teeth.TINY_K, teeth.TINY_LENGTH, T=T)
            lengths |= {r.accepted for r in out.rounds}
        assert lengths == set(range(teeth.TINY_K + 1))


def test_a_fault_in_verification_reaches_the_loop():
    for fault in teeth.FAULTS:
        made = teeth.code(fault)
        assert made.decoding.verify is made.verification.verify is not specdec.verification.verify
        assert made.decoding.speculative is not specdec.speculative
        assert made.drafts.ModelDraft is not specdec.ModelDraft


def test_a_patch_that_no_longer_applies_fails():
    with pytest.raises(ValueError, match="occurs 0 times in specdec.verification: the patch no longer applies"):
        teeth.planted("specdec.verification", "a line that is not there", "")
    with pytest.raises(ValueError, match="the patch no longer applies"):
        teeth.planted("specdec.verification", "p", "q")  # which of them?
    assert specdec.verification.law.__module__ == "specdec.verification"


def test_code_without_a_fault_is_the_shipped_code():
    law, other = random_law(0, 16), random_law(1, 16)
    made = teeth.code(teeth.CONTROLS[0])
    for seed in range(20):
        draft = made.drafts.ModelDraft(Table(other))
        out = made.decoding.speculative(Table(law), draft, [3], 2, 20, seed=seed)
        assert out.tokens == G(Table(law), Table(other), [3], 2, 20, seed=seed)[0]


def test_the_catalogue_is_in_order():
    names = [fault.name for fault in (*teeth.CONTROLS, *teeth.FAULTS)]
    assert len(set(names)) == len(names)
    assert all(fault.level in teeth.NAMES and fault.module in teeth.MODULES for fault in teeth.FAULTS)
    looked = {(fault.name, name) for fault, level in teeth.units() for name in level.names}
    assert all((fault.name, fault.level) in looked for fault in teeth.FAULTS)
    assert all((control.name, name) in looked for control in teeth.CONTROLS for name in teeth.NAMES)


# Toys


def test_a_table_of_order_two_reads_its_cache():
    law = random_law(0, 4, order=2)
    table, logs = Table(law), np.log(law)
    np.testing.assert_allclose(table.logits([1, 2]), [logs[0, 1], logs[1, 2]], rtol=1e-6)
    table.drop_last(1)
    np.testing.assert_allclose(table.logits([3, 0]), [logs[1, 3], logs[3, 0]], rtol=1e-6)
    assert table.ids == [1, 3, 0]


def test_pairs_of_a_walk_follow_their_law():
    law, rng = random_law(1, 3, order=2), np.random.default_rng(0)
    tokens = toys.walks(law, np.tile([2, 1], (20_000, 1)), 4, rng)
    for i, joint in enumerate(toys.pair_laws(law, (2, 1), 3)):
        counts = np.bincount(tokens[:, i] * 3 + tokens[:, i + 1], minlength=9)
        assert specdec.equivalence.one_sample_chi2(counts, joint.ravel()).pvalue > 1e-3


def test_scored_is_what_the_loop_scores():
    law, rng = random_law(2, 8), np.random.default_rng(0)
    tokens = toys.walks(law, np.array([[3]]), 30, rng)[0].tolist()
    shipped = pd.DataFrame([vars(s) for s in specdec.score(Table(law), [3], tokens)]).drop(columns="token")
    own = toys.scored(law, np.array(tokens), np.array([3, *tokens[:-1]]))
    pd.testing.assert_frame_equal(own[shipped.columns], shipped, check_exact=False, rtol=1e-4, atol=1e-6)


# What is made of the records


def test_detection_counts_what_a_level_sees():
    fault = next(f for f in teeth.FAULTS if f.name == "one uniform for both draws")
    parameters = SMALL.model_copy(update={"power_repeats": 3, "repeats": 2})
    [row] = teeth.detection(fault, LEVELS["one step"], parameters)
    assert (row["repeats"], row["detected"], row["certain"]) == (3, 3, False) and row["largest_p"] < 1e-6
    [row] = teeth.detection(fault, LEVELS["exact law"], parameters)
    assert (row["repeats"], row["detected"], row["certain"], row["largest_p"]) == (1, 0, True, None)


@pytest.mark.parametrize(("name", "dependence"), teeth.nulls())
def test_calibrations(name, dependence):
    """Rejections of a true null in 200: what holds for every p-value but the pooled one's."""
    table = pd.DataFrame(teeth.calibration(name, dependence, SMALL)).set_index(["test", "level"]).rejected
    assert (table.groupby("test").size() == 2).all()
    for (test, level), rejected in table.items():
        if test == "pooled chi-squared" and dependence != "independent":
            assert rejected > 200 * 2 * level
        else:
            assert rejected <= 200 * level + 4 * np.sqrt(200 * level)
    if name == "answers":  # at its edge the margin is declared about as often as the level says, not never
        assert table[teeth.TOST, 0.05] > 0
