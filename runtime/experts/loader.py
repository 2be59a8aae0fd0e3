"""Background threads that load experts, the most urgent first. Waiting loads can be made more urgent, cancelled or taken over."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread, local
from typing import Any

from runtime.cache_rules.rule import URGENT


def _no_work() -> None:
    """The work of a ticket that has none."""


class Ticket(Future[Any]):
    """A requested load; `urgency`: smaller is sooner. `landed` (it has a `value`) can be read without a lock."""

    def __init__(self, urgency: float, work: Callable[[], Any] = _no_work):
        super().__init__()
        self.work, self.urgency, self.landed = work, urgency, False
        self.value: Any = None

    def run(self) -> None:
        """Do the work, unless it was cancelled or has begun elsewhere."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.value = self.work()
            self.set_result(self.value)
            self.landed = True
        except BaseException as error:
            self.set_exception(error)
        finally:
            self.work = _no_work  # frees the loaded expert with its last user, not only when cycles are collected


class ExpertLoader:
    """Runs tickets on `threads` threads until `close`."""

    def __init__(self, threads: int = 1):
        self._waiting: list[Ticket] = []
        self._running = 0
        self._lock = Lock()
        self._doing = local()  # `ticket`: the calling thread's current load
        # False for each submitted ticket, True to end a thread. It costs the engine's thread less than a condition variable.
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._threads = [Thread(target=self._serve, name=f"moescope-load-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Submit a load."""
        with self._lock:
            self._waiting.append(ticket)
        self._wake.put(False)

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting."""
        return not self._waiting

    @property
    def busy(self) -> bool:
        """Whether every thread is working."""
        return self._running + len(self._waiting) >= len(self._threads)

    def withdraw(self, ticket: Ticket) -> bool:
        """Remove a load from the queue; False if it has begun."""
        with self._lock:
            if ticket not in self._waiting:
                return False
            self._waiting.remove(ticket)
            return True

    def yield_to_urgent(self) -> None:
        """Called between the pieces of a load, on any thread: a loading thread first runs a load that has become urgent."""
        if self._waiting and getattr(self._doing, "ticket", None) and self._doing.ticket.urgency != URGENT:
            with self._lock:
                urgent = next((ticket for ticket in self._waiting if ticket.urgency == URGENT), None)
                if urgent is None:
                    return
                self._waiting.remove(urgent)
            self._run(urgent)

    def close(self) -> None:
        """Cancel waiting loads and stop after the running ones."""
        with self._lock:
            for ticket in self._waiting:
                ticket.cancel()
            self._waiting.clear()
        for _ in self._threads:
            self._wake.put(True)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while not self._wake.get():
            with self._lock:
                ticket = min(self._waiting, key=lambda waiting: waiting.urgency, default=None)
                if ticket is None:  # withdrawn
                    continue
                self._waiting.remove(ticket)
                self._running += 1
            self._run(ticket)
            with self._lock:
                self._running -= 1

    def _run(self, ticket: Ticket) -> None:
        before, self._doing.ticket = getattr(self._doing, "ticket", None), ticket
        ticket.run()
        self._doing.ticket = before
