"""QNN's own events in ONNX Runtime's profile, as onnxruntime-qnn's pull request 767 writes them (no release does so far).

Each has the arguments qnn_event_type, qnn_event_identifier, unit, level (ROOT or SUB-EVENT, at any depth), qnn_operation
(compose, finalize, context_load, execute), qnn_graph_name and parent_ort_node; a time is its duration, anything else the
argument `value`.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from analyzer.imports.csv import MOST_TIME, MOST_VALUE, UNITS, UNKNOWN, type_of
from analyzer.records.spans import NONE
from analyzer.tables.qnn.enums import EVENT_TYPES
from analyzer.tables.qnn.executes import MEASURES

MARK, EXECUTE, ROOT = "qnn_event_type", "execute", "ROOT"
CALLS = {"finalize": "graphFinalize", "context_load": "contextCreateFromBinary"}
"""QNN's call of an operation; composing is many calls."""
COLUMNS = ["operation", "graph", "node", "depth", "type", "unit", "value", "name", "pid", "tid", "ts_ns", "lasted_ns"]
ROUNDED_NS = 1000
"""Precision of the profile's times."""


def is_qnn_event(event: Any) -> bool:
    """Whether an event of the profile is one of QNN's."""
    return isinstance(event, dict) and isinstance(event.get("args"), dict) and MARK in event["args"]


def qnn_rows(events: Iterable[Any]) -> tuple[pd.DataFrame, int]:
    """(COLUMNS of QNN's events in the file's order, number of damaged ones)."""
    found = [row_of(event) for event in events if is_qnn_event(event)]
    rows = [row for row in found if row]
    return pd.DataFrame(rows, columns=COLUMNS), len(found) - len(rows)


def row_of(event: dict[str, Any]) -> tuple[Any, ...] | None:
    """COLUMNS of an event; None if it is damaged."""
    args = event["args"]
    try:
        name, unit, level = str(args["qnn_event_identifier"]), str(args["unit"]).upper(), str(args["level"])
        began, lasted = round(float(event["ts"]) * 1000), round(float(event["dur"]) * 1000)
        value = int(event["dur"]) if unit == "US" else int(args["value"])
        if level not in (ROOT, "SUB-EVENT") or not (
            0 <= began <= MOST_TIME - lasted and lasted >= 0 and 0 <= value <= MOST_VALUE
        ):
            return None
        texts = (str(args.get(key, "")) for key in ("qnn_operation", "qnn_graph_name", "parent_ort_node"))
        kind = type_of(str(args[MARK]), name)
        where = name, int(event["pid"]), int(event["tid"]), began, lasted
        return *texts, int(level != ROOT), kind, UNITS.get(unit, unit.lower()), value, *where
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def qnn_tables(rows: pd.DataFrame, executes: pd.DataFrame, suffix: str) -> dict[str, pd.DataFrame]:
    """`qnn_events`, `qnn_calls`, and `executes` with the times in their events; a node's event is called NAME + `suffix`."""
    rows = rows.assign(execute_id=executes_of(rows, executes, suffix), event_id=np.arange(len(rows)))
    other = rows["operation"] != EXECUTE
    begins = (rows[["operation", "graph", "node", "tid"]] != rows[["operation", "graph", "node", "tid"]].shift()).any(axis=1)
    call = (begins & other).cumsum() - 1
    rows = rows.assign(call_id=call.where(other, NONE), parent_id=parents_of(rows["depth"], begins))
    names = rows["type"].map(EVENT_TYPES)
    events = rows.assign(type_name=names.where(names.notna(), rows["name"]), host_ns=rows["ts_ns"])
    return {"qnn_events": events, "qnn_calls": calls_of(rows[other]), "qnn_executes": with_measures(executes, rows)}


def executes_of(rows: pd.DataFrame, executes: pd.DataFrame, suffix: str) -> np.ndarray:
    """The execution of each event: of the node that it names, at its time; -1 for other operations, or if there is none."""
    answer = np.full(len(rows), NONE, np.int64)
    wanted = rows[rows["operation"] == EXECUTE]
    for node, mine in wanted.groupby(wanted["node"].str.removesuffix(suffix)):
        runs = executes[executes["graph_name"] == node].sort_values("begin_ns")
        at = np.searchsorted(runs["begin_ns"] - ROUNDED_NS, mine["ts_ns"], "right") - 1
        inside = (at >= 0) & (mine["ts_ns"].to_numpy() <= np.append(runs["end_ns"], -1)[at] + ROUNDED_NS)
        answer[mine.index] = np.where(inside, np.append(runs["execute_id"], NONE)[at], NONE)
    return answer


def parents_of(depth: pd.Series, begins: pd.Series) -> np.ndarray:
    """The last event at the top before each one below it, within its operation; -1 for none. Deeper levels are unknown."""
    number = pd.Series(np.arange(len(depth)), depth.index)
    top = number.where(depth == 0).groupby(begins.cumsum()).ffill()
    return top.where(depth > 0).fillna(NONE).to_numpy(np.int64)


def calls_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `qnn_calls`: what took its time is not an execution."""
    ends = rows.assign(end_ns=rows["ts_ns"] + rows["lasted_ns"]).groupby("call_id", as_index=False)
    first = {column: (column, "first") for column in ("operation", "graph", "pid", "tid")}
    calls = ends.agg(**first, begin_ns=("ts_ns", "min"), end_ns=("end_ns", "max")).rename(columns={"graph": "name"})
    return calls.assign(call=calls["operation"].replace(CALLS), duration_ns=calls["end_ns"] - calls["begin_ns"], status=0)


def with_measures(executes: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The executions with the times and cycles that their events state."""
    units = {1: "us", 3: "cycles"}
    mine = rows[(rows["execute_id"] >= 0) & (rows["type"] != UNKNOWN)]
    for column, kind, unit in MEASURES:
        first = mine[(mine["type"] == kind) & (mine["unit"] == units[unit])].groupby("execute_id")["value"].first()
        executes = executes.assign(**{column: executes["execute_id"].map(first).astype("float64")})
    return executes
