"""From a fresh checkout to pages: the smoke study through papermill, Snakemake and Jupyter Book, for real."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import nbformat
import pandas as pd
import pytest

from specdec.study import configurations, execute, records
from specdec.study.configurations import ROOT

CHAPTERS = ["verification-cost", "acceptance", "speedup", "cost-model", "machines", "peers", "explore"]
CHAPTERS += ["equivalence", "overview"]
TEXTS = ["method", "discussion", "reproduce", "contribute", "cite", "glossary", "reference", "records", "references"]
PAGES = ["index", *TEXTS, "notebooks/figures"] + [f"notebooks/{c}" for c in CHAPTERS]
PAGES += [f"configurations/{name}" for name in configurations.with_page()]
FIGURES = ["verification-cost", "survival", "speedup-by-k", "speedup-by-configuration", "pooled-null", "pit"]
FIGURES += ["predicted-and-measured", "break-even-map", "machines", "peers"]
FIGURES += ["detection-matrix", "calibration"]


class Links(HTMLParser):
    """What a page loads, what it points at, its anchors and its pictures."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.anchors, self.pictures = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        if "id" in a:
            self.anchors.add(a["id"])
        if tag == "a" and a.get("href"):
            self.links.append(a["href"])
        if tag == "link" and a.get("rel") in ("stylesheet", "icon", "preload", "shortcut icon"):
            self.loads.append(a["href"])
        if tag in ("script", "img", "iframe", "source") and a.get("src"):
            self.loads.append(a["src"])
        if tag == "img":
            self.pictures.append(a)


@pytest.fixture(scope="session")
def pages(book):
    return {name: Links((book / f"{name}.html").read_text()) for name in PAGES}


def records_of(checkout):
    [folder] = (checkout / "data" / "results").glob("*.smoke")
    return folder


def test_every_page_is_there(book):
    assert [name for name in PAGES if not (book / f"{name}.html").exists()] == []


def test_no_page_asks_another_host(pages):
    outside = {n: [u for u in page.loads if urlsplit(u).netloc] for n, page in pages.items()}
    assert {n: u for n, u in outside.items() if u} == {}


def test_internal_links_and_downloads_resolve(book, pages):
    broken = []
    for name, page in pages.items():
        here = (book / f"{name}.html").parent
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (here / unquote(parts.path)).resolve() if parts.path else book / f"{name}.html"
            if not target.exists():
                broken.append((name, link))
            elif (
                parts.fragment and target.suffix == ".html" and parts.fragment not in Links(target.read_text()).anchors
            ):
                broken.append((name, link))
    assert broken == []


def test_figures_have_all_their_files_and_an_origin(book):
    for name in FIGURES:
        for kind in ("svg", "png", "csv", "json"):
            assert (book / "figures" / f"{name}.{kind}").stat().st_size > 50
        assert len(pd.read_csv(book / "figures" / f"{name}.csv")) > 0
        origin = json.loads((book / "figures" / f"{name}.json").read_text())
        assert {"machine", "date", "commit", "profile", "notebook", "cpu", "title", "caption", "alt"} <= set(origin)
        assert (ROOT / origin["notebook"]).exists()


def test_the_site_is_light(book):
    assert sum(path.stat().st_size for path in book.rglob("*") if path.is_file()) < 15e6


def test_pictures_have_alt_texts_that_say_something(pages):
    shown = [p for page in pages.values() for p in page.pictures if "_images" in p["src"]]
    assert len(shown) == 2 * len(FIGURES)  # in a chapter, and on the page of figures
    assert all(len(p.get("alt", "")) > 40 and not p["alt"].endswith((".svg", ".png")) for p in shown)


def test_pages_say_where_their_numbers_come_from(book, checkout):
    machine = records_of(checkout).name
    for chapter in [*CHAPTERS, "figures"]:
        text = (book / "notebooks" / f"{chapter}.html").read_text()
        assert "Last measured" in text and machine in text and f"notebooks/analyse/{chapter}.ipynb" in text


def test_numbers_on_the_page_are_those_of_the_records(book, checkout):
    answers = pd.read_csv(records_of(checkout) / "smoke-lookup" / "answers.csv")
    greedy = answers[(answers.temperature == 0) & (answers.prompt == "code-01")].set_index("k").seconds
    assert f"{greedy[0] / greedy[4]:.2f}" in (book / "notebooks" / "speedup.html").read_text()


def test_columns_of_the_records_are_documented(checkout):
    text = (checkout / "book" / "records.md").read_text()
    for path in records_of(checkout).glob("*/*.csv"):
        section = re.search(rf"### {path.name}\n(.*?)(\n### |\Z)", text, re.DOTALL)[1]
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(pd.read_csv(path).columns), path.name


def test_a35_timings_use_the_threads_of_the_machine(checkout):
    """Snakemake sets OMP_NUM_THREADS for its jobs; a study under it must not run on one thread."""
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    threads = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for path in records_of(checkout).glob("*/run.json"):
        for step in json.loads(path.read_text())["steps"].values():
            assert step["machine"]["threads"] == threads


def test_missing_devices_are_skipped_with_a_reason(checkout):
    assert json.loads((records_of(checkout) / "skipped.json").read_text()) == {}  # the smoke profile needs none


def test_a_second_run_does_nothing(book, checkout, run):
    before = {p: p.stat().st_mtime_ns for p in (checkout / "book" / "notebooks").glob("*.ipynb")}
    again = run(checkout, "book")
    assert again.returncode == 0
    assert {p: p.stat().st_mtime_ns for p in (checkout / "book" / "notebooks").glob("*.ipynb")} == before
    assert "started" not in again.stderr


def test_a37_a_broken_chapter_breaks_the_build(book, checkout, run):
    path = checkout / "notebooks" / "analyse" / "acceptance.ipynb"
    good, page = path.read_text(), (book / "notebooks" / "acceptance.html").read_text()
    try:
        broken = nbformat.reads(good, as_version=4)
        broken.cells.append(nbformat.v4.new_code_cell("raise RuntimeError('planted')"))
        nbformat.write(broken, path)
        result = run(checkout, "book")
        assert result.returncode != 0
        assert "planted" in result.stdout + result.stderr
        assert (book / "notebooks" / "acceptance.html").read_text() == page  # no page older or newer than its numbers
    finally:
        path.write_text(good)
    assert run(checkout, "book").returncode == 0


def test_an_interrupted_step_goes_on_after_the_last_finished_prompt(book, checkout, tmp_path):
    """A journal that already holds one prompt: its rows are kept as they are, the other prompt is measured."""
    plan = configurations.plan("smoke", "smoke-lookup").decode
    header = {"configuration": "smoke-lookup", "prompts_hash": configurations.prompts_hash(), **plan.model_dump()}
    journal = records.Journal(tmp_path / "decode.partial", header)
    journal.add(
        "code-01", {"answers": [{"prompt": "code-01", "seconds": 123.0}], "rounds": [{"prompt": "code-01", "round": 0}]}
    )
    notebook = checkout / "notebooks" / "measure" / "decode.ipynb"
    settings = {"configuration": "smoke-lookup", "profile": "smoke", "results": str(tmp_path), **plan.model_dump()}
    execute.execute(notebook, tmp_path / "decode.ipynb", settings)
    answers = pd.read_csv(tmp_path / "answers.csv")
    assert answers[answers.prompt == "code-01"].seconds.tolist() == [123.0]
    # two temperatures; two K, the target alone twice, and a K that adapts
    assert len(answers[answers.prompt == "summarisation-01"]) == 2 * 5
    assert not (tmp_path / "decode.partial").exists()


def test_unknown_profile_and_machine_are_named(checkout, run):
    result = run(checkout, "book", profile="fast")
    assert result.returncode != 0 and "unknown profile 'fast'" in result.stdout + result.stderr
