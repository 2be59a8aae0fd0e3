"""Energy of steps, phases and requests: readings of power sensors joined with what ran.

A sensor is slower than a step: a phase's energy comes from a fit of the readings (energy_fit.py) to what ran
(energy_running.py), a constant and CPU seconds of the program by phase, with intervals. What they do not resolve is absent.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analyzer.questions import figures
from analyzer.questions.energy_readings import RailReadings, rail_readings, thinned
from analyzer.questions.energy_running import NS, PHASES, SAMPLES, Running
from analyzer.questions.requests import request_table
from analyzer.records.schema import Tables, declared_columns, empty_table
from analyzer.tables.power import POWER

if TYPE_CHECKING:
    from analyzer.questions.energy_fit import EnergyFit

DELAY_PERIODS, LONGEST_DELAY_S = 5.0, 0.5
WIDEST = 0.5
"""Half an interval, as a share of the energy, from which on the readings do not tell it."""
SEEN = 0.9
"""Share of a window that readings must cover."""
RESOLVED = 5.0
"""Readings in a window from which on they resolve it."""
WIDE_FIRST = ("device", "package", "cores", "gpu", "memory", "")


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
    fit: "EnergyFit"
    states: dict[str, int]
    """Readings that are not good, by state."""
    floor: tuple[float, int] | None
    """Mean watts before the program began, and of how many readings."""


def fitted_rails(tables: Tables) -> list[RailFit]:
    """The rails whose readings can be fitted, what covers most first."""
    rails, fits = wide_first(rail_table(tables)), []
    running = Running.of(tables) if len(rails) else None
    for row in rails.to_dict("records"):
        power = tables["power"][tables["power"]["rail_id"] == row["rail_id"]]
        readings = thinned(rail_readings(power, row["kind"] != POWER))
        if running is None or len(readings.end) < 2 or not running.activities:
            continue
        fit = fitted(running, readings)
        if fit:
            counts = power.loc[power["state"] != "", "state"].value_counts()
            states = {str(name): int(n) for name, n in counts.items() if n}
            floor = idle_floor(readings, (row["floor_begin_ns"], row["floor_end_ns"]), fit.delay_s)
            fits.append(RailFit(row, readings, running, fit, states, floor))
    return fits


def wide_first(rails: pd.DataFrame) -> pd.DataFrame:
    """The rails, what covers most first."""
    place = {scope: number for number, scope in enumerate(WIDE_FIRST)}
    return rails.sort_values("scope", key=lambda scopes: scopes.map(place).fillna(len(place)), kind="stable")


def fitted(running: Running, readings: RailReadings) -> "EnergyFit | None":
    """The readings fitted to what ran; None if they are too few."""
    from analyzer.questions.energy_fit import fit_energy  # its SciPy takes half a second, which no other recording needs

    period_s = readings.period_s
    longest = min(DELAY_PERIODS * period_s, LONGEST_DELAY_S)
    ran, explanations = partial(delayed_activities, running, readings), running.explanations()
    parts = None if readings.of_counter else partial(sampled_activities, running, readings)
    return fit_energy(readings.watts, ran, explanations, period_s, longest, readings.of_counter, parts)


def delayed_activities(running: Running, readings: RailReadings, delay_s: float) -> np.ndarray:
    """What ran between the readings, per second, if they show it that much later."""
    late = round(delay_s / NS)
    ran = running.seconds(readings.begin - late, readings.end - late)
    return ran / ran[:, :1]


def sampled_activities(running: Running, readings: RailReadings, delay_s: float) -> np.ndarray:
    """The same in SAMPLES equal parts of the time between the readings, shape [SAMPLES, readings, activities]."""
    late, length = round(delay_s / NS), readings.end - readings.begin
    edges = [readings.begin - late + length * part // SAMPLES for part in range(SAMPLES + 1)]
    ran = np.stack([running.seconds(begin, end) for begin, end in pairwise(edges)])
    return ran / ran[:, :, :1]


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
        rows += [energy_row(each, phase, tokens[phase]) for phase, spans in each.running.steps.items() if len(spans)]
    return pd.DataFrame(rows, columns=[column.name for column in declared_columns("energy")])


def energy_row(each: RailFit, phase: str, tokens: int) -> dict[str, Any]:
    """The energy of a phase by one rail; NaN where the readings do not resolve it."""
    amounts = each.running.amounts(phase)
    seconds = float(amounts[0])
    joules, low, high = each.fit.total(amounts)
    if not (high - low) / 2 <= WIDEST * joules:
        joules = low = high = np.nan
    floor = each.floor[0] * seconds if each.floor else np.nan
    ends = {"j_per_token": joules, "low_per_token": low, "high_per_token": high}
    per_token = {name: value / tokens if tokens else np.nan for name, value in ends.items()}
    named = {key: each.row[key] for key in ("rail_id", "source", "rail", "scope")}
    return {**named, "phase": phase, "tokens": tokens, "seconds": seconds, "joules": joules, **per_token, "floor_joules": floor}


def request_energy(tables: Tables) -> pd.DataFrame:
    """A row per rail and request, from its first step's begin to its last one's end; several at once share what was used."""
    return window_energy(tables, request_table(tables)[["request", "begin_ns", "end_ns"]])


def step_energy(tables: Tables) -> pd.DataFrame:
    """A row per rail and complete step."""
    tokens = tables["tokens"]
    return window_energy(tables, tokens.loc[tokens["complete"], ["token_id", "phase", "begin_ns", "end_ns"]])


def window_energy(tables: Tables, windows: pd.DataFrame) -> pd.DataFrame:
    """The windows once for each rail: `joules` between readings (NaN if the window is short or readings are missing in it), and
    `model_joules` by the fit, with the share that it leaves unexplained where both are known."""
    parts = []
    begin, end = windows["begin_ns"].to_numpy(np.int64), windows["end_ns"].to_numpy(np.int64)
    for each in fitted_rails(tables):
        model = each.running.seconds(begin, end) @ each.fit.watts
        late = round(each.fit.delay_s / NS)
        measured = energy_between(each.readings, begin + late, end + late)
        more = {"source": each.row["source"], "rail": each.row["rail"], "joules": measured, "model_joules": model}
        parts.append(windows.assign(**more, residual=(measured - model) / measured))
    names = [*windows.columns, "source", "rail", "joules", "model_joules", "residual"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=names)


def energy_between(readings: RailReadings, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Joules of each window, of what lies partly inside or is missing in proportion; NaN where the readings do not resolve it."""
    moments = np.column_stack([readings.begin, readings.end]).ravel()
    joules, seen = (
        np.diff(np.interp(np.stack([begin, end]), moments, np.column_stack([total - each, total]).ravel()), axis=0)[0]
        for each in (readings.joules, readings.end - readings.begin)
        for total in [np.cumsum(each)]
    )
    resolved = (seen >= SEEN * (end - begin)) & ((end - begin) * NS >= RESOLVED * readings.period_s)
    return np.where(resolved, joules * (end - begin) / np.maximum(seen, 1), np.nan)


def energy_summary(tables: Tables, fits: list[RailFit]) -> dict[str, Any]:
    """`rails`: of each fitted rail its sensor's figures and the energy of each phase, and `untold`: rails without, and why."""
    if not len(rail_table(tables)):
        return {}
    rows = phase_energy(tables, fits)
    rails = [rail_summary(each, rows[rows["rail_id"] == each.row["rail_id"]]) for each in fits]
    told = {each.row["rail_id"] for each in fits}
    missing = [row for row in rail_table(tables).to_dict("records") if row["rail_id"] not in told]
    return {
        "rails": rails,
        "untold": [{"source": row["source"], "rail": row["rail"], "why": why_untold(tables, row)} for row in missing],
    }


def rail_summary(each: RailFit, rows: pd.DataFrame) -> dict[str, Any]:
    """One rail's part of `energy_summary`."""
    floor_watts, floor_readings = each.floor or (None, 0)
    about = {key: each.row[key] for key in ("source", "rail", "scope", "kind", "hz")}
    figures_of = {
        "joined_by": each.readings.joined_by,
        "readings": len(each.readings.end),
        "period_s": each.readings.period_s,
        "delay_s": each.fit.delay_s,
        "residual": each.fit.residual,
        "base_watts": float(each.fit.watts[0]),
        "floor_watts": floor_watts,
        "floor_readings": floor_readings,
        "disturbances": each.states,
    }
    return {**about, **figures_of, "phases": {row["phase"]: phase_figures(row) for row in rows.to_dict("records")}}


def phase_figures(row: dict[str, Any]) -> dict[str, Any]:
    """A phase's figures; None where the readings do not resolve them."""
    joules, tokens = known(row["joules"]), row["tokens"]
    per_token, floor = known(row["j_per_token"]), known(row["floor_joules"])
    return {
        "tokens": tokens,
        "seconds": row["seconds"],
        "joules": joules,
        "j_per_token": per_token,
        "low": known(row["low_per_token"]),
        "high": known(row["high_per_token"]),
        "tokens_per_j": 1 / per_token if per_token else None,
        "above_floor_j_per_token": (joules - floor) / tokens if joules is not None and floor is not None and tokens else None,
    }


def known(value: float) -> float | None:
    """None instead of NaN."""
    return None if np.isnan(value) else float(value)


def why_untold(tables: Tables, row: dict[str, Any]) -> str:
    """Why a rail has no figures."""
    power = tables["power"][tables["power"]["rail_id"] == row["rail_id"]]
    if not len(power):
        return "no readings"
    counts = power["state"].value_counts()
    bad = {str(name): int(n) for name, n in counts.items() if n and name}
    lost = int(power["joules"].isna().sum())
    if lost * 2 > len(power):
        return f"{lost} of {len(power)} intervals between readings are of no use: {', '.join(bad)}"
    return "no steps" if not len(tables["tokens"]) else f"{len(power) - lost} readings are too few"


def rail_table(tables: Tables) -> pd.DataFrame:
    """The table `rails`, which imported recordings lack."""
    return tables["rails"] if "rails" in tables else empty_table("rails")
