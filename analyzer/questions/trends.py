"""Across tokens: how step times spread, drift, swing and jump, and which operators grow with the context."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.figures import complete_steps, ttft_ms
from analyzer.records.schema import Tables

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
LEAST = 8
"""Fewer steps than this show no trend."""
PENALTY = 3.0
"""Times ln(n): by so much must a change point lower the fit's cost."""
PERIOD_P = 0.001


def decode_steps(tables: Tables) -> pd.DataFrame:
    """Complete decode steps in order: token_id, context (tokens before the step), ms, tpot_ms (ITL of figures.py).

    Where the engine does not record the position, the context is counted from the generation's own steps.
    """
    steps = complete_steps(tables["tokens"])
    fed = steps.groupby("generation")["n_tokens"].cumsum() - steps["n_tokens"]
    context = steps["position"].where(steps["position"] >= 0, fed)
    rows = steps.assign(context=context, ms=steps["duration_ns"] / 1e6, tpot_ms=steps["itl_ms"])
    return rows.loc[rows["phase"] == "decode", ["token_id", "generation", "context", "ms", "tpot_ms"]].reset_index(drop=True)


def distribution(values: pd.Series) -> dict[str, float]:
    """Count, mean, standard deviation and quantiles."""
    present = values.dropna()
    if len(present) == 0:
        return {"n": 0}
    spread = {f"p{round(q * 100):02d}": float(v) for q, v in zip(QUANTILES, present.quantile(list(QUANTILES)), strict=True)}
    return {"n": len(present), "mean": float(present.mean()), "std": float(present.std(ddof=0)), **spread}


def theil_sen(x: np.ndarray, y: np.ndarray, most: int = 400) -> float:
    """The median of the slopes between all pairs of points: a slope that outliers do not move."""
    if len(x) > most:
        keep = np.linspace(0, len(x) - 1, most).astype(int)
        x, y = x[keep], y[keep]
    i, j = np.triu_indices(len(x), 1)
    real = x[i] != x[j]
    return float(np.median((y[j] - y[i])[real] / (x[j] - x[i])[real])) if real.any() else 0.0


def change_points(values: np.ndarray, least: int = 4) -> list[int]:
    """Rows at which the level of a series changes: binary segmentation of the ranks, by the normal likelihood of the mean.

    Ranks make single outliers weigh little; a cut is kept where it lowers n ln(variance) by more than PENALTY ln(n).
    """
    ranks = pd.Series(values).rank().to_numpy()
    cuts: list[int] = []
    open_parts = [(0, len(ranks))]
    while open_parts:
        low, high = open_parts.pop()
        cut, gain = best_cut(ranks[low:high], least)
        if cut and gain > PENALTY * np.log(len(ranks)):
            cuts.append(low + cut)
            open_parts += [(low, low + cut), (low + cut, high)]
    return sorted(cuts)


def best_cut(values: np.ndarray, least: int) -> tuple[int, float]:
    """(where to cut a series in two, by how much that lowers its cost n ln(variance)); (0, 0.0) where it is too short."""
    n = len(values)
    if n < 2 * least:
        return 0, 0.0
    cuts = np.arange(least, n - least + 1)
    total, square = np.cumsum(values), np.cumsum(values * values)
    left = square[cuts - 1] - total[cuts - 1] ** 2 / cuts
    right_total, right_square = total[-1] - total[cuts - 1], square[-1] - square[cuts - 1]
    right = right_square - right_total**2 / (n - cuts)
    undivided = square[-1] - total[-1] ** 2 / n
    floor = 1e-9 * max(undivided, 1.0)
    gains = n * np.log(max(undivided, floor) / np.maximum(left + right, floor))
    best = int(np.argmax(gains))
    return int(cuts[best]), float(gains[best])


def periodic(values: np.ndarray) -> dict[str, float] | None:
    """A periodic disturbance: its `period` in steps and `share` of the variance; None where no frequency stands out.

    The series without its trend, clipped at its 5 and 95 % quantiles, in frequencies; Fisher's test on the greatest one.
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
    """What grows with the context: per operator type, `ns_per_token` of a step's time per token of context, with its error.

    type, base_us (at no context), ns_per_token, error_ns (standard error of the slope), share (of the sum of all slopes), r2.
    Only decode steps (`decode_steps`, where they are at hand); the steps' slowest hundredth is left out.
    """
    steps = decode_steps(tables) if steps is None else steps
    columns = ["type", "base_us", "ns_per_token", "error_ns", "share", "r2"]
    if len(steps) < LEAST or steps["context"].nunique() < LEAST:
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
    """Step latency as a function of context, ms = base + slope x context, robust; with its error on steps it has not seen.

    Fitted on every other step, judged on the rest: `mape` is the mean of |predicted - measured| / measured, `error_p90` its 90 %
    quantile, and `mape_constant` that of the constant median: what knowing the context is worth. {} for too few `decode_steps`.
    """
    if len(steps) < 2 * LEAST:
        return {}
    fit, judged = steps.iloc[::2], steps.iloc[1::2]
    x, y = fit["context"].to_numpy(np.float64), fit["ms"].to_numpy()
    slope = theil_sen(x, y)
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


def drift(ms: np.ndarray) -> dict[str, float]:
    """Medians of the first and the last third of the steps (`first_ms`, `last_ms`, of `steps` each), and the `change`."""
    third = len(ms) // 3
    first, last = float(np.median(ms[:third])), float(np.median(ms[-third:]))
    return {"first_ms": first, "last_ms": last, "steps": third, "change": last / first - 1 if first else 0.0}


def summary(tables: Tables, steps: pd.DataFrame | None = None) -> dict[str, Any]:
    """The above, JSON-able: ttft_ms, tpot_ms, step_ms, drift (of a third of the steps), change_points, periodic, model."""
    steps = decode_steps(tables) if steps is None else steps
    answer: dict[str, Any] = {
        "ttft_ms": distribution(ttft_ms(complete_steps(tables["tokens"]))),
        "tpot_ms": distribution(steps["tpot_ms"]),
        "step_ms": distribution(steps["ms"]),
    }
    if len(steps) < LEAST:
        return answer
    ms = steps["ms"].to_numpy()
    cuts = change_points(ms)
    parts = np.split(ms, cuts)
    jumps = [
        {"token_id": int(steps["token_id"].iloc[cut]), "before_ms": float(np.median(a)), "after_ms": float(np.median(b))}
        for cut, a, b in zip(cuts, parts[:-1], parts[1:], strict=True)
    ]
    return answer | {
        "drift": drift(ms),
        "change_points": jumps,
        "periodic": periodic(ms),
        "model": step_model(steps),
    }
