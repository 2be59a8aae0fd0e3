"""The last seconds of a recording in progress. Every turn reads the records since the previous turn.

A finished step becomes one row of each figure, and its records are dropped. The records of open steps, the descriptions of
operators, and each thread's last step and scheduling event are kept: later phases and states depend on them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import figures, step_time
from analyzer.questions.summary import operator_totals, ranked_operators, token_summary
from analyzer.records.manifest import listed_items, section
from analyzer.records.slot_columns import by_kind, first_occurrences, slot_headers
from analyzer.records.spans import NONE
from analyzer.tables.sequences import renumber_sequences
from analyzer.tables.store import LazyTables, build_tables
from tracer.recording.cost import cost_of
from tracer.recording.format import BUSY, DISCARD, STREAMS, Recording

TOP = 10
LATE_NS = 100_000_000
"""Maximum delay of a record in the file behind younger ones: the buffers of several CPUs are drained one after the other."""
MOST_HELD = 200_000
"""Maximum slots of a stream; for an open step with more, the figures cover the last ones."""
LASTING: dict[str, tuple[tuple[str, ...], ...]] = {
    "tensor": (("pid", "tensor", "first"),),
    "node": (("pid", "graph", "node"),),
    "sched_switch": (("prev_tid",), ("next_tid",)),
    "sched_waking": (("woken_tid",),),
    "token_begin": (("tid",),),
    "token_end": (("tid",),),
}
"""Kinds of which some past records remain valid: the last one with each combination of these fields (an operator, a thread)."""
Rows = dict[str, pd.DataFrame]
Slots = dict[str, np.ndarray]


@dataclass(frozen=True)
class Snapshot:
    """Figures of a recording's last seconds; `tokens`, `operators` and `time` as in questions/summary.py."""

    state: str
    seconds: float
    """The time that the figures cover."""
    records: int
    lost: int
    tokens: dict[str, Any]
    time: dict[str, Any]
    operators: list[dict[str, Any]]
    hits: int
    misses: int
    probe_ns: int
    """Time in probes since recording began."""
    duration_ns: int
    off: tuple[str, ...]
    """Levels that are switched off now."""


class MemoryRecording(Recording):
    """A recording that consists only of some slots in memory."""

    def __init__(self, recording: Recording, slots: Slots):
        vars(self).update(vars(recording))
        self.held = slots

    def slot_count(self, stream: str) -> int:
        """Number of slots in memory."""
        return len(self.held[stream])

    def map_slots(self, stream: str, begin: int, end: int) -> np.ndarray:
        """Slots begin to end, shape [n, slot bytes]."""
        return self.held[stream][begin:end, None].view(np.uint8)


def record_times(slots: np.ndarray) -> np.ndarray:
    """The time of each record, in ns."""
    return slot_headers(slots)["ts"].view(np.int64)


def slots_to_keep(recording: Recording, slots: np.ndarray) -> np.ndarray:
    """Rows of past slots to keep: the latest descriptions, and the last record of each thread."""
    still_valid, of_kind = [np.empty(0, np.int64)], by_kind(slots).rows
    for kind, keys in LASTING.items():
        number, dtype = recording.layouts.get(kind, (NONE, np.dtype([])))
        if number in of_kind:
            still_valid += [first_occurrences(slots, of_kind[number][::-1], dtype, fields) for fields in keys]
    return np.concatenate(still_valid)


def begin_alone(steps: pd.DataFrame, ns: int) -> int:
    """The last time up to `ns` at which no step is open."""
    while len(across := steps[(steps["begin_ns"] < ns) & (steps["end_ns"] > ns)]):
        ns = int(across["begin_ns"].min())
    return ns


def levels_off(changes: Any) -> tuple[str, ...]:
    """The levels whose last change switched them off."""
    last = {row.get("level"): bool(row.get("on")) for row in listed_items(changes, dict)}
    return tuple(sorted(str(level) for level, on in last.items() if not on))


def by_step(tables: LazyTables) -> Rows:
    """The figures of every step as rows with its token_id: `tokens`, `sequences`, `time`, `operators` and `cache`."""
    time = step_time.step_time(tables)
    return {
        "tokens": tables["tokens"],
        "sequences": tables["sequences"],
        "time": time.groupby(["token_id", "part", "cause"], as_index=False)["duration_ns"].sum(),
        "operators": operator_totals(tables["operators"], step_time.operator_times(tables, time), "token_id"),
        "cache": figures.cache_hits(tables),
    }


def renumber_steps(rows: Rows, token_ids: pd.Series) -> Rows:
    """The rows of some steps with new token ids; `token_ids` maps old ids to new ones."""
    chosen = {name: part[part["token_id"].isin(token_ids.index)] for name, part in rows.items()}
    return {name: part.assign(token_id=part["token_id"].map(token_ids)) for name, part in chosen.items()}


class LiveTables:
    """The last `seconds` of a recording, updated turn by turn."""

    def __init__(self, run_dir: Path, seconds: float = 10.0):
        self.run_dir, self.seconds = run_dir, seconds
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.read = dict.fromkeys(STREAMS, 0)
        self.slots: Slots = {stream: np.empty(0, f"V{width}") for stream, width in STREAMS.items()}
        self.counted_until, self.counted = -1, 0
        """Time up to which steps that are over are counted, and how many."""
        self.open: list[tuple[int, int]] = []
        """(tid, begin_ns) of steps that began before and are not over."""
        self.over: Rows = {}
        """Figures of steps that are over, as of `by_step`; their token_id counts on from turn to turn."""
        self.now: Rows = {}
        """The same with the steps that are open."""

    def snapshot(self) -> Snapshot:
        """Read the records since the last turn; raises RecordingError if there is no recording (yet)."""
        recording = Recording(self.run_dir)
        if any(recording.slot_count(stream) < count for stream, count in self.read.items()):
            self.restart()
        if self._grow(recording) or not self.now:
            self._count(build_tables(MemoryRecording(recording, self.slots)))
            self._forget(recording)
        return self._shown(recording.manifest)

    def _grow(self, recording: Recording) -> bool:
        """Append new slots; returns whether there are any."""
        before = dict(self.read)
        for stream in STREAMS:
            end = recording.slot_count(stream)
            fresh = np.asarray(recording.map_slots(stream, self.read[stream], end)).view(f"V{STREAMS[stream]}")[:, 0]
            written = (slot_headers(fresh)["length"] & (BUSY | DISCARD)) == 0
            self.slots[stream] = np.concatenate((self.slots[stream], fresh if written.all() else fresh[written]))
            self.read[stream] = end
        if not any(before.values()):
            self._skip(recording)
        return self.read != before

    def _skip(self, recording: Recording) -> None:
        """Drop the steps before the window, for a recording that began long before the first turn."""
        kinds = [recording.layouts[kind][0] for kind in ("token_begin", "token_end") if kind in recording.layouts]
        rows = np.flatnonzero(np.isin(slot_headers(self.slots["events"])["kind"], kinds))
        steps = {"events": self.slots["events"][rows], "details": self.slots["details"][:0]}
        steps_begun = build_tables(MemoryRecording(recording, steps))["tokens"]
        if len(steps_begun):
            begin_ns = steps_begun["begin_ns"][steps_begun["end_ns"] >= self._since(steps_begun)].min()
            self.counted_until = begin_alone(steps_begun, int(begin_ns))
        self._forget(recording)

    def _since(self, steps: pd.DataFrame) -> int:
        """The begin of the window; steps that end after it count."""
        return int(steps["end_ns"].max() - self.seconds * 1e9)

    def _newest(self) -> int:
        """The time of the newest record held."""
        return max((int(record_times(slots).max()) for slots in self.slots.values() if len(slots)), default=0)

    def _count(self, tables: LazyTables) -> None:
        """Update the figures from `tables`, which have the unfinished steps and some that were counted before."""
        steps, newest = tables["tokens"], self._newest()
        if not len(steps):
            self.now, self.counted_until = by_step(tables), int(newest - self.seconds * 1e9)
            return
        open_before = pd.MultiIndex.from_frame(steps[["tid", "begin_ns"]]).isin(self.open)
        new = steps[(steps["begin_ns"] >= self.counted_until) | open_before]
        no_room = max(self._no_room(slots) for slots in self.slots.values())
        ended = (new["end_ns"] <= newest - LATE_NS) | (new["complete"] & (new["end_ns"] <= no_room))
        until = begin_alone(new, int(new["begin_ns"][~ended].min()) if not ended.all() else newest - LATE_NS)
        until = max(until, self.counted_until, no_room)
        over = ended & (new["begin_ns"] < until)
        order = np.concatenate((new["token_id"][over], new["token_id"][~over]))
        fresh = renumber_steps(by_step(tables), pd.Series(self.counted + np.arange(len(order)), index=order))
        self.counted += int(over.sum())
        self.now = self._window({name: pd.concat([self.over[name], rows]) if self.over else rows for name, rows in fresh.items()})
        self.over = {name: rows[rows["token_id"] < self.counted] for name, rows in self.now.items()}
        left = new[~ended & (new["begin_ns"] < until)]
        self.open, self.counted_until = list(zip(left["tid"], left["begin_ns"], strict=True)), until

    def _no_room(self, slots: np.ndarray) -> int:
        """The time before which slots of a stream must be dropped to stay within MOST_HELD; -1 for none."""
        return int(record_times(slots)[-MOST_HELD]) if len(slots) > MOST_HELD else -1

    def _window(self, rows: Rows) -> Rows:
        """The figures of the steps that end within the window."""
        steps = rows["tokens"]
        ids = steps.loc[steps["end_ns"] >= self._since(steps), "token_id"] if len(steps) else steps["token_id"]
        return {name: part[part["token_id"].isin(ids)] for name, part in rows.items()}

    def _forget(self, recording: Recording) -> None:
        """Keep only slots that are not counted yet, and those of `slots_to_keep`."""
        for stream, slots in self.slots.items():
            hold = record_times(slots) >= self.counted_until
            before = np.flatnonzero(~hold)
            hold[before[slots_to_keep(recording, slots[before])]] = True
            self.slots[stream] = slots[hold]

    def _shown(self, manifest: dict[str, Any]) -> Snapshot:
        """The current figures."""
        steps, cost, cache = self.now["tokens"], cost_of(section(manifest, "cost")), self.now["cache"]
        covered = (steps["end_ns"].max() - steps["begin_ns"].min()) / 1e9 if len(steps) else 0.0
        return Snapshot(
            state=str(manifest.get("state")),
            seconds=float(covered),
            records=sum(section(manifest, "records").values()),
            lost=sum(section(manifest, "lost").values()),
            tokens=token_summary({"tokens": steps, "sequences": renumber_sequences(steps, self.now["sequences"])}),
            time=step_time.time_summary(self.now, self.now["time"]) if len(steps) else {},
            operators=ranked_operators(step_time.of_counted(self.now, self.now["operators"]), TOP),
            hits=int(cache["hits"].sum()),
            misses=int(cache["misses"].sum()),
            probe_ns=int(cost.probes),
            duration_ns=int(manifest.get("duration_ns") or 0),
            off=levels_off(manifest.get("level_changes")),
        )
