"""The book as a publication: how it is cited, shown, explained, printed and published."""

import json
import re
import shutil
import tomllib

import nbformat
import pytest
import yaml
from pybtex.database import parse_string
from test_book import FIGURES, PAGES, Links

import specdec
from specdec.study import citation, figures, pdf
from specdec.study.configurations import ROOT

BOOK = ROOT / "book"
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOC = yaml.safe_load((BOOK / "_toc.yml").read_text())
FILES = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BAR = ["cite", "reproduce", "contribute"]


def entries(text):
    """The BibTeX entries of a page, by key."""
    return {k: e for block in re.findall(r"```bibtex\n(.*?)```", text, re.DOTALL) for k, e in bibtex(block).items()}


def bibtex(text):
    return dict(parse_string(text, "bibtex").entries)


# The rules of the Citation File Format, schema 1.2.0, for the keys that are used here.
PERSON = {"family-names", "given-names", "affiliation", "orcid", "email", "website", "alias"}
ENTITY = {"name", "website", "email", "orcid", "alias"}
WORK = {
    *("cff-version", "message", "title", "authors", "type", "abstract", "version", "license", "keywords", "references"),
    *("date-released", "doi", "identifiers", "repository-code", "url", "preferred-citation", "contact", "commit"),
}
REFERENCE = {"type", "title", "authors", "year", "month", "url", "doi", "identifiers", "journal", "notes"}


def check_work(work, required, known):
    assert required <= work.keys() <= known
    assert work["authors"]
    for author in work["authors"]:
        assert author and (author.keys() <= PERSON or ("name" in author and author.keys() <= ENTITY))
    for entry in work.get("identifiers", []):
        assert {"type", "value"} <= entry.keys() <= {"type", "value", "description"}
        assert entry["type"] in ("doi", "url", "swh", "other")
    for key in ("title", "message", "version", "abstract", "url", "license"):
        assert isinstance(work.get(key, ""), str)


def test_the_citation_file_is_valid():
    cff = citation.book()
    check_work(cff, {"cff-version", "message", "title", "authors"}, WORK)
    assert cff["cff-version"] == "1.2.0" and cff["type"] in ("software", "dataset")
    for reference in cff["references"]:
        check_work(reference, {"authors", "title", "type"}, REFERENCE)
        assert reference["type"] in ("article", "generic", "preprint", "report", "software")


def test_title_authors_version_and_licence_are_the_same_everywhere():
    cff, entry = citation.book(), entries((BOOK / "cite.md").read_text())["specdec2026"]
    authors = " and ".join(author["name"] for author in cff["authors"])
    assert cff["title"] == CONFIG["title"] == entry.fields["title"]
    assert authors == CONFIG["author"] == PROJECT["authors"][0]["name"]
    assert entry.persons["author"][0].last_names == ["{" + authors + "}"]
    assert cff["version"] == PROJECT["version"] == specdec.__version__ == entry.fields["version"]
    assert cff["license"] == PROJECT["license"]
    assert entry.fields["year"] == CONFIG["copyright"]


def test_the_original_paper_is_cited_as_in_the_references():
    theirs = entries((BOOK / "cite.md").read_text())["chordiya2026lossless"]
    assert theirs == bibtex((BOOK / "references.bib").read_text())["chordiya2026lossless"]
    [reference] = citation.book()["references"]
    assert reference["title"] == theirs.fields["title"] and reference["url"].endswith(theirs.fields["eprint"])


FACTS = {"id": "pit", "title": "T", "date": "2026-11-29", "commit": ["0123abcd"], "machine": "a-2c-4g"}


def test_a_figures_entry_is_of_the_form_on_the_page():
    form = entries((BOOK / "cite.md").read_text())["specdec-ID"]
    made = bibtex(citation.figure(FACTS))["specdec-pit"]
    assert list(made.fields) == list(form.fields) and made.persons == form.persons
    filled = form.fields["note"].replace("ID", "pit").replace("MACHINE", "a-2c-4g")
    assert made.fields["note"] == filled.replace("DATE", "2026-11-29").replace("COMMIT", "0123abcd")


def test_addresses_come_from_the_one_setting(monkeypatch, tmp_path):
    assert citation.book().get("repository-code", "") == CONFIG["repository"]["url"]
    (tmp_path / "_config.yml").write_text("repository: {url: 'https://github.com/owner/name'}\n")
    shutil.copy(ROOT / "CITATION.cff", tmp_path)
    monkeypatch.setattr(citation, "ROOT", tmp_path)
    fields = bibtex(citation.figure(FACTS))["specdec-pit"].fields
    assert fields["url"] == "https://owner.github.io/name/figures/pit.svg"


def test_every_page_is_in_the_table_of_contents():
    assert set(FILES) == set(PAGES)
    assert {path.stem for path in BOOK.glob("*.md")} <= set(FILES)


def test_every_figure_is_described_once():
    for path in (ROOT / "notebooks" / "analyse").glob("*.ipynb"):
        drawn = [c for c in nbformat.read(path, as_version=4).cells if "page.keep(" in c.source]
        for cell in drawn:
            name = re.search(r'page\.keep\(\w+, "([\w-]+)"', cell.source)[1]
            text = figures.described(f"notebooks/analyse/{path.name}", name)
            assert all(len(value) > 40 for value in text.values()), name


def test_a_figure_without_a_description_is_refused():
    with pytest.raises(ValueError, match="no cell whose metadata describe a figure `fig-other`"):
        figures.described("notebooks/analyse/acceptance.ipynb", "other")


def test_launch_links_point_at_notebooks_that_exist():
    listed = re.search(r"```\{launch\}\n(.*?)```", (BOOK / "reproduce.md").read_text(), re.DOTALL)[1]
    paths = [line.split(": ")[0] for line in listed.splitlines()]
    assert paths and all((ROOT / path).is_file() for path in paths)


WORDS = """draft model, target model, draft length K, round, accepted token, rejected token, bonus token,
tokens per target pass, survival, conditional acceptance, tested acceptance, draft acceptance, latency ratio,
verification cost, speedup"""


def test_the_glossary_has_the_fields_words():
    terms = re.findall(r"^(\w[^\n]*)\n  \S", (BOOK / "glossary.md").read_text(), re.MULTILINE)
    assert set(" ".join(WORDS.split()).split(", ")) <= set(terms)
    used = {
        term.lower()
        for path in BOOK.glob("*.md")
        for term in re.findall(r"\{term\}`(?:[^`<]*<)?([^`>]+)", path.read_text())
    }
    assert used <= {term.lower() for term in terms}
    for page in ("method", "discussion", "reproduce", "contribute", "records"):
        assert "{term}`" in (BOOK / f"{page}.md").read_text() or "{doc}`glossary`" in (BOOK / f"{page}.md").read_text()


def test_the_reference_lists_every_public_name():
    text = (BOOK / "reference.md").read_text()
    for name in specdec.__all__:
        where = f"`specdec.{name}`" if name in specdec._HOME or name == "Sampling" else f"specdec.{name}"
        assert where in text, name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_pinned_actions_and_commands_that_exist(path):
    workflow = yaml.safe_load(path.read_text())
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert workflow["name"] == path.stem and "permissions" in workflow
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step.get("uses", "a/b@v1.0.0"))
            assert set(re.findall(r"\bmake (\w+)", step.get("run", ""))) <= set(targets)


def test_there_are_three_workflows():
    assert [path.stem for path in WORKFLOWS] == ["publish", "release", "test"]


def test_a_missing_browser_is_named(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert pdf.main([]) == 1
    assert "apt install chromium" in capsys.readouterr().err


def test_nothing_in_print_points_at_files_of_this_machine():
    page = '<head></head><a class="x" href="figures/a.svg">A</a><a href="index.html#b">B</a><a href="https://c.d">C</a>'
    printed = pdf.printable(page)
    assert (
        '<a class="x">A</a>' in printed and '<a href="#b">B</a>' in printed and '<a href="https://c.d">C</a>' in printed
    )


# From here on: the pages as they are built.


def test_every_page_has_the_bar(book):
    for name in [*PAGES, "search", "genindex"]:
        links = Links((book / f"{name}.html").read_text()).links
        up = "../" if "/" in name else ""
        own = {page: "#" if name == page else f"{up}{page}.html" for page in BAR}
        assert set(own.values()) <= set(links), name


def test_the_page_of_figures_shows_each_with_its_files_and_its_origin(book):
    text = (book / "notebooks" / "figures.html").read_text()
    page = Links(text)
    alts = [picture["alt"] for picture in page.pictures if "_images" in picture["src"]]
    for name in FIGURES:
        facts = json.loads((book / "figures" / f"{name}.json").read_text())
        assert {f"../figures/{name}.{kind}" for kind in ("svg", "png", "csv", "json")} <= set(page.links)
        assert alts.count(facts["alt"]) == 1
        assert facts["notebook"] in text and figures.line(facts) in text and f"specdec-{name}" in text
    assert len(alts) == len(FIGURES)


def test_the_reference_has_signatures_and_docstrings(book):
    page = Links((book / "reference.html").read_text())
    public = {f"specdec.{module}.{name}" for module, name in [("decoding", "speculative"), ("verification", "law")]}
    assert public | {"specdec.models.torch_model.TorchModel.drop_last", "specdec.costmodel.speedup"} <= page.anchors


def test_launch_links_are_left_out_while_there_is_no_repository(book):
    text = (book / "reproduce.html").read_text()
    there = bool(CONFIG["repository"]["url"])
    assert ("mybinder.org" in text) == there and ("names no public repository" in text) != there


@pytest.mark.browser
def test_the_pdf_holds_the_book_with_its_figures_as_vectors(book, checkout, run):
    try:
        pdf.browser()
    except pdf.NoBrowser as error:
        pytest.skip(str(error))
    result = run(checkout, "pdf")
    assert result.returncode == 0, result.stdout + result.stderr
    made = (checkout / "_build" / "pdf" / "lossless-but-not-free.pdf").read_bytes()
    assert made.startswith(b"%PDF") and len(re.findall(rb"/Type /Page\b", made)) > 20
    assert b"/Subtype /Image" not in made  # nothing is a picture of pixels
    assert b"MJX" in made or b"MathJax" in made  # the fonts of typeset mathematics
    assert b"file:" not in made and str(checkout).encode() not in made
