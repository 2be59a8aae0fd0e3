"""QNN: the join of profile events with the call that caused them, and the tables of QNN as a whole.

The program reads a profile's events after a call (a harvest): it lists the events' handles, then reads each event and lists its
sub-events. An event belongs to the harvest in force on its thread; a harvest belongs to the last call before it that its
events can come from: the last graphExecute with its profile, or the last call that its event types name.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.reading import Source
from analyzer.records.rows import Rows, texts
from analyzer.records.schema import TABLES, conform, empty
from analyzer.records.spans import NONE, codes, latest
from analyzer.tables.qnn.calls import by_number, call_table, calls_and_stages, stage_table
from analyzer.tables.qnn.checks import findings
from analyzer.tables.qnn.clock import align
from analyzer.tables.qnn.enums import EVENT_TYPES, UNITS, UNSIGNED_BITS, Work, work_of
from analyzer.tables.qnn.executes import Enclosing, execute_table, executions
from analyzer.tables.qnn.objects import Objects
from analyzer.tables.qnn.objects import build as build_objects
from analyzer.tables.steps import Steps

MAX_DEPTH = 16


@dataclass(frozen=True)
class Harvests:
    """Times at which a thread starts to read a profile's events."""

    pid: np.ndarray
    tid: np.ndarray
    ts: np.ndarray
    profile: np.ndarray


def harvests(source: Source) -> Harvests:
    """Harvest records, and lists of a profile's events that no harvest record announced."""
    mark, lists = source.rows("qnn_harvest"), source.rows("qnn_sub_events")
    top = lists.where((lists["of_profile"] > 0) & (lists["first"] == 0))
    pid, tid = np.concatenate((mark["pid"], top["pid"])), np.concatenate((mark["tid"], top["tid"]))
    ts, profile = np.concatenate((mark["ts"], top["ts"])), np.concatenate((mark["profile"], top["parent"]))
    listed = np.concatenate((np.zeros(len(mark), bool), np.ones(len(top), bool)))
    order = np.lexsort((listed, ts, tid))
    pid, tid, ts, profile, listed = pid[order], tid[order], ts[order], profile[order], listed[order]
    announced = np.zeros(len(order), bool)
    if len(order):
        same = (tid[1:] == tid[:-1]) & (profile[1:] == profile[:-1])
        announced[1:] = same & listed[1:] & ~listed[:-1]
    keep = ~announced
    return Harvests(pid[keep], tid[keep], ts[keep], profile[keep])


@dataclass
class Events:
    """Profile events in the order read, each once, with the harvest they were read in (-1: none)."""

    rows: Rows
    harvest: np.ndarray


def events(source: Source, read: Harvests) -> Events:
    """Profile events; one that was seen in two ways counts once: by nesting rather than by lists, extended rather than plain."""
    rows = source.rows("qnn_event")
    harvest = latest(read.tid, read.ts, rows["tid"], rows["ts"])
    same = codes(harvest, rows["event"], rows["tid"]) if len(rows) else np.empty(0, np.int64)
    order = np.lexsort((-rows["extended"], rows["frame"] == 0, same))
    first = np.append(True, same[order][1:] != same[order][:-1])[: len(order)]
    keep = np.sort(order[first | (harvest[order] < 0)])
    return Events(rows.where(keep), harvest[keep])


def parents(source: Source, read: Harvests, found: Events) -> tuple[np.ndarray, np.ndarray]:
    """(row of the parent event or -1, depth) of each event: by the lists of its harvest's sub-events, or by nesting."""
    parent, depth = listed(source, read, found)
    nests = np.flatnonzero((found.rows["frame"] > 0) & (found.harvest >= 0))
    if len(nests):
        parent[nests], depth[nests] = nested(found, nests)
    return parent, depth


def nested(found: Events, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(parent, depth) of events that one function reads by calling itself: the deeper, the lower its frame.

    A harvest's frames are as many as its tree is deep; an event belongs to the last one before it of the depth above.
    """
    harvest, ts, depth = found.harvest[rows], found.rows["ts"][rows], np.zeros(len(rows), np.int64)
    frame = -found.rows["frame"][rows]
    order = np.lexsort((frame, harvest))
    first = np.append(True, np.diff(harvest[order]) != 0)
    level = np.cumsum(first | np.append(True, np.diff(frame[order]) != 0))
    depth[order] = level - np.maximum.accumulate(np.where(first, level, 0))
    parent = np.full(len(rows), NONE, np.int64)
    for number in range(1, int(depth.max()) + 1):
        mine, above = np.flatnonzero(depth == number), np.flatnonzero(depth == number - 1)
        at = latest(harvest[above], ts[above], harvest[mine], ts[mine])
        parent[mine[at >= 0]] = rows[above[at[at >= 0]]]
    return parent, depth


def listed(source: Source, read: Harvests, found: Events) -> tuple[np.ndarray, np.ndarray]:
    """(parent, depth) by the lists of sub-events."""
    n, lists = len(found.rows), source.rows("qnn_sub_events")
    lists = lists.where(lists["of_profile"] == 0)
    parent, depth = np.full(n, NONE, np.int64), np.zeros(n, np.int64)
    if n == 0 or len(lists) == 0:
        return parent, depth
    width = lists.records["events"].shape[1]
    used = np.arange(width) < np.minimum(lists["count"], width)[:, None]
    record = np.repeat(np.arange(len(lists)), used.sum(axis=1))
    child = lists.records["events"].astype(np.int64)[used]
    harvest = latest(read.tid, read.ts, lists["tid"], lists["ts"])[record]
    handle = found.rows["event"]
    key = codes(np.concatenate((found.harvest, harvest, harvest)), np.concatenate((handle, child, lists["parent"][record])))
    own, of_child, of_parent = key[:n], key[n : n + len(child)], key[n + len(child) :]
    event_of = np.full(int(key.max()) + 1, NONE, np.int64)
    event_of[own] = np.arange(n)
    row, above = event_of[of_child], event_of[of_parent]
    good = (row >= 0) & (harvest >= 0) & (row != above)
    parent[row[good]] = above[good]
    for _ in range(MAX_DEPTH):
        deeper = np.where(parent >= 0, depth[parent] + 1, 0)
        if np.array_equal(deeper, depth):
            break
        depth = deeper
    return parent, depth


WORKS = tuple(Work)


def work_of_harvests(n: int, found: Events) -> np.ndarray:
    """Which work each harvest's events tell about, as an index into WORKS; -1 where no type tells."""
    types = found.rows["type"]
    values, inverse = np.unique(types, return_inverse=True)
    told = [work_of(v) for v in values.tolist()]
    work = np.array([WORKS.index(w) if w else NONE for w in told] or [NONE], np.int64)[inverse]
    rows = np.flatnonzero((work >= 0) & (found.harvest >= 0))[::-1]
    answer = np.full(n, NONE, np.int64)
    answer[found.harvest[rows]] = work[rows]  # the first told event decides: later rows come first here
    return answer


def causes(runs: Rows, made: Rows, read: Harvests, work: np.ndarray, objects: Objects) -> tuple[np.ndarray, np.ndarray]:
    """(row of the execute, row of the call) that each harvest reads; -1 where it is the other or neither.

    `runs` and `made` are the begins of executes and calls. Profiles are compared as objects: a handle that was freed and made
    again is another profile.
    """
    used_by_runs, used_by_calls = (objects.key(rows["pid"], rows["profile"], rows["ts"]) for rows in (runs, made))
    given, profiles = made["profile"] != 0, objects.key(read.pid, read.profile, read.ts)
    by_execute, when = np.full(len(read.ts), NONE, np.int64), np.full(len(read.ts), -1, np.int64)
    for thread in ("tid", "pid"):
        left = np.flatnonzero(by_execute < 0)
        where = read.tid if thread == "tid" else read.pid
        key = codes(np.concatenate((runs[thread], where[left])), np.concatenate((used_by_runs, profiles[left])))
        by_execute[left] = latest(key[: len(runs)], runs["ts"], key[len(runs) :], read.ts[left])
    found = by_execute >= 0
    when[found] = runs["ts"][by_execute[found]]
    by_call = np.full(len(read.ts), NONE, np.int64)
    for number, kind in enumerate(WORKS):
        mine = np.flatnonzero((work == number) | ((work == NONE) & (kind in (Work.INIT, Work.FINALIZE))))
        fits = np.flatnonzero(np.isin(made["call"], kind.value))
        for thread, where in (("tid", read.tid), ("pid", read.pid)):
            for told in (True, False):  # the call that was given the profile, else any
                left = mine[by_call[mine] < 0]
                some = fits[given[fits] == told]  # a call that was given another profile is not the cause
                fit, profile = used_by_calls[some] * told, profiles[left] * told
                key = codes(np.concatenate((made[thread][some], where[left])), np.concatenate((fit, profile)))
                at = latest(key[: len(some)], made["ts"][some], key[len(some) :], read.ts[left])
                by_call[left[at >= 0]] = some[at[at >= 0]]
    is_execute, is_call = work == WORKS.index(Work.EXECUTE), work >= 0
    called = made["ts"][by_call] if len(made) else when
    unsure = np.where(by_call >= 0, called, -1) > when
    choose_call = (by_call >= 0) & ~is_execute & (is_call | unsure)
    return np.where(choose_call | (is_call & ~is_execute), NONE, by_execute), np.where(choose_call, by_call, NONE)


def event_table(found: Events, parent: np.ndarray, depth: np.ndarray, execute: np.ndarray, call: np.ndarray) -> pd.DataFrame:
    """The table `qnn_events`, given the execute and call of each harvest."""
    rows, value = found.rows, found.rows.raw("value").copy()
    for dtype, bits in UNSIGNED_BITS.items():
        value[rows["dtype"] == dtype] &= np.uint64((1 << bits) - 1)
    return conform(
        "qnn_events",
        {
            "event_id": np.arange(len(rows)),
            "execute_id": np.append(execute, NONE)[found.harvest],
            "call_id": np.append(call, NONE)[found.harvest],
            "parent_id": parent,
            "depth": depth,
            "type": rows["type"],
            "type_name": by_number(rows["type"], EVENT_TYPES),
            "unit": by_number(rows["unit"], UNITS),
            "value": value,
            "timestamp": rows.raw("timestamp"),
            "name": texts(rows["name"]),
            "pid": rows["pid"],
            "tid": rows["tid"],
            "ts_ns": rows["ts"],
            "host_ns": np.full(len(rows), NONE, np.int64),
        },
    )


def host_times(found: Events, execute: np.ndarray, begin_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Each event's own time stamp on the host's clock; -1 where the backend gives none, or too few to align its clock."""
    stamp, of_event = found.rows["timestamp"], np.append(execute, NONE)[found.harvest]
    answer = np.full(len(stamp), NONE, np.int64)
    rows = np.flatnonzero((stamp > 0) & (of_event >= 0))
    _, first = np.unique(of_event[rows], return_index=True)
    told = rows[first]
    clock = align(stamp[told], begin_ns[of_event[told]], end_ns[of_event[told]])
    if clock:
        answer[rows] = clock.to_host(stamp[rows])
    return answer


def build(source: Source, tokens: Steps, enclosing: Enclosing) -> dict[str, pd.DataFrame]:
    """The tables of QNN: executes, events, calls, objects, stages and findings."""
    if not any(kind.startswith("qnn_") for kind in source.count()):
        return {name: empty(name) for name in TABLES if name.startswith("qnn_") and name != "qnn_gaps"}
    calls, stages = calls_and_stages(source)
    objects = build_objects(source, calls)
    execute = executions(source)
    read = harvests(source)
    found = events(source, read)
    parent, depth = parents(source, read, found)
    by_execute, by_call = causes(
        source.rows("qnn_execute_begin"), calls.begin, read, work_of_harvests(len(read.ts), found), objects
    )
    table = event_table(found, parent, depth, by_execute, by_call)
    table["host_ns"] = host_times(found, by_execute, execute.spans.begin_ns, execute.spans.end_ns)
    runs = execute_table(source, execute, table, objects, tokens, enclosing)
    return {
        "qnn_executes": runs,
        "qnn_events": table,
        "qnn_calls": call_table(source, calls, objects),
        "qnn_objects": objects.table,
        "qnn_stages": stage_table(source, stages, runs),
        "qnn_findings": findings(runs, table),
    }
