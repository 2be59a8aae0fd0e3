"""CPU frequencies during decode, and the limits on them; what these cost: heat.py."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from analyzer.records.intervals import Intervals, covered_ns, merge_intervals
from analyzer.records.schema import Tables

LEAST_SHARE = 0.01
"""Minimum share of decode for a limit to be reported."""
LEAST_STEPS = 5
"""Minimum decode steps with and without a cap for a comparison."""
OF_CPU = ("cpu", "processor")
"""Parts of the types of cooling devices that limit frequencies, which the limits show already."""


@dataclass(frozen=True)
class FrequencyCap:
    """A frequency limit below the hardware's for some CPUs: its share of decode, and the limit in force longest."""

    name: str
    share: float
    mhz: float
    most_mhz: float

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.name} capped to {self.mhz / 1e3:.1f} GHz (of {self.most_mhz / 1e3:.1f}) for {self.share:.0%} of decode"


def decode_times(tables: Tables) -> Intervals:
    """The times of decode steps."""
    steps = tables["tokens"]
    steps = steps[(steps["phase"] == "decode") & steps["complete"]]
    return Intervals(np.zeros(len(steps), np.int64), steps["begin_ns"].to_numpy(np.int64), steps["end_ns"].to_numpy(np.int64))


def gauge_values(tables: Tables, what: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """(name, its values in time order with `begin_ns` and `end_ns`) of every policy, zone or device of kind `what`."""
    rows = tables["clocks"]
    times = decode_times(tables)
    if len(times) == 0:
        return
    last = int(times.end.max())
    for _, mine in rows[rows["what"] == what].groupby("number", sort=True):
        begin = mine["ts_ns"].to_numpy(np.int64)
        end = np.append(begin[1:], max(last, begin[-1]))
        yield str(mine["name"].iloc[0]), mine.assign(begin_ns=begin, end_ns=end)


def value_shares(values: pd.DataFrame, times: Intervals) -> np.ndarray:
    """The share of the merged `times` in which each value was in force."""
    spent = covered_ns(times, Intervals.of_table(values.assign(key=0), "key"))
    return spent / max(int(times.length.sum()), 1)


def frequency_caps(tables: Tables) -> list[FrequencyCap]:
    """Policies with an allowed maximum frequency below the hardware's during decode."""
    found, times = [], merge_intervals(decode_times(tables))
    for name, values in gauge_values(tables, "greatest frequency"):
        low = (values["value"] < values["most"]).to_numpy()
        values = values.assign(share=value_shares(values, times))[low]
        if (share := float(values["share"].sum())) >= LEAST_SHARE:
            longest = values.groupby("value")["share"].sum().idxmax()
            found.append(FrequencyCap(name, share, float(longest), float(values["most"].iloc[0])))
    return found


def active_cooling(tables: Tables) -> dict[str, float]:
    """Active cooling devices other than CPUs: type → share of decode."""
    times = merge_intervals(decode_times(tables))
    answer: dict[str, float] = {}
    for name, values in gauge_values(tables, "cooling"):
        share = float(value_shares(values, times)[(values["value"] > 0).to_numpy()].sum())
        if share >= LEAST_SHARE and not any(word in name.lower() for word in OF_CPU):
            answer[name] = max(share, answer.get(name, 0.0))
    return answer


def mean_frequencies(tables: Tables) -> dict[str, float]:
    """The mean frequency of each policy during decode, in MHz."""
    times = merge_intervals(decode_times(tables))
    return {name: float(value_shares(v, times) @ v["value"].to_numpy()) for name, v in gauge_values(tables, "frequency")}


def clock_summary(tables: Tables) -> dict[str, Any]:
    """`caps`, each with its `text`, and `cooling`; {} if nothing limited the CPUs."""
    found, others = frequency_caps(tables), active_cooling(tables)
    rows = [{**asdict(cap), "text": cap.text} for cap in found]
    return {"caps": rows, "cooling": others} if rows or others else {}
