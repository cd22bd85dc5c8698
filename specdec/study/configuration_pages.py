"""A page for every configuration: what it is, how to run it, and why it wins or loses, K by K.

``python -m specdec.study.configuration_pages MACHINE PUBLISHED...``; written before a build, from records.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd

from specdec import costmodel
from specdec.study import chapter, claims, configurations, figures, records, tables
from specdec.study.configurations import ROOT, Configuration

FOLDER = ROOT / "book" / "configurations"

_FORMS = {
    "int8": "8 bits",
    "gguf": "4 bits (Q4_K_M), in llama.cpp",
    "q4_0": "4 bits (its file re-quantised to Q4_0), in llama.cpp",
}


def write(machine: str, *published: str) -> None:
    """Write ``<name>.md`` of every configuration; what ``machine`` did not measure is shown as the first published one has it."""
    accounts = {whose: _Account(whose) for whose in dict.fromkeys((machine, *published))}
    for name in configurations.with_page():
        one = configurations.study().configurations[name]
        pieces = [f"# {name}", f"*{one.title}.*", *description(name, one)]
        own = [whose for whose, account in accounts.items() if account.has(name)]
        if machine not in own:
            reason = tables.skipped(machine).get(name, "not in the profile that was run")
            pieces += ["## Result", f"Not run on this machine (`{machine}`): {reason}."]
        for whose in own[:1]:
            origin = ("" if whose == machine else f"The published machine `{whose}`: ") + figures.origin_line(
                whose, [name]
            )
            pieces += ["## Why it wins or loses", f"*{origin}.*", *accounts[whose].text(name)]
        records.write_text(FOLDER / f"{name}.md", "\n\n".join(pieces) + "\n")


def description(name: str, one: Configuration) -> list[str]:
    """Target, draft and device, and the command that measures it."""

    def form(weights, fmt):
        return f"`{weights}`, {_FORMS.get(fmt, one.dtype)}"

    drafts = {
        "model": lambda d: form(d.weights, d.format),
        "prompt-lookup": lambda d: f"prompt lookup, n-grams of up to {d.max_ngram}: it costs no pass",
    }
    rows = [
        {"part": "target", "is": form(one.target, one.format)},
        {"part": "draft", "is": drafts[one.draft.kind](one.draft)},
        {"part": "device", "is": one.device},
    ]
    command = f"make study PROFILE=full CONFIGURATION={name}"
    return [
        chapter.table_text(pd.DataFrame(rows), part="{}", **{"is": "{}"}),
        f"```\n{command}\n```",
        "measures it on your machine; {doc}`../reproduce` has the other profiles, {doc}`../notebooks/machines` what other machines make of it.",
    ]


class _Account:
    """The account of one machine's greedy answers over all domains."""

    def __init__(self, machine: str):
        self.machine = machine
        predicted = tables.predictions(machine)
        lowest = predicted.temperature == predicted.temperature.min() if len(predicted) else []
        self.greedy = predicted[(predicted.domain == "all") & lowest] if len(predicted) else predicted
        self.speedups, self.adaptive = tables.speedups(machine), tables.adaptive(machine)
        self.fidelity = tables.fidelity(machine).set_index("configuration")

    def has(self, name: str) -> bool:
        """Whether the machine measured a configuration."""
        return len(self.greedy) > 0 and (self.greedy.configuration == name).any()

    def text(self, name: str) -> list[str]:
        """Paragraphs and tables."""
        own = self.greedy[self.greedy.configuration == name].sort_values("k")
        best = own.loc[own.speedup.idxmax()]
        pieces = [summary(best), *self._beside(name), *self._target(name)]
        rounds = tables.records(self.machine, "rounds").query("configuration == @name")
        rates = tables.acceptance(rounds[rounds.temperature == rounds.temperature.min()], ["k"]).set_index("k")
        own = own.assign(
            K=own.k,
            drafting=own.k * own.c,
            block=own.v,
            tokens=own.tau,
            measured=[claims.times(row) for row in own.itertuples()],
            accepted=[rates.tested_acceptance.get(k, np.nan) for k in own.k],
            needed=[costmodel.break_even_acceptance(r.k, r.c, r.v, r.overhead) for r in own.itertuples()],
            ceiling=[costmodel.break_even_c(r.tau, r.k, r.v, r.overhead) for r in own.itertuples()],
        )
        own["needed"] = own.needed.replace(np.inf, np.nan)
        own["ceiling"] = own.ceiling.where(own.ceiling > 0)
        own["because"] = [because(row) for row in own.itertuples()]
        counts = {column: "{:.2f}" for column in ("tokens", "drafting", "block", "overhead", "predicted")}
        ends = {"c": "c measured", "ceiling": "c to break even", "accepted": "a measured", "needed": "a to break even"}
        return [
            *pieces,
            "What a round gives, what it costs in target passes (drafting, the pass over the block, overhead), what follows, and what the clock says:",
            chapter.table_text(own, K="{}", **counts, measured="{}", because="{}"),
            "The latency ratio $c$ and the acceptance $a$ beside what they would have to be. A draft slower than *c to break even* loses at this $K$, however "
            "good the rest; so does one that is kept less often than *a to break even*, by {eq}`tau` with the same chance at every place. A dash: not even if drafting were free, not even if all were kept.",
            chapter.table_text(own.rename(columns=ends), K="{}", **{column: "{:.2f}" for column in ends.values()}),
            "{doc}`../notebooks/cost-model` sets prediction against measurement on prompts that the prediction has not seen.",
        ]

    def _beside(self, name):
        """What a K that adapts makes of it, and sampling at T = 1."""
        parts = []
        for temperature in sorted(self.speedups[self.speedups.configuration == name].temperature.unique()):
            said = []
            if temperature:  # the summary has the greedy one
                row = tables.best(self.speedups, name, temperature=temperature)
                said.append(f"{claims.times(row)} times over all domains at its best $K$ = {row.k}")
            if adapts := claims.adapting(self.adaptive, name, temperature):
                said.append(f"{adapts} with a $K$ that adapts")
            if said:
                parts.append(", ".join([chapter.sampling(temperature), *said]))
        text = "; ".join(parts)
        return [f"{text[0].upper()}{text[1:]}."] if text else []

    def _target(self, name):
        """How far a target is from the dense one, where it is another."""
        if name not in self.fidelity.index:
            return []
        far = self.fidelity.loc[name]
        return [
            f"Its target is not the dense one. Over {far.rows:,.0f} rows of its own answers the two laws are a total variation of {far.tv:.2f} apart in the median row and "
            f"{far.tv_largest:.2f} at most, and {far.agreement:.1%} ({far.low:.1%} to {far.high:.1%}) of the favourites agree. What is lossless here is lossless with respect to this target."
        ]


def summary(best) -> str:
    """The best K of a configuration in a sentence or three."""
    parts = {"drafting": best.k * best.c, "the pass over the block": best.v, "all else": best.overhead}
    return (
        f"At its best $K$ = {best.k} it {chapter.outcome(best)}: {claims.times(best)} times as fast as its target alone, greedy, over all domains, "
        f"{claims.prompts_note(best)}. A round gives {best.tau:.2f} tokens and costs {best.cost:.2f} target passes: "
        + ", ".join(f"{value:.2f} for {part}" for part, value in parts.items())
        + f". It writes {best.tokens_per_second:.1f} tokens a second, its target alone {best.baseline_tokens_per_second:.1f}."
    )


def because(row) -> str:
    """Why one K gains or loses: which of the three costs takes most of what a round gives over a single token."""
    extra = {"drafting": row.drafting, "verification": row.block - 1, "overhead": row.overhead}
    most = max(extra, key=extra.get)
    gain = row.tau - 1
    if row.tau > row.cost:
        return f"{gain:.2f} more tokens for {row.cost - 1:.2f} more passes, most of it {most}"
    return f"only {gain:.2f} more tokens for {row.cost - 1:.2f} more passes, most of it {most}"


if __name__ == "__main__":
    write(*sys.argv[1:])
