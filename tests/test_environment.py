"""The four files that describe the environment agree with each other."""

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def pins(lines):
    """name -> version; every line that is not an option or a comment is ``name==version``."""
    found = {}
    for line in lines:
        if not line or line.startswith(("#", "-")):
            continue
        name, version = line.split("==")
        assert str(Version(version)) == version and "+" not in version, line
        found[canonicalize_name(name)] = version
    return found


LOCK = pins((ROOT / "requirements.txt").read_text().splitlines())
BOOK = pins((ROOT / "requirements-book.txt").read_text().splitlines())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]


def test_the_rendering_lock_is_part_of_the_full_lock():
    assert BOOK.items() <= LOCK.items()


def test_rendering_needs_no_torch():
    heavy = {"torch", "transformers", "accelerate", "safetensors", "tokenizers", "gguf", "huggingface-hub"}
    assert not heavy & BOOK.keys()
    assert heavy <= LOCK.keys()


def test_the_ranges_admit_the_locked_versions():
    for requirement in BASE + EXTRAS:
        assert requirement.specifier.contains(LOCK[canonicalize_name(requirement.name)]), str(requirement)


def test_each_lock_holds_what_the_project_asks_for():
    assert {canonicalize_name(r.name) for r in BASE} <= BOOK.keys()
    assert {canonicalize_name(r.name) for r in EXTRAS} <= LOCK.keys()


def test_conda_pins_equal_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == "specdec"
    python = next(d for d in environment["dependencies"] if isinstance(d, str) and d.startswith("python="))
    assert Requirement("python" + PROJECT["requires-python"]).specifier.contains(python.removeprefix("python="))
    conda = pins(next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict)))
    assert conda.items() <= LOCK.items()
    assert {canonicalize_name(r.name) for r in BASE + EXTRAS} == conda.keys()
