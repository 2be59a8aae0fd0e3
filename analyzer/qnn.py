"""QNN: executions and other calls, and the join of profile events with the call that caused them.

The program reads a profile's events after a call (a harvest): it lists the events' handles, then reads each event and lists its
sub-events. An event belongs to the harvest in force on its thread; a harvest belongs to the last call before it that its
events can come from: the last graphExecute with its profile, or the last call that its event types name.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.qnn_enums import (
    ACCEL_CYCLES,
    ACCEL_US,
    CALLS,
    EVENT_TYPES,
    GRAPH_CREATE,
    GRAPH_RETRIEVE,
    HOST_RPC_US,
    HTP_RPC_US,
    UNIT_CYCLES,
    UNIT_US,
    UNITS,
    UNSIGNED_BITS,
    Work,
    work_of,
)
from analyzer.reading import Rows, Source, Spans, texts
from analyzer.schema import conform
from analyzer.spans import NONE, codes, latest
from analyzer.steps import Graphs, Steps

MAX_DEPTH = 16
NAMING_DELAY_NS = 1_000_000  # an object is named right after the call that made it has returned
MEASURES = (
    ("host_rpc_us", HOST_RPC_US, UNIT_US),
    ("htp_rpc_us", HTP_RPC_US, UNIT_US),
    ("accel_us", ACCEL_US, UNIT_US),
    ("accel_cycles", ACCEL_CYCLES, UNIT_CYCLES),
)


def by_number(numbers: np.ndarray, names: dict[int, str]) -> np.ndarray:
    """Names of numbers; the number as text where it has none."""
    values, inverse = np.unique(numbers, return_inverse=True)
    return np.array([*(names.get(v, str(v)) for v in values.tolist()), ""], object)[inverse]


@dataclass(frozen=True)
class Names:
    """Named handles: the latest object record of a handle names it, until the handle is used again."""

    rows: Rows
    text: np.ndarray

    def of(self, pid: np.ndarray, handle: np.ndarray, ts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(names, sizes in bytes) of handles at a time; "" and 0 where none is known."""
        n = len(self.rows)
        key = codes(np.concatenate((self.rows["pid"], pid)), np.concatenate((self.rows["handle"], handle)))
        row = latest(key[:n], self.rows["ts"], key[n:], ts)
        text, size = np.append(self.text, ""), np.append(self.rows["bytes"], 0)
        return text[row], size[row]


def graph_names(source: Source) -> Names:
    """Names of graph handles."""
    rows = source.rows("qnn_object")
    rows = rows.where(np.isin(rows["call"], (GRAPH_CREATE, GRAPH_RETRIEVE)))
    return Names(rows, texts(rows["name"]))


def calls(source: Source, spans: Spans) -> pd.DataFrame:
    """The table `qnn_calls`."""
    begin, end = source.rows("qnn_call_begin"), source.rows("qnn_call_end")
    ended = spans.end >= 0
    made = np.where(ended, end["handle"][spans.end], 0) if len(end) else np.zeros(len(begin), np.int64)
    status = np.where(ended, end["status"][spans.end], NONE) if len(end) else np.full(len(begin), NONE)
    handle = np.where(made != 0, made, begin["handle"])
    names, _ = graph_names(source).of(begin["pid"], handle, spans.end_ns + NAMING_DELAY_NS)
    made_or_used = np.isin(begin["call"], (GRAPH_CREATE, GRAPH_RETRIEVE, *Work.FINALIZE.value))
    return conform(
        "qnn_calls",
        {
            "call_id": np.arange(len(begin)),
            **source.thread(begin),
            "call": by_number(begin["call"], CALLS),
            "handle": handle.view(np.uint64),
            "name": np.where(made_or_used, names, ""),
            "bytes": begin["size"],
            "status": status,
            **spans.columns(),
        },
    )


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
    """Profile events; an event that was read both plain and extended counts once, extended."""
    rows = source.rows("qnn_event")
    harvest = latest(read.tid, read.ts, rows["tid"], rows["ts"])
    same = codes(harvest, rows["event"], rows["tid"]) if len(rows) else np.empty(0, np.int64)
    order = np.lexsort((-rows["extended"], same))
    first = np.append(True, same[order][1:] != same[order][:-1])[: len(order)]
    keep = np.sort(order[first | (harvest[order] < 0)])
    return Events(rows.where(keep), harvest[keep])


def parents(source: Source, read: Harvests, found: Events) -> tuple[np.ndarray, np.ndarray]:
    """(row of the parent event or -1, depth) of each event, from the lists of sub-events of its harvest."""
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


def causes(source: Source, read: Harvests, work: np.ndarray, execute: Spans, call: Spans) -> tuple[np.ndarray, np.ndarray]:
    """(row of the execute, row of the call) that each harvest reads; -1 where it is the other or neither."""
    runs, made = source.rows("qnn_execute_begin"), source.rows("qnn_call_begin")
    by_execute, when = np.full(len(read.ts), NONE, np.int64), np.full(len(read.ts), -1, np.int64)
    for thread in ("tid", "pid"):
        left = np.flatnonzero(by_execute < 0)
        where = read.tid if thread == "tid" else read.pid
        key = codes(np.concatenate((runs[thread], where[left])), np.concatenate((runs["profile"], read.profile[left])))
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
                fit, profile = made["profile"][fits] * told, read.profile[left] * told
                key = codes(np.concatenate((made[thread][fits], where[left])), np.concatenate((fit, profile)))
                at = latest(key[: len(fits)], made["ts"][fits], key[len(fits) :], read.ts[left])
                by_call[left[at >= 0]] = fits[at[at >= 0]]
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
        },
    )


def execute_table(source: Source, spans: Spans, events: pd.DataFrame, tokens: Steps, graphs: Graphs) -> pd.DataFrame:
    """The table `qnn_executes`: names, what encloses them, and the times that QNN's own events give."""
    begin, end = source.rows("qnn_execute_begin"), source.rows("qnn_execute_end")
    graph_id, outer = graphs.of(begin), graphs.begin
    names, _ = graph_names(source).of(begin["pid"], begin["graph"], begin["ts"])
    kinds = np.append(source.named(outer["engine"], outer["type"], "graphs"), "")
    status = np.where(spans.end >= 0, end["status"][spans.end], NONE) if len(end) else np.full(len(begin), NONE)
    return conform(
        "qnn_executes",
        {
            "execute_id": np.arange(len(begin)),
            "token_id": tokens.of(begin),
            "graph_id": graph_id,
            **source.thread(begin),
            "graph": begin.raw("graph"),
            "graph_name": names,
            "profile": begin.raw("profile"),
            "n_inputs": begin["n_inputs"],
            "n_outputs": begin["n_outputs"],
            "status": status,
            "kind": kinds[graph_id],
            **{name: np.append(outer[name], NONE)[graph_id] for name in ("layer", "expert", "tier")},
            **{name: measured(events, len(begin), number, UNITS[unit]) for name, number, unit in MEASURES},
            **spans.columns(),
        },
    )


def measured(events: pd.DataFrame, n: int, event_type: int, unit: str) -> np.ndarray:
    """The value of each execute's first event of a type and unit; NaN where it has none."""
    rows = events[(events["type"] == event_type) & (events["unit"] == unit) & (events["execute_id"] >= 0)]
    answer = np.full(n, np.nan)
    answer[rows["execute_id"].to_numpy()[::-1]] = rows["value"].to_numpy()[::-1].astype(np.float64)
    return answer


def build(source: Source, tokens: Steps, graphs: Graphs) -> dict[str, pd.DataFrame]:
    """The tables `qnn_executes`, `qnn_events` and `qnn_calls`."""
    execute = source.spans("qnn_execute", ("graph",))
    call = source.spans("qnn_call", ("call",))
    read = harvests(source)
    found = events(source, read)
    parent, depth = parents(source, read, found)
    by_execute, by_call = causes(source, read, work_of_harvests(len(read.ts), found), execute, call)
    table = event_table(found, parent, depth, by_execute, by_call)
    return {
        "qnn_executes": execute_table(source, execute, table, tokens, graphs),
        "qnn_events": table,
        "qnn_calls": calls(source, call),
    }
