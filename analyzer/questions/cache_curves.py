"""Simulated hit rates of expert caches of any size, from the recorded routing.

Replayed by event: a step requests all experts of a layer at once, and each is a hit or a miss in the cache as it was when the
layer began; experts of one event do not evict each other if the cache can hold them all. Slots are shared by all
layers: one cache of (layer, expert) pairs. If a phase is given, only its events count; the others, like the prompt's, still fill
the cache. Sizes are in bytes where the recording has those of its experts, by layer.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analyzer.questions.expert_loads import layer_bytes
from analyzer.questions.experts import activations
from analyzer.records.schema import Tables
from analyzer.tables.store import answered_once
from runtime.cache_rules.replay import Event, Outcome, Sizes, belady, belady_with_bypass, lfru, lfu, lru

POLICIES: dict[str, Callable[[Sequence[Event], int, Sizes], Outcome]] = {
    "lru": lru,
    "lfu": lfu,
    "belady": belady_with_bypass,
    "lfru": lfru,
    "belady_without_bypass": belady,
}
"""`belady` is the optimal cache: like `lfu` it may decline to cache a requested expert. The last two and `lru` may not."""
SHOWN = ("lru", "lfu", "belady")
MIB = 2**20
MOST_BYTES = 2**62


class Requests(NamedTuple):
    """What each layer of each step requested, in order; keys are numbers of (layer, expert) pairs, in the order of these.

    sizes: bytes of each key, None if the recording lacks those of a layer.
    """

    events: tuple[Event, ...]
    sizes: dict[int, int] | None
    keys: int

    @property
    def total(self) -> int:
        """Bytes of all keys; without sizes, their number."""
        return sum(self.sizes.values()) if self.sizes else self.keys


@answered_once
def requests_of(tables: Tables, phase: str | None = None) -> Requests:
    """The recorded requests; if `phase` is given, only its events count."""
    rows, bytes_of = activations(tables), layer_bytes(tables)
    numbers, layers = rows.groupby(["layer", "expert"]).ngroup().to_numpy(), rows["layer"].to_numpy()
    begins = np.flatnonzero((rows[["token_id", "layer"]].diff() != 0).any(axis=1))
    phases = tables["tokens"].set_index("token_id")["phase"].reindex(rows["token_id"].iloc[begins]).tolist()
    asked = np.split(numbers, begins[1:])
    events = tuple(Event(tuple(keys.tolist()), phase in (None, its)) for keys, its in zip(asked, phases, strict=len(rows) > 0))
    known = len(rows) > 0 and set(layers.tolist()) <= bytes_of.keys()
    sizes = {key: bytes_of[layer] for key, layer in zip(numbers.tolist(), layers.tolist(), strict=True)} if known else None
    return Requests(events, sizes, len(np.unique(numbers)))


@contextmanager
def without_collector() -> Iterator[None]:
    """Without searches for cycles: replays make none, only millions of small objects, which take as long to search again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@without_collector()
def hit_rate_curves(
    tables: Tables, sizes: Sequence[int] | None = None, phase: str | None = None, policies: Sequence[str] = SHOWN
) -> pd.DataFrame:
    """Hit rate by cache size, a row per size and a column per policy; then `POLICY_read_mib`, MiB of the experts missed.

    sizes: budgets in bytes, or numbers of experts if their bytes are not recorded. Default: eighths of all.
    slots: experts of mean size that fit; share: of all experts seen; budget_mib: NaN like the reads if bytes are unknown.
    """
    events, size_of, count = requests = requests_of(tables, phase)
    total = requests.total
    chosen = sorted({max(1, total * i // 8) for i in range(1, 9)}) if sizes is None else sorted(set(sizes))
    names = [*(f"{name}_read_mib" for name in policies)]
    rows = []
    for size in chosen if events else ():
        outcomes = [POLICIES[name](events, size, size_of) for name in policies]
        rates = [outcome.hit_rate for outcome in outcomes]
        read = [outcome.read_bytes / MIB if size_of else np.nan for outcome in outcomes]
        fits = round(size * count / total)
        rows.append((fits, size / total, size / MIB if size_of else np.nan, *rates, *read))
    return pd.DataFrame(rows, columns=["slots", "share", "budget_mib", *policies, *names])


@dataclass(frozen=True)
class Cliff:
    """What a decoded token requests in all layers, at most: experts, and bytes (NaN if unknown). In a cache of `nothing_below`
    (bytes, or experts if bytes are unknown) or less, LRU hits nothing in decode: it evicts every expert before its next use.
    """

    experts: int
    bytes: float
    nothing_below: int


def lru_cliff(tables: Tables) -> Cliff | None:
    """The cliff of LRU, to within one expert; None without decoded tokens."""
    rows = activations(tables, "decode")
    if len(rows) == 0:
        return None
    events, size_of, _ = requests_of(tables, "decode")
    sizes = rows["layer"].map(layer_bytes(tables)) if size_of else 1
    asked = rows.assign(size=sizes).groupby("token_id")["size"].agg(["size", "sum"])
    low, high = 0, min(int(asked["sum"].max()), nearest_reuse(events, size_of))
    if lru(events, high - 1, size_of).hits == 0:
        low = high - 1
    while high - low > (min(size_of.values()) if size_of else 1):
        middle = (low + high) // 2
        low, high = (middle, high) if lru(events, middle, size_of).hits == 0 else (low, middle)
    return Cliff(int(asked["size"].max()), float(asked["sum"].max()) if size_of else float("nan"), low)


def nearest_reuse(events: Sequence[Event], size_of: dict[Any, int] | None) -> int:
    """The fewest bytes (or experts) from an expert's request to its next, its own included: LRU hits in a cache of that size.

    Only events that count, without others between them; MOST_BYTES if no expert is requested again.
    """
    total, nearest, last = 0, MOST_BYTES, dict[Any, int]()
    for keys, counts in events:
        if not counts:
            last.clear()
            continue
        nearest = min([nearest, *(total - last[key] for key in keys if key in last)])
        for key in keys:
            last[key] = total
            total += size_of[key] if size_of else 1
    return nearest


def slots_for(tables: Tables, rate: float, phase: str | None = None) -> int | None:
    """The smallest number of experts for which LRU reaches a hit rate; None if even all do not."""
    events, _, n_experts = requests_of(tables, phase)
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
    """Mean size of one expert over the layers, from recorded loads; NaN without any."""
    sizes = layer_bytes(tables)
    return float(np.mean([*sizes.values()])) if sizes else float(np.nan)
