"""Intervals, displaced threads, NPU windows and findings: every moment is counted once, with the cause that the records tell."""

import json
import os

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.questions import cached, displacement, npu_windows, step_time, threads
from analyzer.questions.findings import findings
from analyzer.questions.summary import incompleteness, summarize
from analyzer.records.intervals import (
    Intervals,
    common_time,
    covered_ns,
    foremost_pieces,
    merge_intervals,
    overlaps,
    uncovered_parts,
)
from analyzer.records.reading import Source
from analyzer.tables.store import load_tables
from moescope.__main__ import main
from tracer.recording.format import Recording, with_checksum, write_manifest
from workloads.recordings import MAIN, WORKER, Writer
from workloads.tables_fixture import make_tables

SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 12)), max_size=12)


def intervals(rows: list[tuple[int, int, int]]) -> Intervals:
    key, begin, length = np.array(rows, np.int64).reshape(-1, 3).T
    return Intervals(key, begin, begin + length)


@given(SPANS, SPANS)
def test_overlaps_and_what_is_uncovered_equal_a_walk_over_every_moment(some, windows):
    windows = [(i, begin, length) for i, (_, begin, length) in enumerate(windows[:3])]
    taken, frame = intervals(some), intervals(windows)
    left = uncovered_parts(frame, taken)
    for key, begin, length in windows:
        inside = {t for k, b, n in some if k == key for t in range(b, b + n)}
        seen = [t for k, b, e in zip(left.key, left.begin, left.end, strict=True) if k == key for t in range(b, e)]
        assert seen == [t for t in range(begin, begin + length) if t not in inside]
    tiles = merge_intervals(taken)
    met = overlaps(frame, tiles)
    total = sum(
        len({t for k, b, n in some if k == key for t in range(b, b + n)} & set(range(at, at + size))) for key, at, size in windows
    )
    assert met.length.sum() == total


def moments(spans: Intervals) -> list[tuple[int, int]]:
    """(key, moment) of every interval, those of several as often."""
    rows = zip(spans.key.tolist(), spans.begin.tolist(), spans.end.tolist(), strict=True)
    return sorted((key, t) for key, begin, end in rows for t in range(begin, end))


@given(SPANS, SPANS)
def test_merging_and_what_is_common_or_left_equal_sets_of_moments(some, others):
    one, other = intervals(some), intervals(others)
    flat, second = merge_intervals(one), merge_intervals(other)
    assert moments(flat) == sorted(set(moments(one)))
    assert np.all((flat.key[1:] > flat.key[:-1]) | (flat.begin[1:] > flat.end[:-1]))
    assert moments(common_time(flat, second)) == sorted(set(moments(one)) & set(moments(other)))
    assert moments(uncovered_parts(flat, other)) == sorted(set(moments(one)) - set(moments(other)))
    left = [m for m in moments(one) if m not in set(moments(other))]
    assert moments(uncovered_parts(one, other)) == left
    shared = [len([m for m in moments(one) if m in set(moments(intervals([row])))]) for row in others]
    assert covered_ns(one, other).tolist() == shared


@given(SPANS, st.data())
def test_the_foremost_span_of_each_moment_has_the_least_rank(rows, data):
    spans = intervals(rows)
    rank = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))), np.int64)
    pieces, row = foremost_pieces(spans, rank)
    seen = {m: int(r) for i, r in enumerate(row) for m in moments(pieces.where(np.arange(len(pieces)) == i))}
    expected: dict[tuple[int, int], int] = {}
    for i in sorted(range(len(rows)), key=lambda i: (-rank[i], -i)):
        expected |= dict.fromkeys(moments(spans.where(np.arange(len(spans)) == i)), i)
    assert seen == expected and len(moments(pieces)) == len(seen)


def test_overlaps_hold_where_the_times_of_all_keys_do_not_fit_on_one_axis():
    far = 1 << 61
    key = np.arange(5)
    left = Intervals(np.repeat(key, 2), np.tile([0, far], 5), np.tile([10, far + 10], 5))
    met = overlaps(left, Intervals(key, key + far - 3, np.full(5, far + 4)))
    assert sorted(zip(left.key[met.left].tolist(), met.right.tolist(), met.length.tolist(), strict=True)) == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 2, 4),
        (3, 3, 4),
        (4, 4, 3),
    ]


def switched(w: Writer, ts: int, prev: int, following: int, state: int = 0) -> None:
    w.add("sched_switch", ts=ts, tid=prev, pid=0, cpu=0, prev_tid=prev, next_tid=following, prev_state=state)


def step(folder, tokens: int = 1):
    """Steps of 1000 ns: attention 100..300, experts 500..900 with a load 600..700; MAIN sleeps 320..400, is ready till 450."""
    w = Writer()
    switched(w, 1, 0, MAIN)
    for i in range(tokens):
        at = 10_000 + 2000 * i
        w.add("token_begin", ts=at, seq=i, phase=2, n_tokens=1, position=i)
        for tensor, kind, begin, end in ((1, 0, 100, 300), (2, 2, 500, 900)):
            w.add("op_begin", ts=at + begin, tensor=tensor, type=kind, layer=0).add("op_end", ts=at + end, tensor=tensor)
        w.add("load_begin", ts=at + 600, layer=0, expert=5, bytes=64, reason=1).add(
            "load_end", ts=at + 700, layer=0, expert=5, bytes=64
        )
        switched(w, at + 320, MAIN, 77, 1)
        w.add("sched_waking", ts=at + 400, tid=0, pid=0, woken_tid=MAIN)
        switched(w, at + 450, 77, MAIN)
        w.add("token_end", ts=at + 1000, seq=i)
    switched(w, 10**6, MAIN, 0, 1)
    return load_tables(w.write(folder))


def test_gaps_name_the_operators_around_them(tmp_path):
    rows = step_time.gap_pieces(step(tmp_path))
    begin = rows["begin_ns"] - 10_000
    assert list(zip(begin, rows["duration_ns"], rows["cause"], rows["after"], rows["before"], strict=True)) == [
        (0, 100, "computing", "", "attention.0"),
        (300, 20, "computing", "attention.0", "experts.0"),
        (320, 80, "asleep", "attention.0", "experts.0"),
        (400, 50, "run queue", "attention.0", "experts.0"),
        (450, 50, "computing", "attention.0", "experts.0"),
        (900, 100, "computing", "experts.0", ""),
    ]


def test_npu_windows_and_idle_times_close():
    _, tables = make_tables()
    windows = npu_windows.npu_windows(tables)
    parts = windows[["before_ns", "accelerator_ns", "residual_ns", "after_ns"]].sum(axis=1)
    assert len(windows) and np.allclose(parts, windows["window_ns"])
    gaps = npu_windows.npu_gaps(tables)
    executes = tables["qnn_executes"].query("token_id >= 0")
    used = tables["tokens"][tables["tokens"]["token_id"].isin(executes["token_id"])]
    assert gaps["duration_ns"].sum() + executes["duration_ns"].sum() == used["duration_ns"].sum()
    assert {"computing", "submission"} <= set(gaps["cause"].astype(str))


def test_npu_windows_add_up_and_those_without_a_profile_are_counted():
    _, tables = make_tables()
    npu = npu_windows.npu_sum(tables)
    assert npu["windows"] > 0 and npu["unprofiled"] == 0
    assert npu["before_ms"] + npu["accelerator_ms"] + npu["after_ms"] + npu["residual_ms"] == pytest.approx(npu["total_ms"])
    assert npu["residual_share"] == pytest.approx(npu["residual_ms"] / npu["total_ms"])
    tables["qnn_executes"]["accel_us"] = np.nan
    assert npu_windows.npu_sum(tables)["unprofiled"] == npu["windows"] and npu_windows.npu_sum(tables)["total_ms"] == 0


def contended(folder):
    """Tables of contended_recording."""
    return load_tables(contended_recording().write(folder))


def contended_recording():
    """An operator 100..500 on two threads; MAIN is done at 500 but had no CPU 200..350 (77 ran), WORKER waits from 300 on."""
    w = Writer().add("token_begin", engine=2, ts=50, seq=0, phase=2, n_tokens=1)
    switched(w, 1, 0, MAIN)
    for tid, wait in ((MAIN, 500), (WORKER, 300)):
        w.add("op_begin", engine=2, ts=100, tid=tid, tensor=64, type=1, layer=-1).add("op_wait", engine=2, ts=wait, tid=tid)
    switched(w, 200, MAIN, 77)
    switched(w, 350, 77, MAIN)
    w.add("graph_begin", engine=2, ts=60, handle=9).add("graph_end", engine=2, ts=520, handle=9)
    w.add("token_end", engine=2, ts=600, seq=0)
    switched(w, 700, MAIN, 0, 1)
    return w


def test_an_operator_pays_for_the_cpu_that_its_last_thread_lost(tmp_path):
    tables = contended(tmp_path)
    rows = displacement.displacements(tables)
    assert rows[["tid", "by_tid", "cost_ns"]].to_numpy().tolist() == [[MAIN, 77, 150]]
    assert (rows["end_ns"] - rows["begin_ns"]).tolist() == [150]
    states = threads.operator_states(tables).iloc[0]
    assert states["busy_ms"] * 1e6 == pytest.approx(600)
    assert states[["running", "runnable", "unknown"]].tolist() == pytest.approx([250 / 600, 150 / 600, 200 / 600])
    shares = threads.thread_balance(tables).set_index("tid")
    assert shares.loc[MAIN, "last_share"] == 1 and shares.loc[WORKER, "last_share"] == 0
    assert shares.loc[WORKER, "wait_ms"] * 1e6 == pytest.approx(220)


def test_who_ran_last_before_a_thread_came_back_is_who_displaced_it(tmp_path):
    w = Writer().add("token_begin", engine=2, ts=50, seq=0, phase=2, n_tokens=1)
    switched(w, 1, 0, MAIN)
    w.add("op_begin", engine=2, ts=100, tensor=64, type=1, layer=-1).add("op_wait", engine=2, ts=500)
    switched(w, 200, MAIN, 15)  # 15 runs for a moment, 77 until MAIN is back
    switched(w, 350, 77, MAIN)
    w.add("graph_begin", engine=2, ts=60, handle=9).add("graph_end", engine=2, ts=520, handle=9)
    switched(w, 530, MAIN, 88)
    switched(w, 560, 88, MAIN)
    w.add("token_end", engine=2, ts=600, seq=0)
    tables = load_tables(w.write(tmp_path))
    rows = displacement.displacements(tables)
    assert rows[["op_id", "tid", "by_tid", "cost_ns"]].to_numpy().tolist() == [[0, MAIN, 77, 150], [-1, MAIN, 88, 30]]
    (found,) = (f for f in findings(tables) if f.rule == "run queue")
    assert found.saving_ms * 1e6 == pytest.approx(180)
    assert sorted(found.evidence["below_ms"].values()) == pytest.approx([30e-6, 150e-6])


def test_imbalance_is_what_threads_compute_longer_not_what_they_lack_a_cpu(tmp_path):
    tables = contended(tmp_path)
    uneven = {f.rule: round(f.saving_ms * 1e6) for f in findings(tables)}
    assert uneven["imbalance"] == 250 - (250 + 200) / 2
    undisturbed = {**tables, "thread_states": tables["thread_states"].iloc[:0]}
    assert [f.saving_ms * 1e6 for f in findings(undisturbed) if f.rule == "imbalance"] == [pytest.approx(400 - (400 + 200) / 2)]


def test_the_tracer_is_named_where_it_took_the_cpu(tmp_path):
    folder = contended_recording().write(tmp_path / "traced", tracer_pid=77)
    (found,) = (finding for finding in findings(load_tables(folder)) if finding.rule == "run queue")
    assert list(found.evidence["below_ms"]) == ["the tracer"] and found.evidence["ms"] * 1e6 == pytest.approx(150)


def test_an_operator_ends_no_sooner_than_its_next_thread(tmp_path):
    tables = dict(contended(tmp_path))
    shares = tables["op_threads"]
    tables["op_threads"] = shares.assign(wait_ns=shares["wait_ns"].where(shares["tid"] == MAIN, 450))
    rows = displacement.displacements(tables)
    assert displacement.won_ns(tables, rows, rows["end_ns"] - rows["begin_ns"]) == 50
    assert displacement.won_ns(tables, rows, pd.Series(0, rows.index)) == 0


def crowded(folder):
    """An operator 100..500 on two threads: MAIN computes 100..200, spins 300..400; WORKER computes 200..300 and 400..500."""
    w = Writer().add("token_begin", engine=2, ts=50, seq=0, phase=2, n_tokens=1)
    switched(w, 1, 0, MAIN)
    w.add("op_begin", engine=2, ts=100, tensor=64, type=1, layer=-1).add("op_wait", engine=2, ts=200)
    w.add("op_begin", engine=2, ts=201, tid=WORKER, tensor=64, type=1, layer=-1)
    for ts, old, new in ((200, MAIN, WORKER), (300, WORKER, MAIN), (400, MAIN, WORKER), (500, WORKER, MAIN)):
        switched(w, ts, old, new)
    w.add("op_wait", engine=2, ts=499, tid=WORKER)
    w.add("graph_begin", engine=2, ts=60, handle=9).add("graph_end", engine=2, ts=500, handle=9)
    w.add("token_end", engine=2, ts=600, seq=0)
    return load_tables(w.write(folder))


def test_a_thread_too_many_is_told_and_wins_what_is_spun_not_what_is_computed(tmp_path):
    tables = crowded(tmp_path)
    found = {f.rule: f for f in findings(tables)}
    computed = 100 + 99 + 99
    assert (found["crowded"].evidence["threads"], found["crowded"].evidence["cpus"]) == (2, 1)
    assert found["crowded"].saving_ms * 1e6 == pytest.approx(400 - computed, abs=2)
    assert "imbalance" not in found
    others = contended(tmp_path / "others")
    assert displacement.oversubscription(others, displacement.displacements(others)) is None


def test_what_operators_spin_within_themselves_is_told_from_computing_by_equal_ones():
    operators = pd.DataFrame({"op_id": range(5), "name": ["a"] * 4 + ["b"], "type": "MUL_MAT", "shape": "8x1"})
    shares = pd.DataFrame({"op_id": [0, 0, 1, 1, 2, 3, 4], "ran_ns": [50, 50, 60, 40, 100, 4000, 70]})
    assert displacement.computed_ns(operators, shares).tolist() == [100, 100, 100, 100, 70]


def test_findings_are_ranked_and_each_query_answers(tmp_path, capsys):
    tables = step(tmp_path / "run", 3)
    found = findings(tables)
    assert found[0].rule == "expert load" and found[0].evidence["share"] == pytest.approx(0.1)
    assert [f.saving_share for f in found[1:]] == sorted((f.saving_share for f in found[1:]), reverse=True)
    by_rule = {f.rule: f for f in found}
    assert by_rule["first loads"].saving_share == pytest.approx(0.1 / 3)
    assert by_rule["expert loads"].saving_share == pytest.approx(0.2 / 3)
    assert by_rule["asleep"].saving_share == pytest.approx(0.08)
    for finding in found:
        assert main(["query", str(tmp_path / "run"), finding.query, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.parametrize("verb", ["time", "time threads", "trends", "findings", "roofline", "experts"])
def test_every_verb_answers_as_json(tmp_path, capsys, verb):
    folder = tmp_path / "run"
    step(folder, 3)
    more = {"time": ["--by", "both"], "experts": ["--curves"]}.get(verb, [])
    assert main([*verb.split(), str(folder), *more, "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_derived_tables_can_be_queried(tmp_path, capsys):
    step(tmp_path)
    sql = "select cause, sum(duration_ns) ns from gaps group by cause order by ns desc"
    assert main(["query", str(tmp_path), sql, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0] == {"cause": "computing", "ns": 270}


def test_a_recording_cut_short_or_of_unknown_kinds_says_what_is_missing(tmp_path):
    step(tmp_path, 3)
    recording = Recording(tmp_path)
    counted = Source(recording).count()
    manifest = dict(recording.manifest)
    os.truncate(tmp_path / "events.bin", 64 * (sum(counted.values()) // 2) + 5)
    manifest["records"] = counted
    write_manifest(tmp_path, manifest)
    left = sum(Source(Recording(tmp_path)).count().values())
    (line,) = incompleteness(Source(Recording(tmp_path)))
    assert line.startswith(f"{sum(counted.values()) - left} of {sum(counted.values())} ")
    manifest["layouts"].pop("op_begin")
    write_manifest(tmp_path, manifest)
    assert len(incompleteness(Source(Recording(tmp_path)))) == 2
    assert "scheduling" not in " ".join(summarize(Recording(tmp_path), load_tables(tmp_path))["missing"])


def test_the_kept_summary_is_read_again_until_the_recording_changes(tmp_path):
    step(tmp_path, 2)
    first = cached.cached_summary(tmp_path)
    kept = tmp_path / "tables" / "summary.json"
    content = json.loads(kept.read_text())
    content["summary"]["tokens"] = "kept"
    kept.write_text(json.dumps(with_checksum(content)))
    assert cached.cached_summary(tmp_path)["tokens"] == "kept"
    os.truncate(tmp_path / "events.bin", 64)
    assert cached.cached_summary(tmp_path)["tokens"] != first["tokens"] != "kept"
