"""The file of an external power meter, joined with a recording by the load pattern that was played before it."""

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.records.manifest import section
from tracer.recording.format import RecordingError

METER = "meter.csv"
"""The file's name in a recording's folder."""
TIMES = re.compile(r"\b(time|timestamp|date|seconds|t)\b", re.IGNORECASE)
POWERS, VOLTS, AMPS = (
    re.compile(form, re.IGNORECASE)
    for form in (r"\b(power|watts?|m?W)\b", r"\b(voltage|volts?|m?V)\b", r"\b(current|amps?|m?A)\b")
)
MILLI = re.compile(r"\bm[WVAs]\b|\bmilli|_m[wvas]\b", re.IGNORECASE)
MICRO = re.compile(r"\b[uµ][WVAs]\b|\bmicro|_u[wvas]\b", re.IGNORECASE)
LEAST_LIKENESS, LEAST_LEAD = 0.4, 1.5
"""Correlation with the pattern, and how much it exceeds that at any other offset."""
LEAST_SAMPLES = 3
"""Samples of each part of the pattern."""
STEP_S = 0.0005


@dataclass(frozen=True)
class Meter:
    """Samples of power, each of the time since the previous one: seconds by the meter's clock, and watts."""

    time_s: np.ndarray
    watts: np.ndarray


@dataclass(frozen=True)
class Joined:
    """The meter's clock against the recording's: CLOCK_MONOTONIC ns at its zero, and how well the pattern is seen."""

    zero_ns: int
    likeness: float
    off_watts: float
    on_watts: float


def scale_of(name: str) -> float:
    """The factor of a column's unit to s, W, V or A."""
    return 1e-3 if MILLI.search(name) else 1e-6 if MICRO.search(name) else 1.0


def seconds_of(column: pd.Series, name: str) -> np.ndarray:
    """Numbers in the column's unit, or dates and times, as seconds."""
    if pd.api.types.is_numeric_dtype(column):
        return column.to_numpy(np.float64) * scale_of(name)
    return pd.to_datetime(column, errors="coerce", format="ISO8601").to_numpy("datetime64[ns]").astype(np.int64) * 1e-9


def is_meter(text: str) -> bool:
    """Whether a text is a table with a column of time and one of power, or of voltage and current."""
    head = re.split(r"[,;\t]", text.lstrip("\ufeff").split("\n", 1)[0])
    names = [name.strip().strip('"').replace("_", " ") for name in head]
    has = [any(form.search(name) for name in names) for form in (TIMES, POWERS, VOLTS, AMPS)]
    return len(names) > 1 and has[0] and (has[1] or (has[2] and has[3]))


def read_meter(path: Path, text: str) -> Meter:
    """The samples in a meter's file. Raises RecordingError if they cannot be read, or are not in time order."""
    if not is_meter(text):
        raise RecordingError(f"{path} has no columns of time and power (or voltage and current) in its first line")
    try:
        frame = pd.read_csv(io.StringIO(text.lstrip("\ufeff")), sep=None, engine="python")
    except (ValueError, csv.Error) as error:
        raise RecordingError(f"{path} cannot be read as a table: {error}") from None
    names = {str(name).strip().replace("_", " "): str(name) for name in frame.columns}
    found = [next((name for name in names if form.search(name)), "") for form in (TIMES, POWERS, VOLTS, AMPS)]
    numbers = {
        form: pd.to_numeric(frame[names[name]], errors="coerce").to_numpy(np.float64) * scale_of(name)
        for form, name in zip((POWERS, VOLTS, AMPS), found[1:], strict=True)
        if name
    }
    watts = numbers[POWERS] if POWERS in numbers else numbers[VOLTS] * numbers[AMPS]
    time_s = seconds_of(frame[names[found[0]]], found[0])
    good = np.isfinite(time_s) & np.isfinite(watts)
    time_s, watts = time_s[good], watts[good]
    if len(time_s) < 2 or (np.diff(time_s) <= 0).any():
        raise RecordingError(f"{path}: column {found[0]!r} holds no times that rise from line to line")
    return Meter(time_s, np.abs(watts))


def join_meter(meter: Meter, manifest: dict[str, Any], path: Path) -> Joined:
    """Find the pattern in the samples. Raises RecordingError if it is not there, or not once."""
    told = section(section(manifest, "power"), "pattern")
    chips, chip_s = str(told.get("chips") or ""), float(told.get("chip_ns") or 0) * 1e-9
    if not chips or not chip_s:
        raise RecordingError(f"{path} cannot be joined: no pattern was played before this recording (`moescope run --meter`)")
    on = np.array([chip == "1" for chip in chips], np.float64)
    step = float(np.median(np.diff(meter.time_s)))
    if step * LEAST_SAMPLES > chip_s:
        raise RecordingError(
            f"{path}: {1 / step:.3g} samples a second are too few, at least {LEAST_SAMPLES / chip_s:.0f} are needed"
        )
    rough, likeness = find_pattern(meter, on, chip_s, step, path)
    zero_s = refined(meter, on, chip_s, rough, step)
    seen = pattern_shares(meter, on, chip_s, zero_s)[1]
    inside = (meter.time_s[1:] > zero_s) & (meter.time_s[1:] < zero_s + chip_s * len(on))
    slope, base = np.polyfit(seen[inside], meter.watts[1:][inside], 1)
    zero_ns = int(told.get("begin_ns") or 0) - round(zero_s * 1e9)
    return Joined(zero_ns, likeness, float(base), float(base + slope))


def find_pattern(meter: Meter, on: np.ndarray, chip_s: float, step: float, path: Path) -> tuple[float, float]:
    """(the pattern's begin by the meter's clock, to a sample; its correlation)."""
    from scipy.signal import correlate  # half a second, which no other recording needs

    grid = np.arange(meter.time_s[0], meter.time_s[-1], step)
    watts = np.interp(grid, meter.time_s, meter.watts)
    form = on[np.minimum((np.arange(0, chip_s * len(on), step) / chip_s).astype(np.int64), len(on) - 1)]
    form -= form.mean()
    if len(watts) <= len(form):
        raise RecordingError(f"{path} is shorter than the pattern that was played: {grid[-1] - grid[0]:.1f} s")
    ones = np.ones(len(form))
    total, square = (correlate(each, ones, "valid") for each in (watts - watts.mean(), (watts - watts.mean()) ** 2))
    spread = np.sqrt(np.maximum(square - total**2 / len(form), 1e-12 * square.max() + 1e-300))
    likeness = correlate(watts - watts.mean(), form, "valid") / spread / np.sqrt((form**2).sum())
    best = int(np.argmax(likeness))
    others = np.abs(np.arange(len(likeness)) - best) * step > chip_s
    second = float(likeness[others].max(initial=0.0))
    if likeness[best] < LEAST_LIKENESS or likeness[best] < LEAST_LEAD * second:
        raise RecordingError(
            f"{path} does not show the pattern that was played: correlation {likeness[best]:.2f}, elsewhere {second:.2f}; "
            "it may be of another run"
        )
    return float(grid[best]), float(likeness[best])


def pattern_shares(meter: Meter, on: np.ndarray, chip_s: float, zero_s: float) -> tuple[np.ndarray, np.ndarray]:
    """(sample ends, share of the time since the previous sample in which the pattern was on)."""
    edges, total = np.arange(len(on) + 1) * chip_s, np.append(0.0, np.cumsum(on) * chip_s)
    reached = np.interp(meter.time_s - zero_s, edges, total)
    return meter.time_s[1:], np.diff(reached) / np.diff(meter.time_s)


def refined(meter: Meter, on: np.ndarray, chip_s: float, rough: float, step: float) -> float:
    """The pattern's begin between samples: where on and off explain them best."""
    from scipy.optimize import minimize_scalar

    near = (meter.time_s > rough - chip_s) & (meter.time_s < rough + chip_s * (len(on) + 1))
    part = Meter(meter.time_s[near], meter.watts[near])

    def left(zero_s: float) -> float:
        shares = np.column_stack([np.ones(len(part.time_s) - 1), pattern_shares(part, on, chip_s, zero_s)[1]])
        return float(np.linalg.lstsq(shares, part.watts[1:], rcond=None)[1].sum())

    tried = np.arange(rough - 2 * step, rough + 2 * step, max(step / 20, STEP_S))
    best = float(tried[int(np.argmin([left(zero) for zero in tried]))])
    return float(
        minimize_scalar(left, bounds=(best - 4 * STEP_S, best + 4 * STEP_S), method="bounded", options={"xatol": 1e-5}).x
    )


def meter_readings(folder: Path, manifest: dict[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """(CLOCK_MONOTONIC ns of each sample's end, watts) of the file beside a recording; None without one that can be joined."""
    path = folder / METER
    if not path.exists():
        return None
    try:
        meter = read_meter(path, path.read_text(errors="replace"))
        joined = join_meter(meter, manifest, path)
    except RecordingError:
        return None
    return joined.zero_ns + np.round(meter.time_s * 1e9).astype(np.int64), meter.watts
