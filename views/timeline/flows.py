"""Which expert run used what a prefetch had loaded: the two ends of an arrow in the timeline."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

Tables = Mapping[str, pd.DataFrame]
PREFETCH, STEP = 1 << 41, 1 << 42  # added to a load's and a step's number, so that their arrows are not those of graphs
KEYS = ["layer", "expert"]


def prefetched_runs(tables: Tables) -> pd.DataFrame:
    """Pairs (load_id, run_id): each prefetch with the first run of its expert that began after it and before another load."""
    loads = tables["loads"]
    if not (loads["reason"] == "prefetch").any():
        return pd.DataFrame({"load_id": [], "run_id": []}, dtype=np.int64)
    loads = loads[loads["action"] == "load"].sort_values("begin_ns")
    runs = tables["experts"].sort_values("begin_ns")
    found = pd.merge_asof(
        runs[["run_id", "begin_ns", *KEYS]], loads[["load_id", "reason", "begin_ns", *KEYS]], on="begin_ns", by=KEYS
    )
    used = found[found["reason"] == "prefetch"].drop_duplicates("load_id")
    return used[["load_id", "run_id"]].astype(np.int64).reset_index(drop=True)


def flow_of(ids: pd.Series, column: pd.Series, flow: pd.Series) -> np.ndarray:
    """The flow ids of rows: that of the pair whose `column` is the row's id, else 0."""
    if not len(column):
        return np.zeros(len(ids), np.int64)
    return ids.map(dict(zip(column.tolist(), flow.tolist(), strict=True))).fillna(0).to_numpy(np.int64)
