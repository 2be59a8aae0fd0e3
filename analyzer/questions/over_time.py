"""Figures over time: decode speed, number of open spans, and unusually slow steps."""

import numpy as np
import pandas as pd

from analyzer.questions.figures import complete_steps
from analyzer.records.schema import Tables

Series = tuple[np.ndarray, np.ndarray]
"""(times in ns, in order; the value from each time on)."""
SLOW_DEVIATIONS, SLOW_TIMES = 5.0, 1.2


def decode_speed(tables: Tables) -> Series:
    """Decode tokens per second: 1 / ITL of each decode step, from the end of the previous step on."""
    steps = complete_steps(tables).dropna(subset=["itl_ms"])
    itl_ns = np.maximum((steps["itl_ms"] * 1e6).round().to_numpy(np.int64), 1)
    since = steps["end_ns"].to_numpy(np.int64) - itl_ns
    order = np.argsort(since, kind="stable")
    return since[order], 1e9 / itl_ns[order]


def in_flight(spans: pd.DataFrame) -> Series:
    """The number of open spans, at every time at which it changes."""
    ts = np.concatenate([spans[column].to_numpy(np.int64) for column in ("begin_ns", "end_ns")])
    change = np.repeat([1, -1], len(spans))
    order = np.lexsort((change, ts))
    last = np.append(ts[order][1:] != ts[order][:-1], True)[: len(order)]
    return ts[order][last], np.cumsum(change[order])[last].astype(np.float64)


def slow_steps(tokens: pd.DataFrame) -> pd.DataFrame:
    """Decode steps beyond SLOW_DEVIATIONS times the typical deviation from the median and beyond SLOW_TIMES the median.

    Rows of `tokens` in time order with `times_median`, their duration as a multiple of the median.
    """
    decode = tokens[tokens["complete"] & (tokens["phase"] == "decode")].sort_values("begin_ns")
    length = decode["duration_ns"]
    middle = float(length.median()) if len(decode) else 0.0
    usual = 1.4826 * float((length - middle).abs().median()) if len(decode) else 0.0
    slow = decode[(length > middle + SLOW_DEVIATIONS * usual) & (length > SLOW_TIMES * middle)]
    return slow.assign(times_median=slow["duration_ns"] / middle if middle else 0.0)
