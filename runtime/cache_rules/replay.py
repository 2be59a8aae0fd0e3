"""Replays routing against the rule of the expert cache.

An event is everything that one layer of one step requests; hits are counted against the cache's content when the event began.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from runtime.cache_rules.eviction import Policy
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
    counted = [absent for absent, event in zip(missed, events, strict=True) if event.counts]
    asked, misses = sum(len(event.keys) for event in events if event.counts), sum(map(len, counted))
    return Outcome(asked - misses, misses, misses)
