"""The tables `rails` and `power`: readings of power sensors as energy between each two of a rail."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzer.records.manifest import listed_items, section
from analyzer.records.reading import Source
from analyzer.records.rows import Rows
from analyzer.records.schema import Columns, text_array
from analyzer.records.spans import NONE
from analyzer.tables.clocks import scaled_number
from analyzer.tables.meter import METER, meter_readings

ENERGY, STOCK, POWER = "energy", "stock", "power"
DISCHARGING = 1
STATES = np.array(["", "charging", "gap", "stopped", "reset"], object)
GOOD, CHARGING, GAP, STOPPED, RESET = range(5)
GAP_PERIODS = 2.5
"""Usual intervals between readings, or between changes of the sensor, after which some are missing."""
STILL_CHANGES, STILL_NS = 20, 1_000_000_000
"""A sensor has stopped that repeats a value for as many of its usual changes and as long."""
HELD_UP, HELD_UP_NS = 10, 2_000_000
"""A reading was held up, and its moment is not known, that took as many times the usual time and as long."""
NS = 1e-9
FAR_NS = 10_000_000_000
"""A sensor's own time that differs more from the reading's is of another clock."""


@dataclass(frozen=True)
class Rail:
    """A rail as the manifest describes it."""

    source: str
    name: str
    scope: str
    kind: str
    unit: float
    multiplied: bool
    lines: bool
    span: float
    """A counter's range; NaN: not known."""
    hz: float


def scope_of(source: dict[str, Any], rail: str) -> str:
    """What a rail covers, by the beginning of its name; "" if that is not known."""
    known = section(source, "scopes")
    return str(next((scope for name, scope in known.items() if rail.startswith(name)), source.get("scope") or ""))


def described_rails(manifest: dict[str, Any]) -> list[Rail]:
    """The manifest's rails in order; damaged ones are of no kind."""
    told = section(manifest, "power")
    sources: Any = told.get("sources") if isinstance(told.get("sources"), list) else []
    rails = []
    for row in listed_items(told.get("rails"), dict):
        number, name = row.get("source"), str(row.get("rail"))
        source = sources[number] if isinstance(number, int) and 0 <= number < len(sources) else {}
        source, span = source if isinstance(source, dict) else {}, row.get("range")
        unit, hz = (scaled_number(source.get(key)) for key in ("unit", "hz"))
        rails.append(
            Rail(
                *(str(source.get("name")), name, scope_of(source, name), str(source.get("kind"))),
                *(unit, bool(source.get("times")), bool(source.get("lines"))),
                *(float(span) if isinstance(span, int) and span > 0 else np.nan, hz),
            )
        )
    return rails


def rail_columns(rails: list[Rail], floor: Any) -> Columns:
    """The columns of `rails`; `floor`: begin and end of the idle time, in ns."""
    begin, end = floor if isinstance(floor, list) and len(floor) == 2 and all(isinstance(ns, int) for ns in floor) else (0, 0)
    return {
        "rail_id": np.arange(len(rails)),
        "source": np.array([rail.source for rail in rails], object),
        "rail": np.array([rail.name for rail in rails], object),
        "scope": np.array([rail.scope for rail in rails], object),
        "kind": np.array([rail.kind for rail in rails], object),
        "hz": np.array([rail.hz for rail in rails], np.float64),
        "unit": np.array([rail.unit for rail in rails], np.float64),
        "floor_begin_ns": np.full(len(rails), begin),
        "floor_end_ns": np.full(len(rails), end),
    }


def build_power(source: Source) -> tuple[Columns, Columns]:
    """The columns of `rails` and `power`."""
    rails, rows = described_rails(source.manifest), source.rows("power")
    shift = boot_offset_ns(source.manifest)
    parts = [intervals_of(rail, number, rows.where(rows["rail"] == number), shift) for number, rail in enumerate(rails)]
    metered = meter_readings(source.recording.path, source.manifest)
    if metered:
        parts.append(meter_intervals(len(rails), *metered))
        rails = [*rails, Rail(METER, "external meter", "device", POWER, 1.0, False, False, np.nan, np.nan)]
    names = ("rail_id", "begin_ns", "end_ns", "joules", "watts", "state", "wraps")
    empty = interval_columns(NONE, np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), np.empty(0, bool))
    columns = {name: np.concatenate([part[name] for part in (empty, *parts)]) for name in names}
    order = np.argsort(columns["end_ns"], kind="stable")
    ordered = {name: column[order] for name, column in columns.items()}
    return rail_columns(rails, section(source.manifest, "power").get("floor_ns")), ordered | {
        "state": text_array(ordered["state"], STATES)
    }


def boot_offset_ns(manifest: dict[str, Any]) -> int:
    """What the clock that runs on in suspend is ahead of CLOCK_MONOTONIC, at the recording's start."""
    for row in listed_items(manifest.get("clocks"), dict):
        boot, monotonic = row.get("boottime_ns"), row.get("monotonic_ns")
        if isinstance(boot, int) and isinstance(monotonic, int):
            return boot - monotonic
    return 0


def interval_columns(number: int, ts: np.ndarray, joules: np.ndarray, state: np.ndarray, wraps: np.ndarray) -> Columns:
    """A rail's rows from its n readings' times and what is known of the n - 1 intervals between them."""
    begin, end = ts[:-1], ts[1:]
    joules = np.where(np.isin(state, (CHARGING, STOPPED, RESET)), np.nan, joules)
    watts = np.full(len(begin), np.nan)
    np.divide(joules, (end - begin) * NS, out=watts, where=end > begin)
    columns = {"rail_id": np.full(len(begin), number), "begin_ns": begin, "end_ns": end, "joules": joules, "watts": watts}
    return columns | {"state": state, "wraps": wraps}


def meter_intervals(number: int, ts: np.ndarray, watts: np.ndarray) -> Columns:
    """The rows of an external meter's samples."""
    wait = np.diff(ts)
    gap = wait > GAP_PERIODS * np.median(wait)
    joules = np.where(gap, np.nan, watts[1:] * wait * NS)
    return interval_columns(number, ts, joules, np.where(gap, GAP, GOOD), np.zeros(len(wait), bool))


@dataclass(frozen=True)
class Readings:
    """A rail's n readings in time order; `failures` counts the failed ones before each."""

    ts: np.ndarray
    value: np.ndarray
    factor: np.ndarray
    fed: np.ndarray
    """A battery that something else feeds."""
    failures: np.ndarray

    @classmethod
    def of(cls, rail: Rail, rows: Rows, shift_ns: int) -> "Readings":
        """The readings that gave a number, each once."""
        failed, supply = rows["failed"] != 0, rows["supply"]
        middle = (rows["ts"] + rows["after"]) // 2
        own = rows["factor"] * 1_000_000 - shift_ns
        ts = np.where(rail.lines & (np.abs(own - middle) < FAR_NS), own, middle)
        fed = (supply != 0) & (supply != DISCHARGING)
        factor = rows["factor"].astype(np.float64) if rail.multiplied else np.ones(len(rows))
        took = rows["after"] - rows["ts"]
        good = np.flatnonzero(~failed & (took <= max(HELD_UP * np.median(took), HELD_UP_NS) if len(rows) else ~failed))
        good = good[np.append(True, np.diff(ts[good]) > 0)[: len(good)]]
        return cls(ts[good], rows["value"].astype(np.float64)[good], factor[good], fed[good], np.cumsum(failed)[good])


def intervals_of(rail: Rail, number: int, rows: Rows, shift_ns: int) -> Columns:
    """A rail's rows of `power`; failed readings are gaps."""
    r = Readings.of(rail, rows, shift_ns)
    wait = np.diff(r.ts)
    joules, wraps, reset = between_readings(rail, r)
    usual = max(float(np.median(wait)) if len(wait) else 0.0, usual_change_ns(r.value, r.ts))
    gap = (wait > GAP_PERIODS * usual) | (np.diff(r.failures) > 0)
    stopped = repeats_for_long(r.value, r.ts)
    if rail.kind == POWER:
        joules = np.where(gap, np.nan, joules)
    else:  # what a counter has when it goes on may be of all the time
        stopped |= np.append(False, stopped[:-1])[: len(stopped)]
    state = np.select([r.fed[1:] | r.fed[:-1], reset, stopped, gap], [CHARGING, RESET, STOPPED, GAP], GOOD)
    return interval_columns(number, r.ts, joules, state, wraps)


def between_readings(rail: Rail, r: Readings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(joules, whether the counter began again at 0, whether it fell for an unknown reason) between neighbouring readings."""
    none = np.zeros(max(len(r.ts) - 1, 0), bool)
    if rail.kind == POWER:
        watts = np.abs(r.value * r.factor) * rail.unit
        return watts[1:] * np.diff(r.ts) * NS, none, none
    if rail.kind == STOCK:
        return -np.diff(r.value) * rail.unit * (r.factor[1:] + r.factor[:-1]) / 2, none, none
    risen = np.diff(r.value)
    fell = risen < 0
    wraps = fell & (risen + rail.span >= 0)
    return np.where(wraps, risen + rail.span, risen) * rail.unit, wraps, fell & ~wraps


def usual_change_ns(value: np.ndarray, ts: np.ndarray) -> float:
    """The usual time between changes of a sensor's value; 0 if that is not known."""
    changes = ts[1:][np.diff(value) != 0]
    return float(np.median(np.diff(changes))) if len(changes) > 1 else 0.0


def repeats_for_long(value: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """Whether each interval between readings is in a stretch of equal values that is too long for this sensor."""
    changes = np.flatnonzero(np.diff(value) != 0)
    edges = np.unique(np.concatenate(([0], changes, changes + 1, [len(value) - 1]))) if len(value) > 1 else np.zeros(1, np.int64)
    long = np.diff(ts[edges]) >= max(STILL_NS, STILL_CHANGES * usual_change_ns(value, ts))
    return np.repeat(long, np.diff(edges))
