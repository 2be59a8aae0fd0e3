"""The join of QNN's profile events with the calls that caused them, and `build_qnn_tables` for all tables of QNN.

The program reads a profile's events after a call (a harvest): it lists the events' handles, then reads each event and lists its
sub-events. An event belongs to the harvest in force on its thread; a harvest belongs to the last call before it that its
events can come from: the last graphExecute with its profile, or the last call that its event types name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.reading import Source
from analyzer.records.rows import Rows, decode_texts
from analyzer.records.schema import TABLES, Columns, conform
from analyzer.records.spans import NONE, latest, row_codes, shared_codes
from analyzer.tables.qnn.calls import by_number, call_table, calls_and_stages, stage_table
from analyzer.tables.qnn.checks import check_findings
from analyzer.tables.qnn.clock import align_clock
from analyzer.tables.qnn.enums import EVENT_TYPES, UNITS, UNSIGNED_BITS, Work, work_of
from analyzer.tables.qnn.executes import EnclosingGraphs, execute_table, execution_spans
from analyzer.tables.qnn.objects import Objects
from analyzer.tables.qnn.objects import build_objects as build_objects
from analyzer.tables.steps import Steps

MAX_DEPTH = 16


@dataclass(frozen=True)
class Harvests:
    """Times at which a thread starts to read a profile's events."""

    pid: np.ndarray
    tid: np.ndarray
    ts: np.ndarray
    profile: np.ndarray


def harvest_times(source: Source) -> Harvests:
    """Harvest records, and reads of a profile's event list without a harvest record."""
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
    """Profile events in reading order, each once, with their harvest (-1: none)."""

    rows: Rows
    harvest: np.ndarray


def unique_events(source: Source, read: Harvests) -> Events:
    """Profile events; one recorded in two ways counts once: nesting is preferred to lists, extended data to plain data."""
    rows = source.rows("qnn_event")
    harvest = latest(read.tid, read.ts, rows["tid"], rows["ts"])
    same = row_codes(harvest, rows["event"], rows["tid"]) if len(rows) else np.empty(0, np.int64)
    order = np.lexsort((-rows["extended"], rows["frame"] == 0, same))
    first = np.append(True, same[order][1:] != same[order][:-1])[: len(order)]
    keep = np.sort(order[first | (harvest[order] < 0)])
    return Events(rows.where(keep), harvest[keep])


def event_parents(source: Source, read: Harvests, events: Events) -> tuple[np.ndarray, np.ndarray]:
    """(row of the parent event or -1, depth) of each event, from its harvest's lists of sub-events or from nesting."""
    parent, depth = parents_by_list(source, read, events)
    nests = np.flatnonzero((events.rows["frame"] > 0) & (events.harvest >= 0))
    if len(nests):
        parent[nests], depth[nests] = parents_by_nesting(events, nests)
    return parent, depth


def parents_by_nesting(events: Events, nesting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(parent, depth) of events that a recursive function reads: the deeper the call, the lower its frame address.

    A harvest has as many distinct frames as levels; an event's parent is the last event before it on the level above.
    """
    harvest, ts, depth = events.harvest[nesting], events.rows["ts"][nesting], np.zeros(len(nesting), np.int64)
    frame = -events.rows["frame"][nesting]
    order = np.lexsort((frame, harvest))
    first = np.append(True, np.diff(harvest[order]) != 0)
    level = np.cumsum(first | np.append(True, np.diff(frame[order]) != 0))
    depth[order] = level - np.maximum.accumulate(np.where(first, level, 0))
    parent = np.full(len(nesting), NONE, np.int64)
    for number in range(1, int(depth.max()) + 1):
        level_rows, above = np.flatnonzero(depth == number), np.flatnonzero(depth == number - 1)
        row = latest(harvest[above], ts[above], harvest[level_rows], ts[level_rows])
        parent[level_rows[row >= 0]] = nesting[above[row[row >= 0]]]
    return parent, depth


def parents_by_list(source: Source, read: Harvests, events: Events) -> tuple[np.ndarray, np.ndarray]:
    """(parent, depth) from the lists of sub-events."""
    n, lists = len(events.rows), source.rows("qnn_sub_events")
    lists = lists.where(lists["of_profile"] == 0)
    parent, depth = np.full(n, NONE, np.int64), np.zeros(n, np.int64)
    if n == 0 or len(lists) == 0:
        return parent, depth
    width = lists.records["events"].shape[1]
    used = np.arange(width) < np.minimum(lists["count"], width)[:, None]
    record = np.repeat(np.arange(len(lists)), used.sum(axis=1))
    child = lists.records["events"].astype(np.int64)[used]
    harvest = latest(read.tid, read.ts, lists["tid"], lists["ts"])[record]
    handle = events.rows["event"]
    key = row_codes(np.concatenate((events.harvest, harvest, harvest)), np.concatenate((handle, child, lists["parent"][record])))
    of_event, of_child, of_parent = key[:n], key[n : n + len(child)], key[n + len(child) :]
    event_of = np.full(int(key.max()) + 1, NONE, np.int64)
    event_of[of_event] = np.arange(n)
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


def work_of_harvests(n: int, events: Events) -> np.ndarray:
    """The work that each harvest's events measure, as an index into WORKS; -1 if no event type determines it."""
    types = events.rows["type"]
    values, inverse = np.unique(types, return_inverse=True)
    works = [work_of(v) for v in values.tolist()]
    work = np.array([WORKS.index(w) if w else NONE for w in works] or [NONE], np.int64)[inverse]
    rows = np.flatnonzero((work >= 0) & (events.harvest >= 0))[::-1]
    answer = np.full(n, NONE, np.int64)
    answer[events.harvest[rows]] = work[rows]  # reversed order: the first event with a known type is written last
    return answer


def harvest_sources(runs: Rows, calls: Rows, read: Harvests, work: np.ndarray, objects: Objects) -> tuple[np.ndarray, np.ndarray]:
    """(row of the execute, row of the call) that each harvest belongs to; -1 for the other, or for both if none is known.

    `runs` and `calls` are the begins of executes and calls. Profiles are compared as objects: a handle that was freed and created
    again is another profile.
    """
    used_by_runs, used_by_calls = (objects.key(rows["pid"], rows["profile"], rows["ts"]) for rows in (runs, calls))
    has_profile, profiles = calls["profile"] != 0, objects.key(read.pid, read.profile, read.ts)
    by_execute, run_ns = np.full(len(read.ts), NONE, np.int64), np.full(len(read.ts), -1, np.int64)
    for thread in ("tid", "pid"):
        left = np.flatnonzero(by_execute < 0)
        where = read.tid if thread == "tid" else read.pid
        used, asked = shared_codes((runs[thread], used_by_runs), (where[left], profiles[left]))
        by_execute[left] = latest(used, runs["ts"], asked, read.ts[left])
    by_run = by_execute >= 0
    run_ns[by_run] = runs["ts"][by_execute[by_run]]
    by_call = np.full(len(read.ts), NONE, np.int64)
    for number, kind in enumerate(WORKS):
        candidates = np.flatnonzero((work == number) | ((work == NONE) & (kind in (Work.INIT, Work.FINALIZE))))
        fits = np.flatnonzero(np.isin(calls["call"], kind.value))
        for thread, where in (("tid", read.tid), ("pid", read.pid)):
            for with_profile in (True, False):  # the call with this profile, else any
                left = candidates[by_call[candidates] < 0]
                some = fits[has_profile[fits] == with_profile]  # a call with another profile is not the cause
                fit, profile = used_by_calls[some] * with_profile, profiles[left] * with_profile
                used, asked = shared_codes((calls[thread][some], fit), (where[left], profile))
                row = latest(used, calls["ts"][some], asked, read.ts[left])
                by_call[left[row >= 0]] = some[row[row >= 0]]
    is_execute, is_call = work == WORKS.index(Work.EXECUTE), work >= 0
    called = calls["ts"][by_call] if len(calls) else run_ns
    unsure = np.where(by_call >= 0, called, -1) > run_ns
    choose_call = (by_call >= 0) & ~is_execute & (is_call | unsure)
    return np.where(choose_call | (is_call & ~is_execute), NONE, by_execute), np.where(choose_call, by_call, NONE)


def event_table(events: Events, parent: np.ndarray, depth: np.ndarray, execute: np.ndarray, call: np.ndarray) -> pd.DataFrame:
    """The table `qnn_events`; `execute` and `call` are the rows for each harvest."""
    rows, value = events.rows, events.rows.raw("value").copy()
    for dtype, bits in UNSIGNED_BITS.items():
        value[rows["dtype"] == dtype] &= np.uint64((1 << bits) - 1)
    return conform(
        "qnn_events",
        {
            "event_id": np.arange(len(rows)),
            "execute_id": np.append(execute, NONE)[events.harvest],
            "call_id": np.append(call, NONE)[events.harvest],
            "parent_id": parent,
            "depth": depth,
            "type": rows["type"],
            "type_name": by_number(rows["type"], EVENT_TYPES),
            "unit": by_number(rows["unit"], UNITS),
            "value": value,
            "timestamp": rows.raw("timestamp"),
            "name": decode_texts(rows["name"]),
            "pid": rows["pid"],
            "tid": rows["tid"],
            "ts_ns": rows["ts"],
            "host_ns": np.full(len(rows), NONE, np.int64),
        },
    )


def host_times(events: Events, execute: np.ndarray, begin_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Each event's own time stamp on the host's clock; -1 if the backend gives none, or too few to align its clock."""
    stamp, of_event = events.rows["timestamp"], np.append(execute, NONE)[events.harvest]
    answer = np.full(len(stamp), NONE, np.int64)
    rows = np.flatnonzero((stamp > 0) & (of_event >= 0))
    _, first = np.unique(of_event[rows], return_index=True)
    first_stamped = rows[first]
    clock = align_clock(stamp[first_stamped], begin_ns[of_event[first_stamped]], end_ns[of_event[first_stamped]])
    if clock:
        answer[rows] = clock.to_host(stamp[rows])
    return answer


def build_qnn_tables(source: Source, steps: Steps, enclosing: EnclosingGraphs) -> Mapping[str, pd.DataFrame | Columns]:
    """The tables of QNN: executes, events, calls, objects, stages and findings."""
    if not any(kind.startswith("qnn_") for kind in source.count()):
        return {name: {} for name in TABLES if name.startswith("qnn_") and name != "qnn_gaps"}
    calls, stages = calls_and_stages(source)
    objects = build_objects(source, calls)
    execute = execution_spans(source)
    read = harvest_times(source)
    profile_events = unique_events(source, read)
    parent, depth = event_parents(source, read, profile_events)
    by_execute, by_call = harvest_sources(
        source.rows("qnn_execute_begin"), calls.begin, read, work_of_harvests(len(read.ts), profile_events), objects
    )
    table = event_table(profile_events, parent, depth, by_execute, by_call)
    table["host_ns"] = host_times(profile_events, by_execute, execute.spans.begin_ns, execute.spans.end_ns)
    runs = execute_table(source, execute, table, objects, steps, enclosing)
    return {
        "qnn_executes": runs,
        "qnn_events": table,
        "qnn_calls": call_table(source, calls, objects),
        "qnn_objects": objects.table,
        "qnn_stages": stage_table(source, stages, runs),
        "qnn_findings": check_findings(runs, table),
    }
