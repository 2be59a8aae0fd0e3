"""Reasons for expert loads: first use, or reload after an eviction; and the cache size that would avoid reloads.

A cache of another size is evaluated by replaying the recorded runs with the cache's own policy. An avoided load saves its
part of the step's time in loads.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.schema import Tables
from analyzer.records.spans import innermost_span
from runtime.cache_rules.eviction import LRU
from runtime.cache_rules.forms import BACKENDS, Form
from runtime.cache_rules.replay import Replay

COMPILING = ("contextCreate", "graphCreate", "graphFinalize")
"""QNN calls that make a graph instead of reading its binary."""
ENOUGH = 0.9
"""Share of the largest cache's saving that the proposed cache must reach."""
PRECISION = 16
"""A proposed cache size is accurate to 1 / PRECISION of the size: every trial is a replay."""
NUMBER = {name: number for number, name in BACKENDS.items()}
KEYS = ["layer", "expert", "backend"]


@dataclass(frozen=True)
class AvoidedLoads:
    """The loads that a cache of `budget_bytes` (NaN if sizes are unknown) would avoid: their number and their ns of step time."""

    budget_bytes: float
    loads: int
    won_ns: float


def whole_loads(tables: Tables) -> pd.DataFrame:
    """The loads of `loads`, a row for each: of an expert read matrix by matrix, the nth reads of its matrices are its nth load.

    Their span is from the first begin to the last end, `duration_ns` the sum of the reads, beside each other or not.
    """
    moves = tables["loads"][tables["loads"]["action"] == "load"]
    if not (moves["matrix"] >= 0).any():
        return moves
    number = moves.groupby(["pid", *KEYS, "reason", "matrix"]).cumcount().rename("number")
    rules = dict.fromkeys(moves.columns, "first") | {"begin_ns": "min", "end_ns": "max", "complete": "all"}
    rules |= {"bytes": "sum", "duration_ns": "sum"}
    return moves.groupby(["pid", *KEYS, "reason", number], sort=False).agg(rules).reset_index(drop=True)


def with_forms(tables: Tables) -> pd.DataFrame:
    """Complete loads by begin: columns of `loads`, `run` (row in `experts` of the run that it serves, -1: none), `tier`, and
    `again` (not the first load of its form).
    """
    moves = whole_loads(tables).query("complete").sort_values("end_ns")
    runs = tables["experts"].reset_index(drop=True).rename_axis("run").reset_index().sort_values("end_ns")
    runs = runs[["run", *KEYS, "end_ns", "tier"]]
    served = pd.merge_asof(moves[["end_ns", *KEYS]], runs, on="end_ns", by=KEYS, direction="forward")
    run, tier = (served[name].fillna(default).astype(np.int64).to_numpy() for name, default in (("run", -1), ("tier", 0)))
    moves = moves.assign(run=run, tier=tier).sort_values("begin_ns")
    return moves.assign(again=moves.duplicated([*KEYS, "tier"]))


def within_steps(tables: Tables) -> pd.DataFrame:
    """`with_forms` within steps, with `compile_ns` of each."""
    moves = with_forms(tables)
    loads = moves[moves["token_id"] >= 0].reset_index(drop=True)
    return loads.assign(compile_ns=np.minimum(_compile_ns(tables, loads), loads["duration_ns"]))


def load_counts(loads: pd.DataFrame) -> dict[str, float]:
    """Counts of `within_steps`: `first` and `again` loads, `repeated` (not the expert's first in the step), `compiled`."""
    compiled = loads["compile_ns"] > 0
    repeated = loads.duplicated(["token_id", "layer", "expert"])
    numbers = {"first": ~loads["again"], "again": loads["again"], "repeated": repeated, "compiled": compiled}
    return {**{name: int(chosen.sum()) for name, chosen in numbers.items()}, "compile_ms": float(loads["compile_ns"].sum()) / 1e6}


def step_loads(tables: Tables, spent: pd.Series) -> pd.DataFrame:
    """`within_steps` with `cost_ns`: each load's part of its step's time in loads, `spent` (ns by token_id), and `around_ns`.

    compile_ns is scaled to the part of the cost.
    """
    loads = within_steps(tables)
    total = loads.groupby("token_id")["duration_ns"].transform("sum").clip(lower=1)
    share = spent.reindex(loads["token_id"]).fillna(0).to_numpy() / total
    around = around_ns(tables, loads, share.to_numpy())
    return loads.assign(cost_ns=loads["duration_ns"] * share + around, compile_ns=loads["compile_ns"] * share)


def around_ns(tables: Tables, loads: pd.DataFrame, share: np.ndarray) -> np.ndarray:
    """ns by which the run that each load serves takes longer than usual, beyond the `share` of the load within the step.

    That is the wait for a load on another thread and the work around it: eviction, and preparation of the loaded expert. A
    run's usual time is the median of runs with as many rows and a cached expert; without such runs, nothing is added.
    Only the step's own thread counts.
    """
    runs = tables["experts"]
    kind = ["backend", "tier", "n_tokens"]
    usual = runs[runs["cache"] == "hit"].groupby(kind)["duration_ns"].median()
    owner = tables["tokens"].set_index("token_id")["tid"].reindex(runs["token_id"]).to_numpy()
    usual_ns = usual.reindex(pd.MultiIndex.from_frame(runs[kind])).where(owner == runs["tid"].to_numpy()).to_numpy()
    row, around = loads["run"].to_numpy(), np.zeros(len(loads))
    served = (row >= 0) & ~loads["run"].duplicated(keep="last").to_numpy()
    run, load = runs.iloc[row[served]], loads[served]
    both = np.minimum(run["end_ns"].to_numpy(), load["end_ns"]) - np.maximum(run["begin_ns"].to_numpy(), load["begin_ns"])
    longer = run["duration_ns"].to_numpy() - both.clip(lower=0).to_numpy() * share[served] - usual_ns[row[served]]
    same_step = run["token_id"].to_numpy() == load["token_id"].to_numpy()
    around[served] = np.where(same_step, np.nan_to_num(longer), 0).clip(min=0)
    return around


def _compile_ns(tables: Tables, loads: pd.DataFrame) -> np.ndarray:
    """ns of the calls that compile within each load on its thread."""
    calls = tables["qnn_calls"][tables["qnn_calls"]["call"].isin(COMPILING)]
    owner = innermost_span(loads, calls)
    return np.bincount(owner[owner >= 0], calls["duration_ns"].to_numpy()[owner >= 0], len(loads))


def observed_budget(tables: Tables) -> int | None:
    """Maximum bytes in the recorded cache; None if it never evicted anything."""
    loads = tables["loads"]
    evicted = (loads["action"] == "evict").any()
    held = int(loads["resident_bytes"].max()) if evicted else 0
    return held if held > 0 else None


def larger_cache(tables: Tables, loads: pd.DataFrame) -> AvoidedLoads | None:
    """The smallest cache with the share ENOUGH of the largest cache's saving in `step_loads`; None if none saves anything."""
    again = loads[loads["again"]]
    most = float(again["cost_ns"].sum())
    if most <= 0:
        return None
    events, sizes, held = requested_forms(tables["experts"]), form_bytes(tables), observed_budget(tables)
    forms = {form for _, keys in events for form in keys}
    mean = float(np.mean([sizes.get(form.backend, 0) for form in forms])) if forms else 0.0
    if not mean or held is None:
        return AvoidedLoads(float("nan"), len(again), most)
    low = int(max(held, *sizes.values()) / mean) + 1
    high = max(len(forms), low)
    best = avoided_loads(events, sizes, again, high * mean)
    while high - low > high // PRECISION:
        middle = (low + high) // 2
        tried = avoided_loads(events, sizes, again, middle * mean)
        if tried.won_ns >= ENOUGH * most:
            high, best = middle, tried
        else:
            low = middle + 1
    return best


def avoided_loads(
    events: list[tuple[tuple[int, int], list[Form]]], sizes: dict[int, int], again: pd.DataFrame, size: float
) -> AvoidedLoads:
    """The loads that a cache of `size` bytes avoids: those in steps and layers in which the replay has the form cached."""
    played, held = Replay(int(size), LRU(), size=lambda form: sizes.get(form.backend, 0)), set[tuple[int, ...]]()
    for step, forms in events:
        held.update((*step, form.expert, form.backend, form.tier) for form in forms if form in played.cache)
        played.begin()
        played.run(forms)
    asked_for = zip(
        again["token_id"], again["layer"], again["expert"], again["backend"].map(NUMBER).fillna(0), again["tier"], strict=True
    )
    won = np.fromiter((key in held for key in asked_for), bool, len(again))
    return AvoidedLoads(size, int(won.sum()), float(again["cost_ns"].to_numpy()[won].sum()))


def requested_forms(runs: pd.DataFrame) -> list[tuple[tuple[int, int], list[Form]]]:
    """((token_id, layer), the distinct forms that it ran) in time order."""
    runs = runs[runs["token_id"] >= 0].sort_values("begin_ns").drop_duplicates(["token_id", "layer", "expert", "backend", "tier"])
    events: dict[tuple[int, int], list[Form]] = {}
    columns = (runs[name].tolist() for name in ("token_id", "layer", "expert", "backend", "tier"))
    for step, layer, expert, backend, tier in zip(*columns, strict=True):
        events.setdefault((step, layer), []).append(Form(layer, expert, NUMBER.get(backend, 0), tier))
    return list(events.items())


def form_bytes(tables: Tables) -> dict[int, int]:
    """Bytes of an expert in the cache, by backend number: the bytes that a load added, else the bytes that it read."""
    moves = whole_loads(tables).sort_values("end_ns")
    grown = moves["resident_bytes"].diff().where((moves["resident_bytes"] >= 0) & (moves["resident_bytes"].shift() >= 0))
    loads = moves.assign(size=grown.where(grown > 0, moves["bytes"]))[moves["action"] == "load"]
    return {NUMBER.get(str(name), 0): int(size) for name, size in loads.groupby("backend")["size"].median().items() if size > 0}


def layer_bytes(tables: Tables) -> dict[int, int]:
    """Bytes of an expert by layer, the median of its loads; {} if none were recorded."""
    read = whole_loads(tables).query("bytes > 0")
    return {int(layer): int(size) for layer, size in read.groupby("layer")["bytes"].median().items()}
