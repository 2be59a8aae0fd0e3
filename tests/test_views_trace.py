"""The program's tracks in traces, judged by Perfetto's own trace processor."""

import contextlib
import io
import re
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import drawn
from tests.judge import Judge, judged
from views.commands.queries import shipped_queries
from views.timeline import sched, sequence
from views.timeline.perfetto import extent, write_trace
from views.timeline.threads import HELPERS, OTHERS
from views.timeline.trace_file import AHEAD, TraceFile
from workloads import tables_fixture as fixture


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Judge, fixture.Tables]:
    manifest, tables = fixture.make_tables()
    return judged(tmp_path_factory.mktemp("trace"), manifest, tables), tables


def test_reads_and_major_faults_stand_on_their_threads(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables()
    begin = tables["operators"].begin_ns.to_numpy()[:3] + 20
    on = {"pid": fixture.PID, "tid": fixture.WORKER, "file": "/models/moe.gguf"}
    tables["reads"] = fixture.frame("reads", call="pread64", begin_ns=begin, end_ns=begin + 50, bytes=64, **on)
    kind, length = ["major", "minor", "major"], [30, 30, -1]
    fault = {"begin_ns": begin + 100, "end_ns": begin + 130, "duration_ns": length}
    tables["faults"] = fixture.frame("faults", kind=kind, offset=4096, **fault, **on)
    judge = judged(tmp_path, manifest, tables)
    sql = "select s.name, s.dur, t.tid from slice s join thread_track tt on s.track_id = tt.id join thread t using (utid)"
    drawn = judge.rows(f"{sql} where s.category = 'io' order by s.ts")
    read = ("pread64 moe.gguf", 50, fixture.WORKER)
    assert drawn == [
        read,
        ("major fault moe.gguf", 30, fixture.WORKER),
        read,
        read,
        ("major fault moe.gguf", 0, fixture.WORKER),
    ]


def test_every_row_is_a_slice_of_the_same_length(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = usual
    drawn = {c: (n, d) for c, n, d in judge.rows("select category, count(*) as n, sum(dur) as d from slice group by category")}
    threads = tables["op_threads"]
    expected = {
        "token": (len(tables["tokens"]), tables["tokens"].duration_ns.sum()),
        "graph": (len(tables["graphs"]), tables["graphs"].duration_ns.sum()),
        "operator": (len(threads), (threads.end_ns - threads.begin_ns).sum()),
        "wait": ((threads.wait_ns < threads.end_ns).sum(), (threads.end_ns - threads.wait_ns).sum()),
        "expert": (len(tables["experts"]), tables["experts"].duration_ns.sum()),
        "cache": (len(tables["loads"]), tables["loads"].duration_ns.sum()),
    }
    assert {c: drawn[c] for c in expected} == expected


def test_levels_nest_on_their_threads(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, _ = usual
    parents = dict(
        judge.rows(
            "select s.category as a, min(p.category) as b from slice s join slice p on s.parent_id = p.id group by s.category"
        )
    )
    assert parents["operator"] == "token" and parents["expert"] == "operator" and parents["graph"] == "expert"
    assert judge.rows(
        "select distinct tid from slice s join thread_track t on s.track_id = t.id join thread using (utid) "
        "where category = 'wait'"
    ) == [(fixture.WORKER,)]


def test_arguments_travel_with_their_slice(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = usual
    found = judge.rows(
        "select extract_arg(arg_set_id, 'debug.shape') as s, extract_arg(arg_set_id, 'debug.n_tokens') as n, "
        "extract_arg(arg_set_id, 'debug.layer') as l, count(*) as c from slice where category = 'operator' group by 1, 2, 3"
    )
    joined = tables["operators"].merge(tables["op_threads"], on="op_id")
    expected = joined.groupby(["shape", "n_tokens", "layer"]).size().reset_index().itertuples(index=False)
    assert sorted((shape, n or 1, layer, count) for shape, n, layer, count in found) == sorted(map(tuple, expected))
    assert {n for _, n, _, _ in found} == {None, 12}
    caches = judge.rows(
        "select extract_arg(arg_set_id, 'debug.cache') as c, count(*) as n from slice where category = 'expert' group by 1"
    )
    assert dict(caches) == tables["experts"].groupby("cache").size().to_dict()


def test_an_operator_says_what_it_moves_and_how_fast(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=2, layers=2)
    operators = tables["operators"]
    known = operators.type == "attention"
    tables["operators"] = operators.assign(
        read_bytes=np.where(known, 3 << 20, np.nan), written_bytes=np.where(known, 1 << 20, np.nan)
    )
    found = judged(tmp_path, manifest, tables).rows(
        "select name, extract_arg(arg_set_id, 'debug.bytes') as b, extract_arg(arg_set_id, 'debug.MB_per_s') as r from slice "
        "where category = 'operator' group by 1, 2, 3"
    )
    told = {name.split(".")[0]: (size, rate) for name, size, rate in found}
    length = int(operators.duration_ns.iloc[0])
    assert told.pop("attention") == (4 << 20, int((4 << 20) * 1e3 / length)) and set(told.values()) == {(None, None)}


def test_thread_states_equal_the_scheduler_s_rows(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = usual
    sql = "select tid, state, count(*) as n, sum(dur) as d from thread_state join thread using (utid) where dur > 0 group by 1, 2"
    drawn = {(tid, state): (n, d) for tid, state, n, d in judge.rows(sql)}
    names = {"running": "Running", "runnable": "R", "sleeping": "S"}
    for (tid, state), rows in tables["thread_states"].groupby(["tid", "state"]):
        assert drawn[tid, names[str(state)]] == (len(rows), rows.duration_ns.sum())


def test_switches_keep_cpu_and_wakings_keep_the_waker(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = usual
    switches = tables["sched"][
        (tables["sched"].event == "switch") & tables["sched"].next_tid.isin([fixture.MAIN, fixture.WORKER])
    ]
    drawn = judge.rows(
        "select cpu, count(*) as n from sched_slice join thread using (utid) "
        f"where tid in ({fixture.MAIN}, {fixture.WORKER}) group by cpu"
    )
    assert drawn == list(switches.groupby("cpu").size().items())
    wakers = judge.rows(
        "select t.tid as a, w.tid as b, count(*) as n from thread_state s join thread t using (utid) "
        "join thread w on s.waker_utid = w.utid group by 1, 2"
    )
    wakings = tables["sched"][tables["sched"].event == "waking"].groupby(["next_tid", "prev_tid"]).size()
    assert sorted(wakers) == sorted((a, b, n) for (a, b), n in wakings.items())


def test_a_thread_that_is_woken_while_it_falls_asleep_is_ready_from_its_wakeup_on(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(npu=False)
    sched = tables["sched"]
    out = sched[(sched.event == "switch") & (sched.prev_tid == fixture.WORKER)].iloc[3]
    waking = sched[(sched.event == "waking") & (sched.next_tid == fixture.WORKER) & (sched.ts_ns > out.ts_ns)].iloc[0]
    early, wakeup = sched.ts_ns.where(sched.index != waking.name, out.ts_ns - 3), waking.to_frame().T.astype(sched.dtypes)
    wakeup = wakeup.assign(event="wakeup", prev_tid=-1, ts_ns=out.ts_ns + 2)
    tables["sched"] = pd.concat([sched.assign(ts_ns=early), wakeup]).sort_values("ts_ns", kind="stable", ignore_index=True)
    drawn = judged(tmp_path, manifest, tables).rows(
        "select s.ts as ts, s.state as state, w.tid as waker from thread_state s join thread t using (utid) "
        f"left join thread w on s.waker_utid = w.utid where t.tid = {fixture.WORKER} order by s.ts"
    )
    at = out.ts_ns + fixture.BOOT_OFFSET
    row = drawn.index((at, "S", None))
    assert drawn[row - 1][1] == "Running" and drawn[row + 1] == (at + 2, "R", fixture.MAIN)


def test_a_thread_that_exits_stops_running_when_it_does(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(npu=False)
    sched, states = tables["sched"], tables["thread_states"]
    gone = int(sched[(sched.event == "switch") & (sched.prev_tid == fixture.WORKER)].ts_ns.iloc[3])
    kept = (sched.prev_tid != fixture.WORKER) & (sched.next_tid != fixture.WORKER) | (sched.ts_ns < gone)
    stranger = sched[sched.event == "switch"].iloc[-1:].assign(ts_ns=gone + 10**6, cpu=1, prev_tid=5, next_tid=fixture.MAIN + 2)
    tables["sched"] = pd.concat([sched[kept], stranger], ignore_index=True)
    tables["thread_states"] = states[(states.tid != fixture.WORKER) | (states.end_ns <= gone)]
    judge = judged(tmp_path, manifest, tables)
    drawn = judge.rows(
        "select sum(dur) as d, max(ts + dur) as e from thread_state join thread using (utid) "
        f"where tid = {fixture.WORKER} and state = 'Running'"
    )
    last = f"select state as s from thread_state join thread using (utid) where tid = {fixture.WORKER} order by ts desc limit 1"
    assert judge.rows(last) == [("I",)]  # which the UI leaves empty
    mine = tables["thread_states"][(tables["thread_states"].tid == fixture.WORKER) & (tables["thread_states"].state == "running")]
    assert drawn == [(mine.duration_ns.sum(), gone + fixture.BOOT_OFFSET)]


@pytest.mark.parametrize("ended", [0x10, 0x20])
def test_no_bar_follows_a_thread_whose_exit_was_recorded(tmp_path: Path, ended: int) -> None:
    manifest, tables = fixture.make_tables(npu=False)
    sched = tables["sched"]
    last = sched[(sched.event == "switch") & (sched.prev_tid == fixture.WORKER)].index[-1]
    tables["sched"] = sched.assign(prev_state=sched.prev_state.where(sched.index != last, ended))
    states = {state for (state,) in judged(tmp_path, manifest, tables).rows("select distinct state as s from thread_state")}
    assert "I" in states and not states & {"X", "Z", "x"}


def test_a_new_thread_waits_for_its_first_cpu_from_its_creation_on(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(npu=False)
    born, first = fixture.START + 100, fixture.START + 700
    tid, on = fixture.MAIN + 5, {"cpu": [1, 1], "prev_prio": 120, "next_prio": 120}
    rows = fixture.frame(
        "sched", ts_ns=[born, first], event=["fork", "switch"], prev_tid=[fixture.MAIN, 0], next_tid=tid, prev_state=[-1, 0], **on
    )
    tables["sched"] = pd.concat([tables["sched"], rows], ignore_index=True)
    states = judged(tmp_path, manifest, tables).rows(
        "select s.ts as ts, s.dur as dur, s.state as state, w.tid as waker from thread_state s join thread t using (utid) "
        f"left join thread w on s.waker_utid = w.utid where t.tid = {tid} order by s.ts limit 1"
    )
    assert states == [(born + fixture.BOOT_OFFSET, first - born, "R", fixture.MAIN)]


def test_threads_without_work_and_other_programs_stand_in_a_process_each(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(npu=False)
    helper = fixture.frame("threads", tid=[fixture.MAIN + 9], pid=fixture.PID, name="qnn_prof_writer", target=True)
    tables["threads"] = pd.concat([tables["threads"], helper], ignore_index=True)
    rows = judged(tmp_path, manifest, tables).rows(
        "select p.pid as pid, t.tid as tid, t.name as name from thread t join process p using (upid) "
        "where t.tid > 0 order by 1, 2"
    )
    own = [(tid, name) for pid, tid, name in rows if pid == fixture.PID]
    assert own == [(fixture.MAIN, "tokens: generate"), (fixture.WORKER, "worker")]
    assert (HELPERS, fixture.MAIN + 9, "qnn_prof_writer") in rows
    others = tables["threads"].query("not target and tid > 0")
    assert {(OTHERS, tid, name) for tid, name in zip(others["tid"], others["name"], strict=True)} <= set(rows)


def test_a_name_is_not_repeated_on_top_of_itself(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(npu=False)
    tables["operators"] = tables["operators"].assign(expert=lambda rows: np.where(rows.type == "experts", 3, -1))
    tables["experts"] = tables["experts"].assign(expert=3)
    tables["graphs"] = tables["graphs"].assign(expert=3)
    judge = judged(tmp_path, manifest, tables)
    names = dict(judge.rows("select category, group_concat(distinct name) as n from slice group by 1"))
    assert set(names["expert"].split(",")) == {"cache hit", "cache miss"}
    assert all(name.startswith("graph on ") for name in names["graph"].split(","))


def test_a_graph_of_no_layer_does_not_repeat_its_operator(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(npu=False)
    tables["graphs"] = tables["graphs"].assign(kind="head", layer=-1, expert=-1, backend="cpu")
    tables["operators"] = tables["operators"].assign(type="head", name="head", layer=-1, expert=-1)
    judge = judged(tmp_path, manifest, tables)
    assert judge.rows("select distinct name from slice where category = 'graph'") == [("graph on CPU",)]
    tables["operators"] = tables["operators"].assign(type="sample")
    judge = judged(tmp_path, manifest, tables)
    assert judge.rows("select distinct name from slice where category = 'graph'") == [("head",)]


def test_steps_say_their_number_and_place(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = usual
    names = [name for (name,) in judge.rows("select name from slice where category = 'token' order by ts")]
    last = tables["tokens"].iloc[-1]
    assert names[0] == "prefill 0: 12 tokens" and names[-1] == f"decode {last.token_id} at position {last.position}"


def test_counters_keep_every_value(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = usual
    drawn = judge.rows(
        "select c.ts as ts, c.value as v from counter c join counter_track t on c.track_id = t.id "
        "where t.name = 'expert cache bytes' order by ts"
    )
    counter = tables["counters"]
    assert drawn == list(zip((counter.ts_ns + fixture.BOOT_OFFSET).tolist(), counter.value.tolist(), strict=True))


def test_losses_and_an_unfinished_recording_are_marked(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=2, layers=2)
    manifest |= {"lost": {"op_begin": 7, "op_end": 0, "route": 2}, "state": "recording"}
    marks = judged(tmp_path, manifest, tables).rows(
        "select s.name as name, extract_arg(s.arg_set_id, 'debug.op_begin') as n from slice s join track t on s.track_id = t.id "
        "where t.name glob 'missing from*' order by s.id"
    )
    assert marks == [("9 records lost", 7), (marks[1][0], None)]


def test_an_unfinished_slice_is_closed_at_the_end_and_marked(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(npu=False)
    tokens, last = tables["tokens"], len(tables["tokens"]) - 1
    ends = np.where(tokens.token_id == last, tokens.begin_ns, tokens.end_ns)
    tables["tokens"] = tokens.assign(end_ns=ends, duration_ns=ends - tokens.begin_ns, complete=tokens.token_id != last)
    found = judged(tmp_path, manifest, tables).rows(
        "select ts + dur as e, count(*) as n from slice "
        "where category = 'token' and extract_arg(arg_set_id, 'debug.incomplete') group by 1"
    )
    assert found == [(extent(tables)[1] + fixture.BOOT_OFFSET, 1)]


def test_slices_that_do_not_nest_get_tracks_of_their_own(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(npu=False)
    tables["graphs"] = tables["graphs"].assign(end_ns=lambda t: t.end_ns + 50_000)
    judge = judged(tmp_path, manifest, tables)
    tracks = judge.rows(
        "select t.name as name, count(*) as n, sum(dur) as d from slice s join track t on s.track_id = t.id "
        "where category = 'graph' group by 1"
    )
    graphs = tables["graphs"]
    assert tracks == [("overlapping", len(graphs), (graphs.end_ns - graphs.begin_ns).sum())]


@pytest.mark.parametrize("missing", ["qnn", "sched", "tokens", "operators", "everything"])
def test_a_recording_that_lacks_a_part_still_makes_a_trace(tmp_path: Path, missing: str) -> None:
    manifest, tables = fixture.make_tables(tokens=2, layers=2)
    groups = {
        "qnn": ("qnn_executes", "qnn_events", "qnn_calls"),
        "sched": ("sched", "thread_states", "threads"),
        "everything": tuple(tables),
    }
    for name in groups.get(missing, (missing,)):
        tables[name] = tables[name].iloc[:0]
    if missing == "everything":
        manifest |= {"clocks": [], "threads": [], "qnn": None, "machine": {}}
    count = judged(tmp_path, manifest, tables).rows("select count(*) as n from slice")[0][0]
    assert (count == 0) == (missing == "everything")


def test_hostile_names_arrive_as_they_are(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=2, layers=2)
    name = "</script><img src=x onerror=alert(1)>\n%s\u0000\u2028é"
    tables["operators"] = tables["operators"].assign(type="X", name=name)
    manifest["command"] = [name, "not\udcffUTF-8"]
    assert (
        judged(tmp_path, manifest, tables)
        .rows("select distinct name from slice where category = 'operator'")[0][0]
        .startswith("X </script>")
    )


def test_a_failed_writer_leaves_the_old_trace(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=1, layers=1)
    path = tmp_path / "trace.pftrace"
    path.write_bytes(b"old")
    del tables["counters"]
    with contextlib.suppress(KeyError):
        write_trace(manifest, tables, path)
    assert path.read_bytes() == b"old"


def shaken(tables: fixture.Tables, seed: int) -> fixture.Tables:
    """Threads of operators that begin too early: some cross what is around them and need tracks of their own."""
    threads = tables["op_threads"]
    early = np.random.default_rng(seed).choice([0, 0, 0, 900], len(threads))
    return {**tables, "op_threads": threads.assign(begin_ns=threads.begin_ns - early)}


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 99), st.integers(1, 40), st.booleans())
@settings(max_examples=drawn(3), deadline=None)
def test_the_bytes_are_the_same_with_any_number_of_threads(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, layers: int, seed: int, batch: int, zipped: bool
) -> None:
    manifest, tables = fixture.make_tables(tokens, layers)
    folder, tables = tmp_path_factory.mktemp("threads"), shaken(tables, seed)
    with pytest.MonkeyPatch.context() as patch:
        for module in (sequence, sched):
            patch.setattr(module, "BATCH", batch)
        written = [write_trace(manifest, tables, folder / f"{n}", zipped=zipped, threads=n) for n in (1, 2, 5)]
    assert written[0] == written[1] == written[2] and written[0].events > 0
    assert len({(folder / f"{n}").read_bytes() for n in (1, 2, 5)}) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_trace_is_written_while_it_is_made(threads: int) -> None:
    """In the order asked for, and no more stays in memory than was begun ahead."""
    out, kept = io.BytesIO(), []
    with TraceFile(out, threads, zipped=False) as file:
        for i in range(200):
            file.emit(b"<%d " % i)
            file.later(lambda i=i: (i, b"%d>" % i))
            kept.append(len(file.begun))
        file.finish()
    assert out.getvalue() == b"".join(b"<%d %d>" % (i, i) for i in range(200)) and file.events == sum(range(200))
    assert max(kept) == AHEAD * threads


def test_an_error_of_another_thread_stops_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, tables = fixture.make_tables(tokens=1, layers=1)
    path = tmp_path / "trace.pftrace"
    path.write_bytes(b"old")
    monkeypatch.setattr(sequence, "event_batch", lambda *told: 1 // 0)
    for threads in (1, 2):
        with pytest.raises(ZeroDivisionError):
            write_trace(manifest, tables, path, threads=threads)
    assert path.read_bytes() == b"old"


def prefetched(tables: fixture.Tables) -> fixture.Tables:
    """Every load a prefetch that was done before its expert ran, but the first, which came too late."""
    loads = tables["loads"].assign(reason=lambda rows: np.where(rows.action == "load", "prefetch", ""))
    return {**tables, "loads": lengthened(loads, 0, 2000)}


def lengthened(frame: pd.DataFrame, row: int, ns: int) -> pd.DataFrame:
    """The table with one row that ends later."""
    more = np.where(np.arange(len(frame)) == row, ns, 0)
    return frame.assign(end_ns=frame.end_ns + more, duration_ns=frame.duration_ns + more)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> tuple[Judge, fixture.Tables]:
    manifest, tables = fixture.make_tables(tokens=12)
    tables = prefetched(tables)
    last = tables["tokens"].iloc[-1]
    tables["tokens"] = lengthened(tables["tokens"], len(tables["tokens"]) - 1, 10 * int(last.duration_ns))
    manifest["level_changes"] = [
        {"ts_ns": fixture.START + 5000, "level": "operator", "on": False, "why": "slowdown of at most 10%"}
    ]
    return judged(tmp_path_factory.mktemp("ahead"), manifest, tables), tables


def test_an_arrow_leads_from_each_prefetch_to_the_run_that_used_it(ahead: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = ahead
    arrows = judge.rows(
        "select l.ts as a, r.ts as b, l.name as l, r.name as r from flow f join slice l on f.slice_out = l.id "
        "join slice r on f.slice_in = r.id where l.category = 'cache' order by l.ts"
    )
    loads = tables["loads"].query("action == 'load'").sort_values("begin_ns")
    assert [row[0] - fixture.BOOT_OFFSET for row in arrows] == loads.begin_ns.tolist() and len(loads) > 5
    runs = tables["experts"].set_index("begin_ns")
    for (_, begin, load, run), (layer, expert) in zip(arrows, loads[["layer", "expert"]].to_numpy().tolist(), strict=True):
        assert load == f"load.{layer}.{expert}" and run == f"expert.{layer}.{expert}"
        assert runs.loc[begin - fixture.BOOT_OFFSET, ["layer", "expert"]].tolist() == [layer, expert]


def test_counters_tell_decode_speed_and_work_in_flight(ahead: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = ahead
    drawn: dict[str, list[float]] = {}
    for name, value in judge.rows(
        "select t.name as n, c.value as v from counter c join track t on c.track_id = t.id order by ts"
    ):
        drawn.setdefault(name, []).append(value)
    ends = tables["tokens"].end_ns.to_numpy()
    assert drawn["decode tokens/s"] == pytest.approx(1e9 / np.diff(ends))
    assert set(drawn["NPU executions in flight"]) == {0.0, 1.0} and drawn["NPU executions in flight"][-1] == 0
    assert sum(drawn["NPU executions in flight"]) == len(tables["qnn_executes"])
    assert drawn["expert cache bytes"] == tables["counters"].value.tolist()
    units = dict(judge.rows("select name as n, unit as u from counter_track"))
    assert units["decode tokens/s"] == "tokens/s" and units["expert cache bytes"] == "bytes"
    assert units["expert loads in flight"] == "count"


def test_slow_steps_and_switched_levels_are_marked(ahead: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = ahead
    sql = (
        "select t.name as t, s.name as n, s.ts as ts from slice s join track t on s.track_id = t.id where s.category = 'moescope'"
    )
    marks = {track: (name, ts - fixture.BOOT_OFFSET) for track, name, ts in judge.rows(sql)}
    name, ts = marks["slow steps"]
    assert re.findall(r"[\d.]+", name)[:2] == ["11", "11.0"] and ts == tables["tokens"].begin_ns.iloc[-1]
    switched, ts = marks["missing from this recording"]
    assert re.search("operator .*10%", switched) and ts == fixture.START + 5000


def test_a_zipped_trace_says_the_same(usual: tuple[Judge, fixture.Tables], tmp_path: Path) -> None:
    judge, _ = usual
    manifest, tables = fixture.make_tables()
    plain = write_trace(manifest, tables, tmp_path / "a")
    written = write_trace(manifest, tables, tmp_path / "trace.pftrace.gz", zipped=True)
    assert written.bytes == (tmp_path / "trace.pftrace.gz").stat().st_size < plain.bytes / 2
    count = "select count(*) as n, sum(dur) as d, sum(ts) as t from slice"
    assert Judge(tmp_path / "trace.pftrace.gz").rows(count) == judge.rows(count)


def test_traces_of_two_recordings_are_read_as_one(usual: tuple[Judge, fixture.Tables], tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=7)
    for name, made in (("a", fixture.make_tables()), ("b", (manifest, tables))):
        write_trace(*made, tmp_path / f"{name}.pftrace")
    with zipfile.ZipFile(tmp_path / "both.zip", "w") as both:
        both.write(tmp_path / "a.pftrace", "a.pftrace")
        both.write(tmp_path / "b.pftrace", "b.pftrace")
    steps = Judge(tmp_path / "both.zip").rows("select count(*) as n from slice where category = 'token'")
    assert steps == [(len(usual[1]["tokens"]) + len(tables["tokens"]),)]


def test_the_shipped_queries_answer_what_the_tables_say(ahead: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = ahead
    answers = {name: judge.rows(sql) for name, sql in shipped_queries().items()}
    spent = answers["step_breakdown"]
    assert [row[2] - fixture.BOOT_OFFSET for row in spent] == tables["tokens"].begin_ns.tolist()
    threads = tables["op_threads"].assign(ns=lambda rows: rows.end_ns - rows.begin_ns)
    by_token = threads.groupby(tables["operators"].token_id.to_numpy()[threads.op_id]).ns.sum() / 1e6
    assert [row[4] for row in spent] == pytest.approx(by_token.tolist())
    runs = tables["qnn_executes"].sort_values("begin_ns")
    idle = runs.begin_ns.to_numpy()[1:] - runs.end_ns.to_numpy()[:-1]
    assert sorted(row[1] for row in answers["npu_idle"]) == pytest.approx(sorted(idle / 1e3))
    slow = answers["slow_steps"]
    assert len(slow) == 1 and slow[0][2] == pytest.approx(11) and slow[0][3] == tables["tokens"].position.iloc[-1]
    loads = {row[0] - fixture.BOOT_OFFSET: row for row in answers["expert_loads"]}
    mine = tables["loads"].query("action == 'load'")
    assert set(loads) == set(mine.begin_ns) and {row[2] for row in loads.values()} == {"prefetch"}
    assert [at for at, row in loads.items() if row[6] < 0] == [mine.begin_ns.iloc[0]]


def test_a_flow_leads_from_a_step_through_its_graphs_on_other_threads(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables()
    graphs = tables["graphs"].copy()
    graphs["token_id"] = -1
    moved, step = graphs.index[:3], tables["tokens"].iloc[0]
    graphs.loc[moved, ["token_id", "tid"]] = step["token_id"], step["tid"] + 1
    tables |= {"graphs": graphs, "qnn_executes": tables["qnn_executes"].iloc[:0]}
    judge = judged(tmp_path, manifest, tables)
    pairs = judge.rows(
        "select a.category as a, b.category as b from flow join slice a on slice_out = a.id "
        "join slice b on slice_in = b.id order by a.ts"
    )
    assert pairs == [("token", "graph"), ("graph", "graph"), ("graph", "graph")]


def test_clocks_and_heat_are_counters_of_their_policies_and_zones(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=2, layers=2)
    at = tables["tokens"].begin_ns.iloc[0] + np.arange(4)
    whats, numbers = ["frequency", "greatest frequency", "temperature", "temperature"], [4, 4, 0, 1]
    names = ["CPUs 4-7", "CPUs 4-7", "cpu", "cpu"]
    values = [2800.0, 1900.8, 41.5, 43.0]
    tables["clocks"] = fixture.frame("clocks", ts_ns=at, what=whats, number=numbers, name=names, value=values)
    drawn = judged(tmp_path, manifest, tables).rows(
        "select t.name as n, c.value as v from counter c join counter_track t on c.track_id = t.id "
        "where t.name glob 'CPUs*' or t.name glob 'cpu*' order by v"
    )
    assert drawn == [("cpu °C", 41.5), ("cpu °C (1)", 43.0), ("CPUs 4-7 MHz allowed", 1900.8), ("CPUs 4-7 MHz", 2800.0)]
