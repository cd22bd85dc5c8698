"""How the book and its figures are cited: BibTeX from ``CITATION.cff`` and from where a figure comes from."""

from __future__ import annotations

import yaml

from specdec.study.configurations import ROOT


def book() -> dict:
    """``CITATION.cff``."""
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def site() -> str:
    """Address of the hosted book, made from the repository that ``_config.yml`` names; empty while it names none."""
    repository = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]
    if not repository:
        return ""
    owner, name = repository.rstrip("/").split("/")[-2:]
    return f"https://{owner}.github.io/{name}/"


def figure(facts: dict) -> str:
    """BibTeX of one figure.

    Args:
        facts: its JSON (:func:`specdec.study.figures.keep`).
    """
    work, commits = book(), ", ".join(facts["commit"])
    measured = f"Measured on {facts['machine']}, {facts['date']}, commit {commits}"
    fields = {
        "title": facts["title"],
        "author": "{" + " and ".join(author["name"] for author in work["authors"]) + "}",
        "year": facts["date"][:4],
        "note": f"Figure {facts['id']} of {work['title']}, version {work['version']}. {measured}",
    }
    if site():
        fields["url"] = f"{site()}figures/{facts['id']}.svg"
    lines = [f"  {name:<6} = {{{value}}}" for name, value in fields.items()]
    return f"@misc{{specdec-{facts['id']},\n" + ",\n".join(lines) + "\n}"
