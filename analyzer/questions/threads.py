"""Threads: in which states they spent their operators, how evenly they shared the work, and who took a CPU from them."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.records.intervals import Intervals, overlaps
from analyzer.records.schema import Tables
from analyzer.records.spans import NONE, distinct, latest

IDLE = "nobody, waking up"
"""What stands for an idle CPU that a woken thread has not come to yet."""
STATES = ("running", "runnable", "sleeping", "waiting", "stopped")


def operator_states(tables: Tables) -> pd.DataFrame:
    """Per operator type: `busy_ms` summed over threads, its share in each state, and `unknown` where no state was recorded."""
    shares, states, operators = tables["op_threads"], tables["thread_states"], tables["operators"]
    spans = Intervals.of_table(shares, end="wait_ns")  # what each thread computed, without its wait for the others
    pieces = overlaps(spans, Intervals.of_table(states))
    kind = operators["type"].to_numpy()[shares["op_id"].to_numpy()]
    spent = pd.DataFrame({"type": kind[pieces.left], "state": states["state"].to_numpy()[pieces.right], "ns": pieces.length})
    wide = spent.pivot_table(index="type", columns="state", values="ns", aggfunc="sum", fill_value=0)
    busy = pd.Series(spans.length).groupby(kind).sum()
    shared = wide.reindex(index=busy.index, columns=STATES, fill_value=0).div(busy.clip(lower=1), axis=0)
    rows = shared.assign(unknown=(1 - shared.sum(axis=1)).clip(lower=0), busy_ms=busy / 1e6)
    return rows.sort_values("busy_ms", ascending=False).rename_axis("type").reset_index()[["type", "busy_ms", *STATES, "unknown"]]


def balance(tables: Tables) -> pd.DataFrame:
    """Per thread: `operators`, `busy_ms`, `wait_ms` for the others, `last_share` of its shared operators that it did last."""
    shares = tables["op_threads"]
    shared = shares.groupby("op_id")["tid"].transform("size") > 1
    latest = shares["wait_ns"] == shares.groupby("op_id")["wait_ns"].transform("max")
    rows = shares.assign(busy=shares["wait_ns"] - shares["begin_ns"], wait=shares["end_ns"] - shares["wait_ns"])
    rows = rows.assign(shared=shared, last=shared & latest)
    by_thread = rows.groupby("tid").agg(
        operators=("op_id", "size"), busy=("busy", "sum"), wait=("wait", "sum"), shared=("shared", "sum"), last=("last", "sum")
    )
    names = tables["threads"].set_index("tid")["name"].reindex(by_thread.index).fillna("")
    last_share = by_thread["last"] / by_thread["shared"].where(by_thread["shared"] > 0)
    rows = by_thread.assign(name=names, busy_ms=by_thread["busy"] / 1e6, wait_ms=by_thread["wait"] / 1e6, last_share=last_share)
    columns = ["tid", "name", "operators", "busy_ms", "wait_ms", "last_share"]
    return rows.reset_index()[columns].sort_values("busy_ms", ascending=False, ignore_index=True)


def displacements(tables: Tables) -> pd.DataFrame:
    """Every piece of time in which a thread within an operator was ready but had no CPU, and who ran where it had last run.

    op_id, token_id, tid, begin_ns, end_ns, by_tid (-1: not known), cost_ns: what the operator took longer for it, counted where
    the thread was the last to be done.
    """
    shares, states = tables["op_threads"], tables["thread_states"]
    ready = (states["state"] == "runnable").to_numpy() & np.isin(states["tid"].to_numpy(), distinct(shares["tid"].to_numpy()))
    pieces = overlaps(Intervals.of_table(shares, end="wait_ns"), Intervals.of_table(states).where(ready))
    op = shares["op_id"].to_numpy()[pieces.left]
    last = (shares["wait_ns"] == shares.groupby("op_id")["wait_ns"].transform("max")).to_numpy()
    tid = shares["tid"].to_numpy()[pieces.left]
    return pd.DataFrame(
        {
            "op_id": op,
            "token_id": tables["operators"]["token_id"].to_numpy()[op],
            "tid": tid,
            "begin_ns": pieces.begin,
            "end_ns": pieces.end,
            "by_tid": displacers(tables["sched"], tid, pieces.begin),
            "cost_ns": np.where(last[pieces.left], pieces.length, 0),
        }
    )


def displacers(sched: pd.DataFrame, tid: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """Who was running, at each time, on the CPU where a thread had last been switched out; -1 where that is not known."""
    switch = (sched["event"] == "switch").to_numpy()
    since, left, incoming, cpu = (sched[name].to_numpy()[switch] for name in ("ts_ns", "prev_tid", "next_tid", "cpu"))
    where = np.append(cpu, NONE)[latest(left, since, tid, ts)]
    return np.append(incoming, NONE)[latest(cpu, since, where, ts)]


def displaced_by(tables: Tables, rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """Per displacing thread: name, whether it is the program's own, `times`, `ms`, `cost_ms` of token time."""
    rows = displacements(tables) if rows is None else rows
    rows = rows[rows["by_tid"] != rows["tid"]]
    threads = tables["threads"].set_index("tid")
    rows = rows.assign(ms=(rows["end_ns"] - rows["begin_ns"]) / 1e6, cost_ms=rows["cost_ns"] / 1e6)
    by_thread = rows.groupby("by_tid").agg(times=("op_id", "size"), ms=("ms", "sum"), cost_ms=("cost_ms", "sum"))
    who = threads.reindex(by_thread.index)
    by_thread.insert(0, "name", np.where(by_thread.index == 0, IDLE, who["name"].fillna("?")))
    by_thread.insert(1, "own", who["target"].eq(True))
    return by_thread.reset_index().sort_values("cost_ms", ascending=False, ignore_index=True)


def summary(tables: Tables) -> dict[str, Any]:
    """Threads in numbers, JSON-able; {} where no scheduling was recorded."""
    if len(tables["thread_states"]) == 0 or len(tables["op_threads"]) == 0:
        return {}
    rows = displacements(tables)
    total = float(tables["tokens"]["duration_ns"].sum())
    cost = float(rows.loc[rows["token_id"] >= 0, "cost_ns"].sum())
    return {"displaced": len(rows), "displaced_cost_ms": cost / 1e6, "displaced_share": cost / total if total else 0.0}
