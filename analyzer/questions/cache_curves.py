"""Simulated hit rates of expert caches of any size, from the recorded routing.

Replayed by event: a step requests all experts of a layer at once, and each is a hit or a miss in the cache as it was when the
layer began; experts of one event do not evict each other if the cache can hold them all. Slots are shared by all
layers: one cache of (layer, expert) pairs. If a phase is given, only its events count; the others still fill the cache.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from analyzer.questions.experts import activations
from analyzer.records.schema import Tables
from runtime.cache_rules.eviction import LFRU
from runtime.cache_rules.forms import CPU, Form
from runtime.cache_rules.replay import Event, Outcome, belady, belady_with_bypass, lfu, lru, replay


def lfru(events: Sequence[Event], size: int) -> Outcome:
    """The result of the runtime's LFRU policy for events with keys (layer, expert)."""
    forms = [Event(tuple(Form(layer, expert, CPU, 0) for layer, expert in keys), counts) for keys, counts in events]
    return replay(forms, size, LFRU())


POLICIES: dict[str, Callable[[Sequence[Event], int], Outcome]] = {
    "lru": lru,
    "lfu": lfu,
    "belady": belady_with_bypass,
    "lfru": lfru,
    "belady_without_bypass": belady,
}
"""`belady` is the optimal cache: like `lfu` it may decline to cache a requested expert. The last two and `lru` may not."""
SHOWN = ("lru", "lfu", "belady")


def events_of(tables: Tables, phase: str | None = None) -> list[Event]:
    """The (layer, expert) pairs that each layer of each step requested, in order; if `phase` is given, only its events count."""
    rows = activations(tables).sort_values(["token_id", "layer", "expert"])
    phases = tables["tokens"].set_index("token_id")["phase"].reindex(rows["token_id"]).tolist()
    columns = (rows[name].tolist() for name in ("token_id", "layer", "expert"))
    asked: dict[tuple[int, int], list[tuple[int, int]]] = {}
    counts: dict[tuple[int, int], bool] = {}
    for token, layer, expert, its_phase in zip(*columns, phases, strict=True):
        asked.setdefault((token, layer), []).append((layer, expert))
        counts[token, layer] = phase is None or its_phase == phase
    return [Event(tuple(pairs), counts[step]) for step, pairs in asked.items()]


def curves(
    tables: Tables, sizes: Sequence[int] | None = None, phase: str | None = None, policies: Sequence[str] = SHOWN
) -> pd.DataFrame:
    """Hit rate by cache size: slots, share (of all experts seen), a column per policy. Default sizes: eighths of them."""
    events = events_of(tables, phase)
    n_experts = len({pair for event in events for pair in event.keys})
    chosen = sorted({max(1, n_experts * i // 8) for i in range(1, 9)}) if sizes is None else sorted(set(sizes))
    rows = []
    for size in chosen if events else ():
        rates = {name: POLICIES[name](events, size).hit_rate for name in policies}
        rows.append({"slots": size, "share": size / n_experts, **rates})
    return pd.DataFrame(rows, columns=["slots", "share", *policies])


def slots_for(tables: Tables, rate: float, phase: str | None = None) -> int | None:
    """The smallest number of slots with which LRU reaches a hit rate; None if even all experts do not."""
    events = events_of(tables, phase)
    n_experts = len({pair for event in events for pair in event.keys})
    low, high = 1, n_experts
    if not events or lru(events, high).hit_rate < rate:
        return None
    while low < high:
        middle = (low + high) // 2
        if lru(events, middle).hit_rate >= rate:
            high = middle
        else:
            low = middle + 1
    return high


def expert_bytes(tables: Tables) -> float:
    """Mean size of one expert, from recorded loads; NaN without any."""
    loads = tables["loads"]
    sizes = loads.loc[(loads["action"] == "load") & (loads["bytes"] > 0), "bytes"]
    return float(sizes.mean()) if len(sizes) else float(np.nan)
