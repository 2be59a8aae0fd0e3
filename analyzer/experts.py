"""Which experts ran: activation over steps, how many distinct ones, hits of the expert cache, and reuse distance."""

from typing import Any

import numpy as np
import pandas as pd

Tables = dict[str, pd.DataFrame]


def activations(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """One row per (token_id, layer, expert) with `n_tokens`, rows routed to it: from routes, else from the experts' runs."""
    if len(tables["routes"]):
        routed = tables["routes"]
        counted = routed.groupby(["token_id", "layer", "expert"], as_index=False).size().rename(columns={"size": "n_tokens"})
    else:
        counted = tables["experts"].groupby(["token_id", "layer", "expert"], as_index=False)["n_tokens"].sum()
    tokens = tables["tokens"]
    chosen = tokens if phase is None else tokens[tokens["phase"] == phase]
    if phase is None and len(tokens) == 0:
        return counted
    return counted[counted["token_id"].isin(chosen["token_id"])].reset_index(drop=True)


def matrix(tables: Tables, layer: int, phase: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(token ids [iterations], rows routed [iterations, experts]) of a layer; as many experts as the recording has seen."""
    everything = activations(tables)
    n_experts = int(everything["expert"].max()) + 1 if len(everything) else 0
    rows = activations(tables, phase)
    rows = rows[rows["layer"] == layer]
    ids, iteration = np.unique(rows["token_id"].to_numpy(), return_inverse=True)
    table = np.zeros((len(ids), n_experts), np.int64)
    table[iteration, rows["expert"].to_numpy()] = rows["n_tokens"].to_numpy()
    return ids, table


def distinct(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """Per layer: `experts` distinct experts seen, `per_step` mean distinct experts in a step, `steps`."""
    rows = activations(tables, phase)
    per_step = rows.groupby(["layer", "token_id"])["expert"].nunique().groupby("layer").agg(["mean", "size"])
    seen = rows.groupby("layer")["expert"].nunique()
    columns = {
        "layer": seen.index,
        "experts": seen.to_numpy(),
        "per_step": per_step["mean"].to_numpy(),
        "steps": per_step["size"].to_numpy(),
    }
    return pd.DataFrame(columns)


def hit_rate(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """Per (token_id, layer): `hits` and `misses`, distinct experts by the cache's state when the layer began, and `rate`.

    An expert counts once per step and layer, however many runs it was split into; a prefetched one is a hit.
    Runs whose engine does not tell the state are left out.
    """
    runs = tables["experts"]
    runs = runs[runs["cache"] != ""]
    if phase is not None:
        tokens = tables["tokens"]
        runs = runs[runs["token_id"].isin(tokens.loc[tokens["phase"] == phase, "token_id"])]
    first = runs.sort_values("begin_ns").drop_duplicates(["token_id", "layer", "expert"])
    hit = first.assign(hits=(first["cache"] != "miss").astype(np.int64), misses=(first["cache"] == "miss").astype(np.int64))
    counted = hit.groupby(["token_id", "layer"], as_index=False)[["hits", "misses"]].sum()
    return counted.assign(rate=counted["hits"] / (counted["hits"] + counted["misses"]))


def reuse_distance(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """Per activation: `distance`, steps of its layer since the expert last ran there; NaN the first time."""
    rows = activations(tables, phase)[["token_id", "layer", "expert"]]
    rows = rows.sort_values(["layer", "token_id", "expert"]).reset_index(drop=True)
    step = rows.groupby("layer")["token_id"].rank(method="dense")
    before = step.groupby([rows["layer"], rows["expert"]]).shift()
    return rows.assign(distance=(step - before).astype(np.float64))


def summary(tables: Tables) -> dict[str, Any]:
    """Experts in numbers, JSON-able; {} where the recording has none."""
    runs, loads = tables["experts"], tables["loads"]
    seen = activations(tables)
    if len(seen) == 0 and len(loads) == 0:
        return {}
    rates, reuse = hit_rate(tables), reuse_distance(tables)["distance"].dropna()
    hits, misses = int(rates["hits"].sum()), int(rates["misses"].sum())
    loaded = loads[loads["action"] == "load"]
    by_reason = {
        reason: {"loads": len(rows), "bytes": int(rows["bytes"].sum()), "ms": float(rows["duration_ns"].sum()) / 1e6}
        for reason, rows in loaded.groupby("reason")
    }
    return {
        "layers": int(seen["layer"].nunique()),
        "distinct_per_layer": {phase: _means(distinct(tables, phase)) for phase in ("prefill", "decode")},
        "runs": len(runs),
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "reuse_distance_median_steps": float(reuse.median()) if len(reuse) else None,
        "loads": by_reason,
        "evictions": int((loads["action"] == "evict").sum()),
        "evicted_bytes": int(loads.loc[loads["action"] == "evict", "bytes"].sum()),
    }


def _means(counted: pd.DataFrame) -> dict[str, float] | None:
    """Means over layers of distinct experts: in the whole phase, and in one step."""
    if len(counted) == 0:
        return None
    return {"seen": float(counted["experts"].mean()), "per_step": float(counted["per_step"].mean())}
