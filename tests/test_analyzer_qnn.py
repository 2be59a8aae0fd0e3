"""The join of QNN's profile events: a program that calls and harvests as ONNX Runtime does, and programs that do it otherwise."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analyzer.questions.npu_figures import npu_statistics
from analyzer.questions.sql import Database
from analyzer.tables.qnn.enums import EVENT_TYPES, NODE, PROFILE_CREATE, WORK_OF_HUNDRED, WORK_OF_THOUSAND, Work, work_of
from analyzer.tables.store import build_tables
from tests.conftest import drawn
from tracer.recording.format import Recording
from views.report.npu import NODES_QUERY, npu_section
from views.report.sections import Run
from workloads.recordings import MAIN, WORKER, Writer, record_layouts

SHARED = settings(max_examples=drawn(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
GRAPH_CREATE, FINALIZE, FROM_BINARY, RETRIEVE = 15, 19, 13, 20
Tree = list[tuple[int, int, list]]  # (type, value, children)


class Program:
    """A QNN caller: writes the records that the probes would, and keeps the truth."""

    def __init__(self) -> None:
        self.w, self.ts, self.handle = Writer(), 1000, 0
        self.truth: list[tuple[int, int, int, int, int]] = []  # type, value, parent's event_id, depth, cause
        self.executes = self.calls = 0

    def tick(self) -> int:
        self.ts += 10
        return self.ts

    def execute(self, graph: int, profile: int, tid: int = MAIN, status: int = 0) -> int:
        self.w.add("qnn_execute_begin", engine=3, ts=self.tick(), tid=tid, graph=graph, profile=profile, n_inputs=1, n_outputs=2)
        self.w.add("qnn_execute_end", engine=3, ts=self.tick(), tid=tid, graph=graph, profile=profile, status=status)
        self.executes += 1
        return self.executes - 1

    def call(self, number: int, handle: int, made: int = 0, name: bytes = b"", size: int = 0, tid: int = MAIN) -> int:
        self.w.add("qnn_call_begin", engine=3, ts=self.tick(), tid=tid, call=number, handle=handle, size=size)
        self.w.add("qnn_call_end", engine=3, ts=self.tick(), tid=tid, call=number, handle=made or handle)
        if made:
            self.w.add("qnn_object", engine=3, ts=self.tick(), tid=tid, call=number, handle=made, owner=handle, name=name)
        self.calls += 1
        return self.calls - 1

    def list_events(self, parent: int, of_profile: int, handles: list[int], tid: int) -> None:
        width = record_layouts()["qnn_sub_events"][1]["events"].shape[0]
        for first in range(0, max(len(handles), 1), width):
            part = handles[first : first + width]
            self.w.add(
                "qnn_sub_events", engine=3, ts=self.tick(), tid=tid, parent=parent, of_profile=of_profile, first=first,
                count=len(part), total=len(handles), events=[part + [0] * (width - len(part))],
            )  # fmt: skip

    def harvest(self, profile: int, tree: Tree, cause: tuple[int, int], tid: int = MAIN, announce: bool = True) -> None:
        """Read a profile's events depth first; cause is (execute_id, call_id). Handles start again at 1: they are reused."""
        if announce:
            self.w.add("qnn_harvest", engine=3, ts=self.tick(), tid=tid, profile=profile)
        self.handle = 0
        self.list_events(profile, 1, self.numbers(len(tree)), tid)
        first = self.handle - len(tree)
        self.read(tree, [first + i + 1 for i in range(len(tree))], -1, 0, cause, tid)

    def numbers(self, n: int) -> list[int]:
        self.handle += n
        return list(range(self.handle - n + 1, self.handle + 1))

    def read(self, tree: Tree, handles: list[int], parent: int, depth: int, cause: tuple[int, int], tid: int) -> None:
        for (number, value, children), handle in zip(tree, handles, strict=True):
            row = len(self.truth)
            self.truth.append((number, value, parent, depth, *cause))
            unit = 3 if "CYCLE" in EVENT_TYPES.get(number, "") or number == NODE else 1
            fields = {"event": handle, "type": number, "unit": unit, "value": value, "dtype": 0x164, "extended": 1}
            self.w.add("qnn_event", engine=3, ts=self.tick(), tid=tid, **fields, name=b"node")
            below = self.numbers(len(children))
            self.list_events(handle, 0, below, tid)
            self.read(children, below, row, depth + 1, cause, tid)

    def check(self, folder) -> dict:
        tables = build_tables(Recording(self.w.write(folder)))
        columns = ["type", "value", "parent_id", "depth", "execute_id", "call_id"]
        assert tables["qnn_events"][columns].to_numpy().tolist() == [list(row) for row in self.truth]
        return tables


EXECUTE: Tree = [(3001, 500, []), (3002, 400, []), (3004, 300, []), (3003, 9000, [(404, 10, []), (404, 20, [])])]


def test_a_session_as_onnx_runtime_runs_it_joins_completely(tmp_path):
    p = Program()
    context = p.call(9, 1, made=2)
    made = p.call(GRAPH_CREATE, 2, made=3, name=b"expert_t1")
    finalize = p.call(FINALIZE, 3)
    p.harvest(50, [(300, 7, [(2001, 5, []), (2003, 1, [])])], (-1, finalize))
    for _ in range(3):
        p.harvest(50, EXECUTE, (p.execute(3, 50), -1))
    t = p.check(tmp_path)
    runs, calls = t["qnn_executes"], t["qnn_calls"]
    assert runs["graph_name"].tolist() == ["expert_t1"] * 3
    assert runs[["host_rpc_us", "htp_rpc_us", "accel_us", "accel_cycles"]].to_numpy().tolist() == [[500, 400, 300, 9000]] * 3
    assert calls["call"].tolist() == ["contextCreate", "graphCreate", "graphFinalize"]
    assert calls["name"].tolist() == ["", "expert_t1", "expert_t1"] and calls["handle"].tolist() == [2, 3, 3]
    assert (context, made, finalize) == (0, 1, 2)
    assert t["qnn_events"]["type_name"].iloc[:3].tolist() == [
        "FINALIZE",
        "GRAPH_FINALIZE_HOST_RPC_TIME_MICROSEC",
        "GRAPH_FINALIZE_ACCEL_TIME_MICROSEC",
    ]


def test_a_context_from_a_binary_takes_the_load_events_even_after_executes_with_the_same_profile(tmp_path):
    p = Program()
    p.harvest(50, EXECUTE, (p.execute(3, 50), -1))
    p.harvest(50, [(100, 9, [(1002, 8, []), (1004, 2, [])])], (-1, p.call(FROM_BINARY, 1, made=4, size=4096)))
    t = p.check(tmp_path)
    assert t["qnn_calls"]["bytes"].tolist() == [4096]


def test_two_threads_harvest_at_once_and_a_harvest_on_another_thread_is_still_found(tmp_path):
    p = Program()
    first, second = p.execute(3, 50, MAIN), p.execute(4, 51, WORKER)
    third = p.execute(4, 52, WORKER)
    p.harvest(50, EXECUTE, (first, -1), MAIN)
    p.harvest(51, EXECUTE, (second, -1), WORKER)
    p.harvest(52, EXECUTE, (third, -1), MAIN)  # read by a thread that never executed with this profile
    p.check(tmp_path)


def test_a_reused_handle_has_the_name_it_had_at_the_time(tmp_path):
    p = Program()
    p.call(RETRIEVE, 2, made=3, name=b"old")
    p.execute(3, 0)
    p.call(RETRIEVE, 2, made=3, name=b"new")
    p.execute(3, 0)
    assert p.check(tmp_path)["qnn_executes"]["graph_name"].tolist() == ["old", "new"]


def test_an_event_without_a_harvest_is_a_row_that_joins_nothing(tmp_path):
    p = Program()
    p.execute(3, 50)
    p.w.add("qnn_event", engine=3, ts=p.tick(), event=1, type=3001, value=5, unit=1, extended=1)
    p.truth.append((3001, 5, -1, 0, -1, -1))
    p.check(tmp_path)


def test_an_event_read_plain_and_extended_counts_once_extended(tmp_path):
    p = Program()
    cause = p.execute(3, 50)
    p.w.add("qnn_harvest", engine=3, ts=p.tick(), profile=50)
    for extended, value in ((0, 5), (1, 6)):
        p.w.add("qnn_event", engine=3, ts=p.tick(), event=1, type=3001, value=value, unit=1, extended=extended)
    p.truth.append((3001, 6, -1, 0, cause, -1))
    p.check(tmp_path)


def test_a_list_of_events_that_fills_its_records_is_read_whole(tmp_path):
    p, width = Program(), record_layouts()["qnn_sub_events"][1]["events"].shape[0]
    for n in (width - 1, width, width + 1, 2 * width):
        p.harvest(50, [(3003, 9000, [(404, k, []) for k in range(n)])], (p.execute(3, 50), -1))
    p.check(tmp_path)


def nest(p: Program, tree: Tree, cause: tuple[int, int], tid: int = MAIN, parent: int = -1, depth: int = 0) -> None:
    """Events as ONNX Runtime's provider hands them on: no lists, but a frame that is lower the deeper the call."""
    for number, value, children in tree:
        row = len(p.truth)
        p.truth.append((number, value, parent, depth, *cause))
        frame = (0x7FFF0000 if tid == MAIN else 0x7FFD0000) - 400 * depth
        fields = {"event": row + 1, "type": number, "unit": 1, "value": value, "dtype": 0x164, "extended": 1, "frame": frame}
        p.w.add("qnn_event", engine=3, ts=p.tick(), tid=tid, **fields, name=b"node")
        nest(p, children, cause, tid, row, depth + 1)


DEEP: Tree = [(3003, 9, [(404, 4, [(5001, 1, []), (5002, 2, [])]), (404, 5, [])]), (3004, 3, []), (3003, 8, [(404, 8, [])])]


def test_events_without_lists_find_their_parents_by_how_deep_their_reader_called_itself(tmp_path):
    p = Program()
    for tid, profile, tree in ((MAIN, 50, DEEP), (WORKER, 51, DEEP[::-1]), (MAIN, 50, DEEP[1:2]), (MAIN, 50, DEEP)):
        cause = p.execute(3, profile, tid)
        p.w.add("qnn_harvest", engine=3, ts=p.tick(), tid=tid, profile=profile)
        nest(p, tree, (cause, -1), tid)
    p.check(tmp_path)


def test_an_event_seen_by_its_reader_and_by_qnns_own_function_counts_once(tmp_path):
    p = Program()
    cause = p.execute(3, 50)
    p.w.add("qnn_harvest", engine=3, ts=p.tick(), profile=50)
    nest(p, DEEP, (cause, -1))
    for row, (number, value, *_) in enumerate(list(p.truth)):
        p.w.add("qnn_event", engine=3, ts=p.tick(), event=row + 1, type=number, unit=1, value=value, dtype=0x164, extended=1)
    p.check(tmp_path)


def test_values_narrower_than_their_field_are_cut_to_their_width(tmp_path):
    w = Writer().add("qnn_event", engine=3, ts=5, type=404, value=0xDEAD00000007, dtype=0x132, extended=1)
    assert build_tables(Recording(w.write(tmp_path)))["qnn_events"]["value"].tolist() == [7]


def test_an_execute_belongs_to_the_graph_and_step_around_it(tmp_path):
    p = Program()
    p.w.add("token_begin", ts=p.tick(), seq=0).add("graph_begin", ts=p.tick(), handle=1, type=1, layer=4, expert=6, tier=8)
    p.execute(3, 0)
    p.w.add("graph_end", ts=p.tick(), handle=1).add("token_end", ts=p.tick(), seq=0)
    p.execute(3, 0, status=1000)
    runs = p.check(tmp_path)["qnn_executes"]
    columns = ["token_id", "graph_id", "kind", "layer", "expert", "tier", "status"]
    assert runs[columns].to_numpy().tolist() == [[0, 0, "expert", 4, 6, 8, 0], [-1, -1, "", -1, -1, -1, 1000]]
    assert np.isnan(runs["accel_us"]).all()


def trees(depth: int = 2):
    leaf = st.tuples(st.sampled_from([3001, 3003, 404, 405]), st.integers(0, 99), st.just([]))
    if depth == 0:
        return st.lists(leaf, max_size=3)
    return st.lists(
        st.tuples(st.sampled_from([3001, 3003, 404]), st.integers(0, 99), trees(depth - 1)), max_size=20 if depth == 2 else 3
    )


@SHARED
@given(st.lists(st.tuples(st.sampled_from([MAIN, WORKER]), st.integers(50, 51), st.booleans(), trees()), max_size=5))
def test_any_tree_read_after_any_execute_joins_with_parents_and_depths(tmp_path, runs):
    p = Program()
    for tid, profile, announce, tree in runs:
        cause = p.execute(3, profile + 10 * tid, tid)
        p.harvest(profile + 10 * tid, tree, (cause, -1), tid, announce)
    p.check(tmp_path)


def test_every_known_event_type_but_nodes_traces_and_sections_tells_its_work():
    silent = {number for number in EVENT_TYPES if work_of(number) is None}
    assert silent == {404, 600}
    assert set(WORK_OF_HUNDRED.values()) | set(WORK_OF_THOUSAND.values()) == set(Work)


def test_graphs_of_one_name_are_told_apart_by_object_model_and_level(tmp_path):
    """Two sessions compile the same operators: QNN sees one name twice, at two levels."""
    w = Program()
    for session, (graph, profile, level) in enumerate(((5, 51, 2), (6, 61, 1))):
        w.call(GRAPH_CREATE, 1, graph, b"QNN_123")
        w.w.add("qnn_object", engine=3, ts=w.tick(), call=PROFILE_CREATE, handle=profile, level=level)
        w.w.add("session", engine=4, ts=w.tick(), handle=70 + session, name=b"/m/%d.onnx" % session)
        w.harvest(profile, [(NODE, 10, [])], (w.execute(graph, profile), -1))
    tables = build_tables(Recording(w.w.write(tmp_path)))
    graphs = tables["qnn_objects"].query("kind == 'graph'")
    assert graphs["session_id"].tolist() == [0, 1] and set(graphs["name"]) == {"QNN_123"}
    rows = Database(tables).frame(NODES_QUERY).sort_values("object")
    assert rows[["model", "level", "runs"]].to_numpy().tolist() == [["/m/0.onnx", 2, 1], ["/m/1.onnx", 1, 1]]
    assert len(npu_statistics(tables)["graphs"]) == 2
    section = npu_section(Run({}, tables, {}))
    (shown,) = [block for block in section.blocks if block.get("title") == "Cycles by node"]
    assert {(row[1], row[3]) for row in shown["rows"]} == {("/m/0.onnx", "detailed"), ("/m/1.onnx", "basic")}
