"""The time of steps: every moment has a part (what was done) and a cause (what it took); both add up to the step.

A step is seen from its own thread (deciders.py); causes.py has the precedence of causes, parts.py the parts.
"""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.causes import ASLEEP, CAUSES, DISK, EXPERT_LOAD, RESIDUAL, RUN_QUEUE, STOPPED, HandOver, candidates
from analyzer.questions.deciders import StepThreads, decisive_pieces, spans_of
from analyzer.questions.figures import undisturbed
from analyzer.questions.parts import PARTS
from analyzer.records.intervals import Intervals, by_precedence, overlaps, uncovered
from analyzer.records.schema import Tables, conform, empty
from analyzer.tables.sequences import APART

TABLES = (
    *("tokens", "graphs", "operators", "op_threads", "loads", "qnn_executes", "qnn_calls", "thread_states", "threads", "sched"),
    *("faults", "reads", "npu_batches", "npu_operators", "driver_events"),
)
"""The tables that the times are made from."""
NOT_COMPUTING = (RUN_QUEUE, ASLEEP, DISK, EXPERT_LOAD, STOPPED)
"""Causes within an operator that are none of its own work."""
LEAST_MS = 0.05


def step_time(tables: Tables) -> pd.DataFrame:
    """The table `time`: pieces that tile every step and the waits for an accelerator behind it."""
    steps, hand = StepThreads(tables), HandOver(tables)
    pieces = decisive_pieces(steps, hand.all)
    spans, cause = by_precedence(steps.windows, candidates(hand, steps, pieces), RESIDUAL)
    met = overlaps(spans_of(pieces, "owner"), spans)
    rows = pieces.iloc[met.left].assign(begin_ns=met.begin, end_ns=met.end, cause=pd.Categorical(cause, CAUSES).codes[met.right])
    rows = joined(rows.sort_values(["step", "begin_ns"]), "step", "tid", "part", "op", "load", "cause")
    return conform(
        "time",
        {
            "token_id": identities(tables["tokens"], "token_id", rows["step"]),
            "tid": rows["tid"].to_numpy(),
            "op_id": identities(tables["operators"], "op_id", rows["op"]),
            "load_id": identities(tables["loads"], "load_id", rows["load"]),
            "part": np.array(PARTS, object)[rows["part"].to_numpy()],
            "cause": np.array(CAUSES, object)[rows["cause"].to_numpy()],
            "begin_ns": rows["begin_ns"].to_numpy(),
            "end_ns": rows["end_ns"].to_numpy(),
            "duration_ns": (rows["end_ns"] - rows["begin_ns"]).to_numpy(),
        },
    )


def identities(table: pd.DataFrame, name: str, rows: pd.Series) -> np.ndarray:
    """The ids of rows of a table; -1 for row -1."""
    return np.append(table[name].to_numpy(np.int64), -1)[rows.to_numpy()]


def joined(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Rows with begin_ns and end_ns, in order, without those that continue the row before without a gap and equal it in `columns`."""
    begin, end = rows["begin_ns"].to_numpy(), rows["end_ns"].to_numpy()
    new = np.append(True, begin[1:] != end[:-1])[: len(rows)]
    for column in (rows[name].to_numpy() for name in columns):
        new[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(new)
    return rows.iloc[first].assign(end_ns=np.append(end, 0)[np.append(first[1:], len(rows)) - 1][: len(first)])


def by_step_and_cause(time: pd.DataFrame) -> pd.DataFrame:
    """Rows of `time` joined to stretches of one step and cause: token_id, cause, begin_ns, end_ns."""
    return joined(time[["token_id", "cause", "begin_ns", "end_ns"]], "token_id", "cause")


def sums(time: pd.DataFrame) -> pd.DataFrame:
    """The sums of `time` by token_id, part and cause: `duration_ns`."""
    return time.groupby(["token_id", "part", "cause"], as_index=False)["duration_ns"].sum()


def per_step(tables: Tables, time: pd.DataFrame, by: str) -> pd.DataFrame:
    """ns by token_id, a column for each value of the column `by` that occurs; steps without time have zeros."""
    names = pd.Categorical(time[by])
    tokens = pd.Index(tables["tokens"]["token_id"], name="token_id")
    cell = tokens.get_indexer(time["token_id"]) * len(names.categories) + names.codes
    sums = np.bincount(cell, time["duration_ns"].to_numpy(), len(tokens) * len(names.categories))
    return pd.DataFrame(sums.reshape(len(tokens), -1), index=tokens, columns=list(names.categories))


def counted(tables: Tables, time: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the steps that figures count, by token_id: complete, feeding tokens, not disturbed; their rows of `time`)."""
    steps = tables["tokens"].set_index("token_id")
    steps = undisturbed(steps[steps["complete"] & ~steps["phase"].isin(APART)])
    return steps, time[time["token_id"].isin(steps.index)]


def counted_steps(tables: Tables) -> pd.DataFrame:
    """token_id and phase of the steps that figures count."""
    return counted(tables, empty("time"))[0]["phase"].reset_index()


def cells(steps: pd.DataFrame, time: pd.DataFrame) -> pd.DataFrame:
    """Sums of `counted` by phase, part and cause: phase, part, cause, ms; largest first."""
    phase = steps["phase"].reindex(time["token_id"]).to_numpy()
    spent = time["duration_ns"].groupby([phase, time["part"].astype(str), time["cause"].astype(str)]).sum() / 1e6
    frame = spent.rename_axis(["phase", "part", "cause"]).rename("ms").reset_index()
    return frame.sort_values("ms", ascending=False, kind="stable", ignore_index=True)


def mean_steps(tables: Tables) -> pd.DataFrame:
    """The mean step of each phase: phase, steps, part, cause, ms; the ms of a phase add up to the step."""
    steps, time = counted(tables, step_time(tables))
    rows, count = cells(steps, time), steps.groupby("phase").size()
    of_phase = rows["phase"].map(count).astype(np.int64)
    rows.insert(1, "steps", of_phase)
    return rows.assign(ms=rows["ms"] / of_phase)


def totals(rows: pd.DataFrame, steps: int, each: int = 1) -> dict[str, Any]:
    """`steps`, `ms`, and its division by cause, by part and by both, from `cells`; divided by `each`."""
    rows = rows.groupby(["part", "cause"], sort=False)["ms"].sum().div(each).sort_values(ascending=False, kind="stable")
    sums = {f"{by}_ms": rows.groupby(level=by).sum().sort_values(ascending=False).to_dict() for by in ("cause", "part")}
    return {"steps": steps, "ms": float(rows.sum()), **sums, "cells": rows.reset_index().to_dict("records")}


def summary(tables: Tables, time: pd.DataFrame) -> dict[str, Any]:
    """`phases`: for each phase the mean step, `run`: the sum of all steps, as `totals`. {} without complete steps.

    Complete steps only; an accelerator's work that a step waits for behind its end counts as the step's.
    """
    steps, time = counted(tables, time)
    if not len(steps):
        return {}
    rows, count = cells(steps, time), steps.groupby("phase").size()
    of_phases = {str(phase): totals(rows[rows["phase"] == phase], int(n), int(n)) for phase, n in count.items()}
    return {"phases": of_phases, "run": totals(rows, len(steps))}


def whole_run(tables: Tables) -> dict[str, float]:
    """The run from the first step's begin to the last one's end, in ms: steps by phase, time between them, and their overlap."""
    tokens = tables["tokens"]
    if len(tokens) == 0:
        return {}
    first, last = int(tokens["begin_ns"].min()), int(tokens["end_ns"].max())
    spans = Intervals.of(tokens["begin_ns"].to_numpy(), tokens["end_ns"].to_numpy())
    between = uncovered(Intervals.of(np.array([first]), np.array([last])), spans).length.sum()
    spent = {str(phase): float(ns) / 1e6 for phase, ns in tokens.groupby("phase")["duration_ns"].sum().items()}
    total = (last - first) / 1e6
    concurrent = sum(spent.values()) + float(between) / 1e6 - total
    return {"total": total, **spent, "between steps": float(between) / 1e6, "concurrent": concurrent}


def operator_times(tables: Tables, time: pd.DataFrame | None = None) -> pd.DataFrame:
    """Each operator's computing time and what its step lost in it: op_id, computing_ns, and ns of each cause of NOT_COMPUTING.

    They add up to the operator's duration. While one thread of an operator waits for another one, the operator computes; an
    accelerator's time and that of its submission count as computing.
    """
    operators, time = tables["operators"], step_time(tables) if time is None else time
    rows = time[(time["op_id"] >= 0).to_numpy()]
    rows = rows.assign(cause=rows["cause"].astype(object))
    spent = rows[rows["cause"].isin(NOT_COMPUTING)].groupby(["op_id", "cause"])["duration_ns"].sum().unstack(fill_value=0)
    lost = spent.reindex(index=operators["op_id"], columns=list(NOT_COMPUTING), fill_value=0).reset_index()
    computing = operators["duration_ns"].to_numpy() - lost[list(NOT_COMPUTING)].sum(axis=1)
    lost.insert(1, "computing_ns", computing.clip(lower=0))
    return lost


def lost_text(lost: pd.DataFrame) -> str:
    """What `operator_times` took out of the operators, as text: "12.3 ms: expert load 10.1, run queue 2.2"; "" for nothing."""
    sums = (lost[list(NOT_COMPUTING)].sum() / 1e6).sort_values(ascending=False)
    named = ", ".join(f"{cause} {ms:,.1f}" for cause, ms in sums.items() if ms >= LEAST_MS)
    return f"{sums.sum():,.1f} ms: {named}" if named else ""


def gaps(tables: Tables, time: pd.DataFrame | None = None) -> pd.DataFrame:
    """The pieces of `time` outside of operators and loads, with the operators around each: `after` and `before`, "" for none."""
    time = step_time(tables) if time is None else time
    rows = time[((time["op_id"] < 0) & (time["load_id"] < 0)).to_numpy()].drop(columns=["op_id", "load_id"])
    operators = tables["operators"]
    named = operators.loc[operators["token_id"] >= 0, ["token_id", "begin_ns", "end_ns", "name"]]
    for column, ts, side, way in (("after", "begin_ns", "end_ns", "backward"), ("before", "end_ns", "begin_ns", "forward")):
        right = named[["token_id", side, "name"]].rename(columns={side: "at", "name": column}).sort_values("at")
        left = rows[["token_id", ts]].rename(columns={ts: "at"}).reset_index().sort_values("at")
        matched = pd.merge_asof(left, right, on="at", by="token_id", direction=way)
        rows[column] = matched.set_index("index")[column].reindex(rows.index).fillna("")
    return rows.reset_index(drop=True)
