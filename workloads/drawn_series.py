"""Synthetic series of execution times with known features, like those of a real NPU: 600 executions of 20 ms.

The first is 100 times slower; a step of -7 % in the middle; after it a drift of +1.5 % to the end; spikes of 30 to 50 %
every 25.6 executions; a burst of eight that take 25 to 35 % longer. The noise is 1 % with autocorrelation `rho`.
"""

from dataclasses import dataclass

import numpy as np

from analyzer.questions.changepoints import SLOPE, Parts

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


def draw(seed: int, rho: float = 0.0) -> Drawn:
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


def missed(parts: Parts, drawn: Drawn) -> set[str]:
    """The features in NAMES that were not detected correctly, at the right place and without additional ones."""
    right = {
        "first": 80 < parts.first < 120,
        "step": [abs(shift.at - drawn.step) <= 2 for shift in parts.shifts] == [True],
        "drift": [abs(d.at - drawn.step) <= 5 and DRIFT / 2 < d.after / d.before - 1 < 2 * DRIFT for d in parts.drifts] == [True],
        "period": parts.period is not None and abs(parts.period.steps - EVERY) < 0.3,
        "burst": [abs(b.at - drawn.burst) <= 1 and abs(b.steps - BURST) <= 1 for b in parts.bursts] == [True],
    }
    return {name for name in NAMES if not right[name]}


def knowable(seed: int, rho: float) -> bool:
    """Whether the drift of a series from `draw` is detectable by the same rule given the noise and the step."""
    rng = np.random.default_rng(seed)
    n = EXECUTIONS - int(rng.integers(150, 401))
    level = noise(rng, n, rho) + MS * DRIFT * np.linspace(0, 1, n)
    x = np.arange(n) - (n - 1) / 2
    slope, variance = x @ level / (x @ x), (MS * NOISE / (1 - rho)) ** 2
    drift = slope * (n - 1) / (MS * (1 + STEP))
    return bool(slope**2 * (x @ x) / variance > SLOPE and DRIFT / 2 < drift < 2 * DRIFT)


def surplus(parts: Parts) -> int:
    """The number of steps, drifts and bursts detected beyond the one of each in `draw`."""
    return sum(max(len(found) - 1, 0) for found in (parts.shifts, parts.drifts, parts.bursts))


def invented(parts: Parts) -> set[str]:
    """The features detected in plain noise."""
    found = (parts.first, parts.shifts, parts.drifts, parts.period, parts.bursts)
    return {name for name, each in zip(NAMES, found, strict=True) if each}
