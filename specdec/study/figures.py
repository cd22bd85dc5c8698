"""One style, one way to keep a figure: SVG, PNG, the data behind it and where it came from, under one id."""

from __future__ import annotations

import json
import textwrap

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import seaborn as sns
import yaml
from IPython.display import SVG, display

from specdec.study.configurations import ROOT
from specdec.study.records import write_text
from specdec.study.tables import runs

FOLDER = ROOT / "_build" / "figures"
# Okabe and Ito's colours: told apart by colour-blind readers, and of unlike lightness in grey.
COLOURS = {"code": "#0072B2", "conversation": "#D55E00", "summarisation": "#009E73", "all": "#000000"}
MARKERS = {"code": "o", "conversation": "s", "summarisation": "^", "all": "D"}


def style() -> None:
    """The look of every figure: white ground (readable in a dark theme too), large type for narrow screens."""
    sns.set_theme(
        context="notebook",
        style="whitegrid",
        palette=list(COLOURS.values()),
        rc={
            "figure.dpi": 120,
            "savefig.dpi": 200,
            "font.size": 12,
            "axes.titlesize": 13,
            "axes.labelsize": 12,
            "legend.fontsize": 11,
            "figure.constrained_layout.use": True,
            "svg.hashsalt": "specdec",
            "svg.fonttype": "path",
        },
    )
    matplotlib.rcParams["figure.facecolor"] = "white"


def origin(machine: str, configurations=None) -> dict:
    """Machine, day, commit and profile of the records behind a figure."""
    chosen = {name: run for name, run in runs(machine).items() if configurations is None or name in configurations}
    steps = [step for run in chosen.values() for step in run["steps"].values()]
    facts = steps[0]["machine"]
    vectors = f", {facts['vectors'].upper()}" if facts.get("vectors") else ""  # older records do not say
    return {
        "machine": machine,
        "cpu": f"{facts['cpu']}{vectors}, {facts['cores']} cores, {facts['memory_gib']:.0f} GiB",
        "date": max(step["finished"] for step in steps)[:10],
        "commit": sorted({step["commit"][:8] + ("+" if step["commit"].endswith("+") else "") for step in steps}),
        "profile": sorted({run["profile"] for run in chosen.values()}),
    }


def origin_line(machine: str, configurations=None) -> str:
    """The line under every figure."""
    return line(origin(machine, configurations))


def line(facts: dict) -> str:
    """The same, from what :func:`origin` found and a figure's JSON keeps."""
    return f"{facts['cpu']} · {facts['date']} · {', '.join(facts['profile'])} · commit {', '.join(facts['commit'])}"


def keep(figure, name: str, data: pd.DataFrame, machine: str, source: dict, configurations=None) -> None:
    """Write ``<name>.svg``, ``.png``, ``.csv`` and ``.json`` and show the SVG: the page's figure is the one downloaded.

    Args:
        data: the rows that are drawn; machine, configurations: whose records they are.
        source: the notebook and its parameters, as in ``specdec.study.chapter.Chapter``.

    Raises:
        ValueError: a figure without a title, or without a caption and an alternative text in the notebook.
    """
    text = {"title": figure.get_suptitle() or figure.axes[0].get_title()} | described(source["notebook"], name)
    if not all(text.values()):
        raise ValueError(f"figure {name!r} has no {' and no '.join(key for key in text if not text[key])}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    credit(figure, origin_line(machine, configurations))
    for kind in ("svg", "png"):
        temporary = FOLDER / f"{name}.partial.{kind}"
        figure.savefig(temporary, metadata={"Date": None} if kind == "svg" else {"Software": None}, facecolor="white")
        temporary.replace(FOLDER / f"{name}.{kind}")
    plt.close(figure)
    write_text(FOLDER / f"{name}.csv", data.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    notebook, parameters = source["notebook"], {k: v for k, v in source.items() if k != "notebook"}
    facts = origin(machine, configurations) | {"id": name, "notebook": notebook, "parameters": parameters} | text
    write_text(FOLDER / f"{name}.json", json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    display(SVG((FOLDER / f"{name}.svg").read_text(encoding="utf-8")))


def credit(figure, text: str) -> None:
    """Small type under a figure, on as many lines as its width asks for."""
    wrapped = textwrap.fill(text, int(16 * figure.get_figwidth()))  # letters an inch, in this size
    figure.supxlabel(wrapped, fontsize=8, color="#555555")


def described(notebook: str, name: str) -> dict[str, str]:
    """Caption and alternative text of a figure. They are written once, in the metadata of the cell that draws it."""
    shown = _metadata(notebook).get(name)
    if shown is None:
        raise ValueError(f"{notebook} has no cell whose metadata describe a figure `fig-{name}`")
    return {"caption": shown["figure"].get("caption", ""), "alt": shown.get("image", {}).get("alt", "")}


def kept(machine: str) -> list[dict]:
    """The JSON of every figure of the book of ``machine``, in the order of the book; none of an earlier book."""
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text(encoding="utf-8"))
    files = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    notebooks = [f"notebooks/analyse/{file.split('/')[1]}.ipynb" for file in files if file.startswith("notebooks/")]
    paths = [FOLDER / f"{name}.json" for notebook in notebooks for name in _metadata(notebook)]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    return [facts for facts in found if facts["parameters"]["machine"] == machine]


def _metadata(notebook: str) -> dict[str, dict]:
    """What the cells of a notebook say of their figures, by id."""
    cells = nbformat.read(ROOT / notebook, as_version=4).cells
    shown = [cell.metadata["mystnb"] for cell in cells if "figure" in cell.metadata.get("mystnb", {})]
    return {entry["figure"]["name"].removeprefix("fig-"): entry for entry in shown}
