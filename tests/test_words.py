"""What a word on our screens means holds for the figures beside it (docs/words.md)."""

import ast
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.commands.summary import (
    CAUSES_SHOWN,
    PARTS_SHOWN,
    exit_text,
    loss_lines,
    speed_lines,
    time_lines,
    time_matrix,
    top_findings,
)
from analyzer.compare.verdict_text import runs_needed
from analyzer.compare.verdicts import FASTER, FEASIBLE, PRACTICAL, SAME, SLOWER, UNKNOWN, judge_metrics
from analyzer.questions import expert_loads
from analyzer.questions.figures import cache_hits
from analyzer.questions.npu_figures import graph_labels as npu_labels
from analyzer.questions.summary import summarize
from analyzer.tables.store import load_tables
from moescope.__main__ import main
from moescope.terminal import PlainConsole, console, grid
from tests.conftest import drawn
from tests.golden import Golden
from tests.test_analyzer_results import npu_only
from tests.test_analyzer_savings import STEPS, loaded, ran
from tests.test_analyzer_tables import NO_SEQ
from tracer.commands import run as tracer_run
from tracer.commands.run import next_step
from tracer.recording.format import Recording
from tracer.recording.paths import Owner
from workloads import ROOT
from workloads.recordings import MAIN, Writer, runtime


def test_an_engine_is_named_only_where_it_ran(tmp_path: Path) -> None:
    Writer().add("sched_switch", ts=1, tid=0, pid=0, cpu=0, prev_tid=0, next_tid=MAIN).write(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    idle, seen = {"id": 5, "libraries": []}, {"id": 3, "libraries": [{"path": "libQnnHtp.so"}]}
    path.write_text(json.dumps(manifest | {"engines": {"genie": idle, "qnn": seen, "llamacpp": idle | {"id": 2}}}))
    assert summarize(Recording(tmp_path), load_tables(tmp_path))["recording"]["engines"] == ["qnn"]


def stepped(folder: Path, ms: list[float]) -> Path:
    """A recording of decode steps that take so long."""
    w = Writer()
    for i, each in enumerate(ms):
        w.add("token_begin", ts=10**9 * (i + 1), seq=i, phase=2, n_tokens=1, position=i)
        w.add("token_end", ts=10**9 * (i + 1) + int(10**6 * each), seq=i)
    return w.write(folder)


def test_a_drift_is_told_with_both_levels_and_only_where_one_is_found(tmp_path: Path, capsys, golden: Golden) -> None:
    falling = [40 - 0.5 * i for i in range(31)]
    assert main(["trends", str(stepped(tmp_path / "falling", falling))]) == 0
    noise = np.random.default_rng(0).normal(20, 0.2, 31).tolist()
    assert main(["trends", str(stepped(tmp_path / "noise", noise))]) == 0
    golden("trends", capsys.readouterr().out)


def test_without_steps_no_figure_of_steps_is_said_and_a_program_that_failed_is_named(
    tmp_path: Path, capsys, golden: Golden
) -> None:
    w = Writer().add("load_begin", engine=1, ts=1, bytes=64, layer=0, expert=0, reason=0).add("load_end", engine=1, ts=9)
    w.add("sched_switch", ts=20, tid=0, pid=0, cpu=0, prev_tid=0, next_tid=MAIN).write(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"target": {"pid": MAIN, "exit_code": 2}}))
    assert main(["findings", str(tmp_path)]) == main(["summary", str(tmp_path)]) == 0
    golden("summary", capsys.readouterr().out)


def test_tpot_and_decode_speed_on_the_screen_follow_from_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = Writer()
    for i, at in enumerate([2, 4, 6, 8, 10, 12, 900, 902, 904, 906, 908, 910]):
        w.add("token_begin", ts=at * 10**6, seq=i, phase=2, n_tokens=1).add("token_end", ts=(at + 1) * 10**6, seq=i)
    run = str(w.write(tmp_path / "run"))
    assert main(["summary", run]) == 0
    said = re.search(
        r"TPOT ([\d,.]+) ms \(median ([\d,.]+), p90 [\d,.]+, n 11\), decode ([\d,.]+) tok/s",
        " ".join(capsys.readouterr().out.split()),
    )
    assert said is not None
    mean, median, speed = (float(text.replace(",", "")) for text in said.groups())
    assert mean * speed == pytest.approx(1000, rel=0.01) and median < mean / 10
    assert main(["top", run, "--once"]) == 0
    assert f"TPOT {mean:,.2f} ms" in capsys.readouterr().out


@given(STEPS, st.integers(2, 5))
def test_every_load_is_a_miss_or_comes_again_within_its_layer(trace: list[list[tuple[int, ...]]], held: int) -> None:
    tables = ran(trace, held)
    counts = expert_loads.load_counts(expert_loads.within_steps(tables))
    assert counts["first"] + counts["again"] == loaded(tables) == int(cache_hits(tables)["misses"].sum()) + counts["repeated"]


def test_findings_on_the_screen_keep_their_remedy() -> None:
    text = "evicted experts are reloaded; " * 4 + "a cache of 4.1 MiB instead of 3.0 MiB would avoid 68 of them: 1% of step time"
    answer = {"findings": [{"share": 0.01, "text": text}]}
    for width in (60, 80, 200):
        printed = io.StringIO()
        PlainConsole(width=width, file=printed).print(*top_findings(answer["findings"]))
        lines = printed.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert text.rpartition(":")[0] in " ".join(" ".join(lines).split())


def test_a_request_whose_end_was_missed_is_not_called_open(tmp_path: Path, golden: Golden) -> None:
    w = Writer().add("token_begin", engine=2, ts=1, seq=NO_SEQ).add("token_end", engine=2, ts=9, seq=NO_SEQ)
    w.add("block_issue", engine=0, ts=2, dev=1, sector=8, bytes=4096, rwbs=b"R")
    answer: dict[str, Any] = summarize(Recording(w.write(tmp_path)), load_tables(tmp_path))
    golden("summary", str(loss_lines(answer)[-1]))


def test_what_tpot_holds_besides_its_step_is_told(tmp_path: Path, golden: Golden) -> None:
    w = Writer()
    for seq, (begin, end) in enumerate([(100, 200), (300, 400), (500, 600), (700, 800)]):
        w.add("token_begin", engine=2, ts=begin * 10**6, seq=seq, phase=2).add("token_end", engine=2, ts=end * 10**6, seq=seq)
    answer: dict[str, Any] = summarize(Recording(w.write(tmp_path)), load_tables(tmp_path))
    golden("summary", "\n".join(str(line) for line in (*speed_lines(answer), *time_lines(answer)) if "outside" in str(line)))
    answer["between_tokens_ms"] = {"asleep": 3.0}
    assert not any("outside" in str(line) for line in time_lines(answer))


def test_a_signal_is_called_by_its_name_and_a_cost_that_is_not_known_not_at_all(tmp_path: Path) -> None:
    assert [exit_text(code).split()[-1] for code in (3, -9, -99)] == ["3", "SIGKILL", "99"]
    w = Writer().add("token_begin", engine=2, ts=1, seq=NO_SEQ).add("token_end", engine=2, ts=9, seq=NO_SEQ)
    answer: dict[str, Any] = summarize(Recording(w.write(tmp_path)), load_tables(tmp_path))
    answer["cost"] = {"lines": []}
    assert len(loss_lines(answer)) == 1


def test_only_views_that_were_written_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer_run, "as_owner", lambda *words: None)
    (tmp_path / "trace.pftrace").touch()
    tracer_run.write_results(tmp_path, Owner(0, 0, "root", "/root"))
    shown = capsys.readouterr().out
    assert "trace.pftrace" in shown and "report.html" not in shown and "profdag.html" not in shown


def test_a_recording_ends_with_what_to_do_next(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    assert "moescope probes" in next_step(folder, saw_engine=False)
    assert f"`moescope write '{folder}'`" in next_step(folder, saw_engine=True)
    (folder / "trace.pftrace").touch()
    assert f"`moescope open '{folder}'`" in next_step(folder, saw_engine=True)


def judged(seed: int, runs: int, change: float, noise: float) -> pd.DataFrame:
    """Five figures of speed of runs whose truth is `change`."""
    rng = np.random.default_rng(seed)
    dims = pd.DataFrame({"family": "speed", "better": "lower", "offset": 0.0, "share": np.nan}, index=range(5))
    base, cand = (np.exp(rng.normal(0, noise, (runs, 5))) for _ in range(2))
    return judge_metrics(dims, base, cand * (1 + change))


@settings(max_examples=drawn(40), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([3, 5, 10]), st.floats(-0.2, 0.2), st.sampled_from([1e-4, 3e-3, 0.02]))
def test_the_same_is_said_of_no_interval_that_leaves_the_threshold(seed: int, runs: int, change: float, noise: float) -> None:
    rows = judged(seed, runs, change, noise)
    same, told = rows[rows["verdict"] == SAME], rows["verdict"].isin([SLOWER, FASTER])
    assert (same["low"] >= 1 / (1 + PRACTICAL) - 1e-9).all() and (same["high"] <= 1 + PRACTICAL + 1e-9).all()
    assert (rows.loc[told, "ratio"] - 1).abs().min() > PRACTICAL / (1 + PRACTICAL) or not told.any()
    assert rows["verdict"].isin([SAME, SLOWER, FASTER, UNKNOWN]).all()
    assert (rows.loc[rows["verdict"] == UNKNOWN, "more_runs"] > 0).all()


def test_about_and_at_least_say_whether_the_spread_was_seen() -> None:
    for runs, word in ((2, "at least"), (3, "about"), (5, "about")):
        rows = [row for seed in range(20) for row in judged(seed, runs, 0.03, 0.01).to_dict("records")]
        unknown = [row for row in rows if row["verdict"] == UNKNOWN and row["more_runs"] < FEASIBLE]
        assert unknown and all(row["more_runs_known"] == (runs > 2) for row in unknown)
        assert all(f"{word} {row['more_runs']} more" in runs_needed(row) for row in unknown)


def test_every_rule_of_the_words_is_held_by_a_test_of_this_project() -> None:
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs" / "words.md").read_text().splitlines() if line.startswith("| ")]
    names = {cells[2].strip().strip("`") for cells in rows[1:]}
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert len(names) > 10 and not [name for name in names if f"def {name}(" not in tests]


PHRASES = re.compile(
    "|".join(
        (
            r"(?<!there )\b(?:is|are) (?:no [a-z]|none[:;])",  # negation of a noun
            r"\bwhoever\b|\bdies\b|\bwants\b|\bseldom\b|\banew\b|\bdear(?:er|est)?\b",  # dated words
            r"in vain\b|a truth\b|likeliest|the worst\b",
            r"\btold\b|\btells?\b|\b(?:is|are) said\b|cannot be told|cannot tell",  # data and programs do not speak
            r"(?:stands?|stood) still|\blooked (?:after|at)\b|\blooks after\b|one behind the other",  # literal pictures
            r"\bso (?:long|many)\b|\bgoes on\b",
            r"like for like|\b(?:by|in) turns\b|\bturn over\b|\bwolf\b|\bcries\b|\bclimb(?:s|ed)?\b",  # idioms
            r"of the draws|\baccused\b|goes? without\b|costs? that one|held? (?:\w+ ){0,3}against\b",
            r"(?<!benchmarks\.)(?<!results/)\bprizes?\b",  # private terms
        )
    ),
    re.I,
)
"""Phrases for which plain technical English has other words."""


SHOWING = ("print", "print_plain", "say", "words", "note")
"""Functions that print their arguments or put them on a page."""


def said(path: Path) -> Iterator[str]:
    """What a module shows to a user: errors, printed lines, notes on pages, help of arguments and verbs."""
    for node in ast.walk(ast.parse(path.read_text())):
        shown = isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg in ("help", "description"))
        shown |= isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SHOWING
        if shown or (path.name == "__main__.py" and isinstance(node, ast.Dict)):
            yield "".join(part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))


def test_messages_and_help_texts_are_plain() -> None:
    files = [
        path for package in ("moescope", "tracer", "analyzer", "views", "runtime") for path in (ROOT / package).rglob("*.py")
    ]
    texts = [(path.relative_to(ROOT), text) for path in files for text in said(path)]
    assert len(texts) > 500
    assert [(str(path), text) for path, text in texts if PHRASES.search(text)] == []


def docstrings(path: Path) -> Iterator[str]:
    """What a module says of itself, its classes and its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield " ".join((ast.get_docstring(node) or "").split())


def test_docstrings_and_pages_are_plain() -> None:
    packages = ("moescope", "tracer", "analyzer", "views", "runtime")
    texts = [(path, text) for package in packages for path in (ROOT / package).rglob("*.py") for text in docstrings(path)]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "analyzer" / "records" / "tables.toml"]
    texts += [(path, path.read_text()) for path in pages if path.parent.name != "results" and path.name != "results.md"]
    assert len(texts) > 3000
    assert [(path.name, found[0]) for path, text in texts if (found := PHRASES.search(text))] == []


@pytest.mark.parametrize("width", [30, 80, 200])
def test_no_digit_of_a_table_is_cut_off(width: int, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [("attention core, 2048 chosen", "285.5 MB", "1,774.6"), ("head", "1.9 GB", "10.31")]
    console().print(grid("part of the model", "KV cache", "us", rows=rows))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out and sorted(re.findall(r"\d", out)) == sorted(re.findall(r"\d", str(rows)))


@pytest.mark.parametrize("slope", [0.05, 0.0])
def test_a_line_over_the_context_is_shown_only_where_it_predicts_unseen_steps(slope: float, capsys, tmp_path: Path) -> None:
    rng, writer, ts = np.random.default_rng(4), Writer(), 10_000
    for step in range(60):
        lasts = int(1e6 * (1 + slope * step) * np.exp(rng.normal(0, 0.2)))
        writer.add("token_begin", ts=ts, seq=step, phase=2 if step else 1, n_tokens=1, position=step)
        writer.add("op_begin", ts=ts + 1, tensor=11, type=0, layer=0, n_tokens=1).add("op_end", ts=ts + lasts - 1, tensor=11)
        writer.add("token_end", ts=ts + lasts, seq=step)
        ts += lasts + 1000
    assert main(["trends", str(writer.write(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert ("step = " in out) == ("growth" in out) == (slope > 0)


def test_the_npu_screen_fits_a_terminal_of_80_columns(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "run"
    npu_only().write(folder)
    main(["npu", str(folder)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out


def test_graphs_of_equal_names_are_told_apart_by_object_and_profile_level() -> None:
    columns = {"tier": 0, "object_id": [4, 9, 9], "kind": "", "graph_name": "main", "profile_level": [1, 2, 1]}
    executes = pd.DataFrame(columns)
    assert npu_labels(executes).tolist() == ["main #4 basic", "main #9 detailed", "main #9 basic"]
    assert npu_labels(executes.assign(profile_level=1)).tolist() == ["main #4", "main #9", "main #9"]


def test_the_rows_and_columns_of_a_step_add_up_however_many_there_are() -> None:
    for count in (3, 6, 7, 17):
        ms = [float(1 + i * 7 % 5) for i in range(count)]
        cells = [{"part": f"part-{i}", "cause": f"cause-{i}", "ms": each} for i, each in enumerate(ms)]
        by = {f"{axis}_ms": {cell[axis]: cell["ms"] for cell in cells} for axis in ("part", "cause")}
        printed = io.StringIO()
        PlainConsole(width=200, file=printed).print(time_matrix("decode", {"ms": sum(ms), "cells": cells, **by}))
        head, *rows, everything, _ = (line.split() for line in printed.getvalue().splitlines())
        assert len(rows) <= PARTS_SHOWN + 1 and len(head) <= len(["decode,", "ms"]) + CAUSES_SHOWN + len(["others", "all"])
        shown = [[float(cell) for cell in row[1:-1]] for row in rows]
        assert sum(row[-1] for row in shown) == sum(ms) and all(sum(row[:-1]) == row[-1] for row in shown)
        assert [float(cell) for cell in everything[1:-1]][-1] == sum(ms) == sum(float(cell) for cell in everything[1:-2])


def test_the_time_of_steps_names_what_is_a_mean_step_and_what_is_a_sum(capsys, tmp_path: Path) -> None:
    assert main(["time", str(runtime(3).write(tmp_path)), "--by", "cause"]) == 0
    (total,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("all "))
    assert [float(word) for word in total[1::2]] == pytest.approx([0.001, 0.001, 0.003])
