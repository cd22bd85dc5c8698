"""The answer for one machine and the paper's claims held against it; everything computed from the records.

A verdict is *holds here*, *does not hold here* or *cannot be tested on this machine*, with the number it rests on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import yaml

from specdec import costmodel, equivalence
from specdec.study import tables
from specdec.study.configurations import DATA, study

HOLDS, FAILS, UNTESTED = "holds here", "does not hold here", "cannot be tested on this machine"


@dataclass(frozen=True)
class Verdict:
    """A claim's verdict and the number found, as text."""

    verdict: str
    found: str


def paper() -> dict:
    """``data/paper.yml``."""
    return yaml.safe_load((DATA / "paper.yml").read_text(encoding="utf-8"))


def times(row) -> str:
    """A speedup with its interval, such as "1.58 (1.43 to 1.74)"; without one where it rests on a single prompt."""
    if row is None:
        return "not measured"
    interval = "" if np.isnan(row.low) else f" ({row.low:.2f} to {row.high:.2f})"
    return f"{row.speedup:.2f}{interval}"


def prompts_note(row) -> str:
    """How many prompts a point rests on; fewer than eight make it indicative."""
    return f"{row.prompts} prompt{'s' if row.prompts > 1 else ''}" + (
        ", indicative" if row.prompts < tables.FEW else ""
    )


def leading(machine: str) -> pd.Series | None:
    """The configuration and K with the largest greedy speedup over all domains; most prompts first, then speed.

    A point that rests on few prompts must not beat one that rests on many by luck.
    """
    table = tables.speedups(machine)
    rows = table[(table.domain == "all") & (table.temperature == table.temperature.min())]
    if rows.empty:
        return None
    most = rows[rows.prompts == rows.prompts.max()]
    return most.loc[most.speedup.idxmax()]


def answer(machine: str) -> str:
    """One sentence: does it pay here, with which draft, at which K, and is it lossless?"""
    row = leading(machine)
    if row is None:
        return "Nothing has been measured on this machine yet."
    table = tables.speedups(machine)
    code = table[
        (table.configuration == row.configuration) & (table.temperature == row.temperature) & (table.k == row.k)
    ]
    code = code.set_index("domain").loc["code"] if "code" in set(code.domain) else None
    pays = "pays" if row.low > 1 else "does not pay" if row.high < 1 else "shows no clear gain"
    title = study().configurations[row.configuration].title
    text = (
        f"On this machine speculative decoding **{pays}**: `{row.configuration}` ({title}) at K = {row.k} decodes "
        f"**{times(row)} times** as fast as the target alone over all domains ({prompts_note(row)})"
    )
    if code is not None:
        text += f", {times(code)} times on code"
    if adapts := adapting(tables.adaptive(machine), row.configuration, row.temperature):
        text += f"; with a K that adapts, {adapts}"
    return text + f". {lossless(machine, row.configuration)}"


def adapting(table: pd.DataFrame, configuration: str, temperature: float) -> str:
    """Speedup over target-only decoding with an adaptive K, over all domains and on code; "" where it was not measured.

    Args:
        table: of ``tables.adaptive``.
    """
    table = table[(table.configuration == configuration) & (table.temperature == temperature)]
    table = table.rename(columns={"speedup_low": "low", "speedup_high": "high"})
    words = {"all": "over all domains", "code": "on code"}
    found = {row.domain: times(row) for row in table.itertuples()}
    return " and ".join(f"{found[domain]} times {where}" for domain, where in words.items() if domain in found)


def lossless(machine: str, configuration: str) -> str:
    """One sentence on whether a difference from the target was seen."""
    greedy = tables.greedy_agreement(machine)
    greedy = greedy[greedy.configuration == configuration]
    parts = []
    tokens = main_tokens(machine)
    if len(tokens):
        other = tokens.configuration.iloc[0]  # the loop is one and the same; sampled text is long and of one pair only
        parts.append(("" if other == configuration else f"sampled text of `{other}`: ") + sampled(tokens))
    if len(greedy):
        same, answers = greedy.identical.sum(), greedy.answers.sum()
        text = f"{same} of {answers} greedy answers are the target's token by token"
        if same < answers and study().configurations[configuration].dtype != "float32":
            text += ", the others part from it where a block is rounded otherwise than a single token"
        parts.append(text)
    if not parts:
        return ""
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def main_tokens(machine: str) -> pd.DataFrame:
    """Sampled tokens of the leading configuration, or of the first that has some where that one has none."""
    tokens, lead = tables.records(machine, "tokens"), leading(machine)
    for name in [*([] if lead is None else [lead.configuration]), *study().configurations]:
        if (tokens.configuration == name).any():
            return tokens[tokens.configuration == name]
    return tokens


def sampled(tokens: pd.DataFrame, tests: pd.DataFrame | None = None) -> str:
    """What the calibrated tests say of one configuration's sampled tokens, and whether equivalence was shown.

    Args:
        tests: what ``tables.family`` made of the same tokens, if it is there.
    """
    tests, spec = tables.family(tokens) if tests is None else tests, tokens[tokens.arm == "speculative"]
    tost = equivalence.tost(spec, tables.MARGIN, tables.ALPHA)
    seen = "a difference from" if tests.holm.min() <= tables.ALPHA else "no difference from"
    equal = "shown" if tost.pvalue <= tables.ALPHA else f"not shown (power {tost.power:.2f})"
    return (
        f"{seen} the target's law was seen by {len(tests)} calibrated tests in {len(spec):,} sampled tokens an arm (smallest p "
        f"after Holm's correction {tests.holm.min():.2f}), and equality within {tables.MARGIN} nat a token was {equal}"
    )


def refutations(tests, steps, passes, greedy) -> pd.DataFrame:
    """What would have refuted "lossless", by the limits in ``tables``, and what was found.

    Args:
        tests: of ``tables.family``; steps, passes: the records ``onestep`` and ``passes``; greedy: of
            ``tables.greedy_agreement``. Each may be empty.

    Returns:
        Columns: observation, found, seen (None where it was not looked for).
    """
    rows = []

    def add(observation, data, found):
        value, seen = found(data) if len(data) else ("not measured", None)
        rows.append({"observation": observation, "found": value, "seen": seen})

    def law(table):
        return f"largest {table.law_error.max():.1e}", table.law_error.max() > tables.LAW_ERROR

    def draws(table):
        smallest = equivalence.holm(table.pvalue).min()
        return f"smallest {smallest:.3f} of {len(table):,}", smallest <= tables.ALPHA

    def cache(table):
        worst = table[["error_block", "error_single"]].max(axis=None)
        return f"largest {worst:.1e}", worst > tables.ROW_ERROR

    def text(table):
        alike, of = table.identical.sum(), table.answers.sum()
        return f"{of - alike} of {of} answers", alike < of

    def family(table):
        return f"smallest {table.holm.min():.3f} of {len(table)}", table.holm.min() <= tables.ALPHA

    exact = [name for name, c in study().configurations.items() if c.dtype == "float32"]
    add(f"one step: an error of the law above {tables.LAW_ERROR:g}", steps, law)
    add(f"one step: a p of the draws, after Holm's correction, of {tables.ALPHA} or less", steps, draws)
    name = f"cache: a float32 logit off by more than {tables.ROW_ERROR:g}"
    add(name, passes[passes.configuration.isin(exact)], cache)
    add("greedy text: a float32 answer unlike the target's", greedy[greedy.configuration.isin(exact)], text)
    add(f"sampled text: a p of the family, after Holm's correction, of {tables.ALPHA} or less", tests, family)
    return pd.DataFrame(rows)


def verdicts(machine: str) -> dict[str, Verdict]:
    """A verdict for every claim of ``data/paper.yml``, by its id."""
    return {name: _VERDICTS[name](machine, entry["values"]) for name, entry in paper()["claims"].items()}


def _at(machine, configuration):
    """Every K of one configuration over all domains, greedy."""
    table = tables.speedups(machine)
    table = table[(table.configuration == configuration) & (table.domain == "all")]
    return table[table.temperature == table.temperature.min()]


def _best_speedup(machine, values):
    row = leading(machine)
    if row is None:
        return Verdict(UNTESTED, "nothing measured")
    found = f"{times(row)} with `{row.configuration}` at K = {row.k}, {prompts_note(row)}"
    return Verdict(HOLDS if row.high >= values["speedup"] and row.low > 1 else FAILS, found)


def _draft_acceptance(machine, configuration):
    """Draft acceptance at K = 1, which is S_1, and at every measured K; greedy, all domains."""
    rounds = tables.records(machine, "rounds")
    rounds = rounds[(rounds.configuration == configuration) & (rounds.temperature == rounds.temperature.min())]
    first = tables.survival(rounds, ["k"])
    by_k = tables.acceptance(rounds, ["k"]).set_index("k").draft_acceptance
    largest = first[(first.k == first.k.max()) & (first.i == 1)]
    return float(largest.survival.iloc[0]), by_k


def _acceptance_falls(machine, values):
    row = leading(machine)
    if row is None:
        return Verdict(UNTESTED, "nothing measured")
    at_one, by_k = _draft_acceptance(machine, row.configuration)
    at_best = by_k[row.k]
    found = f"{at_one:.1%} for the first draft token, {at_best:.1%} over the block at K = {row.k}"
    return Verdict(HOLDS if at_best < at_one else FAILS, found)


def _pooled_test(machine, values):
    tokens = main_tokens(machine)
    if tokens.empty:
        return Verdict(UNTESTED, "no sampled tokens")
    test = tables.pooled(tokens).assign(prompts=tokens.prompt.nunique()).iloc[0]
    found = (
        f"chi-squared {test.statistic:.1f}, {test.dof} degrees of freedom, p = {test.pvalue:.3f} "
        f"if tokens were independent and {test.permuted.pvalue:.3f} by exchange of answers, {test.tokens_first:,} tokens an arm "
        f"on {prompts_note(test)}"
    )
    if test.dof == 0:
        return Verdict(UNTESTED, f"too few tokens: {found}")
    return Verdict(HOLDS if test.pvalue > 0.05 else FAILS, found)


def _greedy_agreement(machine, values):
    table = tables.greedy_agreement(machine)
    if table.empty:
        return Verdict(UNTESTED, "no greedy answers")
    found = []
    for name, cell in table.groupby("configuration"):
        found.append(f"`{name}` {cell.identical.sum()} of {cell.answers.sum()}")
    return Verdict(
        HOLDS if (table.identical == table.answers).all() else FAILS, ", ".join(found) + " answers identical"
    )


def _some_decelerate(machine, values):
    rows = tables.best_of_each(machine)
    slower = rows[rows.speedup < 1]
    found = f"{len(slower)} of {len(rows)} at their best K: " + ", ".join(
        f"`{row.configuration}` {times(row)}" for row in rows.itertuples()
    )
    return Verdict(HOLDS if len(slower) else FAILS, found)


def _mechanism(machine, values):
    """Does a round cost less in the configurations that gain than in those that lose, by c and v alone?"""
    rows = tables.across([machine]).dropna(subset=["c", "v5"]).set_index("configuration")
    cost, gains = rows.cost, rows.speedup > 1
    if gains.all() or not gains.any():
        return Verdict(UNTESTED, "of the configurations with a draft model, none loses or none gains")
    found = "cost of a round of K = 4 in target passes, best speedup: " + ", ".join(
        f"`{name}` {cost[name]:.2f}, {times(rows.loc[name])}" for name in cost.sort_values().index
    )
    return Verdict(HOLDS if cost[gains].max() < cost[~gains].min() else FAILS, found)


def _quantised_verification(machine, values):
    """v(5) of targets with the file's own 4-bit weights: five passes in one, or five one after the other?"""
    v = tables.forward_costs(machine).query("model == 'target' and n == 5").set_index("configuration").v
    quantised = {name: study().configurations[name] for name in v.index}
    quantised = {name: one for name, one in quantised.items() if one.format == "gguf"}
    if not quantised:
        return Verdict(UNTESTED, "no 4-bit target was measured here")
    found = ", ".join(f"`{name}` v(5) = {v[name]:.2f}" for name in quantised)
    metal = [v[name] for name, one in quantised.items() if one.device == "mps"]
    if not metal:
        return Verdict(UNTESTED, f"no Metal here; on this CPU {found}")
    return Verdict(HOLDS if min(metal) > 3 else FAILS, found)  # nearer to five passes than to one


def _five_at_four(machine, values):
    table = tables.speedups(machine)
    table = table[(table.domain == "all") & (table.k == 4) & (table.temperature == table.temperature.min())]
    if table.empty:
        return Verdict(UNTESTED, "K = 4 was not measured")
    spread = table.speedup.max() > 1 > table.speedup.min()
    found = ", ".join(f"`{row.configuration}` {times(row)}" for row in table.itertuples())
    return Verdict(HOLDS if spread else FAILS, found)


def _flat_optimum(machine, values):
    row = leading(machine)
    if row is None:
        return Verdict(UNTESTED, "nothing measured")
    near = _at(machine, row.configuration)
    near = near[near.k.between(2, 6)]
    if len(near) < 2:
        return Verdict(UNTESTED, "fewer than two K from 2 to 6")
    found = ", ".join(f"K = {r.k}: {times(r)}" for r in near.itertuples())
    return Verdict(HOLDS if near.low.max() <= near.high.min() else FAILS, found)


def _closed_form(machine, values):
    """The closed form with a = tested acceptance beside 1 + sum S_i, all domains, greedy, at the largest K."""
    row = leading(machine)
    if row is None:
        return Verdict(UNTESTED, "nothing measured")
    rounds = tables.records(machine, "rounds")
    rounds = rounds[(rounds.configuration == row.configuration) & (rounds.temperature == rounds.temperature.min())]
    table = tables.acceptance(rounds, ["k"]).set_index("k")
    k = int(table.index.max())
    tested, first = table.tested_acceptance[k], _draft_acceptance(machine, row.configuration)[0]
    tau = table.tau[k]
    found = (
        f"K = {k}: measured {tau:.2f} tokens a pass, closed form {costmodel.closed_form(tested, k):.2f} with tested acceptance, "
        f"{costmodel.closed_form(first, k):.2f} with the first token's, "
        f"{costmodel.closed_form(table.draft_acceptance[k], k):.2f} with draft acceptance"
    )
    return Verdict(HOLDS if costmodel.closed_form(tested, k) > tau else FAILS, found)


_VERDICTS = {
    "best-speedup": _best_speedup,
    "acceptance-falls": _acceptance_falls,
    "pooled-test": _pooled_test,
    "greedy-agreement": _greedy_agreement,
    "some-decelerate": _some_decelerate,
    "mechanism": _mechanism,
    "serial-verification": _quantised_verification,
    "five-at-four": _five_at_four,
    "flat-optimum": _flat_optimum,
    "closed-form": _closed_form,
    "quantised-cost": _quantised_verification,
}
