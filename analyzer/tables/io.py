"""I/O: page faults of files, reads and block requests, each with the operator, expert and load that enclose it on its thread."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analyzer.records.manifest import listed_items, section
from analyzer.records.reading import Source, pick_names
from analyzer.records.rows import Rows, decode_texts, map_distinct
from analyzer.records.schema import Columns
from analyzer.records.spans import NONE, NestedSpans, SpanMarks, number_rows, pair_spans, shared_codes
from analyzer.tables.operators import OperatorThreads
from analyzer.tables.steps import Steps

CALLS = np.array(["read", "pread64", "readv", "preadv", "preadv2"], object)
MAJOR, EXACT = 1, 2
MINOR_BITS = 20
UNKNOWN_BYTES = 2**32 - 1
OPERATIONS = {"R": "read", "W": "write", "D": "discard", "F": "flush"}
PAGE_BYTES = 4096


class Enclosed:
    """Events of threads with the enclosing spans: operator and expert are looked up per time range, the rest at the end."""

    def __init__(self, rows: Rows, ts: np.ndarray):
        self.rows, self.ts = rows, ts
        self.operator, self.expert = np.full(len(ts), NONE, np.int64), np.full(len(ts), NONE, np.int64)

    def note(self, piece: Source, activity: "RangeActivity") -> None:
        """Look up the operators and experts of the events in one time range."""
        rows = np.flatnonzero((self.ts >= piece.begin_ns) & (self.ts < piece.end_ns))
        if len(rows) == 0:
            return
        tid, ts = self.rows["tid"][rows], self.ts[rows]
        operator = values_at(activity.op_id, activity.operators.nest.innermost(tid, ts))
        run = values_at(activity.experts["expert"], activity.runs.innermost(tid, ts))
        self.operator[rows] = np.where(operator >= 0, operator + activity.first_operator, NONE)
        self.expert[rows] = np.where(run >= 0, run, values_at(activity.operator_expert, operator))

    def columns(self, steps: Steps, loads: Columns) -> dict[str, np.ndarray]:
        """The columns of the group `within`."""
        tid, pid = self.rows["tid"], self.rows["pid"]
        return {
            "token_id": steps.containing({"tid": tid, "pid": pid}, self.ts),
            "op_id": self.operator,
            "expert": self.expert,
            "load_id": values_at(loads["load_id"], spans_of(loads).innermost(tid, self.ts)),
            "pid": pid,
            "tid": tid,
        }


@dataclass(frozen=True)
class RangeActivity:
    """The operators and expert runs of one time range; `op_id` counts from 0 here and from `first_operator` in the tables."""

    operators: OperatorThreads
    op_id: np.ndarray
    operator_expert: np.ndarray
    first_operator: int
    experts: Columns

    @cached_property
    def runs(self) -> NestedSpans:
        """The expert runs of each thread as nested spans."""
        return spans_of(self.experts)


def values_at(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """values[rows]; -1 for row -1."""
    return np.where(rows >= 0, values[rows], NONE) if len(values) else np.full(len(rows), NONE, np.int64)


def spans_of(table: Columns) -> NestedSpans:
    """The spans of a table, nested by thread; an unfinished span includes its last instant."""
    tid, begin, end, complete = (table[name] for name in ("tid", "begin_ns", "end_ns", "complete"))
    return NestedSpans(tid, begin, end + ~complete)


class FilePaths:
    """Paths by device and inode: from the manifest, else the base names that the kernel side recorded."""

    def __init__(self, source: Source):
        rows = source.rows("io_file")
        names = zip(rows["dev"].tolist(), rows["ino"].tolist(), decode_texts(rows["name"]), strict=True)
        self.paths = {(dev, ino): name for dev, ino, name in names}
        for row in listed_items(section(source.manifest, "io").get("files"), dict):
            if row.get("path"):
                self.paths[int(row.get("dev", NONE)), int(row.get("ino", NONE))] = str(row["path"])
        size = section(source.manifest, "io").get("page_bytes")
        self.page_bytes = size if isinstance(size, int) and size > 0 else PAGE_BYTES

    def columns(self, rows: Rows) -> dict[str, np.ndarray]:
        """The columns of the group `file`."""
        dev, ino = rows["dev"], rows["ino"]
        key, first = number_rows(dev, ino)
        names = [self.paths.get(pair, "") for pair in zip(dev[first].tolist(), ino[first].tolist(), strict=True)]
        return {"file": np.array([*names, ""], object)[key], "device": device_names(dev), "ino": rows.raw("ino")}


def device_names(dev: np.ndarray) -> np.ndarray:
    """Kernel device numbers as "major:minor"; "" for 0."""
    return map_distinct(dev, lambda number: f"{number >> MINOR_BITS}:{number & ((1 << MINOR_BITS) - 1)}" if number else "")


def fault_begins(rows: Rows) -> np.ndarray:
    """The begin of each page fault; its end if the begin is unknown."""
    return np.where(rows["begin"] > 0, rows["begin"], rows["ts"])


def fault_columns(rows: Rows, context: dict[str, np.ndarray], files: FilePaths) -> Columns:
    """The columns of `faults`, sorted by end."""
    flags, begin_known, end, begin = rows["flags"], rows["begin"] > 0, rows["ts"], fault_begins(rows)
    return {
        "fault_id": np.arange(len(rows)),
        **context,
        **files.columns(rows),
        "kind": np.where(flags & MAJOR, "major", "minor").astype(object),
        "offset": np.where(rows["ino"] != 0, rows["page"] * files.page_bytes, NONE),
        "exact": (flags & EXACT) > 0,
        "bytes": rows["added"] * files.page_bytes,
        "begin_ns": begin,
        "end_ns": end,
        "duration_ns": np.where(begin_known, end - begin, NONE),
    }


def read_columns(source: Source, context: dict[str, np.ndarray], files: FilePaths) -> Columns:
    """The columns of `reads`."""
    spans = source.spans("read")
    begin, end = source.rows("read_begin"), source.rows("read_end")
    asked = begin["bytes"]
    result = spans.of_end(end, "result")
    return {
        "read_id": np.arange(len(begin)),
        **context,
        **files.columns(begin),
        "call": pick_names(CALLS, begin["call"]),
        "fd": begin["fd"],
        "offset": begin["offset"],
        "asked_bytes": np.where(asked == UNKNOWN_BYTES, NONE, asked),
        "bytes": np.maximum(result, 0),
        "error": np.where(spans.complete, np.maximum(-result, 0), 0),
        "missed_bytes": spans.of_end(end, "added", 0) * files.page_bytes,
        **spans.columns(),
    }


def block_columns(source: Source, context: dict[str, np.ndarray]) -> Columns:
    """The columns of `blocks`: requests from issue to completion, paired by device and sector."""
    issue, done = source.rows("block_issue"), source.rows("block_done")
    sectors = shared_codes(*((rows["dev"], rows["sector"]) for rows in (issue, done)))
    marks = [
        SpanMarks(key, rows["ts"], rows.position, np.zeros(len(rows), np.int64), np.zeros(len(rows), bool))
        for rows, key in zip((issue, done), sectors, strict=True)
    ]
    spans = source.close(issue, pair_spans(*marks).end, done["ts"], "io")
    flags = decode_texts(issue["rwbs"])
    return {
        "block_id": np.arange(len(issue)),
        **context,
        "device": device_names(issue["dev"]),
        "sector": issue["sector"],
        "bytes": issue["bytes"],
        "operation": np.array([*(OPERATIONS.get(text[:1], "other") for text in flags), ""], object)[:-1],
        "flags": flags,
        "error": -spans.of_end(done, "error", 0),
        **spans.columns(),
    }


class IoEvents:
    """Page faults, reads and block requests of a recording."""

    def __init__(self, source: Source):
        fault, read, issue = (source.rows(kind) for kind in ("page_fault", "read_begin", "block_issue"))
        self.source = source
        self.parts = (Enclosed(fault, fault_begins(fault)), Enclosed(read, read["ts"]), Enclosed(issue, issue["ts"]))

    def note(self, piece: Source, activity: RangeActivity) -> None:
        """Look up the operators and experts of the events in one time range."""
        for part in self.parts:
            part.note(piece, activity)

    def tables(self, steps: Steps, loads: Columns) -> dict[str, Columns]:
        """The columns of `faults`, `reads` and `blocks`."""
        if not any(len(part.rows) for part in self.parts) and not len(self.source.rows("read_end")):
            return {"faults": {}, "reads": {}, "blocks": {}}
        files, loaded = FilePaths(self.source), loads["action"] == "load"
        loads = {name: loads[name][loaded] for name in ("load_id", "tid", "begin_ns", "end_ns", "complete")}
        fault, read, block = (part.columns(steps, loads) for part in self.parts)
        return {
            "faults": fault_columns(self.parts[0].rows, fault, files),
            "reads": read_columns(self.source, read, files),
            "blocks": block_columns(self.source, block),
        }
