"""What an expert cache of any size would have hit, from the routing alone.

Event by event: a layer's step asks for all its experts at once, and each is a hit or a miss against the cache as it stood when
the layer began; what is asked for together does not evict each other where the cache can hold it. Slots are shared by all
layers: one cache of (layer, expert) pairs.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pandas as pd

from analyzer.experts import activations

Tables = dict[str, pd.DataFrame]
Group = Sequence[Hashable]


def lru(groups: Sequence[Group], size: int) -> tuple[int, int]:
    """(hits, misses) where the least recently used leaves."""
    kept: OrderedDict[Hashable, None] = OrderedDict()
    hits = misses = 0
    for group in groups:
        present = [key for key in group if key in kept]
        hits, misses = hits + len(present), misses + len(group) - len(present)
        for key in (*present, *(key for key in group if key not in kept)):
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
        present = [key for key in group if key in kept]
        hits, misses = hits + len(present), misses + len(group) - len(present)
        for key in group:
            used[key] = used.get(key, (0, 0))[0] + 1, now
        kept.update(group)
        while len(kept) > size:
            kept.remove(min(kept, key=lambda key: (*used[key], str(key))))
    return hits, misses


def belady(groups: Sequence[Group], size: int) -> tuple[int, int]:
    """(hits, misses) of the best possible cache, which knows the future: what is used again last leaves.

    It may also leave out what it was just asked for.
    """
    upcoming: dict[Hashable, list[int]] = {}
    for at in range(len(groups) - 1, -1, -1):
        for key in groups[at]:
            upcoming.setdefault(key, []).append(at)
    kept: set[Hashable] = set()
    hits = misses = 0
    never = len(groups)
    for group in groups:
        present = sum(key in kept for key in group)
        hits, misses = hits + present, misses + len(group) - present
        for key in group:
            upcoming[key].pop()
        kept.update(group)
        if len(kept) > size:
            ranked = sorted(kept, key=lambda key: (upcoming[key][-1] if upcoming[key] else never, str(key)))
            kept = set(ranked[:size])
    return hits, misses


POLICIES: dict[str, Callable[[Sequence[Group], int], tuple[int, int]]] = {"lru": lru, "lfu": lfu, "belady": belady}


def groups_of(tables: Tables, phase: str | None = None) -> list[tuple[tuple[int, int], ...]]:
    """What each layer of each step asked for, (layer, expert) pairs, in the order in which the layers ran."""
    rows = activations(tables, phase).sort_values(["token_id", "layer", "expert"])
    place = list(zip(rows["token_id"].tolist(), rows["layer"].tolist(), strict=True))
    pairs = list(zip(rows["layer"].tolist(), rows["expert"].tolist(), strict=True))
    found: list[list[tuple[int, int]]] = []
    for i, pair in enumerate(pairs):
        if i == 0 or place[i] != place[i - 1]:
            found.append([])
        found[-1].append(pair)
    return [tuple(group) for group in found]


def curves(tables: Tables, sizes: Sequence[int] | None = None, phase: str | None = None) -> pd.DataFrame:
    """Hit rate by cache size: slots, share (of all experts seen), lru, lfu, belady. By default at eighths of what was seen."""
    groups = groups_of(tables, phase)
    seen = len({pair for group in groups for pair in group})
    chosen = sorted({max(1, seen * i // 8) for i in range(1, 9)}) if sizes is None else sorted(set(sizes))
    rows = []
    for size in chosen if groups else ():
        rates = {}
        for name, policy in POLICIES.items():
            hits, misses = policy(groups, size)
            rates[name] = hits / (hits + misses)
        rows.append({"slots": size, "share": size / seen, **rates})
    return pd.DataFrame(rows, columns=["slots", "share", *POLICIES])


def slots_for(tables: Tables, rate: float, phase: str | None = None, policy: str = "lru") -> int | None:
    """The fewest slots with which a policy reaches a hit rate; None where even all experts do not."""
    groups = groups_of(tables, phase)
    seen = len({pair for group in groups for pair in group})
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
