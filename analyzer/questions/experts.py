"""Expert activity: activation over steps, number of distinct experts, hits of the expert cache, and reuse distance."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import expert_loads as step_loads
from analyzer.questions.figures import cache_hits, hit_rate
from analyzer.questions.parts import LOAD, operator_parts
from analyzer.records.schema import Tables
from analyzer.tables.store import answered_once


@answered_once
def activations(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """One row for each (token_id, layer, expert), in this order, with `n_tokens` routed to it: from routes, else from runs."""
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


def activation_matrices(tables: Tables, phase: str | None = None) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """For each layer (token ids [iterations], rows routed [iterations, experts]); experts up to the highest number recorded."""
    ran = tables["routes" if len(tables["routes"]) else "experts"]["expert"]
    n_experts = int(ran.max()) + 1 if len(ran) else 0
    return {int(layer): _matrix_of(rows, n_experts) for layer, rows in activations(tables, phase).groupby("layer")}


def _matrix_of(rows: pd.DataFrame, n_experts: int) -> tuple[np.ndarray, np.ndarray]:
    ids, iteration = np.unique(rows["token_id"].to_numpy(), return_inverse=True)
    table = np.zeros((len(ids), n_experts), np.int64)
    table[iteration, rows["expert"].to_numpy()] = rows["n_tokens"].to_numpy()
    return ids, table


def distinct_experts(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """Per layer: `experts` distinct experts seen, `per_step` mean distinct experts in a step, `steps`."""
    rows = activations(tables, phase)
    per_step = rows.groupby(["layer", "token_id"]).size().groupby("layer").agg(per_step="mean", steps="size")
    per_step.insert(0, "experts", rows.groupby("layer")["expert"].nunique())
    return per_step.reset_index()


@answered_once
def reuse_distance(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """Per activation: `distance`, steps of its layer since the expert last ran there; NaN the first time."""
    rows = activations(tables, phase)[["token_id", "layer", "expert"]]
    rows = rows.sort_values(["layer", "token_id", "expert"]).reset_index(drop=True)
    step = (rows[["layer", "token_id"]].diff() != 0).any(axis=1).cumsum()
    before = step.groupby([rows["layer"], rows["expert"]]).shift()
    return rows.assign(distance=(step - before).astype(np.float64))


@answered_once
def activation_shares(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """Per (layer, expert): `share` of the steps of its layer in which it was active, and `rows` routed to it."""
    rows = activations(tables, phase)
    steps = rows.groupby("layer")["token_id"].nunique()
    used = rows.groupby(["layer", "expert"], as_index=False).agg(steps=("token_id", "size"), rows=("n_tokens", "sum"))
    return used.assign(share=used["steps"] / used["layer"].map(steps))


def routing_entropy(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """Per layer: `bits`, the entropy of the routed rows over experts, and `balance`, its share of the maximum."""
    used = activation_shares(tables, phase)
    everything = activations(tables)
    n_experts = int(everything["expert"].max()) + 1 if len(everything) else 0
    share = used["rows"] / used.groupby("layer")["rows"].transform("sum")
    bits = -(share * np.log2(share)).groupby(used["layer"]).sum()
    most = np.log2(n_experts) if n_experts > 1 else 1.0
    return pd.DataFrame({"layer": bits.index, "bits": bits.to_numpy(), "balance": bits.to_numpy() / most})


def co_activation(table: np.ndarray) -> np.ndarray:
    """[experts, experts]: the number of steps of a layer in which both were active; the diagonal has each expert's own steps.

    table: the layer's rows of `activation_matrices`. float32 holds counts below 2^24; its product is many times as fast.
    """
    active = (table > 0).astype(np.float32)
    return (active.T @ active).astype(np.int64)


def time_by_distance(tables: Tables) -> pd.DataFrame:
    """Time of decode steps' expert operators by reuse distance of their experts (ProfInfer's Figure 13).

    Per (token_id, layer): `distance`, mean steps since each expert was last active (those never seen before omitted), `new`
    experts seen for the first time, `expert_ns` of its expert operators and loads, `maj_flt` major faults within them.
    """
    reuse = reuse_distance(tables, "decode")
    by_step = reuse.assign(new=reuse["distance"].isna()).groupby(["token_id", "layer"])
    steps = by_step.agg(distance=("distance", "mean"), new=("new", "sum"))
    operators = tables["operators"]
    expert_operators = operators[np.isin(operator_parts(operators), ("experts", LOAD))]
    spent = expert_operators.groupby(["token_id", "layer"])[["duration_ns", "maj_flt"]].sum()
    joined = steps.join(spent, how="inner").rename(columns={"duration_ns": "expert_ns"})
    return joined.reset_index()


def distance_effect(tables: Tables) -> dict[str, Any]:
    """Spearman's rank correlation of reuse distance with the experts' time and with major faults; {} for too few steps."""
    rows = time_by_distance(tables).dropna(subset=["distance"])
    if len(rows) < 8 or rows["distance"].nunique() < 2:
        return {}
    ranks = rows[["distance", "expert_ns", "maj_flt"]].rank()
    correlations = ranks.corr()["distance"]
    return {"steps": len(rows), "time": _number(correlations["expert_ns"]), "major_faults": _number(correlations["maj_flt"])}


def _number(value: float) -> float | None:
    return float(value) if value == value else None


def prefetched_runs(tables: Tables) -> pd.DataFrame:
    """Pairs (load_id, run_id): each prefetch with the first run of its expert after it and before the expert's next load."""
    loads = tables["loads"]
    if not (loads["reason"] == "prefetch").any():
        return pd.DataFrame({"load_id": [], "run_id": []}, dtype=np.int64)
    keys = ["layer", "expert"]
    loads = loads[loads["action"] == "load"].sort_values("begin_ns")
    runs = tables["experts"].sort_values("begin_ns")
    pairs = pd.merge_asof(
        runs[["run_id", "begin_ns", *keys]], loads[["load_id", "reason", "begin_ns", *keys]], on="begin_ns", by=keys
    )
    used = pairs[pairs["reason"] == "prefetch"].drop_duplicates("load_id")
    return used[["load_id", "run_id"]].astype(np.int64).reset_index(drop=True)


def prefetch_counts(tables: Tables) -> dict[str, Any]:
    """Prefetches: the number of loads ahead of need, of those used before their eviction, and of those that came too late.

    A prefetch is late if the next run of its expert began before the load ended.
    """
    loads = step_loads.whole_loads(tables).query("reason == 'prefetch'")
    if len(loads) == 0:
        return {}
    loads, keys = loads.sort_values("begin_ns"), ["layer", "expert"]

    def following(rows: pd.DataFrame) -> np.ndarray:
        """The begin of the next of `rows` with each load's expert; NaN for none."""
        later = rows.sort_values("begin_ns")[[*keys, "begin_ns"]].assign(next_ns=lambda r: r["begin_ns"].astype(float))
        return pd.merge_asof(loads[[*keys, "begin_ns"]], later, on="begin_ns", by=keys, direction="forward")["next_ns"].to_numpy()

    run = following(pd.concat([tables["experts"], tables["loads"].query("action == 'hit'")]))
    gone = following(tables["loads"].query("action == 'evict'"))
    used = ~np.isnan(run) & ~(gone < run)
    waited = (loads["end_ns"].to_numpy() - run)[used]
    late, waited = waited > 0, waited[waited > 0]
    return {"prefetches": len(loads), "used": int(used.sum()), "late": int(late.sum()), "late_ms": float(waited.sum()) / 1e6}


def expert_summary(tables: Tables) -> dict[str, Any]:
    """Expert figures, JSON-able; {} if the recording has no experts."""
    runs, loads = tables["experts"], tables["loads"]
    active = activations(tables)
    if len(active) == 0 and len(loads) == 0:
        return {}
    counted, reuse = cache_hits(tables), reuse_distance(tables)["distance"].dropna()
    hits, misses = int(counted["hits"].sum()), int(counted["misses"].sum())
    loaded = step_loads.whole_loads(tables)
    by_reason = {
        reason: {"loads": len(rows), "bytes": int(rows["bytes"].sum()), "ms": float(rows["duration_ns"].sum()) / 1e6}
        for reason, rows in loaded.groupby("reason")
    }
    return {
        "layers": int(active["layer"].nunique()),
        "distinct_per_layer": {phase: _mean_distinct(distinct_experts(tables, phase)) for phase in ("prefill", "decode")},
        "runs": len(runs),
        "hits": hits,
        "misses": misses,
        "hit_rate": hit_rate(hits, misses),
        "reuse_distance_median_steps": float(reuse.median()) if len(reuse) else None,
        "loads": by_reason,
        "step_loads": step_loads.load_counts(step_loads.within_steps(tables)),
        "evictions": int((loads["action"] == "evict").sum()),
        "evicted_bytes": int(loads.loc[loads["action"] == "evict", "bytes"].clip(lower=0).sum()),
    }


def _mean_distinct(counted: pd.DataFrame) -> dict[str, float] | None:
    """Means over layers of distinct experts: in the whole phase, and in one step."""
    if len(counted) == 0:
        return None
    return {"seen": float(counted["experts"].mean()), "per_step": float(counted["per_step"].mean())}
