"""papermill's silent failures, made loud (shared by every notebook)."""

import ast
import subprocess
import sys

import nbformat
import papermill
import pytest

from specdec.study import configurations, execute, pages

ROOT = configurations.ROOT
SOURCES = sorted((ROOT / "notebooks").rglob("*.ipynb"))


def notebook(path, *cells, tags=("parameters",)):
    """A notebook whose first cell is tagged."""
    made = [nbformat.v4.new_code_cell(source) for source in cells]
    made[0].metadata["tags"] = list(tags)
    meta = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=meta), path)
    return path


def test_there_are_notebooks():
    assert {p.stem for p in SOURCES} >= {"latency", "decode", "sample", "speedup", "overview"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_a37_sources_are_stripped_and_parameterised(path):
    cells = nbformat.read(path, as_version=4).cells
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in cells) == 1
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")


@pytest.mark.parametrize("step", configurations.STEPS)
def test_defaults_are_the_smoke_profile(step):
    path = ROOT / "notebooks" / "measure" / f"{step}.ipynb"
    defaults = {n: ast.literal_eval(e["default"]) for n, e in papermill.inspect_notebook(str(path)).items()}
    plan = configurations.plan("smoke", defaults["configuration"]).steps()[step].model_dump()
    assert {name: defaults[name] for name in plan} == plan
    assert set(defaults) == set(plan) | {"configuration", "profile", "results", "progress"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"lenghts": [1]}, "no parameter lenghts; it has configuration"),
        ({"repeats": "3"}, "repeats: Input should be a valid integer"),
        ({"lengths": [2]}, "lengths must hold 1"),
        ({"configuration": 3}, "configuration must be str"),
    ],
)
def test_a37_bad_parameters_stop_before_the_kernel_starts(tmp_path, parameters, message):
    with pytest.raises(ValueError, match=message):
        execute.execute(ROOT / "notebooks" / "measure" / "latency.ipynb", tmp_path / "out.ipynb", parameters)
    assert list(tmp_path.iterdir()) == []


def test_a37_a_notebook_without_the_tag_is_refused(tmp_path):
    path = notebook(tmp_path / "source.ipynb", "machine = 'a'", tags=())
    with pytest.raises(ValueError, match="no cell tagged `parameters`"):
        execute.execute(path, tmp_path / "out.ipynb", {"machine": "b"})


def test_a37_parameters_arrive_and_leave_a_trace(tmp_path):
    path = notebook(tmp_path / "source.ipynb", "machine = 'a'", "print(machine)")
    printed = []
    for machine in ("b", "c"):
        execute.execute(path, tmp_path / "out.ipynb", {"machine": machine})
        printed.append(nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-1].outputs[0].text.strip())
    assert printed == ["b", "c"]


def test_two_runs_of_the_same_are_the_same_bytes(tmp_path):
    path = notebook(tmp_path / "source.ipynb", "machine = 'a'", "print(machine)")
    runs = []
    for _ in range(2):
        execute.execute(path, tmp_path / "out.ipynb", {"machine": "b"})
        runs.append((tmp_path / "out.ipynb").read_bytes())
    assert runs[0] == runs[1]


def test_a37_an_error_in_a_cell_is_an_exit_code_and_nothing_half_written(tmp_path):
    path = notebook(tmp_path / "source.ipynb", "machine = 'a'", "print('before')", "1 / 0")
    (tmp_path / "out.ipynb").write_text("the last good one")
    command = [sys.executable, "-m", "specdec.study.execute", str(path), str(tmp_path / "out.ipynb")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "ZeroDivisionError" in result.stderr
    assert (tmp_path / "out.ipynb").read_text() == "the last good one"
    kept = nbformat.read(tmp_path / "out.failed.ipynb", as_version=4)
    assert any(output.output_type == "error" for cell in kept.cells for output in cell.get("outputs", []))


def test_a37_pages_refuse_what_must_not_be_published(tmp_path):
    path = notebook(tmp_path / "book" / "a.ipynb", "x = 1")
    assert any("not executed" in line for line in pages.faults(tmp_path / "book"))
    made = nbformat.read(path, as_version=4)
    made.cells[0].execution_count = 1
    made.cells[0].outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])]
    nbformat.write(made, path)
    assert any("ended in an error" in line for line in pages.faults(tmp_path / "book"))
    assert pages.main([str(tmp_path / "book")]) == 1
    made.cells[0].outputs = []
    nbformat.write(made, path)
    assert pages.main([str(tmp_path / "book")]) == 0
