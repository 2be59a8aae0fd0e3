"""The NPU's tracks: host stages, executions, and estimated positions of the device's times and cycles within these.

QNN reports durations and cycles without a position in time. Device slices are centred in the enclosing slice; node slices
fill the accelerator's window, or their parent node's, in proportion to their cycles. Both have the arguments `estimated` and
the measured value. If a backend gives time stamps, nodes begin at these, converted to the host's clock.
"""

import re
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import driver_calls
from analyzer.records.schema import Tables
from views.timeline.columns import map_rows, rows_equal, rows_of, text_column, text_of
from views.timeline.slices import BATCH, Column, Slices, execute_flow, expert_place, int_args, of_frame, positive, text_args

NODE, PROVIDER, OP_ID = 404, "QNNExecutionProvider_", re.compile(r"[: ]OpId_\d+( \(cycles\))?$")
TABLES = {"npu_batches", "driver_events", "qnn_events", "qnn_executes", "qnn_gaps", "qnn_optrace", "qnn_stages"}
STAGES, OPTRACE = "Host stages", "optrace "
BATCHES, RPC = "Hexagon queue", "FastRPC"
EXECUTE, DEVICE, NODES, IDLE = "QNN Execute", "QNN Device", "QNN Node", "QNN Idle"
DEVICE_LEVELS = (("host RPC", "host_rpc_us"), ("HTP RPC", "htp_rpc_us"), ("accelerator", "accel_us"))


def group_name(manifest: dict[str, Any]) -> str:
    """The name of the track group, which names the emulator if one was used."""
    return "HTP emulator" if (manifest.get("qnn") or {}).get("emulator") else "HTP"


def track_name(manifest: dict[str, Any], track: str) -> str:
    """A track's name, which names the emulator if one was used."""
    return f"{track} (HTP emulator)" if (manifest.get("qnn") or {}).get("emulator") else track


def execute_name(graph_name: str, kind: str, layer: int, expert: int) -> str:
    """kind.layer.expert if the engine names a kind, else QNN's name of the graph."""
    return expert_place(kind, layer, expert) if kind else short_graph_name(graph_name) or "graphExecute"


def short_graph_name(name: str) -> str:
    """A graph's name without the prefix of ONNX Runtime's provider."""
    short = name.removeprefix(PROVIDER).removeprefix(PROVIDER)
    return f"graph {short}" if short[:1].isdigit() else short


def node_name(event: str) -> str:
    """The model's name of a node: `reshape_36` for QNN's `reshape_36:OpId_104 (cycles)`."""
    return OP_ID.sub("", event) or "node"


def execute_slices(tables: Tables) -> Slices:
    """One slice per execution, on the flow that its submission began; all executions of a graph are on one flow."""
    frame = tables["qnn_executes"]
    args = text_args(frame, "graph_name") | int_args(frame, "layer", "expert", "n_inputs", "n_outputs") | positive(frame, "tier")
    args["status"] = np.where(frame["status"] != 0, frame["status"], -1).astype(np.int64)
    cycles = frame["accel_cycles"].fillna(-1)
    args["accel_cycles"] = cycles.to_numpy(np.int64)
    name = map_rows(execute_name, frame["graph_name"], frame["kind"], frame["layer"], frame["expert"])
    slices = of_frame("qnn", name, frame, args)
    slices.flow = execute_flow(frame)
    ordered = pd.Series(slices.flow).iloc[np.argsort(slices.begin, kind="stable")]
    slices.ends_flow = ~ordered.duplicated(keep="last").sort_index().to_numpy()
    return slices


def execution_windows(frame: pd.DataFrame) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(begin, end, known) of host RPC, HTP RPC and accelerator for every execution, each within the previous one."""
    begin, end = frame["begin_ns"].to_numpy(np.int64), frame["end_ns"].to_numpy(np.int64)
    out = []
    for _, column in DEVICE_LEVELS:
        us = frame[column].to_numpy(float)
        known = ~np.isnan(us)
        length = np.where(known, np.minimum(np.nan_to_num(us) * 1e3, end - begin), end - begin).astype(np.int64)
        begin = begin + (end - begin - length) // 2
        end = begin + length
        out.append((begin, end, known))
    return out


def device_slices(tables: Tables) -> Slices | None:
    """Host RPC ⊃ HTP RPC ⊃ accelerator, inside each execution."""
    frame = tables["qnn_executes"]
    levels = [
        frame[["tid", "complete"]].assign(begin_ns=begin, end_ns=end, level=level, measured_ns=1e3 * frame[column])[known]
        for level, ((begin, end, known), (_, column)) in enumerate(zip(execution_windows(frame), DEVICE_LEVELS, strict=True))
    ]
    drawn = pd.concat(levels).query("complete")
    name = text_column(drawn["level"].to_numpy(), [label for label, _ in DEVICE_LEVELS])
    args = {"estimated": np.ones(len(drawn), np.int64)} | int_args(drawn, "measured_ns")
    return of_frame("qnn", name, drawn, args) if len(drawn) else None


def node_slices(tables: Tables) -> Slices | None:
    """The nodes of each execution in sequence within the accelerator's window; child nodes within their parent."""
    frame, every = tables["qnn_executes"], tables["qnn_events"]
    counted, kind = rows_equal(every["unit"], "cycles"), every["type"].to_numpy()
    execute_row = rows_of(frame["execute_id"], every["execute_id"])
    place = np.flatnonzero(counted & (kind == NODE) & (execute_row >= 0))
    if not len(place):
        return None
    place = place[np.argsort(execute_row[place], kind="stable")]
    events, row = every[["name", "tid", "value", "host_ns"]].iloc[place], execute_row[place]
    among = np.full(len(every) + 1, -1)
    among[place] = np.arange(len(place))
    parents = among[rows_of(every["event_id"], every["parent_id"])]
    parent = parents[place]
    cycles = events["value"].to_numpy(np.float64)
    begin, end, _ = execution_windows(frame)[-1]
    first, last = side_by_side(row, cycles, parent, begin, end)
    stamped = place_by_stamps(events, row, frame, first, last) if (parent < 0).all() else np.zeros(len(row), bool)
    args: dict[str, Column] = {"estimated": np.where(stamped, -1, 1), "cycles": cycles.astype(np.int64)}
    args["by_time_stamp"] = np.where(stamped, 1, -1)
    details = np.flatnonzero(counted & (kind != NODE) & (parents >= 0))
    if len(details):
        args |= detail_args(len(row), parents[details], every.iloc[details])
    args["event"] = text_of(events["name"])
    return Slices(
        "qnn", map_rows(node_name, events["name"]), events["tid"].to_numpy(np.int64), first, last, np.ones(len(row), bool), args
    )


def side_by_side(
    row: np.ndarray, cycles: np.ndarray, parent: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(begin, end) of nodes that fill their execution's window, or their parent node, in proportion to cycles.

    `row`: the index of each node's execution in `begin` and `end`; `parent`: the index of its parent node, -1 for none.
    """
    first, last = np.zeros(len(row), np.int64), np.zeros(len(row), np.int64)
    placed, unplaced = np.zeros(len(row), bool), np.flatnonzero(parent < 0)
    window, owner, total = (begin, end), row, np.zeros(len(begin))
    while len(unplaced):
        owner_row, spent = owner[unplaced], cycles[unplaced]
        ends = pd.Series(spent).groupby(owner_row).cumsum().to_numpy()
        share = np.maximum(np.maximum(np.bincount(owner_row, spent, len(total)), total)[owner_row], 1.0)
        length = (window[1] - window[0])[owner_row]
        first[unplaced] = window[0][owner_row] + ((ends - spent) / share * length).astype(np.int64)
        last[unplaced] = window[0][owner_row] + (ends / share * length).astype(np.int64)
        placed[unplaced] = True
        window, owner, total = (first, last), parent, cycles
        unplaced = np.flatnonzero(~placed & (parent >= 0) & placed[parent])
    return first, last


def detail_args(n: int, node: np.ndarray, details: pd.DataFrame) -> dict[str, Column]:
    """Additional values of `n` nodes at QNN's linting level (wait, overlap ...), in cycles, as arguments.

    `node`: the node of each event of `details`.
    """
    args: dict[str, Column] = {}
    for kind, rows in details.reset_index(drop=True).groupby("type_name"):
        column = np.full(n, -1)
        column[node[rows.index]] = rows["value"]
        args[f"{str(kind).replace(' ', '_')}_cycles"] = column
    return args


def place_by_stamps(
    events: pd.DataFrame, row: np.ndarray, frame: pd.DataFrame, first: np.ndarray, last: np.ndarray
) -> np.ndarray:
    """Move nodes to their time stamps, each until the next one's; returns which were moved.

    Only executions in which all nodes have distinct stamps: equal ones give no order.
    """
    stamp = events["host_ns"].to_numpy(np.int64)
    if not (stamp >= 0).any():
        return np.zeros(len(row), bool)
    by_run = pd.Series(stamp).groupby(row)
    moved = np.asarray((by_run.transform("min") >= 0) & (by_run.transform("nunique") == by_run.transform("size")))
    order = np.lexsort((stamp, row))
    order = order[moved[order]]
    begin, end = (frame[column].to_numpy(np.int64)[row[order]] for column in ("begin_ns", "end_ns"))
    first[order] = np.clip(stamp[order], begin, end)
    following = np.append(first[order][1:], 0)
    same = np.append(row[order][1:] == row[order][:-1], False)
    last[order] = np.where(same[: len(order)], following[: len(order)], end)
    return moved


def idle_slices(tables: Tables) -> Slices | None:
    """The NPU's idle time between executions, with the activity of the thread that ended it."""
    frame = tables["qnn_gaps"]
    if not len(frame):
        return None
    states = int_args(frame, "running_ns", "runnable_ns", "sleeping_ns", "waiting_ns", "cpu_ns")
    name = map_rows(lambda work: f"idle: {work}" if work else "idle", frame["doing"])
    return of_frame("qnn", name, frame.assign(complete=True), states)


def stage_slices(tables: Tables) -> Slices | None:
    """Host stages: those of ONNX Runtime's QNN provider."""
    frame = tables["qnn_stages"]
    return of_frame("qnn", text_of(frame["stage"]), frame, {}) if len(frame) else None


def optrace_slices(tables: Tables) -> dict[str, Slices]:
    """Slices by thread of the optrace of an execution (column `execute_id`), over the accelerator's window."""
    events, frame = tables.get("qnn_optrace", pd.DataFrame()), tables["qnn_executes"]
    if not len(events):
        return {}
    row = pd.Index(frame["execute_id"]).get_indexer(events["execute_id"])
    since, cycles = (events[name].to_numpy(np.int64) for name in ("begin_cycles", "cycles"))
    origin = since.min()
    (begin, end, _), total_cycles = execution_windows(frame)[-1], max(1, int((since + cycles).max() - origin))
    rate = (end - begin)[row] / total_cycles
    first, last = (begin[row] + (cycle * rate).astype(np.int64) for cycle in (since - origin, since - origin + cycles))
    args = (
        text_args(events, "unit", "qnn_op")
        | int_args(events, "begin_cycles", "cycles")
        | {"estimated": np.ones(len(row), np.int64)}
    )
    tid = frame["tid"].to_numpy(np.int64)[row]
    slices = Slices("qnn", text_of(events["name"]), tid, first, last, np.ones(len(row), bool), args)
    return {OPTRACE + str(thread): slices.take(rows) for thread, rows in sorted(events.groupby("thread").indices.items())}


def batch_slices(tables: Tables) -> Slices | None:
    """Batches in a queue without QNN, from sending to reading of the response, on the flow between these two."""
    frame = tables["npu_batches"]
    if not len(frame):
        return None
    sent = frame["begin_ns"] + frame["submit_ns"].clip(lower=0)
    args = int_args(frame, "batch_id", "n_ops", "bytes", "in_flight", "submit_ns", "wait_ns")
    args["npu_us"] = frame["npu_us"].fillna(-1).to_numpy(np.int64)
    name = map_rows(lambda n: f"batch of {n} operator{'s' * (n != 1)}", frame["n_ops"])
    slices = of_frame("npu", name, frame.assign(begin_ns=sent), args)
    slices.flow = frame["batch_id"].to_numpy(np.int64) + BATCH
    return slices


def message_slices(tables: Tables) -> Slices | None:
    """Calls of the NPU's driver, from sending to the arrival of the response."""
    if not len(tables["driver_events"]):
        return None
    frame = driver_calls.rpc_messages(tables)
    frame = frame[frame["answered_ns"] >= 0]
    if not len(frame):
        return None
    frame = frame.assign(begin_ns=frame["sent_ns"], end_ns=frame["answered_ns"], complete=True)
    name = map_rows(lambda driver, method: driver if method < 0 else f"method {method}", frame["driver"], frame["method"])
    return of_frame("npu", name, frame, int_args(frame, "token_id", "handle"))


def npu_tracks(manifest: dict[str, Any], tables: Tables) -> list[tuple[str, Slices]]:
    """(track name, slices) in display order."""
    by_name = {STAGES: stage_slices(tables)}
    if len(tables["qnn_executes"]):
        device_side = {
            EXECUTE: execute_slices(tables),
            DEVICE: device_slices(tables),
            NODES: node_slices(tables),
            IDLE: idle_slices(tables),
        }
        by_name |= {track_name(manifest, name): slices for name, slices in device_side.items()} | optrace_slices(tables)
    by_name |= {BATCHES: batch_slices(tables), RPC: message_slices(tables)}
    return [(name, slices) for name, slices in by_name.items() if slices is not None]
