"""Every page in a real browser, opened from disk: offline, at two widths, in both colour schemes, by keyboard, by axe."""

import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from test_book import PAGES

pytestmark = pytest.mark.browser

SIZES = {"wide": {"width": 1280, "height": 800}, "phone": {"width": 360, "height": 740}}


@contextmanager
def visit(browser, address, scheme="light", size="wide"):
    """A page when its scripts are done, with what it asked of other hosts (and did not get) and what went wrong."""
    options = {"color_scheme": scheme, "viewport": SIZES[size], "reduced_motion": "reduce"}
    with browser.new_context(**options) as context:
        context.route(re.compile("^(?!file:)"), lambda route: route.abort())
        seen = SimpleNamespace(page=context.new_page(), asked=[], errors=[], scheme=scheme)
        seen.page.on("request", lambda request: seen.asked.append(request.url))
        seen.page.on("websocket", lambda socket: seen.asked.append(socket.url))
        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on("console", lambda said: seen.errors.append(said.text) if said.type == "error" else None)
        seen.page.goto(address)
        seen.page.evaluate("window.MathJax?.startup?.promise")
        yield seen


# The pages of configurations are made alike: one with numbers and one without stand for all.
LOOKED_AT = [p for p in PAGES if not p.startswith("configurations/")] + [
    "configurations/gguf-q4",
    "configurations/cuda-7b",
]
EVERY = [*LOOKED_AT, "search", "genindex", "py-modindex"]
VIEWS = [(page, scheme, size) for page in EVERY for scheme in ("light", "dark") for size in SIZES]


@pytest.fixture(scope="module", params=VIEWS, ids=" ".join)
def seen(request, browser, book):
    """Each page in each view, code unfolded."""
    name, scheme, size = request.param
    with visit(browser, (book / f"{name}.html").as_uri(), scheme, size) as seen:
        seen.page.evaluate("for (const folded of document.querySelectorAll('details')) folded.open = true")
        yield seen


def test_nothing_is_asked_of_the_network_and_nothing_goes_wrong(seen):
    assert [url for url in seen.asked if urlsplit(url).scheme not in ("file", "data", "blob")] == []
    assert seen.errors == []


def test_math_is_typeset(seen):
    raw = """all => all.filter(e => !e.querySelector('mjx-container')
                                 || e.querySelector('mjx-merror, [data-mjx-error], mjx-mtext[style*="red"]'))
                       .map(e => e.textContent)"""
    assert seen.page.eval_on_selector_all(".math", raw) == []


def test_pictures_load_and_downloads_are_there(seen):
    broken = "all => all.filter(e => !(e.complete && e.naturalWidth > 0)).map(e => e.src)"
    assert seen.page.eval_on_selector_all("img", broken) == []
    links = seen.page.eval_on_selector_all("main a[href*='figures/']", "all => all.map(a => a.href)")
    assert [link for link in links if not Path(url2pathname(urlsplit(link).path)).is_file()] == []
    assert len(links) >= 4 * seen.page.locator("main figure img").count()


def test_nothing_runs_over_the_edge_or_is_cut_off(seen):
    assert seen.page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0
    cut = """all => all.filter(e => e.clientWidth > 1 && e.scrollWidth > e.clientWidth + 1 && e.checkVisibility()
                                 && ['hidden', 'clip'].includes(getComputedStyle(e).overflowX)
                                 && !e.closest('mjx-container'))
                       .map(e => e.outerHTML.slice(0, 200))"""
    assert seen.page.eval_on_selector_all("main *", cut) == []


def test_headings_are_in_order(seen):
    seen_ones = "all => all.filter(h => h.checkVisibility()).map(h => Number(h.tagName[1]))"
    levels = seen.page.eval_on_selector_all("h1, h2, h3, h4, h5, h6", seen_ones)
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below <= above + 1 for above, below in zip(levels, levels[1:], strict=False))


def test_axe_finds_nothing_serious(seen):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    assert seen.page.evaluate("document.documentElement.dataset.theme") == seen.scheme
    assert seen.page.evaluate("document.getAnimations().length") == 0
    found = axe.Axe().run(seen.page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [
        f"{rule['id']}: {node['html'][:200]} {node['failureSummary']}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ] == []


@pytest.mark.parametrize("name", LOOKED_AT)
def test_anchors_bring_their_place_into_view(browser, book, name):
    astray = """links => links.filter(link => {
        location.hash = link.hash;
        const place = document.getElementById(decodeURIComponent(link.hash.slice(1)))?.getBoundingClientRect();
        return !place || place.top < -1 || place.top >= innerHeight;
    }).map(link => link.hash)"""
    with visit(browser, (book / f"{name}.html").as_uri()) as seen:
        assert seen.page.eval_on_selector_all("main a.headerlink", astray) == []


def test_search_works_from_disk(browser, book):
    with visit(browser, (book / "index.html").as_uri()) as seen:
        seen.page.keyboard.press("Control+k")
        seen.page.keyboard.type("acceptance")
        seen.page.keyboard.press("Enter")
        seen.page.wait_for_url("**/search.html?q=acceptance")
        seen.page.locator(
            "#search-results a[href*='notebooks/acceptance.html']"
        ).first.click()  # results come one by one
        seen.page.wait_for_url("**/notebooks/acceptance.html*")
        assert seen.page.locator("h1:visible").inner_text().startswith("Acceptance")
        assert seen.errors == []


def test_the_colour_scheme_can_be_chosen_and_is_kept(browser, book):
    with visit(browser, (book / "index.html").as_uri()) as seen:
        seen.page.locator(".theme-switch-button").click()
        assert seen.page.evaluate("document.documentElement.dataset.theme") == "dark"
        seen.page.locator("main a", has_text="Method").first.click()
        seen.page.wait_for_url("**/method.html")
        assert seen.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_first_key_skips_to_the_text(browser, book):
    with visit(browser, (book / "notebooks" / "speedup.html").as_uri()) as seen:
        seen.page.keyboard.press("Tab")
        assert seen.page.evaluate("document.activeElement.hash") == "#main-content"
        seen.page.wait_for_function("document.activeElement.getBoundingClientRect().top >= 0", timeout=2000)
        seen.page.keyboard.press("Enter")
        seen.page.keyboard.press("Tab")
        assert seen.page.evaluate("!!document.activeElement.closest('main')")


def test_keys_reach_every_link_and_show_where_they_are(browser, book):
    here = """() => {
        const e = document.activeElement, style = getComputedStyle(e);
        return {link: e.href ?? '', start: e === document.body || !!e.closest('#pst-skip-link'),
                shown: style.outlineStyle !== 'none' || style.boxShadow !== 'none', what: e.outerHTML.slice(0, 200)};
    }"""
    with visit(browser, (book / "notebooks" / "speedup.html").as_uri()) as seen:
        seen.page.keyboard.press("Tab")
        stops = []
        while len(stops) < 500:
            seen.page.keyboard.press("Tab")
            stop = seen.page.evaluate(here)
            if stop["start"]:
                break
            stops.append(stop)
        links = "all => all.filter(a => a.checkVisibility({visibilityProperty: true})).map(a => a.href)"
        every = seen.page.eval_on_selector_all("nav a[href], main a[href]", links)
    assert set(every) - {stop["link"] for stop in stops} == set()
    assert [stop["what"] for stop in stops if not stop["shown"]] == []


def test_the_contents_open_and_close_by_key_on_a_phone(browser, book):
    with visit(browser, (book / "index.html").as_uri(), size="phone") as seen:
        contents = seen.page.locator("nav[aria-label=Main] a", has_text="Method")
        assert not contents.is_visible()
        seen.page.locator("button.primary-toggle").focus()
        seen.page.keyboard.press("Enter")
        contents.wait_for(state="visible")
        seen.page.keyboard.press("Escape")
        contents.wait_for(state="hidden")
