"""Run one notebook: parameters checked first, progress on the terminal, nothing half-written.

papermill is the only executor. ``python -m specdec.study.execute NOTEBOOK OUTPUT --parameters JSON``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError

from specdec.study.configurations import ROOT, validated

# Parameters that every measuring notebook has beside those of its step, and every analysing one.
_COMMON = {"configuration": str, "profile": str, "results": str, "progress": str}
_ANALYSE = {"machine": str, "published": str, "figures": str}


def execute(notebook: Path, output: Path, parameters: dict) -> None:
    """Run ``notebook`` with ``parameters`` and move the executed copy to ``output`` when it has succeeded.

    Raises:
        ValueError: an unknown or mistyped parameter, or a notebook without a cell tagged ``parameters``; before the
            kernel starts. papermill alone would only warn.
        PapermillExecutionError: a cell failed; the notebook as far as it came is kept beside ``output`` as ``.failed.ipynb``.
    """
    check(notebook, parameters)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(output.stem + ".partial.ipynb")
    failed = output.with_name(output.stem + ".failed.ipynb")
    with tempfile.TemporaryDirectory() as scratch:
        progress = Path(scratch) / "progress"
        if "progress" in _parameters(notebook):
            parameters = {**parameters, "progress": str(progress)}
        done = threading.Event()
        watcher = threading.Thread(target=_show, args=(progress, done, notebook.stem, parameters), daemon=True)
        watcher.start()
        try:
            papermill.execute_notebook(
                str(notebook),
                str(temporary),
                parameters=parameters,
                kernel_name="python3",
                cwd=str(ROOT),
                progress_bar=False,
                log_output=False,
                start_timeout=300,
                execution_timeout=None,
                extra_arguments=["--IPKernelApp.log_level=ERROR"],
            )
        except PapermillExecutionError:
            os.replace(temporary, failed)
            raise
        finally:
            done.set()
            watcher.join()
    executed = nbformat.read(temporary, as_version=4)
    strip_run_details(executed)
    nbformat.write(executed, temporary)
    os.replace(temporary, output)
    failed.unlink(missing_ok=True)


def check(notebook: Path, parameters: dict) -> None:
    """ValueError unless every parameter is known to ``notebook`` and has its type."""
    known = _parameters(notebook)
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ValueError(f"{notebook.name} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    step = notebook.stem if notebook.parent.name == "measure" else None
    common = _COMMON if step else _ANALYSE
    for name in set(parameters) & set(common):
        if not isinstance(parameters[name], common[name]):
            raise ValueError(f"{notebook.name}: {name} must be {common[name].__name__}, not {parameters[name]!r}")
    if step:
        settings = {name: ast.literal_eval(entry["default"]) for name, entry in known.items()} | parameters
        validated(step, {name: value for name, value in settings.items() if name not in _COMMON})


def strip_run_details(notebook) -> None:
    """Take out what differs between two runs of the same thing: times of execution, paths, identifiers."""
    notebook.metadata.pop("papermill", None)
    for i, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{i}"
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if "injected-parameters" in cell.metadata.get("tags", []) or "parameters" in cell.metadata.get("tags", []):
            cell.metadata["tags"] = sorted({*cell.metadata["tags"], "remove-cell"})


def _parameters(notebook: Path) -> dict:
    """What papermill reads in the cell tagged ``parameters``, by name."""
    cells = nbformat.read(notebook, as_version=4).cells
    if not any("parameters" in cell.metadata.get("tags", []) for cell in cells):
        raise ValueError(f"{notebook.name} has no cell tagged `parameters`: its settings could not be changed")
    return {name: entry for name, entry in papermill.inspect_notebook(str(notebook)).items()}


def _show(progress: Path, done: threading.Event, name: str, parameters: dict) -> None:
    """Lines such as "decode cpu-bf16: 5 of 24 prompts, 3 min left", at most one every few seconds off a terminal."""
    label = " ".join(filter(None, [name, parameters.get("configuration")]))
    begin, shown, first = time.monotonic(), None, None
    print(f"{label}: started", file=sys.stderr, flush=True)
    while not done.wait(1):
        try:
            text = progress.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            continue
        if not text or text[-1] == shown:
            continue
        shown = text[-1]
        count, total, what = shown.split(" ", 2)
        count, total = int(count), int(total)
        now = time.monotonic()
        first = first or (count, now)  # what a resumed run found finished says nothing about the time that is left
        left = (now - first[1]) / (count - first[0]) * (total - count) if count > first[0] else None
        rest = (
            "" if left is None else f", about {left / 60:.0f} min left" if left > 90 else f", about {left:.0f} s left"
        )
        print(f"{label}: {count} of {total} {what}{rest}", file=sys.stderr, flush=True)
    print(f"{label}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--parameters", default="{}", help="a JSON object")
    options = parser.parse_args(arguments)
    try:
        execute(options.notebook, options.output, json.loads(options.parameters))
    except (ValueError, PapermillExecutionError) as error:
        print(f"{options.notebook}: {str(error).strip()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
