"""Switches levels off and on during a recording, and keeps a row per change for the manifest."""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tracer.probes.attach import Attachments


@dataclass(frozen=True)
class Change:
    """One level switched off or on: when (CLOCK_MONOTONIC), at which decode speed, and why."""

    ts_ns: int
    level: str
    on: bool
    tps: float
    why: str


class Switch:
    """Carries out changes in a thread, since the drain must not wait for the kernel. `changed` is called after each."""

    def __init__(self, probes: Attachments, changed: Callable[[], None]):
        self.probes, self.changed = probes, changed
        self.changes: list[dict[str, Any]] = []
        self.settled_ns = 0
        """When the last change was completed."""
        self._worker: threading.Thread | None = None

    def busy(self) -> bool:
        """Whether a change is in progress."""
        return self._worker is not None and self._worker.is_alive()

    def levels_on(self) -> set[str]:
        """Levels that are currently on."""
        return self.probes.levels - self.probes.shed_levels

    def settled(self, steps: np.ndarray) -> np.ndarray:
        """The complete decode steps among `steps` that began after the last change was completed, ordered by their ends."""
        good = steps[steps["decode"] & steps["complete"] & (steps["begin_ns"] >= self.settled_ns)]
        return good[np.argsort(good["end_ns"])]

    def begin(self, changes: list[Change], done: Callable[[], None] = lambda: None) -> None:
        """Start carrying out changes; `done` is called at the end."""
        rows = [{**asdict(change), "done_ns": None} for change in changes]
        self.changes += rows
        self._worker = threading.Thread(target=self._carry_out, args=(rows, done))
        self._worker.start()

    def _carry_out(self, rows: list[dict[str, Any]], done: Callable[[], None]) -> None:
        self.probes.shed([row["level"] for row in rows if not row["on"]])
        self.probes.restore([row["level"] for row in rows if row["on"]])
        self.changed()
        done()
        self.settled_ns = time.monotonic_ns()
        for row in rows:
            row["done_ns"] = self.settled_ns

    def close(self) -> None:
        """Wait for a change in progress."""
        if self._worker:
            self._worker.join()
