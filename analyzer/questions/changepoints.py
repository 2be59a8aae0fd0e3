"""Decomposition of a series of steps: slow first step, changes of level, drifts, periodic spikes, bursts of slow steps.

The model: a line in each of several segments, possibly autocorrelated noise (AR(1)), and upward outliers. Outliers are found in
the difference from a running median, and set aside first: bursts, periodic spikes (questions/periods.py), single ones. The
segments are then the partition of least cost, found exactly by dynamic programming over all partitions. Sums of few steps of
skewed noise are not those of normal noise, for which costs are: what a partition says must hold for ranks as well.

A burst is an interval of LEAST_BURST to MOST_BURST steps that takes longer than its surroundings, though no step of it need stand
out: a scan statistic. Each step, less rho times the one before it, is replaced by the normal score of its rank, so that the
noise's distribution does not matter; the matched filter of a raised interval is compared with the normal quantile for
BURST_FALSE_ALARM, divided by the number of intervals. The largest is a burst; then the next outside it. No score exceeds
MOST_SCORE, so that a few spikes that happen to be near each other make no burst. LEAST_BURST steps in a row that all stand out
are a burst in any noise.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from analyzer.questions.periods import Period, spikes_and_steps

SPIKE_SIGMAS = 5.0
CLIP_SIGMAS = 3.0
"""For levels, a difference from the running median counts at most so much: noise may have heavier tails than the normal one."""
SHIFT_SIGMAS = 3.0
CUT, SLOPE = 4.0, 10.0
"""A cut must lower the cost of a partition by CUT times ln(steps), a slope (at most one per segment) by SLOPE.

A series of noise has one segment, whose slope lowers the cost by the square of a standard normal variable: more than SLOPE in
1 of 600. All kinds of parts that may be found in noise share the false alarms of a series, so that each may have few.
benchmarks.series says what that finds, and how often something is found in noise alone.
"""
RANKED = 0.65
"""Share of the gain that a change must have by ranks, too: more loses shifts that are there, less finds some in noise."""
MIN_STEPS = 8
LEAST_SERIES = 3 * MIN_STEPS
MEDIAN_WIDTH = 31
LEAST_BURST, MOST_BURST = 4, MEDIAN_WIDTH // 2
BURST_FALSE_ALARM = 0.03
"""As if intervals did not overlap. They do: of series of noise, at most 1 in 200 has a burst."""
MOST_SCORE = 2.75
MOST_POINTS = 400
GAUSS = 1.4826
SHORT = 8
"""Added to the correlation, over the number of steps: too small a one sees drifts in noise, and few steps tell it badly."""
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
class Burst:
    """`steps` steps in a row, from `at` on, are slower by typically `height`."""

    at: int
    steps: int
    height: float


@dataclass(frozen=True)
class SeriesParts:
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


def level_outside(values: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """The running median of the steps that are not inside, and a line between them for those that are.

    A burst of half the median's width raises the median: what is left of it would be two changes of level.
    """
    outside = np.flatnonzero(~inside)
    return np.interp(np.arange(len(values)), outside, running_median(values[outside]))


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """The median of the slopes between all pairs of points (at most MOST_POINTS, evenly spread), a robust slope."""
    if len(x) > MOST_POINTS:
        keep = np.linspace(0, len(x) - 1, MOST_POINTS).astype(int)
        x, y = x[keep], y[keep]
    i, j = np.triu_indices(len(x), 1)
    real = x[i] != x[j]
    return float(np.median((y[j] - y[i])[real] / (x[j] - x[i])[real])) if real.any() else 0.0


def spread_of(over: np.ndarray) -> float:
    """The robust standard deviation."""
    return float(max(GAUSS * np.median(np.abs(over - np.median(over))), 1e-12)) if len(over) else 1e-12


def take_apart(values: np.ndarray) -> SeriesParts:
    """All parts of a series according to the model."""
    y = np.asarray(values, np.float64)
    following = float(np.median(y[1 : MEDIAN_WIDTH + 1])) if len(y) > MIN_STEPS else np.inf
    skipped = int(y[0] > SLOW_FIRST * following > 0) if len(y) else 0
    base = y[skipped:].copy()
    over, rho = base - base, 0.0
    if len(base) >= MIN_STEPS:
        over, rho = base - running_median(base), noise_correlation(base)
    bursts, slow = find_bursts(over, rho)
    if bursts:
        over = base - level_outside(base, slow)
        bursts = [replace(burst, height=float(np.median(over[burst.at : burst.at + burst.steps]))) for burst in bursts]
    period, regular = spikes_and_steps(np.where(slow, 0.0, over), rho)
    reach = spread_of(over)
    singles = (over > SPIKE_SIGMAS * reach) & ~slow
    singles[regular] = True
    slow |= singles
    spread = float(np.var(base)) * len(base) if len(base) else 0.0
    explained = float((over[singles] ** 2).sum()) / max(spread, 1e-24)
    whole = base.copy()
    base -= np.where(slow, over, over - np.clip(over, -CLIP_SIGMAS * reach, CLIP_SIGMAS * reach))
    segments, scale = best_partition(base)
    ends = [ends_of(base, segment) for segment in segments]
    level = level_per_step(segments, ends)
    rest = np.concatenate([np.zeros(skipped), base - level])
    rest[skipped:][slow] = 0
    lasting = scale / max(float(np.var(base - level)), 1e-24) if len(base) else 1.0
    ranked = RankedSeries(np.where(slow, np.nan, whole), level, segments, ends, lasting)
    bursts = [replace(burst, at=burst.at + skipped) for burst in bursts]
    period = period and replace(period, first=period.first + skipped)
    first = float(y[0] / following) if skipped else 0.0
    drifts, shifts = ranked.drifts(skipped), ranked.shifts(scale, skipped)
    return SeriesParts(first, shifts, drifts, period, bursts, rest, min(explained, 1.0))


def find_bursts(over: np.ndarray, rho: float) -> tuple[list[Burst], np.ndarray]:
    """(bursts in a series less its running median, whether each step is in one); rho: correlation of neighbours in the noise."""
    inside = np.zeros(len(over), bool)
    lengths = np.arange(LEAST_BURST, min(MOST_BURST, len(over) // 2) + 1)
    if not len(lengths):
        return [], inside
    threshold = -NormalDist().inv_cdf(BURST_FALSE_ALARM / (len(over) * len(lengths)))
    scores = normal_scores(over - rho * np.append(0.0, over[:-1]))
    bursts = lasting_runs(over)
    while True:
        for burst in bursts:
            inside[burst.at : burst.at + burst.steps] = True
        place, length, score = highest_interval(np.where(inside, 0.0, scores), lengths, rho)
        if score <= threshold:
            return sorted(bursts, key=lambda burst: burst.at), inside
        steps = np.arange(place, place + length)
        bursts.append(Burst(place, length, float(np.median(over[steps[~inside[steps]]]))))


def lasting_runs(over: np.ndarray) -> list[Burst]:
    """Runs of LEAST_BURST steps or more that all stand out, with their neighbours of at least half their height."""
    bursts: list[Burst] = []
    spike = SPIKE_SIGMAS * spread_of(over)
    for run in runs_of(over > spike):
        if len(run) >= LEAST_BURST and not (bursts and run[0] < bursts[-1].at + bursts[-1].steps):
            height = float(np.median(over[run]))
            whole = next(wider for wider in runs_of(over > min(height / 2, spike)) if run[0] in wider)
            bursts.append(Burst(int(whole[0]), len(whole), height))
    return bursts


def runs_of(chosen: np.ndarray) -> list[np.ndarray]:
    """Consecutive chosen steps."""
    places = np.flatnonzero(chosen)
    return [run for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(run)]


def highest_interval(scores: np.ndarray, lengths: np.ndarray, rho: float) -> tuple[int, int, float]:
    """(begin, steps, score) of the interval in which a raised level fits best, in standard deviations.

    Steps less rho times the one before are raised by 1 at its begin, 1 - rho within it, and -rho after its end.
    """
    sums, padded = np.cumsum(np.append(0.0, scores)), np.append(scores, 0.0)
    best = (0, 0, 0.0)
    for length in lengths.tolist():
        fit = (1 - rho) * (sums[length:] - sums[:-length]) + rho * (padded[:-length] - padded[length:])
        fit /= np.sqrt(1 + (length - 1) * (1 - rho) ** 2 + rho**2)
        place = int(np.argmax(fit))
        best = max(best, (place, length, float(fit[place])), key=lambda each: each[2])
    return best


def normal_scores(values: np.ndarray) -> np.ndarray:
    """The normal quantile of each value's rank among those that do not stand out, within MOST_SCORE, less the mean.

    Over their standard deviation where many stand out, so that it is above 1: noise of two levels makes no bursts.
    """
    usual = np.sort(values[values <= SPIKE_SIGMAS * spread_of(values)])
    rank = (np.searchsorted(usual, values, "left") + np.searchsorted(usual, values, "right")) / 2
    share, where = np.unique(np.clip(rank, 0.5, len(usual) - 0.5) / max(len(usual), 1), return_inverse=True)
    scores = np.clip([NormalDist().inv_cdf(float(each)) for each in share], -MOST_SCORE, MOST_SCORE)[where]
    return (scores - scores.mean()) / max(float(scores.std()), 1.0)


def level_shifts(values: np.ndarray) -> list[Shift]:
    """Every significant change of level, in order. Spikes are ignored; a steady drift is not a shift."""
    return take_apart(values).shifts if len(values) >= LEAST_SERIES else []


def periodic_spikes(values: np.ndarray) -> Period | None:
    """The periodic spikes of a series, if there are any."""
    return take_apart(values).period


def mean_variance(values: np.ndarray) -> float:
    """Variance of the mean of the noise, times the number of steps.

    From differences over one step, which level and drift do not affect.
    """
    one, rho = float(np.var(clip_outliers(np.diff(values)))), noise_correlation(values)
    return max(one / 2 / (1 - rho) * (1 + rho) / (1 - rho), 1e-24)


def noise_correlation(values: np.ndarray) -> float:
    """Correlation of neighbours in the noise: differences over two steps vary 1 + rho times as much as those over one.

    A standard error is added: underestimating it would report shifts and bursts in noise.
    """
    one, two = (float(np.var(clip_outliers(d))) for d in (np.diff(values), values[2:] - values[:-2]))
    return float(np.clip(two / one - 1 + 1 / np.sqrt(len(values)), 0.0, LARGEST_RHO)) if one > 0 else 0.0


def clip_outliers(values: np.ndarray) -> np.ndarray:
    """Values clipped at four (robust) sigmas."""
    middle = np.median(values)
    reach = 4 * GAUSS * np.median(np.abs(values - middle))
    return np.clip(values, middle - reach, middle + reach)


def best_partition(y: np.ndarray) -> tuple[list[Segment], float]:
    """(segments of least cost, the noise's `mean_variance`): first by the variance of differences, then of residuals."""
    if len(y) < 2 * MIN_STEPS:
        return [Segment(0, len(y), False)] if len(y) else [], 1.0
    scale = variance_left(y, cheapest_segments(y, mean_variance(y)))
    return cheapest_segments(y, scale), scale


def variance_left(y: np.ndarray, segments: list[Segment]) -> float:
    """`mean_variance` from the residuals of a line fitted to each segment, sloping or not.

    Corrected for the part of the noise and of its correlation that the fitted lines absorb. From what each residual adds to the
    one before it: lines take much of the variance of noise of long memory, but hardly any of that of its innovations.
    """
    lines = [segment._replace(sloping=True) for segment in segments]
    rest = clip_outliers(y - level_per_step(lines, [ends_of(y, line) for line in lines]))
    n, squares = len(y), max(float(rest @ rest), 1e-24)
    rho = float(rest[1:] @ rest[:-1]) / squares
    new = rest[1:] - max(rho, 0.0) * rest[:-1]
    rho = float(np.clip(rho + (len(lines) * (1 + 3 * rho) + SHORT) / n, 0.0, LARGEST_RHO))
    return max(float(new @ new) / max(n - 1 - 2 * len(lines), 1) / (1 - rho) ** 2, 1e-24)


def cheapest_segments(y: np.ndarray, scale: float) -> list[Segment]:
    """The segments of least cost. A segment costs its squared residual, in units of `scale`, the noise's variance."""
    n, sums = len(y), prefix_sums(y)
    penalty, slope = least_gain(CUT * np.log(n), n), least_gain(SLOPE, n)
    least, begin, sloping = np.full(n + 1, np.inf), np.zeros(n + 1, np.int64), np.zeros(n + 1, bool)
    least[0] = 0.0
    for end in range(MIN_STEPS, n + 1):
        begins = np.arange(end - MIN_STEPS + 1)
        flat, by_slope = segment_costs(sums, begins, end)
        gain = np.maximum(by_slope / scale - slope, 0.0)
        cost = least[begins] + flat / scale - gain + penalty
        best = int(np.argmin(cost))
        least[end], begin[end], sloping[end] = cost[best], best, gain[best] > 0
    segments, end = [], n
    while end > 0:
        segments.append(Segment(int(begin[end]), end, bool(sloping[end])))
        end = int(begin[end])
    return segments[::-1]


def least_gain(known: float, n: int) -> float:
    """What must be gained in units of the variance, if that is estimated from n steps, in place of `known` for a known one.

    The likelihood ratio of normal noise of unknown variance; half the steps count, as few outliers count in the estimate.
    """
    return n / 2 * float(np.expm1(2 * known / n))


def prefix_sums(y: np.ndarray) -> np.ndarray:
    """Sums of y (less its mean), its square and its product with the step number, over the steps before each."""
    centred = y - y.mean()
    return np.cumsum(np.pad([centred, centred**2, np.arange(len(y)) * centred], ((0, 0), (1, 0))), axis=1)


def segment_costs(sums: np.ndarray, begins: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
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


def level_per_step(segments: list[Segment], ends: list[tuple[float, float]]) -> np.ndarray:
    """The level of every step."""
    parts = [np.linspace(*each, s.end - s.begin) for s, each in zip(segments, ends, strict=True)]
    return np.concatenate([np.empty(0), *parts])


@dataclass(frozen=True)
class RankedSeries:
    """A series and its partition, whose changes must hold for normal scores of ranks, too.

    values: NaN for steps that were set aside; level: of every step; lasting: variance of the noise's mean, times the number of
    steps, over the noise's variance.
    """

    values: np.ndarray
    level: np.ndarray
    segments: list[Segment]
    ends: list[tuple[float, float]]
    lasting: float

    def shifts(self, scale: float, skipped: int) -> list[Shift]:
        """The shifts between adjacent segments of different levels; a line's end has twice the standard error of a mean."""
        shifts = []
        for (a, (_, before)), (b, (after, _)) in pairwise(zip(self.segments, self.ends, strict=True)):
            error = np.sqrt(sum((4 if s.sloping else 1) / (s.end - s.begin) for s in (a, b)))
            sides = [(self.values - self.level)[s.begin : s.end] + level for s, level in ((a, before), (b, after))]
            weights = np.concatenate([np.full(len(side), sign / len(side)) for sign, side in zip((-1, 1), sides, strict=True)])
            certain = self._score(np.concatenate(sides), weights) ** 2 * (weights @ weights) / error**2
            if abs(after - before) > SHIFT_SIGMAS * np.sqrt(scale) * error and certain > RANKED * CUT * np.log(len(self.values)):
                shifts.append(Shift(b.begin + skipped, before, after))
        return shifts

    def drifts(self, skipped: int) -> list[Drift]:
        """The segments whose level is a line."""
        drifts = []
        for s, ends in zip(self.segments, self.ends, strict=True):
            steps = np.arange(s.end - s.begin) - (s.end - s.begin - 1) / 2
            if s.sloping and self._score(self.values[s.begin : s.end], steps) ** 2 > RANKED * SLOPE:
                drifts.append(Drift(s.begin + skipped, s.end - 1 + skipped, *ends))
        return drifts

    def _score(self, values: np.ndarray, weights: np.ndarray) -> float:
        """The weighted sum of normal scores, in standard deviations."""
        there = ~np.isnan(values)
        if not there.any():
            return 0.0
        scores = normal_scores(values[there] - np.median(values[there]))
        return float(weights[there] @ scores / np.sqrt(self.lasting * max(weights[there] @ weights[there], 1e-24)))
