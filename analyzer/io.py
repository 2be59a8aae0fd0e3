"""I/O: page faults of files, reads and block requests, each with the operator, expert and load that its thread was in."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analyzer.operators import OpThreads
from analyzer.reading import Rows, Source, chosen, section, texts
from analyzer.schema import conform
from analyzer.spans import NONE, Marks, Nest, codes, pair
from analyzer.steps import Steps

CALLS = np.array(["read", "pread64", "readv", "preadv", "preadv2"], object)
MAJOR, EXACT = 1, 2
MINOR_BITS = 20
UNTOLD_BYTES = 2**32 - 1
OPERATIONS = {"R": "read", "W": "write", "D": "discard", "F": "flush"}
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Place:
    """What a thread was in: finds token, operator, expert and load by thread and time."""

    tokens: Steps
    ops: OpThreads
    op_id: np.ndarray
    op_expert: np.ndarray
    runs: Nest
    run_expert: np.ndarray
    loads: Nest
    load_id: np.ndarray

    @cached_property
    def operators(self) -> Nest:
        """The operators of each thread as a stack in time."""
        ops = self.ops
        return Nest(ops.rows["tid"], ops.begin, np.where(ops.complete, ops.end, ops.end + 1))

    def columns(self, rows: Rows, ts: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of schema.WITHIN and schema.OWNER for events of these records' threads at `ts`."""
        tid = rows["tid"]
        if len(tid) == 0:
            nothing = np.empty(0, np.int64)
            return dict.fromkeys(("token_id", "op_id", "expert", "load_id", "pid", "tid"), nothing)
        op = found(self.op_id, self.operators.innermost(tid, ts))
        expert = found(self.run_expert, self.runs.innermost(tid, ts))
        return {
            "token_id": self.tokens.at({"tid": tid, "pid": rows["pid"]}, ts),
            "op_id": op,
            "expert": np.where(expert >= 0, expert, found(self.op_expert, op)),
            "load_id": found(self.load_id, self.loads.innermost(tid, ts)),
            "pid": rows["pid"],
            "tid": tid,
        }


def found(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """values[at], -1 where `at` is -1."""
    return np.where(at >= 0, values[at], NONE) if len(values) else np.full(len(at), NONE, np.int64)


def spans_of(table: pd.DataFrame) -> Nest:
    """The spans of a table on their threads; the last instant of an unfinished one belongs to it."""
    end = table["end_ns"].to_numpy() + ~table["complete"].to_numpy()
    return Nest(table["tid"].to_numpy(), table["begin_ns"].to_numpy(), end)


def place(tokens: Steps, ops: OpThreads, op_id: np.ndarray, tables: dict[str, pd.DataFrame]) -> Place:
    """Everything that encloses."""
    loads = tables["loads"][tables["loads"]["action"] == "load"]
    runs = tables["experts"]
    return Place(
        tokens,
        ops,
        op_id,
        tables["operators"]["expert"].to_numpy(),
        spans_of(runs),
        runs["expert"].to_numpy(),
        spans_of(loads),
        loads["load_id"].to_numpy(),
    )


class Files:
    """Paths by device and inode: the manifest's, else the bare names that the kernel side sent."""

    def __init__(self, source: Source):
        listed = section(source.manifest, "io").get("files")
        rows = source.rows("io_file")
        names = zip(rows["dev"].tolist(), rows["ino"].tolist(), texts(rows["name"]), strict=True)
        self.paths = {(dev, ino): name for dev, ino, name in names}
        for row in listed if isinstance(listed, list) else []:
            if isinstance(row, dict) and row.get("path"):
                self.paths[int(row.get("dev", NONE)), int(row.get("ino", NONE))] = str(row["path"])
        size = section(source.manifest, "io").get("page_bytes")
        self.page_bytes = size if isinstance(size, int) and size > 0 else PAGE_BYTES

    def columns(self, rows: Rows) -> dict[str, np.ndarray]:
        """The columns of schema.FILE."""
        dev, ino = rows["dev"], rows["ino"]
        key = codes(dev, ino)
        _, first = np.unique(key, return_index=True)
        names = [self.paths.get(pair, "") for pair in zip(dev[first].tolist(), ino[first].tolist(), strict=True)]
        return {"file": np.array([*names, ""], object)[key], "device": devices(dev), "ino": rows.raw("ino")}


def devices(dev: np.ndarray) -> np.ndarray:
    """Kernel device numbers as "major:minor"; "" for none."""
    numbers, inverse = np.unique(dev, return_inverse=True)
    names = [f"{n >> MINOR_BITS}:{n & ((1 << MINOR_BITS) - 1)}" if n else "" for n in numbers.tolist()]
    return np.array([*names, ""], object)[inverse]


def faults(source: Source, within: Place, files: Files) -> pd.DataFrame:
    """The table `faults`, in order of their ends."""
    rows = source.rows("page_fault")
    flags, told, end = rows["flags"], rows["begin"] > 0, rows["ts"]
    begin = np.where(told, rows["begin"], end)
    return conform(
        "faults",
        {
            "fault_id": np.arange(len(rows)),
            **within.columns(rows, begin),
            **files.columns(rows),
            "kind": np.where(flags & MAJOR, "major", "minor").astype(object),
            "offset": np.where(rows["ino"] != 0, rows["page"] * files.page_bytes, NONE),
            "exact": (flags & EXACT) > 0,
            "bytes": rows["added"] * files.page_bytes,
            "begin_ns": begin,
            "end_ns": end,
            "duration_ns": np.where(told, end - begin, NONE),
        },
    )


def reads(source: Source, within: Place, files: Files) -> pd.DataFrame:
    """The table `reads`."""
    spans = source.spans("read")
    begin, end = source.rows("read_begin"), source.rows("read_end")
    asked = begin["bytes"]
    result = np.where(spans.end >= 0, end["result"][spans.end], NONE) if len(end) else np.full(len(begin), NONE)
    added = np.where(spans.end >= 0, end["added"][spans.end], 0) if len(end) else np.zeros(len(begin), np.int64)
    return conform(
        "reads",
        {
            "read_id": np.arange(len(begin)),
            **within.columns(begin, begin["ts"]),
            **files.columns(begin),
            "call": chosen(CALLS, begin["call"]),
            "fd": begin["fd"],
            "offset": begin["offset"],
            "asked_bytes": np.where(asked == UNTOLD_BYTES, NONE, asked),
            "bytes": np.maximum(result, 0),
            "error": np.where(spans.complete, np.maximum(-result, 0), 0),
            "missed_bytes": added * files.page_bytes,
            **spans.columns(),
        },
    )


def blocks(source: Source, within: Place) -> pd.DataFrame:
    """The table `blocks`: requests from issue to answer, paired by device and sector."""
    issue, done = source.rows("block_issue"), source.rows("block_done")
    key = codes(*(np.concatenate((issue[field], done[field])) for field in ("dev", "sector")))
    nothing = np.zeros(len(key), np.int64)
    marks = [
        Marks(key[part], rows["ts"], rows.position, nothing[part], nothing[part] > 0)
        for part, rows in ((slice(len(issue)), issue), (slice(len(issue), None), done))
    ]
    answer = pair(*marks).end
    spans = source.close(issue, answer, done["ts"], "io")
    error = np.where(answer >= 0, done["error"][answer], 0) if len(done) else np.zeros(len(issue), np.int64)
    flags = texts(issue["rwbs"])
    return conform(
        "blocks",
        {
            "block_id": np.arange(len(issue)),
            **within.columns(issue, issue["ts"]),
            "device": devices(issue["dev"]),
            "sector": issue["sector"],
            "bytes": issue["bytes"],
            "operation": np.array([*(OPERATIONS.get(text[:1], "other") for text in flags), ""], object)[:-1],
            "flags": flags,
            "error": -error,
            **spans.columns(),
        },
    )


def build(source: Source, tokens: Steps, ops: OpThreads, op_id: np.ndarray, tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """The tables `faults`, `reads` and `blocks`; `tables` holds operators, experts and loads."""
    within, files = place(tokens, ops, op_id, tables), Files(source)
    return {
        "faults": faults(source, within, files),
        "reads": reads(source, within, files),
        "blocks": blocks(source, within),
    }
