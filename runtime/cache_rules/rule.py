"""The expert cache's rule: a budget in bytes, an eviction policy, and hits counted event-atomically.

One event is one layer of one step. The cache's content when the event began decides whether an expert is a hit or a miss,
whatever is loaded or evicted meanwhile, and each expert form counts once per event; a form that a prefetch loaded before the
router had chosen counts as prefetched. Forms that the event has named or used are evicted last, running forms never. A
prediction decides what is loaded early, never what is evicted: only the policy makes room for it, and it may displace neither
what the event needs nor what is still being loaded.

By itself, the rule's loads take no time: that is the replay. The engine's cache adds threads and sessions, the simulator a clock.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NoReturn, TypeVar

import numpy as np

from runtime.cache_rules.eviction import LRU, Policy
from runtime.cache_rules.forms import Cache, Form, Reason

URGENT = -float("inf")
EXTRA_SHARE = 0.4
EXTRA_AT_FIRST = 8  # loads that may be wasted before anything was earned
LARGE_EXPERT = 1 << 20
"""Bytes of an expert from which a read takes far longer than waking a thread or predicting with the layers' own routers."""
PIECE = 8 << 20
"""Bytes that a loader reads at a time; a more urgent load may run between two pieces. Smaller ones make a disk slower."""
SAVED_AT_MOST = 128  # maximum allowance, in loads, that quiet times save up


class Allowance:
    """Bounds what prefetching may waste: a useful byte loaded earns EXTRA_SHARE of one, an unused one costs one."""

    def __init__(self) -> None:
        self._earned: float = 0
        self._largest = 0

    def useful(self, size: int) -> None:
        """Add a load that a router requested, or a prefetched form that was used."""
        self._largest = max(self._largest, size)
        self._earned = min(self._earned + EXTRA_SHARE * size, SAVED_AT_MOST * self._largest)

    def grants(self, size: int) -> bool:
        """Whether a form of this size may be prefetched; if so, it counts as wasted until it is used."""
        self._largest = max(self._largest, size)
        if self._earned + EXTRA_AT_FIRST * self._largest < size:
            return False
        self._earned -= size
        return True

    def returned(self, size: int) -> None:
        """Take back the cost of a prefetch that was used, or cancelled before it read anything."""
        self._earned += size


class Entry:
    """A form that is held or being loaded. `urgency`: smaller is sooner. `reading`: its load has begun, and `landed`: it has
    ended, in the event `landed_in`.
    """

    def __init__(self, form: Form, size: int, reason: Reason, urgency: float):
        self.form, self.size, self.reason, self.urgency = form, size, reason, urgency
        self.used = self.reading = self.landed = False
        self.landed_in = -1

    @property
    def unused_prefetch(self) -> bool:
        """Whether it was prefetched and has not been used yet."""
        return self.reason == Reason.PREFETCH and not self.used

    def preceded(self, event: int) -> bool:
        """Whether it was resident when the event began."""
        return self.landed and self.landed_in < event


E = TypeVar("E", bound=Entry)


class CacheRule(Generic[E]):
    """The forms held within a budget in bytes (None: no limit), for one thread at a time. `background`: loads may precede use.

    `reserved`: bytes held or being loaded, `peak` their maximum. `begun`: loads for any reason. `load_ns`: a load's mean time.
    """

    def __init__(
        self,
        budget: int | None,
        size: Callable[[Form], int],
        make: Callable[[Form, int, Reason, float], E],
        policy: Policy | None = None,
        background: bool = False,
    ):
        self.budget, self.policy, self.background = budget, policy or LRU(), background
        self.reserved = self.peak = self.begun = self.event = 0
        self.hits = self.misses = self.prefetched = 0
        self.load_ns: float = 0.0
        self.allowance = Allowance()
        self._size, self._make = size, make
        self._held: dict[Form, E] = {}
        self._by_layer: defaultdict[int, set[Form]] = defaultdict(set)
        self._absent: np.ndarray | None = None
        self._running: set[Form] = set()
        self._of_event: dict[Form, bool] = {}  # the forms that the event named or used, and whether each has run
        self._in_time: set[Form] = set()  # those that were resident before the event had to load anything
        self._counted: set[Form] = set()  # those whose state is in `hits` or `misses`

    def __contains__(self, form: Form) -> bool:
        return form in self._held

    def ready(self, form: Form) -> bool:
        """Whether the form could run now."""
        entry = self._held.get(form)
        return entry is not None and entry.landed

    def forms(self) -> list[Form]:
        """The held forms, first to be evicted first."""
        return list(self.policy.order())

    def begin_event(self) -> None:
        """Begin an event (a layer): forms loaded by now were resident in time."""
        self.event += 1
        self._of_event.clear()
        self._in_time.clear()
        self._counted.clear()

    def name(self, forms: Sequence[Form]) -> int:
        """Announce forms that the event will run: keep held ones, as far as the budget allows, and request the others.

        An event may do so several times, as its choices become known: a form counts as resident by the first time.
                Returns the number of loads that began.
        """
        before = self.begun
        new = [form for form in forms if form not in self._of_event]
        self._of_event.update(dict.fromkeys(new, False))
        self._in_time.update(filter(self.ready, new))
        for form in forms if self.background else ():
            entry = self._held.get(form)
            if entry is not None:
                entry.urgency = URGENT
            elif self._make_room(self._size(form), needed=False):
                self._queue(self._begin(form, Reason.DEMAND, URGENT))
        return self.begun - before

    def state(self, form: Form) -> Cache:
        """Hit, prefetched or miss, by the cache's state when the router had chosen; counts the form once."""
        entry = self._held.get(form)
        in_time = form in self._in_time or (entry is not None and entry.preceded(self.event))
        unused = entry is not None and entry.unused_prefetch
        state = Cache.MISS if not in_time else Cache.PREFETCHED if unused else Cache.HIT
        if form not in self._counted:
            self._counted.add(form)
            self.hits += in_time
            self.misses += not in_time
            self.prefetched += state is Cache.PREFETCHED
        return state

    def resident_first(self, forms: Sequence[Form]) -> Iterator[int]:
        """Indices into `forms`, resident ones first, so that no load evicts a form about to run, and loaded ones run at once.

        Then comes one that is being read: another read beside it, on the caller's thread, would only delay it.
        """
        waiting = list(range(len(forms)))
        while waiting:
            i = next(filter(lambda i: self.ready(forms[i]), waiting), None)
            if i is None:
                i = next(filter(lambda i: self._reading(forms[i]), waiting), waiting[0])
            waiting.remove(i)
            yield i

    def hold(self, form: Form, reason: Reason = Reason.DEMAND) -> E:
        """The form's entry, created if needed, whether or not its load has ended. It is kept until `release`."""
        self._of_event.setdefault(form, False)
        self._running.add(form)
        entry = self._held.get(form)
        if entry is None:
            size = self._size(form)
            if not self._make_room(size, needed=True):
                self._refuse(size)
            entry = self._begin(form, reason, URGENT)
        return entry

    def land(self, entry: E) -> None:
        """The entry's load has ended."""
        entry.landed_in, entry.landed = self.event, True

    def use(self, entry: E) -> None:
        """The entry runs: its load was useful."""
        first = not entry.used
        if first:
            if entry.unused_prefetch:
                self.allowance.returned(entry.size)
            entry.used = True
            self.allowance.useful(entry.size)
        self.policy.used(entry.form, loaded_for_it=first)

    def release(self, form: Form) -> None:
        """The form has run: it may be evicted again."""
        self._running.discard(form)
        if form in self._of_event:
            self._of_event[form] = True

    def prefetch(self, form: Form, urgency: float) -> bool:
        """Load the form in the background, if allowance and room permit; if a load was requested, only change its urgency."""
        entry = self._held.get(form)
        if entry is not None:
            entry.urgency = min(urgency, entry.urgency)
            return True
        size = self._size(form)
        if not self.background or not self.allowance.grants(size):
            return False
        if not self._make_room(size, needed=False):
            self.allowance.returned(size)
            return False
        self._queue(self._begin(form, Reason.PREFETCH, urgency))
        return True

    def cancel(self, form: Form) -> bool:
        """Cancel a prefetch that has not begun to read."""
        entry = self._held.get(form)
        if entry is None or not entry.unused_prefetch or not self._withdraw(entry):
            return False
        self._forget(entry)
        self.allowance.returned(entry.size)
        return True

    @property
    def idle(self) -> bool:
        """Whether no load is waiting."""
        return True

    @property
    def busy(self) -> bool:
        """Whether another load would have to wait."""
        return False

    def absent(self, layers: int, experts: int) -> np.ndarray:
        """[layers, E] bool, kept up to date: experts that are neither held nor being loaded, in any form."""
        self._absent = np.ones((layers, experts), bool)
        for form in self._held:
            self._absent[form.layer, form.expert] = False
        return self._absent

    def waiting(self, layer: int) -> list[int]:
        """Experts of the layer that were prefetched and not used yet."""
        if self.idle:
            return []
        entries = (self._held[form] for form in self._by_layer[layer])
        return [entry.form.expert for entry in entries if not entry.used and not entry.landed]

    def _reading(self, form: Form) -> bool:
        entry = self._held.get(form)
        return entry is not None and entry.reading

    def _queue(self, entry: E) -> None:
        """Load the entry in the background."""
        self.land(entry)

    def _withdraw(self, entry: E) -> bool:
        """Withdraw a load; False if it has begun to read."""
        return False

    def _dropped(self, entry: E) -> None:
        """The entry was evicted."""

    def _refuse(self, size: int) -> NoReturn:
        raise MemoryError(f"an expert cache of {self.budget} bytes has no room for {size} more beside the running experts")

    def _begin(self, form: Form, reason: Reason, urgency: float) -> E:
        size = self._size(form)
        entry = self._make(form, size, reason, urgency)
        self._keep(entry)
        self.begun += 1
        self.policy.used(form)
        return entry

    def _keep(self, entry: E) -> None:
        form = entry.form
        self._held[form] = entry
        self._by_layer[form.layer].add(form)
        if self._absent is not None:
            self._absent[form.layer, form.expert] = False
        self.reserved += entry.size
        self.peak = max(self.peak, self.reserved)

    def _make_room(self, size: int, needed: bool) -> bool:
        """Evict until `size` more bytes fit; unless `needed`, displace neither the event's forms nor other prefetches."""
        if self.budget is None:
            return True
        while self.reserved + size > self.budget:
            victim = self._victim(needed)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, needed: bool) -> Form | None:
        """The next form to evict by the policy. If one of the event's own is needed: one that has run, else one that waits."""
        own: dict[bool, Form] = {}
        for form in self.policy.order():
            if form in self._running or (not needed and not self._held[form].landed):
                continue
            has_run = self._of_event.get(form)
            if has_run is None:
                return form
            own.setdefault(has_run, form)
        return own.get(True, own.get(False)) if needed else None

    def _evict(self, form: Form) -> None:
        if not self.cancel(form):
            entry = self._held[form]
            self._forget(entry)
            self._dropped(entry)

    def _forget(self, entry: E) -> None:
        form = entry.form
        del self._held[form]
        if entry.preceded(self.event):
            self._in_time.add(form)
        self._by_layer[form.layer].discard(form)
        if self._absent is not None:
            self._absent[form.layer, form.expert] = True
        self.policy.left(form)
        self.reserved -= entry.size
