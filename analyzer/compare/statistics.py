"""The statistics of two groups of runs for each metric: the unit is the run, and every function works on all metrics at once.

Arrays are [runs, metrics] with NaN if a run lacks a metric. A ratio is candidate / base of the medians.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb
from statistics import NormalDist

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
CHUNK = 512
DEALS_AT_ONCE = 32
MOST_DEALS = 4000
SAMPLED_DEALS = 1000
"""Number of assignments of runs drawn at random if there are more than MOST_DEALS."""
MANY = 1000
"""Upper limit for numbers of runs."""
SUCCESSIVE = 2**0.5
"""Successive runs are correlated, since machines drift: in a side recorded without interruption they count for half."""
POWER = 0.8
POWERED = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) + NormalDist().inv_cdf(POWER)
"""Effect over its standard error at which a 95 % interval excludes no effect in 80 of 100 repetitions."""
OUTLYING = 3.0
"""So rare a disturbance of a run would hide a change; limits that do not depend on the side keep permutations fair."""
NORMAL_QUARTER = 1.37
"""Standard deviation of a normal distribution, over the median width of intervals that hold a quarter of it."""
ENOUGH_TURNS = 2 / 3
"""Share of the alternations of A B B A, for the runs of the shorter side: some may have failed."""


@dataclass(frozen=True)
class Interval:
    """Estimates of log(candidate / base) per metric, with a bootstrap interval over runs; NaN if a side is empty."""

    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def widened(self, factor: float) -> "Interval":
        """The interval with both ends `factor` times as far from the estimate."""
        middle = np.where(np.isfinite(self.estimate), self.estimate, 0.0)
        low, high = (middle + factor * (end - middle) for end in (self.low, self.high))
        return Interval(self.estimate, low, high)


def drift_factor(base: np.ndarray, cand: np.ndarray) -> float:
    """The factor by which two sides differ more by chance than randomly assigned runs do, from the begins of their runs (s).

    1 if the sides alternated; SUCCESSIVE if one was recorded after the other, or if a run's time is unknown (NaN).
    """
    both = np.concatenate((base, cand))
    side = (np.arange(len(both)) >= len(base))[np.argsort(both, kind="stable")]
    turns = 1 + np.count_nonzero(side[1:] != side[:-1])
    return 1.0 if np.isfinite(both).all() and turns >= ENOUGH_TURNS * min(len(base), len(cand)) else SUCCESSIVE


def equal_run_counts(base: np.ndarray, cand: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Groups of metrics with the same numbers of runs: (columns, base values, candidate values), without NaN, each sorted."""
    n_base, n_cand = np.isfinite(base).sum(axis=0), np.isfinite(cand).sum(axis=0)
    base, cand = (np.sort(np.where(np.isfinite(x), x, np.nan), axis=0) for x in (base, cand))
    for a, b in np.unique(np.stack((n_base, n_cand)), axis=1).T.tolist():
        chosen = np.flatnonzero((n_base == a) & (n_cand == b))
        yield chosen, base[:a, chosen], cand[:b, chosen]


def _medians(ordered: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """Medians of resamples: `ordered` [n, metrics] ascending, `picks` [resamples, k] ranks drawn; [resamples, metrics].

    A resample's median is an order statistic of the sample, so that drawing ranks once is drawing runs for all metrics.
    """
    ranks, k = np.sort(picks, axis=1), picks.shape[1]
    return (ordered[ranks[:, (k - 1) // 2]] + ordered[ranks[:, k // 2]]) / 2


def _log_ratio(cand: np.ndarray, base: np.ndarray, offset: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log((cand + offset) / (base + offset))
    return np.where((cand + offset == 0) & (base + offset == 0), 0.0, ratio)


def _resampled_ratios(
    base: np.ndarray, cand: np.ndarray, sizes: tuple[int, int], offset: np.ndarray, seed: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """(metrics, their log ratios of medians) in batches, with groups of these sizes drawn from the runs of each side."""
    rng = np.random.default_rng(seed)
    picks = [rng.integers(0, len(runs), (RESAMPLES, size)) for runs, size in zip((base, cand), sizes, strict=True)]
    for start in range(0, base.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        yield part, _log_ratio(_medians(cand[:, part], picks[1]), _medians(base[:, part], picks[0]), offset[part])


def bootstrap(base: np.ndarray, cand: np.ndarray, offset: np.ndarray, seed: int = 0) -> Interval:
    """Median ratio and its percentile interval (B. Efron, 1979), resampling runs within each side."""
    out = np.full((3, base.shape[1]), np.nan)
    tail = (1 - CONFIDENCE) / 2
    for chosen, a, b in equal_run_counts(base, cand):
        if not len(a) or not len(b):
            continue
        out[0, chosen] = _log_ratio(np.median(b, axis=0), np.median(a, axis=0), offset[chosen])
        for part, ratios in _resampled_ratios(a, b, (len(a), len(b)), offset[chosen], seed):
            with np.errstate(invalid="ignore"):  # a resample of zeros only has an infinite ratio
                out[1:, chosen[part]] = np.quantile(ratios, (tail, 1 - tail), axis=0, method="nearest")
    return Interval(*out)


def noise_band(base: np.ndarray, cand: np.ndarray, offset: np.ndarray, seed: int = 1) -> np.ndarray:
    """This machine's A/A noise per metric: the |log ratio| that 95 % of pairs of unchanged groups of these sizes stay below.

    Both groups are drawn from the base runs; NaN with fewer than three of them.
    """
    out = np.full(base.shape[1], np.nan)
    for chosen, a, b in equal_run_counts(base, cand):
        if len(a) < 3 or not len(b):
            continue
        for part, ratios in _resampled_ratios(a, a, (len(a), len(b)), offset[chosen], seed):
            with np.errstate(invalid="ignore"):
                out[chosen[part]] = np.quantile(np.abs(ratios), CONFIDENCE, axis=0)
    return out


def smallest_p(n_base: int, n_cand: int) -> float:
    """The smallest two-sided p possible with these numbers of runs: complete separation of the groups, in either direction."""
    return min(1.0, 2 / comb(n_base + n_cand, n_base))


def on_log_scale(base: np.ndarray, cand: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Logarithms of all runs' values + offset [runs, metrics], NaN for absent; of a metric with values of 0 or less, which has
    none, the values over their mean size. Outliers are limited (`within_reach`)."""
    both = np.concatenate((base, cand)) + offset
    both = np.where(np.isfinite(both), both, np.nan)
    some = np.isfinite(both)
    size = np.where(some, np.abs(both), 0.0).sum(axis=0) / np.maximum(some.sum(axis=0), 1)
    positive = (both > 0).all(axis=0, where=some)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(positive, np.log(both), both / np.where(size > 0, size, 1.0))
    return within_reach(logs)


def within_reach(values: np.ndarray) -> np.ndarray:
    """Values [runs, metrics] with those limited that lie beyond the quartiles by more than OUTLYING standard deviations.

    Of two groups, however far apart, the quartiles are the middles. The deviation is that of a normal distribution in which, as
    here, a quarter of the runs usually spans so much; of two groups, it is about twice their own. No limits where it is 0.
    """
    ordered, count, out = np.sort(values, axis=0), np.isfinite(values).sum(axis=0), values.copy()
    for n in np.unique(count[count > 1]).tolist():
        columns, quarter = np.flatnonzero(count == n), max(n // 4, 1)
        rows = ordered[:n, columns]
        reach = OUTLYING * NORMAL_QUARTER * np.median(rows[quarter:] - rows[:-quarter], axis=0)
        reach = np.where(reach > 0, reach, np.inf)
        low, high = rows[(n - 1) // 4] - reach, rows[n - 1 - (n - 1) // 4] + reach
        out[:, columns] = np.clip(values[:, columns], low, high)
    return out


def permuted_p(
    base: np.ndarray, cand: np.ndarray, offset: np.ndarray, drift: float = 1.0, noise: np.ndarray | float = 1.0
) -> np.ndarray:
    """p of each metric, adjusted for all of them, by assigning runs to sides in every way: how often the largest statistic of
    this metric and all with a smaller one is at least as large as this one's (P. Westfall and S. Young, 1993, step-down).

    A difference larger than any other of all assignments has the smallest p that the numbers of runs allow, 2 of 70 with 4 + 4,
    however many metrics there are. The statistic is the difference of mean logarithms over (their spread within groups + the
    metrics' usual spread), and infinite for groups that differ without any spread. `drift` is the factor by which it is larger
    between unchanged sides than between randomly assigned groups. `noise`: how much a metric's logarithms vary in relation to
    other metrics', where that is known whatever the side. NaN without runs on a side.
    """
    out = np.full(base.shape[1], np.nan)
    n_base, n_cand = (np.isfinite(side).sum(axis=0) for side in (base, cand))
    columns = np.flatnonzero((n_base > 0) & (n_cand > 0))
    if not len(columns):
        return out
    both = on_log_scale(base[:, columns], cand[:, columns], offset[columns])
    both = (both - np.nanmean(both, axis=0)) / np.broadcast_to(noise, out.shape)[columns]
    usual = float(np.nanmedian(np.abs(both - np.nanmedian(both, axis=0)))) or 1e-9
    dealt = _side_assignments(len(base), len(both))
    actual = _t_statistic(dealt[:1], both, usual)[0]
    order = np.argsort(-actual, kind="stable")
    reached = np.zeros(len(columns))
    for part in np.array_split(dealt, -(-len(dealt) // DEALS_AT_ONCE)):
        below = np.maximum.accumulate(_t_statistic(part, both, usual)[:, order[::-1]], axis=1)[:, ::-1]
        reached += (below >= actual[order] / drift * (1 - 1e-9)).sum(axis=0)
    share = np.maximum.accumulate(reached / len(dealt))
    least = [smallest_p(int(n), int(m)) for n, m in zip(n_base[columns], n_cand[columns], strict=True)]
    out[columns[order]] = share
    out[columns] = np.maximum(out[columns], least)
    return out


def _side_assignments(n: int, total: int) -> np.ndarray:
    """Assignments of runs to the base, [deals, runs] of 0 and 1, the actual one first: all, or a sample of SAMPLED_DEALS."""
    if comb(total, n) <= MOST_DEALS:
        chosen = np.array(list(combinations(range(total), n)))
    else:
        order = np.argsort(np.random.default_rng(0).random((SAMPLED_DEALS, total)), axis=1)
        chosen = np.concatenate((np.arange(n)[None], order[1:, :n]))
    out = np.zeros((len(chosen), total))
    np.put_along_axis(out, chosen, 1.0, axis=1)
    return out


def _t_statistic(dealt: np.ndarray, both: np.ndarray, usual: float) -> np.ndarray:
    """|difference of means| over spread of the groups in [deals, runs], for values [runs, metrics], NaN for absent."""
    there = np.isfinite(both).astype(float)
    values = np.nan_to_num(both)
    means, variances, counts = [], [], []
    for group in (dealt, 1 - dealt):
        count = group @ there
        mean = group @ values / np.maximum(count, 1)
        counts.append(count)
        means.append(mean)
        variances.append(np.maximum(group @ values**2 / np.maximum(count, 1) - mean**2, 0.0))
    within, fewest = (variances[0] + variances[1]) / 2, np.minimum(*counts)
    apart = np.where(fewest > 0, np.abs(means[0] - means[1]), 0.0)
    steady = (fewest > 1) & (within < 1e-12 * apart**2)
    return np.where(steady, np.inf, apart / (np.sqrt(within) + usual))


def spread_within(base: np.ndarray, cand: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Standard deviation of the runs' logarithms within sides, pooled; NaN unless a side has two runs."""
    both, n = on_log_scale(base, cand, offset), len(base)
    squares, degrees = np.zeros(both.shape[1]), np.zeros(both.shape[1])
    for side in (both[:n], both[n:]):
        count = np.isfinite(side).sum(axis=0)
        mean = np.nansum(side, axis=0) / np.maximum(count, 1)
        squares += np.nansum((side - mean) ** 2, axis=0)
        degrees += np.maximum(count - 1, 0)
    return np.sqrt(np.where(degrees > 0, squares, np.nan) / np.maximum(degrees, 1))


def largest_spread(spread: float, degrees: int) -> float:
    """The upper POWER confidence limit of a standard deviation estimated with `degrees` of freedom (R. Browne, 1995).

    With it, a number of runs suffices in POWER of all cases. By Wilson and Hilferty's approximation of chi-square.
    """
    term = 2 / (9 * degrees)
    return spread / (1 - term - NormalDist().inv_cdf(POWER) * term**0.5) ** 1.5


def runs_for_p(alpha: float) -> int:
    """Runs per side at which the smallest possible p falls below alpha."""
    return next(n for n in range(2, MANY) if smallest_p(n, n) <= alpha)


def runs_for_effect(spread: float, effect: float) -> int:
    """Runs per side with which the 95 % interval of a ratio of medians excludes `effect` in 80 of 100 repetitions.

    By the normal approximation; a median's variance is pi/2 times a mean's.
    """
    if effect <= 0 or not np.isfinite(spread):
        return MANY
    return int(min(MANY, np.ceil(2 * np.pi / 2 * (POWERED * spread / effect) ** 2)))
