"""Simulated hit rates of expert caches of any size, from the recorded routing.

Replayed by event: a step requests all experts of a layer at once, and each is a hit or a miss in the cache as it was when the
layer began; experts of one event do not evict each other if the cache can hold them all. Slots are shared by all
layers: one cache of (layer, expert) pairs. If a phase is given, only its events count; the others, like the prompt's, still fill
the cache. Sizes are in bytes where the recording has those of its experts, by layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analyzer.questions.expert_loads import layer_bytes
from analyzer.questions.experts import activations
from analyzer.questions.replays import Requests, belady, belady_with_bypass, lfru, lfu, lru, nearest_reuse
from analyzer.records.schema import Tables
from analyzer.tables.store import answered_once
from runtime.cache_rules.replay import Outcome

POLICIES: dict[str, Callable[[Requests, int], Outcome]] = {
    "lru": lru,
    "lfu": lfu,
    "belady": belady_with_bypass,
    "lfru": lfru,
    "belady_without_bypass": belady,
}
"""`belady` is the optimal cache: like `lfu` it may decline to cache a requested expert. The last two and `lru` may not."""
SHOWN = ("lru", "lfu", "belady")
MIB = 2**20


@answered_once
def requests_of(tables: Tables, phase: str | None = None) -> Requests:
    """The requests of each layer of each step, in order; if `phase` is given, only its events count.

    Keys are numbers of (layer, expert) pairs, in their order. Bytes are known if the recording has those of every layer.
    """
    rows, bytes_of = activations(tables), layer_bytes(tables)
    keys, pairs = rows.groupby(["layer", "expert"]).ngroup().to_numpy(), rows[["layer", "expert"]].drop_duplicates()
    begins = np.flatnonzero((rows[["token_id", "layer"]].diff() != 0).any(axis=1))
    phases = tables["tokens"].set_index("token_id")["phase"].reindex(rows["token_id"].iloc[begins])
    counts = np.full(len(begins), True) if phase is None else (phases == phase).to_numpy(bool)
    sizes = pairs.sort_values(["layer", "expert"])["layer"].map(bytes_of)
    known = len(rows) > 0 and bool(sizes.notna().all())
    return Requests(np.append(begins, len(rows)), keys, counts, sizes.to_numpy(np.int64) if known else None, len(pairs))


def hit_rate_curves(
    tables: Tables, sizes: Sequence[int] | None = None, phase: str | None = None, policies: Sequence[str] = SHOWN
) -> pd.DataFrame:
    """Hit rate by cache size, a row per size and a column per policy; then `POLICY_read_mib`, MiB of the experts missed.

    sizes: budgets in bytes, or numbers of experts if their bytes are not recorded. Default: eighths of all.
    slots: experts of mean size that fit; share: of all experts seen; budget_mib: NaN like the reads if bytes are unknown.
    """
    requests = requests_of(tables, phase)
    known, count, total = requests.sizes is not None, requests.experts, int(requests.weights.sum())
    chosen = sorted({max(1, total * i // 8) for i in range(1, 9)}) if sizes is None else sorted(set(sizes))
    names = [*(f"{name}_read_mib" for name in policies)]
    rows = []
    for size in chosen if count else ():
        outcomes = [POLICIES[name](requests, size) for name in policies]
        rates = [outcome.hit_rate for outcome in outcomes]
        read = [outcome.read_bytes / MIB if known else np.nan for outcome in outcomes]
        fits = round(size * count / total)
        rows.append((fits, size / total, size / MIB if known else np.nan, *rates, *read))
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
    requests = requests_of(tables, "decode")
    known = requests.sizes is not None
    sizes = rows["layer"].map(layer_bytes(tables)) if known else 1
    asked = rows.assign(size=sizes).groupby("token_id")["size"].agg(["size", "sum"])
    most = int(asked["sum"].max())
    low, high = 0, min(most, nearest_reuse(requests) or most)
    if lru(requests, high - 1).hits == 0:
        low = high - 1
    while high - low > requests.weights.min():
        middle = (low + high) // 2
        low, high = (middle, high) if lru(requests, middle).hits == 0 else (low, middle)
    return Cliff(int(asked["size"].max()), float(most) if known else float("nan"), low)


def slots_for(tables: Tables, rate: float, phase: str | None = None) -> int | None:
    """The smallest number of experts for which LRU reaches a hit rate; None if even all do not."""
    requests = replace(requests_of(tables, phase), sizes=None)
    low, high = 1, requests.experts
    if not high or lru(requests, high).hit_rate < rate:
        return None
    while low < high:
        middle = (low + high) // 2
        if lru(requests, middle).hit_rate >= rate:
            high = middle
        else:
            low = middle + 1
    return high


def expert_bytes(tables: Tables) -> float:
    """Mean size of one expert over the layers, from recorded loads; NaN without any."""
    sizes = layer_bytes(tables)
    return float(np.mean([*sizes.values()])) if sizes else float(np.nan)
