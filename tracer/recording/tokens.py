"""Pairs the drained records to token steps, which the filter, the limits and the guard of decode speed use."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracer.recording.format import KIND_OFFSET, RING_HEADER_BYTES, dtype_from_json

KINDS = ("token_begin", "token_end", "task_exit")
BEGIN, END, EXIT = range(3)
UNKNOWN, PREFILL, DECODE = range(3)
MISSED, NO_POSITION = 2, 0xFFFFFFFF  # CACHE_MISS, and the value if the engine gives no position: see bpf/records.h
MOST_MISSES = 100_000  # limit of remembered misses if no step ends
FIELDS = ["pid", "tid", "engine", "position", "begin_ns", "end_ns", "decode", "complete"]
STEP = np.dtype({"names": FIELDS, "formats": ["<i8"] * 6 + ["?"] * 2})
MARK = np.dtype({"names": ["tid", "engine", "ts", "what", "pid", "position", "decode"], "formats": ["<i8"] * 6 + ["?"]})


def kinds_of(slots: np.ndarray) -> np.ndarray:
    """The record kind of each slot, shape [n]."""
    return slots[:, KIND_OFFSET : KIND_OFFSET + 2].view("<u2")[:, 0]


def is_any(kinds: np.ndarray, wanted: tuple[int, ...]) -> np.ndarray:
    """Which kinds are in `wanted`; many times cheaper than a set operation on small batches, as most are."""
    table = np.zeros(256, bool)  # all kinds are below 256
    table[list(wanted)] = True
    return table[kinds]


def column(slots: np.ndarray, offset: int, width: int) -> np.ndarray:
    """An unsigned field of the records in `slots`, by its offset and width in bytes, as int64."""
    start = RING_HEADER_BYTES + offset
    return slots[:, start : start + width].view(f"<u{width}")[:, 0].astype(np.int64)


def records(slots: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The records in `slots`, shape [n]."""
    return np.ascontiguousarray(slots[:, RING_HEADER_BYTES : RING_HEADER_BYTES + dtype.itemsize]).view(dtype)[:, 0]


class Misses:
    """Times of experts that ran without being in the cache, kept until the steps that waited for them have ended."""

    def __init__(self, layouts: dict[str, Any]):
        layout = layouts["expert_begin"]
        self._kind, self._dtype = layout["kind"], dtype_from_json(layout["fields"], layout["bytes"])
        self._seen = np.empty((0, 2), np.int64)

    def read(self, events: np.ndarray) -> None:
        """Add a batch."""
        rows = np.flatnonzero(kinds_of(events) == self._kind)
        if len(rows):
            runs = records(events[rows], self._dtype)
            slots = events[rows[runs["cache"] == MISSED]]
            self._seen = np.concatenate((self._seen, np.stack([column(slots, 8, 4), column(slots, 0, 8)], 1)))[-MOST_MISSES:]

    def within(self, steps: np.ndarray) -> list[int]:
        """Number of misses of its process in each step; those before the begin of the last step are dropped."""
        counts = []
        for step in steps:
            mine = self._seen[self._seen[:, 0] == step["pid"], 1]
            counts.append(int(((mine >= step["begin_ns"]) & (mine <= step["end_ns"])).sum()))
        if len(steps):
            self._seen = self._seen[self._seen[:, 1] >= steps["begin_ns"].max()]
        return counts


@dataclass
class Tokens:
    """Pairs begins with ends by thread and engine; a step is complete if both were seen.

    A step whose end is missing ends, incomplete, when the next one begins on its thread, or with the thread.
    """

    layouts: dict[str, Any]
    finished: np.ndarray = field(default_factory=lambda: np.empty(0, STEP))
    """Steps that ended in the last batch."""
    open: np.ndarray = field(default_factory=lambda: np.empty(0, STEP))
    """Steps that have begun and not ended; `end_ns` is 0."""
    steps: int = 0
    decode_steps: int = 0

    def __post_init__(self) -> None:
        self._kinds = {self.layouts[name]["kind"]: name for name in KINDS}
        self._dtypes = {name: dtype_from_json(self.layouts[name]["fields"], self.layouts[name]["bytes"]) for name in KINDS}
        self._waiting = np.empty(0, MARK)

    def read(self, events: np.ndarray, until_ns: float) -> None:
        """Add a batch; records newer than `until_ns` wait, since older ones from another CPU may still arrive."""
        self.finished = self.finished[:0]
        if not len(events) and not len(self._waiting):
            return
        marks = np.concatenate((self._waiting, self._marks(events)))
        due = marks["ts"] <= until_ns
        self._waiting = marks[~due]
        if due.any():
            self._pair(marks[due])

    def _marks(self, events: np.ndarray) -> np.ndarray:
        kinds = kinds_of(events)
        rows = np.flatnonzero(is_any(kinds, tuple(self._kinds)))
        if not len(rows):
            return np.empty(0, MARK)
        slots, kinds = events[rows], kinds[rows]
        marks = np.empty(len(rows), MARK)
        marks["ts"], marks["pid"], marks["tid"] = column(slots, 0, 8), column(slots, 8, 4), column(slots, 12, 4)
        marks["engine"] = column(slots, 20, 1)
        marks["decode"], marks["position"] = False, 0
        for number, name in self._kinds.items():
            mine = kinds == number
            marks["what"][mine] = KINDS.index(name)
            if name == "token_begin" and mine.any():
                begun = records(slots[mine], self._dtypes[name])
                marks["position"][mine] = np.where(begun["position"] == NO_POSITION, 0, begun["position"])
                marks["decode"][mine] = (begun["phase"] == DECODE) | ((begun["phase"] == UNKNOWN) & (begun["n_tokens"] <= 1))
        return marks

    def _pair(self, marks: np.ndarray) -> None:
        marks = self._for_every_engine(np.concatenate((self._begun(), marks)))
        marks = marks[np.lexsort((marks["ts"], marks["engine"], marks["tid"]))]
        begins = marks["what"] == BEGIN
        same = (marks["tid"][1:] == marks["tid"][:-1]) & (marks["engine"][1:] == marks["engine"][:-1])
        followed = np.flatnonzero(begins[:-1] & same)
        done = steps(marks[followed])
        done["end_ns"] = marks["ts"][followed + 1]
        done["complete"] = marks["what"][followed + 1] == END
        self.finished = done
        self.open = steps(marks[np.flatnonzero(begins & ~np.append(same, False))])
        self.steps += int(done["complete"].sum())
        self.decode_steps += int((done["complete"] & done["decode"]).sum())

    def _for_every_engine(self, marks: np.ndarray) -> np.ndarray:
        """Repeat each thread exit for every engine, since it ends the steps of all engines that the thread runs."""
        exits = marks["what"] == EXIT
        parts = [marks[~exits]]
        for engine in np.unique(parts[0]["engine"]).tolist() if exits.any() else ():
            part = marks[exits]
            part["engine"] = engine
            parts.append(part)
        return np.concatenate(parts)

    def _begun(self) -> np.ndarray:
        marks = np.zeros(len(self.open), MARK)
        for name in ("tid", "engine", "pid", "position", "decode"):
            marks[name] = self.open[name]
        marks["ts"] = self.open["begin_ns"]
        return marks


def steps(begins: np.ndarray) -> np.ndarray:
    """Steps that begin at these marks and have not ended."""
    rows = np.zeros(len(begins), STEP)
    for name in ("pid", "tid", "engine", "position", "decode"):
        rows[name] = begins[name]
    rows["begin_ns"] = begins["ts"]
    return rows
