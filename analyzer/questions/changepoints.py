"""Decomposition of a series of steps: slow first step, changes of level, drifts, periodic spikes, bursts of slow steps.

The model: a line in each of several segments, possibly autocorrelated noise (AR(1)), and upward outliers. Outliers are set
aside first; the segments are then the partition of least cost, found exactly by dynamic programming over all partitions.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

SPIKE_SIGMAS = 5.0
SHIFT_SIGMAS = 3.0
CUT, SLOPE = 4.0, 7.0
"""A cut must lower the cost of a partition by CUT times ln(steps), a slope (at most one per segment) by SLOPE.

benchmarks.series says what that finds, and how often something is found in noise alone.
"""
MIN_STEPS = 8
LEAST_SERIES = 3 * MIN_STEPS
MEDIAN_WIDTH = 31
LEAST_BURST = 4
MOST_POINTS = 400
GAUSS = 1.4826
MIN_SPIKES = 4
SHORT = 4
"""Added to the correlation, over the number of steps: too small a one sees drifts in noise, and few steps tell it badly."""
REGULAR = 0.1
LARGEST_RHO = 0.9
"""Largest correlation of neighbours that is distinguishable from a random walk."""
SLOW_FIRST = 1.5
"""A first step slower than the following ones by this factor is set aside."""


@dataclass(frozen=True)
class Shift:
    """The level changes at step `at` (the first of the new level), in units of the series."""

    at: int
    before: float
    after: float

    @property
    def change(self) -> float:
        """The difference of the levels."""
        return self.after - self.before


@dataclass(frozen=True)
class Drift:
    """From step `at` to step `until` the level changes steadily."""

    at: int
    until: int
    before: float
    after: float


@dataclass(frozen=True)
class Period:
    """A spike of typical height `height` every `steps` steps, seen `count` times, first at `first`."""

    steps: float
    height: float
    count: int
    first: int


@dataclass(frozen=True)
class Burst:
    """`steps` steps in a row, from `at` on, are slower by typically `height`."""

    at: int
    steps: int
    height: float


@dataclass(frozen=True)
class Parts:
    """The parts of a series. first: the first step as a multiple of the following steps if it was set aside, else 0.

    rest: the residual of each step, 0 if it was set aside; singles: the share of the variance due to single spikes.
    """

    first: float
    shifts: list[Shift]
    drifts: list[Drift]
    period: Period | None
    bursts: list[Burst]
    rest: np.ndarray
    singles: float


class Segment(NamedTuple):
    """Steps begin to end of a partition; `sloping`: their level is a line with a slope."""

    begin: int
    end: int
    sloping: bool


def running_median(values: np.ndarray) -> np.ndarray:
    """The median around each step; beyond its ends the series is mirrored along its local slope."""
    half = min(MEDIAN_WIDTH, len(values) - 1) // 2
    if half <= 0:
        return values.copy()
    steps, back = np.arange(2 * half + 1), 2 * np.arange(half, 0, -1)
    head = values[half:0:-1] - back * theil_sen(steps, values[: 2 * half + 1])
    tail = values[-2 : -half - 2 : -1] + back[::-1] * theil_sen(steps, values[-2 * half - 1 :])
    return np.median(np.lib.stride_tricks.sliding_window_view(np.concatenate((head, values, tail)), 2 * half + 1), axis=1)


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """The median of the slopes between all pairs of points (at most MOST_POINTS, evenly spread), a robust slope."""
    if len(x) > MOST_POINTS:
        keep = np.linspace(0, len(x) - 1, MOST_POINTS).astype(int)
        x, y = x[keep], y[keep]
    i, j = np.triu_indices(len(x), 1)
    real = x[i] != x[j]
    return float(np.median((y[j] - y[i])[real] / (x[j] - x[i])[real])) if real.any() else 0.0


def standing_out(values: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """(runs of consecutive steps far above the running median; each step's difference from that median)."""
    if len(values) < MIN_STEPS:
        return [], np.zeros(len(values))
    over = values - running_median(values)
    spread = GAUSS * np.median(np.abs(over - np.median(over)))
    places = np.flatnonzero(over > SPIKE_SIGMAS * max(spread, 1e-12))
    return [run for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(run)], over


def take_apart(values: np.ndarray) -> Parts:
    """All parts of a series according to the model."""
    y = np.asarray(values, np.float64)
    following = float(np.median(y[1 : MEDIAN_WIDTH + 1])) if len(y) > MIN_STEPS else np.inf
    skipped = int(y[0] > SLOW_FIRST * following > 0) if len(y) else 0
    base = y[skipped:].copy()
    runs, over = standing_out(base)
    bursts = [Burst(int(run[0]) + skipped, len(run), float(np.median(over[run]))) for run in runs if len(run) >= LEAST_BURST]
    singles = np.array([run[0] for run in runs if len(run) < LEAST_BURST], np.int64)
    period = regular(singles, over, skipped)
    slow = np.concatenate([np.empty(0, np.int64), *runs])
    base[slow] -= over[slow]
    spread = float(np.var(y[skipped:])) * len(base) if len(base) else 0.0
    explained = float((over[singles] ** 2).sum()) / max(spread, 1e-24)
    segments, scale = partition(base)
    ends = [ends_of(base, segment) for segment in segments]
    rest = np.concatenate([np.zeros(skipped), base - levels(segments, ends)])
    rest[slow + skipped] = 0
    drifts = [Drift(s.begin + skipped, s.end - 1 + skipped, *e) for s, e in zip(segments, ends, strict=True) if s.sloping]
    first = float(y[0] / following) if skipped else 0.0
    return Parts(first, jumps(segments, ends, scale, skipped), drifts, period, bursts, rest, min(explained, 1.0))


def shifts(values: np.ndarray) -> list[Shift]:
    """Every significant change of level, in order. Spikes are ignored; a steady drift is not a shift."""
    return take_apart(values).shifts if len(values) >= LEAST_SERIES else []


def period(values: np.ndarray) -> Period | None:
    """The periodic spikes of a series, if there are any."""
    return take_apart(values).period


def regular(places: np.ndarray, over: np.ndarray, skipped: int) -> Period | None:
    """Spikes at regular distances, allowing for a few missing ones."""
    if len(places) < MIN_SPIKES:
        return None
    gap = np.diff(places)
    turns = np.maximum(np.round(gap / np.median(gap)), 1)
    steps = float((places[-1] - places[0]) / turns.sum())
    off = np.abs(gap - turns * steps)
    if np.median(off) > max(1.0, REGULAR * steps) or turns.sum() > 2 * len(gap):
        return None
    return Period(steps, float(np.median(over[places])), len(places), int(places[0]) + skipped)


def variance(values: np.ndarray) -> float:
    """Variance of the mean of the noise, times the number of steps.

    From differences over one and two steps, which level and drift do not affect; those over two vary 1 + rho times as much, rho
    being the correlation of neighbours. A standard error is added to rho: underestimating it would report shifts in noise.
    """
    one, two = (float(np.var(clipped(d))) for d in (np.diff(values), values[2:] - values[:-2]))
    rho = float(np.clip(two / one - 1 + 1 / np.sqrt(len(values)), 0.0, LARGEST_RHO)) if one > 0 else 0.0
    return max(one / 2 / (1 - rho) * (1 + rho) / (1 - rho), 1e-24)


def clipped(values: np.ndarray) -> np.ndarray:
    """Values clipped at four (robust) sigmas."""
    middle = np.median(values)
    reach = 4 * GAUSS * np.median(np.abs(values - middle))
    return np.clip(values, middle - reach, middle + reach)


def partition(y: np.ndarray) -> tuple[list[Segment], float]:
    """(segments of least cost, the noise's `variance`): first with the variance of differences, then with that of residuals."""
    if len(y) < 2 * MIN_STEPS:
        return [Segment(0, len(y), False)] if len(y) else [], 1.0
    scale = variance_left(y, cheapest(y, variance(y)))
    return cheapest(y, scale), scale


def variance_left(y: np.ndarray, segments: list[Segment]) -> float:
    """`variance` from the residuals of a line fitted to each segment, sloping or not.

    Corrected for the part of the noise and of its correlation that the fitted lines absorb.
    """
    lines = [segment._replace(sloping=True) for segment in segments]
    rest = clipped(y - levels(lines, [ends_of(y, line) for line in lines]))
    n, squares = len(y), max(float(rest @ rest), 1e-24)
    rho = float(rest[1:] @ rest[:-1]) / squares
    rho = float(np.clip(rho + (len(lines) * (1 + 3 * rho) + SHORT) / n, 0.0, LARGEST_RHO))
    return max(squares / max(n - 2 * len(lines), 1) * (1 + rho) / (1 - rho), 1e-24)


def cheapest(y: np.ndarray, scale: float) -> list[Segment]:
    """The segments of least cost. A segment costs its squared residual, in units of `scale`, the noise's variance."""
    n, penalty, sums = len(y), CUT * np.log(len(y)), prefix_sums(y)
    least, begin, sloping = np.full(n + 1, np.inf), np.zeros(n + 1, np.int64), np.zeros(n + 1, bool)
    least[0] = 0.0
    for end in range(MIN_STEPS, n + 1):
        begins = np.arange(end - MIN_STEPS + 1)
        flat, by_slope = costs(sums, begins, end)
        gain = np.maximum(by_slope / scale - SLOPE, 0.0)
        cost = least[begins] + flat / scale - gain + penalty
        best = int(np.argmin(cost))
        least[end], begin[end], sloping[end] = cost[best], best, gain[best] > 0
    segments, end = [], n
    while end > 0:
        segments.append(Segment(int(begin[end]), end, bool(sloping[end])))
        end = int(begin[end])
    return segments[::-1]


def prefix_sums(y: np.ndarray) -> np.ndarray:
    """Sums of y (less its mean), its square and its product with the step number, over the steps before each."""
    centred = y - y.mean()
    return np.cumsum(np.pad([centred, centred**2, np.arange(len(y)) * centred], ((0, 0), (1, 0))), axis=1)


def costs(sums: np.ndarray, begins: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """For the segments from each begin to end: (squared residual about the mean, its reduction by a slope)."""
    n = end - begins
    total, squares, moment = sums[:, end, None] - sums[:, begins]
    centred = moment - (begins + end - 1) / 2 * total
    return squares - total**2 / n, centred**2 / (n * (n * n - 1.0) / 12)


def ends_of(y: np.ndarray, segment: Segment) -> tuple[float, float]:
    """The level at the first and the last step of a segment."""
    begin, end, sloping = segment
    if not sloping:
        return float(y[begin:end].mean()), float(y[begin:end].mean())
    slope, level = np.polyfit(np.arange(end - begin), y[begin:end], 1)
    return float(level), float(level + slope * (end - begin - 1))


def levels(segments: list[Segment], ends: list[tuple[float, float]]) -> np.ndarray:
    """The level of every step."""
    parts = [np.linspace(*each, s.end - s.begin) for s, each in zip(segments, ends, strict=True)]
    return np.concatenate([np.empty(0), *parts])


def jumps(segments: list[Segment], ends: list[tuple[float, float]], scale: float, skipped: int) -> list[Shift]:
    """The shifts between adjacent segments of different levels; a line's end has twice the standard error of a mean."""
    shifts = []
    for (a, (_, before)), (b, (after, _)) in pairwise(zip(segments, ends, strict=True)):
        error = np.sqrt(sum(scale * (4 if s.sloping else 1) / (s.end - s.begin) for s in (a, b)))
        if abs(after - before) > SHIFT_SIGMAS * error:
            shifts.append(Shift(b.begin + skipped, before, after))
    return shifts
