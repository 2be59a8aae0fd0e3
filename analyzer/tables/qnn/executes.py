"""Executions of QNN's graphs: times, graph, enclosing spans, and the times in QNN's own events."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.reading import Source
from analyzer.records.rows import RecordSpans, Rows
from analyzer.records.schema import conform
from analyzer.records.spans import NONE, number_rows, shared_codes
from analyzer.tables.qnn import enums
from analyzer.tables.qnn.objects import Objects
from analyzer.tables.steps import Graphs, Steps

MEASURES = (
    ("execute_us", enums.EXECUTE, enums.UNIT_US),
    ("queue_us", enums.QUEUE_WAIT, enums.UNIT_US),
    ("host_rpc_us", enums.HOST_RPC_US, enums.UNIT_US),
    ("htp_rpc_us", enums.HTP_RPC_US, enums.UNIT_US),
    ("accel_us", enums.ACCEL_US, enums.UNIT_US),
    ("accel_excl_wait_us", enums.ACCEL_EXCL_WAIT_US, enums.UNIT_US),
    ("accel_cycles", enums.ACCEL_CYCLES, enums.UNIT_CYCLES),
)
"""Column → event type and unit that it is read from."""


@dataclass(frozen=True)
class Executions:
    """The calls as spans; a graphExecuteAsync lasts until its completion notice and has its return in `returned_ns`, else -1."""

    spans: RecordSpans
    status: np.ndarray
    asynchronous: np.ndarray
    returned_ns: np.ndarray


def execution_spans(source: Source) -> Executions:
    """Executions; an asynchronous one ends at the first notice with its parameter after the submission."""
    begin, end, done = (source.rows(f"qnn_{kind}") for kind in ("execute_begin", "execute_end", "done"))
    spans = source.spans("qnn_execute", ("graph",))
    status = spans.of_end(end, "status")
    submitted = (begin["param"] != 0) & (~spans.complete | (status == 0))
    rows, notice = np.flatnonzero(submitted), completion_notices(begin["ts"], done["ts"], (begin, done), submitted)
    end_ns, complete, returned = spans.end_ns.copy(), spans.complete.copy(), np.full(len(begin), NONE, np.int64)
    returned[rows] = np.where(spans.complete, spans.end_ns, NONE)[rows]
    ended = notice >= 0
    complete[rows] = ended
    end_ns[rows] = np.where(ended, np.append(done["ts"], 0)[notice], np.maximum(end_ns[rows], source.last_ns))
    status[rows] = np.where(ended, np.append(done["status"], NONE)[notice], NONE)
    return Executions(RecordSpans(spans.end, spans.begin_ns, end_ns, complete), status, begin["param"] != 0, returned)


def completion_notices(
    submitted_ns: np.ndarray, done_ns: np.ndarray, rows: tuple[Rows, Rows], submitted: np.ndarray
) -> np.ndarray:
    """For each submission the notice that ends it: same process and parameter, matched in time order; -1: none."""
    begin, done = rows
    asked = np.flatnonzero(submitted)
    asking, answering = shared_codes((begin["pid"][asked], begin["param"][asked]), (done["pid"], done["param"]))
    answer = np.full(len(asked), NONE, np.int64)
    waiting: dict[int, list[int]] = {}
    happened = [(int(submitted_ns[row]), 0, i) for i, row in enumerate(asked)]
    happened += [(int(ts), 1, i) for i, ts in enumerate(done_ns)]
    for _, is_done, i in sorted(happened):
        queue = waiting.setdefault(int((answering if is_done else asking)[i]), [])
        if not is_done:
            queue.append(i)
        elif queue:
            answer[queue.pop(0)] = i
    return answer


def first_of_graph(object_id: np.ndarray, status: np.ndarray) -> np.ndarray:
    """Whether an execution is its graph's first successful one, which includes one-time work."""
    answer, good = np.zeros(len(object_id), bool), np.flatnonzero((object_id >= 0) & (status == 0))
    answer[good[number_rows(object_id[good])[1]]] = True
    return answer


class EnclosingGraphs:
    """The engine graph that encloses each execution on its thread, looked up per time range."""

    def __init__(self, source: Source):
        self.begin = source.rows("qnn_execute_begin")
        n = len(self.begin)
        self.columns = {name: np.full(n, NONE, np.int64) for name in ("graph_id", "layer", "expert", "tier")}
        self.columns["kind"] = np.full(n, "", object)

    def note(self, piece: Source, graphs: Graphs) -> None:
        """Look up the graphs of the executions in one time range."""
        low, high = np.searchsorted(self.begin["ts"], (piece.begin_ns, piece.end_ns)).tolist()
        if low == high or len(graphs.begin) == 0:
            return
        rows = np.arange(low, high)
        graph_id = graphs.of(self.begin.where(rows))
        rows, row = rows[graph_id >= 0], graph_id[graph_id >= 0] - graphs.first
        self.columns["graph_id"][rows] = row + graphs.first
        outer = graphs.begin.where(row)
        self.columns["kind"][rows] = np.asarray(piece.named(outer["engine"], outer["type"], "graphs"))
        for name in ("layer", "expert", "tier"):
            self.columns[name][rows] = outer[name]


def execute_table(
    source: Source, runs: Executions, events: pd.DataFrame, objects: Objects, steps: Steps, enclosing: EnclosingGraphs
) -> pd.DataFrame:
    """The table `qnn_executes`."""
    begin = source.rows("qnn_execute_begin")
    object_id = objects.ids_at("graph", begin["pid"], begin["graph"], begin["ts"])
    profile_id = objects.ids_at("profile", begin["pid"], begin["profile"], begin["ts"])
    return conform(
        "qnn_executes",
        {
            "execute_id": np.arange(len(begin)),
            "token_id": steps.of(begin),
            "graph_id": enclosing.columns["graph_id"],
            **source.thread(begin),
            "graph": begin.raw("graph"),
            "object_id": object_id,
            "graph_name": objects.column("name", object_id, ""),
            "profile": begin.raw("profile"),
            "profile_id": profile_id,
            "profile_level": np.where(
                profile_id >= 0, objects.column("level", profile_id, NONE), np.where(begin["profile"] != 0, NONE, 0)
            ),
            "n_inputs": begin["n_inputs"],
            "n_outputs": begin["n_outputs"],
            "status": runs.status,
            "first": first_of_graph(object_id, runs.status),
            "asynchronous": runs.asynchronous,
            "returned_ns": runs.returned_ns,
            **{name: enclosing.columns[name] for name in ("kind", "layer", "expert", "tier")},
            **{name: first_values(events, len(begin), number, enums.UNITS[unit]) for name, number, unit in MEASURES},
            **runs.spans.columns(),
        },
    )


def first_values(events: pd.DataFrame, n: int, event_type: int, unit: str) -> np.ndarray:
    """The value of each execute's first event of a type and unit; NaN for none."""
    rows = events[(events["type"] == event_type) & (events["unit"] == unit) & (events["execute_id"] >= 0)]
    answer = np.full(n, np.nan)
    answer[rows["execute_id"].to_numpy()[::-1]] = rows["value"].to_numpy()[::-1].astype(np.float64)
    return answer
