"""Steps of a program that no engine declares: an event of its own that recurs, with about the same work or time in between.

Events are small writes to one descriptor by one thread, as of a token's text, and reads of one place in a file by one process, as
of a layer's weights. A program in which none recurs so for at least half of the time has no steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.compute

from analyzer.records.manifest import listed_items
from analyzer.records.reading import FOUND, USER, Source, pick_names
from analyzer.records.rows import RecordSpans, Rows
from analyzer.records.schema import Columns
from analyzer.records.spans import NONE
from analyzer.tables.io import FilePaths
from analyzer.tables.sched import OpenStates, target_threads
from analyzer.tables.sequences import NO_SETS
from analyzer.tables.steps import Steps

WRITE_CALLS = np.array(["write", "writev", "sendto"], object)
LEAST = 16
"""Fewer recurrences than this show no steps."""
REGULAR, NEAR, AROUND = 0.7, 0.25, 9
"""So many of the intervals last, or compute, as long as the median of the 9 around, within this share."""
COVERED = 0.5
"""Least share of the recording in which the event recurs."""
AT_ONCE_NS = 200_000
"""Events that follow each other so fast are one, if such bursts ..."""
BRIEF = 0.1
"""... last for at most this share of the time."""
SMALL_BYTES = 1024
"""Larger writes empty a buffer: when, is up to its size."""
SHOWN = 20
KERNEL = "kernel"


@dataclass(frozen=True)
class Recurrence:
    """An event of a thread that recurs at times `ts`."""

    what: str
    pid: int
    tid: int
    fd: int
    place: tuple[int, int, int]
    """Device, inode and offset of a read; -1 else."""
    ts: np.ndarray


@dataclass(frozen=True)
class Stretch:
    """The part of a recurrence, from one event to another, in which it is regular."""

    of: Recurrence
    first: int
    last: int
    regular: float
    """Share of intervals that are as long as those around."""
    covered: float
    """Share of the recording that it lasts."""

    @property
    def ts(self) -> np.ndarray:
        """The times of its events."""
        return self.of.ts[self.first : self.last + 1]

    @property
    def is_step(self) -> bool:
        """Whether its events begin steps."""
        return self.last - self.first >= LEAST and self.covered >= COVERED


def is_undeclared(source: Source) -> bool:
    """Whether the program has no steps of an engine's, and no engine's probe was placed."""
    engines = {probe.get("engine") for probe in listed_items(source.manifest.get("probes"), dict)}
    return KERNEL in engines and engines <= {KERNEL, source.engine_names[USER]} and not len(source.rows("token_begin"))


def ends_of_bursts(ts: np.ndarray) -> np.ndarray:
    """The last of events that follow each other at once; none if that is how the program spends its time."""
    apart = np.diff(ts) > AT_ONCE_NS
    first, last = ts[np.append(True, apart)], ts[np.append(apart, True)]
    return last if (last - first).sum() <= BRIEF * (ts[-1] - ts[0]) else ts[:0]


def small_writes(source: Source) -> Iterator[Recurrence]:
    """The small writes of each thread to each descriptor."""
    rows = source.rows("write")
    table = pd.DataFrame({name: rows[name] for name in ("ts", "pid", "tid", "fd")})[rows["bytes"] < SMALL_BYTES]
    for (pid, tid, fd), mine in table.groupby(["pid", "tid", "fd"]):
        yield Recurrence("write", pid, tid, fd, (NONE, NONE, NONE), ends_of_bursts(mine["ts"].to_numpy()))


def repeated_reads(source: Source) -> Iterator[Recurrence]:
    """For each process and file the reads of the place that is read most often, of several the first."""
    rows = source.rows("read_begin")
    place = ["pid", "dev", "ino", "offset"]
    table = pd.DataFrame({name: rows[name] for name in ("ts", "tid", "fd", *place)})
    counts = table.groupby(place)["ts"].agg(["size", "min"]).reset_index().sort_values(["size", "min"], ascending=[False, True])
    counts = counts[counts["size"] > LEAST].drop_duplicates(["pid", "dev", "ino"])
    for chosen, mine in table.merge(counts[place], on=place).groupby(place):
        tids = mine["tid"].unique()
        owner = tids[0] if len(tids) == 1 else chosen[0]
        yield Recurrence("read", chosen[0], owner, mine["fd"].iloc[0], chosen[1:], ends_of_bursts(mine["ts"].to_numpy()))


def cpu_clock(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """(times, CPU time in ns of all threads of the program until then), to be interpolated; empty without level sched."""
    switch, *woken, fork = (source.rows(kind) for kind in ("sched_switch", "sched_waking", "sched_wakeup", "task_fork"))
    states = OpenStates(target_threads(source)).thread_states(switch, (woken[0], woken[1]), fork, True, source.gaps("sched"))
    running = states.filter(pyarrow.compute.equal(states["state"], "running"))
    begin, end = (running[name].to_numpy() for name in ("begin_ns", "end_ns"))
    ts, change = np.concatenate([begin, end]), np.repeat([1, -1], len(begin))
    order = np.argsort(ts, kind="stable")
    ts, threads = ts[order], np.cumsum(change[order])
    return ts, np.concatenate([[0], np.cumsum(threads[:-1] * np.diff(ts))])[: len(ts)]


def is_near(lengths: np.ndarray) -> np.ndarray:
    """Which of consecutive lengths are close to the median of those around."""
    around = pd.Series(lengths, dtype=np.float64).rolling(AROUND, center=True, min_periods=1).median().to_numpy()
    return (around > 0) & (np.abs(lengths - around) <= NEAR * around)


def most_regular(near: np.ndarray) -> tuple[int, int]:
    """The longest stretch [first, last) in which at least the share REGULAR is near, judged by its sum."""
    total = np.concatenate([[0.0], np.cumsum(near - REGULAR)])
    least = np.minimum.accumulate(total)
    last = int(np.argmax(total - least))
    return int(np.argmin(total[: last + 1])), last


def regular_stretch(of: Recurrence, clock: tuple[np.ndarray, np.ndarray], lasts_ns: int) -> Stretch:
    """The longest stretch of a recurrence in which its intervals have about the same CPU time, or about the same length."""
    lengths = [np.diff(of.ts)]
    if len(clock[0]):
        lengths.append(np.diff(np.interp(of.ts, *clock)))
    near = max((is_near(some) for some in lengths), key=lambda some: np.diff(most_regular(some))[0])
    first, last = most_regular(near)
    share = float(near[first:last].mean()) if last > first else 0.0
    return Stretch(of, first, last, share, float(of.ts[last] - of.ts[first]) / max(lasts_ns, 1))


def recurrences(source: Source) -> list[Stretch]:
    """What recurs often in the program, by how well it serves as a step's begin: writes first, then the longest stretch."""
    often = [one for one in (*small_writes(source), *repeated_reads(source)) if len(one.ts) > LEAST]
    clock = cpu_clock(source) if often else (np.empty(0), np.empty(0))
    found = [regular_stretch(one, clock, source.last_ns - source.first_ns) for one in often]
    return sorted(found, key=lambda one: (not one.is_step, one.of.what != "write", -one.covered))[:SHOWN]


def faults_before(source: Source, tid: int, ts: np.ndarray, major: int) -> np.ndarray:
    """How many page faults of a kind a thread had before each time."""
    rows = source.rows("page_fault")
    mine = (rows["tid"] == tid) & ((rows["flags"] & 1) == major)
    return np.searchsorted(rows["ts"][mine], ts)


def steps_between(source: Source, stretch: Stretch) -> Steps:
    """The steps from each event of the stretch to the next."""
    ts, of = stretch.ts, stretch.of
    number = np.arange(len(ts) - 1)
    counts = {"min_flt": faults_before(source, of.tid, ts, 0), "maj_flt": faults_before(source, of.tid, ts, 1)}
    same = {name: np.full(len(number), value) for name, value in (("pid", of.pid), ("tid", of.tid), ("engine", FOUND))}
    nothing = dict.fromkeys(("phase", "n_tokens", "context", "result"), 0 * number)

    def marks(rows: slice) -> Rows:
        at = {"ts": ts[rows], **{name: count[rows] for name, count in counts.items()}}
        return Rows.of_columns({"seq": number, "position": 0 * number - 1, **at, **same, **nothing}, number)

    spans = RecordSpans(number, ts[:-1], ts[1:], number >= 0)
    begin, end = marks(slice(None, -1)), marks(slice(1, None))
    return Steps(begin, end, spans, ts[1:], 0 * number, 0 * number - 1, NO_SETS, not_language=(FOUND,))


def recurrence_columns(source: Source, found: list[Stretch]) -> Columns:
    """The columns of `recurrences`; the first row begins the steps if it is `chosen`."""
    paths, places = FilePaths(source).paths, [one.of.place for one in found]
    numbers = {name: np.array([getattr(one.of, name) for one in found], np.int64) for name in ("pid", "tid", "fd")}
    return {
        "what": np.array([one.of.what for one in found], object),
        **numbers,
        "file": np.array([paths.get(place[:2], "") for place in places], object),
        "offset": np.array([place[2] for place in places], np.int64),
        "count": np.array([len(one.of.ts) for one in found], np.int64),
        "steps": np.array([one.last - one.first for one in found], np.int64),
        "period_ns": np.array([np.median(np.diff(one.of.ts)) for one in found], np.int64),
        "regular": np.array([one.regular for one in found], np.float64),
        "covered": np.array([one.covered for one in found], np.float64),
        "chosen": np.array([one.is_step and one is found[0] for one in found], bool),
    }


def write_columns(source: Source, tokens: Steps) -> Columns:
    """The columns of `writes`."""
    rows = source.rows("write")
    return {
        "ts_ns": rows["ts"],
        "token_id": tokens.of(rows),
        "pid": rows["pid"],
        "tid": rows["tid"],
        "call": pick_names(WRITE_CALLS, rows["call"]),
        "fd": rows["fd"],
        "asked_bytes": rows["bytes"],
    }
