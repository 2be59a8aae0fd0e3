"""An optrace as Qualcomm's profile viewer writes it for Chrome: what each unit of the HTP did, in cycles.

Thread numbers mean different things in different versions, so threads are told by name. The viewer lists an event on an
overview thread and again on its unit's; one of the two is kept.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer import time_sets
from analyzer.schema import conform
from tracer.recording import RecordingError

UNITS = (("HMX", re.compile(r"hmx", re.I)), ("HVX", re.compile(r"hvx", re.I)), ("DMA", re.compile(r"dma", re.I)))
REMEDY = "give the JSON that qnn-profile-viewer writes with the optrace reader"


@dataclass
class Optrace:
    """The events (schema `qnn_optrace`), what was wrong with the file, and how many were listed twice."""

    events: pd.DataFrame
    complaints: list[str]
    duplicates: int


def salvaged(text: str) -> list[Any]:
    """The whole events at the beginning of a file that was cut off."""
    begin, decoder, found = text.find("["), json.JSONDecoder(), []
    at = text.find("{", begin + 1) if begin >= 0 else -1
    while at >= 0:
        try:
            event, end = decoder.raw_decode(text, at)
        except ValueError:
            break
        found.append(event)
        at = text.find("{", end)
    return found


def raw_events(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """(events, complaints) of a Chrome trace. Raises RecordingError where the file is none."""
    text = path.read_text(errors="replace")
    complaints = []
    try:
        data = json.loads(text)
        rows = data["traceEvents"] if isinstance(data, dict) else data
    except (ValueError, KeyError):
        rows = salvaged(text)
        complaints.append(f"{path}: the file is cut off or damaged; its first {len(rows)} events are read")
    rows = [row for row in rows if isinstance(row, dict) and "ph" in row] if isinstance(rows, list) else []
    if not rows:
        raise RecordingError(f"{path} holds no trace events: {REMEDY}")
    return rows, complaints


def unit_of(thread: str) -> str:
    """The unit that a thread's name tells: HVX | HMX | DMA | "" (an overview, or something else)."""
    return next((unit for unit, pattern in UNITS if pattern.search(thread)), "")


def spans(rows: list[dict[str, Any]]) -> tuple[list[tuple[str, float, float, Any]], int]:
    """(name, begin, cycles, thread key) of complete events and of begins with their ends; and how many could not be read."""
    found, bad = [], 0
    open_: dict[Any, list[tuple[str, float]]] = {}
    for row in rows:
        thread = (row.get("pid"), row.get("tid"))
        try:
            if row["ph"] == "X":
                found.append((str(row["name"]), float(row["ts"]), float(row["dur"]), thread))
            elif row["ph"] == "B":
                open_.setdefault(thread, []).append((str(row["name"]), float(row["ts"])))
            elif row["ph"] == "E":
                name, begin = open_[thread].pop()
                found.append((name, begin, float(row["ts"]) - begin, thread))
        except (KeyError, TypeError, ValueError, IndexError):
            bad += 1
    return found, bad + sum(len(left) for left in open_.values())


def read_optrace(path: Path) -> Optrace:
    """Read a file. Raises RecordingError where it is none."""
    rows, complaints = raw_events(path)
    names = {
        (row.get("pid"), row.get("tid")): str((row.get("args") or {}).get("name", ""))
        for row in rows
        if row["ph"] == "M" and row.get("name") == "thread_name"
    }
    found, bad = spans(rows)
    if bad:
        complaints.append(f"{path}: {bad} events without name, time or partner are left out")
    frame = pd.DataFrame(found, columns=["name", "begin_cycles", "cycles", "thread"])
    frame["thread"] = [names.get(thread, "") for thread in frame["thread"]]
    frame["unit"] = [unit_of(thread) for thread in frame["thread"]]
    once = frame.sort_values("unit", key=lambda unit: unit == "", kind="stable")
    copies = once.groupby(["name", "begin_cycles", "cycles", once["unit"] == ""]).cumcount()
    once = once.assign(copy=copies).drop_duplicates(["name", "begin_cycles", "cycles", "copy"])
    once = once.sort_values("begin_cycles", kind="stable", ignore_index=True)
    return Optrace(conform("qnn_optrace", once), complaints, len(frame) - len(once))


def utilization(events: pd.DataFrame) -> dict[str, Any]:
    """Cycles from first to last event, and per unit the cycles in which it worked on anything, with their share."""
    if not len(events):
        return {}
    begin = events["begin_cycles"].to_numpy()
    end = begin + events["cycles"].to_numpy()
    window = int(end.max() - begin.min())
    busy = {}
    for unit, rows in events.groupby("unit"):
        first = rows["begin_cycles"].to_numpy()
        covered = time_sets.length(time_sets.union(first, first + rows["cycles"].to_numpy()))
        busy[str(unit) or "other"] = {"events": len(rows), "cycles": covered, "share": covered / window if window else 0.0}
    return {"window_cycles": window, "units": busy}


def critical_path(events: pd.DataFrame) -> pd.DataFrame:
    """The events that the end waited for, by time: each is preceded by the one that ended last before it began."""
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
