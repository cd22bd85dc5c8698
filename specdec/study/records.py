"""Records of a run: where they lie, how they are written, what they say about their origin."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd
import psutil

from specdec.study.configurations import DATA, ROOT, study

RESULTS = DATA / "results"
_PACKAGES = ("specdec", "torch", "transformers", "numpy", "scipy", "pandas", "papermill", "llama-cpp-python")


def machine_name() -> str:
    """A short name of this machine: CPU, its widest vectors, cores, memory in GiB. For example ``amd-epyc-avx2-2c-24g``.

    Rented machines call processors of several generations by one name; the vectors tell apart those that matter here.
    """
    cpu = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@.*|\d+-core", " ", _cpu_model().lower())
    words = re.findall(r"[a-z0-9]+", cpu)[:4]
    return "-".join(
        [*words, *filter(None, [vectors()]), f"{os.cpu_count()}c", f"{round(psutil.virtual_memory().total / 2**30)}g"]
    )


def vectors() -> str | None:
    """The widest vector instructions of an x86 processor on Linux: "amx", "avx512" or "avx2"; None elsewhere."""
    flags = (_cpuinfo("flags") or "").split()
    return next((name for name in ("amx", "avx512", "avx2") if any(flag.startswith(name) for flag in flags)), None)


def folder(profile: str) -> Path:
    """Where a local run of ``profile`` keeps its records; git ignores it. A published machine has no suffix."""
    return RESULTS / f"{machine_name()}.{profile}"


def published() -> list[str]:
    """Names of the machines whose records are committed."""
    profiles = study().profiles
    return sorted(p.name for p in RESULTS.glob("*") if p.is_dir() and p.suffix.removeprefix(".") not in profiles)


def write_text(path: Path, text: str) -> None:
    """Write to a temporary path, then move: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_csv(path: Path, rows: Iterable[dict]) -> None:
    """Tidy CSV, floats with six significant digits."""
    write_text(path, pd.DataFrame(rows).to_csv(index=False, float_format="%.6g", lineterminator="\n"))


class Journal:
    """Finished units of a long step, one JSON line each, so that an interrupted step goes on where it stopped.

    The first line holds the parameters; a journal of other parameters is not continued. A line cut short by an
    interruption is dropped.
    """

    def __init__(self, path: Path, parameters: dict):
        self.path = path
        self.units: dict[str, dict] = {}
        header = json.dumps(parameters, sort_keys=True)
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        if lines and lines[0] == header:
            for line in lines[1:]:
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self.units[entry["unit"]] = entry["rows"]
        with path.open("w", encoding="utf-8") as file:
            file.write(header + "\n")
            for unit, rows in self.units.items():
                file.write(json.dumps({"unit": unit, "rows": rows}) + "\n")

    def add(self, unit: str, rows: dict[str, list[dict]]) -> None:
        """Keep a finished unit: for each record file its rows."""
        self.units[unit] = rows
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"unit": unit, "rows": rows}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, results: Path) -> None:
        """Write each record file from all units, then forget the journal."""
        names = {name for rows in self.units.values() for name in rows}
        for name in sorted(names):
            write_csv(results / f"{name}.csv", [row for rows in self.units.values() for row in rows.get(name, [])])
        self.path.unlink()


def reporter(path: str | Path, total: int, what: str) -> Callable[[int], None]:
    """A function that appends "done total what" to the progress file, which the runner shows; nothing if path is ""."""

    def report(done: int) -> None:
        if path:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(f"{done} {total} {what}\n")

    report(0)
    return report


def update_run(results: Path, configuration: str, profile: str, step: str, details: dict) -> None:
    """Add one finished step to ``run.json``, with what is needed to say where its records come from."""
    path = results / "run.json"
    run = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"steps": {}}
    run |= {"configuration": configuration, "profile": profile}
    run["steps"][step] = {**details, **origin()}
    write_text(path, json.dumps(run, indent=1, sort_keys=True) + "\n")


def origin() -> dict:
    """Machine, versions and commit, now."""
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "commit": commit(),
    }


def machine() -> dict:
    """What this machine is: CPU, its vectors, cores, threads, memory, system, load."""
    facts = {
        "name": machine_name(),
        "cpu": _cpu_model(),
        "vectors": vectors(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_1_minute": round(psutil.getloadavg()[0], 2),
    }
    if "torch" in sys.modules:
        facts["threads"] = sys.modules["torch"].get_num_threads()
    return facts


def commit() -> str:
    """The commit of the working tree, "+" if there are changes, "unknown" outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        status = ["git", "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if changed.strip() else "")


def now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def stopwatch() -> Callable[[], float]:
    """Seconds since this call."""
    begin = time.perf_counter()
    return lambda: time.perf_counter() - begin


def _cpu_model() -> str:
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(field) -> str | None:
    """What Linux says of the first processor."""
    info = Path("/proc/cpuinfo")
    found = re.search(rf"^{field}\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found and found[1].strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
