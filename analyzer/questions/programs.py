"""A program as a whole, for those that no engine declares: its threads' time by cause, its disk, and what it read."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.step_time import step_time
from analyzer.records.intervals import Intervals, merge_intervals
from analyzer.records.schema import Tables, fill_missing
from analyzer.tables.store import LazyTables

THREADS, FILES = 12, 12
"""At most so many threads, and files by thread, are listed."""


def thread_lives(tables: Tables) -> pd.DataFrame:
    """The recorded life of each thread of the program as a row of `tokens`; the main thread of the busiest process first."""
    states, threads = tables["thread_states"], tables["threads"]
    ran = states["duration_ns"].where(states["state"] == "running", 0)
    spans = (
        states.assign(ran=ran)
        .groupby(["pid", "tid"], as_index=False)
        .agg(begin_ns=("begin_ns", "min"), end_ns=("end_ns", "max"), ran=("ran", "sum"))
    )
    spans = spans[spans["tid"].isin(threads.loc[threads["target"].to_numpy(bool), "tid"])]
    of_process = spans.groupby("pid")["ran"].transform("sum")
    order = spans.assign(busy=of_process, leads=spans["pid"] == spans["tid"]).sort_values(
        ["busy", "pid", "leads", "ran"], ascending=False, kind="stable"
    )
    return fill_missing("tokens", order.assign(token_id=np.arange(len(order)), duration_ns=order["end_ns"] - order["begin_ns"]))


def lives_as_steps(tables: Tables, lives: pd.DataFrame) -> LazyTables:
    """The tables with these threads' lives as steps, which the answers about steps then hold for."""
    return LazyTables.of(tables).with_table("tokens", lives)


def has_only_threads(tables: Tables) -> bool:
    """Whether nothing is known of the program but its threads: no steps, graphs or executions."""
    return len(tables["thread_states"]) > 0 and not any(len(tables[name]) for name in ("tokens", "graphs", "qnn_executes"))


def threads_by_cause(tables: Tables) -> list[dict[str, Any]]:
    """For the threads that lived: tid, name, ms, and cause_ms, which add up to ms; those with most time first."""
    lives = thread_lives(tables)
    time, names = step_time(lives_as_steps(tables, lives)), tables["threads"].set_index("tid")["name"]
    spent = time["duration_ns"].groupby([time["token_id"], time["cause"].astype(str)]).sum() / 1e6
    rows = []
    for row in lives.to_dict("records"):
        causes = spent[row["token_id"]].sort_values(ascending=False) if row["token_id"] in spent else pd.Series(dtype=float)
        about = {"tid": row["tid"], "pid": row["pid"], "name": str(names.get(row["tid"], "")), "ms": row["duration_ns"] / 1e6}
        rows.append({**about, "cause_ms": causes.to_dict()})
    return sorted(rows, key=lambda row: -row["cause_ms"].get("computing", 0.0))[:THREADS]


def most_at_once(begin: np.ndarray, end: np.ndarray) -> int:
    """The most of these spans at one time."""
    ts = np.concatenate([end, begin])
    change = np.repeat([-1, 1], [len(end), len(begin)])
    return int(np.cumsum(change[np.argsort(ts, kind="stable")]).max(initial=0))


def disk_use(blocks: pd.DataFrame, lasts_ns: float) -> list[dict[str, Any]]:
    """By device: share of the time `lasts_ns` with a request of the program in flight, requests then in flight, bytes."""
    rows = []
    for device, mine in blocks[blocks["complete"]].groupby("device"):
        begin, end = mine["begin_ns"].to_numpy(), mine["end_ns"].to_numpy()
        busy = float(merge_intervals(Intervals.of(begin, end)).length.sum())
        depth = {"mean_depth": float((end - begin).sum()) / max(busy, 1.0), "most_depth": most_at_once(begin, end)}
        sizes = {f"{name}_bytes": int(mine.loc[mine["operation"] == name, "bytes"].sum()) for name in ("read", "write")}
        rows.append({"device": str(device), "requests": len(mine), "busy_share": busy / max(lasts_ns, 1.0), **depth, **sizes})
    return sorted(rows, key=lambda row: -row["busy_share"])


def file_readers(tables: Tables) -> list[dict[str, Any]]:
    """Which thread read how much of which file, by calls and by page faults that waited; most time first."""
    faults, reads = tables["faults"], tables["reads"]
    parts = [reads.assign(how="read"), faults[faults["kind"] == "major"].assign(how="fault")]
    rows = pd.concat([part[["file", "tid", "how", "bytes", "duration_ns"]] for part in parts], ignore_index=True)
    names = tables["threads"].drop_duplicates("tid").set_index("tid")["name"]
    rows = rows.assign(thread=rows["tid"].map(names).fillna(""), ms=rows["duration_ns"].clip(lower=0) / 1e6)
    sums = rows.groupby(["file", "tid", "thread", "how"], as_index=False).agg(
        count=("ms", "size"), bytes=("bytes", "sum"), ms=("ms", "sum")
    )
    return sums.sort_values(["ms", "bytes"], ascending=False).head(FILES).to_dict("records")


def program_summary(tables: Tables) -> dict[str, Any]:
    """`threads`, `disks` and `files` of a program that no engine declares; {} if its scheduling was not recorded."""
    states = tables["thread_states"]
    if not len(states):
        return {}
    lasts = float(states["end_ns"].max() - states["begin_ns"].min())
    return {
        "ms": lasts / 1e6,
        "threads": threads_by_cause(tables),
        "disks": disk_use(tables["blocks"], lasts),
        "files": file_readers(tables),
    }
