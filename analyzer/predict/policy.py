"""The runtime's policies, without its sessions: expert cache, token buffers, chunks, and a predictor for prefetching.

Kept apart from the runtime on purpose (the analyzer imports no engine); tests hold both against each other on the same routes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

URGENT = -float("inf")
EXTRA_SHARE, EXTRA_AT_FIRST, SAVED_AT_MOST = 0.4, 8, 128
"""Of the allowance for prefetching: earned per useful byte; loads given in advance; loads' worth that it holds at most."""


class Form(NamedTuple):
    """An expert in the shape that one unit runs; `tier` 0 is dynamic."""

    layer: int
    expert: int
    unit: str
    tier: int


@dataclass(eq=False)
class Entry:
    """A form that is held or on its way. `urgency`: smaller is sooner. `landed_in`: the layer's event in which its load ended."""

    form: Form
    size: int
    speculative: bool
    urgency: float
    landed_in: int | None = None
    used: bool = False

    @property
    def landed(self) -> bool:
        """Is it there?"""
        return self.landed_in is not None


class Allowance:
    """What prefetching may waste: a useful byte loaded earns a share of one, a byte prefetched in vain costs one."""

    def __init__(self) -> None:
        self._earned, self._largest = 0.0, 0

    def useful(self, size: int) -> None:
        """A router asked for this load."""
        self._largest = max(self._largest, size)
        self._earned = min(self._earned + EXTRA_SHARE * size, SAVED_AT_MOST * self._largest)

    def grants(self, size: int) -> bool:
        """May so much be prefetched? It counts as wasted until it is used."""
        self._largest = max(self._largest, size)
        if self._earned + EXTRA_AT_FIRST * self._largest < size:
            return False
        self._earned -= size
        return True

    def returned(self, size: int) -> None:
        """It was used, or never read."""
        self._earned += size


class Cache:
    """Least recently used, in bytes. Hits count by what was there when the layer began or when its router had chosen.

    The running layer's forms leave last. `background`: loads that a layer names begin beside it. `withdraw`: takes a load that
    has not begun out of its queue, False where it has.
    """

    def __init__(
        self,
        budget: int | None,
        sizes: dict[str, int],
        background: bool = False,
        withdraw: Callable[[Entry], bool] = lambda entry: False,
    ):
        self.budget, self.sizes, self.background, self._withdraw = budget, sizes, background, withdraw
        self.resident = self.peak = self.hits = self.misses = self.event = 0
        self.held: OrderedDict[Form, Entry] = OrderedDict()
        self.allowance = Allowance()
        self._early: set[Form] = set()
        self._named: set[Form] = set()
        self._counted: set[Form] = set()
        self._running: set[Form] = set()
        self._ran: set[Form] = set()

    def begin(self) -> None:
        """A layer begins."""
        self.event += 1
        for marked in (self._early, self._named, self._counted, self._ran):
            marked.clear()

    def ready(self, form: Form) -> bool:
        """Could it run now?"""
        return form in self.held and self.held[form].landed

    def name(self, forms: list[Form]) -> list[Entry]:
        """The layer will run these; returns what is to be loaded in the background for it."""
        self._named.update(forms)
        self._early.update(filter(self.ready, forms))
        asked = []
        for form in forms if self.background else ():
            if form in self.held:
                self.held[form].urgency = URGENT
            elif self._make_room(self.sizes[form.unit], needed=False):
                asked.append(self._begin(form, False, URGENT))
        return asked

    def count(self, form: Form) -> bool:
        """Was it there in time? Counts a form once a layer."""
        entry = self.held.get(form)
        hit = form in self._early or (entry is not None and self._found(entry))
        if form not in self._counted:
            self._counted.add(form)
            self.hits += hit
            self.misses += not hit
        return hit

    def acquire(self, form: Form) -> Entry:
        """The form's place, made if need be; it stays until `release`."""
        self._named.add(form)
        self._running.add(form)
        if form not in self.held:
            self._make_room(self.sizes[form.unit], needed=True)
            self._begin(form, False, URGENT)
        return self.held[form]

    def use(self, entry: Entry) -> None:
        """It runs."""
        if not entry.used:
            entry.used = True
            if entry.speculative:
                self.allowance.returned(entry.size)
            self.allowance.useful(entry.size)
        self.held.move_to_end(entry.form)

    def release(self, form: Form) -> None:
        """It has run."""
        self._running.discard(form)
        self._ran.add(form)

    def prefetch(self, form: Form, urgency: float) -> Entry | None:
        """What is to be loaded for a prediction, where allowance and room permit."""
        if form in self.held:
            self.held[form].urgency = min(self.held[form].urgency, urgency)
            return None
        size = self.sizes[form.unit]
        if not self.allowance.grants(size):
            return None
        if not self._make_room(size, needed=False):
            self.allowance.returned(size)
            return None
        return self._begin(form, True, urgency)

    def landed(self, entry: Entry) -> None:
        """Its load has ended."""
        entry.landed_in = self.event

    def _begin(self, form: Form, speculative: bool, urgency: float) -> Entry:
        entry = self.held[form] = Entry(form, self.sizes[form.unit], speculative, urgency)
        self.resident += entry.size
        self.peak = max(self.peak, self.resident)
        return entry

    def _found(self, entry: Entry) -> bool:
        return entry.landed_in is not None and entry.landed_in < self.event

    def _make_room(self, size: int, needed: bool) -> bool:
        """Evict until `size` more bytes fit; what is not needed yet takes no room from the layer nor from what is on its way."""
        while self.budget is not None and self.resident + size > self.budget:
            victim = self._victim(needed)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, needed: bool) -> Form | None:
        ran = waits = None
        for form, entry in self.held.items():
            if form in self._running or (not needed and not entry.landed):
                continue
            if form not in self._named:
                return form
            if form in self._ran:
                ran = ran or form
            else:
                waits = waits or form
        return (ran or waits) if needed else None

    def _evict(self, form: Form) -> None:
        entry = self.held.pop(form)
        self.resident -= entry.size
        if self._found(entry):
            self._early.add(form)
        elif entry.speculative and not entry.used and self._withdraw(entry):
            self.allowance.returned(entry.size)


class Buffers:
    """Rows that wait with their expert until `tier` of them make a batch; None: until the flush."""

    def __init__(self, experts: int, tier: int | None):
        self.tier = tier
        self._waiting = np.zeros(experts, np.int64)

    def add(self, chosen: np.ndarray) -> list[tuple[int, int]]:
        """Batches (expert, rows) that became full by a chunk's choices [rows, k]."""
        experts, counts = np.unique(chosen, return_counts=True)
        full = []
        self._waiting[experts] += counts
        if self.tier is not None:
            for expert in experts.tolist():
                whole = int(self._waiting[expert]) // self.tier
                self._waiting[expert] -= whole * self.tier
                full += [(expert, self.tier)] * whole
        return full

    def flush(self) -> list[tuple[int, int]]:
        """What still waits, one batch for each expert."""
        left = [(expert, int(rows)) for expert, rows in enumerate(self._waiting) if rows]
        self._waiting[:] = 0
        return left


def chunks(n: int, rows: int, static: bool) -> Iterator[slice]:
    """Rows of a step, `rows` at a time; where shapes are dynamic a single row joins its neighbours."""
    if not static and n > 1:
        rows = max(rows, 2)
    first = 0
    while first < n:
        last = min(first + rows, n)
        if not static and n - last == 1:
            last = n
        yield slice(first, last)
        first = last


class Predictor:
    """Experts of the next layer from those of this one: how often they followed each other so far in the trace."""

    def __init__(self, layers: int, experts: int):
        self._followed = np.zeros((layers, experts, experts))
        self._seen = np.zeros((layers, experts))

    def probabilities(self, layer: int, chosen: np.ndarray) -> np.ndarray:
        """Share of the time [experts] that layer + 1 used each expert when `chosen` ran in `layer`, averaged over `chosen`."""
        used = np.unique(chosen)
        seen = self._seen[layer, used][:, None]
        return np.asarray(
            np.divide(self._followed[layer, used], seen, where=seen > 0, out=np.zeros_like(self._followed[layer, used])).mean(0)
        )

    def learn(self, layer: int, chosen: np.ndarray, following: np.ndarray) -> None:
        """Layer + 1 used `following`."""
        used = np.unique(chosen)
        self._seen[layer, used] += 1
        self._followed[layer][np.ix_(used, np.unique(following))] += 1
