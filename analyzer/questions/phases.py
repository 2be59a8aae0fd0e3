"""Phases: the time of a token by group of operators, idle gaps by cause, and a residual; they add up to the token.

A gap is time of a token in which no thread works on any of its operators or loads. Its cause is the activity at that time:
the NPU's execution, a load, or the state of the token's own thread.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.groups import GROUPS, given_away, group_times, pieces
from analyzer.records.intervals import Intervals, by_precedence, merged, overlaps, uncovered
from analyzer.records.schema import Tables

CAUSE_OF_STATE = {
    "running": "host",
    "runnable": "scheduling",
    "waiting": "disk wait",
    "sleeping": "asleep",
    "stopped": "stopped",
}
"""State of the token's thread → cause of a gap: `host` is the engine's own code between operators."""
CAUSES = ("npu", "submission", "load", *CAUSE_OF_STATE.values())
RESIDUAL = "residual"
SETUPS = ("contextCreate", "contextCreateFromBinary", "graphFinalize")
"""QNN's calls that create the objects of an execution."""
GAP_COLUMNS = ("token_id", "begin_ns", "end_ns", "duration_ns", "cause", "after", "before")


def gaps(tables: Tables) -> pd.DataFrame:
    """Gaps split by cause: token_id, begin_ns, end_ns, duration_ns, cause, and the operators around each."""
    return neighbours(tables["operators"], idle(tables, pieces(tables)))[list(GAP_COLUMNS)]


def idle(tables: Tables, work: pd.DataFrame) -> pd.DataFrame:
    """The gaps between groups.pieces, without the operators around them."""
    covered = Intervals.of_table(work, "token_id", "begin", "end")
    left = uncovered(Intervals.of_table(tables["tokens"], "token_id"), covered)
    return explained(
        tables, left, (("npu", npu_spans(tables)), ("submission", submissions(tables)), ("load", load_spans(tables)))
    )


def explained(tables: Tables, left: Intervals, candidates: tuple[tuple[str, Intervals], ...]) -> pd.DataFrame:
    """Idle time of tokens split by cause: the first of `candidates` that covers it, else the state of the token's thread."""
    taken, causes = by_precedence(left, candidates, RESIDUAL)
    open_rows = np.asarray(causes == RESIDUAL)
    by_state, named = by_thread_state(tables, taken.where(open_rows))
    pieces = Intervals.joined(taken.where(~open_rows), by_state)
    order = np.lexsort((pieces.begin, pieces.key))
    rows = pd.DataFrame({"token_id": pieces.key[order], "begin_ns": pieces.begin[order], "end_ns": pieces.end[order]})
    rows["duration_ns"] = rows["end_ns"] - rows["begin_ns"]
    rows["cause"] = pd.Series(np.concatenate((np.asarray(causes[~open_rows], object), named))[order], dtype=object)
    return rows


def npu_spans(tables: Tables) -> Intervals:
    """Executions on the NPU within tokens, and waits for an accelerator."""
    executes, graphs = tables["qnn_executes"], tables["graphs"]
    waits = graphs[(graphs["kind"] == "wait") & (graphs["token_id"] >= 0)]
    return Intervals.joined(*(Intervals.of_table(rows, "token_id") for rows in (executes[executes["token_id"] >= 0], waits)))


def submissions(tables: Tables) -> Intervals:
    """The times within tokens in which graphs were prepared and submitted for an accelerator."""
    graphs = given_away(tables)
    return Intervals.of_table(graphs[graphs["token_id"] >= 0], "token_id")


def load_spans(tables: Tables) -> Intervals:
    """Expert loads and the creation of NPU contexts, keyed by the token that runs at that time."""
    loads = tables["loads"]
    loads = loads[(loads["action"] == "load") & (loads["token_id"] >= 0)]
    calls = tables["qnn_calls"][tables["qnn_calls"]["call"].isin(SETUPS)]
    tokens = tables["tokens"]
    setups = overlaps(Intervals.of_table(tokens, "pid"), merged(Intervals.of_table(calls, "pid")))
    return Intervals.joined(
        Intervals.of_table(loads, "token_id"), Intervals(tokens["token_id"].to_numpy()[setups.left], setups.begin, setups.end)
    )


def by_thread_state(tables: Tables, left: Intervals) -> tuple[Intervals, np.ndarray]:
    """Gaps split by the state of their token's own thread, with the cause of each; the residual if no state is known."""
    states = tables["thread_states"]
    owner = tables["tokens"].set_index("token_id")["tid"].reindex(left.key, fill_value=-1).to_numpy()
    own_states = states[np.isin(states["tid"].to_numpy(), np.unique(owner))]
    state_spans, named = Intervals.of_table(own_states), own_states["state"].map(CAUSE_OF_STATE).to_numpy()
    shared = overlaps(Intervals(owner, left.begin, left.end), state_spans)
    rows = np.arange(len(left.key))
    unknown = uncovered(Intervals(rows, left.begin, left.end), Intervals(shared.left, shared.begin, shared.end))
    met = Intervals(left.key[shared.left], shared.begin, shared.end)
    pieces = Intervals.joined(met, Intervals(left.key[unknown.key], unknown.begin, unknown.end))
    causes = np.concatenate((named[shared.right], np.full(len(unknown.key), RESIDUAL, object)))
    return pieces, causes


def neighbours(operators: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Add the names of the operators around each gap: it comes `after` one and `before` the other; "" at the token's edges."""
    named = operators.loc[operators["token_id"] >= 0, ["token_id", "begin_ns", "end_ns", "name"]]
    rows = rows.assign(row=np.arange(len(rows)))
    for column, ts, side, way in (("after", "begin_ns", "end_ns", "backward"), ("before", "end_ns", "begin_ns", "forward")):
        right = named[["token_id", side, "name"]].rename(columns={side: "at", "name": column}).sort_values("at")
        left = rows.rename(columns={ts: "at"})[["token_id", "at", "row"]].sort_values("at")
        matched = pd.merge_asof(left, right, on="at", by="token_id", direction=way)
        rows[column] = matched.set_index("row")[column].reindex(rows["row"]).fillna("").to_numpy()
    return rows


def by_cause(rows: pd.DataFrame, tokens: pd.Index) -> pd.DataFrame:
    """ns of the gaps of each cause in each token."""
    place, spent = tokens.get_indexer(rows["token_id"]), {}
    for cause in CAUSES:
        of_cause = (rows["cause"] == cause).to_numpy() & (place >= 0)
        spent[cause] = np.bincount(place[of_cause], rows["duration_ns"].to_numpy()[of_cause], len(tokens))
    return pd.DataFrame(spent, index=tokens, dtype=np.float64)


def per_token(tables: Tables) -> pd.DataFrame:
    """ns by token_id: a column per group and cause, `residual`, and `total`, which is their sum; plus phase and position."""
    tokens = tables["tokens"].set_index("token_id")
    work = pieces(tables)
    spent = group_times(tables, work).reindex(tokens.index, fill_value=0.0)
    spent_by = pd.concat([spent, by_cause(idle(tables, work), tokens.index)], axis=1)
    spent_by[RESIDUAL] = tokens["duration_ns"] - spent_by.sum(axis=1)
    spent_by["total"] = tokens["duration_ns"].astype(np.float64)
    for name in ("phase", "position", "complete"):
        spent_by[name] = tokens[name]
    return spent_by


def phase_shares(rows: pd.DataFrame, parts: Sequence[str] = (*GROUPS, *CAUSES)) -> dict[str, dict[str, float]]:
    """Per phase: ms per step of each part that occurs and of the residual; they add up to `total`. Complete tokens only.

    `rows`: the result of `per_token`, or another table of the same form with these `parts`.
    """
    answer: dict[str, dict[str, float]] = {}
    for phase, steps in rows[rows["complete"]].groupby("phase"):
        mean = steps[[*parts, RESIDUAL, "total"]].mean() / 1e6
        answer[str(phase)] = {name: float(ns) for name, ns in mean.items() if ns > 0 or name in (RESIDUAL, "total")}
    return answer


def whole_run(tables: Tables, rows: pd.DataFrame) -> dict[str, Any]:
    """The run from the first token's begin to the last one's end, in ms: every phase, time between steps, residual."""
    tokens = tables["tokens"]
    if len(tokens) == 0:
        return {}
    first, last = int(tokens["begin_ns"].min()), int(tokens["end_ns"].max())
    window = Intervals.of(np.array([first]), np.array([last]))
    token_spans = Intervals.of_table(tokens, "token_id")
    between = uncovered(window, Intervals.of(token_spans.begin, token_spans.end)).length.sum()
    spent = {str(phase): float(ns) / 1e6 for phase, ns in tokens.groupby("phase")["duration_ns"].sum().items()}
    total = (last - first) / 1e6
    unexplained = float(rows[RESIDUAL].sum()) / 1e6
    busy = float(rows["total"].sum()) / 1e6
    return {
        "total_ms": total,
        "phases_ms": spent,
        "between_steps_ms": float(between) / 1e6,
        "concurrent_ms": sum(spent.values()) + float(between) / 1e6 - total,
        "residual_ms": unexplained,
        "residual_share": unexplained / busy if busy else 0.0,
    }


def npu_windows(tables: Tables) -> pd.DataFrame:
    """Every run of a graph on the NPU, in ns: `before` and `after` the execution on the host, `accelerator`, and the `residual`.

    The residual is the execution's time outside the accelerator according to the backend: RPC and queueing. An execution
    without profile events has no `accelerator` (NaN) and no `residual`.
    """
    executes, graphs = tables["qnn_executes"], tables["graphs"].set_index("graph_id")
    runs = executes[executes["graph_id"].isin(graphs.index)]
    outer = graphs.loc[runs["graph_id"], ["begin_ns", "end_ns", "backend"]].reset_index(drop=True)
    runs = runs.reset_index(drop=True)
    accelerator = runs["accel_us"] * 1e3
    return pd.DataFrame(
        {
            "graph_id": runs["graph_id"],
            "execute_id": runs["execute_id"],
            "token_id": runs["token_id"],
            "window_ns": outer["end_ns"] - outer["begin_ns"],
            "before_ns": runs["begin_ns"] - outer["begin_ns"],
            "accelerator_ns": accelerator,
            "residual_ns": runs["duration_ns"] - accelerator,
            "after_ns": outer["end_ns"] - runs["end_ns"],
        }
    )


def steps_sum(rows: pd.DataFrame) -> dict[str, float]:
    """All steps of `per_token` in ms: `total` is `operators` + `gaps` + `residual`; `residual_share` is relative to it."""
    spent = rows[[*GROUPS, *CAUSES, RESIDUAL, "total"]].sum() / 1e6
    total, residual = float(spent["total"]), float(spent[RESIDUAL])
    return {
        "steps": len(rows),
        "total": total,
        "operators": float(spent[list(GROUPS)].sum()),
        "gaps": float(spent[list(CAUSES)].sum()),
        "residual": residual,
        "residual_share": residual / total if total else 0.0,
    }


def npu_sum(tables: Tables) -> dict[str, float]:
    """Sums of `npu_windows` in ms: `total` = `before` + `accelerator` + `after` + `residual`; `residual_share` is relative to it.

    `untold` counts windows whose executions have no profile events; they are excluded. Empty if no graph ran on the NPU.
    """
    windows = npu_windows(tables)
    profiled = windows.dropna(subset=["accelerator_ns"])
    if len(windows) == 0:
        return {}
    parts = {name: float(profiled[f"{name}_ns"].sum()) / 1e6 for name in ("before", "accelerator", "after", "residual")}
    total = float(profiled["window_ns"].sum()) / 1e6
    share = parts["residual"] / total if total else 0.0
    return {"windows": len(profiled), "untold": len(windows) - len(profiled), "total": total, **parts, "residual_share": share}


def npu_gaps(tables: Tables) -> pd.DataFrame:
    """Idle time of the NPU within tokens that use it, by cause: token_id, begin_ns, end_ns, duration_ns, cause.

    Causes in order of precedence: a `load` was running, the token's thread was in the graph's hand-over (`rpc`) or in an operator
    on the host (`host`), else the cause of the gap between operators.
    """
    executes = tables["qnn_executes"]
    busy = Intervals.of_table(executes[executes["token_id"] >= 0], "token_id")
    tokens = tables["tokens"][tables["tokens"]["token_id"].isin(np.unique(busy.key))]
    left = uncovered(Intervals.of_table(tokens, "token_id"), busy)
    graphs = tables["graphs"].query("backend == 'htp' and token_id >= 0")
    work = pieces(tables)
    host = Intervals.of_table(work, "token_id", "begin", "end")
    return explained(
        tables, left, (("load", load_spans(tables)), ("rpc", Intervals.of_table(graphs, "token_id")), ("host", host))
    )
