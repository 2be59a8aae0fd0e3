"""Displaced threads: times in which a needed thread had no CPU, the threads that ran instead, and the time that steps lost."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.questions.step_time import counted_steps
from analyzer.records.intervals import Intervals, Overlaps, merge_intervals, overlaps, uncovered_parts
from analyzer.records.schema import Tables
from analyzer.records.spans import NONE, distinct_sorted, latest

IDLE = "none (waking up)"
"""The name for an idle CPU that a woken thread has not reached yet."""
EVER = 1 << 62
"""Later than any time."""
QUIETEST = 0.25
"""Share of an operator's executions in which threads are assumed to spin little."""
COLUMNS = ("op_id", "token_id", "tid", "begin_ns", "end_ns", "by_tid", "cost_ns", "wasted_ns")


def needed_times(tables: Tables) -> pd.DataFrame:
    """The times in which a step needs a thread: op_id, token_id, tid, begin_ns, end_ns, `last` (the last to finish its operator).

    Within operators, the threads that compute (waits for each other are omitted); between operators (op_id -1), the step's
    own thread.
    """
    shares, tokens = tables["op_threads"], tables["tokens"].set_index("token_id")
    token = tables["operators"]["token_id"].to_numpy()[shares["op_id"].to_numpy()]
    last = shares["wait_ns"] == shares.groupby("op_id")["wait_ns"].transform("max")
    in_operators = shares[["op_id", "tid", "begin_ns"]].assign(token_id=token, end_ns=shares["wait_ns"], last=last)
    left = uncovered_parts(Intervals.of_table(tables["tokens"], "token_id"), Intervals.of_table(in_operators, "token_id"))
    own = tokens["tid"].reindex(left.key).to_numpy()
    columns = {"op_id": NONE, "token_id": left.key, "tid": own, "begin_ns": left.begin, "end_ns": left.end, "last": True}
    return pd.concat([in_operators, pd.DataFrame(columns)], ignore_index=True)


def displacements(tables: Tables) -> pd.DataFrame:
    """Every time in which a needed thread was ready but had no CPU, and the thread that ran on its last CPU.

    op_id (-1: between operators), token_id, tid, begin_ns, end_ns, by_tid (-1: unknown), cost_ns: the step's extra time, counted
    if the thread was the last to finish its operator; wasted_ns: the part in which `by_tid` did not work on an operator.
    """
    states, spans = tables["thread_states"], needed_times(tables)
    ready = (states["state"] == "runnable").to_numpy() & np.isin(
        states["tid"].to_numpy(), distinct_sorted(spans["tid"].to_numpy())
    )
    met = overlaps(Intervals.of_table(spans), Intervals.of_table(states).where(ready))
    ran, by = split_by_runner(tables["sched"], Intervals(spans["tid"].to_numpy()[met.left], met.begin, met.end))
    rows = spans.iloc[met.left[ran.left]].assign(begin_ns=ran.begin, end_ns=ran.end, by_tid=by)
    useful = overlaps(Intervals(by, ran.begin, ran.end), Intervals.of_table(tables["op_threads"], end="wait_ns"))
    worked = np.bincount(useful.left, useful.length, len(rows)).astype(np.int64)
    rows = rows.assign(cost_ns=np.where(rows["last"], ran.length, 0), wasted_ns=ran.length - worked)
    return rows[list(COLUMNS)].reset_index(drop=True)


def split_by_runner(sched: pd.DataFrame, pieces: Intervals) -> tuple[Overlaps, np.ndarray]:
    """Pieces of threads' time split by the thread that ran on their last CPU: (overlaps with left = row of `pieces`, tid or -1).

    Between two recorded switches, the thread that the second one switches out was running; if only the target's switches were
    recorded, that is the last thread before the target's.
    """
    switch = sched[(sched["event"] == "switch").to_numpy()].sort_values("ts_ns", kind="stable")
    since, left, cpu = (switch[name].to_numpy() for name in ("ts_ns", "prev_tid", "cpu"))
    where = np.append(cpu, NONE)[latest(left, since, pieces.key, pieces.begin)]
    following = switch.groupby("cpu")[["ts_ns", "prev_tid"]].shift(-1)
    until = following["ts_ns"].fillna(EVER).to_numpy(np.int64)
    by = following["prev_tid"].fillna(switch["next_tid"]).to_numpy(np.int64)
    held = Intervals(np.append(cpu, NONE), np.append(since, 0), np.append(until, EVER))
    met = overlaps(Intervals(where, pieces.begin, pieces.end), held)
    return met, np.append(by, NONE)[met.right]


def displaced_by(tables: Tables, rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """For each displacing thread: by_tid, name, `own` (thread of the program), `times`, `ms`, `cost_ms` of step time."""
    rows = displacements(tables) if rows is None else rows
    rows = rows[rows["by_tid"] != rows["tid"]]
    threads = tables["threads"].set_index("tid")
    rows = rows.assign(ms=(rows["end_ns"] - rows["begin_ns"]) / 1e6, cost_ms=rows["cost_ns"] / 1e6)
    by_thread = rows.groupby("by_tid").agg(times=("op_id", "size"), ms=("ms", "sum"), cost_ms=("cost_ms", "sum"))
    who = threads.reindex(by_thread.index)
    by_thread.insert(0, "name", np.where(by_thread.index == 0, IDLE, who["name"].fillna("?")))
    by_thread.insert(1, "own", who["target"].eq(True))
    return by_thread.reset_index().sort_values("cost_ms", ascending=False, ignore_index=True)


def won_ns(tables: Tables, rows: pd.DataFrame, lost_ns: pd.Series) -> float:
    """Time that steps would save without the loss `lost_ns` of these `displacements`; an operator ends with its last thread."""
    rows = rows.assign(lost=lost_ns)[rows["token_id"] >= 0]
    in_operators = rows[rows["op_id"] >= 0].groupby(["op_id", "tid"])["lost"].sum()
    shares = tables["op_threads"]
    shares = shares[shares["op_id"].isin(in_operators.index.get_level_values("op_id"))].set_index(["op_id", "tid"])["wait_ns"]
    sooner = shares - in_operators.groupby(level=[0, 1]).sum().reindex(shares.index, fill_value=0)
    ended = shares.groupby("op_id").max() - sooner.groupby("op_id").max()
    return float(ended.sum() + rows.loc[rows["op_id"] < 0, "lost"].sum())


@dataclass(frozen=True)
class Oversubscription:
    """`threads` compute on fewer `cpus`; as many threads as CPUs would save `won_ns`."""

    threads: int
    cpus: int
    won_ns: float


def oversubscription(tables: Tables, rows: pd.DataFrame) -> Oversubscription | None:
    """The program's threads that share CPUs within operators, and the saving with fewer; None if each has a CPU.

    Steps would then take the operators' computing time (`computed_ns`), divided by the CPUs, plus the time between operators,
    without the threads' waits for each other. Other programs are assumed to keep their share of the time.
    """
    counted = tables["tokens"].set_index("token_id").loc[counted_steps(tables)["token_id"]]
    states, shares, steps = tables["thread_states"], tables["op_threads"], tables["operators"]
    steps = steps[steps["token_id"].isin(counted.index)]
    shares = shares[shares["op_id"].isin(steps["op_id"])]
    running = states[states["state"] == "running"]
    met = overlaps(Intervals.of_table(shares, end="wait_ns"), Intervals.of_table(running))
    cpus = len(np.unique(running["cpu"].to_numpy()[met.right]))
    most = int(shares.groupby("op_id").size().max() if len(shares) else 0)
    own = rows["by_tid"].isin(tables["threads"].query("target")["tid"])
    if not 0 < cpus < most or not own.any():
        return None
    ran = pd.Series(np.bincount(met.left, met.length, len(shares)), shares.index)
    alone = computed_ns(steps, shares.assign(ran_ns=ran)) / shares.groupby("op_id").size().clip(upper=cpus)
    token = tables["operators"]["token_id"].to_numpy()[shares["op_id"].to_numpy()]
    spent = merge_intervals(Intervals(token, shares["begin_ns"].to_numpy(), shares["wait_ns"].to_numpy())).length.sum()
    between = rows.loc[own & (rows["op_id"] < 0), "cost_ns"].sum()
    others, total = rows[~own], float(counted["duration_ns"].sum())
    took = won_ns(tables, others, others["end_ns"] - others["begin_ns"])
    took_within = won_ns(tables, others[others["op_id"] >= 0], others["end_ns"] - others["begin_ns"])
    wasted = float(spent + between - alone.sum()) - took_within
    return Oversubscription(most, cpus, max(wasted, 0.0) * total / max(total - took, 1.0))


def computed_ns(operators: pd.DataFrame, shares: pd.DataFrame) -> pd.Series:
    """CPU time that each operator needs, by op_id, from the time that each thread's share ran, `ran_ns`.

    Threads also spin at barriers within operators, which no record distinguishes from computing. Computing takes the same time
    in each execution, spinning does not: so the quantile QUIETEST over executions with equal shapes is the limit of computing
    time.
    """
    by_op = shares.groupby("op_id")["ran_ns"].sum()
    same = operators.set_index("op_id")[["name", "type", "shape"]].loc[by_op.index]
    return by_op.groupby([same[name] for name in same]).transform("quantile", QUIETEST)
