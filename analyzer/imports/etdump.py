"""ExecuTorch's own profile (ETDump) as the tables of a recording.

    run data > events    Method::execute is a step; OPERATOR_CALL an operator, named by the native_call within it;
                         DELEGATE_CALL a part of the model that a backend runs, with its events before it in the file
    event                name, chain, instruction, the delegate's identifier, begin, end; or an allocation; or values of tensors

The file is a FlatBuffer (etdump_schema_flatcc.fbs in ExecuTorch's package), with or without a size prefix.
QNN's backend writes a node as an event from 0 to QNN's measured value, without the unit.
"""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.imports.flatbuffer import FlatBuffer, OffsetOutside
from analyzer.imports.onnxruntime import step_of_nodes
from analyzer.imports.run_folder import Run
from analyzer.records.spans import NONE
from tracer.recording.format import RecordingError

ENGINE, IDENTIFIER = "executorch", b"ED00"
STEP, OPERATOR, DELEGATE, KERNEL = "Method::execute", "OPERATOR_CALL", "DELEGATE_CALL", "native_call_"
MOST_TIME = (1 << 63) - 1
NODE, NODE_NAME = 404, "NODE"
COLUMNS = ["kind", "type", "name", "begin_ns", "end_ns"]
UNSAID = (
    "a run of a method is a step; the dump has neither its phase and tokens nor its thread",
    "times are read as nanoseconds, as ExecuTorch counts them on Linux, Android and Windows; the dump does not state the unit",
)
OF_QNN = "delegates whose events have a length and no begin are assumed to be QNN's; the dump does not state their unit"
UNNAMED = "the dump does not state which backend ran the delegates without events"


@dataclass
class ProfileEvent:
    """A profiling event: its place in the program, the delegate's identifier ("" for none), times as in the file."""

    name: str
    chain: int
    instruction: int
    delegate: str
    begin: int
    end: int


@dataclass
class Dump:
    """The contents of a file, in file order: spans (COLUMNS), QNN's (operator number, node, value), and what is omitted."""

    spans: list[tuple[Any, ...]] = field(default_factory=list)
    nodes: list[tuple[int, str, int]] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    others: int = 0
    bare: bool = False
    """Whether a delegate ran without events."""


def is_dump(raw: bytes) -> bool:
    """Whether a file begins like an ETDump, with or without a size prefix."""
    return IDENTIFIER in (raw[4:8], raw[8:12])


def read_dump(path: Path, raw: bytes) -> Run:
    """The tables of a dump. Raises RecordingError if it is damaged or has no run of a method."""
    flat = FlatBuffer(raw if raw[4:8] == IDENTIFIER else raw[4:])
    try:
        if flat.raw is not raw and struct.unpack_from("<I", raw)[0] > len(flat.raw):
            raise OffsetOutside
        dump = read_events(flat)
    except OffsetOutside:
        raise RecordingError(f"{path} is truncated or damaged: it points outside itself") from None
    spans = pd.DataFrame(dump.spans, columns=COLUMNS)
    if not (spans["kind"] == STEP).any():
        raise RecordingError(f"{path} is an ETDump without a run of a method ({STEP}): write it after the model has run")
    return Run(ENGINE, span_tables(spans, dump), [*UNSAID, *warnings_of(path, dump)])


def read_events(flat: FlatBuffer) -> Dump:
    """The events of all runs. Lists with shared parts, which no writer produces, count as damage, since they could be endless."""
    dump, count = Dump(), 0
    for run in flat.tables(flat.number("<I", 0), 1):
        waiting: list[ProfileEvent] = []
        for event in flat.tables(run, 3):
            count += 1
            if count > len(flat.raw) // 4:
                raise OffsetOutside
            allocation, profiled = flat.child(event, 1), flat.child(event, 0)
            if allocation:
                dump.allocated.append(flat.scalar(allocation, 1, "<Q", 0))
            elif profiled:
                waiting = add_event(dump, waiting, profiled_at(flat, profiled))
            else:
                dump.others += 1
        dump.others += len(waiting)
    return dump


def profiled_at(flat: FlatBuffer, at: int) -> ProfileEvent:
    """A profiling event. Raises Damaged if it ends before it begins or after MOST_TIME."""
    number, text = flat.scalar(at, 3, "<i", NONE), flat.text(at, 4)
    delegate = text if text is not None else str(number) if number != NONE else ""
    begin, end = flat.scalar(at, 6, "<Q", 0), flat.scalar(at, 7, "<Q", 0)
    if not begin <= end <= MOST_TIME:
        raise OffsetOutside
    instruction = flat.scalar(at, 2, "<i", NONE)
    return ProfileEvent(flat.text(at, 0) or "", flat.scalar(at, 1, "<i", 0), instruction, delegate, begin, end)


def add_event(dump: Dump, waiting: list[ProfileEvent], event: ProfileEvent) -> list[ProfileEvent]:
    """Add an event to the dump; returns the events that wait for their enclosing call, whose event follows them."""
    if event.name not in (STEP, OPERATOR, DELEGATE) and event.chain >= 0:
        return [*waiting, event]
    held = [each for each in waiting if event.name in (OPERATOR, DELEGATE) and each.instruction == event.instruction]
    dump.others += len(waiting) - len(held)
    where = event.begin, event.end
    if event.name == OPERATOR:
        kernels = [each.name.removeprefix(KERNEL) for each in held if each.name.startswith(KERNEL)]
        dump.others += len(held) - len(kernels)
        kernel = kernels[-1] if kernels else event.name
        dump.spans.append((OPERATOR, kernel, f"{kernel}#{event.instruction}", *where))
    elif event.name == DELEGATE:
        add_delegate(dump, held, event)
    else:
        dump.spans.append((event.name, "", "", *where))
    return []


def add_delegate(dump: Dump, held: list[ProfileEvent], call: ProfileEvent) -> None:
    """Add a delegate's call: its events are operators if they lie within it, QNN's nodes if they have no begin."""
    inside = [each for each in held if each.delegate and call.begin <= each.begin and each.end <= call.end]
    nodes = [] if inside else [each for each in held if each.delegate and each.begin == 0]
    dump.others += len(held) - len(inside) - len(nodes)
    name, where = f"{DELEGATE}#{call.instruction}", (call.begin, call.end)
    if inside:
        dump.spans.append(("delegate", "", name, *where))
        dump.spans += [(OPERATOR, each.delegate, f"{each.delegate}#{call.instruction}", each.begin, each.end) for each in inside]
        return
    dump.bare |= not nodes
    dump.nodes += [(len(dump.spans), each.delegate, each.end) for each in nodes]
    dump.spans.append((DELEGATE if nodes else OPERATOR, DELEGATE, name, *where))


def warnings_of(path: Path, dump: Dump) -> list[str]:
    """Warnings about contents of the dump that the tables lack, and about missing information of delegates."""
    said = [OF_QNN] if dump.nodes else []
    said += [UNNAMED] if dump.bare else []
    if dump.allocated:
        said.append(
            f"{path.name}: {len(dump.allocated):,} allocations of {sum(dump.allocated):,} bytes are omitted: no table holds them"
        )
    return (
        [*said, f"{path.name}: {dump.others:,} other events (values of tensors, the program's own) are omitted"]
        if dump.others
        else said
    )


def span_tables(spans: pd.DataFrame, dump: Dump) -> dict[str, pd.DataFrame]:
    """The tables of a dump's spans. A delegate's call is a graph, or an operator if nothing is known about its contents."""
    order = spans["begin_ns"].argsort(kind="stable").to_numpy()
    rows = spans.iloc[order].assign(span=order, engine=ENGINE, pid=0, tid=0, complete=True, layer=NONE).reset_index(drop=True)
    rows["duration_ns"] = rows["end_ns"] - rows["begin_ns"]
    steps = rows[rows["kind"] == STEP].assign(token_id=lambda each: np.arange(len(each)))
    rows["token_id"] = step_of_nodes(rows, steps)
    nodes = rows[rows["kind"].isin((OPERATOR, DELEGATE))].reset_index(drop=True)
    parts = rows[rows["kind"] == "delegate"]
    others = rows[~rows["kind"].isin((OPERATOR, DELEGATE, "delegate", STEP))]
    others = others.assign(kind=[kind.rpartition("::")[2] for kind in others["kind"]], token_id=NONE)
    graphs = pd.concat([steps.assign(kind="run"), parts, others], ignore_index=True)
    graphs["graph_id"] = graphs.index
    inner = graphs[graphs["kind"] == "delegate"]
    held = step_of_nodes(nodes, inner.assign(token_id=inner["graph_id"]))
    nodes = nodes.assign(op_id=nodes.index, graph_id=np.where(held == NONE, nodes["token_id"], held))
    nodes["order"] = nodes.groupby("token_id").cumcount()
    executes = nodes[nodes["kind"] == DELEGATE].assign(execute_id=lambda each: np.arange(len(each)), status=0, asynchronous=False)
    return {
        "tokens": steps,
        "graphs": graphs,
        "operators": nodes.assign(n_threads=1, busy_ns=nodes["duration_ns"], wait_ns=0),
        "op_threads": nodes.assign(wait_ns=nodes["end_ns"]),
        "qnn_executes": executes.assign(graph_name=executes["name"], kind="run"),
        "qnn_events": event_table(dump, executes),
        "threads": rows[["tid", "pid"]].drop_duplicates().assign(target=True),
    }


def event_table(dump: Dump, executes: pd.DataFrame) -> pd.DataFrame:
    """QNN's nodes, each with its execution."""
    rows = pd.DataFrame(dump.nodes, columns=["span", "name", "value"])
    rows["execute_id"] = rows["span"].map(executes.set_index("span")["execute_id"]) if len(rows) else NONE
    times = executes.set_index("execute_id")["end_ns"]
    return rows.assign(
        event_id=rows.index, depth=0, type=NODE, type_name=NODE_NAME, unit="", pid=0, tid=0, ts_ns=rows["execute_id"].map(times)
    )
