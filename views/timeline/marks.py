"""Derived tracks of the timeline: decode speed, work in flight, time of steps by cause, slow steps, gaps in the recording."""

from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import over_time, step_time
from analyzer.records.observed import known_changes
from analyzer.records.schema import Tables
from views.timeline.columns import map_rows, rows_equal, text_of
from views.timeline.slices import Slices

GROUP, TIME_TABLES = "Steps", step_time.TABLES
"""The group of these tracks, and the tables that the time of steps is made from."""
Named = tuple[str, np.ndarray, np.ndarray]
"""A counter: its name, times in ns and the value from each time on."""


def counter_tracks(tables: Tables) -> list[Named]:
    """Every counter, recorded or derived."""
    by_name = tables["counters"].sort_values("ts_ns", kind="stable").groupby("name", observed=True)
    recorded = [(str(name), rows["ts_ns"].to_numpy(np.int64), rows["value"].to_numpy(np.float64)) for name, rows in by_name]
    recorded.sort(key=itemgetter(0))
    recorded += clock_tracks(tables["clocks"])
    recorded += power_tracks(tables["rails"], tables["power"])
    loads, executes = tables["loads"], tables["qnn_executes"]
    loads = loads[["begin_ns", "end_ns"]][rows_equal(loads["action"], "load") & loads["complete"].to_numpy()]
    executes = executes[["begin_ns", "end_ns"]][executes["complete"].to_numpy()]
    derived = [
        ("decode tokens/s", *over_time.decode_speed(tables)),
        ("expert loads in flight", *over_time.in_flight(loads)),
        ("NPU executions in flight", *over_time.in_flight(executes)),
        ("NPU batches in flight", *over_time.in_flight(tables["npu_batches"][["begin_ns", "end_ns"]])),
    ]
    return [*recorded, *(counter for counter in derived if len(counter[1]))]


CLOCKS = {"frequency": "MHz", "greatest frequency": "MHz allowed", "temperature": "°C", "cooling": "cooling"}
"""`what` of the table `clocks` → the unit in the track's name."""


def clock_tracks(table: pd.DataFrame) -> list[Named]:
    """A counter for each policy's frequency and its limit, each zone and each cooling device."""
    drawn: list[Named] = []
    for (what, number), rows in table.groupby(["what", "number"], observed=True, sort=True):
        if what in CLOCKS:
            name = f"{rows['name'].iloc[0]} {CLOCKS[str(what)]}"
            taken = any(name == other for other, _, _ in drawn)
            drawn.append((f"{name} ({number})" if taken else name, rows["ts_ns"].to_numpy(np.int64), rows["value"].to_numpy()))
    return drawn


def power_tracks(rails: pd.DataFrame, power: pd.DataFrame) -> list[Named]:
    """A counter of watts for each power rail, each reading from the begin of what it is the mean of."""
    drawn: list[Named] = []
    for row in rails.to_dict("records"):
        mine = power[(power["rail_id"] == row["rail_id"]) & power["watts"].notna()]
        if len(mine):
            name = f"power {row['rail']} ({row['source']}) W"
            drawn.append((name, mine["begin_ns"].to_numpy(np.int64), mine["watts"].to_numpy()))
    return drawn


def time_slices(tables: Tables) -> Slices | None:
    """The cause of each moment of a step, with its part; concurrent steps of several threads are on separate lanes."""
    pieces = step_time.merge_stretches(step_time.step_time(tables), "token_id", "cause")
    if not len(pieces):
        return None
    begin, end = (pieces[name].to_numpy(np.int64) for name in ("begin_ns", "end_ns"))
    name = map_rows(str, pieces["cause"])
    step = pieces["token_id"].to_numpy(np.int64)
    return Slices("time", name, np.zeros(len(begin), np.int64), begin, end, np.ones(len(begin), bool), {"token_id": step})


def instant_slices(ts: np.ndarray, texts: list[str], args: dict[str, Any] | None = None) -> Slices:
    """Instants on a separate track."""
    return Slices("moescope", text_of(texts), ts, ts, ts, np.ones(len(ts), bool), args or {}, instant=True)


def slow_steps(tables: Tables) -> Slices | None:
    """Unusually slow decode steps."""
    slow = over_time.slow_steps(tables["tokens"])
    if not len(slow):
        return None
    named = zip(slow["token_id"].tolist(), slow["times_median"].tolist(), strict=True)
    texts = [f"slow step {step}: {times:.1f} times the median" for step, times in named]
    args = {name: slow[name].to_numpy(np.int64) for name in ("duration_ns", "token_id")}
    return instant_slices(slow["begin_ns"].to_numpy(np.int64), texts, args)


def gap_slices(manifest: dict[str, Any], end: int) -> Slices | None:
    """Gaps in the recording: levels switched off and on, and losses, which have no time and are marked at the end."""
    lost = {str(kind): int(n) for kind, n in (manifest.get("lost") or {}).items() if n}
    rows = [
        (row["ts_ns"], f"{row.get('level')} level {'on' if row.get('on') else 'off'}: {row.get('why')}")
        for row in known_changes(manifest.get("level_changes"))
    ]
    if lost:
        rows.append((end, f"{sum(lost.values())} records lost"))
    if manifest.get("state") == "recording":
        rows.append((end, "the recording was not finished"))
    if not rows:
        return None
    texts = [text for _, text in rows]
    args = {kind: np.where(np.char.endswith(texts, "lost"), count, -1) for kind, count in lost.items()}
    return instant_slices(np.array([ts for ts, _ in rows], np.int64), texts, args)
