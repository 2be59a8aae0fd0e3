"""From statistics to a verdict per metric: slower, faster, same, or inconclusive, with the number of further runs needed."""

from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
import pandas as pd

from analyzer.compare import pace, statistics

PRACTICAL = 0.02
FEWEST = 5
"""Minimum runs per side for an extrapolation from their spread."""
FEASIBLE = 100
"""Upper limit for additional runs that are practical."""
POWERED = 1.96 / (1.96 + 0.84)
"""Half-width over effect at which a 95 % interval excludes no effect in 80 of 100 repetitions (normal approximation)."""
SLOWER, FASTER, SAME, UNKNOWN, MINOR = "slower", "faster", "same", "inconclusive", "minor"
VANISHED, APPEARED = "vanished", "appeared"


@dataclass(frozen=True)
class Rules:
    """The criteria of a change: family-wise error rate, the smallest relative change that matters, and the factor by which
    unchanged sides differ more than randomly assigned runs (see statistics.wander)."""

    alpha: float = 0.05
    practical: float = PRACTICAL
    seed: int = 0
    wander: float = 1.0


def judge_apart(
    dims: pd.DataFrame, base: np.ndarray, cand: np.ndarray, rules: Rules = Rules()
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """(`judge`'s frame, base, cand), with the runs' paces as additional metrics, and operators judged relative to them.

    Metrics with a detected change are excluded from the pace by which the others are finally judged. If no change was
    detected, there is no second test, so that the error rate stays the same.
    """
    paced_metrics = pace.with_paces(dims, base, cand)
    judged = judge(*paced_metrics, rules)
    changed = (judged["paced"] & judged["verdict"].isin([SLOWER, FASTER])).to_numpy()[: len(dims)]
    if not changed.any():
        return judged, *paced_metrics[1:]
    paced_metrics = pace.with_paces(dims, base, cand, changed)
    return judge(*paced_metrics, rules), *paced_metrics[1:]


def judge(dims: pd.DataFrame, base: np.ndarray, cand: np.ndarray, rules: Rules = Rules()) -> pd.DataFrame:
    """`dims` (a row per metric: family, better, offset, share ...) with the columns
    base, cand (medians), change (cand / base, NaN from 0), at_pace (cand at the base's pace, NaN where not paced),
    ratio, low, high (as judged: at the base's pace if paced, else of the medians; NaN from 0), p (adjusted in its family),
    threshold, verdict, more_runs, more_runs_known (False: at least that many), n_base, n_cand, paced.

    `paced`: ratio, interval and p are relative to the pace of the runs (see pace), if `dims` have one.
    `verdict` is minor if a metric takes less than 0.3 % of a step on both sides together: it is not tested, and costs the
    others no power. This selection does not depend on the runs' sides, so that the tests stay valid.
    """
    offset = dims["offset"].to_numpy(np.float64)
    frame = dims.assign(base=_median(base), cand=_median(cand))
    base, cand, frame["paced"] = pace.apart(dims, base, cand, rules.alpha, rules.practical, rules.wander)
    interval = statistics.bootstrap(base, cand, offset, rules.seed).widened(rules.wander)
    aa = rules.wander * statistics.noise(base, cand, offset, rules.seed + 1)
    n_base, n_cand = (np.isfinite(x).sum(axis=0) for x in (base, cand))
    minor = pace.minor(dims)
    tested = (n_base > 0) & (n_cand > 0) & ~minor
    raw = np.where(tested, statistics.mann_whitney(base, cand), np.nan)
    frame = frame.assign(n_base=n_base, n_cand=n_cand)
    frame = frame.assign(estimate=interval.estimate, log_low=interval.low, log_high=interval.high)
    middle = _median(base)
    for name, logs in (("ratio", interval.estimate), ("low", interval.low), ("high", interval.high)):
        frame[name] = plain_ratio(logs, middle, offset)
    with np.errstate(divide="ignore", invalid="ignore"):
        frame["change"] = (frame["cand"] / frame["base"]).where(frame["base"] != 0)
    frame["at_pace"] = (frame["base"] * frame["ratio"]).where(frame["paced"])
    frame["p"] = adjusted(frame, raw, base, cand, rules)
    frame["threshold"] = np.maximum(rules.practical, np.expm1(np.nan_to_num(aa)))
    frame["verdict"] = verdicts(frame, rules)
    frame.loc[minor, "verdict"] = MINOR
    frame.loc[(n_cand == 0) & (n_base == len(base)) & ~minor, "verdict"] = VANISHED
    frame.loc[(n_base == 0) & (n_cand == len(cand)) & ~minor, "verdict"] = APPEARED
    needed = [more_runs(row, rules) for row in frame.to_dict("records")]
    return frame.assign(more_runs=[count for count, _ in needed], more_runs_known=[is_known for _, is_known in needed])


def plain_ratio(logs: np.ndarray, base: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """candidate / base of the figures themselves, from log((candidate + offset) / (base + offset)); NaN where base is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = ((base + offset) * np.exp(logs) - offset) / base
    return np.where(base != 0, np.maximum(ratio, 0.0), np.nan)


def adjusted(frame: pd.DataFrame, raw: np.ndarray, base: np.ndarray, cand: np.ndarray, rules: Rules) -> np.ndarray:
    """p corrected within each family: by Holm, or by permutation if so few runs could then never detect anything.

    The choice depends on the numbers of runs and metrics, never on the values. Sides that did not alternate are always
    permuted: ranks do not show the distance between them, and so not whether a drifting machine explains it. If the pace is
    divided out, the part of the error rate used for its test is not spent twice; permuted plain times, which include the
    machine's pace, get half of the error rate, the rest being reserved for the pace's variation.
    """
    least, out = statistics.smallest_p(len(base), len(cand)), np.full(len(raw), np.nan)
    able, few = 2 * least <= rules.alpha, comb(len(base) + len(cand), len(base)) <= statistics.MOST_DEALS
    offset = frame["offset"].to_numpy(np.float64)
    for _, rows in frame.reset_index(drop=True).groupby("family"):
        columns = rows.index[np.isfinite(raw[rows.index])].to_numpy()
        paced = bool(rows["paced"].any())
        spent = 1 / (1 - pace.ERROR_SHARE) if paced else 1.0
        if able and (rules.wander > 1 or (few and least * len(columns) > rules.alpha)):
            p = statistics.largest_of_all(base[:, columns], cand[:, columns], offset[columns], rules.wander)
            out[columns] = np.where(np.isfinite(p), p, 1.0) * (spent if paced else 2.0)
        else:
            out[columns] = statistics.holm(raw[columns]) * spent
    return np.minimum(out, 1.0)


def _median(values: np.ndarray) -> np.ndarray:
    """Medians of columns, NaN for empty ones, without warnings."""
    out = np.full(values.shape[1], np.nan)
    some = np.isfinite(values).any(axis=0)
    out[some] = np.nanmedian(values[:, some], axis=0)
    return out


def verdicts(frame: pd.DataFrame, rules: Rules) -> np.ndarray:
    """A change needs all three: p below alpha in its family, an interval without 1, and an estimate beyond the threshold.

    "Same" needs an interval, from enough runs for any verdict, within the practical threshold, however noisy the machine is.
    """
    alpha, limit, practical = rules.alpha, np.log1p(frame["threshold"].to_numpy()), np.log1p(rules.practical)
    estimate, low, high = (frame[c].to_numpy() for c in ("estimate", "log_low", "log_high"))
    significant = (frame["p"].to_numpy() <= alpha) & ((low > 0) | (high < 0))
    enough = np.array([statistics.smallest_p(a, b) <= alpha for a, b in zip(frame["n_base"], frame["n_cand"], strict=True)], bool)
    changed = significant & (np.abs(estimate) > limit)
    equal = enough & (low >= -practical) & (high <= practical)
    up = (estimate > 0) == (frame["better"] == "lower").to_numpy()
    return np.select([changed & up, changed & ~up, equal], [SLOWER, FASTER, SAME], UNKNOWN)


def more_runs(row: dict[str, Any], rules: Rules) -> tuple[int, bool]:
    """(runs per side to add before "inconclusive" becomes a verdict, whether that is known); (0, True) for other verdicts.

    The width needed is that at which an effect as large as the observed one is detected in 80 of 100 repetitions, or,
    if the effect is below the practical threshold, that at which the interval is within it. The observed width shrinks as 1/√n.
    Fewer than FEWEST runs do not show their spread: then the number is a lower bound.
    """
    n = min(int(row["n_base"]), int(row["n_cand"]))
    if row["verdict"] != UNKNOWN or n == 0:
        return 0, True
    estimate, low, high, limit = (float(row[c]) for c in ("estimate", "log_low", "log_high", "threshold"))
    effect, practical = abs(estimate), float(np.log1p(rules.practical))
    target_width = POWERED * (effect if effect > np.log1p(limit) else abs(practical - effect))
    needed = statistics.runs_for_width(n, max(high - estimate, estimate - low), target_width)
    total = max(needed, statistics.runs_for_p(rules.alpha / 2), FEWEST)
    more = min(max(total - n, 1), FEASIBLE)
    return more, n >= FEWEST and total - n <= FEASIBLE
