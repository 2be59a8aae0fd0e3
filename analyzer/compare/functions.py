"""CPU time of functions and of call paths, per step or as shares, from samples of stacks: families `function` and `frame`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.stacks import CALLERS_UNKNOWN, joined, rooted_stacks
from analyzer.records.schema import Tables

FUNCTION, FRAME = "function", "frame"
SAMPLED = (FUNCTION, FRAME)
"""Families in which what a run lacks was not sampled in it, and took no time."""
SELF, TOTAL = "CPU time itself", "CPU time"
RUN, OF_SAMPLES, PER_STEP = "run", "% of samples", "ms per step"
"""The phase of samples of a program without steps, and their unit; that of others, as it is called."""
BETWEEN = ";"
"""What separates the functions of a call path, the outermost first."""
FEWEST, OFTEN = 8, 0.4
"""Samples of a run below which a function is not listed; those listed in a smaller share of all runs are not tested."""
LEAST, NEGLIGIBLE = 0.001, 0.003
"""Shares of a phase's samples below which a function is not listed, and that are added to both sides of a ratio."""


def function_metrics(tables: Tables, steps: pd.DataFrame, hz: int) -> pd.DataFrame:
    """CPU time of each function itself and with those it calls, and of each call path: ms per step, by phase.

    `steps`: phases by token_id; `hz`: samples taken in a second of CPU time, 0: none were recorded. Of a program without steps,
    the share of all samples, in percent.
    """
    samples, has_steps = joined(tables, "samples"), len(tables["tokens"]) > 0
    samples = samples[samples["token_id"].isin(steps.index)] if has_steps else samples.assign(phase=RUN)
    if not hz or not len(samples):
        return pd.DataFrame()
    rows = [row for phase, some in samples.groupby("phase") for row in phase_rows(tables, str(phase), some)]
    frame = pd.DataFrame(rows, columns=["family", "metric", "phase", "type", "n", "of"])
    each = 1e3 / hz / frame["phase"].map(steps["phase"].value_counts()) if has_steps else 100 / frame["of"]
    value, share, offset = frame["n"] * each, frame["n"] / frame["of"], NEGLIGIBLE * frame["of"] * each
    unit = "ms" if has_steps else OF_SAMPLES
    return frame.drop(columns="of").assign(unit=unit, value=value, mean=value, share=share, offset=offset)


def phase_rows(tables: Tables, phase: str, samples: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """(family, metric, phase, name, its samples, all samples) of what has at least FEWEST and the share LEAST of them."""
    counts = {key: dict[str, int]() for key in ((FUNCTION, SELF), (FUNCTION, TOTAL), (FRAME, TOTAL))}
    own, total, paths = counts.values()
    numbers, stacks = rooted_stacks(tables, samples)
    for stack, count in enumerate(np.bincount(numbers).tolist()):
        names = stacks[stack] if count else []
        for name in set(names) - {CALLERS_UNKNOWN}:
            total[name] = total.get(name, 0) + count
        for name in names[-1:]:
            own[name] = own.get(name, 0) + count
        for depth in range(1, len(names) + 1):
            path = BETWEEN.join(names[:depth])
            paths[path] = paths.get(path, 0) + count
    for (family, metric), found in counts.items():
        for name, count in found.items():
            if count >= max(LEAST * len(samples), FEWEST):
                yield family, metric, phase, name, count, len(samples)


def sampling_noise(frame: pd.DataFrame) -> np.ndarray:
    """How much the logarithm of each metric varies by chance in relation to others': of counts of samples the less the more."""
    share = frame["share"].clip(lower=LEAST).to_numpy(np.float64)
    return np.where(frame["family"].isin(SAMPLED), np.sqrt(share) / (share + NEGLIGIBLE), 1.0)


def with_unsampled(dims: pd.DataFrame, values: np.ndarray) -> None:
    """Fill in zeros for the functions that a run [.., runs, metrics] lacks though it was sampled in their phase.

    What few runs of both sides have gets the share 0 in `dims`: by chance it is on one side alone, and would hide others.
    """
    share = dims["share"].to_numpy().copy()
    for phase in dims["phase"].unique():
        columns = np.flatnonzero(dims["family"].isin(SAMPLED).to_numpy() & (dims["phase"] == phase).to_numpy())
        runs = np.flatnonzero(np.isfinite(values[0][:, columns]).any(axis=1))
        cells = np.ix_(np.arange(len(values)), runs, columns)
        rare = np.isfinite(values[0][np.ix_(runs, columns)]).sum(axis=0) < OFTEN * len(runs)
        share[columns[rare]] = 0.0
        values[cells] = np.nan_to_num(values[cells])
    dims["share"] = share


def changed_frames(judged: pd.DataFrame) -> list[dict[str, Any]]:
    """Every call path with its figure on both sides, the interval of their difference, and its verdict; callers first."""
    rows = judged[judged["family"] == FRAME].sort_values(["phase", "type"])
    rows = rows.assign(unit=rows["unit"].replace("ms", PER_STEP))
    names = ["phase", "unit", "base", "cand", "least", "most", "verdict"]
    paths = [path.split(BETWEEN) for path in rows["type"]]
    return [{"path": path, **row} for path, row in zip(paths, rows[names].to_dict("records"), strict=True)]
