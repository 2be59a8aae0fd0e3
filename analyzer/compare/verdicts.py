"""From statistics to a verdict per metric: slower, faster, same, or inconclusive, with the number of further runs needed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analyzer.compare import pace, statistics
from analyzer.compare.functions import sampling_noise

PRACTICAL = 0.02
FEWEST = 4
"""Minimum runs per side for any verdict at the usual error rate: with fewer, chance alone separates them in more than 5 %."""
SHOWING = 3
"""Minimum runs per side that show their spread."""
FEASIBLE = 100
"""Upper limit for additional runs that are practical."""
SLOWER, FASTER, SAME, UNKNOWN, MINOR = "slower", "faster", "same", "inconclusive", "minor"
VANISHED, APPEARED = "vanished", "appeared"
OTHER_CLOCKS = "other clocks"
"""What the sides' clocks explain is no change of the build (equal_heat.py)."""


@dataclass(frozen=True)
class Rules:
    """The criteria of a change: family-wise error rate, the smallest relative change that matters, and the factor by which
    unchanged sides differ more than randomly assigned runs (see statistics.drift_factor)."""

    alpha: float = 0.05
    practical: float = PRACTICAL
    seed: int = 0
    drift: float = 1.0


def judge_apart(
    dims: pd.DataFrame, base: np.ndarray, cand: np.ndarray, rules: Rules = Rules()
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """(`judge_metrics`'s frame, base, cand), with the runs' paces as additional metrics, and operators judged relative to them.

    Metrics with a detected change are excluded from the pace by which the others are finally judged. If no change was
    detected, there is no second test, so that the error rate stays the same.
    """
    paced_metrics = pace.with_paces(dims, base, cand)
    judged = judge_metrics(*paced_metrics, rules)
    changed = (judged["paced"] & judged["verdict"].isin([SLOWER, FASTER])).to_numpy()[: len(dims)]
    if not changed.any():
        return judged, *paced_metrics[1:]
    paced_metrics = pace.with_paces(dims, base, cand, changed)
    return judge_metrics(*paced_metrics, rules), *paced_metrics[1:]


def judge_metrics(dims: pd.DataFrame, base: np.ndarray, cand: np.ndarray, rules: Rules = Rules()) -> pd.DataFrame:
    """`dims` (a row per metric: family, better, offset, share ...) with the columns
    base, cand (medians), change (cand / base, NaN from 0), at_pace (cand at the base's pace, NaN where not paced),
    ratio, low, high (as judged: at the base's pace if paced, else of the medians; NaN from 0), least, most (low and high as
    differences in the metric's unit), p (adjusted in its family),
    threshold, verdict, more_runs, more_runs_known (False: at least that many), n_base, n_cand, paced.

    `paced`: ratio, interval and p are relative to the pace of the runs (see pace), if `dims` have one.
    `verdict` is minor if a metric takes less than 0.3 % of a step on both sides together: it is not tested, and costs the
    others no power. This selection does not depend on the runs' sides, so that the tests stay valid.
    """
    offset = dims["offset"].to_numpy(np.float64)
    frame = dims.assign(base=_column_medians(base), cand=_column_medians(cand))
    base, cand, frame["paced"] = pace.divide_out_pace(dims, base, cand, rules.alpha, rules.practical, rules.drift)
    interval = statistics.bootstrap(base, cand, offset, rules.seed).widened(rules.drift)
    aa = rules.drift * statistics.noise_band(base, cand, offset, rules.seed + 1)
    n_base, n_cand = (np.isfinite(x).sum(axis=0) for x in (base, cand))
    minor = pace.negligible_metrics(dims)
    tested = (n_base > 0) & (n_cand > 0) & ~minor
    frame = frame.assign(n_base=n_base, n_cand=n_cand, spread=rules.drift * statistics.spread_within(base, cand, offset))
    frame = frame.assign(estimate=interval.estimate, log_low=interval.low, log_high=interval.high)
    middle = _column_medians(base)
    for name, logs in (("ratio", interval.estimate), ("low", interval.low), ("high", interval.high)):
        frame[name] = plain_ratio(logs, middle, offset)
    with np.errstate(over="ignore"):
        frame["least"], frame["most"] = ((middle + offset) * np.expm1(logs) for logs in (interval.low, interval.high))
    with np.errstate(divide="ignore", invalid="ignore"):
        frame["change"] = (frame["cand"] / frame["base"]).where(frame["base"] != 0)
    frame["at_pace"] = (frame["base"] * frame["ratio"]).where(frame["paced"])
    frame["p"] = adjusted_p(frame, tested, base, cand, rules)
    frame["threshold"] = np.maximum(rules.practical, np.expm1(np.nan_to_num(aa)))
    frame["verdict"] = verdict_of(frame, rules)
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


def adjusted_p(frame: pd.DataFrame, tested: np.ndarray, base: np.ndarray, cand: np.ndarray, rules: Rules) -> np.ndarray:
    """p corrected for the metrics of the same family and unit (see statistics.permuted_p); NaN if not tested.

    Figures of speed and hit rates so pay nothing for the many operators and experts. If the pace is divided out, the part of the
    error rate used for its test is not spent twice.
    """
    out = np.full(len(frame), np.nan)
    offset = frame["offset"].to_numpy(np.float64)
    unit = frame["unit"] if "unit" in frame else pd.Series("", frame.index)
    noise = sampling_noise(frame)
    groups = pd.factorize(frame["family"].astype(str) + "|" + unit.where(frame["family"] != "speed", "").astype(str))[0]
    for group in np.unique(groups[tested]):
        columns = np.flatnonzero(tested & (groups == group))
        spent = 1 / (1 - pace.ERROR_SHARE) if frame["paced"].to_numpy()[columns].any() else 1.0
        out[columns] = (
            statistics.permuted_p(base[:, columns], cand[:, columns], offset[columns], rules.drift, noise[columns]) * spent
        )
    return np.minimum(out, 1.0)


def _column_medians(values: np.ndarray) -> np.ndarray:
    """Medians of columns, NaN for empty ones, without warnings."""
    out = np.full(values.shape[1], np.nan)
    some = np.isfinite(values).any(axis=0)
    out[some] = np.nanmedian(values[:, some], axis=0)
    return out


def verdict_of(frame: pd.DataFrame, rules: Rules) -> np.ndarray:
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

    From an upper limit of the runs' variance within sides: enough to detect an effect as large as the observed one in 80 of 100
    repetitions, or, if the effect is below the practical threshold, to find the interval within it. Fewer than SHOWING runs do
    not show their spread: then the number is a lower bound.
    """
    n = min(int(row["n_base"]), int(row["n_cand"]))
    if row["verdict"] != UNKNOWN or n == 0:
        return 0, True
    effect, practical, threshold = (
        abs(float(row["estimate"])),
        float(np.log1p(rules.practical)),
        np.log1p(float(row["threshold"])),
    )
    least = statistics.runs_for_p(rules.alpha * (1 - pace.ERROR_SHARE if row["paced"] else 1))
    aim = effect if effect > threshold else abs(practical - effect)
    needed = least
    if n >= SHOWING:
        spread = statistics.largest_spread(float(row["spread"]), int(row["n_base"] + row["n_cand"]) - 2)
        needed = max(statistics.runs_for_effect(spread, aim), least)
    more = min(max(needed - n, 1), FEASIBLE)
    return more, n >= SHOWING and needed - n <= FEASIBLE
