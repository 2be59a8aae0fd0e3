"""Threads: their states during operators, and the balance of work between them."""

from typing import Any

import pandas as pd

from analyzer.questions import displacement
from analyzer.records.intervals import Intervals, overlaps
from analyzer.records.schema import Tables

STATES = ("running", "runnable", "sleeping", "waiting", "stopped")


def operator_states(tables: Tables) -> pd.DataFrame:
    """Per operator type: `busy_ms` summed over threads, its share in each state, and `unknown` for times without a state."""
    shares, states, operators = tables["op_threads"], tables["thread_states"], tables["operators"]
    spans = Intervals.of_table(shares, end="wait_ns")  # each thread's work, without its wait for the others
    pieces = overlaps(spans, Intervals.of_table(states))
    kind = operators["type"].to_numpy()[shares["op_id"].to_numpy()]
    spent = pd.DataFrame({"type": kind[pieces.left], "state": states["state"].to_numpy()[pieces.right], "ns": pieces.length})
    wide = spent.pivot_table(index="type", columns="state", values="ns", aggfunc="sum", fill_value=0)
    busy = pd.Series(spans.length).groupby(kind).sum()
    shared = wide.reindex(index=busy.index, columns=STATES, fill_value=0).div(busy.clip(lower=1), axis=0)
    rows = shared.assign(unknown=(1 - shared.sum(axis=1)).clip(lower=0), busy_ms=busy / 1e6)
    return rows.sort_values("busy_ms", ascending=False).rename_axis("type").reset_index()[["type", "busy_ms", *STATES, "unknown"]]


def thread_balance(tables: Tables) -> pd.DataFrame:
    """Per thread: `operators`, `busy_ms`, `wait_ms` for the others, `last_share` of its shared operators that it ended last."""
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


def thread_summary(tables: Tables, rows: pd.DataFrame) -> dict[str, Any]:
    """Thread figures, JSON-able, from `displacements`; {} if no scheduling was recorded."""
    if len(tables["thread_states"]) == 0 or len(tables["op_threads"]) == 0:
        return {}
    total = float(tables["tokens"]["duration_ns"].sum())
    cost = displacement.won_ns(tables, rows, rows["end_ns"] - rows["begin_ns"])
    return {"displaced": len(rows), "displaced_cost_ms": cost / 1e6, "displaced_share": cost / total if total else 0.0}
