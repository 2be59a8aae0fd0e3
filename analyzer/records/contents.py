"""The contents of a recording's files, collected in one pass that keeps none of them in memory.

The kinds in STREAMED make up almost all of a long recording and are read again, one time range after the other. Records of the
other kinds are few and kept in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from analyzer.records.slot_columns import SlotsByKind, by_kind, columns_of, drop_impossible, first_occurrences, possible_times
from analyzer.records.spans import EVER, number_rows
from tracer.recording.format import STREAMS, Recording

STREAMED: tuple[str, ...] = (
    *("graph_begin", "graph_end", "op_begin", "op_wait", "op_end", "op_shares", "expert_begin", "expert_end", "route", "pmc"),
    *("sched_switch", "sched_waking", "sched_wakeup"),
)
BLOCK = 1 << 16
"""Slots that are processed at once."""
RANGE = 1 << 19
"""Records per time range: enough for joins to be cheap, few enough for the CPU's caches."""
THREAD_KINDS = ("graph_begin", "op_begin", "op_shares", "expert_begin", "sched_switch")
"""Kinds in STREAMED with threads and processes that are needed later (analyzer/tables/sched.py)."""


def address_numbers(pid: np.ndarray, address: np.ndarray) -> np.ndarray:
    """A number for each (process, address)."""
    return pid.astype(np.uint64) << np.uint64(48) ^ address.astype(np.uint64)


@dataclass
class SlotStream:
    """One file: its number of slots, and the first and last time in each block of slots (EVER and -1: no record in it)."""

    slots: int
    first: np.ndarray
    last: np.ndarray


@dataclass
class SlotSelection:
    """The slots of one kind, in file order."""

    slots: list[np.ndarray] = field(default_factory=list)
    position: list[np.ndarray] = field(default_factory=list)


class Contents:
    """Reads the files of a recording once and keeps counts, the records of rare kinds, and the time range of each block."""

    def __init__(self, recording: Recording, block: int = BLOCK):
        self.recording, self.block = recording, block
        self.names = {number: kind for kind, (number, _) in recording.layouts.items()}
        self.counts: dict[int, int] = {}
        self.discarded = self.damaged = 0
        self.few: dict[int, SlotSelection] = {}
        self.processes: dict[str, dict[int, int]] = {}
        """By kind: the process of each thread that wrote one; of `sched_switch`, only of threads that were switched out."""
        self.possible = possible_times([self.mapped(name, 0, recording.slot_count(name)) for name in STREAMS])
        """First and last time that a record can have; others are damaged."""
        self.streams = {name: self._scan(name) for name in STREAMS}
        extents = [(s.first.min(), s.last.max()) for s in self.streams.values() if len(s.first) and s.last.max() >= 0]
        self.first_ns = int(min((first for first, _ in extents), default=0))
        self.last_ns = int(max((last for _, last in extents), default=0))

    def _scan(self, stream: str) -> SlotStream:
        total = self.recording.slot_count(stream)
        first, last = [], []
        for start in range(0, total, self.block):
            low, high = self._block(self.mapped(stream, start, min(start + self.block, total)), start)
            first.append(low)
            last.append(high)
        return SlotStream(total, np.array(first, np.int64), np.array(last, np.int64))

    def mapped(self, stream: str, begin: int, end: int) -> np.ndarray:
        """Slots begin to end as raw bytes, mapped from the file for as long as the returned array exists."""
        return np.asarray(self.recording.map_slots(stream, begin, end)).view(f"V{STREAMS[stream]}")[:, 0]

    def by_kind(self, stream: str, begin: int, end: int) -> SlotsByKind:
        """Slots begin to end of a stream by record kind, with their first and last time."""
        slots = self.mapped(stream, begin, end)
        return drop_impossible(by_kind(slots), slots, self.possible)

    def _block(self, slots: np.ndarray, start: int) -> tuple[int, int]:
        """Add one block to the counts; returns its first and last time."""
        kinds = drop_impossible(by_kind(slots), slots, self.possible)
        self.discarded += kinds.discarded
        self.damaged += kinds.damaged
        for number, rows in kinds.rows.items():
            self.counts[number] = self.counts.get(number, 0) + len(rows)
            self._kind(number, slots, rows, start)
        return (kinds.first_ns, kinds.last_ns) if sum(map(len, kinds.rows.values())) > kinds.damaged else (EVER, -1)

    def _kind(self, number: int, slots: np.ndarray, rows: np.ndarray, start: int) -> None:
        """Keep the records of rare kinds; of the others, keep their threads."""
        name = self.names.get(number)
        if name is None:
            return
        if name not in STREAMED:
            few = self.few.setdefault(number, SlotSelection())
            few.slots.append(slots[rows])
            few.position.append(rows + start)
            return
        if name in THREAD_KINDS:
            self._threads(name, slots, rows)

    def _threads(self, name: str, slots: np.ndarray, rows: np.ndarray) -> None:
        """Add the threads of one kind and their processes."""
        dtype = self.recording.layouts[name][1]
        names = [of for of in ("pid", "tid", "prev_tid") if of in (dtype.names or ())]
        new = first_occurrences(slots, rows, dtype, names)
        fields = columns_of(slots, new, dtype, names)
        picked = np.flatnonzero(fields["tid"] == fields.get("prev_tid", 0)) if name == "sched_switch" else np.arange(len(new))
        picked = picked[number_rows(fields["tid"][picked])[1]]
        processes = self.processes.setdefault(name, {})
        for thread, pid in zip(fields["tid"][picked].tolist(), fields["pid"][picked].tolist(), strict=True):
            processes.setdefault(thread, pid)

    def between(self, stream: str, begin_ns: int, end_ns: int) -> tuple[np.ndarray, dict[int, np.ndarray], int]:
        """(slots, rows of each kind among them, number of the first slot) of the records in [begin_ns, end_ns)."""
        index = self.streams[stream]
        blocks = np.flatnonzero((index.last >= begin_ns) & (index.first < end_ns))
        if len(blocks) == 0:
            return np.empty(0, f"V{STREAMS[stream]}"), {}, 0
        start, stop = int(blocks[0]) * self.block, min(int(blocks[-1] + 1) * self.block, index.slots)
        slots = self.mapped(stream, start, stop)
        earliest, latest = self.possible
        return slots, by_kind(slots, max(begin_ns, earliest), min(end_ns, latest + 1)).rows, start

    def stretches(self, cuts: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
        """Time ranges that tile the recording, cut at some of the sorted `cuts`; about `most` records in each where possible."""
        before = np.zeros(len(cuts), np.int64)
        for stream in self.streams.values():
            before += np.searchsorted(np.sort(stream.first), cuts) * self.block
        total = sum(stream.slots for stream in self.streams.values())
        begin, taken, cut = -1, 0, 0
        while cut < len(cuts) and total - taken > most:
            cut = max(cut, int(np.searchsorted(before, taken + most, "right")) - 1)
            yield begin, int(cuts[cut])
            begin, taken, cut = int(cuts[cut]), int(before[cut]), cut + 1
        yield begin, EVER
