"""What programs of known truth logged, and what of it may be compared.

See workloads/programs/truth.h for what a log's columns mean.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from workloads.host_time import MOST_STOLEN

DISTURBED_NS = 10_000
"""What neighbours on a shared machine may add to the slower quarter of hits: interrupts, and CPU time that the host takes."""
CLOCK_NS = 100
"""How far the kernel's fast clock, which probes read, may be from the program's where the clock is just being adjusted."""


def skip_where_stolen(share: float) -> None:
    """Skip a test that compares durations where the host disturbed its recording."""
    if share > MOST_STOLEN:
        pytest.skip(f"the host took {share:.0%} of the CPUs' time meanwhile")


def read_log(path: Path, what: str) -> pd.DataFrame:
    """The log's rows of one sort, in order of thread and time."""
    log = pd.read_csv(path)
    return log[log["what"] == what].sort_values(["tid", "before_begin"]).reset_index(drop=True)


def in_log_order(table: pd.DataFrame) -> pd.DataFrame:
    """A table's rows in the order of `read_log`."""
    return table.sort_values(["tid", "begin_ns"]).reset_index(drop=True)


def always_running(tids: pd.Series, begin: pd.Series, end: pd.Series, states: pd.DataFrame) -> np.ndarray:
    """For each (thread, begin, end): whether the thread kept its CPU all the time, by the scheduler's records."""
    answer = np.ones(len(tids), bool)
    for tid, mine in states[states["state"] != "running"].groupby("tid"):
        rows = np.flatnonzero(tids == tid)
        away = mine.sort_values("begin_ns")
        since, until = away["begin_ns"].to_numpy(), away["end_ns"].to_numpy()
        at = np.searchsorted(until, begin.to_numpy()[rows])  # the first absence that ends after the row began
        out = at < len(since)
        out[out] = since[at[out]] < end.to_numpy()[rows[out]]
        answer[rows] = ~out
    return answer


def time_asleep(states: pd.DataFrame, tid: int, begin: int, end: int) -> int:
    """How long a thread slept between two moments, in ns."""
    mine = states[(states["tid"] == tid) & (states["state"] == "sleeping")]
    return int((mine["end_ns"].clip(upper=end) - mine["begin_ns"].clip(lower=begin)).clip(lower=0).sum())
