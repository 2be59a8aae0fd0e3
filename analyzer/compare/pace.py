"""The pace of a run: what all its operators have in common, taken out so that one that changed stands out of a varying machine.

The speed of a machine varies from run to run, for all operators alike: by its clock, its heat, its neighbours. What is left of an
operator without that varies much less, and shows a change that the whole hides.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analyzer.compare import statistics

FAMILY = "pace"
PACED = ("operator", "phase", "expert")
LEAST_OPERATORS = 8
MOST_MOVED = 1 / 2
MINOR_SHARE = 0.003
ERROR_SHARE = 0.2
"""Of the error rate, spent on whether the pace itself changed; families that are judged against it have the rest."""


def with_paces(
    dims: pd.DataFrame, base: np.ndarray, cand: np.ndarray, without: np.ndarray | None = None
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """The metrics with one more per phase, the pace: the median over operators of time / median time of both sides' runs.

    Which side a run is on does not enter. `dims` as of results.matrices; phases of few operators have no pace.
    `without`: metrics that are known to have changed, and would drag the pace along.
    """
    rows, columns, both = [], [], np.concatenate((base, cand))
    usable = (np.isfinite(both) & (np.nan_to_num(both) > 0)).all(axis=0) & (dims["family"] == "operator").to_numpy()
    usable &= True if without is None else ~without
    for phase in ("prefill", "decode"):
        in_phase = usable & (dims["phase"] == phase).to_numpy() & ~minor(dims)
        if in_phase.sum() >= LEAST_OPERATORS:
            logs = np.log(both[:, in_phase])
            columns.append(np.exp(np.median(logs - np.median(logs, axis=0), axis=1)))
            rows.append({"family": FAMILY, "metric": "pace of operators", "phase": phase, "label": ""})
    if not rows:
        return dims, base, cand
    plain = {"graph": "", "layer": -1, "type": "", "shape": "", "backend": "", "expert": -1}
    more = pd.DataFrame(rows).assign(**plain, unit="", better="lower", offset=0.0, share=np.nan)
    more.index = pd.Index(FAMILY + "|" + more["phase"])
    every = np.column_stack((both, *columns))
    return pd.concat([dims, more[dims.columns]]), every[: len(base)], every[len(base) :]


def minor(dims: pd.DataFrame) -> np.ndarray:
    """Metrics that take less of a step, on both sides together, than anyone would look at."""
    return (dims["share"] < MINOR_SHARE).to_numpy()


def apart(
    dims: pd.DataFrame, base: np.ndarray, cand: np.ndarray, alpha: float, practical: float, wander: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(base, cand) with the pace divided out of every operator's time, and which metrics that is true of.

    Not where the pace itself differs between the sides, or where many operators moved against it: then more changed than a few
    operators, and nobody knows what is the program's and what the machine's.
    """
    out, paced = (base.copy(), cand.copy()), np.zeros(len(dims), bool)
    for column, members in _members(dims):
        if _differs(base[:, [column]], cand[:, [column]], wander) <= ERROR_SHARE * alpha:
            continue
        relative = [side[:, members] / side[:, [column]] for side in (base, cand)]
        judging = ((dims["family"] == "operator").to_numpy() & ~minor(dims))[members]
        if _moved(relative[0][:, judging], relative[1][:, judging], practical, wander) <= MOST_MOVED:
            for side, values in zip(out, relative, strict=True):
                side[:, members] = values
            paced[members] = True
    return *out, paced


def _members(dims: pd.DataFrame) -> Iterator[tuple[int, np.ndarray]]:
    """The column of each pace, and the columns of what it is the pace of."""
    for column in np.flatnonzero((dims["family"] == FAMILY).to_numpy()):
        times = dims["family"].isin(PACED) & (dims["unit"] == "ms") & (dims["phase"] == dims["phase"].iloc[column])
        yield int(column), np.flatnonzero(times.to_numpy() & dims["share"].notna().to_numpy())


def _differs(base: np.ndarray, cand: np.ndarray, wander: float) -> float:
    """p of one pace."""
    return float(
        statistics.mann_whitney(base, cand)[0] if wander == 1 else statistics.largest_of_all(base, cand, np.zeros(1), wander)[0]
    )


def _moved(base: np.ndarray, cand: np.ndarray, practical: float, wander: float) -> float:
    """Share of metrics that differ between the sides by more than what is practical, and than unchanged runs do."""
    offset = np.zeros(base.shape[1])
    usual = wander * np.nan_to_num(statistics.noise(base, cand, offset))
    estimate = np.abs(statistics.bootstrap(base, cand, offset).estimate)
    return float(np.mean(estimate > np.maximum(np.log1p(practical), usual)))
