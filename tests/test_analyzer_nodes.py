"""Operators told by threads' shares alone, against a simulation of the barrier that knows when each thread did what."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.tables import store
from tests.conftest import drawn
from tracer.recording.format import Recording
from workloads.recordings import LLAMA_OPERATORS, MAIN, WORKER, Writer

SHARES = 17
GRAPH, TENSORS = 0x1000, 0x2000
MUL_MAT, NOTHING = LLAMA_OPERATORS.index("MUL_MAT"), LLAMA_OPERATORS.index("NONE")
THREADS = (MAIN, WORKER)
WORK = st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=40)


def describe(w: Writer, ts: int, n: int, kind: int = MUL_MAT, rows: int = 1, first: int = 0) -> None:
    for node in range(first, first + n):
        w.add("node", ts=ts, engine=2, tensor=TENSORS + node, graph=GRAPH, node=node)
        ne, name = [[8, rows, 1, 1]], f"out-{node}".encode()
        w.add("tensor", ts=ts, engine=2, tensor=TENSORS + node, type=kind, ne=ne, name=name)


def tell(w: Writer, tid: int, done: list[tuple[int, int]], faults: int = 0) -> None:
    """Shares as the kernel side batches them: (node, time) of each."""
    for first in range(0, len(done), SHARES):
        part = done[first : first + SHARES]
        row = {name: np.zeros((1, SHARES), np.int64) for name in ("after", "min_flt", "maj_flt", "node")}
        row["node"][0, : len(part)] = [node for node, _ in part]
        row["after"][0, : len(part)] = [ts - part[0][1] for _, ts in part]
        row["min_flt"][0, : len(part)] = faults
        w.add("op_shares", ts=part[0][1], tid=tid, engine=2, graph=GRAPH, count=len(part), **row)


def run_graph(w: Writer, at: int, work: list[tuple[int, int]]) -> tuple[list[tuple[int, int, int, int]], int]:
    """One graph that both threads compute in step; (node, begin, both ends) of each node, and the graph's end."""
    w.add("graph_begin", ts=at, engine=2, handle=GRAPH, layer=-1, expert=-1)
    truth, done = [], ([], [])
    begin = at
    for node, shares in enumerate(work):
        ends = [begin + share for share in shares]
        truth.append((node, begin, *ends))
        for thread, end in enumerate(ends):
            done[thread].append((node, end))
        begin = max(ends)
    for tid, rows in zip(THREADS, done, strict=True):
        tell(w, tid, rows, faults=3)
    w.add("graph_end", ts=begin + 5, engine=2, handle=GRAPH)
    return truth, begin + 5


def built(w: Writer, folder: Path) -> dict[str, pd.DataFrame]:
    return store.build_tables(Recording(w.write(folder)))


@settings(max_examples=drawn(12))
@given(st.lists(WORK, min_size=1, max_size=4))
def test_begin_wait_and_end_are_those_of_the_barrier(
    tmp_path_factory: pytest.TempPathFactory, graphs: list[list[tuple[int, int]]]
) -> None:
    w, at, expected = Writer(), 1_000, []
    w.add("token_begin", ts=500, engine=2, seq=0, phase=2, n_tokens=1)
    describe(w, 600, max(map(len, graphs)))
    for work in graphs:
        truth, end = run_graph(w, at, work)
        expected += [(begin, *ends, max(ends)) for _, begin, *ends in truth]
        at = end + 50
    w.add("token_end", ts=at, engine=2, seq=0)
    found = built(w, tmp_path_factory.mktemp("nodes"))
    operators = found["operators"].sort_values("begin_ns")
    threads = found["op_threads"].merge(operators[["op_id"]], on="op_id").sort_values(["begin_ns", "tid"])
    assert operators["begin_ns"].tolist() == [row[0] for row in expected]
    assert threads["wait_ns"].tolist() == [end for row in expected for end in row[1:3]]
    inner = operators["end_ns"].to_numpy()[:-1] == operators["begin_ns"].to_numpy()[1:]
    assert inner.sum() >= len(expected) - len(graphs)
    assert (operators["n_threads"] == 2).all() and (operators["type"] == "MUL_MAT").all()
    assert (operators["given"] if "given" in operators else operators["name"]).str.startswith("out-").all()
    busy = [end - row[0] for row in expected for end in row[1:3]]
    assert (threads["wait_ns"] - threads["begin_ns"]).tolist() == busy
    assert len(found["unpaired"]) == 0


def test_page_faults_are_counted_into_the_share_in_which_they_came(tmp_path: Path) -> None:
    w = Writer()
    w.add("token_begin", ts=500, engine=2, seq=0, phase=2, n_tokens=1, min_flt=100)
    describe(w, 600, 3)
    _, end = run_graph(w, 1_000, [(10, 20), (30, 5), (7, 7)])
    w.add("token_end", ts=end + 9, engine=2, seq=0, min_flt=109)
    operators = built(w, tmp_path)["operators"]
    assert operators["min_flt"].iloc[:2].tolist() == [6, 6]


def test_nodes_that_only_rename_memory_are_no_operators(tmp_path: Path) -> None:
    w = Writer()
    describe(w, 600, 2, NOTHING)
    run_graph(w, 1_000, [(10, 20), (30, 5)])
    assert len(built(w, tmp_path)["operators"]) == 0


def test_what_only_renames_memory_is_the_wait_of_the_operator_before_it(tmp_path: Path) -> None:
    w = Writer().add("graph_begin", ts=1_000, engine=2, handle=GRAPH, layer=-1, expert=-1)
    for node, kind in enumerate((MUL_MAT, NOTHING, MUL_MAT)):
        w.add("op_begin", ts=1_010 + 100 * node, engine=2, tensor=TENSORS + node, type=kind, layer=-1)
        w.add("op_wait", ts=1_060 + 100 * node, engine=2)
    tables = built(w.add("graph_end", ts=1_300, engine=2, handle=GRAPH), tmp_path)
    operators, shares = tables["operators"], tables["op_threads"]
    assert operators["begin_ns"].tolist() == [1_010, 1_210] and operators["end_ns"].tolist() == [1_060, 1_260]
    assert shares["wait_ns"].tolist() == [1_060, 1_260] and shares["end_ns"].tolist() == [1_210, 1_300]


def test_a_graph_that_the_old_way_tells_whole_is_read_that_way(tmp_path: Path) -> None:
    w = Writer()
    describe(w, 600, 3)
    w.add("graph_begin", ts=1_000, engine=2, handle=GRAPH, layer=-1, expert=-1)
    for node in range(3):
        w.add("op_begin", ts=1_010 + 100 * node, engine=2, tensor=TENSORS + node, type=MUL_MAT, layer=-1)
        w.add("op_wait", ts=1_060 + 100 * node, engine=2)
    tell(w, MAIN, [(2, 1_260)])  # the new probe came late
    w.add("graph_end", ts=1_300, engine=2, handle=GRAPH)
    operators = built(w, tmp_path)["operators"]
    assert operators["begin_ns"].tolist() == [1_010, 1_110, 1_210]
    assert operators["busy_ns"].tolist() == [50, 50, 50]


def test_operators_without_elements_which_no_thread_begins_do_not_speak_for_the_new_way(tmp_path: Path) -> None:
    w = Writer()
    describe(w, 600, 3)
    describe(w, 600, 9, rows=0, first=3)  # a part of a prompt that gives no logits
    w.add("graph_begin", ts=1_000, engine=2, handle=GRAPH, layer=-1, expert=-1)
    for node in range(3):
        w.add("op_begin", ts=1_010 + 100 * node, engine=2, tensor=TENSORS + node, type=MUL_MAT, layer=-1)
        w.add("op_wait", ts=1_060 + 100 * node, engine=2)
    tell(w, MAIN, [(2, 1_260), *((node, 1_260 + node) for node in range(3, 12))])  # the new probe came late
    w.add("graph_end", ts=1_300, engine=2, handle=GRAPH)
    assert built(w, tmp_path)["operators"]["begin_ns"].tolist() == [1_010, 1_110, 1_210]


def test_shares_outside_any_graph_are_left_over_and_said(tmp_path: Path) -> None:
    w = Writer()
    describe(w, 600, 1)
    tell(w, MAIN, [(0, 900)])
    found = built(w, tmp_path)
    assert len(found["operators"]) == 0 and found["unpaired"]["ts_ns"].tolist() == [900]
