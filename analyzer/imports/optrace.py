"""Reads optraces in the Chrome format of Qualcomm's profile viewer: the activity of each unit of the HTP, in cycles.

Thread numbers differ between chips (256 is HMX on one, DMA on another), so a thread is identified by its name and
an event's unit by its flags. The viewer lists every event in an overview of its core and again in a process of its QNN
operation; only one counts. Events listed as not executed are omitted.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.imports.csv import text_of
from analyzer.records.intervals import Intervals, merge_intervals
from analyzer.records.schema import conform
from tracer.recording.format import RecordingError

UNITS = (("HMX", re.compile(r"hmx", re.I)), ("HVX", re.compile(r"hvx", re.I)), ("DMA", re.compile(r"dma", re.I)))
OVERVIEW, NOT_RUN = re.compile(r"overview", re.I), re.compile(r"non executed", re.I)
REMEDY = "give the JSON that qnn-profile-viewer writes with the optrace reader"
ARTIFACT = "OP_TRACE"
MOST_CYCLES = 1 << 60
COLUMNS = ["name", "begin_cycles", "cycles", "pid", "tid", "flags", "qnn_op"]


@dataclass
class Optrace:
    """The events (schema `qnn_optrace`), the file's defects, and the number of events listed twice."""

    events: pd.DataFrame
    complaints: list[str]
    duplicates: int


def complete_events(text: str) -> list[Any]:
    """The complete events at the beginning of a truncated file."""
    begin, decoder, events = text.find("["), json.JSONDecoder(), []
    start = text.find("{", begin + 1) if begin >= 0 else -1
    while start >= 0:
        try:
            event, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            break
        events.append(event)
        start = text.find("{", end)
    return events


def raw_events(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """(events, complaints) of a Chrome trace. Raises RecordingError where the file is not a trace."""
    text = text_of(path)
    complaints = []
    try:
        data = json.loads(text)
        refuse_other_artifacts(path, data)
        rows = data["traceEvents"] if isinstance(data, dict) else data
    except (ValueError, KeyError, RecursionError):
        rows = complete_events(text)
        complaints.append(f"{path}: the file is truncated or damaged; its first {len(rows)} events are read")
    rows = [row for row in rows if is_event(row)] if isinstance(rows, list) else []
    if not rows:
        raise RecordingError(f"{path} holds no trace events: {REMEDY}")
    return rows, complaints


def refuse_other_artifacts(path: Path, data: Any) -> None:
    """Raise RecordingError for QAIRT's other reports: a run trace's times are not cycles, a summary has no events.

    The header with type and version is what "Visualize analytics in QAIRT Visualizer" (Qualcomm 80-87189-1) asks of each.
    """
    header = data.get("header") if isinstance(data, dict) else None
    kind = header.get("artifact_type", ARTIFACT) if isinstance(header, dict) else ARTIFACT
    if kind != ARTIFACT:
        version = header.get("version") if isinstance(header, dict) else None
        numbers = [str(version.get(part, "?")) for part in ("major", "minor", "patch")] if isinstance(version, dict) else []
        of = f" of version {'.'.join(numbers)}" if numbers else ""
        raise RecordingError(f"{path} is a {kind}{of}, not an {ARTIFACT}: {REMEDY} (the one without a suffix to its name)")


def is_event(row: Any) -> bool:
    """Whether a row has the form of a trace event."""
    scalars = isinstance(row, dict) and all(isinstance(row.get(key), str | int | float | None) for key in ("ph", "pid", "tid"))
    return scalars and "ph" in row and isinstance(row.get("args", {}), dict)


def thread_of(row: dict[str, Any]) -> tuple[Any, Any]:
    """An event's process and thread; "" if absent."""
    return tuple("" if row.get(key) is None else row[key] for key in ("pid", "tid"))  # type: ignore[return-value]


def cycles_from(value: Any) -> float:
    """A time in cycles. Raises ValueError for impossible values."""
    if not 0 <= float(value) <= MOST_CYCLES:
        raise ValueError(value)
    return float(value)


def unit_of(thread: str, flags: Any) -> str:
    """The unit in an event's flags, or of its thread if it has none: HVX | HMX | DMA | "" (other)."""
    label = " ".join(map(str, flags)) if isinstance(flags, list) and flags else thread
    return next((unit for unit, pattern in UNITS if pattern.search(label)), "")


def span_columns(rows: list[dict[str, Any]]) -> tuple[list[tuple[Any, ...]], int]:
    """(COLUMNS of complete events and of begin-end pairs, number of unreadable events)."""
    events, bad = [], 0
    open_: dict[Any, list[tuple[str, float, Any]]] = {}
    for row in rows:
        thread, args = thread_of(row), row.get("args", {})
        details = args.get("Flags"), str(args.get("QNN Op Name", ""))
        try:
            if row["ph"] == "X":
                events.append((str(row["name"]), cycles_from(row["ts"]), cycles_from(row["dur"]), *thread, *details))
            elif row["ph"] == "B":
                open_.setdefault(thread, []).append((str(row["name"]), cycles_from(row["ts"]), details))
            elif row["ph"] == "E":
                name, begin, details = open_[thread].pop()
                events.append((name, begin, cycles_from(cycles_from(row["ts"]) - begin), *thread, *details))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            bad += 1
    return events, bad + sum(len(left) for left in open_.values())


def metadata_names(rows: list[dict[str, Any]], kind: str) -> dict[Any, str]:
    """(process, thread) → name, from the metadata of that kind."""
    return {
        thread_of(row): str(row.get("args", {}).get("name", "")) for row in rows if row["ph"] == "M" and row.get("name") == kind
    }


def without_repeats(frame: pd.DataFrame, processes: dict[Any, str]) -> pd.DataFrame:
    """Each event once: that of the overview if two processes list it, else the first."""
    copy = frame.groupby(["pid", "tid", "name", "begin_cycles", "cycles"], dropna=False).cumcount()
    second = ~frame["pid"].map(lambda pid: bool(OVERVIEW.search(processes.get((pid, ""), "")))).astype(bool)
    first = frame.assign(copy=copy, second=second).sort_values("second", kind="stable")
    distinct = first.drop_duplicates(["tid", "name", "begin_cycles", "cycles", "copy"])
    return distinct.sort_values("begin_cycles", kind="stable", ignore_index=True)


def read_optrace(path: Path) -> Optrace:
    """Read a file. Raises RecordingError if it is not an optrace."""
    rows, complaints = raw_events(path)
    events, bad = span_columns(rows)
    if bad:
        complaints.append(f"{path}: events without name, time or partner, omitted: {bad}")
    threads, frame = metadata_names(rows, "thread_name"), pd.DataFrame(events, columns=COLUMNS)
    names = [threads.get(key, "") for key in zip(frame["pid"], frame["tid"], strict=True)]
    frame["thread"] = [
        name if "tid" in name.lower() else f"{name} Tid: {tid}" for name, tid in zip(names, frame["tid"], strict=True)
    ]
    frame["unit"] = [unit_of(*label) for label in zip(names, frame["flags"], strict=True)]
    frame = frame[np.array([not NOT_RUN.search(name) for name in names], bool)]
    distinct = without_repeats(frame, metadata_names(rows, "process_name"))
    return Optrace(conform("qnn_optrace", distinct), complaints, len(frame) - len(distinct))


def utilization(events: pd.DataFrame) -> dict[str, Any]:
    """Cycles from first to last event, idle cycles, busy cycles per unit, and the total of each thread."""
    if not len(events):
        return {}
    begin = events["begin_cycles"].to_numpy()
    end = begin + events["cycles"].to_numpy()
    window = int(end.max() - begin.min())
    busy, threads = {}, {}
    for unit, rows in events.groupby("unit"):
        first = rows["begin_cycles"].to_numpy()
        covered = int(merge_intervals(Intervals.of(first, first + rows["cycles"].to_numpy())).length.sum())
        busy[str(unit) or "other"] = {"events": len(rows), "cycles": covered, "share": covered / window if window else 0.0}
    for thread, cycles in events.groupby("thread")["cycles"].sum().items():
        threads[str(thread)] = {"cycles": int(cycles), "share": int(cycles) / window if window else 0.0}
    idle = window - int(merge_intervals(Intervals.of(begin, end)).length.sum())
    return {"window_cycles": window, "idle_cycles": idle, "units": busy, "threads": threads}


def critical_path(events: pd.DataFrame) -> pd.DataFrame:
    """The chain of events up to the end, by time: each is preceded by the one that ended last before it began."""
    events = events[events["cycles"] > 0]
    begin = events["begin_cycles"].to_numpy()
    end = begin + events["cycles"].to_numpy()
    order = np.argsort(end, kind="stable")
    path: list[int] = []
    place = len(order) - 1
    while place >= 0:
        path.append(int(order[place]))
        place = int(np.searchsorted(end[order], begin[path[-1]], "right")) - 1
    return events.iloc[path[::-1]]
