"""Heat: clocks of the program, temperatures and power over time, and what limited clocks, when and at what cost."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import energy, figures
from analyzer.questions.clocks import LEAST_SHARE, LEAST_STEPS, decode_times, gauge_values
from analyzer.questions.energy_readings import rail_readings
from analyzer.records.intervals import Intervals, covered_ns, merge_intervals, overlaps, uncovered_parts
from analyzer.records.schema import Tables
from analyzer.tables.power import POWER

S, MS = 1e9, 1e6
FANS = ("fan", "lcd", "backlight")
"""Parts of the types of cooling devices that slow nothing down."""
HOT = 1.0
"""A zone that is less than as many °C below its trip point is at its limit."""
FALLEN = 0.95
"""A clock below this share of its highest one has fallen."""
BUSY = 0.1
"""Share of the program's CPU time from which on its clock counts."""
JOINED_NS = 2_000_000_000
"""Limits with shorter pauses are one episode."""


@dataclass(frozen=True)
class Limit:
    """What limited clocks, and when."""

    text: str
    spans: Intervals


@dataclass(frozen=True)
class Episode:
    """A stretch of decode in which something limited clocks: seconds since the first step, and by what."""

    begin_s: float
    end_s: float
    sources: list[str]
    celsius: float | None
    """The hottest zone's highest temperature."""
    zone: str


@dataclass(frozen=True)
class LimitCost:
    """Decode under limits and without: tokens/s by the median ITL, steps, and the time that limited ones took more, in ns."""

    limited_tokens_per_s: float
    free_tokens_per_s: float
    limited_steps: int
    free_steps: int
    lost_ns: float


def mean_within(ts: np.ndarray, value: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The mean in each window of what has each `value` from its `ts` on; NaN in windows that begin before the first."""
    last = max(int(end.max(initial=0)), int(ts[-1])) + 1
    stops = np.append(ts, last)
    total = np.append(0.0, np.cumsum(value * np.diff(stops)))
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (np.interp(end, stops, total) - np.interp(begin, stops, total)) / (end - begin)
    return np.where(begin >= ts[0], means, np.nan)


def origin_ns(tables: Tables) -> int:
    """The begin of the first step, from which seconds are counted; 0 without steps."""
    tokens = tables["tokens"]
    return int(tokens["begin_ns"].min()) if len(tokens) else 0


def policy_shares(tables: Tables) -> dict[int, float]:
    """Number of a frequency policy → the share of the program's CPU time on its CPUs; all alike if that was not recorded."""
    rows = tables["clocks"]
    numbers = sorted(set(rows.loc[rows["what"] == "frequency", "number"].tolist()))
    states = tables["thread_states"]
    running = states[(states["state"] == "running") & (states["cpu"] >= 0)]
    if not len(running) or not numbers:
        return {number: 1 / len(numbers) for number in numbers}
    # a policy has the number of its first CPU
    policy = np.array(numbers)[np.maximum(np.searchsorted(numbers, running["cpu"].to_numpy(), "right") - 1, 0)]
    spent = pd.Series(running["duration_ns"].to_numpy(np.float64)).groupby(policy).sum()
    return {number: float(spent.get(number, 0.0) / spent.sum()) for number in numbers}


def pace_mhz(tables: Tables, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The mean clock of the CPUs that the program computed on, in each window, MHz; NaN where it is not known."""
    rows, shares = tables["clocks"], policy_shares(tables)
    total = sum(shares.values())
    if not total or not len(begin):
        return np.full(len(begin), np.nan)
    answer: np.ndarray = np.zeros(len(begin))
    for number, share in shares.items():
        mine = rows[(rows["what"] == "frequency") & (rows["number"] == number)]
        if share:
            answer += share / total * mean_within(mine["ts_ns"].to_numpy(np.int64), mine["value"].to_numpy(), begin, end)
    return answer


def hottest_celsius(tables: Tables, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The mean temperature of the hottest zone in each window, °C; NaN where none is known."""
    rows = tables["clocks"]
    answer = np.full(len(begin), np.nan)
    for _, zone in rows[rows["what"] == "temperature"].groupby("number"):
        answer = np.fmax(answer, mean_within(zone["ts_ns"].to_numpy(np.int64), zone["value"].to_numpy(), begin, end))
    return answer


@dataclass(frozen=True)
class RailWatts:
    """A rail's mean power in each window, NaN where its readings do not resolve it, and the usual time between them."""

    row: dict[str, Any]
    watts: np.ndarray
    period_s: float


def rail_watts(tables: Tables, begin: np.ndarray, end: np.ndarray) -> Iterator[RailWatts]:
    """Each rail that has readings."""
    for row in energy.rail_table(tables).to_dict("records"):
        power = tables["power"][tables["power"]["rail_id"] == row["rail_id"]]
        readings = rail_readings(power, row["kind"] != POWER)
        if len(readings.end):
            watts = energy.energy_between(readings, begin, end) / ((end - begin) / S)
            yield RailWatts({str(key): value for key, value in row.items()}, watts, readings.period_s)


def total_watts(tables: Tables, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The power of the rails that resolve windows together, those that overlap counted twice; NaN where one of them does not."""
    every = [each.watts for each in rail_watts(tables, begin, end) if np.isfinite(each.watts).any()]
    return np.sum(every, axis=0) if every else np.full(len(begin), np.nan)


def spans_where(values: pd.DataFrame, holds: np.ndarray) -> Intervals:
    """The times of the values for which it holds, merged."""
    return merge_intervals(Intervals.of_table(values[holds].assign(key=0), "key"))


def hot_spans(tables: Tables) -> Intervals:
    """When a zone was at its trip point."""
    zones = [
        spans_where(zone, (zone["value"] > zone["most"] - HOT).to_numpy()) for _, zone in gauge_values(tables, "temperature")
    ]
    return merge_intervals(Intervals.joined(*zones)) if zones else Intervals.of(np.empty(0, np.int64), np.empty(0, np.int64))


def longest_value(values: pd.DataFrame, holds: np.ndarray) -> float:
    """Of the values for which it holds, the one in force longest."""
    held = values[holds]
    return float((held["end_ns"] - held["begin_ns"]).groupby(held["value"]).sum().idxmax())


def clock_limits(tables: Tables) -> Iterator[Limit]:
    """Limits of policies below the hardware's, and clocks that fell while a zone was at its limit and no other limit held."""
    shares, hot = policy_shares(tables), hot_spans(tables)
    capped: dict[str, Intervals] = {}
    for name, values in gauge_values(tables, "greatest frequency"):
        low = (values["value"] < values["most"]).to_numpy()
        if low.any():
            capped[name] = spans_where(values, low)
            mhz, most = longest_value(values, low), float(values["most"].iloc[0])
            yield Limit(f"{name} capped to {mhz / 1e3:.1f} GHz (of {most / 1e3:.1f})", capped[name])
    for name, values in gauge_values(tables, "frequency"):
        fell = (values["value"] < FALLEN * values["value"].max()).to_numpy()
        if not fell.any() or shares.get(int(values["number"].iloc[0]), 0.0) < BUSY:
            continue
        met = overlaps(spans_where(values, fell), hot)
        spans = without(Intervals.of(met.begin, met.end), capped.get(name))
        if len(spans):
            mhz = longest_value(values, fell)
            yield Limit(f"{name} fell to {mhz / 1e3:.1f} GHz with a zone at its limit, by no limit that Linux shows", spans)


def without(spans: Intervals, others: Intervals | None) -> Intervals:
    """The spans of key 0 outside of others."""
    return uncovered_parts(spans, others) if others is not None and len(others) and len(spans) else spans


def cooling_limits(tables: Tables) -> Iterator[Limit]:
    """Active cooling devices, but for fans."""
    for name, values in gauge_values(tables, "cooling"):
        active = (values["value"] > 0).to_numpy()
        if active.any() and not any(word in name.lower() for word in FANS):
            state, most = longest_value(values, active), float(values["most"].iloc[0])
            of = f" of {most:.0f}" if most == most else ""
            yield Limit(f"cooling {name} at {state:.0f}{of}", spans_where(values, active))


def limits_of(tables: Tables) -> list[Limit]:
    """What limited clocks for at least LEAST_SHARE of decode."""
    times = merge_intervals(decode_times(tables))
    total = max(int(times.length.sum()), 1)
    every = [*clock_limits(tables), *cooling_limits(tables)]
    return [limit for limit in every if covered_ns(limit.spans, times).sum() >= LEAST_SHARE * total]


def limited_spans(limits: list[Limit]) -> Intervals:
    """When anything limited clocks."""
    return merge_intervals(Intervals.joined(*(limit.spans for limit in limits)))


def episodes(tables: Tables, limits: list[Limit]) -> list[Episode]:
    """The stretches in which clocks were limited while decode ran, short pauses included."""
    times = decode_times(tables)
    if not limits or not len(times):
        return []
    met = overlaps(limited_spans(limits), Intervals.of(times.begin[:1].min(keepdims=True), times.end.max(keepdims=True)))
    parts = merge_intervals(Intervals.of(met.begin, met.end + JOINED_NS))
    return [
        episode_of(tables, limits, begin, end)
        for begin, end in zip(parts.begin.tolist(), (parts.end - JOINED_NS).tolist(), strict=True)
    ]


def episode_of(tables: Tables, limits: list[Limit], begin: int, end: int) -> Episode:
    """One episode: its sources, and the hottest zone meanwhile."""
    window, origin = Intervals.of(np.array([begin]), np.array([end])), origin_ns(tables)
    sources = [limit.text for limit in limits if covered_ns(limit.spans, window)[0] > 0]
    celsius, zone = max(
        (
            (float(rows.loc[(rows["begin_ns"] < end) & (rows["end_ns"] > begin), "value"].max()), name)
            for name, rows in gauge_values(tables, "temperature")
        ),
        default=(np.nan, ""),
    )
    return Episode((begin - origin) / S, (end - origin) / S, sources, energy.known(celsius), zone)


def limit_cost(tables: Tables, limits: list[Limit]) -> LimitCost | None:
    """What limits cost decode; None if too few steps were limited, or too few were not."""
    steps = figures.complete_steps(tables).dropna(subset=["itl_ms"])
    spans = Intervals.of(steps["begin_ns"].to_numpy(np.int64), steps["end_ns"].to_numpy(np.int64))
    if not limits or not len(spans):
        return None
    limited, itl = covered_ns(limited_spans(limits), spans) > spans.length / 2, steps["itl_ms"].to_numpy()
    if min(limited.sum(), (~limited).sum()) < LEAST_STEPS:
        return None
    usual, slow = float(np.median(itl[~limited])), float(np.median(itl[limited]))
    lost = float(np.maximum(itl[limited] - usual, 0).sum()) * MS
    return LimitCost(1e3 / slow, 1e3 / usual, int(limited.sum()), int((~limited).sum()), lost)


def episode_text(found: list[Episode]) -> str:
    """The episodes in words: how often, since when, by what, and the hottest zone."""
    seconds, sources = (
        sum(each.end_s - each.begin_s for each in found),
        list(dict.fromkeys(s for each in found for s in each.sources)),
    )
    times = f" in {len(found)} stretches" if len(found) > 1 else ""
    hottest = max((each for each in found if each.celsius is not None), key=lambda each: each.celsius or 0.0, default=None)
    heat = f", {hottest.zone} at up to {hottest.celsius:.1f} °C" if hottest else ""
    return f"clocks limited for {seconds:.1f} s{times} from second {found[0].begin_s:.1f} on: {', '.join(sources)}{heat}"


def limit_summary(tables: Tables) -> dict[str, Any]:
    """`episodes` in which clocks were limited, and what they `cost`; {} if they never were."""
    limits = limits_of(tables)
    found, cost = episodes(tables, limits), limit_cost(tables, limits)
    return {"episodes": [asdict(each) for each in found], "cost": asdict(cost) if cost else {}} if found else {}
