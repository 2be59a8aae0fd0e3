"""Replays routing against caches of a given number of experts, and what the best possible cache would have hit.

An event is what one layer of one step asks for, together: hits are counted against what the cache held when the event began.
There are two best caches. `belady` holds what was just run, as an engine does that runs experts from its cache; what is asked for
again last leaves. `belady_with_bypass` may also drop at once what it was just asked for, so it hits as often or more: it bounds
any cache.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from heapq import nlargest
from typing import Any, NamedTuple

from runtime.cache_rules.eviction import Policy
from runtime.cache_rules.rule import CacheRule, Entry


class Event(NamedTuple):
    """What one layer of one step asks for, each (hashable) key once; whether it counts. What does not still fills the cache."""

    keys: tuple[Any, ...]
    counts: bool = True


class Outcome(NamedTuple):
    """Counts of one replay. `reads`: experts loaded, for whatever reason."""

    hits: int
    misses: int
    reads: int

    @property
    def hit_rate(self) -> float:
        """Share of what was asked for that was there in time; NaN where nothing was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else float("nan")


class Replay:
    """The rule alone under a trace: a load takes no time, and every expert has size 1 unless `size` gives it."""

    def __init__(self, capacity: int, policy: Policy, prefetching: bool = False, size: Callable[[Any], int] = lambda form: 1):
        self.cache: CacheRule[Entry] = CacheRule(capacity, size, Entry, policy, prefetching)

    def begin(self) -> None:
        """An event begins; prefetches come between this and `run`."""
        self.cache.begin_event()

    def run(self, forms: Sequence[Any]) -> None:
        """The event's experts, as forms, are asked for and run."""
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
        """What has been counted so far."""
        return Outcome(self.cache.hits, self.cache.misses, self.cache.begun)


def replay(events: Sequence[Event], capacity: int, policy: Policy) -> Outcome:
    """Demand loading alone, of events whose keys are forms."""
    played, hits = Replay(capacity, policy), []
    for forms, _ in events:
        before = played.cache.hits
        played.begin()
        played.run(forms)
        hits.append(played.cache.hits - before)
    return _counted(events, hits)


def lru(events: Sequence[Event], capacity: int) -> Outcome:
    """What `replay` counts for LRU, for any keys and many times as quick: what was there runs first, then what came."""
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
    """The least often used leaves, counted from the start, be it what was just asked for; of equals the least recently used."""
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
    """The most hits of a cache that holds what it runs: what is needed last leaves first (Belady, 1966), event by event."""
    return _farthest_first(events, capacity, bypass=False)


def belady_with_bypass(events: Sequence[Event], capacity: int) -> Outcome:
    """The most hits of any cache, also of one that omits what it was just asked for."""
    return _farthest_first(events, capacity, bypass=True)


def _farthest_first(events: Sequence[Event], capacity: int, bypass: bool) -> Outcome:
    next_use: dict[Hashable, int] = {}
    hits = []
    for (keys, _), later in zip(events, _next_uses(events), strict=True):
        hits.append(sum(key in next_use for key in keys))
        next_use.update(later)
        excess = len(next_use) - capacity
        if excess > 0:
            # An event that asks for more than fits leaves even a cache without bypass to choose.
            others = next_use if bypass or len(keys) > capacity else next_use.keys() - later.keys()
            for key in nlargest(excess, others, key=next_use.__getitem__):
                del next_use[key]
    return _counted(events, hits)


def _next_uses(events: Sequence[Event]) -> list[dict[Hashable, int]]:
    """For each event, when each of its keys is needed next; the trace's length where never."""
    upcoming: dict[Hashable, int] = {}
    uses: list[dict[Hashable, int]] = [{} for _ in events]
    for i in range(len(events) - 1, -1, -1):
        uses[i] = {key: upcoming.get(key, len(events)) for key in events[i].keys}
        upcoming.update(dict.fromkeys(uses[i], i))
    return uses


def _counted(events: Sequence[Event], hits: list[int]) -> Outcome:
    """`hits` by event. Without prefetching every miss is a read; only events that count are in the sums."""
    hit = sum(count for count, event in zip(hits, events, strict=True) if event.counts)
    asked = sum(len(event.keys) for event in events if event.counts)
    return Outcome(hit, asked - hit, asked - hit)
