"""The interactive page in a real browser: its formula is that of specdec.costmodel, and it needs nothing but its file."""

import json

import numpy as np
import pytest

from specdec import costmodel
from specdec.study import explore, records, tables

CURVES = {  # n -> v(n): one that jumps, one that is nearly free and short
    "jagged": {1: 1.0, 2: 1.52, 3: 1.85, 4: 1.71, 5: 1.55, 7: 1.9, 9: 2.3, 13: 2.9, 17: 3.6},
    "short": {1: 1.0, 2: 1.01, 3: 0.99, 5: 1.04},
}
SERIAL = {1: 1.0, 13: 13.0}


def start(name, **values):
    points = [
        {"k": 2, "speedup": 1.21, "prompts": 24, "few": False, "low": 1.12, "high": 1.31},
        {"k": 4, "speedup": 1.4, "prompts": 1, "few": True},
    ]
    text = {
        "name": name,
        "title": f"{name}: a <pair>",
        "domain": "code",
        "sampling": "greedy",
        "whole": name != "short",
    }
    v = [[n, cost] for n, cost in CURVES[name].items()]
    return text | {"v": v, "points": points, "k": 4, "a": 0.72, "c": 0.31, "o": 0.03} | values


@pytest.fixture
def page(browser, tmp_path):
    """The page from a file, on a phone without a network; in the end: no error and no request but for the file."""
    path = tmp_path / "explore.html"
    fragment = explore.html([start("jagged"), start("short", k=3, a=0.5, c=0.09, o=0.0)])
    path.write_text(f'<!doctype html><meta charset="utf-8"><title>explore</title>{fragment}', encoding="utf-8")
    context = browser.new_context(offline=True, viewport={"width": 360, "height": 740})
    page = context.new_page()
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    yield page
    context.close()
    assert problems == []
    assert requests == [path.as_uri()]


def shown(page):
    """What the page has worked out, in full precision."""
    data = page.locator("#explore").evaluate("element => ({...element.dataset})")
    return {name: json.loads(value) if value != "NaN" else np.nan for name, value in data.items()}


def sliders(page):
    return {name: float(page.locator(f"#explore-{name}").input_value()) for name in "kacso"}


@pytest.mark.browser
def test_numbers_are_those_of_the_cost_model(page):
    draws = np.random.default_rng(11)
    for i in range(24):
        choice = ["jagged", "short", "own"][i % 3]
        page.select_option("#explore-start", {"jagged": "0", "short": "1", "own": "own"}[choice])
        longest = int(page.locator("#explore-k").get_attribute("max"))
        assert longest == (4 if choice == "short" else 12)
        top = {"c": 150, "a": 100, "s": 100 if choice == "own" else 200, "o": 50}
        values = {name: int(draws.integers(0, most, endpoint=True)) / 100 for name, most in top.items()}
        k = int(draws.integers(0, longest, endpoint=True))
        for name, value in {**values, "k": k}.items():
            page.locator(f"#explore-{name}").fill(f"{value:g}")
        assert sliders(page) == values | {"k": k}

        a, c, o = values["a"], values["c"], values["o"]
        v = {n: 1 + values["s"] * (cost - 1) for n, cost in CURVES.get(choice, SERIAL).items()}
        survival, wide = a ** np.arange(1, longest + 1), np.interp(np.arange(1, longest + 2), list(v), list(v.values()))
        found = shown(page)
        expected = [1.0] + [costmodel.speedup(survival[:n], c, wide[n], o) for n in range(1, longest + 1)]
        assert found["curve"] == pytest.approx(expected, rel=1e-9)
        assert found["speedup"] == pytest.approx(expected[k], rel=1e-9)
        assert (found["bestK"], found["bestSpeedup"]) == pytest.approx(costmodel.best_k(survival, c, v, o), rel=1e-9)
        even = costmodel.break_even_c(costmodel.expected_tokens(survival[:k]), k, wide[k], o) if k else np.nan
        assert found["breakEven"] == pytest.approx(even, rel=1e-9, abs=1e-9, nan_ok=True)
        assert page.locator("#explore-speedup").inner_text() == f"{found['speedup']:.2f}"
        assert page.locator("#explore-best").inner_text() == str(found["bestK"])


@pytest.mark.browser
def test_a_start_sets_the_sliders_and_draws_its_points(page):
    assert sliders(page) == {"k": 4, "a": 0.72, "c": 0.31, "s": 1, "o": 0.03}
    assert page.locator("#explore-chart rect").count() == 2
    assert (
        "Measured for jagged at this K: 1.40, prompts: 1, indicative." in page.locator("#explore-verdict").inner_text()
    )
    page.select_option("#explore-start", label="short, code, greedy")
    assert sliders(page) == {"k": 3, "a": 0.5, "c": 0.09, "s": 1, "o": 0}
    page.locator("#explore-c").fill("1")
    page.get_by_role("button", name="Back to the start").click()
    assert sliders(page)["c"] == 0.09
    before = shown(page)["speedup"]
    page.select_option("#explore-start", "own")  # goes on from there, without points
    assert shown(page)["speedup"] == pytest.approx(before, rel=0.02)
    assert page.locator("#explore-chart rect").count() == 0


@pytest.mark.browser
def test_keys_move_the_sliders(page):
    page.get_by_role("slider", name="Draft length K").focus()
    page.keyboard.press("ArrowRight")
    assert sliders(page)["k"] == 5 and page.locator("#explore-k-text").inner_text() == "5"
    assert "At K = 5" in page.locator("#explore-verdict").inner_text()
    page.keyboard.press("Home")
    assert shown(page)["speedup"] == 1
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")
    assert sliders(page)["a"] == pytest.approx(0.71)


@pytest.mark.browser
def test_it_says_whether_drafting_pays(page):
    verdict = page.locator("#explore-verdict")
    assert verdict.get_attribute("aria-live") == "polite"
    page.get_by_role("slider", name="Acceptance a").fill("1")
    assert "At K = 4 it pays" in verdict.inner_text()
    page.get_by_role("slider", name="Acceptance a").fill("0")
    assert "it does not pay" in verdict.inner_text() and "no draft pays, however fast" in verdict.inner_text()
    assert "No K is faster than the target alone." in verdict.inner_text()
    assert page.locator("#explore-even").inner_text() == "none"


@pytest.mark.browser
def test_everything_has_a_name_and_fits_a_phone(page):
    for name in ("Draft length K", "Acceptance a", "Latency ratio c", "Verification cost", "Overhead o"):
        assert page.get_by_role("slider", name=name).count() == 1
    assert page.get_by_role("combobox", name="Start from").count() == 1
    assert "Predicted speedup by draft length K" in page.get_by_role("img").first.get_attribute("aria-label")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_start_gives_the_prediction_of_the_study():
    """At the K it starts from the page shows what the chapter on the speedup predicts, but for the steps of its sliders."""
    machine = records.published()[0]
    predicted = tables.predictions(machine).set_index(["configuration", "temperature", "domain", "k"]).predicted
    found = explore.starts(machine)
    assert len(found) == len(predicted.index.droplevel("k").unique())
    temperatures = {explore.chapter.sampling(t): t for t in predicted.index.unique("temperature")}
    for one in found:
        domain = "all" if one["domain"] == "all domains" else one["domain"]
        expected = predicted[one["name"], temperatures[one["sampling"]], domain, one["k"]]
        assert explore.speedup(one, one["k"]) == pytest.approx(expected, rel=0.04)
