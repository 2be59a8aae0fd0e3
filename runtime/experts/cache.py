"""The engine's expert cache: the rule of `runtime.cache_rules` with sessions and with loading threads.

One thread at a time uses the cache. With an ExpertLoader, loads run on its threads; without one, on the caller's.
"""

from collections.abc import Callable
from threading import Lock
from time import monotonic_ns
from typing import Generic, NoReturn, Protocol, TypeVar

from runtime.cache_rules.eviction import Policy
from runtime.cache_rules.forms import Form, Reason
from runtime.cache_rules.rule import URGENT, CacheRule, Entry
from runtime.errors import BudgetError
from runtime.experts.loader import ExpertLoader, Ticket
from runtime.units import show_bytes

FRESH = 1 / 16  # share of a new measurement in the mean time of a load


class Watcher(Protocol):
    """Notified of loads and evictions, on the thread that does them; `resident` is the bytes held afterwards."""

    def load_begin(self, form: Form, size: int, reason: Reason) -> None:
        """A form is about to be read."""

    def load_end(self, form: Form, size: int, resident: int) -> None:
        """The form can run."""

    def evicted(self, form: Form, size: int, resident: int) -> None:
        """The form's session was dropped."""

    def waited(self, duration_ns: int) -> None:
        """A layer waited for a load."""


Session = TypeVar("Session")


class Load(Ticket, Entry):
    """A form that is held or being loaded, and the work that loads it. `queued`: it was submitted to the loader."""

    def __init__(self, form: Form, size: int, reason: Reason, urgency: float):
        Ticket.__init__(self, urgency)
        Entry.__init__(self, form, size, reason, urgency)
        self.queued = False


class ExpertCache(CacheRule[Load], Generic[Session]):
    """Sessions of experts within a budget in bytes (None: no limit); `resident`: bytes that are loaded."""

    def __init__(
        self,
        budget: int | None,
        size: Callable[[Form], int],
        load: Callable[[Form], Session],
        watcher: Watcher,
        policy: Policy | None = None,
        loader: ExpertLoader | None = None,
        unload: Callable[[Session], None] = lambda session: None,
    ):
        super().__init__(budget, size, Load, policy, loader is not None)
        self.loader, self.resident = loader, 0
        self._load, self._unload, self._watcher = load, unload, watcher
        self._lock = Lock()

    def acquire(self, form: Form, reason: Reason = Reason.DEMAND) -> Session:
        """The form's session, loaded if needed. It is kept until `release`."""
        try:
            entry = self.hold(form, reason)
            session = self._finished(entry)
        except BaseException:
            self._running.discard(form)
            raise
        self.use(entry)
        return session

    def all_hit(self, forms: int, events: int = 1) -> None:
        """Count events that run `forms` forms each, all resident and never evicted."""
        self.event += events
        self.hits += events * forms

    @property
    def idle(self) -> bool:
        """Whether no load is waiting."""
        return self.loader is None or self.loader.idle

    @property
    def busy(self) -> bool:
        """Whether another load would have to wait."""
        return self.loader is not None and self.loader.busy

    def lend(self, backend: int) -> list[tuple[Form, Session, bool]]:
        """(form, session, whether it is an unused prefetch) of a backend's held forms, which somebody else holds from now on."""
        self.settle()
        entries = [entry for entry in self._held.values() if entry.form.backend == backend]
        for entry in entries:
            self._forget(entry)
        self.begin_event()
        self.resident = self.reserved
        return [(entry.form, entry.value, entry.unused_prefetch) for entry in entries if entry.landed]

    def leave_room(self, size: int) -> None:
        """Evict forms until this number of bytes is left for others."""
        while self.budget is not None and self.reserved + size > self.budget and self._held:
            self._evict(next(iter(self.policy.order())))

    def take_back(self, lent: list[tuple[Form, Session, bool]]) -> None:
        """Hold these forms again; the policy knows them."""
        for form, session, unused in lent:
            entry = self._make(form, self._size(form), Reason.PREFETCH if unused else Reason.DEMAND, URGENT)
            entry.value, entry.landed, entry.used = session, True, not unused
            entry.set_result(session)
            self._keep(entry)
        self.resident = self.reserved

    def settle(self) -> None:
        """Wait for all loads in progress."""
        for entry in list(self._held.values()):
            entry.exception()

    def _begin(self, form: Form, reason: Reason, urgency: float) -> Load:
        entry = super()._begin(form, reason, urgency)
        entry.work = self._work(entry)
        return entry

    def _queue(self, entry: Load) -> None:
        if self.loader:
            entry.queued = True
            self.loader.submit(entry)

    def _withdraw(self, entry: Load) -> bool:
        return self.loader is not None and self.loader.withdraw(entry)

    def _work(self, entry: Load) -> Callable[[], Session]:
        def work() -> Session:
            form, size, began, entry.reading = entry.form, entry.size, monotonic_ns(), True
            self._watcher.load_begin(form, size, entry.reason)
            session = self._load(form)
            entry.landed_in = self.event
            with self._lock:
                took = monotonic_ns() - began
                self.load_ns += FRESH * (took - self.load_ns) if self.load_ns else took
                self.resident += size
                resident = self.resident
            self._watcher.load_end(form, size, resident)
            return session

        return work

    def _finished(self, entry: Load) -> Session:
        """The session of an entry; loads it on this thread unless another thread has begun to."""
        if entry.landed:
            ready: Session = entry.value
            return ready
        began = monotonic_ns()
        if not entry.done() and (not entry.queued or self._withdraw(entry)):
            entry.run()
        entry.exception()
        if entry.reason != Reason.STARTUP:
            self._watcher.waited(monotonic_ns() - began)
        try:
            session: Session = entry.result()
        except BaseException:
            self._forget(entry)
            raise
        return session

    def _dropped(self, entry: Load) -> None:
        if entry.exception() is not None:
            return
        self._unload(entry.result())
        with self._lock:
            self.resident -= entry.size
        self._watcher.evicted(entry.form, entry.size, self.resident)

    def _refuse(self, size: int) -> NoReturn:
        limit = show_bytes(self.budget or 0)
        raise BudgetError(f"expert cache of {limit} has no room for {show_bytes(size)} more: raise --expert-cache")
