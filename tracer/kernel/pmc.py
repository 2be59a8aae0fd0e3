"""Events that performance counters count: perf's names, and raw codes."""

import contextlib
from dataclasses import dataclass

from tracer.errors import TracerError
from tracer.kernel.definitions import constant

HARDWARE, SOFTWARE, CACHE, RAW = 0, 1, 3, 4

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
    for kind, events in ((HARDWARE, HARDWARE_EVENTS), (SOFTWARE, SOFTWARE_EVENTS), (CACHE, CACHE_EVENTS))
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
        """The event as moescope-recorder takes it."""
        return f"{self.name}={self.type}:{self.config:x}"


def raw_config(name: str) -> int | None:
    """The config of a raw code, `r1c2` or `0x1c2`; None if it exceeds 64 bits."""
    digits = name[2:] if name.startswith("0x") else name[1:] if name.startswith("r") else ""
    with contextlib.suppress(ValueError):
        return int(digits, 16) if digits.isalnum() and int(digits, 16) < 2**64 else None
    return None


def events_named(names: list[str]) -> tuple[Event, ...]:
    """The events with these names, whether or not a machine has them; raises TracerError if one is unknown."""
    most = constant("MAX_PMC")
    if len(names) > most:
        raise TracerError(f"--pmc takes at most {most} events, {len(names)} were given")
    return tuple(map(_parse_event, names))


def _parse_event(name: str) -> Event:
    config = raw_config(name)
    kind, config = NAMED.get(name, (RAW, config))
    if config is None:
        raise TracerError(
            f"unknown event {name!r}; perf's names: {', '.join(NAMED)}, and raw codes where it has a PMU: r1c2 or 0x1c2"
        )
    return Event(name, kind, config)
