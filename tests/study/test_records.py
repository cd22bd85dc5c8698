import json

import pandas as pd
import pytest

from specdec.study import records


def test_machine_name_is_short_and_plain():
    name = records.machine_name()
    assert name == name.lower() and " " not in name and name.endswith("g") and len(name) < 50


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu sse2 avx avx2 fma", "avx2"),
        ("fpu avx2 avx512f avx512_bf16", "avx512"),
        ("fpu avx2 avx512f amx_tile", "amx"),
        ("fpu sse2", None),
    ],
)
def test_processors_of_one_name_are_told_apart(monkeypatch, flags, name):
    text = f"model name\t: AMD EPYC\nflags\t\t: {flags}\nbugs\t\t: none\n"
    monkeypatch.setattr(records.Path, "exists", lambda path: True)
    monkeypatch.setattr(records.Path, "read_text", lambda path: text)
    monkeypatch.setattr(records.platform, "system", lambda: "Linux")
    assert records.vectors() == name
    assert records.machine_name().startswith("amd-epyc-" + (f"{name}-" if name else ""))
    monkeypatch.setattr(records.Path, "exists", lambda path: False)
    assert records.vectors() is None


def test_a_journal_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "decode.partial"
    first = records.Journal(path, {"k": 2})
    first.add("a", {"rounds": [{"x": 1}]})
    first.add("b", {"rounds": [{"x": 2}], "answers": [{"y": 0.1234567}]})
    with path.open("a") as file:
        file.write('{"unit": "c", "rows": {"rou')  # cut short by an interruption

    again = records.Journal(path, {"k": 2})
    assert set(again.units) == {"a", "b"}
    again.add("c", {"rounds": [{"x": 3}]})
    assert set(records.Journal(path, {"k": 2}).units) == {"a", "b", "c"}

    again.finish(tmp_path / "results")
    assert pd.read_csv(tmp_path / "results" / "rounds.csv").x.tolist() == [1, 2, 3]
    assert (tmp_path / "results" / "answers.csv").read_text() == "y\n0.123457\n"
    assert not path.exists() and not list(tmp_path.rglob("*.partial"))


def test_a_journal_of_other_parameters_is_not_continued(tmp_path):
    path = tmp_path / "decode.partial"
    records.Journal(path, {"k": 2}).add("a", {"rounds": []})
    assert records.Journal(path, {"k": 4}).units == {}


def test_run_record_says_where_it_comes_from(tmp_path):
    records.update_run(tmp_path, "cpu-bf16", "quick", "latency", {"parameters": {"repeats": 3}})
    records.update_run(tmp_path, "cpu-bf16", "quick", "decode", {"parameters": {}})
    run = json.loads((tmp_path / "run.json").read_text())
    assert set(run["steps"]) == {"latency", "decode"}
    step = run["steps"]["latency"]
    assert step["parameters"] == {"repeats": 3}
    assert {"finished", "machine", "versions", "commit"} <= set(step)
    assert step["machine"]["cores"] >= 1 and step["versions"]["python"]


def test_progress_is_appended(tmp_path):
    report = records.reporter(tmp_path / "progress", 3, "prompts")
    report(1)
    assert (tmp_path / "progress").read_text().splitlines() == ["0 3 prompts", "1 3 prompts"]
    records.reporter("", 3, "prompts")(1)  # nobody listens: nothing happens
