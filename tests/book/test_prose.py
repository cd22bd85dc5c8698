"""Numbers in the chapters of results come from the data: a digit typed into their text is found.

Text is every markdown cell, every caption and alt text, every f-string outside its ``{...}`` and every string that a
code cell passes to ``chapter.say``. Digits may stand in the few places of ``ALLOWED``, and in a formula only if it states no value.
"""

import ast
import json
import re

import pytest

from specdec.study.configurations import ROOT

CHAPTERS = sorted((ROOT / "notebooks" / "analyse").glob("*.ipynb"))
FORMULA = re.compile(r"\$([^$]+)\$")
# A value: a decimal number, or a relation to any number but the 0 and 1 of definitions.
VALUE = re.compile(r"\d[.,]\d|(?:[=<>]|\\approx|\\[lg]eq?)\s*-?(?![01](?!\d))\d")
ALLOWED = [
    re.compile(r"\{[\w:]+\}`[^`]*`"),  # roles: citations by key, links to pages and equations
    re.compile(r"\]\([^)]*\)"),  # targets of links
    re.compile(r"`[A-Za-z][^`]*`"),  # code: names of files, parameters, configurations
    re.compile(r"\b9[05] %(?= (?:t )?(?:interval|range|of the bars))"),  # levels of intervals are chosen
    re.compile(r"\b[tv]\(1\)|\bv = 1\b|\bmeasured − 1\||\btemperature 1\b"),  # definitions where no formula can stand
    re.compile(r"\b[A-Za-z]\w*"),  # names: float32, bf16
]


def texts(cell):
    """The pieces of text that a cell puts on the page; a value that the code puts in is {}."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    shown = cell["metadata"].get("mystnb", {})
    yield shown.get("figure", {}).get("caption", "")
    yield shown.get("image", {}).get("alt", "")
    nodes = list(ast.walk(ast.parse(source)))
    formats = [node.format_spec for node in nodes if isinstance(node, ast.FormattedValue)]
    for node in nodes:
        if isinstance(node, ast.JoinedStr) and node not in formats:
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "say":
            yield from (text for argument in node.args for text in constants(argument))


def constants(node):
    """The plain strings of an expression; what is compared or used as a key is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not isinstance(node, ast.JoinedStr | ast.Subscript | ast.Compare):
        for child in ast.iter_child_nodes(node):
            yield from constants(child)


def typed(text):
    """The numbers in a piece of text that nothing allows."""
    found = [formula for formula in FORMULA.findall(text) if VALUE.search(formula)]
    text = FORMULA.sub(" ", text)
    for allowed in ALLOWED:
        text = allowed.sub(" ", text)
    return found + re.findall(r"\S*\d\S*", text)


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_no_number_is_typed_into_a_chapter(path):
    assert [number for cell in cells(path) for text in texts(cell) for number in typed(text)] == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_tex_is_escaped_once(path):
    """To MathJax a doubled backslash before a letter is a line break and a word, and no error."""
    sources = ["".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown"]
    assert [source for source in sources if re.search(r"\\\\[A-Za-z]", source)] == []


@pytest.mark.parametrize(
    "text", ["1.68 times", "$c = 0.3$", "$K$ = 4", "$K \\le 4$", "over 12 prompts", "`0.4`", "2x", "95 % of all tokens"]
)
def test_typed_numbers_are_found(text):
    assert typed(text)


@pytest.mark.parametrize(
    "text",
    ["$S_0 = 1$", "$K + 1$ rows in float32", "{cite}`sun2025block`", "95 % t intervals", "`cpu-bf16`, [x](a1.svg)"],
)
def test_formulae_names_and_citations_are_not(text):
    assert not typed(text)
