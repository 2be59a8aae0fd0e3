"""The NPU's tracks: what QNN executed, and where inside an execution the device's own times and node cycles may lie.

QNN reports durations and cycles without a position in time. Device slices are centred in what encloses them, node slices
fill the accelerator's window in proportion to their cycles; both carry `estimated` and the value as it was measured. Where a
backend stamps its events, nodes begin where their stamps say, on the host's clock.
"""

from typing import Any

import numpy as np
import pandas as pd

from views.slices import Column, Slices, Tables, Text, execute_flow, ints, of_frame, place, positive, texts

NODE = 404
EXECUTE, DEVICE, NODES, IDLE = "QNN Execute", "QNN Device", "QNN Node", "QNN Idle"
DEVICE_LEVELS = (("host RPC", "host_rpc_us"), ("HTP RPC", "htp_rpc_us"), ("accelerator", "accel_us"))


def group_name(manifest: dict[str, Any]) -> str:
    """The track group; the emulator must never pass for a device."""
    return "HTP emulator" if (manifest.get("qnn") or {}).get("emulator") else "HTP"


def track_name(manifest: dict[str, Any], track: str) -> str:
    """A track's name, with the emulator named."""
    return f"{track} (HTP emulator)" if (manifest.get("qnn") or {}).get("emulator") else track


def execute_name(graph_name: str, kind: str, layer: int, expert: int) -> str:
    """kind.layer.expert where the engine tells, else QNN's name of the graph."""
    return place(kind, layer, expert) if kind else graph_name or "graphExecute"


def executes(tables: Tables) -> Slices:
    """One slice per execution, on the flow that its submission began; a graph's executions follow each other on one flow."""
    frame = tables["qnn_executes"]
    args = texts(frame, "graph_name") | ints(frame, "layer", "expert", "n_inputs", "n_outputs") | positive(frame, "tier")
    args["status"] = np.where(frame["status"] != 0, frame["status"], -1).astype(np.int64)
    cycles = frame["accel_cycles"].fillna(-1)
    args["accel_cycles"] = cycles.to_numpy(np.int64)
    name = Text.joined(execute_name, frame["graph_name"], frame["kind"], frame["layer"], frame["expert"])
    slices = of_frame("qnn", name, frame, args)
    slices.flow = execute_flow(frame)
    ordered = pd.Series(slices.flow).iloc[np.argsort(slices.begin, kind="stable")]
    slices.ends_flow = ~ordered.duplicated(keep="last").sort_index().to_numpy()
    return slices


def windows(frame: pd.DataFrame) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(begin, end, known) of host RPC, HTP RPC and accelerator for every execution, each within the one before."""
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


def device(tables: Tables) -> Slices | None:
    """Host RPC ⊃ HTP RPC ⊃ accelerator, inside each execution."""
    frame = tables["qnn_executes"]
    rows, begins, ends, labels, measured = [], [], [], [], []
    for level, ((begin, end, known), (_, column)) in enumerate(zip(windows(frame), DEVICE_LEVELS, strict=True)):
        at = np.flatnonzero(known & frame["complete"].to_numpy(bool))
        rows.append(at)
        begins.append(begin[at])
        ends.append(end[at])
        labels.append(np.full(len(at), level))
        measured.append((frame[column].to_numpy(float)[at] * 1e3).astype(np.int64))
    row = np.concatenate(rows)
    if not len(row):
        return None
    args: dict[str, Column] = {"estimated": np.ones(len(row), np.int64), "measured_ns": np.concatenate(measured)}
    name = Text(np.concatenate(labels), [label for label, _ in DEVICE_LEVELS])
    tid = frame["tid"].to_numpy(np.int64)[row]
    return Slices("qnn", name, tid, np.concatenate(begins), np.concatenate(ends), np.ones(len(row), bool), args)


def nodes(tables: Tables) -> Slices | None:
    """The nodes of each execution, side by side in the accelerator's window."""
    frame, events = tables["qnn_executes"], tables["qnn_events"]
    wanted = (events["type"] == NODE) & (events["unit"] == "cycles") & (events["execute_id"] >= 0)
    events = events[wanted].sort_values(["execute_id", "event_id"])
    row = pd.Index(frame["execute_id"]).get_indexer(events["execute_id"])
    events, row = events[row >= 0], row[row >= 0]
    if not len(row):
        return None
    cycles = events["value"].to_numpy(np.float64)
    total = np.bincount(row, cycles, len(frame))[row]
    ends = pd.Series(cycles).groupby(row).cumsum().to_numpy()
    share = np.maximum(total, 1.0)
    begin, end, _ = windows(frame)[-1]
    length = (end - begin)[row]
    first = begin[row] + ((ends - cycles) / share * length).astype(np.int64)
    last = begin[row] + (ends / share * length).astype(np.int64)
    stamped = own_places(events, row, frame, first, last)
    args: dict[str, Column] = {"estimated": np.where(stamped, -1, 1), "cycles": cycles.astype(np.int64)}
    args["by_time_stamp"] = np.where(stamped, 1, -1)
    name = Text.joined(lambda text: text or "node", events["name"])
    return Slices("qnn", name, events["tid"].to_numpy(np.int64), first, last, np.ones(len(row), bool), args)


def own_places(events: pd.DataFrame, row: np.ndarray, frame: pd.DataFrame, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Move nodes to where their own time stamps put them, until the next one's; which were moved.

    Only executions whose nodes all have stamps of their own: equal ones tell nothing of an order.
    """
    stamp = events["host_ns"].to_numpy(np.int64)
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


def idle(tables: Tables) -> Slices | None:
    """The NPU's idle time between executions, with what the thread that ended it was at."""
    frame = tables["qnn_gaps"]
    if not len(frame):
        return None
    states = ints(frame, "running_ns", "runnable_ns", "sleeping_ns", "waiting_ns", "cpu_ns")
    name = Text.joined(lambda what: f"idle: {what}" if what else "idle", frame["doing"])
    return of_frame("qnn", name, frame.assign(complete=True), states)


def tracks(manifest: dict[str, Any], tables: Tables) -> list[tuple[str, Slices]]:
    """(track name, slices) in the order to show."""
    if not len(tables["qnn_executes"]):
        return []
    made = {EXECUTE: executes(tables), DEVICE: device(tables), NODES: nodes(tables), IDLE: idle(tables)}
    return [(track_name(manifest, name), slices) for name, slices in made.items() if slices is not None]
