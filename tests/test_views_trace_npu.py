"""The NPU's tracks in traces, judged by Perfetto's own trace processor."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analyzer.imports.optrace import read_optrace
from tests.judge import Judge, judged
from views.errors import ViewError
from views.timeline.npu_slices import execute_name, node_name
from views.write_outputs import optrace_of
from workloads import tables_fixture as fixture


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Judge, fixture.Tables]:
    manifest, tables = fixture.make_tables()
    return judged(tmp_path_factory.mktemp("trace"), manifest, tables), tables


def test_a_flow_leads_from_the_submitting_graph_to_the_execution(usual: tuple[Judge, fixture.Tables]) -> None:
    judge, tables = usual
    ends = judge.rows(
        "select a.category as c, t.name as name, count(*) as n from flow join slice a on slice_out = a.id "
        "join slice b on slice_in = b.id "
        "join track t on b.track_id = t.id group by 1, 2"
    )
    assert ends == [("graph", "QNN Execute (HTP emulator)", len(tables["qnn_executes"]))]


def test_an_execution_outside_any_graph_has_its_flow_too(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables()
    tables["qnn_executes"] = tables["qnn_executes"].assign(graph_id=-1)
    judge = judged(tmp_path, manifest, tables)
    ends = judge.rows(
        "select a.name as a, count(*) as n from flow join slice a on slice_out = a.id join slice b on slice_in = b.id group by 1"
    )
    assert ends == [("graphExecute", len(tables["qnn_executes"]))]


def test_several_executions_of_one_graph_are_one_chain(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables()
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
    manifest, tables = fixture.make_tables(tokens=3, layers=4)
    tables = staged(tables)
    drawn = on_track(judged(tmp_path, manifest, tables), "Host stages")
    rows = tables["qnn_stages"].sort_values(["begin_ns", "stage_id"])
    assert len(rows) > 10
    assert [row[0] for row in drawn] == rows.stage.tolist() and {row[3] for row in drawn} == {0, 1}
    assert [row[1] - fixture.BOOT_OFFSET for row in drawn] == rows.begin_ns.tolist()
    assert [row[2] for row in drawn] == rows.duration_ns.tolist()


def test_nodes_of_a_node_lie_inside_it_and_waits_are_its_arguments(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=2, layers=4)
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
    manifest, tables = fixture.make_tables(tokens=2, layers=4)
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
    _, tables = fixture.make_tables(tokens=2, layers=4)
    runs = tables["qnn_executes"]
    tables["qnn_executes"] = runs.assign(accel_us=runs.accel_us.where(runs.execute_id > 1))
    path = Path(__file__).parent / "data" / "qnn" / "optrace.json"
    assert set(optrace_of(tables, path, None).execute_id) == {2} and set(optrace_of(tables, path, 0).execute_id) == {0}
    with pytest.raises(ViewError, match=f"99 .* {len(runs) - 1}"):
        optrace_of(tables, path, 99)
    with pytest.raises(ViewError):
        optrace_of({**tables, "qnn_executes": runs.iloc[:0]}, path, None)


@pytest.mark.parametrize("emulator", [True, False])
def test_the_emulator_never_passes_for_a_device(tmp_path: Path, emulator: bool) -> None:
    manifest, tables = fixture.make_tables(tokens=2, layers=2)
    manifest["qnn"]["emulator"] = emulator
    names = [
        name
        for (name,) in judged(tmp_path, manifest, tables).rows(
            "select name from track where name glob '*QNN*' or name glob 'HTP*'"
        )
    ]
    assert len(names) == 4 and all(("emulator" in name) == emulator for name in names)


@pytest.mark.parametrize(
    ("event", "name"),
    [("reshape_36:OpId_104 (cycles)", "reshape_36"), ("Input OpId_2 (cycles)", "Input"), ("a:b", "a:b"), ("", "node")],
)
def test_a_node_has_its_plain_name(event: str, name: str) -> None:
    assert node_name(event) == name


def test_a_graph_of_a_plain_program_has_a_short_name() -> None:
    twice = "QNNExecutionProvider_QNNExecutionProvider_988_1_0"
    assert execute_name(twice, "", -1, -1) == "graph 988_1_0"
    assert execute_name("main_graph", "", -1, -1) == "main_graph" and execute_name(twice, "expert", 1, 7) == "expert.1.7"


def test_a_batch_in_a_queue_lies_between_its_sending_and_the_wait_for_its_answer(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables()
    thread = {"pid": fixture.PID, "tid": fixture.MAIN}
    begin = fixture.START + np.array([1000, 3000, 100_000])
    tables["npu_batches"] = fixture.frame(
        "npu_batches", batch_id=[0, 1, 2], n_ops=[5, 7, 1], begin_ns=begin, end_ns=begin + np.array([5000, 6000, 900]),
        submit_ns=[500, 700, 100], wait_ns=[2000, 1000, 300], in_flight=[1, 2, 1], npu_us=[4.0, np.nan, 1.0], **thread,
    )  # fmt: skip
    judge = judged(tmp_path, manifest, tables)
    links = judge.rows(
        "select a.name as x, b.name as y from flow join slice a on slice_out = a.id join slice b on slice_in = b.id "
        "where a.category = 'npu' order by a.ts, x"
    )
    words = ["batch of 5 operators", "batch of 7 operators", "batch of 1 operator"]
    assert sorted(links) == sorted([("send batch", word) for word in words] + [(word, "wait for batch") for word in words])
    on_track = "select count(*) as n from slice s join track t on s.track_id = t.id where t.name = 'Hexagon queue'"
    assert judge.rows(on_track) == [(3,)]
    counter = judge.rows(
        "select cast(max(value) as int) as n from counter c join track t on c.track_id = t.id "
        "where t.name = 'NPU batches in flight'"
    )
    assert counter == [(2,)]


def test_calls_of_the_driver_have_a_track(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables()
    names = ["fastrpc_context_alloc", "fastrpc_transport_send", "fastrpc_context_complete", "fastrpc_context_free"]
    moments = fixture.START + np.array([1000, 1200, 4000, 4100])
    thread = {"pid": fixture.PID, "tid": fixture.MAIN}
    tables["driver_events"] = fixture.frame(
        "driver_events", event=names, ts_ns=moments, context=9, method=5, token_id=0, **thread
    )
    judge = judged(tmp_path, manifest, tables)
    rows = judge.rows("select s.name as x, dur from slice s join track t on s.track_id = t.id where t.name = 'FastRPC'")
    assert rows == [("method 5", 2800)]
