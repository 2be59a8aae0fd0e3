"""Trends across steps: distribution, drifts, periodicity and shifts of step times, and operators that grow with the context."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import changepoints, periods
from analyzer.questions.figures import complete_steps, fed_sequences, ttft_ms, undisturbed_steps
from analyzer.records.schema import Tables

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
LEAST = 8
"""Fewer steps than this show no trend."""
EXPLAINED = 0.9
"""Maximum error of a line over the context, as a share of a constant's error."""
SURE = 3.0
"""Minimum slope in standard errors."""


def decode_steps(tables: Tables) -> pd.DataFrame:
    """Complete decode steps in order: token_id, context (tokens before the step), ms, tpot_ms (ITL of figures.py), disturbed.

    Disturbed ones are left out, unless there are no others.
    If the engine does not record the position, the context is counted from the generation's steps. If no step has a phase (a
    profile of runs of a model), all steps; without steps, the executions of the NPU graph with the most time, by execute_id
    instead of token_id. These have no context.
    """
    steps = complete_steps(tables)
    if not len(steps):
        return main_graph_executions(tables)
    if (steps["phase"] == "").all():
        steps = steps.sort_values("begin_ns").assign(context=np.nan)
    else:
        fed = steps.groupby("generation")["n_tokens"].cumsum() - steps["n_tokens"]
        steps = steps.assign(context=steps["position"].where(steps["position"] >= 0, fed))
        steps = steps[steps["phase"] == "decode"]
    rows = undisturbed_steps(steps.assign(ms=steps["duration_ns"] / 1e6, tpot_ms=steps["itl_ms"]))
    return rows[["token_id", "phase", "generation", "context", "ms", "tpot_ms", "disturbed"]].reset_index(drop=True)


def main_graph_executions(tables: Tables) -> pd.DataFrame:
    """The complete executions of the NPU graph with the most time, as `decode_steps` has steps, by execute_id."""
    done = tables["qnn_executes"]
    done = done[done["complete"]].sort_values("begin_ns")
    graph = done.groupby(["pid", "graph", "graph_name"]).ngroup()
    spent = done.groupby(graph)["duration_ns"].sum()
    rows = done[graph == (spent.idxmax() if len(spent) else -1)]
    rows = rows.assign(phase="", generation=-1, context=np.nan, ms=rows["duration_ns"] / 1e6, tpot_ms=np.nan, disturbed=False)
    return rows[["execute_id", "phase", "generation", "context", "ms", "tpot_ms", "disturbed"]].reset_index(drop=True)


def step_noun(steps: pd.DataFrame) -> str:
    """What a row of `decode_steps` is."""
    if "execute_id" in steps:
        return "execution"
    return "step" if len(steps) and (steps["phase"] == "").all() else "decode step"


def value_distribution(values: pd.Series) -> dict[str, float]:
    """Count, mean, standard deviation and quantiles."""
    present = values.dropna()
    if len(present) == 0:
        return {"n": 0}
    spread = {f"p{round(q * 100):02d}": float(v) for q, v in zip(QUANTILES, present.quantile(list(QUANTILES)), strict=True)}
    return {"n": len(present), "mean": float(present.mean()), "std": float(present.std(ddof=0)), **spread}


def context_growth(tables: Tables, steps: pd.DataFrame | None = None) -> pd.DataFrame:
    """Growth with the context: for each operator type, `ns_per_token` of a step's time per token of context, with its error.

    type, base_us (at no context), ns_per_token, error_ns (standard error of the slope), share (of the sum of all slopes), r2.
    Only undisturbed decode steps (`steps`: the result of `decode_steps`, if already computed); the slowest 1 % is omitted.
    """
    steps = decode_steps(tables) if steps is None else steps
    columns = ["type", "base_us", "ns_per_token", "error_ns", "share", "r2"]
    if len(steps) < LEAST or steps["context"].nunique() < LEAST or steps["disturbed"].any():
        return pd.DataFrame(columns=columns)
    steps = steps[steps["ms"] <= steps["ms"].quantile(0.99)].set_index("token_id")
    operators = tables["operators"]
    of_steps = operators[operators["token_id"].isin(steps.index)]
    spent = of_steps.pivot_table(index="token_id", columns="type", values="duration_ns", aggfunc="sum", fill_value=0)
    spent = spent.reindex(steps.index, fill_value=0)
    spent["between operators"] = steps["ms"] * 1e6 - spent.sum(axis=1)
    x = steps["context"].to_numpy(np.float64)
    rows = [(name, *least_squares(x, spent[name].to_numpy(np.float64))) for name in spent.columns]
    table = pd.DataFrame(rows, columns=["type", "base_us", "ns_per_token", "error_ns", "r2"])
    total = table["ns_per_token"].sum()
    table["base_us"] /= 1e3
    table["share"] = table["ns_per_token"] / total if total else np.nan
    return table.sort_values("ns_per_token", ascending=False, ignore_index=True)[columns]


def confident_rows(grown: pd.DataFrame) -> pd.DataFrame:
    """Rows of `context_growth` whose slope is more than three times its standard error."""
    return grown[grown["ns_per_token"] > SURE * grown["error_ns"]]


def fits_context(model: Mapping[str, Any]) -> bool:
    """Whether the context predicts unseen steps significantly better than a constant."""
    return bool(model) and model["mape"] < EXPLAINED * model["mape_constant"]


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float, float]:
    """(intercept, slope, standard error of the slope, r2) of the least squares line."""
    centred = x - x.mean()
    spread = centred @ centred
    slope = float(centred @ y / spread) if spread else 0.0
    start = float(y.mean() - slope * x.mean())
    residual = y - start - slope * x
    error = float(np.sqrt(residual @ residual / max(len(x) - 2, 1) / spread)) if spread else float("nan")
    spread_y = (y - y.mean()) @ (y - y.mean())
    return start, slope, error, float(1 - residual @ residual / spread_y) if spread_y else 1.0


def step_model(steps: pd.DataFrame) -> dict[str, Any]:
    """Step latency as a function of context, ms = base + slope x context, fitted robustly; with its error on held-out steps.

    Fitted on every other step, tested on the rest: `mape` is the mean of |predicted - measured| / measured, `error_p90` its 90 %
    quantile, and `mape_constant` the mean for the constant median as prediction. {} for too few steps, or without context.
    """
    if len(steps) < 2 * LEAST or steps["context"].isna().any():
        return {}
    fit, judged = steps.iloc[::2], steps.iloc[1::2]
    x, y = fit["context"].to_numpy(np.float64), fit["ms"].to_numpy()
    slope = changepoints.theil_sen(x, y)
    base = float(np.median(y - slope * x))
    truth = judged["ms"].to_numpy()
    error = np.abs(base + slope * judged["context"].to_numpy() - truth) / truth
    flat = np.abs(np.median(y) - truth) / truth
    return {
        "base_ms": base,
        "us_per_token": slope * 1e3,
        "mape": float(error.mean()),
        "error_p90": float(np.quantile(error, 0.9)),
        "mape_constant": float(flat.mean()),
        "fitted_on": len(fit),
        "judged_on": len(judged),
    }


def trend_summary(tables: Tables, steps: pd.DataFrame | None = None) -> dict[str, Any]:
    """Trend figures, JSON-able: of, ttft_ms, tpot_ms, step_ms, first, change_points, drifts, periodic, bursts, model.

    `of`: what the steps are (`step_noun`); an execution has an execute_id for a token_id. Only the first four for too few
    steps; the others are empty for disturbed ones, whose trends are the tracer's.
    """
    steps = decode_steps(tables) if steps is None else steps
    answer: dict[str, Any] = {
        "of": step_noun(steps),
        "ttft_ms": value_distribution(ttft_ms(fed_sequences(tables))),
        "tpot_ms": value_distribution(steps["tpot_ms"]),
        "step_ms": value_distribution(steps["ms"]),
    }
    if len(steps) < LEAST:
        return answer
    if steps["disturbed"].any():
        return answer | {"first": None, "change_points": [], "drifts": [], "periodic": None, "bursts": [], "model": {}}
    ms = steps["ms"].to_numpy()
    parts, (id_name, ids) = changepoints.take_apart(ms), next((str(name), ids.tolist()) for name, ids in steps.items())
    return answer | {
        "first": {id_name: ids[0], "ms": float(ms[0]), "times": parts.first} if parts.first else None,
        "change_points": [{id_name: ids[s.at], "before_ms": s.before, "after_ms": s.after} for s in parts.shifts],
        "drifts": [{id_name: ids[d.at], "until": ids[d.until], "from_ms": d.before, "to_ms": d.after} for d in parts.drifts],
        "periodic": periodic_disturbance(parts),
        "bursts": [{id_name: ids[b.at], "steps": b.steps, "more_ms": b.height} for b in parts.bursts],
        "model": step_model(steps),
    }


def periodic_disturbance(parts: changepoints.SeriesParts) -> dict[str, float] | None:
    """The periodic disturbance: regular spikes, else a periodic component of the residuals."""
    if parts.period is None:
        return periods.periodic_wave(parts.rest)
    return {"period": parts.period.steps, "share": parts.singles, "more_ms": parts.period.height, "count": parts.period.count}


def trend_sentences(facts: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(label, text, token_id) of the trends across steps; -1 if it concerns all of them, or executions."""
    name = "execution" if facts.get("of") == "execution" else "step"

    def place(row: dict[str, Any]) -> tuple[str, int]:
        return f"{name} {row.get('token_id', row.get('execute_id'))}", row.get("token_id", -1)

    if first := facts.get("first"):
        yield f"first {facts['of']}", f"{first['ms']:,.2f} ms, {first['times']:,.1f} times the following ones", place(first)[1]
    for jump in facts.get("change_points") or []:
        where, step = place(jump)
        yield f"from {where}", f"{jump['before_ms']:,.2f} → {jump['after_ms']:,.2f} ms each", step
    for moved in facts.get("drifts") or []:
        change = moved["to_ms"] / moved["from_ms"] - 1 if moved["from_ms"] else 0.0
        where, step = place(moved)
        ends = f"{moved['from_ms']:,.2f} ms at {where} to {moved['to_ms']:,.2f} ms at {name} {moved['until']}"
        yield "drift", f"{change:+.1%}: {ends}", step
    for burst in facts.get("bursts") or []:
        where, step = place(burst)
        yield "burst", f"{burst['steps']} in a row from {where} on take {burst['more_ms']:,.2f} ms more", step
    if beat := facts.get("periodic"):
        more = f", {beat['more_ms']:,.2f} ms more, {beat['count']} times" if "count" in beat else ""
        yield "periodic", f"every {beat['period']:.1f} {facts['of']}s{more}, {beat['share']:.0%} of the variance", -1
