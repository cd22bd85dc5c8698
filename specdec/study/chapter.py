"""What every chapter of results begins with, and how its text takes numbers from the data."""

from __future__ import annotations

import pandas as pd
from IPython.display import Markdown, display

from specdec.study import configurations, figures, records, tables


def begin(machine: str, published: str, notebook: str) -> None:
    """Style, the line with machine, day, commit and profile, and the effective parameters of the page.

    Raises:
        ValueError: no records of ``machine``.
    """
    if not tables.runs(machine):
        raise ValueError(f"no finished records of {machine!r} in data/results")
    figures.style()
    lines = [f"*Last measured: {figures.origin_line(machine)}.*"]
    if machine != published:
        lines.append(f"*Published machine, shown in grey: {figures.origin_line(published)}.*")
    facts = {"machine": machine, "published": published, "specdec": records.origin()["versions"]["specdec"]}
    settings = ", ".join(f"`{name} = {value}`" for name, value in facts.items())
    say("\n\n".join(lines), f"*Parameters of this page: {settings}; source: `{notebook}`.*")


def say(*paragraphs: str) -> None:
    """Text of the page, with numbers put in by the caller."""
    display(Markdown("\n\n".join(paragraphs)))


def table(data: pd.DataFrame, **formats: str) -> None:
    """A table: columns in the given order under their names, each in its format."""
    shown = pd.DataFrame(
        {name: [form.format(v) if pd.notna(v) else "–" for v in data[name]] for name, form in formats.items()}
    )
    head = "| " + " | ".join(shown.columns) + " |"
    rule = "|" + "---|" * len(shown.columns)
    rows = ["| " + " | ".join(map(str, row)) + " |" for row in shown.itertuples(index=False)]
    say("\n".join([head, rule, *rows]))


def in_order(names) -> list[str]:
    """Configurations in the order of ``data/configurations.yml``."""
    known = list(configurations.study().configurations)
    return sorted(set(names), key=known.index)


def sampling(temperature: float) -> str:
    """ "greedy" or "T = 1"."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"
