"""What an expert cache of any size would have hit, from the routing alone.

Event by event: a layer's step asks for all its experts at once, and each is a hit or a miss against the cache as it stood when
the layer began; what is asked for together does not evict each other where the cache can hold it. Slots are shared by all
layers: one cache of (layer, expert) pairs. Only some groups may count, a phase's; the others still fill the cache.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.questions.experts import activations

Tables = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Group:
    """What one layer of one step asks for; whether its hits and misses count."""

    keys: tuple[Hashable, ...]
    counts: bool = True


def lru(groups: Sequence[Group], size: int) -> tuple[int, int]:
    """(hits, misses) where the least recently used leaves."""
    kept: OrderedDict[Hashable, None] = OrderedDict()
    hits = misses = 0
    for group in groups:
        present = [key for key in group.keys if key in kept]
        hits, misses = hits + group.counts * len(present), misses + group.counts * (len(group.keys) - len(present))
        for key in (*present, *(key for key in group.keys if key not in kept)):
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > size:
            kept.popitem(last=False)
    return hits, misses


def lfu(groups: Sequence[Group], size: int) -> tuple[int, int]:
    """(hits, misses) where the least often used leaves, counted from the start; of equal ones the least recently used."""
    kept: set[Hashable] = set()
    used: dict[Hashable, tuple[int, int]] = {}
    hits = misses = 0
    for now, group in enumerate(groups):
        present = sum(key in kept for key in group.keys)
        hits, misses = hits + group.counts * present, misses + group.counts * (len(group.keys) - present)
        for key in group.keys:
            used[key] = used.get(key, (0, 0))[0] + 1, now
        kept.update(group.keys)
        while len(kept) > size:
            kept.remove(min(kept, key=lambda key: (*used[key], str(key))))
    return hits, misses


def belady(groups: Sequence[Group], size: int) -> tuple[int, int]:
    """(hits, misses) of the best possible cache, which knows the future: what is used again last leaves.

    It may also leave out what it was just asked for.
    """
    upcoming: dict[Hashable, list[int]] = {}
    for at in range(len(groups) - 1, -1, -1):
        for key in groups[at].keys:
            upcoming.setdefault(key, []).append(at)
    kept: set[Hashable] = set()
    hits = misses = 0
    never = len(groups)
    for group in groups:
        present = sum(key in kept for key in group.keys)
        hits, misses = hits + group.counts * present, misses + group.counts * (len(group.keys) - present)
        for key in group.keys:
            upcoming[key].pop()
        kept.update(group.keys)
        if len(kept) > size:
            ranked = sorted(kept, key=lambda key: (upcoming[key][-1] if upcoming[key] else never, str(key)))
            kept = set(ranked[:size])
    return hits, misses


POLICIES: dict[str, Callable[[Sequence[Group], int], tuple[int, int]]] = {"lru": lru, "lfu": lfu, "belady": belady}


def groups_of(tables: Tables, phase: str | None = None) -> list[Group]:
    """What each layer of each step asked for, (layer, expert) pairs, in order; only those of `phase` count, where it is given."""
    rows = activations(tables).sort_values(["token_id", "layer", "expert"])
    phases = tables["tokens"].set_index("token_id")["phase"].reindex(rows["token_id"]).tolist()
    columns = (rows[name].tolist() for name in ("token_id", "layer", "expert"))
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    counts: dict[tuple[int, int], bool] = {}
    for token, layer, expert, its_phase in zip(*columns, phases, strict=True):
        found.setdefault((token, layer), []).append((layer, expert))
        counts[token, layer] = phase is None or its_phase == phase
    return [Group(tuple(pairs), counts[place]) for place, pairs in found.items()]


def curves(tables: Tables, sizes: Sequence[int] | None = None, phase: str | None = None) -> pd.DataFrame:
    """Hit rate by cache size: slots, share (of all experts seen), lru, lfu, belady. By default at eighths of what was seen."""
    groups = groups_of(tables, phase)
    seen = len({pair for group in groups for pair in group.keys})
    chosen = sorted({max(1, seen * i // 8) for i in range(1, 9)}) if sizes is None else sorted(set(sizes))
    rows = []
    for size in chosen if groups else ():
        rates = {}
        for name, policy in POLICIES.items():
            hits, misses = policy(groups, size)
            rates[name] = hits / (hits + misses) if hits + misses else np.nan
        rows.append({"slots": size, "share": size / seen, **rates})
    return pd.DataFrame(rows, columns=["slots", "share", *POLICIES])


def slots_for(tables: Tables, rate: float, phase: str | None = None, policy: str = "lru") -> int | None:
    """The fewest slots with which a policy reaches a hit rate; None where even all experts do not."""
    groups = groups_of(tables, phase)
    seen = len({pair for group in groups for pair in group.keys})
    low, high = 1, seen
    if not groups or hit_rate(groups, high, policy) < rate:
        return None
    while low < high:
        middle = (low + high) // 2
        if hit_rate(groups, middle, policy) >= rate:
            high = middle
        else:
            low = middle + 1
    return high


def hit_rate(groups: Sequence[Group], size: int, policy: str) -> float:
    """Hits over all uses."""
    hits, misses = POLICIES[policy](groups, size)
    return hits / (hits + misses) if hits + misses else float("nan")


def expert_bytes(tables: Tables) -> float:
    """Mean size of one expert, from its loads; NaN where none was told."""
    loads = tables["loads"]
    told = loads.loc[(loads["action"] == "load") & (loads["bytes"] > 0), "bytes"]
    return float(told.mean()) if len(told) else float(np.nan)
