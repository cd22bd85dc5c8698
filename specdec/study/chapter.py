"""What every chapter of results begins with, and how its text, tables and figures take what they show from the data."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pandas as pd
from IPython.display import Markdown, display

from specdec.study import configurations, figures, records, tables


@dataclass(frozen=True)
class Chapter:
    """One page: the machine it is about, the published machine beside it, the notebook that makes it."""

    machine: str
    published: str
    notebook: str

    def keep(self, figure, name: str, data: pd.DataFrame, chosen=None, machine: str | None = None) -> None:
        """Keep and show a figure (:func:`specdec.study.figures.keep`); ``machine`` if not the page's."""
        figures.keep(figure, name, data, machine or self.machine, asdict(self), chosen)

    def records(self, name: str) -> tuple[pd.DataFrame, str]:
        """A record file (:func:`specdec.study.tables.records`) of this machine or else of the published one; whose it is."""
        for machine in (self.machine, self.published):
            data = tables.records(machine, name)
            if len(data):
                return data, machine
        return data, self.machine

    def note(self, machine: str) -> str:
        """What is said behind results that are not this machine's."""
        return "" if machine == self.machine else f" (Records of the published machine `{machine}`.)"

    def downloads(self, name: str) -> str:
        """A line with a figure's id and its four files."""
        up = "../" if "index" not in self.notebook else ""
        links = (f'<a href="{up}figures/{name}.{kind}">{kind.upper()}</a>' for kind in ("svg", "png", "csv", "json"))
        return f"Figure `{name}`: " + " · ".join(links)


def begin(machine: str, published: str, notebook: str) -> Chapter:
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
    return Chapter(machine, published, notebook)


def say(*paragraphs: str) -> None:
    """Text of the page, with numbers put in by the caller."""
    display(Markdown("\n\n".join(paragraphs)))


def table(data: pd.DataFrame, **formats: str) -> None:
    """Show :func:`table_text`."""
    say(table_text(data, **formats))


def table_text(data: pd.DataFrame, **formats: str) -> str:
    """A table in Markdown: the named columns in the given order, each in its format; a dash where there is no value."""
    rows = [
        [form.format(v) if pd.notna(v) else "–" for v, form in zip(row, formats.values(), strict=True)]
        for row in data[list(formats)].itertuples(index=False)
    ]
    lines = [list(formats), ["---"] * len(formats), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def in_order(names) -> list[str]:
    """Configurations in the order of ``data/configurations.yml``."""
    known = list(configurations.study().configurations)
    return sorted(set(names), key=known.index)


def sort(data: pd.DataFrame) -> pd.DataFrame:
    """Rows by configuration in that order, then temperature, domain and K, with a column ``sampling``."""
    known = list(configurations.study().configurations)
    keys = [name for name in ("configuration", "temperature", "domain", "k") if name in data]
    data = data.sort_values(keys, key=lambda c: c.map(known.index) if c.name == "configuration" else c)
    return data.assign(sampling=data.temperature.map(sampling)) if "temperature" in data else data


def sampling(temperature: float) -> str:
    """The words for a temperature: greedy, or T = 1."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def outcome(row) -> str:
    """The word for a speedup with its interval (``low``, ``high``)."""
    return "wins" if row.low > 1 else "loses" if row.high < 1 else "neither wins nor loses clearly"


def length(k: int) -> str:
    """The words for a draft length in records."""
    words = {configurations.ADAPTIVE: "adaptive", configurations.CONTROL: "control"}
    return words.get(k, f"{k}")
