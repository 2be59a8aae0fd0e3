"""The expert cache: a budget in bytes, a policy that says who leaves, and hits counted event-atomically.

One event is one layer of one step. What the cache held when the event began decides whether an expert is a hit or a miss in
it, whatever is loaded or evicted meanwhile, and each expert form counts once for each event; what a prefetch brought before
the router had chosen counts as prefetched. Forms that the event has named or used are evicted last, forms that run at this moment
never.

One thread at a time uses the cache. With a Loader, loads run on its threads; without one, on the caller's. A prediction decides
what is loaded early, never what is evicted: room for it is made by the policy alone, and it may push out neither what the
event needs nor what is still on its way.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from time import monotonic_ns
from typing import Generic, Protocol, TypeVar

import numpy as np

from runtime.cache_rules import LRU, Form, Policy
from runtime.errors import BudgetError
from runtime.experts.loader import URGENT, Loader, Ticket
from runtime.telemetry.probes import Cache, Reason
from runtime.units import show_bytes

__all__ = ["ExpertCache", "Form", "Watcher"]
FRESH = 1 / 16  # share of a new measurement in the mean time of a load
EXTRA_SHARE = 0.4
EXTRA_AT_FIRST = 8  # loads that may be in vain before anything was earned
SAVED_AT_MOST = 128  # loads' worth of allowance that quiet times save up


class Watcher(Protocol):
    """Hears of loads and evictions, on the thread that does them; `resident` is the bytes held afterwards."""

    def load_begin(self, form: Form, size: int, reason: Reason) -> None:
        """A form is about to be read."""

    def load_end(self, form: Form, size: int, resident: int) -> None:
        """It can run."""

    def evicted(self, form: Form, size: int, resident: int) -> None:
        """Its session is gone."""

    def waited(self, duration_ns: int) -> None:
        """A layer stood still for a load."""


Session = TypeVar("Session")


@dataclass
class Entry:
    """A form that is held or on its way. `landed_in`: the event in which its load ended."""

    size: int
    reason: Reason
    ticket: Ticket
    queued: bool
    used: bool = False
    landed_in: int = -1

    def found(self, event: int) -> bool:
        """Was it there when the event began?"""
        return self.ticket.landed and self.landed_in < event


class Allowance:
    """Bounds what prefetching may waste: a useful byte loaded earns EXTRA_SHARE of one, a byte prefetched in vain costs one."""

    def __init__(self, share: float = EXTRA_SHARE):
        self.share = share
        self._earned: float = 0
        self._largest = 0

    def useful(self, size: int) -> None:
        """A load was asked for by a router, or a prefetched form was used."""
        self._largest = max(self._largest, size)
        self._earned = min(self._earned + self.share * size, SAVED_AT_MOST * self._largest)

    def grants(self, size: int) -> bool:
        """May a form of this size be prefetched? It counts as wasted until it is used."""
        self._largest = max(self._largest, size)
        if self._earned + EXTRA_AT_FIRST * self._largest < size:
            return False
        self._earned -= size
        return True

    def returned(self, size: int) -> None:
        """A prefetch was used, or cancelled before it read anything."""
        self._earned += size


class ExpertCache(Generic[Session]):
    """Sessions of experts within a budget in bytes (None: no limit)."""

    def __init__(
        self,
        budget: int | None,
        size: Callable[[Form], int],
        load: Callable[[Form], Session],
        watcher: Watcher,
        policy: Policy | None = None,
        loader: Loader | None = None,
        unload: Callable[[Session], None] = lambda session: None,
    ):
        self.budget, self.loader, self.policy = budget, loader, policy or LRU()
        self.resident = self.reserved = 0
        self.hits = self.misses = self.prefetched = 0
        self.load_ns = 0.0  # mean time of a load
        self.allowance = Allowance()
        self._size, self._load, self._unload, self._watcher = size, load, unload, watcher
        self._held: dict[Form, Entry] = {}
        self._by_layer: defaultdict[int, set[Form]] = defaultdict(set)
        self._absent: np.ndarray | None = None
        self._event = 0
        self._early: set[Form] = set()
        self._named: set[Form] = set()
        self._counted: set[Form] = set()
        self._running: set[Form] = set()
        self._ran: set[Form] = set()
        self._lock = Lock()

    def __contains__(self, form: Form) -> bool:
        return form in self._held

    def ready(self, form: Form) -> bool:
        """Could it run now?"""
        entry = self._held.get(form)
        return entry is not None and entry.ticket.landed

    def forms(self) -> list[Form]:
        """What is held, first to leave first."""
        return list(self.policy.order())

    def begin_event(self) -> None:
        """A layer begins: what has landed until now was there in time."""
        self._event += 1
        self._early.clear()
        self._named.clear()
        self._ran.clear()
        self._counted.clear()

    def name(self, forms: Iterable[Form]) -> None:
        """The event will run these: keep those that are held, as far as the budget allows, and send for the others."""
        wanted = list(forms)
        self._named.update(wanted)
        self._early.update(filter(self.ready, wanted))
        for form in wanted if self.loader else ():
            entry = self._held.get(form)
            if entry is None:
                if self._make_room(self._size(form), needed=False):
                    self._begin(form, Reason.DEMAND, URGENT)
            else:
                entry.ticket.urgency = URGENT

    def state(self, form: Form) -> Cache:
        """Hit, prefetched or miss, as the cache stood when the router had chosen; counts the form once."""
        entry = self._held.get(form)
        in_vain = entry is not None and entry.reason == Reason.PREFETCH and not entry.used
        early = form in self._early or (entry is not None and entry.found(self._event))
        state = Cache.MISS if not early else Cache.PREFETCHED if in_vain else Cache.HIT
        if form not in self._counted:
            self._counted.add(form)
            self.hits += early
            self.misses += not early
            self.prefetched += state is Cache.PREFETCHED
        return state

    def acquire(self, form: Form, reason: Reason = Reason.DEMAND) -> Session:
        """The form's session, loaded if need be. It stays until `release`."""
        self._named.add(form)
        self._running.add(form)
        try:
            if form not in self._held:
                size = self._size(form)
                if not self._make_room(size, needed=True):
                    self._refuse(size)
                self._begin(form, reason, None)
            session = self._finished(form)
        except BaseException:
            self._running.discard(form)
            raise
        self._used(form)
        return session

    def all_there(self, forms: list[Form]) -> list[tuple[Session, Cache]] | None:
        """Their sessions, and what each was found as, where all were there when the event named them.

        They count as used and need no `acquire`: until another event names its own, nothing takes the room of what is named.
        """
        if not (self._early.issuperset(forms) and all(map(self.ready, forms))):
            return None
        if self.budget is None and all(self._held[form].used for form in forms):
            self.hits += len(forms)
            return [(self._held[form].ticket.value, Cache.HIT) for form in forms]
        states = [self.state(form) for form in forms]
        for form in forms:
            self._used(form)
        return [(self._held[form].ticket.value, state) for form, state in zip(forms, states, strict=True)]

    def release(self, form: Form) -> None:
        """The form has run: it may be evicted again."""
        self._running.discard(form)
        self._ran.add(form)

    def prefetch(self, form: Form, urgency: float) -> bool:
        """Load the form in the background, if the allowance and the room permit; on its way already: only change its urgency."""
        entry = self._held.get(form)
        if entry is not None:
            entry.ticket.urgency = min(urgency, entry.ticket.urgency)
            return True
        size = self._size(form)
        if self.loader is None or not self.allowance.grants(size):
            return False
        if not self._make_room(size, needed=False):
            self.allowance.returned(size)
            return False
        self._begin(form, Reason.PREFETCH, urgency)
        return True

    def cancel(self, form: Form) -> bool:
        """Drop a prefetch that has not begun to read."""
        entry = self._held.get(form)
        if entry is None or entry.used or entry.reason != Reason.PREFETCH or not self.loader:
            return False
        if not self.loader.withdraw(entry.ticket):
            return False
        self._forget(form)
        self.allowance.returned(entry.size)
        return True

    @property
    def idle(self) -> bool:
        """Does no load wait?"""
        return self.loader is None or self.loader.idle

    @property
    def busy(self) -> bool:
        """Would another load have to wait?"""
        return self.loader is not None and self.loader.busy

    def absent(self, layers: int, experts: int) -> np.ndarray:
        """[layers, E] bool, kept up to date: which experts are neither held nor on their way, in any form."""
        self._absent = np.ones((layers, experts), bool)
        for form in self._held:
            self._absent[form.layer, form.expert] = False
        return self._absent

    def waiting(self, layer: int) -> list[int]:
        """Experts of the layer that a prefetch has asked for and nobody has used yet."""
        if self.idle:
            return []
        entries = ((form.expert, self._held[form]) for form in self._by_layer[layer])
        return [expert for expert, entry in entries if not entry.used and not entry.ticket.landed]

    def settle(self) -> None:
        """Wait for every load that is under way."""
        for entry in list(self._held.values()):
            entry.ticket.exception()

    def _begin(self, form: Form, reason: Reason, urgency: float | None) -> None:
        size = self._size(form)
        queued = urgency is not None and self.loader is not None
        entry = Entry(size, reason, Ticket(URGENT if urgency is None else urgency), queued)
        entry.ticket.work = self._work(form, entry)
        self._held[form] = entry
        self._by_layer[form.layer].add(form)
        if self._absent is not None:
            self._absent[form.layer, form.expert] = False
        self.reserved += size
        self.policy.used(form)
        if queued and self.loader:
            self.loader.submit(entry.ticket)

    def _work(self, form: Form, entry: Entry) -> Callable[[], Session]:
        def work() -> Session:
            size, began = entry.size, monotonic_ns()
            self._watcher.load_begin(form, size, entry.reason)
            session = self._load(form)
            entry.landed_in = self._event
            with self._lock:
                took = monotonic_ns() - began
                self.load_ns += FRESH * (took - self.load_ns) if self.load_ns else took
                self.resident += size
                resident = self.resident
            self._watcher.load_end(form, size, resident)
            return session

        return work

    def _finished(self, form: Form) -> Session:
        """The session of a form that is held; loads it here where no other thread has begun to."""
        entry = self._held[form]
        if entry.ticket.landed:
            landed: Session = entry.ticket.value
            return landed
        began = monotonic_ns()
        if not entry.ticket.done() and (not entry.queued or (self.loader and self.loader.withdraw(entry.ticket))):
            entry.ticket.run()
        entry.ticket.exception()
        if entry.reason != Reason.STARTUP:
            self._watcher.waited(monotonic_ns() - began)
        try:
            session: Session = entry.ticket.result()
        except BaseException:
            self._forget(form)
            raise
        return session

    def _used(self, form: Form) -> None:
        entry = self._held[form]
        if not entry.used:
            entry.used = True
            if entry.reason == Reason.PREFETCH:
                self.allowance.returned(entry.size)
            self.allowance.useful(entry.size)
        self.policy.used(form)

    def _make_room(self, size: int, needed: bool) -> bool:
        """Evict until `size` more bytes fit; what is not `needed` yet takes no room from the event or from other prefetches."""
        if self.budget is None:
            return True
        while self.reserved + size > self.budget:
            victim = self._victim(needed)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, needed: bool) -> Form | None:
        """By policy; of the running event's own forms those that have run already, and those that wait to run last of all."""
        ran: Form | None = None
        waits: Form | None = None
        for form in self.policy.order():
            if form in self._running or (not needed and not self._held[form].ticket.landed):
                continue
            if form not in self._named:
                return form
            if form in self._ran:
                ran = ran or form
            else:
                waits = waits or form
        return (ran or waits) if needed else None

    def _evict(self, form: Form) -> None:
        if self.cancel(form):
            return
        entry = self._held[form]
        failed = entry.ticket.exception() is not None
        self._forget(form)
        if failed:
            return
        self._unload(entry.ticket.result())
        with self._lock:
            self.resident -= entry.size
        self._watcher.evicted(form, entry.size, self.resident)

    def _forget(self, form: Form) -> None:
        entry = self._held.pop(form)
        if entry.found(self._event):
            self._early.add(form)
        self._by_layer[form.layer].discard(form)
        if self._absent is not None:
            self._absent[form.layer, form.expert] = True
        self.policy.left(form)
        self.reserved -= entry.size

    def _refuse(self, size: int) -> None:
        limit = show_bytes(self.budget or 0)
        raise BudgetError(f"expert cache of {limit} has no room for {show_bytes(size)} more: raise --expert-cache")
