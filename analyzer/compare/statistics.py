"""The statistics of two groups of runs for each metric: the unit is the run, and every function works on all metrics at once.

Arrays are [runs, metrics] with NaN if a run lacks a metric. A ratio is candidate / base of the medians.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb

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


def wander(base: np.ndarray, cand: np.ndarray) -> float:
    """The factor by which two sides differ more by chance than randomly assigned runs do, from the begins of their runs (s).

    1 if the sides alternated; SUCCESSIVE if one was recorded after the other, or if a run's time is unknown (NaN).
    """
    both = np.concatenate((base, cand))
    side = (np.arange(len(both)) >= len(base))[np.argsort(both, kind="stable")]
    turns = 1 + np.count_nonzero(side[1:] != side[:-1])
    return 1.0 if np.isfinite(both).all() and turns >= ENOUGH_TURNS * min(len(base), len(cand)) else SUCCESSIVE


def patterns(base: np.ndarray, cand: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
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


def _resampled(
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
    for chosen, a, b in patterns(base, cand):
        if not len(a) or not len(b):
            continue
        out[0, chosen] = _log_ratio(np.median(b, axis=0), np.median(a, axis=0), offset[chosen])
        for part, ratios in _resampled(a, b, (len(a), len(b)), offset[chosen], seed):
            with np.errstate(invalid="ignore"):  # a resample of zeros only has an infinite ratio
                out[1:, chosen[part]] = np.quantile(ratios, (tail, 1 - tail), axis=0, method="nearest")
    return Interval(*out)


def noise(base: np.ndarray, cand: np.ndarray, offset: np.ndarray, seed: int = 1) -> np.ndarray:
    """This machine's A/A noise per metric: the |log ratio| that 95 % of pairs of unchanged groups of these sizes stay below.

    Both groups are drawn from the base runs; NaN with fewer than three of them.
    """
    out = np.full(base.shape[1], np.nan)
    for chosen, a, b in patterns(base, cand):
        if len(a) < 3 or not len(b):
            continue
        for part, ratios in _resampled(a, a, (len(a), len(b)), offset[chosen], seed):
            with np.errstate(invalid="ignore"):
                out[chosen[part]] = np.quantile(np.abs(ratios), CONFIDENCE, axis=0)
    return out


def smallest_p(n_base: int, n_cand: int) -> float:
    """The smallest two-sided p possible with these numbers of runs: complete separation of the groups, in either direction."""
    return min(1.0, 2 / comb(n_base + n_cand, n_base))


def mann_whitney(base: np.ndarray, cand: np.ndarray) -> np.ndarray:
    """Two-sided p of the Mann-Whitney U test per metric, at least `smallest_p` of the runs; NaN without runs."""
    from scipy.stats import mannwhitneyu

    out = np.full(base.shape[1], np.nan)
    for chosen, a, b in patterns(base, cand):
        if not len(a) or not len(b):
            continue
        both = np.sort(np.concatenate((a, b)), axis=0)
        tied = (np.diff(both, axis=0) == 0).any(axis=0)
        for same, method in ((tied, "asymptotic"), (~tied, "exact" if len(both) <= 60 else "asymptotic")):
            if same.any():
                p = mannwhitneyu(b[:, same], a[:, same], axis=0, method=method).pvalue
                out[chosen[same]] = np.nan_to_num(p, nan=1.0)
        out[chosen] = np.maximum(out[chosen], smallest_p(len(a), len(b)))
    return out


def holm(p: np.ndarray) -> np.ndarray:
    """p adjusted for the whole family (S. Holm, 1979); NaN stays NaN and does not count."""
    out = np.full(len(p), np.nan)
    finite = np.flatnonzero(np.isfinite(p))
    order = finite[np.argsort(p[finite], kind="stable")]
    remaining = len(order) - np.arange(len(order))
    out[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * remaining))
    return out


def largest_of_all(base: np.ndarray, cand: np.ndarray, offset: np.ndarray, wander: float = 1.0) -> np.ndarray:
    """p adjusted for the whole family by permuting runs (P. Westfall and S. Young, 1993): how often the largest statistic of
    all metrics is at least as large as this one's. It can detect a change among thousands of metrics with five runs per side.

    The statistic is the difference of mean logarithms over (their spread within groups + the metrics' usual spread); `wander`
    is the factor by which it is larger between unchanged sides than between randomly assigned groups.
    For metrics that every run has; NaN for others.
    """
    out = np.full(base.shape[1], np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        both = np.log(np.concatenate((base, cand)) + offset)
    complete = np.flatnonzero(np.isfinite(both).all(axis=0))
    if not len(complete):
        return out
    both = both[:, complete] - both[:, complete].mean(axis=0)
    usual = np.median(np.abs(both - np.median(both, axis=0))) or 1e-9
    dealt = _deals(len(base), len(both))
    batches = np.array_split(dealt, -(-len(dealt) // DEALS_AT_ONCE))
    greatest = np.sort(np.concatenate([_spread_ratio(part, both, usual).max(axis=1) for part in batches]))
    actual = _spread_ratio(dealt[:1], both, usual)[0] / wander
    share = 1 - np.searchsorted(greatest, actual * (1 - 1e-9), "left") / len(greatest)
    out[complete] = np.maximum(share, smallest_p(len(base), len(cand)))
    return out


def _deals(n: int, total: int) -> np.ndarray:
    """Assignments of runs to the base, [deals, runs] of 0 and 1, the actual one first: all, or a sample of SAMPLED_DEALS."""
    if comb(total, n) <= MOST_DEALS:
        chosen = np.array(list(combinations(range(total), n)))
    else:
        order = np.argsort(np.random.default_rng(0).random((SAMPLED_DEALS, total)), axis=1)
        chosen = np.concatenate((np.arange(n)[None], order[1:, :n]))
    out = np.zeros((len(chosen), total))
    np.put_along_axis(out, chosen, 1.0, axis=1)
    return out


def _spread_ratio(dealt: np.ndarray, both: np.ndarray, usual: float) -> np.ndarray:
    """|difference of means| over spread of the groups in [deals, runs], for values [runs, metrics] with mean 0."""
    n, square = dealt[0].sum(), both**2
    m = len(both) - n
    sums, squares = dealt @ both, dealt @ square
    variance = squares / n - (sums / n) ** 2 + (square.sum(axis=0) - squares) / m - (sums / m) ** 2
    return np.abs(sums) * (1 / n + 1 / m) / (np.sqrt(np.maximum(variance, 0.0) / 2) + usual)


def runs_for_p(alpha: float) -> int:
    """Runs per side at which the smallest possible p falls below alpha."""
    return next(n for n in range(2, MANY) if smallest_p(n, n) <= alpha)


def runs_for_width(n: int, half_width: float, needed: float) -> int:
    """Runs per side at which an interval of `half_width` with n runs shrinks to `needed`, as 1/√n."""
    if needed <= 0 or not np.isfinite(half_width):
        return MANY
    return min(MANY, int(np.ceil(n * (half_width / needed) ** 2)))
