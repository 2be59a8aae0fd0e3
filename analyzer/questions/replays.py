"""Replays of requests against an expert cache of a given size, and the hits of the best possible cache.

An event is everything that one layer of one step requests; hits are counted against the cache's content when the event began.
There are two best caches. `belady` keeps what was just run, like an engine that runs experts from its cache, and evicts what is
requested again last. `belady_with_bypass` may also drop at once what was just requested, so it hits as often or more, and is a
bound for any cache. Both are exact for experts of one size; with several, the best choice is NP-hard, and they are a guide.

A policy ranks what is held: the lowest rank is evicted first, of equal ones the lower key. Some rank what a use gives (RANKED may
evict what was just requested, KEEPING only if the event asks for more than fits, first what ran); LFRU and LRU depend on misses.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analyzer.records.loops import loops
from runtime.cache_rules.eviction import LFRU as LFRU_RULE
from runtime.cache_rules.replay import Outcome

RANKED, KEEPING, LFRU, LRU = range(4)
"""By their numbers in analyzer/records/_replay.c."""


@dataclass(frozen=True)
class Requests:
    """What events request: event i the `keys` [requests] from begins[i] to begins[i + 1], numbers of experts, each once.

    counts: whether each event counts, or only fills the cache. sizes: bytes of each key; None if unknown: capacities are then
    numbers of experts.
    """

    begins: np.ndarray
    keys: np.ndarray
    counts: np.ndarray
    sizes: np.ndarray | None
    experts: int

    @property
    def weights(self) -> np.ndarray:
        """What each key takes of a capacity: its bytes, or 1."""
        return np.ones(self.experts, np.int64) if self.sizes is None else self.sizes

    @cached_property
    def event(self) -> np.ndarray:
        """The event of each request."""
        return np.repeat(np.arange(len(self.counts)), np.diff(self.begins))

    @cached_property
    def by_key(self) -> tuple[np.ndarray, np.ndarray]:
        """(the requests by key, in order of time; whether each is its key's first)."""
        order = np.argsort(self.keys, kind="stable")
        return order, np.diff(self.keys[order], prepend=-1) != 0

    @cached_property
    def next_events(self) -> np.ndarray:
        """Of each request, the event that requests its key next; the number of events if none does."""
        order, first = self.by_key
        following = np.full(len(order), len(self.counts))
        following[order[:-1][~first[1:]]] = self.event[order[1:][~first[1:]]]
        return following

    @cached_property
    def uses(self) -> np.ndarray:
        """Of each request, how often its key was requested up to now, this time included."""
        (order, first), place = self.by_key, np.arange(len(self.keys))
        uses = np.empty_like(place)
        uses[order] = place - np.maximum.accumulate(np.where(first, place, 0)) + 1
        return uses


def lru(requests: Requests, capacity: int) -> Outcome:
    """Evicts the least recently used; what an event loads ran after what it found."""
    return _replay(requests, capacity, LRU, np.zeros(len(requests.keys)))


def lfru(requests: Requests, capacity: int) -> Outcome:
    """The runtime's LFRU."""
    return _replay(requests, capacity, LFRU, np.zeros(len(requests.keys)))


def lfu(requests: Requests, capacity: int) -> Outcome:
    """Evicts the key with the fewest uses since the start, even a just requested one; among equals the least recently used."""
    return _replay(requests, capacity, RANKED, requests.uses * (len(requests.counts) + 1.0) + requests.event)


def belady(requests: Requests, capacity: int) -> Outcome:
    """The most hits of a cache that keeps what it runs: evicts what is needed again last (Belady, 1966), event by event."""
    return _replay(requests, capacity, KEEPING, -1.0 * requests.next_events)


def belady_with_bypass(requests: Requests, capacity: int) -> Outcome:
    """The most hits of any cache, including those that drop what was just requested."""
    return _replay(requests, capacity, RANKED, -1.0 * requests.next_events)


def _replay(requests: Requests, capacity: int, policy: int, ranks: np.ndarray) -> Outcome:
    """The counts of events that count. Without prefetching every miss is a read."""
    missed, sizes = np.empty(len(requests.keys), np.int64), requests.weights
    room, rank = np.empty(3 * requests.experts, np.int64), np.full(requests.experts, -np.inf)
    head = policy, len(requests.counts), requests.begins, requests.keys, ranks, LFRU_RULE.HALF_LIFE
    loops.replay(*head, min(capacity, int(sizes.sum())), requests.experts, sizes, room, rank, missed)
    counted = requests.counts[requests.event]
    absent = requests.keys[counted & (missed == 1)]
    misses = len(absent)
    return Outcome(int(counted.sum()) - misses, misses, misses, 0 if requests.sizes is None else int(sizes[absent].sum()))


def nearest_reuse(requests: Requests) -> int | None:
    """The fewest bytes (or experts) from an expert's request to its next, its own included: LRU hits in a cache of that size.

    Only events that count, without others between them; None if no expert is requested again.
    """
    order, first = requests.by_key
    before = np.cumsum(np.append(0, requests.weights[requests.keys]))
    span = before[requests.begins[requests.event[order[1:]]]] - before[order[:-1]]
    series = 2 * np.cumsum(~requests.counts) - ~requests.counts  # equal in events that count without others between them
    again = ~first[1:] & (np.diff(series[requests.event[order]]) == 0)
    return int(span[again].min()) if again.any() else None
