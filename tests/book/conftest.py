import os
import shutil
import subprocess
import sys

import pytest

from specdec.study.configurations import ROOT


@pytest.fixture(scope="session")
def run():
    """snakemake in a checkout, as make calls it."""
    return _run


def _run(checkout, *target, profile="smoke"):
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
    }
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--cores",
        "1",
        "--rerun-incomplete",
        "--quiet",
        "rules",
        "host",
        "reason",
    ]
    return subprocess.run(
        [*command, "--config", f"profile={profile}", "--", *target],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """What a fresh clone would hold, without what was built here."""
    target = tmp_path_factory.mktemp("clone") / "specdec-book"
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
    assert result.returncode == 0, result.stdout + result.stderr
    return checkout / "_build" / "html"
