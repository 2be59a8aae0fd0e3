"""Energy of steps, phases and requests: readings of power sensors joined with what ran.

A sensor is slower than a step: a phase's energy comes from a fit of the readings to what ran (energy_fit.py), a constant and CPU
seconds of the program by phase, with intervals. What the readings cannot tell is absent.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import figures
from analyzer.questions.energy_fit import EnergyFit, fit_energy
from analyzer.records.intervals import Intervals, common_time, covered_ns, merge_intervals, ns_since, uncovered_parts
from analyzer.records.schema import Tables, declared_columns
from analyzer.tables.power import POWER

PHASES = ("prefill", "decode")
OUTSIDE = "outside steps"
NS = 1e-9
MOST_ROWS = 1000
"""Readings that are fitted; of more, neighbours are summed."""
FRESH_SHARE = 1.5
DELAY_PERIODS, LONGEST_DELAY_S = 5.0, 0.5
WIDEST = 0.5
"""Half an interval, as a share of the energy, from which on the readings do not tell it."""
WIDE_FIRST = ("device", "package", "cores", "gpu", "memory", "")


@dataclass(frozen=True)
class RailReadings:
    """A rail's known energy between its own updates."""

    begin: np.ndarray
    end: np.ndarray
    joules: np.ndarray
    of_counter: bool

    @property
    def watts(self) -> np.ndarray:
        """The mean power of each."""
        return self.joules / ((self.end - self.begin) * NS)

    @property
    def period_s(self) -> float:
        """The usual time between updates."""
        return float(np.median(self.end - self.begin)) * NS


def rail_readings(power: pd.DataFrame, of_counter: bool) -> RailReadings:
    """The readings of one rail's rows of `power`: repeated values are one, since a sensor shows its last one until it has another."""
    rows = power[power["joules"].notna()]
    begin, end, joules, watts = (rows[name].to_numpy() for name in ("begin_ns", "end_ns", "joules", "watts"))
    if len(rows) < 2:
        return RailReadings(begin, end, joules, of_counter)
    changed = (joules != 0) if of_counter else np.append(True, ~np.isclose(watts[1:], watts[:-1], rtol=1e-9, atol=0))
    changed |= np.append(True, begin[1:] != end[:-1])
    own = np.quantile(np.diff(end[changed]), 0.25) if changed.sum() > 2 else 0
    last, fresh = -np.inf, []
    for at, is_new in zip(end.tolist(), changed.tolist(), strict=True):
        is_new = is_new or (not of_counter and at - last > FRESH_SHARE * own)
        last = at if is_new else last
        fresh.append(is_new)
    return grouped_readings(begin, end, joules, watts, np.array(fresh), of_counter)


def grouped_readings(
    begin: np.ndarray, end: np.ndarray, joules: np.ndarray, watts: np.ndarray, fresh: np.ndarray, of_counter: bool
) -> RailReadings:
    """Rows up to each fresh one as one: a counter's are summed, a power's value is that of all the time since the last."""
    broken = np.append(True, begin[1:] != end[:-1])
    first = np.flatnonzero(broken | np.append(True, fresh[:-1])[: len(fresh)])
    first = first if len(first) and first[0] == 0 else np.append(0, first)
    last = np.append(first[1:], len(begin)) - 1
    total = np.add.reduceat(joules, first) if of_counter else watts[last] * (end[last] - begin[first]) * NS
    whole = fresh[last]
    return RailReadings(begin[first][whole], end[last][whole], total[whole], of_counter)


def thinned(readings: RailReadings, most: int = MOST_ROWS) -> RailReadings:
    """At most about `most` readings, neighbours summed."""
    each = -(-len(readings.end) // most)
    if each < 2:
        return readings
    broken = np.append(True, readings.begin[1:] != readings.end[:-1])
    run = np.cumsum(broken)
    place = np.arange(len(run)) - np.flatnonzero(broken)[run - 1]
    first = np.flatnonzero(broken | (place % each == 0))
    last = np.append(first[1:], len(run)) - 1
    return RailReadings(readings.begin[first], readings.end[last], np.add.reduceat(readings.joules, first), readings.of_counter)


@dataclass(frozen=True)
class Running:
    """When the program computed, by phase: CPU time if its scheduling was recorded, else the phase's own time."""

    names: tuple[str, ...]
    spans: tuple[Intervals, ...]
    steps: dict[str, Intervals]

    @classmethod
    def of(cls, tables: Tables) -> "Running":
        """From steps and states of threads."""
        steps = phase_times(tables)
        states = tables["thread_states"]
        if not len(states):
            names = tuple(name for name in PHASES if len(steps[name]))
            return cls(names, tuple(steps[name] for name in names), steps)
        cpu = Intervals.of_table(states[states["state"] == "running"])
        every = merge_intervals(Intervals.joined(*steps.values()))
        parts = {name: common_time(*on_threads(cpu, span)) for name, span in steps.items()}
        parts[OUTSIDE] = uncovered_parts(cpu, on_threads(cpu, every)[1])
        names = tuple(name for name, part in parts.items() if len(part))
        return cls(names, tuple(parts[name] for name in names), steps)

    def seconds(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """What ran in each window: shape [windows, 1 + names], the first column all the time."""
        return np.column_stack([(end - begin) * NS, *(seconds_within(span, begin, end) for span in self.spans)])


def on_threads(cpu: Intervals, spans: Intervals) -> tuple[Intervals, Intervals]:
    """(CPU time, the same spans for each of its threads)."""
    tids = np.unique(cpu.key)
    return cpu, Intervals(np.repeat(tids, len(spans)), np.tile(spans.begin, len(tids)), np.tile(spans.end, len(tids)))


def phase_times(tables: Tables) -> dict[str, Intervals]:
    """When steps of each phase were computed; steps of several contexts at once are prefill if one of them is."""
    tokens = tables["tokens"]
    every = {name: tokens[(tokens["phase"] == name) & tokens["complete"]] for name in PHASES}
    prefill, decode = (merge_intervals(Intervals.of_table(rows.assign(key=0), "key")) for rows in every.values())
    return {"prefill": prefill, "decode": uncovered_parts(decode, prefill)}


def seconds_within(spans: Intervals, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Seconds of all the spans in each window."""
    opened, closed = np.sort(spans.begin), np.sort(spans.end)
    return (ns_since(opened, end) - ns_since(closed, end) - ns_since(opened, begin) + ns_since(closed, begin)) * NS


def fed_tokens(tables: Tables) -> dict[str, int]:
    """Tokens of the complete steps of each phase: fed by prefill, decoded."""
    fed = figures.fed_sequences(tables)
    steps = figures.complete_steps(tables)
    prefill, decode = (fed[fed["phase"] == name] for name in PHASES)
    decoded = decode["kept"].clip(lower=1).sum() if len(decode) else (steps["phase"] == "decode").sum()
    return {"prefill": int(prefill["rows"].sum()), "decode": int(decoded)}


@dataclass(frozen=True)
class RailFit:
    """A rail's readings fitted to what ran."""

    row: dict[str, Any]
    """Of `rails`."""
    readings: RailReadings
    running: Running
    fit: EnergyFit
    states: dict[str, int]
    """Readings that are not good, by state."""
    floor: tuple[float, int] | None
    """Mean watts before the program began, and of how many readings."""


def fitted_rails(tables: Tables) -> list[RailFit]:
    """The rails whose readings can be fitted, what covers most first."""
    running, fits = Running.of(tables), []
    for row in tables["rails"].to_dict("records"):
        power = tables["power"][tables["power"]["rail_id"] == row["rail_id"]]
        readings = thinned(rail_readings(power, row["kind"] != POWER))
        if len(readings.end) < 2 or not running.names:
            continue
        fit = fitted(running, readings)
        if fit:
            counts = power.loc[power["state"] != "", "state"].value_counts()
            states = {str(name): int(n) for name, n in counts.items() if n}
            floor = idle_floor(readings, (row["floor_begin_ns"], row["floor_end_ns"]), fit.delay_s)
            fits.append(RailFit(row, readings, running, fit, states, floor))
    return sorted(fits, key=lambda each: WIDE_FIRST.index(each.row["scope"]) if each.row["scope"] in WIDE_FIRST else len(WIDE_FIRST))


def fitted(running: Running, readings: RailReadings) -> EnergyFit | None:
    """The readings fitted to what ran; None if they are too few."""
    period_s = readings.period_s
    longest = min(DELAY_PERIODS * period_s, LONGEST_DELAY_S)
    return fit_energy(readings.watts, partial(delayed_activities, running, readings), period_s, longest, readings.of_counter)


def delayed_activities(running: Running, readings: RailReadings, delay_s: float) -> np.ndarray:
    """What ran between the readings, per second, if they show it that much later."""
    late = round(delay_s / NS)
    ran = running.seconds(readings.begin - late, readings.end - late)
    return ran / ran[:, :1]


def idle_floor(readings: RailReadings, floor_ns: tuple[int, int], delay_s: float) -> tuple[float, int] | None:
    """(mean watts, number of readings) while the machine was idle before the program began; None without a reading."""
    late = round(delay_s / NS)
    inside = (readings.begin - late >= floor_ns[0]) & (readings.end - late <= floor_ns[1])
    spent = float((readings.end - readings.begin)[inside].sum()) * NS
    return (float(readings.joules[inside].sum()) / spent, int(inside.sum())) if spent > 0 else None


def phase_energy(tables: Tables, fits: list[RailFit] | None = None) -> pd.DataFrame:
    """A row per rail and phase: columns of `energy` in tables.toml."""
    tokens, rows = fed_tokens(tables), []
    for each in fitted_rails(tables) if fits is None else fits:
        for phase, spans in each.running.steps.items():
            if len(spans):
                rows.append(energy_row(each, phase, spans, tokens[phase]))
    return pd.DataFrame(rows, columns=[column.name for column in declared_columns("energy")])


def energy_row(each: RailFit, phase: str, spans: Intervals, tokens: int) -> dict[str, Any]:
    """The energy of a phase by one rail; NaN where the readings cannot tell it."""
    seconds, names = float(spans.length.sum()) * NS, each.running.names
    amounts = np.zeros(1 + len(names))
    amounts[0] = seconds
    if phase in names:
        number = names.index(phase)
        amounts[1 + number] = float(each.running.spans[number].length.sum()) * NS
    joules, low, high = each.fit.total(amounts)
    if not (high - low) / 2 <= WIDEST * joules:
        joules = low = high = np.nan
    floor = each.floor[0] * seconds if each.floor else np.nan
    per_token = {f"{name}_per_token": value / max(tokens, 1) if tokens else np.nan for name, value in (("j", joules), ("low", low), ("high", high))}
    named = {key: each.row[key] for key in ("rail_id", "source", "rail", "scope")}
    return {**named, "phase": phase, "tokens": tokens, "seconds": seconds, "joules": joules, **per_token, "floor_joules": floor}
