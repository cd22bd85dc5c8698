"""What the book tools pass over in silence: ``python -m specdec.study.pages FOLDER`` before a build.

Rendering never executes, so a notebook that holds a traceback would become a page and the build would succeed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat


def faults(folder: Path) -> list[str]:
    """One line for each executed notebook under ``folder`` that must not become a page."""
    found = []
    for path in sorted(folder.rglob("*.ipynb")):
        if path.name.endswith((".failed.ipynb", ".partial.ipynb")):
            continue
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        if any(output.output_type == "error" for cell in cells for output in cell.outputs):
            found.append(f"{path}: a cell ended in an error")
        if any(cell.source.strip() and cell.execution_count is None for cell in cells):
            found.append(f"{path}: not executed to its end")
        if any(output.get("name") == "stderr" for cell in cells for output in cell.outputs):
            found.append(f"{path}: a cell wrote to stderr, which would stand on the page")
        if any(set(output.get("data", ())) == {"text/plain"} for cell in cells for output in cell.outputs):
            found.append(f"{path}: a cell ends in a bare value, which would stand on the page")
    return found


def main(arguments: list[str]) -> int:
    found = [line for folder in arguments for line in faults(Path(folder))]
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
