"""The pages in headless Chromium, and the trace in the Perfetto UI's offline copy."""

import base64
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analyzer.compare.document import as_document, compare_runs
from analyzer.compare.settings import setting_points
from analyzer.predict.simulator import Settings, on_pareto_front, simulate_trace
from analyzer.questions.profdag import build_profdag
from tests.test_compare import HOSTILE, result
from tests.test_predict_simulator import EVEN, SIZE, random_trace
from tests.test_views_pages import data_of, hostile, report
from views.colours import CAUSES
from views.pareto import write_pareto, write_settings
from views.profdag.page import write_profdag
from views.regression import write_regression
from views.serving import make_server, offline_ui, ui_address
from views.timeline import marks
from views.timeline.npu_slices import group_name
from views.timeline.perfetto import write_trace
from views.timeline.threads import TOKEN_TRACKS, target_group
from workloads import tables_fixture as fixture

webdriver = pytest.importorskip("selenium.webdriver")
Axe = pytest.importorskip("axe_core_python.selenium").Axe
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium with chromedriver: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1200,900"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


def wait(condition: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "the page did not become ready"
        time.sleep(0.05)
    return value


def opened(browser: Any, path: Path) -> Any:
    """Run JavaScript on a page from disk that has drawn itself."""
    browser.get_log("browser")
    browser.get(path.as_uri())
    wait(lambda: browser.execute_script("return document.body && document.body.dataset.ready"))
    return browser.execute_script


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_the_report_draws_every_section(browser: Any, tmp_path: Path) -> None:
    run = opened(browser, report(tmp_path, *fixture.make_tables(tokens=40, layers=4)))
    assert run("return document.querySelectorAll('section').length") == 10
    drawn = run("return [...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('svg.main-svg').length)")
    assert len(drawn) > 6 and all(drawn)
    assert run("return document.querySelector('#experts .heatmaplayer image') !== null")
    opens_its_query_and_another_layer(run)
    assert complaints(browser) == []


@pytest.mark.long
def test_a_column_head_sorts_and_find_filters(browser: Any, tmp_path: Path) -> None:
    run = opened(browser, report(tmp_path, *fixture.make_tables(tokens=4, layers=12)))
    column = "return [...document.querySelectorAll('#operators .block:last-of-type tbody tr')].map(r => r.cells[1].textContent)"
    head = "[...document.querySelectorAll('#operators th button')].find(b => b.textContent === 'name').click()"
    run(head)
    assert run(column)[:3] == ["attention.0", "attention.1", "attention.2"]
    run(head)
    assert run(column)[0] == "router.11"
    found = "const i = document.querySelector('#operators .block:last-of-type input');"
    run(found + "i.value = 'experts.7'; i.dispatchEvent(new Event('input'))")
    assert run(column) == ["experts.7"]


A4 = {"width": 703, "height": 1032, "deviceScaleFactor": 1, "mobile": False}  # at 96 dpi, without its margins
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report."""
    return report(tmp_path_factory.mktemp("small"), *fixture.make_tables(tokens=3, layers=2))


WIDE = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
NARROW = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
LEAST_TEXT = 11
SMALL = """
const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const scale = (svg) => svg && svg.viewBox.baseVal.width ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
while (walk.nextNode()) {
  const around = walk.currentNode.parentElement, range = document.createRange();
  range.selectNode(walk.currentNode);
  const size = parseFloat(getComputedStyle(around).fontSize) * scale(around.closest('svg'));
  const drawn = walk.currentNode.textContent.trim() && around.checkVisibility() && range.getBoundingClientRect().width;
  if (drawn && size < arguments[0] - 0.01)
    found.push(`${size.toFixed(1)} px: ${walk.currentNode.textContent}`);
}
return found;
"""
"""The texts of a page that are drawn smaller than its argument in px."""


def barriers(browser: Any) -> list[tuple[str, str, str]]:
    """What axe-core finds wrong with the page for keyboards, screen readers and weak eyes, in both themes."""
    found = []
    for theme in ("light", "dark"):
        browser.execute_script(f"setTheme('{theme}')")
        for rule in Axe().run(browser)["violations"]:
            found += [(theme, rule["id"], str(node["target"])) for node in rule["nodes"]]
    return found


@pytest.fixture(scope="module")
def report_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(tmp_path_factory.mktemp("report"), *fixture.make_tables(layers=4))


@pytest.fixture(scope="module")
def other_pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One page of each other kind."""
    folder = tmp_path_factory.mktemp("pages")
    manifest, tables = fixture.make_tables(layers=4)
    write_profdag(build_profdag(tables, 1), tables, manifest, folder / "profdag.html")
    sides = ([result(f"{side}-{i}", i + 50 * n) for i in range(5)] for n, side in enumerate(("base", "cand")))
    write_regression(as_document(compare_runs(*sides)), folder / "regression.html")
    sweep(folder)
    write_settings(setting_points(*settings_of_runs()), folder / "settings.html")
    return [folder / f"{name}.html" for name in ("profdag", "regression", "pareto", "settings")]


def settings_of_runs() -> tuple[pd.DataFrame, pd.DataFrame]:
    """(speed, energy) of three settings, two runs each, as a history has them."""
    rows = [(setting, run) for setting in (HOSTILE, "4 threads", "8 threads") for run in range(2)]
    place = {"device": "board", "build": [setting for setting, _ in rows]}
    speed = pd.DataFrame({**place, "metric": "decode speed", "value": [10, 11, 14, 15, 12, 13]})
    joules = {"metric": "energy per token", "phase": "decode", "type": "soc", "value": [0.5, 0.52, 0.6, 0.61, 0.9, 0.95]}
    return speed, pd.DataFrame({**place, **joules})


def assert_no_barriers(browser: Any, pages: list[Path], window: dict[str, Any]) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    try:
        for path in pages:
            run = opened(browser, path)
            assert barriers(browser) == [], path.name
            assert run(SMALL, LEAST_TEXT) == [], path.name
            assert run("return document.documentElement.scrollWidth") <= window["width"], path.name
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("window", [pytest.param(WIDE, marks=pytest.mark.long), NARROW], ids=["wide", "narrow"])
def test_the_report_has_no_barriers(browser: Any, report_page: Path, window: dict[str, Any]) -> None:
    assert_no_barriers(browser, [report_page], window)


@pytest.mark.long
@pytest.mark.parametrize("window", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_other_pages_have_no_barriers(browser: Any, other_pages: list[Path], window: dict[str, Any]) -> None:
    assert_no_barriers(browser, other_pages, window)


def test_a_table_that_scrolls_says_so_and_a_link_in_a_finding_is_underlined(browser: Any, report_page: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", NARROW)
    try:
        run = opened(browser, report_page)
        shown = "[...document.querySelectorAll('.wide')].filter(e => e.checkVisibility())"
        tables = wait(
            lambda: run(f"return {shown}.map(e => [e.scrollWidth > e.clientWidth, !e.previousSibling.hidden, e.ariaLabel])")
        )
        assert {scrolls for scrolls, _, _ in tables} == {True, False}
        for scrolls, told, name in tables:
            assert scrolls == told == ("scrolls sideways" in (name or ""))
        links = run("return [...document.querySelectorAll('.findings a')].map(a => getComputedStyle(a).textDecorationLine)")
        assert links and set(links) == {"underline"}
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_first_picture_has_each_cause_in_its_colour_and_its_share_of_the_width(browser: Any, report_page: Path) -> None:
    run = opened(browser, report_page)
    run("setTheme('dark')")
    told = run(
        "return [...document.querySelectorAll('.time .bar')].map(bar => [bar.clientWidth, bar.ariaLabel, [...bar.children].map("
        "g => [g.dataset.cause, g.offsetWidth, getComputedStyle(g.firstChild).backgroundColor])])"
    )
    drawn = data_of(report_page)["sections"][0]["blocks"][0]["bars"]
    for (width, label, groups), bar in zip(told, drawn, strict=True):
        for (cause, pixels, colour), (named, parts) in zip(groups, bar["causes"], strict=True):
            assert cause == named and pixels == pytest.approx(width * sum(ms for _, ms in parts) / bar["ms"], abs=1.5)
            assert colour == "rgb({}, {}, {})".format(*(int(CAUSES[cause][1][i : i + 2], 16) for i in (1, 3, 5)))
        largest = max(bar["causes"], key=lambda one: sum(ms for _, ms in one[1]))[0]
        assert label.index(largest) < len(bar["title"]) + 20


@pytest.mark.long
def test_marks_of_small_changes_stand_apart_beside_a_large_one(browser: Any, tmp_path: Path) -> None:
    sides = [[result(f"{side}-{i}", i + 50 * n) for i in range(5)] for n, side in enumerate(("base", "cand"))]
    compared = as_document(compare_runs(*sides))
    ratios = [40.0, *np.linspace(0.97, 1.03, 22).tolist(), 1 / 40]
    like = next(m for m in compared["metrics"] if m["ratio"])
    shown = [{**like, "ratio": r, "low": r, "high": r, "metric": f"metric {i}", "verdict": "same"} for i, r in enumerate(ratios)]
    write_regression({**compared, "metrics": shown}, tmp_path / "regression.html")
    run = opened(browser, tmp_path / "regression.html")
    points = "[...document.querySelectorAll('#forest .point')].map(p => p.getBoundingClientRect().x)"
    wait(lambda: run(f"return {points}.length") == len(ratios))
    at = sorted(run(f"return {points}"))
    assert at[-2] - at[1] > (at[-1] - at[0]) / 10 and min(np.diff(at)) > 3
    assert at[1] - at[0] == pytest.approx(at[-1] - at[-2], rel=0.05)


@pytest.mark.long
def test_the_comparison_begins_with_one_sentence(browser: Any, tmp_path: Path) -> None:
    base, cand = (
        [result(f"{side}-{i}", i + seed, "attention", factor) for i in range(5)]
        for side, seed, factor in (("a", 0, 1), ("b", 50, 1.3))
    )
    write_regression(as_document(compare_runs(base, cand)), tmp_path / "regression.html")
    run = opened(browser, tmp_path / "regression.html")
    first = run("return [...document.querySelector('main').children].slice(0, 3).map(e => [e.tagName, e.innerText])")
    assert [tag for tag, _ in first] == ["H1", "P", "SECTION"] and first[0][1] == "5 + 5 runs compared"
    assert "slower in " in first[1][1] and first[1][1].count(".") == 1


def test_a_section_folds_and_a_link_opens_it(browser: Any, small: Path) -> None:
    run = opened(browser, small)
    visible = "return document.querySelector('#operators table').checkVisibility()"
    run("document.querySelector('#operators summary').click()")
    assert not run(visible)
    run("document.querySelector('nav a[href=\"#operators\"]').click()")
    assert run(visible)


def test_the_graph_is_walked_by_keys(browser: Any, tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(layers=4)
    write_profdag(build_profdag(tables, 1), tables, manifest, tmp_path / "profdag.html")
    run = opened(browser, tmp_path / "profdag.html")
    press = (
        "board.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}));"
        "return shown.nodes.indexOf(view.chosen)"
    )
    assert [run(press, key) for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Escape")] == [0, 1, 0, -1]
    assert run("return board.tabIndex") == 0
    run(press, "ArrowRight")
    run(press, "Enter")
    assert run("return shown.cards.length") == 4


def test_the_theme_follows_the_button(browser: Any, small: Path) -> None:
    run = opened(browser, small)
    ground = "return getComputedStyle(document.body).backgroundColor"
    before = run(ground)
    run("document.getElementById('theme').click()")
    assert run(ground) != before
    run("document.getElementById('theme').click()")
    assert run(ground) == before and complaints(browser) == []


def test_the_report_fits_a_phone(browser: Any, small: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        run = opened(browser, small)
        assert run("return document.documentElement.scrollWidth <= 360")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.long
def test_the_report_prints_as_wide_as_paper_and_is_then_as_before(browser: Any, small: Path) -> None:
    run = opened(browser, small)
    run("setTheme('dark')")
    widths = "...[...document.querySelectorAll('.chart')].map(c => c._fullLayout.width)"
    sizes = f"return [document.documentElement.dataset.theme, {widths}]"
    before = run(sizes)
    run("addEventListener('beforeprint', () => { document.printed = (() => {" + sizes + "})() })")
    paper = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False, "preferCSSPageSize": True})
    assert base64.b64decode(paper["data"]).startswith(b"%PDF") and before[0] == "dark"
    theme, *printed = run("return document.printed")
    assert theme == "light" and set(printed) == {676}
    wait(lambda: run(sizes) == before)


@pytest.mark.long
def test_a_comparison_is_no_wider_than_paper(browser: Any, tmp_path: Path) -> None:
    base, cand = (
        [result(f"{side}-{i}", i + seed, "attention", 1 + seed) for i in range(5)] for side, seed in (("a", 0), ("b", 1))
    )
    write_regression(as_document(compare_runs(base, cand)), tmp_path / "regression.html")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", A4)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        run = opened(browser, tmp_path / "regression.html")
        assert run("return document.querySelectorAll('#metrics th').length") > 12
        assert run("return document.documentElement.scrollWidth") <= A4["width"]
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.long
def test_the_whole_graph_is_printed_on_one_light_page_and_is_then_as_before(browser: Any, tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(layers=4)
    write_profdag(build_profdag(tables, 1), tables, manifest, tmp_path / "profdag.html")
    run = opened(browser, tmp_path / "profdag.html")
    run("setTheme('dark'); foldAll(false); zoom(4, 0, 0)")
    state = "[document.documentElement.dataset.theme, view.x, view.y, view.scale, board.clientWidth]"
    right = "Math.max(...shown.cards.map(c => c.x + c.width)) * view.scale + view.x"
    before = run(f"return {state}")
    run(f"addEventListener('beforeprint', () => {{ document.printed = [...{state}, {right}] }})")
    paper = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert base64.b64decode(paper["data"]).count(b"/Type /Page\n") == 1 and before[0] == "dark"
    theme, left, _, _, width, last = run("return document.printed")
    assert theme == "light" and width == 950 and 0 <= left < last <= width
    wait(lambda: run(f"return {state}") == before)


@pytest.mark.long
def test_hostile_names_stay_text_in_the_browser(browser: Any, tmp_path: Path) -> None:
    manifest, tables = hostile()
    write_profdag(build_profdag(tables, 1), tables, manifest, tmp_path / "profdag.html")
    for path in (report(tmp_path, manifest, tables), tmp_path / "profdag.html"):
        run = opened(browser, path)
        assert run("return document.pwned") is None and run("return document.querySelectorAll('img').length") == 0
        assert "onerror" in run("return document.body.innerText + document.title")


def test_the_profdag_page_draws_finds_and_explains(browser: Any, tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(layers=4)
    write_profdag(build_profdag(tables, 1), tables, manifest, tmp_path / "profdag.html")
    run = opened(browser, tmp_path / "profdag.html")
    colours = (
        "const c = document.querySelector('canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return s.size"
    )
    wait(lambda: run(colours) > 5)
    run(
        "const n = shown.nodes[2], r = board.getBoundingClientRect(), at = {clientX: r.left + n.ax * view.scale + view.x,"
        " clientY: r.top + n.ay * view.scale + view.y}; board.dispatchEvent(new PointerEvent('pointermove', at))"
    )
    assert "duration" in run("return document.querySelector('.tip').innerText")
    for mode in ("waiting", "cycles", "backend", "type"):
        run(f"const s = document.querySelector('select'); s.value = '{mode}'; s.dispatchEvent(new Event('change'))")
    assert complaints(browser) == []


CROSSED = """
const [w, h] = dag.size, near = (at, a, b, size) => Math.abs(at - (a + b) / 2) < (size + Math.abs(b - a)) / 2;
const over = (edge, [x0, y0], [x1, y1]) => shown.nodes.filter((n) =>
  n !== edge.from && n !== edge.to && near(n.ax, x0, x1, w) && near(n.ay, y0, y1, h)).length;
const straights = (edge) => edge.corners ? edge.corners.slice(1).map((point, i) => [edge.corners[i], point])
  : edge.passages.map(([x, top, bottom]) => [[x, top], [x, bottom]]);
return shown.edges.flatMap((edge) => straights(edge).map(([a, b]) => over(edge, a, b))).reduce((a, b) => a + b, 0);
"""


def test_edges_of_the_profdag_run_between_its_operators(browser: Any, tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(layers=4)
    write_profdag(build_profdag(tables, 1), tables, manifest, tmp_path / "profdag.html")
    run = opened(browser, tmp_path / "profdag.html")
    for button in ("expand", "fold"):
        run(f"document.getElementById('{button}').click()")
        assert run("return shown.edges.length") >= 3
        assert run(CROSSED) == 0


def test_a_phone_shows_the_profdag_with_its_labels(browser: Any, tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(layers=4)
    write_profdag(build_profdag(tables, 1), tables, manifest, tmp_path / "profdag.html")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        run = opened(browser, tmp_path / "profdag.html")
        run("document.getElementById('expand').click()")
        assert run("return view.scale >= DETAIL && shown.cards.every((c) => c.x * view.scale + view.x >= 0)")
        assert run("return Math.max(...shown.cards.map((c) => (c.x + c.width) * view.scale + view.x)) <= innerWidth")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


CLICK = (
    "const n = arguments[0] === undefined ? {ax: shown.cards[0].x + 40, ay: shown.cards[0].y + 10} : shown.nodes[arguments[0]];"
    "const r = board.getBoundingClientRect(), at = {bubbles: true, clientX: r.left + n.ax * view.scale + view.x,"
    " clientY: r.top + n.ay * view.scale + view.y}; board.dispatchEvent(new MouseEvent('click', at))"
)
FIND = (
    "const i = document.querySelector('header input'); i.value = arguments[0]; i.dispatchEvent(new Event('input'));"
    "i.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))"
)


def test_equal_layers_open_and_fold_and_a_node_leads_to_the_timeline(browser: Any, tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(layers=4)
    write_profdag(build_profdag(tables, 1), tables, manifest, tmp_path / "profdag.html")
    run = opened(browser, tmp_path / "profdag.html")
    sizes = "return [shown.cards.length, shown.nodes.length, Math.round(shown.cards.reduce((s, c) => s + c.ns, 0))]"
    cards, nodes, ns = run(sizes)
    assert (cards, nodes) == (1, 4)
    run(CLICK)
    assert run(sizes) == [4, 16, ns]
    run("document.getElementById('fold').click()")
    assert run(sizes) == [1, 4, ns]
    run(CLICK, 1)
    assert run("return document.querySelectorAll('.panel a').length") == 4
    run(FIND, "router.2")
    assert run(sizes)[0] == 4 and run("return view.chosen.name") == "router.2"
    begin = int(tables["operators"].query("token_id == 1 and name == 'router.2'").begin_ns.iloc[0]) + fixture.BOOT_OFFSET
    link = run("return document.querySelector('.panel a').href")
    start, end = (int(part.split("=")[1]) for part in link.split("&")[1:])
    assert start < begin < end
    run("document.getElementById('path').click()")
    assert run("return view.path && shown.nodes.some(n => n.critical)") and complaints(browser) == []


def operators_are_coloured_by_change(run: Any) -> None:
    told = run(
        "return [...document.querySelectorAll('#graph .op')].map(g => [g.getAttribute('class').split(' ')[1] || '',"
        " getComputedStyle(g.querySelector('rect')).fill, g.querySelector('text').textContent])"
    )
    fill = {kind: {colour for verdict, colour, _ in told if verdict == kind} for kind in {row[0] for row in told}}
    assert {row[2] for row in told if row[0] == "slower"} == {"attention"}
    assert {row[2] for row in told if row[0] == "vanished"} == {"router"} and "appeared" in fill
    assert not fill["slower"] & fill[""]
    run("document.querySelector('#graph .op.slower').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert "slower" in run("return document.querySelector('#graph dl.about').innerText")


def test_a_logarithmic_axis_has_whole_numbers(browser: Any, small: Path) -> None:
    run = opened(browser, small)
    axes = "[...document.querySelectorAll('.chart')].flatMap(c => [c._fullLayout.xaxis, c._fullLayout.yaxis])"
    ticks = run(f"return {axes}.filter(a => a && a.type === 'log').map(a => [a.tickvals, a.ticktext])")
    assert ticks
    for values, labels in ticks:
        assert [float(label.replace(",", "")) for label in labels] == pytest.approx(values)


def opens_its_query_and_another_layer(run: Any) -> None:
    run("document.querySelector('#time details.query summary').click()")
    assert run("return document.querySelector('#time details.query code').checkVisibility()")
    matrix = "return JSON.stringify(document.querySelector('#experts .chart').data[0].z)"
    before = run(matrix)
    run("const s = document.querySelector('#experts select'); s.value = '1'; s.dispatchEvent(new Event('change'))")
    assert run(matrix) != before
    link = run("return document.querySelector('#operators td.moment a').href")
    assert link.startswith("https://ui.perfetto.dev/#!/?url=http://127.0.0.1:9001/")


def test_the_perfetto_ui_opens_the_trace_offline(browser: Any, tmp_path: Path) -> None:
    try:
        offline_ui()
    except Exception as error:
        pytest.skip(str(error))
    manifest, tables = fixture.make_tables()
    written = write_trace(manifest, tables, tmp_path / "trace.pftrace")
    with make_server(tmp_path / "trace.pftrace", True, 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        browser.get(ui_address(served, True))
        wait(lambda: browser.execute_script("return !!(self.app && self.app.trace)"), 60)
        sql = "select count(*) as n from slice where dur > 0"
        count = browser.execute_async_script(
            "const [sql, done] = arguments;"
            "self.app.trace.engine.query(sql).then(r => done(Number(r.firstRow({n: 0}).n)), e => done(String(e)))",
            sql,
        )
        expand = "self.app.commands.runCommand('dev.perfetto.ExpandAllGroups'); return document.body.innerText"
        shown = f"try {{ {expand} }} catch (not_ready_yet) {{ return '' }}"
        wait(lambda: "QNN Execute (HTP emulator)" in browser.execute_script(shown))
        assert "CPU 0" in browser.execute_script("return document.body.innerText")
        assert count == written.slices
        browser.get("about:blank")
        served.shutdown()


VISIBLE = (
    "const tops = []; const walk = (node, depth) => node.children.forEach(c => {"
    " tops.push([depth, c.name, c.collapsed]); if (!c.collapsed) walk(c, depth + 1); });"
    "walk(self.app.trace.currentWorkspace ?? self.app.trace.workspace, 0); return tops"
)
PINNED = "return (self.app.trace.currentWorkspace ?? self.app.trace.workspace).pinnedTracks.map((track) => track.name)"


@pytest.mark.long
def test_the_timeline_opens_on_the_program_and_the_npu(browser: Any, tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables()
    write_trace(manifest, tables, tmp_path / "trace.pftrace")
    groups = [marks.GROUP, group_name(manifest), target_group(manifest)]
    with make_server(tmp_path / "trace.pftrace", True, 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        browser.get(ui_address(served, True, groups, TOKEN_TRACKS))
        wait(lambda: browser.execute_script("return !!(self.app && self.app.trace)"), 60)

        def unfolded() -> list[str]:
            return [name for depth, name, folded in browser.execute_script(VISIBLE) if depth == 0 and not folded]

        wait(lambda: set(groups) <= set(unfolded()))
        pinned = wait(lambda: browser.execute_script(PINNED))
        assert pinned == [f"work of tokens: generate ({fixture.MAIN})"]
        assert "CPU Scheduling" not in unfolded() and not any(name.startswith("other processes") for name in unfolded())
        names = [name for _, name, _ in browser.execute_script(VISIBLE)]
        assert names.index(groups[1]) < names.index(groups[2]) and "time" in names and f"tokens: generate {fixture.MAIN}" in names
        browser.get("about:blank")
        served.shutdown()


def test_the_report_of_a_comparison_draws_and_hostile_names_stay_text(browser: Any, tmp_path: Path) -> None:
    base = [result(f"base-{i}", i) for i in range(5)]
    cand = [result(HOSTILE, i + 50, "attention", 1.3, "router") for i in range(5)]
    write_regression(as_document(compare_runs(base, cand)), tmp_path / "regression.html")
    run = opened(browser, tmp_path / "regression.html")
    sections = run("return [...document.querySelectorAll('section')].map(s => s.id)")
    there = ["verdict", "waterfall", "forest", "graph", "steps", "runs", "structure", "routing", "metrics", "environment"]
    assert sections == there
    drawn = run("return [...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('svg.main-svg').length)")
    assert len(drawn) >= 9 and all(drawn)
    assert run("return document.querySelectorAll('#waterfall .bars .point').length") > 5
    assert run("return document.querySelectorAll('#forest .errorbar').length") > 5
    assert "slower" in run("return document.querySelector('#verdict .findings').innerText")
    operators_are_coloured_by_change(run)
    assert run("return document.pwned") is None and run("return document.querySelectorAll('img').length") == 0
    assert "onerror" in run("return document.body.innerText") and complaints(browser) == []
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        run = opened(browser, tmp_path / "regression.html")
        assert run("return document.documentElement.scrollWidth <= 360")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def sweep(folder: Path) -> list[bool]:
    """Write the page of a sweep; returns which of its settings are on the front."""
    settings = [Settings(n * SIZE, prefetch=p) for n in (2, 5, 9, 18) for p in (None, 0.3)]
    outcomes = [simulate_trace(random_trace(7), EVEN, one) for one in settings]
    front = on_pareto_front(outcomes)
    runs = [{**o.summary(), "pareto": flag} for o, flag in zip(outcomes, front, strict=True)]
    write_pareto({"costs": "made", "warnings": [HOSTILE], "steps": 7, "runs": runs}, folder / "pareto.html")
    return list(front)


def test_a_sweep_is_drawn_with_its_front(browser: Any, tmp_path: Path) -> None:
    front = sweep(tmp_path)
    run = opened(browser, tmp_path / "pareto.html")
    assert run("return [...document.querySelectorAll('section')].map(s => s.id)") == ["choice", "front", "settings"]
    assert run("return document.querySelectorAll('#front svg.main-svg').length") >= 2
    marked = run(
        "return [...document.querySelectorAll('#settings tbody tr')].filter(r => r.cells[0].textContent === 'yes').length"
    )
    assert marked == sum(front)
    assert complaints(browser) == []
