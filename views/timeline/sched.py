"""Scheduling as ftrace bundles, from which Perfetto draws CPU tracks, thread states and wakers.

Switches have the compact form, in which a switch's `prev` is the previous `next` on that cpu. Only switches that involve
the traced program are recorded. A change between two other threads is written at the time at which the next recorded
switch proves it: times of other threads are upper bounds, after which they sleep. A thread of the program leaves its cpu
without a record when it exits; the time is then from `thread_states`. Perfetto ignores the waking of a thread that still runs,
falling asleep: it is written at the wake-up behind its switch. The program's own times are exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import FtraceEvent

from analyzer.records.schema import Tables
from analyzer.records.spans import NONE, latest
from views.timeline.columns import integer_codes, rows_equal
from views.timeline.protobuf import Form, encode, field_bytes, packed_varints, tag, valid_text, varint_bytes
from views.timeline.trace_file import Packets

TRACE_PACKET, FTRACE_EVENTS = 1, 1
CPU, EVENT, COMPACT = 1, 2, 4
SWITCH_TIMESTAMP, SWITCH_STATE, SWITCH_PID, SWITCH_PRIO, INTERN_TABLE, SWITCH_COMM = 1, 2, 3, 4, 5, 6
SCHED_WAKING = 20
UNKNOWN_PRIO, SLEEPING, ENDED, IDLE = 120, 1, 0x30, 0x80
"""ENDED: bits of dead and zombie, which the UI draws to the end of the trace; IDLE, which it does not draw, takes their place."""
BATCH = 1 << 16
FOREVER = np.iinfo(np.int64).max
TABLES = ("threads", "sched", "thread_states")
COLUMNS, RECORDED = ("ts", "prev", "next", "state", "prio"), ("ts_ns", "prev_tid", "next_tid", "prev_state", "next_prio")


@dataclass
class CpuSwitches:
    """Switches of one cpu in order, as columns."""

    ts: np.ndarray
    prev: np.ndarray
    next: np.ndarray
    state: np.ndarray
    prio: np.ndarray

    def take(self, rows: np.ndarray | slice) -> "CpuSwitches":
        """The switches in these rows."""
        return CpuSwitches(self.ts[rows], self.prev[rows], self.next[rows], self.state[rows], self.prio[rows])


@dataclass
class RunningIntervals:
    """The running intervals of threads, sorted by begin."""

    tid: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, states: pd.DataFrame) -> "RunningIntervals":
        """From `thread_states`."""
        rows = np.flatnonzero(rows_equal(states["state"], "running"))
        tid, begin, end = (states[name].to_numpy(np.int64)[rows] for name in ("tid", "begin_ns", "end_ns"))
        order = np.argsort(begin, kind="stable")
        return cls(tid[order], begin[order], end[order])

    def until(self, tid: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """The end of the interval in which each thread began to run at `ts`; -1 if unknown."""
        ends, place = np.full(len(ts), -1), np.searchsorted(self.begin, ts)
        rows = np.arange(len(ts))
        while len(rows):
            place = place[(in_range := place < len(self.begin))]
            rows = rows[in_range]
            same = self.begin[place] == ts[rows]
            rows, place = rows[same], place[same]
            matched = self.tid[place] == tid[rows]
            ends[rows[matched]] = self.end[place[matched]]
            rows, place = rows[~matched], place[~matched] + 1
        return ends


def chain_switches(switches: CpuSwitches, running: RunningIntervals) -> CpuSwitches:
    """The switches of one cpu with unrecorded ones added: between other threads, and away from threads that exit."""
    after, until = np.append(switches.prev[1:], -1), np.append(switches.ts[1:], FOREVER)
    odd = np.flatnonzero(switches.next != after)
    before, after, until = switches.take(odd), after[odd], until[odd]
    end = running.until(before.next, before.ts)
    exited = (end >= before.ts) & (end <= until)
    real = np.flatnonzero(exited | (until < FOREVER))
    filled = CpuSwitches(
        ts=np.where(exited, end, until)[real],
        prev=before.next[real],
        next=np.maximum(after, 0)[real],
        state=np.where(exited, IDLE, SLEEPING)[real],
        prio=np.full(len(real), UNKNOWN_PRIO),
    )
    behind = odd[real] + 1
    return CpuSwitches(*(np.insert(getattr(switches, name), behind, getattr(filled, name)) for name in COLUMNS))


def first_switch(row: pd.Series, boot: int, name: str) -> bytes:
    """The first switch of a cpu in the full form, which the compact ones continue."""
    event = FtraceEvent(timestamp=row.ts_ns + boot, pid=row.prev_tid)
    switch, event.sched_switch.next_comm = event.sched_switch, valid_text(name)
    switch.prev_pid, switch.prev_prio, switch.prev_state = row.prev_tid, max(row.prev_prio, 0), max(row.prev_state, 0)
    switch.next_pid, switch.next_prio = row.next_tid, max(row.next_prio, 0)
    return field_bytes(EVENT, event.SerializeToString())


def compact_switches(switches: CpuSwitches, boot: int, names: dict[int, str]) -> bytes:
    """A batch of switches in packed columns."""
    comm, tids = integer_codes(switches.next)
    columns = (
        (SWITCH_TIMESTAMP, np.diff(switches.ts, prepend=-boot)),
        (SWITCH_STATE, np.maximum(switches.state, 0)),
        (SWITCH_PID, switches.next),
        (SWITCH_PRIO, np.maximum(switches.prio, 0)),
        (SWITCH_COMM, comm),
    )
    table = b"".join(field_bytes(INTERN_TABLE, names.get(int(tid), "").encode(errors="replace")) for tid in tids)
    return field_bytes(COMPACT, b"".join(field_bytes(field, packed_varints(values)) for field, values in columns) + table)


def waking_events(columns: dict[str, np.ndarray], rows: np.ndarray, boot: int) -> bytes:
    """A batch of wakings in the full form: the compact form lacks the waker. A new thread is woken by its creator."""
    ts, by, woken, prio, cpu = (columns[name][rows] for name in ("ts_ns", "prev_tid", "next_tid", "next_prio", "target_cpu"))
    form = Form().open(EVENT).varint(1, ts + boot).varint(2, by).open(SCHED_WAKING)
    form.varint(2, woken).varint(3, np.maximum(prio, 0)).varint(5, np.maximum(cpu, 0)).close().close()
    return encode(form, len(rows))[0]


def drawn_ns(columns: dict[str, np.ndarray], switched: np.ndarray, waking: np.ndarray, wakeup: np.ndarray) -> np.ndarray:
    """The time of each event; of a waking whose thread is switched out before its wake-up, that of the wake-up."""
    ts, prev, woken = (columns[name] for name in ("ts_ns", "prev_tid", "next_tid"))

    def before(rows: np.ndarray, tid: np.ndarray) -> np.ndarray:
        """The last of `rows` of each wake-up's thread; -1 for none."""
        place = np.flatnonzero(rows)
        return np.append(place, NONE)[latest(tid[place], ts[place], woken[wakeup], ts[wakeup])]

    out, by = before(switched, prev), before(waking, woken)
    late = (out >= 0) & (by >= 0) & (ts[by] < ts[out])
    drawn = ts.copy()
    drawn[by[late]] = ts[wakeup][late]
    return drawn


def bundle_packet(cpu: int, body: bytes) -> bytes:
    """One packet of one cpu."""
    return field_bytes(TRACE_PACKET, field_bytes(FTRACE_EVENTS, tag(CPU, 0) + varint_bytes(cpu) + body))


@dataclass
class SchedulingEvents:
    """The scheduling events of all cpus as columns; `boot` is CLOCK_BOOTTIME - CLOCK_MONOTONIC."""

    events: pd.DataFrame
    columns: dict[str, np.ndarray]
    switched: np.ndarray
    woken: np.ndarray
    running: RunningIntervals
    names: dict[int, str]
    boot: int

    @classmethod
    def of(cls, tables: Tables, boot: int) -> "SchedulingEvents":
        """From the tables."""
        names = dict(zip(tables["threads"]["tid"].tolist(), tables["threads"]["name"].tolist(), strict=True)) | {0: "swapper"}
        events, running = tables["sched"], RunningIntervals.of(tables["thread_states"])
        columns = {name: column.to_numpy(np.int64) for name, column in events.items() if name != "event"}
        state = columns["prev_state"]
        columns["prev_state"] = np.where((state > 0) & (state & ENDED > 0), IDLE, state)
        switched, waking, wakeup, forked = (
            rows_equal(events["event"], event) for event in ("switch", "waking", "wakeup", "fork")
        )
        columns["ts_ns"] = drawn_ns(columns, switched, waking, wakeup)
        return cls(events, columns, switched, waking | forked, running, names, boot)

    def packets(self, cpu: int) -> Packets:
        """All packets of one cpu."""
        counts, parts = zip((0, b""), *self.batches(cpu), strict=True)
        return sum(counts), b"".join(parts)

    def batches(self, cpu: int) -> Iterator[Packets]:
        """The events of one cpu, batch by batch."""
        of_cpu = np.flatnonzero((self.columns["cpu"] == cpu) & (self.switched | self.woken))
        of_cpu = of_cpu[np.argsort(self.columns["ts_ns"][of_cpu], kind="stable")]
        recorded, wakes = of_cpu[self.switched[of_cpu]], of_cpu[self.woken[of_cpu]]
        if len(recorded):
            first = self.events.iloc[recorded[0]]
            yield 1, bundle_packet(cpu, first_switch(first, self.boot, self.names.get(int(first.next_tid), "")))
        switches = chain_switches(CpuSwitches(*(self.columns[name][recorded] for name in RECORDED)), self.running)
        for start in range(1, len(switches.ts), BATCH):
            part = switches.take(slice(start, start + BATCH))
            yield len(part.ts), bundle_packet(cpu, compact_switches(part, self.boot, self.names))
        for start in range(0, len(wakes), BATCH):
            some = wakes[start : start + BATCH]
            yield len(some), bundle_packet(cpu, waking_events(self.columns, some, self.boot))
