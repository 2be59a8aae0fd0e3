"""The pace of a run: the speed common to all its operators, divided out so that single changes are visible despite variation.

A machine's speed varies from run to run for all operators alike, by clock, heat and neighbours. Relative to the pace, an
operator's time varies much less and shows changes that the total time hides.
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
"""Share of the error rate for the test of the pace itself; families judged relative to it have the rest."""


def with_paces(
    dims: pd.DataFrame, base: np.ndarray, cand: np.ndarray, without: np.ndarray | None = None
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """The metrics with one more per phase, the pace: the median over operators of time / median time of both sides' runs.

    The pace does not depend on a run's side. `dims` as of results.value_matrices; phases with few operators have no pace.
    `without`: metrics that are known to have changed and would bias the pace.
    """
    rows, columns, both = [], [], np.concatenate((base, cand))
    usable = (np.isfinite(both) & (np.nan_to_num(both) > 0)).all(axis=0) & (dims["family"] == "operator").to_numpy()
    usable &= True if without is None else ~without
    for phase in ("prefill", "decode"):
        in_phase = usable & (dims["phase"] == phase).to_numpy() & ~negligible_metrics(dims)
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


def negligible_metrics(dims: pd.DataFrame) -> np.ndarray:
    """Metrics with a negligible share of a step, on both sides together."""
    return (dims["share"] < MINOR_SHARE).to_numpy()


def divide_out_pace(
    dims: pd.DataFrame, base: np.ndarray, cand: np.ndarray, alpha: float, practical: float, drift: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(base, cand, mask of affected metrics) with the pace divided out of every operator's time.

    Not applied if the pace itself differs between the sides or if many operators moved against it: then more than a few operators
    changed, and the program's part cannot be separated from the machine's.
    """
    out, paced = (base.copy(), cand.copy()), np.zeros(len(dims), bool)
    for column, members in _metrics_by_pace(dims):
        if statistics.permuted_p(base[:, [column]], cand[:, [column]], np.zeros(1), drift)[0] <= ERROR_SHARE * alpha:
            continue
        relative = [side[:, members] / side[:, [column]] for side in (base, cand)]
        judging = ((dims["family"] == "operator").to_numpy() & ~negligible_metrics(dims))[members]
        if _share_moved(relative[0][:, judging], relative[1][:, judging], practical, drift) <= MOST_MOVED:
            for side, values in zip(out, relative, strict=True):
                side[:, members] = values
            paced[members] = True
    return *out, paced


def _metrics_by_pace(dims: pd.DataFrame) -> Iterator[tuple[int, np.ndarray]]:
    """(column of each pace, columns of the metrics that it applies to)."""
    for column in np.flatnonzero((dims["family"] == FAMILY).to_numpy()):
        times = dims["family"].isin(PACED) & (dims["unit"] == "ms") & (dims["phase"] == dims["phase"].iloc[column])
        yield int(column), np.flatnonzero(times.to_numpy() & dims["share"].notna().to_numpy())


def _share_moved(base: np.ndarray, cand: np.ndarray, practical: float, drift: float) -> float:
    """Share of metrics that differ between the sides by more than the practical threshold and than unchanged runs do."""
    offset = np.zeros(base.shape[1])
    usual = drift * np.nan_to_num(statistics.noise_band(base, cand, offset))
    estimate = np.abs(statistics.bootstrap(base, cand, offset).estimate)
    return float(np.mean(estimate > np.maximum(np.log1p(practical), usual)))
