"""Replays routing against caches of a given number of experts, and computes the hits of the best possible cache.

An event is everything that one layer of one step requests; hits are counted against the cache's content when the event began.
There are two best caches. `belady` keeps what was just run, like an engine that runs experts from its cache, and evicts what is
requested again last. `belady_with_bypass` may also drop at once what was just requested, so it hits as often or more, and is a
bound for any cache.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from heapq import nlargest
from typing import Any, NamedTuple

from runtime.cache_rules.eviction import Policy
from runtime.cache_rules.rule import CacheRule, Entry


class Event(NamedTuple):
    """What one layer of one step requests, each (hashable) key once, and whether it counts; other events only fill the cache."""

    keys: tuple[Any, ...]
    counts: bool = True


class Outcome(NamedTuple):
    """Counts of one replay. `reads`: experts loaded for any reason."""

    hits: int
    misses: int
    reads: int

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
        for i in cache.readiest_first(forms):
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
    played, hits = Replay(capacity, policy), []
    for forms, _ in events:
        before = played.cache.hits
        played.begin()
        played.run(forms)
        hits.append(played.cache.hits - before)
    return _counted(events, hits)


def lru(events: Sequence[Event], capacity: int) -> Outcome:
    """The counts of `replay` for LRU, for any keys and many times as fast: resident keys run first, then loaded ones."""
    held: OrderedDict[Hashable, None] = OrderedDict()
    hits = []
    for keys, _ in events:
        present = [key for key in keys if key in held]
        hits.append(len(present))
        for key in (*present, *(key for key in keys if key not in held)):
            held[key] = None
            held.move_to_end(key)
        while len(held) > capacity:
            held.popitem(last=False)
    return _counted(events, hits)


def lfu(events: Sequence[Event], capacity: int) -> Outcome:
    """Evicts the key with the fewest uses since the start, even a just requested one; among equals the least recently used."""
    held: set[Hashable] = set()
    used: dict[Hashable, tuple[int, int]] = {}
    hits = []
    for now, (keys, _) in enumerate(events):
        hits.append(sum(key in held for key in keys))
        for key in keys:
            used[key] = used.get(key, (0, 0))[0] + 1, now
        held.update(keys)
        while len(held) > capacity:
            held.remove(min(held, key=lambda key: (*used[key], str(key))))
    return _counted(events, hits)


def belady(events: Sequence[Event], capacity: int) -> Outcome:
    """The most hits of a cache that keeps what it runs: evicts what is needed again last (Belady, 1966), event by event."""
    return _farthest_first(events, capacity, bypass=False)


def belady_with_bypass(events: Sequence[Event], capacity: int) -> Outcome:
    """The most hits of any cache, including those that drop what was just requested."""
    return _farthest_first(events, capacity, bypass=True)


def _farthest_first(events: Sequence[Event], capacity: int, bypass: bool) -> Outcome:
    next_use: dict[Hashable, int] = {}
    hits = []
    for (keys, _), later in zip(events, _next_uses(events), strict=True):
        hits.append(sum(key in next_use for key in keys))
        next_use.update(later)
        excess = len(next_use) - capacity
        if excess > 0:
            # If an event requests more than fits, even a cache without bypass has a choice.
            others = next_use if bypass or len(keys) > capacity else next_use.keys() - later.keys()
            for key in nlargest(excess, others, key=next_use.__getitem__):
                del next_use[key]
    return _counted(events, hits)


def _next_uses(events: Sequence[Event]) -> list[dict[Hashable, int]]:
    """For each event, the index of the event that needs each of its keys next; the trace's length if none does."""
    upcoming: dict[Hashable, int] = {}
    uses: list[dict[Hashable, int]] = [{} for _ in events]
    for i in range(len(events) - 1, -1, -1):
        uses[i] = {key: upcoming.get(key, len(events)) for key in events[i].keys}
        upcoming.update(dict.fromkeys(uses[i], i))
    return uses


def _counted(events: Sequence[Event], hits: list[int]) -> Outcome:
    """The outcome from `hits` per event. Without prefetching every miss is a read; only events that count are summed."""
    hit = sum(count for count, event in zip(hits, events, strict=True) if event.counts)
    asked = sum(len(event.keys) for event in events if event.counts)
    return Outcome(hit, asked - hit, asked - hit)
