"""Replays routing against caches of a given size, and computes the hits of the best possible cache.

An event is everything that one layer of one step requests; hits are counted against the cache's content when the event began.
There are two best caches. `belady` keeps what was just run, like an engine that runs experts from its cache, and evicts what is
requested again last. `belady_with_bypass` may also drop at once what was just requested, so it hits as often or more, and is a
bound for any cache. Both are exact for experts of one size; with several, the best choice is NP-hard, and they are a guide.

A capacity is a number of experts, or of bytes if `sizes` (bytes of each key) is given. The quick replays take about a microsecond
a request, whatever the capacity: a policy ranks what it holds, a heap keeps ranks, and outdated ones are skipped or renewed.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from runtime.cache_rules.eviction import LFRU, Policy
from runtime.cache_rules.rule import CacheRule, Entry


class Event(NamedTuple):
    """What one layer of one step requests, each (hashable) key once, and whether it counts; other events only fill the cache."""

    keys: tuple[Any, ...]
    counts: bool = True


class Outcome(NamedTuple):
    """Counts of one replay. `reads`: experts loaded for any reason. `read_bytes`: those of missed experts; 0 without sizes."""

    hits: int
    misses: int
    reads: int
    read_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of requests that were resident in time; NaN if there were none."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else float("nan")


class Replay:
    """The cache rule alone on a trace: loads take no time, and every expert has size 1 unless `size` is given."""

    def __init__(self, capacity: int, policy: Policy, prefetching: bool = False, size: Callable[[Any], int] = lambda form: 1):
        self.cache: CacheRule[Entry] = CacheRule(capacity, size, Entry, policy, prefetching)

    def begin(self) -> None:
        """Begin an event; prefetches are made between this and `run`."""
        self.cache.begin_event()

    def run(self, forms: Sequence[Any]) -> None:
        """Request and run the event's experts, given as forms."""
        cache = self.cache
        cache.name(forms)
        for i in cache.resident_first(forms):
            cache.state(forms[i])
            entry = cache.hold(forms[i])
            if not entry.landed:
                cache.land(entry)
            cache.use(entry)
            cache.release(forms[i])

    def outcome(self) -> Outcome:
        """The counts so far."""
        return Outcome(self.cache.hits, self.cache.misses, self.cache.begun)


def replay(events: Sequence[Event], capacity: int, policy: Policy) -> Outcome:
    """Replay events, whose keys are forms, with demand loading only."""
    played, missed = Replay(capacity, policy), []
    for forms, _ in events:
        missed.append([form for form in forms if form not in played.cache])
        played.begin()
        played.run(forms)
    return _count_outcome(events, missed)


Sizes = Mapping[Any, int] | None
Ranks = Callable[[int, list[Any]], Mapping[Any, float]]
"""(number of the event, its keys that were missed) → each key's rank from now on; the lowest is evicted first."""


def lru(events: Sequence[Event], capacity: int, sizes: Sizes = None) -> Outcome:
    """The counts of `replay` for LRU, for any keys and many times as fast: resident keys run first, then loaded ones."""
    held: OrderedDict[Hashable, None] = OrderedDict()
    filled, missed, renew = 0, [], held.move_to_end
    for keys, _ in events:
        absent = []
        for key in keys:
            if key in held:
                renew(key)
            else:
                absent.append(key)
        missed.append(absent)
        held.update(dict.fromkeys(absent))
        filled += sum(map(sizes.__getitem__, absent)) if sizes else len(absent)
        while filled > capacity:
            key, _ = held.popitem(last=False)
            filled -= sizes[key] if sizes else 1
    return _count_outcome(events, missed, sizes)


def lfu(events: Sequence[Event], capacity: int, sizes: Sizes = None) -> Outcome:
    """Evicts the key with the fewest uses since the start, even a just requested one; among equals the least recently used."""
    ranks = _use_ranks(tuple(events))
    return _by_rank(events, capacity, sizes, lambda now, absent: ranks[now], rising=True, bypass=True)


def lfru(events: Sequence[Event], capacity: int, sizes: Sizes = None) -> Outcome:
    """The counts of `replay` for LFRU, for any keys and many times as fast."""
    weigh = LFRU().weigh

    def ranks(now: int, absent: list[Any]) -> dict[Any, float]:
        weights = {key: weigh(key, 1) for key in events[now].keys if key not in absent}
        for key in absent:
            if sizes is None or sizes[key] <= capacity:
                weights[key] = weigh(key, 2)
        return weights

    return _by_rank(events, capacity, sizes, ranks, rising=True)


def belady(events: Sequence[Event], capacity: int, sizes: Sizes = None) -> Outcome:
    """The most hits of a cache that keeps what it runs: evicts what is needed again last (Belady, 1966), event by event."""
    return _farthest_first(events, capacity, sizes, bypass=False)


def belady_with_bypass(events: Sequence[Event], capacity: int, sizes: Sizes = None) -> Outcome:
    """The most hits of any cache, including those that drop what was just requested."""
    return _farthest_first(events, capacity, sizes, bypass=True)


def _farthest_first(events: Sequence[Event], capacity: int, sizes: Sizes, bypass: bool) -> Outcome:
    ranks = _next_uses(tuple(events))
    return _by_rank(events, capacity, sizes, lambda now, absent: ranks[now], rising=False, bypass=bypass)


def _by_rank(events: Sequence[Event], capacity: int, sizes: Sizes, ranks: Ranks, rising: bool, bypass: bool = False) -> Outcome:
    """Evicts by rank; without `bypass`, an event's own keys only if it asks for more than fits, first those that ran.

    rising: each use raises a key's rank, so that its older, lower rank may stay in the heap until it is the lowest there.
    """
    held: dict[Any, float] = {}
    order: list[tuple[float, Any]] = []
    filled, missed = 0, []
    for now, (keys, _) in enumerate(events):
        absent = [key for key in keys if key not in held]
        missed.append(absent)
        rank = ranks(now, absent)
        if not absent and rising:
            held.update(rank)
            continue
        own = []
        for key in keys:
            if key in held:
                value = held[key] = rank[key]
                if not rising:
                    own.append((value, key))
        if absent and not bypass:
            needed = sum(map(sizes.__getitem__, absent)) if sizes else len(absent)
            filled -= _evict_lowest(held, order, sizes, filled + needed - capacity, keys, own)
        for key in absent:
            size = sizes[key] if sizes else 1
            if size > capacity:
                continue
            filled += size
            if filled > capacity and not bypass:
                heapify(own)
                filled -= _evict_lowest(held, own, sizes, filled - capacity)
            value = held[key] = rank[key]
            own.append((value, key))
        for entry in own:
            heappush(order, entry)
        if filled > capacity:
            filled -= _evict_lowest(held, order, sizes, filled - capacity)
    return _count_outcome(events, missed, sizes)


def _evict_lowest(
    held: dict[Any, float],
    order: list[tuple[float, Any]],
    sizes: Sizes,
    excess: int,
    keys: Sequence[Any] = (),
    own: list[tuple[float, Any]] | None = None,
) -> int:
    """Evict the lowest ranks of the heap `order` until their sizes reach `excess` or none is left; returns the sizes' sum.

    Held keys with a higher rank by now get that one; those of the event's `keys` move to `own`.
    """
    freed = 0
    while order and freed < excess:
        value, key = heappop(order)
        rank = held.get(key)
        if rank == value:
            del held[key]
            freed += sizes[key] if sizes else 1
        elif rank is not None and rank > value:
            heappush(own if own is not None and key in keys else order, (rank, key))
    return freed


@lru_cache(maxsize=1)
def _next_uses(events: tuple[Event, ...]) -> list[dict[Hashable, int]]:
    """For each event, minus the index of the event that needs each of its keys next; of the trace's length if none does."""
    upcoming: dict[Hashable, int] = {}
    uses: list[dict[Hashable, int]] = [{} for _ in events]
    for i in range(len(events) - 1, -1, -1):
        uses[i] = {key: -upcoming.get(key, len(events)) for key in events[i].keys}
        upcoming.update(dict.fromkeys(uses[i], i))
    return uses


@lru_cache(maxsize=1)
def _use_ranks(events: tuple[Event, ...]) -> list[dict[Hashable, int]]:
    """For each event, the ranks of its keys by number of uses up to now, then by the event."""
    used: dict[Hashable, int] = {}
    ranks = []
    for now, (keys, _) in enumerate(events):
        used.update({key: used.get(key, 0) + 1 for key in keys})
        ranks.append({key: used[key] * (len(events) + 1) + now for key in keys})
    return ranks


def _count_outcome(events: Sequence[Event], missed: list[list[Any]], sizes: Sizes = None) -> Outcome:
    """The outcome from the keys that each event missed, of events that count. Without prefetching every miss is a read."""
    counted = [absent for absent, event in zip(missed, events, strict=True) if event.counts]
    asked = sum(len(event.keys) for event in events if event.counts)
    misses = sum(map(len, counted))
    read = sum(sizes[key] for absent in counted for key in absent) if sizes else 0
    return Outcome(asked - misses, misses, misses, read)
