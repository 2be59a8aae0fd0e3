"""Performance counters per thread: events by perf's names or raw codes, opened for every thread of the target."""

import contextlib
import os
import resource
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracer.errors import TracerError
from tracer.kernel.definitions import constant
from tracer.kernel.libbpf import Kernel
from tracer.probes.perf_events import ATTR_BYTES, PERF_TYPE_SOFTWARE, open_event

HARDWARE, CACHE, RAW = 0, 3, 4
PINNED = 1 << 2

HARDWARE_EVENTS = {
    "cycles": 0,
    "cpu-cycles": 0,
    "instructions": 1,
    "cache-references": 2,
    "cache-misses": 3,
    "branches": 4,
    "branch-instructions": 4,
    "branch-misses": 5,
    "bus-cycles": 6,
    "stalled-cycles-frontend": 7,
    "idle-cycles-frontend": 7,
    "stalled-cycles-backend": 8,
    "idle-cycles-backend": 8,
    "ref-cycles": 9,
}
SOFTWARE_EVENTS = {
    "cpu-clock": 0,
    "task-clock": 1,
    "page-faults": 2,
    "faults": 2,
    "context-switches": 3,
    "cs": 3,
    "cpu-migrations": 4,
    "migrations": 4,
    "minor-faults": 5,
    "major-faults": 6,
    "alignment-faults": 7,
    "emulation-faults": 8,
    "cgroup-switches": 11,
}
CACHES = ("L1-dcache", "L1-icache", "LLC", "dTLB", "iTLB", "branch", "node")
CACHE_OPERATIONS = {"loads": (0, 0), "load-misses": (0, 1), "stores": (1, 0), "store-misses": (1, 1)} | {
    "prefetches": (2, 0),
    "prefetch-misses": (2, 1),
}
CACHE_EVENTS = {
    f"{cache}-{operation}": number | kind << 8 | result << 16
    for number, cache in enumerate(CACHES)
    for operation, (kind, result) in CACHE_OPERATIONS.items()
}
NAMED = {
    name: (kind, config)
    for kind, events in ((HARDWARE, HARDWARE_EVENTS), (PERF_TYPE_SOFTWARE, SOFTWARE_EVENTS), (CACHE, CACHE_EVENTS))
    for name, config in events.items()
}


@dataclass(frozen=True)
class Event:
    """An event: the user's name for it, perf's type and config."""

    name: str
    type: int
    config: int

    @property
    def word(self) -> str:
        """The event as moescope-collect takes it."""
        return f"{self.name}={self.type}:{self.config:x}"

    def open(self, tid: int) -> int:
        """Count the event on one thread, on any CPU, until the returned descriptor is closed. Raises OSError.

        The event is pinned: it either counts all the time or reports that the PMU has no room; it is never extrapolated.
        """
        head = struct.pack("<IIQQQQQ", self.type, ATTR_BYTES, self.config, 0, 0, 0, PINNED)
        return open_event(head.ljust(ATTR_BYTES, b"\0"), tid, -1)

    def works(self) -> bool:
        """Whether this machine can count the event."""
        try:
            os.close(self.open(0))
        except OSError:
            return False
        return True


def raw_config(name: str) -> int | None:
    """The config of a raw code, `r1c2` or `0x1c2`; None if it exceeds 64 bits."""
    digits = name[2:] if name.startswith("0x") else name[1:] if name.startswith("r") else ""
    with contextlib.suppress(ValueError):
        return int(digits, 16) if digits.isalnum() and int(digits, 16) < 2**64 else None
    return None


def offered() -> list[str]:
    """Names of the events that this machine has, each tested by opening it."""
    return [name for name, (kind, config) in NAMED.items() if Event(name, kind, config).works()]


def parse(names: list[str]) -> tuple[Event, ...]:
    """The events with these names; raises TracerError if one is unknown, absent on this machine, or there are too many."""
    events = named(names, lambda: f"this machine has: {', '.join(offered())}")
    missing = [event.name for event in events if not event.works()]
    if missing:
        raise TracerError(f"this machine does not have the event {', '.join(missing)}; it has: {', '.join(offered())}")
    return events


def named(names: list[str], choice: Callable[[], str] = lambda: f"perf's names: {', '.join(NAMED)}") -> tuple[Event, ...]:
    """The events with these names, whether or not a machine has them; raises TracerError with the `choice` if one is unknown."""
    most = constant("MAX_PMC")
    if len(names) > most:
        raise TracerError(f"--pmc takes at most {most} events, {len(names)} were given")
    return tuple(_event(name, choice) for name in names)


def _event(name: str, choice: Callable[[], str]) -> Event:
    config = raw_config(name)
    kind, config = NAMED.get(name, (RAW, config))
    if config is None:
        raise TracerError(f"unknown event {name!r}; {choice()}, and raw codes where it has a PMU: r1c2 or 0x1c2")
    return Event(name, kind, config)


class Counters:
    """The counters of all threads; the BPF programs find a thread's by its first index in the map `counters`."""

    def __init__(self, kernel: Kernel, map_fds: dict[str, int], events: tuple[Event, ...]):
        self.kernel, self.map_fds, self.events, self.width = kernel, map_fds, events, constant("MAX_PMC")
        self.fds: dict[int, list[int]] = {}  # thread → descriptors
        self.slots: dict[int, int] = {}
        self.free = list(range(constant("MAX_COUNTED_THREADS") - 1, -1, -1))
        self.uncounted = 0  # threads that ended before their counters were opened, or for which there was no room
        if events:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def add(self, tid: int) -> None:
        """Start counting on a thread; one that has already ended adds to `uncounted`."""
        if not self.events or tid in self.fds:
            return
        fds: list[int] = []
        try:
            for event in self.events:
                fds.append(event.open(tid))  # noqa: PERF401 - what was opened before a failure must be closed
            slot = self.free.pop()
        except (OSError, IndexError):
            self.uncounted += 1
            for fd in fds:
                os.close(fd)
            return
        self.fds[tid], self.slots[tid] = fds, slot
        for index, fd in enumerate(fds):
            self._update("counters", slot * self.width + index, fd)
        self._update("counted", tid, slot * self.width)

    def _update(self, name: str, key: int, value: int) -> None:
        self.kernel.update(self.map_fds[name], struct.pack("<I", key), struct.pack("<I", value))

    def remove(self, tid: int) -> None:
        """Stop counting on a thread that has ended."""
        if tid not in self.fds:
            return
        slot = self.slots.pop(tid)
        self.kernel.delete(self.map_fds["counted"], struct.pack("<I", tid))
        for index, fd in enumerate(self.fds.pop(tid)):
            self.kernel.delete(self.map_fds["counters"], struct.pack("<I", slot * self.width + index))
            os.close(fd)
        self.free.append(slot)

    def close(self) -> None:
        """Stop counting everywhere."""
        for tid in list(self.fds):
            self.remove(tid)

    def to_json(self) -> dict[str, Any] | None:
        """The manifest's key `pmc`."""
        if not self.events:
            return None
        rows = [{"name": event.name, "type": event.type, "config": event.config} for event in self.events]
        return {"events": rows, "uncounted_threads": self.uncounted}
