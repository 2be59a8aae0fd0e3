"""Trends across tokens: distribution, drifts, periodicity and shifts of step times, and operators that grow with the context."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import changepoints
from analyzer.questions.figures import complete_steps, ttft_ms, turns, undisturbed
from analyzer.records.schema import Tables

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
LEAST = 8
"""Fewer steps than this show no trend."""
PERIOD_P = 0.001
EXPLAINED = 0.9
"""Maximum error of a line over the context, as a share of a constant's error."""
SURE = 3.0
"""Minimum slope in standard errors."""


def decode_steps(tables: Tables) -> pd.DataFrame:
    """Complete decode steps in order: token_id, context (tokens before the step), ms, tpot_ms (ITL of figures.py), disturbed.

    Disturbed ones are left out, unless there are no others.
    If the engine does not record the position, the context is counted from the generation's steps.
    """
    steps = complete_steps(tables)
    fed = steps.groupby("generation")["n_tokens"].cumsum() - steps["n_tokens"]
    context = steps["position"].where(steps["position"] >= 0, fed)
    rows = steps.assign(context=context, ms=steps["duration_ns"] / 1e6, tpot_ms=steps["itl_ms"])
    rows = undisturbed(rows[rows["phase"] == "decode"])
    return rows[["token_id", "generation", "context", "ms", "tpot_ms", "disturbed"]].reset_index(drop=True)


def distribution(values: pd.Series) -> dict[str, float]:
    """Count, mean, standard deviation and quantiles."""
    present = values.dropna()
    if len(present) == 0:
        return {"n": 0}
    spread = {f"p{round(q * 100):02d}": float(v) for q, v in zip(QUANTILES, present.quantile(list(QUANTILES)), strict=True)}
    return {"n": len(present), "mean": float(present.mean()), "std": float(present.std(ddof=0)), **spread}


def periodic(values: np.ndarray) -> dict[str, float] | None:
    """A periodic disturbance: its `period` in steps and `share` of the variance; None if no frequency is significant.

    Fisher's test on the largest frequency of the detrended series, clipped at its 5 and 95 % quantiles.
    """
    n = len(values)
    if n < 4 * LEAST:
        return None
    x = np.arange(n)
    residual = values - np.polyval(np.polyfit(x, values, 1), x)
    residual = np.clip(residual, *np.quantile(residual, [0.05, 0.95]))
    power = np.abs(np.fft.rfft(residual - residual.mean())[1:]) ** 2
    if power.sum() <= 0:
        return None
    peak, count = int(np.argmax(power)), len(power)
    share = float(power[peak] / power.sum())
    chance = min(1.0, count * (1 - share) ** (count - 1))
    return {"period": n / (peak + 1), "share": share} if chance < PERIOD_P and peak > 0 else None


def growth(tables: Tables, steps: pd.DataFrame | None = None) -> pd.DataFrame:
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
    rows = [(name, *line(x, spent[name].to_numpy(np.float64))) for name in spent.columns]
    table = pd.DataFrame(rows, columns=["type", "base_us", "ns_per_token", "error_ns", "r2"])
    total = table["ns_per_token"].sum()
    table["base_us"] /= 1e3
    table["share"] = table["ns_per_token"] / total if total else np.nan
    return table.sort_values("ns_per_token", ascending=False, ignore_index=True)[columns]


def certain(grown: pd.DataFrame) -> pd.DataFrame:
    """Rows of `growth` whose slope is more than three times its standard error."""
    return grown[grown["ns_per_token"] > SURE * grown["error_ns"]]


def explains(model: Mapping[str, Any]) -> bool:
    """Whether the context predicts unseen steps significantly better than a constant."""
    return bool(model) and model["mape"] < EXPLAINED * model["mape_constant"]


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float, float]:
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
    quantile, and `mape_constant` the mean for the constant median as prediction. {} for too few `decode_steps`.
    """
    if len(steps) < 2 * LEAST:
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


def summary(tables: Tables, steps: pd.DataFrame | None = None) -> dict[str, Any]:
    """Trend figures, JSON-able: ttft_ms, tpot_ms, step_ms, first, change_points, drifts, periodic, bursts, model.

    Only the first three for too few steps; the others are empty for disturbed ones, whose trends are the tracer's.
    """
    steps = decode_steps(tables) if steps is None else steps
    answer: dict[str, Any] = {
        "ttft_ms": distribution(ttft_ms(turns(tables))),
        "tpot_ms": distribution(steps["tpot_ms"]),
        "step_ms": distribution(steps["ms"]),
    }
    if len(steps) < LEAST:
        return answer
    if steps["disturbed"].any():
        return answer | {"first": None, "change_points": [], "drifts": [], "periodic": None, "bursts": [], "model": {}}
    ms = steps["ms"].to_numpy()
    parts, ids = changepoints.take_apart(ms), steps["token_id"].tolist()
    return answer | {
        "first": {"token_id": ids[0], "ms": float(ms[0]), "times": parts.first} if parts.first else None,
        "change_points": [{"token_id": ids[s.at], "before_ms": s.before, "after_ms": s.after} for s in parts.shifts],
        "drifts": [{"token_id": ids[d.at], "until": ids[d.until], "from_ms": d.before, "to_ms": d.after} for d in parts.drifts],
        "periodic": swing(parts),
        "bursts": [{"token_id": ids[b.at], "steps": b.steps, "more_ms": b.height} for b in parts.bursts],
        "model": step_model(steps),
    }


def swing(parts: changepoints.Parts) -> dict[str, float] | None:
    """The periodic disturbance: regular spikes, else a periodic component of the residuals."""
    if parts.period is None:
        return periodic(parts.rest)
    return {"period": parts.period.steps, "share": parts.singles, "more_ms": parts.period.height, "count": parts.period.count}


def sentences(facts: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(label, text, token) of the trends across tokens; token -1 if it concerns all of them."""
    if first := facts.get("first"):
        yield "first step", f"{first['ms']:,.2f} ms, {first['times']:,.1f} times the following ones", first["token_id"]
    for jump in facts.get("change_points") or []:
        yield f"from token {jump['token_id']}", f"{jump['before_ms']:,.2f} → {jump['after_ms']:,.2f} ms a step", jump["token_id"]
    for moved in facts.get("drifts") or []:
        change = moved["to_ms"] / moved["from_ms"] - 1 if moved["from_ms"] else 0.0
        ends = f"{moved['from_ms']:,.2f} ms at token {moved['token_id']} to {moved['to_ms']:,.2f} ms at token {moved['until']}"
        yield "drift", f"{change:+.1%}: {ends}", moved["token_id"]
    for burst in facts.get("bursts") or []:
        text = f"{burst['steps']} steps from token {burst['token_id']} take {burst['more_ms']:,.2f} ms more"
        yield "burst", text, burst["token_id"]
    if beat := facts.get("periodic"):
        more = f", {beat['more_ms']:,.2f} ms more, {beat['count']} times" if "count" in beat else ""
        yield "periodic", f"every {beat['period']:.1f} steps{more}, {beat['share']:.0%} of the variance", -1
