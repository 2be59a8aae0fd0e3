"""QNN's calls other than executions, and the host stages around them."""

import numpy as np
import pandas as pd

from analyzer.records.reading import Source
from analyzer.records.rows import map_distinct
from analyzer.records.schema import conform
from analyzer.records.spans import NONE, latest
from analyzer.tables.qnn.enums import APPLY_SECTION, CALLS, CONTEXT_FREE, CONTEXT_GET_BINARY, FIRST_STAGE, STAGES, Work
from analyzer.tables.qnn.objects import ObjectCalls, Objects

EXECUTE_STAGE, HARVEST_STAGE = "execute", "harvest"


def by_number(numbers: np.ndarray, names: dict[int, str]) -> np.ndarray:
    """Names of numbers; the number as text if it has no name."""
    return map_distinct(numbers, lambda number: names.get(number, str(number)))


def calls_and_stages(source: Source) -> tuple[ObjectCalls, ObjectCalls]:
    """(calls, host stages): stages are recorded as calls with numbers outside QNN's API."""
    begin, end = source.rows("qnn_call_begin"), source.rows("qnn_call_end")
    parts = []
    for kind, belongs in (("qnn_call", lambda call: call < FIRST_STAGE), ("qnn_stage", lambda call: call >= FIRST_STAGE)):
        begins, ends = begin.where(belongs(begin["call"])), end.where(belongs(end["call"]))
        parts.append(ObjectCalls(begins, ends, source.spans(kind, ("call",), begin=begins, end=ends)))
    return parts[0], parts[1]


def call_table(source: Source, calls: ObjectCalls, objects: Objects) -> pd.DataFrame:
    """The table `qnn_calls`."""
    begin, end, spans = calls.begin, calls.end, calls.spans
    created, status, written = spans.of_end(end, "handle", 0), spans.of_end(end, "status"), spans.of_end(end, "bytes", 0)
    handle = np.where(created != 0, created, begin["handle"])
    object_id = objects.first_made_by(len(begin))
    finalized = np.isin(begin["call"], Work.FINALIZE.value)
    object_id = np.where(finalized, objects.ids_at("graph", begin["pid"], handle, begin["ts"]), object_id)
    used = np.isin(begin["call"], (CONTEXT_FREE, CONTEXT_GET_BINARY, APPLY_SECTION))
    object_id = np.where(used, objects.ids_at("context", begin["pid"], begin["handle"], begin["ts"]), object_id)
    return conform(
        "qnn_calls",
        {
            "call_id": np.arange(len(begin)),
            **source.thread(begin),
            "call": by_number(begin["call"], CALLS),
            "handle": handle.view(np.uint64),
            "object_id": object_id,
            "name": objects.column("name", object_id, ""),
            "bytes": np.where(written > 0, written, begin["size"]),
            "status": status,
            **spans.columns(),
        },
    )


def stage_table(source: Source, stages: ObjectCalls, executes: pd.DataFrame) -> pd.DataFrame:
    """The table `qnn_stages`; the parts of a stage before and after graphExecute become the stages `input` and `output`."""
    begin, spans = stages.begin, stages.spans
    name = by_number(begin["call"], STAGES)
    engine = np.asarray(source.engines(begin["engine"]))
    frame = pd.DataFrame({**source.thread(begin), "engine": engine, "stage": name, **spans.columns()})
    frame["execute_id"] = NONE
    run = np.flatnonzero((name == EXECUTE_STAGE) & spans.complete)
    inside = latest(executes["tid"].to_numpy(), executes["begin_ns"].to_numpy(), begin["tid"][run], spans.end_ns[run])
    owned = (inside >= 0) & (np.append(executes["begin_ns"], 0)[inside] >= spans.begin_ns[run])
    frame.loc[run[owned], "execute_id"] = executes["execute_id"].to_numpy()[inside[owned]]
    run, inside = run[owned], inside[owned]
    called, returned = (executes[column].to_numpy()[inside] for column in ("begin_ns", "end_ns"))
    before = frame.iloc[run].assign(stage="input", end_ns=called)
    after = frame.iloc[run].assign(stage="output", begin_ns=np.maximum(returned, until_harvested(frame, run, returned)))
    rows = pd.concat([frame, before, after], ignore_index=True).sort_values("begin_ns", kind="stable", ignore_index=True)
    return conform("qnn_stages", rows.assign(stage_id=np.arange(len(rows)), duration_ns=rows["end_ns"] - rows["begin_ns"]))


def until_harvested(frame: pd.DataFrame, run: np.ndarray, returned: np.ndarray) -> np.ndarray:
    """The end of the harvest that follows an execution within its stage; 0 for none."""
    harvest = frame[(frame["stage"] == HARVEST_STAGE) & frame["complete"]]
    stage = frame.iloc[run]
    row = latest(harvest["tid"].to_numpy(), harvest["end_ns"].to_numpy(), stage["tid"].to_numpy(), stage["end_ns"].to_numpy())
    begin, end = (np.append(harvest[column].to_numpy(), 0)[row] for column in ("begin_ns", "end_ns"))
    return np.where(begin >= returned, end, 0)
