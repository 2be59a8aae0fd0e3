"""The expert cache: least recently used, in bytes, with hits counted event-atomically.

One event is one layer of one step. What the cache held when the event began decides whether an expert is a hit or a miss in
it, whatever is loaded or evicted meanwhile, and each expert form counts once for each event. Forms that the event has named or
used are evicted last, forms that run at this moment never.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from runtime.errors import BudgetError
from runtime.probes import Cache, Reason
from runtime.units import show_bytes


class Form(NamedTuple):
    """An expert as one backend runs it: a session of its own. `tier` is the rows of its static shape, 0 where dynamic."""

    layer: int
    expert: int
    backend: int
    tier: int


class Watcher(Protocol):
    """Hears of loads and evictions; `resident` is the bytes held afterwards."""

    def load_begin(self, form: Form, size: int, reason: Reason) -> None:
        """A form is about to be read."""

    def load_end(self, form: Form, size: int, resident: int) -> None:
        """It can run."""

    def evicted(self, form: Form, size: int, resident: int) -> None:
        """Its session is gone."""


Session = TypeVar("Session")


class ExpertCache(Generic[Session]):
    """Sessions of experts within a budget in bytes (None: no limit)."""

    def __init__(self, budget: int | None, size: Callable[[Form], int], load: Callable[[Form], Session], watcher: Watcher):
        self.budget = budget
        self.resident = 0
        self.hits = 0
        self.misses = 0
        self._size, self._load, self._watcher = size, load, watcher
        self._held: OrderedDict[Form, Session] = OrderedDict()
        self._found: frozenset[Form] = frozenset()
        self._named: set[Form] = set()
        self._counted: set[Form] = set()
        self._running: set[Form] = set()

    def __contains__(self, form: Form) -> bool:
        return form in self._held

    def forms(self) -> list[Form]:
        """What is held, least recently used first."""
        return list(self._held)

    def begin_event(self, layer: int) -> None:
        """A layer begins: remember what the cache holds of it."""
        self._found = frozenset(form for form in self._held if form.layer == layer)
        self._named.clear()
        self._counted.clear()

    def name(self, forms: Iterable[Form]) -> None:
        """The event will run these: keep those that are held, as far as the budget allows."""
        self._named.update(forms)

    def state(self, form: Form) -> Cache:
        """Hit or miss, as the cache stood when the event began; counts the form once."""
        hit = form in self._found
        if form not in self._counted:
            self._counted.add(form)
            self.hits += hit
            self.misses += not hit
        return Cache.HIT if hit else Cache.MISS

    def acquire(self, form: Form, reason: Reason = Reason.DEMAND) -> Session:
        """The form's session, loaded if need be. It stays until `release`."""
        self._named.add(form)
        self._running.add(form)
        if form in self._held:
            self._held.move_to_end(form)
        else:
            size = self._size(form)
            self._make_room(form, size)
            self._watcher.load_begin(form, size, reason)
            self._held[form] = self._load(form)
            self.resident += size
            self._watcher.load_end(form, size, self.resident)
        return self._held[form]

    def release(self, form: Form) -> None:
        """The form has run: it may be evicted again."""
        self._running.discard(form)

    def _make_room(self, form: Form, size: int) -> None:
        if self.budget is None:
            return
        while self._held and self.resident + size > self.budget:
            victim = self._victim()
            if victim is None:
                break
            del self._held[victim]
            freed = self._size(victim)
            self.resident -= freed
            self._watcher.evicted(victim, freed, self.resident)
        if self.resident + size > self.budget:
            self._running.discard(form)
            limit = show_bytes(self.budget)
            raise BudgetError(f"expert cache of {limit} has no room for {show_bytes(size)} more: raise --expert-cache")

    def _victim(self) -> Form | None:
        """Least recently used, the running event's own forms last."""
        idle = [form for form in self._held if form not in self._running]
        return next((form for form in idle if form not in self._named), idle[0] if idle else None)
