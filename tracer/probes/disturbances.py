"""When the tracer slowed the target beyond the steady cost of its probes: while it placed, removed and learnt them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PLACING, LEARNING, STEPPED = "placing probes", "learning the graph loop", "single-stepped probes"
NEAR_NS = 20_000_000  # spans of one reason that are closer become one: the caches that an attachment emptied take time to fill


class Disturbances:
    """The spans in which probes were placed or removed, as rows of the manifest."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def add(self, begin_ns: int, end_ns: int) -> None:
        """Note that probes were placed, or the target was stopped for it."""
        last = self.spans[-1] if self.spans else None
        if last and begin_ns - last["end_ns"] < NEAR_NS:
            last["begin_ns"], last["end_ns"] = min(last["begin_ns"], begin_ns), max(last["end_ns"], end_ns)
        else:
            self.spans.append(span(begin_ns, end_ns, PLACING))

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Note the time of the enclosed block."""
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(began, time.monotonic_ns())


def span(begin_ns: int, end_ns: int, reason: str) -> dict[str, Any]:
    """A row of the manifest: times of CLOCK_MONOTONIC, and why."""
    return {"begin_ns": begin_ns, "end_ns": end_ns, "reason": reason}
