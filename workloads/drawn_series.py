"""Synthetic series of execution times with known features, like those of a real NPU: 600 executions of 20 ms.

The first is 100 times slower; a step of -7 % in the middle; after it a drift of +1.5 % to the end; spikes of 30 to 50 %
every 25.6 executions; a burst of eight that take 25 to 35 % longer. The noise is 1 % with autocorrelation `rho`.

Faint ones hold one feature of a few standard deviations of the noise, which no single execution shows: 23 spikes every 25.6
executions, 19 of such spikes with heights from 3.6 to 6.7, or a burst of ten. A detection is right if it is the only one of a
series, with the period within 0.3, or the burst's ends within 2; wrong if anything else is found, too or instead. What is found
in series without any structure, of several noises, is wrong as well.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analyzer.questions.changepoints import SLOPE, SeriesParts

EXECUTIONS, MS, NOISE = 600, 20.0, 0.01
STEP, DRIFT, EVERY, BURST = -0.07, 0.015, 25.6, 8
NAMES = ("first", "step", "drift", "period", "burst")
APART = 20
"""Number of executions between the step and the burst."""


@dataclass(frozen=True)
class Drawn:
    """A series, and the begins of its step and its burst."""

    ms: np.ndarray
    step: int
    burst: int


def noise(rng: np.random.Generator, n: int = EXECUTIONS, rho: float = 0.0, deviation: float = NOISE) -> np.ndarray:
    """Noise around MS; deviation: relative standard deviation of its innovations."""
    steps = rng.normal(0, deviation, n)
    for i in range(1, n):
        steps[i] += rho * steps[i - 1]
    return MS * (1 + steps)


def draw_series(seed: int, rho: float = 0.0) -> Drawn:
    """One series with all features listed for the module."""
    rng = np.random.default_rng(seed)
    ms, at = noise(rng, rho=rho), int(rng.integers(150, 401))
    bursts = [i for i in range(40, EXECUTIONS - 40) if abs(i - at) >= APART]
    burst = int(rng.choice(bursts))
    ms[at:] += MS * (STEP + DRIFT * np.linspace(0, 1, EXECUTIONS - at))
    spikes = np.floor(rng.uniform(0, EVERY) + EVERY * np.arange(EXECUTIONS / EVERY + 1)).astype(np.int64)
    spikes = spikes[spikes < EXECUTIONS]
    ms[spikes] += MS * rng.uniform(0.3, 0.5, len(spikes))
    ms[burst : burst + BURST] += MS * rng.uniform(0.25, 0.35, BURST)
    ms[0] = 100 * MS
    return Drawn(ms, at, burst)


def missed_in(parts: SeriesParts, drawn: Drawn) -> set[str]:
    """The features in NAMES that were not detected correctly, at the right place and without additional ones."""
    right = {
        "first": 80 < parts.first < 120,
        "step": [abs(shift.at - drawn.step) <= 2 for shift in parts.shifts] == [True],
        "drift": [abs(d.at - drawn.step) <= 5 and DRIFT / 2 < d.after / d.before - 1 < 2 * DRIFT for d in parts.drifts] == [True],
        "period": parts.period is not None and abs(parts.period.steps - EVERY) < 0.3,
        "burst": [abs(b.at - drawn.burst) <= 1 and abs(b.steps - BURST) <= 1 for b in parts.bursts] == [True],
    }
    return {name for name in NAMES if not right[name]}


def has_clear_drift(seed: int, rho: float) -> bool:
    """Whether the drift of a series from `draw` is detectable by the same rule given the noise and the step."""
    rng = np.random.default_rng(seed)
    n = EXECUTIONS - int(rng.integers(150, 401))
    level = noise(rng, n, rho) + MS * DRIFT * np.linspace(0, 1, n)
    x = np.arange(n) - (n - 1) / 2
    slope, variance = x @ level / (x @ x), (MS * NOISE / (1 - rho)) ** 2
    drift = slope * (n - 1) / (MS * (1 + STEP))
    return bool(slope**2 * (x @ x) / variance > SLOPE and DRIFT / 2 < drift < 2 * DRIFT)


def surplus_in(parts: SeriesParts) -> int:
    """The number of steps, drifts and bursts detected beyond the one of each in `draw`."""
    return sum(max(len(found) - 1, 0) for found in (parts.shifts, parts.drifts, parts.bursts))


def found_in_noise(parts: SeriesParts) -> set[str]:
    """The features detected in plain noise."""
    found = (parts.first, parts.shifts, parts.drifts, parts.period, parts.bursts)
    return {name for name, each in zip(NAMES, found, strict=True) if each}


FAINT_SPIKES, FAINT_BURST, SEEN_SPIKES, SEEN_HEIGHTS = 23, 10, 19, (3.6, 6.7)
MISSED, RIGHT, WRONG = "missed", "right", "wrong"


def unit_noise(rng: np.random.Generator, rho: float, n: int = EXECUTIONS) -> np.ndarray:
    """Noise with autocorrelation rho and standard deviation 1."""
    return (noise(rng, n + 50, rho, 1.0)[50:] / MS - 1) * np.sqrt(1 - rho**2)


def in_ms(sigmas: np.ndarray) -> np.ndarray:
    """Times of which NOISE is one standard deviation."""
    return MS * (1 + NOISE * sigmas)


def faint_spikes(seed: int, sigmas: float, rho: float = 0.0) -> np.ndarray:
    """FAINT_SPIKES of `sigmas` standard deviations; 0: SEEN_SPIKES of them, of SEEN_HEIGHTS."""
    rng = np.random.default_rng((seed, 1))
    y = unit_noise(rng, rho)
    places = np.floor(rng.uniform(0, EVERY) + EVERY * np.arange(FAINT_SPIKES)).astype(np.int64)
    if not sigmas:
        places = np.sort(rng.choice(places, SEEN_SPIKES, replace=False))
    y[places] += sigmas or rng.uniform(*SEEN_HEIGHTS, len(places))
    return in_ms(y)


def faint_burst(seed: int, sigmas: float, rho: float = 0.0, skewed: bool = False) -> tuple[np.ndarray, int]:
    """(a series with FAINT_BURST executions in a row longer by `sigmas` standard deviations, the first of them).

    skewed: in lognormal noise without correlation, whose logarithm has standard deviation 1.
    """
    rng = np.random.default_rng((seed, 2))
    y, at = unit_noise(rng, rho), int(rng.integers(40, EXECUTIONS - 40 - FAINT_BURST))
    if skewed:
        y = rng.lognormal(size=EXECUTIONS) / np.sqrt((np.e - 1) * np.e)
    y[at : at + FAINT_BURST] += sigmas
    return in_ms(y), at


def lone_spikes(rng: np.random.Generator, n: int) -> np.ndarray:
    """White noise in which one execution in 30 is longer by 4 to 10 standard deviations, without any order."""
    y = rng.normal(size=n)
    return y + (rng.random(n) < 1 / 30) * rng.uniform(4, 10, n)


STRUCTURELESS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "white noise": lambda rng, n: rng.normal(size=n),
    "noise of correlation 0.3": lambda rng, n: unit_noise(rng, 0.3, n),
    "noise of correlation 0.5": lambda rng, n: unit_noise(rng, 0.5, n),
    "noise of correlation 0.7": lambda rng, n: unit_noise(rng, 0.7, n),
    "noise of correlation 0.9": lambda rng, n: unit_noise(rng, 0.9, n),
    "noise of Student's t, 3 degrees": lambda rng, n: rng.standard_t(3, n),
    "exponential noise": lambda rng, n: rng.exponential(size=n),
    "lognormal noise": lambda rng, n: rng.lognormal(size=n),
    "spikes without order": lone_spikes,
}


def structureless(name: str, seed: int, n: int = EXECUTIONS) -> np.ndarray:
    """A series of one of the noises of STRUCTURELESS."""
    return in_ms(STRUCTURELESS[name](np.random.default_rng((seed, n, 3)), n))


def names_found(parts: SeriesParts, swing: object = None) -> set[str]:
    """The features detected; `swing`: a periodic component of the residuals, if one was looked for."""
    return found_in_noise(parts) | ({"period"} if swing else set())


def judged_spikes(parts: SeriesParts, swing: dict[str, float] | None, tolerance: float = 0.3) -> str:
    """RIGHT, WRONG or MISSED for a series of `faint_spikes`, or a part of one."""
    found = names_found(parts, swing)
    right = found == {"period"} and swing is not None and abs(swing["period"] - EVERY) < tolerance
    return RIGHT if right else WRONG if found else MISSED


def judged_burst(parts: SeriesParts, swing: dict[str, float] | None, at: int) -> str:
    """The same for a series of `faint_burst`."""
    found = names_found(parts, swing)
    right = found == {"burst"} and [
        abs(b.at - at) <= 2 and abs(b.at + b.steps - at - FAINT_BURST) <= 2 for b in parts.bursts
    ] == [True]
    return RIGHT if right else WRONG if found else MISSED


def onnxruntime_profile(ms: np.ndarray) -> str:
    """An ONNX Runtime profile of runs that took so long."""
    events, now = [], 10_000
    for each in np.round(1000 * ms).astype(int).tolist():
        span = {"pid": 1, "tid": 1, "ph": "X", "dur": each, "ts": now}
        args = {"op_name": "part", "provider": "QNNExecutionProvider"}
        events += [{"cat": "Node", **span, "name": "part_0_kernel_time", "args": args}]
        events += [{"cat": "Session", **span, "name": "model_run", "args": {}}]
        now += each + 100
    return json.dumps(events)


def qnn_profile(ms: np.ndarray) -> str:
    """A QNN profile, as ONNX Runtime's provider writes it, of executions that took so long."""
    head = "Msg Timestamp,Message,Time,Unit of Measurement,Timing Source,Event Level,Event Identifier\n"
    rows = [
        f"0,BACKEND,{us - 10},US,BACKEND,ROOT,Accelerator (execute) time\n0,EXECUTE,{us},US,BACKEND,ROOT,QNN (execute) time\n"
        for us in np.round(1000 * ms).astype(int).tolist()
    ]
    return head + "".join(rows)
