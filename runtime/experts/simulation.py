"""Replays routing against caches of a given number of experts, and what the best possible cache would have missed.

A trace is a list of events in order: (layer, experts). An event is atomic: its experts are needed together, and hits are counted
against what the cache held when it began.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.cache_rules import Form, Policy
from runtime.experts.cache import ExpertCache
from runtime.experts.loader import Loader, Ticket
from runtime.telemetry.probes import Reason

Event = tuple[int, tuple[int, ...]]
CPU = 1


@dataclass
class Outcome:
    """Counts of one replay. `reads`: experts loaded, for whatever reason."""

    hits: int = 0
    misses: int = 0
    reads: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the asked experts that were there in time."""
        return self.hits / max(self.hits + self.misses, 1)


class Immediate(Loader):
    """A loader whose loads take no time: what prefetching reaches where the disk keeps up."""

    def __init__(self) -> None:
        super().__init__(0)

    def submit(self, ticket: Ticket) -> None:
        """Load now."""
        ticket.run()

    @property
    def busy(self) -> bool:
        """Never."""
        return False


class Reads:
    """A cache's watcher that counts loads."""

    def __init__(self) -> None:
        self.count = 0

    def load_begin(self, form: Form, size: int, reason: Reason) -> None:
        """Count it."""
        self.count += 1

    def load_end(self, form: Form, size: int, resident: int) -> None:
        """Nothing to count."""

    def evicted(self, form: Form, size: int, resident: int) -> None:
        """Nothing to count."""

    def waited(self, duration_ns: int) -> None:
        """Nothing to count."""


class Replay:
    """The engine's own cache under a trace; every expert has size 1."""

    def __init__(self, capacity: int, policy: Policy, prefetching: bool = False):
        self.reads = Reads()
        loader = Immediate() if prefetching else None
        self.cache: ExpertCache[Form] = ExpertCache(capacity, lambda form: 1, lambda form: form, self.reads, policy, loader)

    def begin(self) -> None:
        """An event begins; prefetches come between this and `run`."""
        self.cache.begin_event()

    def run(self, layer: int, experts: Iterable[int]) -> None:
        """The event's experts are asked for and run."""
        forms = [Form(layer, expert, CPU, 0) for expert in experts]
        self.cache.name(forms)
        for form in forms:
            self.cache.state(form)
            self.cache.acquire(form)
            self.cache.release(form)

    def outcome(self) -> Outcome:
        """What has been counted so far."""
        return Outcome(self.cache.hits, self.cache.misses, self.reads.count)


def replay(trace: Iterable[Event], capacity: int, policy: Policy) -> Outcome:
    """Demand loading alone."""
    played = Replay(capacity, policy)
    for layer, experts in trace:
        played.begin()
        played.run(layer, experts)
    return played.outcome()


def belady(trace: Sequence[Event], capacity: int) -> Outcome:
    """The fewest misses any cache can have: who is needed last, leaves first (Belady, 1966), whole events at a time."""
    later = _next_uses(trace)
    held: dict[tuple[int, int], int] = {}
    outcome = Outcome()
    for (layer, experts), uses in zip(trace, later, strict=True):
        needed = [(layer, expert) for expert in experts]
        found = sum(key in held for key in needed)
        outcome.hits += found
        outcome.misses += len(needed) - found
        for key in needed:
            if key not in held and len(held) >= capacity:
                del held[max((other for other in held if other not in needed), key=held.__getitem__)]
            held[key] = uses[key]
        held.update(uses)
    outcome.reads = outcome.misses
    return outcome


def _next_uses(trace: Sequence[Event]) -> list[dict[tuple[int, int], int]]:
    """For each event, when each of its experts is needed next; the trace's length where never."""
    upcoming: dict[tuple[int, int], int] = {}
    result: list[dict[tuple[int, int], int]] = [{} for _ in trace]
    for i in range(len(trace) - 1, -1, -1):
        layer, experts = trace[i]
        result[i] = {(layer, expert): upcoming.get((layer, expert), len(trace)) for expert in experts}
        upcoming.update(dict.fromkeys(result[i], i))
    return result
