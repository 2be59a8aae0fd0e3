"""The time of steps: every moment has a part (what was done) and a cause (what it took); both add up to the step.

A step is seen from its own thread (deciders.py); causes.py has the precedence of causes, parts.py the parts.
"""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.causes import CAUSES, NOT_COMPUTING, RESIDUAL, AcceleratorWork, cause_intervals
from analyzer.questions.deciders import StepThreads, decisive_pieces, spans_of
from analyzer.questions.figures import undisturbed_steps
from analyzer.questions.parts import PARTS
from analyzer.records.intervals import Intervals, by_precedence, merge_intervals, overlaps
from analyzer.records.schema import Tables, conform, empty_table
from analyzer.records.spans import NONE, following, latest
from analyzer.tables.sequences import APART
from analyzer.tables.store import answered_once

TABLES = (
    *("tokens", "graphs", "operators", "op_threads", "loads", "qnn_executes", "qnn_calls", "thread_states", "threads", "sched"),
    *("faults", "reads", "npu_batches", "npu_operators", "driver_events"),
)
"""The tables that the times are made from."""
LEAST_MS = 0.05


@answered_once
def step_time(tables: Tables) -> pd.DataFrame:
    """The table `time`: pieces that tile every step."""
    steps, submitted = StepThreads(tables), AcceleratorWork(tables)
    pieces = decisive_pieces(steps, submitted.all)
    spans, cause = by_precedence(steps.windows, cause_intervals(submitted, steps, pieces), RESIDUAL)
    met = overlaps(spans_of(pieces, "owner"), spans)
    order = np.lexsort((met.begin, pieces["step"].to_numpy()[met.left]))
    codes = pd.Categorical(cause, CAUSES).codes[met.right[order]]
    rows = pieces[["step", "tid", "part", "operator", "load"]].iloc[met.left[order]]
    rows = rows.assign(cause=codes, begin_ns=met.begin[order], end_ns=met.end[order])
    rows = merge_stretches(rows, "step", "tid", "part", "operator", "load", "cause")
    ids = {"token_id": ("tokens", "step"), "op_id": ("operators", "operator"), "load_id": ("loads", "load")}
    named = {name: np.append(tables[table][name], NONE)[rows[row]] for name, (table, row) in ids.items()}
    named |= {"part": np.array(PARTS, object)[rows["part"]], "cause": np.array(CAUSES, object)[rows["cause"]]}
    return conform("time", rows.assign(**named, duration_ns=rows["end_ns"] - rows["begin_ns"]))


def merge_stretches(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Rows with begin_ns and end_ns, in order; those that go on without a gap, equal in `columns`, are one."""
    begin, end = rows["begin_ns"].to_numpy(), rows["end_ns"].to_numpy()
    new = np.append(True, begin[1:] != end[:-1])[: len(rows)]
    for column in (rows[name].to_numpy() for name in columns):
        new[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(new)
    return rows.iloc[first].assign(end_ns=np.append(end, 0)[np.append(first[1:], len(rows)) - 1][: len(first)])


def per_step(tables: Tables, time: pd.DataFrame, by: str) -> pd.DataFrame:
    """ns by token_id, a column for each value of the column `by` that occurs; steps without time have zeros."""
    names = pd.Categorical(time[by])
    tokens = pd.Index(tables["tokens"]["token_id"], name="token_id")
    cell = tokens.get_indexer(time["token_id"]) * len(names.categories) + names.codes
    sums = np.bincount(cell, time["duration_ns"].to_numpy(), len(tokens) * len(names.categories))
    return pd.DataFrame(sums.reshape(len(tokens), -1), index=tokens, columns=list(names.categories))


def counted_time(tables: Tables, time: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the steps that figures count, by token_id: complete, feeding tokens, not disturbed; their rows of `time`)."""
    steps = tables["tokens"].set_index("token_id")
    steps = undisturbed_steps(steps[steps["complete"] & ~steps["phase"].isin(APART)])
    return steps, time[time["token_id"].isin(steps.index)]


def of_counted(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without those of steps that figures leave out."""
    left_out = tables["tokens"][~tables["tokens"]["token_id"].isin(counted_steps(tables)["token_id"])]
    return rows[~rows["token_id"].isin(left_out["token_id"])]


def counted_steps(tables: Tables) -> pd.DataFrame:
    """token_id and phase of the steps that figures count."""
    return counted_time(tables, empty_table("time"))[0]["phase"].reset_index()


def time_cells(tables: Tables, time: pd.DataFrame) -> pd.DataFrame:
    """Sums of `counted_time` by phase, part and cause, and each phase's steps: phase, steps, part, cause, ms; largest first."""
    steps, time = counted_time(tables, time)
    phase = steps["phase"].reindex(time["token_id"]).to_numpy()
    spent = time["duration_ns"].groupby([phase, time["part"].to_numpy(), time["cause"].to_numpy()]).sum() / 1e6
    rows = spent.rename_axis(["phase", "part", "cause"]).rename("ms").reset_index()
    rows.insert(1, "steps", rows["phase"].map(steps.groupby("phase").size()).astype(np.int64))
    return rows.sort_values("ms", ascending=False, kind="stable", ignore_index=True)


def mean_steps(tables: Tables) -> pd.DataFrame:
    """The mean step of each phase: phase, steps, part, cause, ms; the ms of a phase add up to the step."""
    rows = time_cells(tables, step_time(tables))
    return rows.assign(ms=rows["ms"] / rows["steps"])


def time_totals(rows: pd.DataFrame, steps: int, each: int = 1) -> dict[str, Any]:
    """`steps`, `ms`, and its division by cause, by part and by both, from `time_cells`; divided by `each`."""
    rows = rows.groupby(["part", "cause"], sort=False)["ms"].sum().div(each).sort_values(ascending=False, kind="stable")
    sums = {f"{by}_ms": rows.groupby(level=by).sum().sort_values(ascending=False).to_dict() for by in ("cause", "part")}
    return {"steps": steps, "ms": float(rows.sum()), **sums, "cells": rows.reset_index().to_dict("records")}


def time_summary(tables: Tables, time: pd.DataFrame) -> dict[str, Any]:
    """`phases`: for each phase the mean step, `run`: the sum of all steps, as `time_totals`. {} without complete steps."""
    rows = time_cells(tables, time)
    if not len(rows):
        return {}
    counts = rows.groupby("phase")["steps"].first()
    of_phases = {str(phase): time_totals(rows[rows["phase"] == phase], int(n), int(n)) for phase, n in counts.items()}
    return {"phases": of_phases, "run": time_totals(rows, int(counts.sum()))}


def whole_run(tables: Tables) -> dict[str, float]:
    """The run from the first step's begin to the last one's end, in ms: steps by phase, time between them, and their overlap."""
    tokens = tables["tokens"]
    if len(tokens) == 0:
        return {}
    spans = Intervals.of(tokens["begin_ns"].to_numpy(), tokens["end_ns"].to_numpy())
    total = int(spans.end.max() - spans.begin.min())
    between = (total - int(merge_intervals(spans).length.sum())) / 1e6
    spent = {str(phase): float(ns) / 1e6 for phase, ns in tokens.groupby("phase")["duration_ns"].sum().items()}
    concurrent = sum(spent.values()) + between - total / 1e6
    return {"total": total / 1e6, **spent, "between steps": between, "concurrent": concurrent}


def operator_times(tables: Tables, time: pd.DataFrame | None = None) -> pd.DataFrame:
    """Each operator's computing time and what its step lost in it: op_id, computing_ns, and ns of each cause of NOT_COMPUTING.

    They add up to the operator's duration. While one thread of an operator waits for another one, the operator computes; an
    accelerator's time and that of its submission count as computing.
    """
    operators, time = tables["operators"].set_index("op_id"), step_time(tables) if time is None else time
    rows = time[((time["op_id"] >= 0) & time["cause"].isin(NOT_COMPUTING)).to_numpy()]
    end = np.minimum(rows["end_ns"].to_numpy(), operators["end_ns"].reindex(rows["op_id"]).to_numpy())
    ns = (end - rows["begin_ns"]).clip(lower=0)
    spent = ns.groupby([rows["op_id"], rows["cause"].astype(str)]).sum().unstack(fill_value=0)
    lost = spent.reindex(index=operators.index, columns=list(NOT_COMPUTING), fill_value=0)
    lost.insert(0, "computing_ns", (operators["duration_ns"] - lost.sum(axis=1)).clip(lower=0))
    return lost.reset_index()


def charged_ns(tables: Tables, time: pd.DataFrame, table: str, key: str) -> np.ndarray:
    """ns of `time` in each row of `operators` (`key` op_id) or `loads` (load_id); a load's time is not its operator's, too."""
    rows = time if key == "load_id" else time[(time["load_id"] < 0).to_numpy()]
    return rows["duration_ns"].groupby(rows[key]).sum().reindex(tables[table][key], fill_value=0).to_numpy(np.float64)


def lost_text(lost: pd.DataFrame) -> str:
    """What `operator_times` took out of the operators, as text: "12.3 ms: expert load 10.1, run queue 2.2"; "" for nothing."""
    sums = (lost[list(NOT_COMPUTING)].sum() / 1e6).sort_values(ascending=False)
    named = ", ".join(f"{cause} {ms:,.1f}" for cause, ms in sums.items() if ms >= LEAST_MS)
    return f"{sums.sum():,.1f} ms: {named}" if named else ""


def gap_pieces(tables: Tables, time: pd.DataFrame | None = None) -> pd.DataFrame:
    """The pieces of `time` outside of operators and loads, with the operators around each: `after` and `before`, "" for none."""
    time = step_time(tables) if time is None else time
    rows = time[((time["op_id"] < 0) & (time["load_id"] < 0)).to_numpy()].drop(columns=["op_id", "load_id"])
    operators = tables["operators"].query("token_id >= 0")
    step, begin, end = (operators[name].to_numpy() for name in ("token_id", "begin_ns", "end_ns"))
    around = {
        "after": latest(step, end, rows["token_id"].to_numpy(), rows["begin_ns"].to_numpy()),
        "before": following(step, begin, rows["token_id"].to_numpy(), rows["end_ns"].to_numpy() - 1),
    }
    names = np.append(operators["name"].to_numpy(object), "")
    columns = {name: pd.Series(names[row], rows.index, dtype=object) for name, row in around.items()}
    return rows.assign(**columns).reset_index(drop=True)
