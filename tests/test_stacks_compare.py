"""What samples of stacks say of two groups of runs: the planted functions changed, no others; and the pages that show it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzer.compare.document import as_document, compare_runs
from analyzer.compare.functions import FRAME, FUNCTION, OF_SAMPLES, SELF
from analyzer.compare.metrics import RunTables, extract_metrics
from analyzer.compare.results import Result
from analyzer.questions.stacks import CALLERS_UNKNOWN, short_function
from analyzer.records.schema import TABLES, empty_table
from tests.test_views_browser import browser, complaints, opened  # noqa: F401
from tests.test_views_pages import blocks, data_of, report
from views.flame.change import write_change
from views.flame.page import write_flame
from workloads import tables_fixture as fixture

HZ, GROWN, NEW = 1000, "helper", "fresh"
USUAL = {"kernel": 3000, GROWN: 400, "steady": 600}
"""Function → its samples in a run; each is called by `work`, and that by `main`."""
COUNTS = {"base": USUAL, "cand": {**USUAL, GROWN: 600, NEW: 200}}


def sampled_tables(counts: dict[str, int], seed: int) -> fixture.Tables:
    """The fixture's tables with samples of its decode steps, on the thread that computes them; one in 50 is not whole."""
    random, tables = np.random.default_rng(seed), fixture.make_tables(tokens=12, layers=3)[1]
    steps = tables["tokens"].query("phase == 'decode'")
    pace = np.exp(random.normal(0, 0.02))
    leaves = np.repeat(np.arange(len(counts)), random.poisson(np.array(list(counts.values())) * pace))
    token = random.choice(len(steps), len(leaves))
    ts = steps["begin_ns"].to_numpy()[token] + (random.random(len(leaves)) * steps["duration_ns"].to_numpy()[token]).astype(
        np.int64
    )
    order, ends = np.argsort(ts), np.where(np.arange(len(ts)) % 50, "whole", "cut")
    names = ["main", "work", *counts]
    place = {"pid": fixture.PID, "tid": fixture.MAIN, "token_id": steps["token_id"].to_numpy()[token][order]}
    rows = {"ts_ns": ts[order], "stack_id": leaves[order], "end": list(ends), "sample_id": np.arange(len(ts)), **place}
    stacks = [(i, depth, frame) for i in range(len(counts)) for depth, frame in enumerate((i + 2, 1, 0))]
    return tables | {
        "samples": fixture.frame("samples", **rows),
        "stacks": fixture.frame("stacks", **dict(zip(("stack_id", "depth", "frame_id"), np.array(stacks).T, strict=True))),
        "frames": fixture.frame("frames", frame_id=np.arange(len(names)), function=names, file="/lib/engine.so"),
    }


def without_steps(tables: fixture.Tables) -> fixture.Tables:
    """The samples alone, as of a program that no engine declares."""
    kept = {name: tables[name] for name in ("threads", "thread_states", "stacks", "frames")}
    return {name: empty_table(name) for name in TABLES} | kept | {"samples": tables["samples"].assign(token_id=-1)}


def compared(tables_of: Callable[[dict[str, int], int], fixture.Tables]) -> dict[str, Any]:
    """Eight runs of each side, compared."""
    sides = {}
    for at, (side, counts) in enumerate(COUNTS.items()):
        tables = [tables_of(counts, 2 * i + at) for i in range(8)]
        sides[side] = [Result(f"{side}{i}", extract_metrics(RunTables(t, HZ)), began=2.0 * i + at) for i, t in enumerate(tables)]
    return as_document(compare_runs(sides["base"], sides["cand"]))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return compared(sampled_tables)


def test_functions_that_grew_are_named_and_no_others(document: dict[str, Any]) -> None:
    functions = {m["type"]: m for m in document["metrics"] if m["family"] == FUNCTION and m["metric"] == SELF}
    assert {name for name, m in functions.items() if m["verdict"] == "slower"} == {GROWN, NEW}
    grown, new = functions[GROWN], functions[NEW]
    assert 1.2 < grown["low"] < COUNTS["cand"][GROWN] / USUAL[GROWN] < grown["high"] < 1.8
    ms = COUNTS["cand"][NEW] / HZ * 1e3 / 11
    assert new["base"] == 0 and new["ratio"] is None and new["least"] < ms < new["most"], "the interval is in ms, from 0"
    assert any(GROWN in words["text"] and words["level"] == "bad" for words in document["words"])
    assert {m["family"] for m in document["metrics"]} & {FRAME} == set(), "call paths are on their own page"


def test_call_paths_have_the_change_of_what_they_call(document: dict[str, Any]) -> None:
    frames = {tuple(frame["path"]): frame for frame in document["frames"]}
    for name, judged in ((GROWN, "slower"), ("kernel", "inconclusive")):
        assert frames["main", "work", name]["verdict"] in (judged, "same")
    assert frames["main", "work", "kernel"]["least"] < 0 < frames["main", "work", "kernel"]["most"]
    assert frames["main", "work", GROWN]["least"] > 0
    assert frames[(CALLERS_UNKNOWN,)]["base"] == pytest.approx(sum(USUAL.values()) / 50 / HZ * 1e3 / 11, rel=0.1)


@pytest.mark.long
def test_functions_of_a_program_without_steps_are_compared_by_their_share_of_samples(tmp_path: Path) -> None:
    shares = compared(lambda counts, seed: without_steps(sampled_tables(counts, seed)))
    functions = {m["type"]: m for m in shares["metrics"] if m["metric"] == SELF}
    assert {name for name, m in functions.items() if m["verdict"] == "slower"} == {GROWN, NEW}
    for side, counts in COUNTS.items():
        assert functions[GROWN][side] == pytest.approx(100 * counts[GROWN] / sum(counts.values()), rel=0.1)
    assert {m["unit"] for m in functions.values()} == {frame["unit"] for frame in shares["frames"]} == {OF_SAMPLES}
    assert next(words["text"] for words in shares["words"] if words["level"] == "bad").split()[5] in (GROWN, NEW)
    assert not shares["left_out"] and write_change(shares, tmp_path / "change.html") > 5000


@pytest.mark.needs("chromium")
def test_the_page_of_a_comparison_colours_what_changed(browser: Any, document: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    write_change(document, tmp_path / "change.html")
    run = opened(browser, tmp_path / "change.html")
    colours = dict(run("return [...document.querySelectorAll('.frame')].map(f => [f.textContent, f.style.background])"))
    assert colours[GROWN] != colours["kernel"] == colours["steady"]
    run("document.querySelector('.judged').focus()")
    assert "95 % interval" in run("return document.querySelector('.about').innerText")
    assert run("return [...document.querySelectorAll('.judged')].map(f => f.textContent)").count(GROWN) == 1
    assert GROWN in run(
        "return document.querySelector('.changed li').innerText + document.querySelectorAll('.changed li')[1].innerText"
    )
    assert complaints(browser) == []


@pytest.mark.needs("chromium")
def test_the_flame_graph_is_filtered_searched_and_moved_in(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    manifest, tables = fixture.make_tables()[0], sampled_tables(USUAL, 0)
    manifest["stacks"] = {"hz": HZ, "long_wait_us": 1000, "lost": 0}
    write_flame(tables, manifest, tmp_path / "flame.html")
    kinds = data_of(tmp_path / "flame.html")["kinds"]
    assert sum(kinds["samples"]["columns"]["weight"]) == len(tables["samples"])
    assert {"phase", "step", "part", "expert", "cause", "thread"} <= set(kinds["samples"]["values"])
    run = opened(browser, tmp_path / "flame.html")
    drawn = "[...document.querySelectorAll('.frame')].map(f => f.title.split(':')[0])"
    assert {"main", "work", *USUAL, CALLERS_UNKNOWN} == set(run(f"return {drawn}")) - {"all"}
    texts = "return Number(document.querySelector('.about').innerText.match(/([\\d,]+) samples/)[1].replace(',', ''))"
    every = run(texts)
    parts = kinds["samples"]["values"]["part"]
    found = [run(f"chosen.part = {i}; draw(); {texts}") for i in range(len(parts))]
    assert every == len(tables["samples"]) == sum(found) and len(found) > 2
    run("chosen.part = -1; document.querySelector('.search').value = 'steady'; draw()")
    assert run("return document.querySelectorAll('.frame:not(.dim)').length") == 2
    run("zoomTo([...document.querySelectorAll('.frame')].find(f => f.textContent === 'work').frame)")
    press = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
    assert run(press % "ArrowDown" + "; return document.activeElement.textContent") == "kernel"
    run(press % "Escape")
    assert run("return zoomed.length") == 0 and complaints(browser) == []


def test_the_report_shows_the_largest_cause_as_a_flame_graph(tmp_path: Path) -> None:
    manifest = fixture.make_tables()[0] | {"stacks": {"hz": HZ}}
    flame, functions = blocks(report(tmp_path, manifest, sampled_tables(USUAL, 0)), "stacks")
    assert {name for level, _, _, name, _ in flame["frames"] if level == 0} >= {"main"}
    assert functions["rows"][0][0] == "kernel" and functions["rows"][0][1] == pytest.approx(75, abs=3)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void gemv<block<4, 8> >(int, float*) [clone .constprop.0]", "gemv<…>"),
        ("ggml::tensor_traits<block_q4_0, 8l, (ggml_type)8>::forward(ggml_compute_params*)", "ggml::tensor_traits<…>::forward"),
        ("std::_Function_handler<void (int), foo::{lambda(int)#1}>::_M_invoke(int&&)", "std::_Function_handler<…>::_M_invoke"),
        ("(anonymous namespace)::run(int)", "{anonymous}::run"),
        ("a::operator<(b const&, c)", "a::operator<"),
        ("Foo<int>::operator bool() const", "Foo<…>::operator bool"),
        ("foo::operator()(int) const", "foo::operator()"),
        ("dlopen@@GLIBC_2.34", "dlopen"),
        ("main", "main"),
    ],
)
def test_a_name_of_cpp_is_shown_without_what_it_takes(name: str, short: str) -> None:
    assert short_function(name) == short
