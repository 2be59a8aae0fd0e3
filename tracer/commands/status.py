"""The status line: decode steps per second, records, losses, cost of the probes, and the levels that are on."""

import sys
import time
from dataclasses import dataclass
from typing import Any

from tracer.recording.cost import probes_lately

EVERY_S, SPARSE_S = 1.0, 5.0  # interval on a terminal, and in a log


@dataclass(frozen=True)
class Reading:
    """The counters at one moment."""

    decode_steps: int
    records: int
    lost: int
    probe_ns: int
    levels: tuple[str, ...]


def status_line(before: Reading, now: Reading, seconds: float) -> str:
    """The status line for the time between two readings."""
    tokens, records = (now.decode_steps - before.decode_steps) / seconds, (now.records - before.records) / seconds
    cost = probes_lately(now.probe_ns - before.probe_ns, seconds)  # a later window may lower the estimate for earlier runs
    parts = (f"{tokens:.1f} decode steps/s", f"{records:,.0f} records/s", f"{now.lost:,} lost", cost)
    return " | ".join((*parts, ",".join(now.levels)))


class Status:
    """Shows the line: rewritten in place on a terminal, elsewhere printed at intervals."""

    def __init__(self) -> None:
        self.live: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self.live.start()
        self._every = EVERY_S if self.live else SPARSE_S
        self._last: Reading | None = None
        self._at = self._due = time.monotonic()

    def show(self, now: Reading) -> None:
        """Add a reading; prints the line if it is due."""
        moment = time.monotonic()
        if self._last is None:
            self._last, self._at, self._due = now, moment, moment + self._every
        if moment < self._due:
            return
        line = status_line(self._last, now, moment - self._at)
        self._last, self._at, self._due = now, moment, moment + self._every
        if self.live:
            from rich.text import Text

            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            print(f"moescope: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the status line."""
        if self.live:
            self.live.stop()
            self.live = None
