"""What a recording's files hold, found in one pass over them that keeps none of them in memory.

The kinds of STREAMED make up almost all of a long recording: they are read again, stretch by stretch. Those of the others are
few and kept whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from analyzer.spans import first_rows
from tracer.recording import BUSY, DISCARD, KIND_OFFSET, RING_HEADER_BYTES, STREAMS, Recording

STREAMED: tuple[str, ...] = (
    *("graph_begin", "graph_end", "op_begin", "op_wait", "op_end", "op_shares", "expert_begin", "expert_end", "route", "pmc"),
    *("sched_switch", "sched_waking", "sched_wakeup"),
)
IMPOSSIBLE_NS = 1 << 62
EVER = np.iinfo(np.int64).max
BLOCK = 1 << 16
"""Slots that are looked at in one go."""


def header(width: int) -> np.dtype:
    """The fields that every slot has."""
    at = RING_HEADER_BYTES
    fields = {
        "length": ("<u4", 0),
        "ts": ("<u8", at),
        "pid": ("<u4", at + 8),
        "tid": ("<u4", at + 12),
        "kind": ("<u2", KIND_OFFSET),
    }
    names, places = list(fields), list(fields.values())
    return np.dtype({"names": names, "formats": [p[0] for p in places], "offsets": [p[1] for p in places], "itemsize": width})


def kinds_of(slots: np.ndarray) -> np.ndarray:
    """The record kind of each slot; 0 for those that the kernel side discarded or never finished."""
    return np.where(slots["length"] & np.uint32(BUSY | DISCARD), np.uint16(0), slots["kind"])


def identities(pid: np.ndarray, address: np.ndarray) -> np.ndarray:
    """A number for each (process, address)."""
    return pid.astype(np.uint64) << np.uint64(48) ^ address.astype(np.uint64)


@dataclass
class Stream:
    """One file: its number of slots, and the first and last time within each block of slots (EVER, -1: no record in it)."""

    slots: int
    first: np.ndarray
    last: np.ndarray


@dataclass
class Few:
    """The slots of one kind, as they lie in the file."""

    slots: list[np.ndarray] = field(default_factory=list)
    position: list[np.ndarray] = field(default_factory=list)


class Contents:
    """The pass over the files of a recording."""

    def __init__(self, recording: Recording, block: int = BLOCK):
        self.recording, self.block = recording, block
        self.names = {number: kind for kind, (number, _) in recording.layouts.items()}
        self.counts: dict[int, int] = {}
        self.discarded = self.damaged = 0
        self.few: dict[int, Few] = {}
        self.processes: dict[str, dict[int, int]] = {}
        """By kind: the process of each thread that wrote one; of `sched_switch`, only of threads that were switched out."""
        self.tensors = np.empty(0, np.uint64)
        """Identities of the distinct results of op_begin."""
        self.nodes = np.empty((0, 2), np.uint64)
        """Distinct nodes of op_shares: the graph's identity and the node's place."""
        self.streams = {name: self._scan(name) for name in STREAMS}
        seen = [(s.first.min(), s.last.max()) for s in self.streams.values() if len(s.first) and s.last.max() >= 0]
        self.first_ns = int(min((first for first, _ in seen), default=0))
        self.last_ns = int(max((last for _, last in seen), default=0))

    def _scan(self, stream: str) -> Stream:
        total = self.recording.slot_count(stream)
        first, last = [], []
        for start in range(0, total, self.block):
            low, high = self._block(self.mapped(stream, start, min(start + self.block, total)), start)
            first.append(low)
            last.append(high)
        return Stream(total, np.array(first, np.int64), np.array(last, np.int64))

    def mapped(self, stream: str, begin: int, end: int) -> np.ndarray:
        """Slots begin to end, mapped from the file for as long as the answer is kept."""
        return self.recording.map_slots(stream, begin, end).view(header(STREAMS[stream]))[:, 0]

    def _block(self, slots: np.ndarray, start: int) -> tuple[int, int]:
        """Take note of one block; its first and last time."""
        kinds, ts = kinds_of(slots), slots["ts"]
        written = kinds > 0
        present = np.bincount(kinds)
        for number, count in zip(np.flatnonzero(present).tolist(), present[present > 0].tolist(), strict=True):
            if number:
                self.counts[number] = self.counts.get(number, 0) + count
                self._kind(number, slots, np.flatnonzero(kinds == number), start)
            else:
                self.discarded += int(np.count_nonzero(slots["length"] & np.uint32(BUSY | DISCARD)))
        good = ts[written] if not written.all() else ts
        if len(good) and good.max() >= IMPOSSIBLE_NS:
            self.damaged += int(np.count_nonzero(good >= IMPOSSIBLE_NS))
            good = good[good < IMPOSSIBLE_NS]
        return (int(good.min()), int(good.max())) if len(good) else (EVER, -1)

    def _kind(self, number: int, slots: np.ndarray, rows: np.ndarray, start: int) -> None:
        """Keep what is few, and of the rest what later questions need."""
        name = self.names.get(number)
        if name is None:
            return
        if name not in STREAMED:
            few = self.few.setdefault(number, Few())
            few.slots.append(slots.view(f"V{slots.dtype.itemsize}")[rows])
            few.position.append(rows + start)
            return
        if name == "sched_switch":
            prev = self._field(slots, name, "prev_tid")
            rows = rows[slots["tid"][rows] == prev[rows]]
        tid = slots["tid"][rows]
        threads, first = first_rows(tid)
        known = self.processes.setdefault(name, {})
        for thread, pid in zip(threads.tolist(), slots["pid"][rows[first]].tolist(), strict=True):
            known.setdefault(thread, pid)
        if name == "op_begin":
            key = identities(slots["pid"][rows], self._field(slots, name, "tensor")[rows])
            self.tensors = pd.unique(np.concatenate((self.tensors, pd.unique(key))))
        elif name == "op_shares":
            self._shares(slots, rows)

    def _shares(self, slots: np.ndarray, rows: np.ndarray) -> None:
        graph, count, node = (self._field(slots, "op_shares", name)[rows] for name in ("graph", "count", "node"))
        if node.ndim < 2:
            return
        key = identities(slots["pid"][rows], graph)
        graphs, inverse = np.unique(key, return_inverse=True)
        inside = np.arange(node.shape[1]) < count[:, None]
        both = np.repeat(inverse.astype(np.int64), inside.sum(axis=1)) << 16 | node[inside]
        distinct = pd.unique(both)
        pairs = np.stack((graphs[distinct >> 16], (distinct & 0xFFFF).astype(np.uint64)), axis=1)
        self.nodes = np.unique(np.concatenate((self.nodes, pairs)), axis=0)

    def _field(self, slots: np.ndarray, kind: str, name: str) -> np.ndarray:
        """A field of slots that are taken to be of one kind; zeros where the recording does not have it."""
        dtype = self.recording.layouts[kind][1]
        if name not in (dtype.names or ()):
            return np.zeros(len(slots), np.uint64)
        whole = np.dtype({"names": ["r"], "formats": [dtype], "offsets": [RING_HEADER_BYTES], "itemsize": slots.dtype.itemsize})
        return slots.view(whole)["r"][name]

    def between(self, stream: str, begin_ns: int, end_ns: int) -> tuple[np.ndarray, np.ndarray, int]:
        """(slots, their kinds, number of the first): everything from begin_ns on and before end_ns; other kinds read 0."""
        index = self.streams[stream]
        blocks = np.flatnonzero((index.last >= begin_ns) & (index.first < end_ns))
        if len(blocks) == 0:
            return np.empty(0, header(STREAMS[stream])), np.empty(0, np.uint16), 0
        start, stop = int(blocks[0]) * self.block, min(int(blocks[-1] + 1) * self.block, index.slots)
        slots = self.mapped(stream, start, stop)
        kinds, ts = kinds_of(slots), slots["ts"]
        kinds[(ts < max(begin_ns, 0)) | (ts >= min(end_ns, IMPOSSIBLE_NS))] = 0
        return slots, kinds, start

    def stretches(self, cuts: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
        """Stretches of time that tile everything, cut at some of `cuts` (sorted): each holds about `most` records, if it can."""
        held = np.zeros(len(cuts), np.int64)
        for stream in self.streams.values():
            held += np.searchsorted(np.sort(stream.first), cuts) * self.block
        total = sum(stream.slots for stream in self.streams.values())
        begin, taken, at = -1, 0, 0
        while at < len(cuts) and total - taken > most:
            at = max(at, int(np.searchsorted(held, taken + most, "right")) - 1)
            yield begin, int(cuts[at])
            begin, taken, at = int(cuts[at]), int(held[at]), at + 1
        yield begin, EVER
