"""Decode speed over time, with clock, temperature, power and limits, and what a token took more than in the fastest window."""

import numpy as np
import pandas as pd

from analyzer.questions import figures
from analyzer.questions.causes import COMPUTING
from analyzer.questions.clocks import LEAST_STEPS
from analyzer.questions.energy import RESOLVED
from analyzer.questions.heat import MS, S, hottest_celsius, limited_spans, limits_of, origin_ns, pace_mhz, rail_watts, total_watts
from analyzer.questions.step_time import step_time
from analyzer.records.intervals import Intervals, covered_ns
from analyzer.records.schema import Tables

NOTABLE = 0.05
"""A token that takes more than this share longer has a cause."""
CURVE = ("begin_s", "end_s", "steps", "tokens_per_s", "mhz", "celsius", "watts", "limited")
LOSSES = ("clock_ms", "computing_ms", "waiting_ms", "between_ms")
"""What a token takes more than in the fastest window: by lower clocks, other computing, waiting in its step, between steps."""


def speed_over_time(tables: Tables, count: int = 60) -> pd.DataFrame:
    """Decode speed in `count` windows of equal length, with clock, temperature, power and limits, and what a token took more.

    Columns CURVE, `slower_ms` (of a token against the fastest window), LOSSES, whose sum it is, and `cause`, the largest of them.
    `clock_ms` is as much of the additional computing as a clock can explain that computing is in proportion to.
    """
    steps = figures.complete_steps(tables).dropna(subset=["itl_ms"]).sort_values("end_ns")
    names = [*CURVE, "slower_ms", *LOSSES, "cause"]
    if len(steps) < LEAST_STEPS:
        return pd.DataFrame(columns=names)
    begin, last, origin = int(steps["begin_ns"].min()), int(steps["end_ns"].max()), origin_ns(tables)
    edges = np.linspace(begin, last, min(count, len(steps) // LEAST_STEPS) + 1).astype(np.int64)
    place = np.clip(np.searchsorted(edges, steps["end_ns"].to_numpy(), "left") - 1, 0, len(edges) - 2)
    found = np.unique(place)
    opened, closed = edges[:-1][found], edges[1:][found]
    window = Intervals.of(opened, closed)
    itl = steps["itl_ms"].groupby(place).mean().to_numpy()
    limits = limits_of(tables)
    rows = {
        "begin_s": (opened - origin) / S,
        "end_s": (closed - origin) / S,
        "steps": np.bincount(place)[found],
        "tokens_per_s": 1e3 / itl,
        "mhz": pace_mhz(tables, opened, closed),
        "celsius": hottest_celsius(tables, opened, closed),
        "watts": total_watts(tables, opened, closed),
        "limited": covered_ns(limited_spans(limits), window) / window.length if limits else np.zeros(len(window)),
    }
    return pd.DataFrame(rows).join(losses(tables, steps, place, itl, rows["mhz"])).reindex(columns=names)


def rails_without(tables: Tables, windows: pd.DataFrame) -> list[dict[str, str]]:
    """Power rails that are not in the windows' watts: `source`, `rail` and `why`."""
    length = (windows["end_s"] - windows["begin_s"]).to_numpy()
    begin = origin_ns(tables) + (windows["begin_s"] * S).to_numpy(np.int64)
    rows = []
    for each in rail_watts(tables, begin, begin + (length * S).astype(np.int64)) if len(windows) else ():
        if not np.isfinite(each.watts).any():
            short = length.max() < RESOLVED * each.period_s
            why = f"windows of {length.max():.2g} s are shorter than {RESOLVED:.0f} readings, one in {each.period_s:.2g} s"
            rows.append({"source": each.row["source"], "rail": each.row["rail"], "why": why if short else "readings are missing"})
    return rows


def losses(tables: Tables, steps: pd.DataFrame, place: np.ndarray, itl: np.ndarray, mhz: np.ndarray) -> pd.DataFrame:
    """What a token took more in each window than in the fastest one, by LOSSES."""
    time = step_time(tables)
    windows = time["token_id"].map(pd.Series(place, steps["token_id"]))
    known = len(tables["thread_states"]) > 0  # else nothing tells computing from waiting
    is_computing = (time["cause"] == COMPUTING).to_numpy() | (not known)
    per_step = steps["duration_ns"].groupby(place).mean().to_numpy() / MS
    computed = (
        time["duration_ns"].where(is_computing, 0).groupby(windows).sum().reindex(np.unique(place), fill_value=0).to_numpy()
    )
    computed = computed / np.bincount(place)[np.unique(place)] / MS
    fastest = int(np.argmin(itl))
    more = {"computing_ms": computed, "waiting_ms": per_step - computed, "between_ms": itl - per_step}
    frame = pd.DataFrame({name: values - values[fastest] for name, values in more.items()})
    reach = np.nan_to_num(computed[fastest] * (mhz[fastest] / mhz - 1))
    clock = np.clip(frame["computing_ms"], np.minimum(reach, 0), np.maximum(reach, 0))
    frame = frame.assign(clock_ms=clock, computing_ms=frame["computing_ms"] - clock, slower_ms=itl - itl[fastest])
    names = np.array([name.removesuffix("_ms") for name in LOSSES], object)
    largest = frame[list(LOSSES)].to_numpy().argmax(axis=1)
    return frame.assign(cause=np.where(frame["slower_ms"] > NOTABLE * itl[fastest], names[largest], ""))
