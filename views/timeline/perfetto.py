"""`trace.pftrace`: the tables as a native Perfetto trace.

    threads    step ⊃ graph ⊃ operator ⊃ expert, cache loads, QNN calls, reads and major faults, long waits, on their threads
    samples    of stacks, by thread
    NPU        host stages, QNN Execute, QNN Device, QNN Node, threads of an optrace; a flow leads from a graph to its execution
    flows      also from a prefetch to the expert run that used the loaded expert
    cpus       the kernel's scheduling events
    process    counters: cache, faults, clocks and heat, power, decode speed, loads and NPU executions in flight
    time       the cause of each moment of a step
    marks      slow steps; levels switched off and on; losses

Times are CLOCK_MONOTONIC; scheduling is CLOCK_BOOTTIME, as Perfetto requires, with the offset read when recording began.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as compute
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    CounterDescriptor,
    ProcessDescriptor,
    ThreadDescriptor,
    TracePacket,
    TrackDescriptor,
)

from analyzer.records.memory import keep_freed_memory
from analyzer.records.schema import TABLES, Tables
from analyzer.records.stamps import recording_stamp
from analyzer.tables.store import LazyTables
from moescope.scratch import replaced_file
from views.timeline import marks, npu_slices, sched, stacks
from views.timeline.columns import drawn_frame, integer_codes
from views.timeline.protobuf import field_bytes, valid_text
from views.timeline.sequence import PACKET, Level, Names, TrackEvents, counter_packets, head, slice_packets, track_opening
from views.timeline.slices import Slices, close_open, on_program
from views.timeline.threads import WORK, WORKING, shown_processes, thread_pids
from views.timeline.trace_file import Packets, TraceFile, usable_cpus

BOOTTIME, MONOTONIC, REALTIME = 6, 3, 1
GLOBAL_SEQUENCE = 1
PROCESS, THREAD, EXTRA = 1 << 40, 2 << 40, 3 << 40
DRAWN = (*WORKING, "op_threads", "threads", "counters", "clocks", "rails", "power", "stacks", "frames")
Progress = Callable[[str], None]


@dataclass
class TraceCounts:
    """Counts of a written trace."""

    events: int = 0
    slices: int = 0
    bytes: int = 0


class TraceWriter:
    """Writes one trace; called through `write_trace`."""

    def __init__(self, manifest: dict[str, Any], tables: LazyTables, out: TraceFile):
        self.manifest, self.out, self.arrow, self.tables = manifest, out, tables, private_frames(tables, DRAWN)
        self.npu_tracks = out.begin(
            partial(npu_slices.npu_tracks, manifest, private_frames(tables, set(tables) & npu_slices.TABLES))
        )
        self.time_slices = out.begin(partial(marks.time_slices, private_frames(tables, marks.TIME_TABLES)))
        self.written, self.names = TraceCounts(), Names()
        self.sequence, self.extra = GLOBAL_SEQUENCE, EXTRA
        self.roles: dict[int, str] = {}
        self.shown: dict[int, int] = {}
        self.pids = thread_pids(manifest, self.tables)
        target = manifest.get("target") or {}
        self.pid = int(target.get("pid") or next(iter(self.pids.values()), 1))
        self.start, self.end = extent(tables)

    def packet(self, packet: TracePacket) -> None:
        """Append one packet of the global sequence."""
        packet.trusted_packet_sequence_id = GLOBAL_SEQUENCE
        self.out.emit(field_bytes(PACKET, packet.SerializeToString()))

    def header(self) -> int:
        """The recording's stamp, machine and clocks; returns CLOCK_BOOTTIME - CLOCK_MONOTONIC."""
        self.system()
        clocks = self.manifest.get("clocks") or [{}]
        monotonic = clocks[0].get("monotonic_ns", self.start)
        boottime, realtime = clocks[0].get("boottime_ns", monotonic), clocks[0].get("realtime_ns")
        packet = TracePacket(sequence_flags=TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
        readings = ((BOOTTIME, boottime), (MONOTONIC, monotonic), (REALTIME, realtime))
        for clock, reading in readings:
            if reading is not None:
                packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=reading)
        self.packet(packet)
        return int(boottime - monotonic)

    def system(self) -> None:
        """The recording's stamp and machine, in the fields that Perfetto shows as trace and system information."""
        machine = self.manifest.get("machine") or {}
        packet = TracePacket()
        packet.system_info.tracing_service_version = recording_stamp(self.manifest)
        packet.system_info.utsname.sysname = "Linux"
        packet.system_info.utsname.release = str(machine.get("kernel", ""))
        packet.system_info.utsname.machine = str(machine.get("arch", ""))
        self.packet(packet)

    def track(self, uuid: int, parent: int | None = None, **fields: Any) -> None:
        """Describe a track."""
        self.packet(TracePacket(track_descriptor=TrackDescriptor(uuid=uuid, parent_uuid=parent, **fields)))

    def new_track(self, name: str, parent: int | None = None, **fields: Any) -> int:
        """A track that is neither a process nor a thread; returns its uuid."""
        self.extra += 1
        self.track(self.extra, parent, name=valid_text(name), **fields)
        return self.extra

    def processes(self) -> None:
        """Describe processes and threads; threads known only from scheduling are in a separate, collapsed process."""
        for process in shown_processes(self.manifest, self.tables, self.pids, self.pid):
            name, command = valid_text(process.name), map(valid_text, process.command)
            described = ProcessDescriptor(pid=process.pid, process_name=name, cmdline=command)
            self.track(PROCESS | process.pid, process=described)
            for tid, name in process.threads:
                self.roles[tid], self.shown[tid] = name, process.pid
                thread = ThreadDescriptor(pid=process.pid, tid=tid, thread_name=valid_text(name))
                self.track(THREAD | tid, PROCESS | process.pid, thread=thread)

    def draw(self, levels: list[Level], rows: list[np.ndarray], track: int, overflow: Callable[[], int]) -> None:
        """Draw rows of some levels on one track; slices that do not nest go to the tracks that `overflow` makes."""
        for k, events in enumerate(TrackEvents.of(levels, rows).lanes()):
            self.sequence_of(events, overflow() if k else track)

    def sequence_of(self, events: TrackEvents, track: int) -> None:
        """Write one sequence: its head, then its events."""
        self.sequence += 1
        self.out.later(partial(track_opening, self.sequence, track, events, self.names, self.start))
        for job in slice_packets(self.sequence, events, self.start):
            self.out.later(job)
        self.written.slices += int((events.order < 0).sum())

    def level(self, slices: Slices) -> Level:
        """Slices as TrackEvents; their encoding may run on other threads."""
        level = Level.of(close_open(slices, self.end), self.names)
        level.parts = self.out.begin(level.encoded)
        return level

    def threads(self) -> None:
        """Write every slice of the program, thread by thread."""
        levels = [self.level(slices) for slices in on_program(self.tables)]
        by_tid = [groups_by(level.slices.tid) for level in levels]
        for tid in sorted({tid for groups in by_tid for tid in groups}):
            rows = [groups.get(tid, np.empty(0, np.int64)) for groups in by_tid]
            name = f"{WORK} {self.roles.get(tid) or 'thread'}"
            self.draw(levels, rows, self.new_track(name, THREAD | tid), partial(self.new_track, "overlapping", THREAD | tid))

    def group(self, title: str, tracks: Sequence[tuple[str, Slices | None]]) -> None:
        """Write a group of tracks in this order."""
        group = self.new_track(title, child_ordering=TrackDescriptor.EXPLICIT)
        for rank, (name, slices) in enumerate(tracks):
            if slices is not None:
                make = partial(self.new_track, name, group, sibling_order_rank=rank)
                self.draw([self.level(slices)], [np.arange(len(slices))], make(), make)

    def npu(self) -> None:
        """Write the NPU's group of tracks."""
        if tracks := self.npu_tracks():
            self.group(npu_slices.group_name(self.manifest), tracks)

    def samples(self) -> None:
        """Write the samples of stacks as a sequence of their own."""
        if len(self.tables["samples"]):
            self.sequence += 1
            hz = int((self.manifest.get("stacks") or {}).get("hz") or 0)
            self.out.emit(stacks.sample_head(self.tables, self.sequence, hz))
            self.out.later(partial(stacks.sample_packets, private_frames(self.arrow, ["samples"]), self.sequence, self.shown))

    def counters(self) -> None:
        """Write the counters as tracks of the process."""
        for name, ts, values in marks.counter_tracks(self.tables):
            uuid = self.new_track(name, PROCESS | self.pid, counter=counter_unit(name))
            self.sequence += 1
            self.out.emit(head(self.sequence, uuid, {}, self.names, self.start))
            self.out.later(partial(counter_packets, self.sequence, ts, values, self.start))

    def marks(self) -> None:
        """Write tracks of the program: time of steps, slow steps, and gaps in the recording."""
        tracks = (
            ("time", self.time_slices()),
            ("slow steps", marks.slow_steps(self.tables)),
            ("missing from this recording", marks.gap_slices(self.manifest, self.end)),
        )
        self.group(marks.GROUP, tracks)

    def scheduling(self, boot: int) -> None:
        """The kernel's scheduling events."""
        switching = self.out.begin(partial(sched.SchedulingEvents.of, private_frames(self.arrow, sched.TABLES), boot))
        for cpu in sorted(self.arrow.arrow("sched")["cpu"].unique().to_pylist()):
            self.out.later(partial(scheduling_of, switching, cpu))

    def write(self, progress: Progress) -> TraceCounts:
        """Write everything."""
        boot = self.header()
        self.processes()
        progress("scheduling")
        self.scheduling(boot)
        parts = {"threads": self.threads, "stacks": self.samples, "NPU": self.npu, "counters": self.counters, "marks": self.marks}
        for name, step in parts.items():
            progress(name)
            step()
        self.out.finish()
        self.written.events = self.out.events
        return self.written


def scheduling_of(switching: Callable[[], sched.SchedulingEvents], cpu: int) -> Packets:
    """One cpu's scheduling, waiting for the columns if necessary."""
    return switching().packets(cpu)


def counter_unit(name: str) -> CounterDescriptor:
    """A counter's unit, from the end of its name."""
    if name.endswith("bytes"):
        return CounterDescriptor(unit=CounterDescriptor.UNIT_SIZE_BYTES)
    known = next((unit for unit in ("tokens/s", "MHz", "°C", "W") if unit in name.split()), None)
    return CounterDescriptor(unit_name=known) if known else CounterDescriptor(unit=CounterDescriptor.UNIT_COUNT)


def private_frames(tables: LazyTables, names: Iterable[str]) -> dict[str, pd.DataFrame]:
    """The tables as new frames for one thread, since pandas objects must not be shared between threads."""
    return {name: drawn_frame(tables.arrow(name)) if name in TABLES else tables[name] for name in names}


def groups_by(tid: np.ndarray) -> dict[int, np.ndarray]:
    """tid → its row numbers, in order."""
    code, tids = integer_codes(tid)
    if len(tids) == 1:
        return {int(tids[0]): np.arange(len(tid))}
    order = np.argsort(code.astype(np.min_scalar_type(len(tids))), kind="stable")
    return dict(zip(map(int, tids), np.split(order, np.cumsum(np.bincount(code))[:-1]), strict=True))


def extent(tables: Tables) -> tuple[int, int]:
    """First and last time in the tables."""
    loaded = LazyTables.of(tables)
    named = ((loaded.arrow(name), column) for name in loaded if name in TABLES for column in ("begin_ns", "ts_ns", "end_ns"))
    spans = [compute.min_max(table[column]).as_py() for table, column in named if table.num_rows and column in table.column_names]
    return (min(span["min"] for span in spans), max(span["max"] for span in spans)) if spans else (0, 0)


def write_trace(
    manifest: dict[str, Any],
    tables: Tables,
    path: Path,
    progress: Progress = lambda step: None,
    zipped: bool = False,
    threads: int | None = None,
) -> TraceCounts:
    """Write the trace of a recording to `path`, which is replaced only when the trace is complete; `zipped`: as gzip.

    `threads` share the work (None: one per usable CPU); the bytes are the same for any number of them.
    """
    keep_freed_memory()
    with replaced_file(path) as partial:
        with partial.open("wb") as file, TraceFile(file, threads or usable_cpus(), zipped) as out:
            written = TraceWriter(manifest, LazyTables.of(tables), out).write(progress)
        written.bytes = partial.stat().st_size
    return written
