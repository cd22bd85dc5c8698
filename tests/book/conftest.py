import os
import shutil
import subprocess
import sys

import pytest

from specdec.study import pdf
from specdec.study.configurations import ROOT


@pytest.fixture(scope="session")
def run():
    """snakemake in a checkout, as make calls it."""
    return _run


def _run(checkout, *target, profile="smoke", first=""):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(first), str(checkout)])),
        "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
    }
    options = "-m snakemake --cores 1 --rerun-incomplete --quiet rules host reason".split()
    return subprocess.run(
        [sys.executable, *options, *(["--config", f"profile={profile}"] if profile else []), "--", *target],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A checkout for the smoke study."""
    return _fresh(tmp_path_factory.mktemp("measured"))


@pytest.fixture(scope="session")
def published_checkout(tmp_path_factory):
    """A checkout for the published book."""
    return _fresh(tmp_path_factory.mktemp("published"))


def _fresh(folder):
    """What a fresh clone would hold, without what was built here."""
    target = folder / "specdec-book"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture(scope="session")
def book(checkout, run, smollm2):
    """The smoke study, measured and rendered in a fresh checkout: the folder of its pages."""
    result = run(checkout, "book")
    if result.returncode:  # in short: hundreds of tests stand on it
        pytest.fail("\n".join((result.stdout + result.stderr).splitlines()[-40:]), pytrace=False)
    return checkout / "_build" / "html"


@pytest.fixture(scope="module")
def browser():
    """Chromium, closed at the end of each file: playwright's event loop would be in the way of papermill's."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright (in requirements.txt)")
    try:
        path = pdf.browser()
    except pdf.NoBrowser:
        pytest.skip("needs Chromium (Debian, Ubuntu: apt install chromium)")
    with api.sync_playwright() as playwright, playwright.chromium.launch(executable_path=path) as browser:
        yield browser
