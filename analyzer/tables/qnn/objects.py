"""QNN's handles as objects: backends, devices, contexts, graphs, profiles and registered memory, from creation to release.

Handles are small numbers that are reused after they were freed. A generation distinguishes the objects of one handle; every
other QNN table refers to objects by `object_id`, never by a handle alone.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from analyzer.records.forks import through_forks
from analyzer.records.reading import Source
from analyzer.records.rows import RecordSpans, Rows, decode_texts
from analyzer.records.schema import TABLES, conform
from analyzer.records.spans import NONE, following, latest, shared_codes
from analyzer.tables.qnn.enums import CONTEXT_FREE, FREES, GRAPH_RETRIEVE, MAKES
from analyzer.tables.sessions import creation_records

Key = tuple[int, str, int]
"""Process, kind of object, handle."""
OWNED = {"graph": "context", "memory": "context", "context": "backend", "profile": "backend"}


@dataclass(frozen=True)
class ObjectCalls:
    """QNN's calls other than executions, or host stages: their records and the spans made from them."""

    begin: Rows
    end: Rows
    spans: RecordSpans


@dataclass
class ObjectLives:
    """Creation and release of objects, processed in time order."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    alive: dict[Key, int] = field(default_factory=dict)
    used: dict[Key, int] = field(default_factory=dict)

    def make(self, key: Key, ts: int, facts: dict[str, Any]) -> None:
        """Add the object of a handle; a graph that is retrieved again remains the same object."""
        pid, kind, handle = key
        before = self.alive.get(key)
        if before is not None and facts["call"] == GRAPH_RETRIEVE and self.rows[before]["name"] == facts["name"]:
            return
        if before is not None:
            self.rows[before]["until_ns"] = ts  # its release was not recorded, but its handle now belongs to another object
        owner = self.alive.get((pid, OWNED.get(kind, ""), facts["owner"]), NONE)
        generation = self.used[key] = self.used.get(key, -1) + 1
        same = {"object_id": len(self.rows), "pid": pid, "kind": kind, "handle": handle, "generation": generation}
        self.alive[key] = len(self.rows)
        self.rows.append(facts | same | {"owner_id": owner, "since_ns": ts, "until_ns": NONE})

    def free(self, key: Key, ts: int) -> None:
        """End an object; the end of a context also ends its graphs and memory."""
        gone = self.alive.pop(key, None)
        if gone is None:
            return
        self.rows[gone]["until_ns"] = ts
        if key[1] == "context":
            for owned in [k for k, row in self.alive.items() if k[0] == key[0] and self.rows[row]["owner_id"] == gone]:
                self.free(owned, ts)


@dataclass(frozen=True)
class Objects:
    """The table `qnn_objects`, and the lookup of objects by handle and time."""

    table: pd.DataFrame
    source: Source

    def ids_at(self, kind: str, pid: np.ndarray, handle: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """object_id of handles at times, in a forked process also its parent's; -1 if no object is known for that time."""
        lives = self.table[self.table["kind"] == kind].sort_values("since_ns", kind="stable")
        handles = lives["handle"].to_numpy(np.uint64).view(np.int64)
        ids, until = np.append(lives["object_id"].to_numpy(), NONE), np.append(lives["until_ns"].to_numpy(), NONE)

        def find(rows: np.ndarray, pid: np.ndarray, ts: np.ndarray) -> np.ndarray:
            known, asked = shared_codes((lives["pid"].to_numpy(), handles), (pid, handle[rows]))
            row = latest(known, lives["since_ns"].to_numpy(), asked, ts)
            return np.where((until[row] >= 0) & (until[row] < ts), NONE, ids[row])

        return through_forks(self.source, find, pid, ts)

    def key(self, pid: np.ndarray, profile: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """A number for each profile: its object_id if known, else a negative number for the handle."""
        ids = self.ids_at("profile", pid, profile, ts)
        return np.where(ids >= 0, ids, ~profile)

    def column(self, name: str, ids: np.ndarray, unknown: Any) -> np.ndarray:
        """A column's values for object ids; `unknown` for -1."""
        return np.append(self.table[name].to_numpy(object), unknown)[ids]

    def first_made_by(self, n_calls: int) -> np.ndarray:
        """object_id of the first object that each call created; -1 for none."""
        answer = np.full(n_calls + 1, NONE, np.int64)
        created = self.table[self.table["call_id"] >= 0]
        answer[created["call_id"].to_numpy()[::-1]] = created["object_id"].to_numpy()[::-1]
        return answer[:n_calls]


def call_of(rows: Rows, calls: ObjectCalls) -> np.ndarray:
    """call_id of the call that each object record follows on its thread; -1 for none."""
    begin, spans = calls.begin, calls.spans
    ended = np.flatnonzero(spans.complete)
    order = ended[np.argsort(spans.end_ns[ended], kind="stable")]
    called, key = shared_codes((begin["tid"][order], begin["call"][order]), (rows["tid"], rows["call"]))
    row = latest(called, spans.end_ns[order], key, rows["ts"])
    return np.append(order, NONE)[row]


def sessions_of(source: Source, rows: Rows) -> np.ndarray:
    """session_id of each graph that a record creates: its session is the next one recorded on the same thread."""
    created = creation_records(source)
    makers, threads = shared_codes((created["pid"], created["tid"]), (rows["pid"], rows["tid"]))
    session = following(makers, created["ts"], threads, rows["ts"])
    return np.where(np.isin(rows["call"], [call for call, kind in MAKES.items() if kind == "graph"]), session, NONE)


def build_objects(source: Source, calls: ObjectCalls) -> Objects:
    """All objects of a recording."""
    rows, begin, end, spans = source.rows("qnn_object"), calls.begin, calls.end, calls.spans
    makes_object = np.isin(rows["call"], list(MAKES))
    session_id = sessions_of(source, rows)
    call_id, size = np.where(makes_object, call_of(rows, calls), NONE), np.append(begin["size"], 0)
    status = spans.of_end(end, "status", 0)
    freed = np.flatnonzero((begin["call"] == CONTEXT_FREE) & (status == 0))
    names, lives = decode_texts(rows["name"]), ObjectLives()
    happened = [(int(ts), 1, int(i)) for i, ts in enumerate(rows["ts"])] + [(int(begin["ts"][i]), 0, int(i)) for i in freed]
    for ts, is_object, i in sorted(happened):
        source_rows = rows if is_object else begin
        number, handle = int(source_rows["call"][i]), int(source_rows["handle"][i])
        pid = int(source_rows["pid"][i])
        if number in FREES:
            lives.free((pid, FREES[number], handle), ts)
        elif number in MAKES and handle:
            facts = {"call": number, "owner": int(rows["owner"][i]), "name": names[i], "level": int(rows["level"][i])}
            facts["session_id"] = int(session_id[i])
            of_call = int(call_id[i])
            bytes_ = int(rows["bytes"][i]) or int(size[of_call])
            lives.make((pid, MAKES[number], handle), ts, facts | {"bytes": bytes_, "call_id": of_call})
    frame = pd.DataFrame(lives.rows, columns=[c.name for c in TABLES["qnn_objects"]])
    frame["handle"] = frame["handle"].to_numpy(np.int64).view(np.uint64)
    return Objects(conform("qnn_objects", frame), source)
