"""Moves records from the buffers to the files: each turn takes whole batches, returns the few to act on, writes the rest."""

import os
import select
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tracer.recording.checksums import Sums
from tracer.recording.format import STREAMS, RecordingError
from tracer.recording.slow_tokens import SlowTokens
from tracer.recording.tokens import Misses, Tokens, column, is_any, kinds_of

LAG_NS = 20_000_000  # by then, records that another CPU was still writing have arrived
QUICK_S, WATCHFUL_S, SLOW_S = 0.02, 0.25, 1.0  # between two turns: while many records arrive; at most, with and without a watch
PASSING = ("task_fork", "task_exit")  # acted on, but the target does not wait for it
BUSY_SHARE, IDLE_SHARE = 1 / 4, 1 / 64  # of a buffer, filled since the last turn


class Buffer(Protocol):
    """The interface of rings and perf buffers."""

    fds: list[int]
    size: int

    def take(self) -> np.ndarray:
        """All finished records as slots; valid until `release`."""
        ...

    def release(self) -> None:
        """Return the space of the taken records."""
        ...

    def lost(self) -> dict[str, int]:
        """Losses by CPU, if the buffer reports them."""
        ...

    def close(self) -> None:
        """Unmap."""
        ...


class SlotFile:
    """A file to which slots are appended, and its checksums."""

    def __init__(self, path: Path):
        self.path, self.bytes = path, 0
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.sums = Sums(path)

    def append(self, slots: np.ndarray) -> None:
        """Append whole slots."""
        data = np.ascontiguousarray(slots).reshape(-1).data
        self.bytes += len(data)
        try:
            written = data
            while written:
                written = written[os.write(self.fd, written) :]
            self.sums.add(data)
        except OSError as error:
            raise RecordingError(f"cannot write {self.path}: {error.strerror}; everything written before is readable") from None

    def close(self) -> None:
        """Close the file."""
        self.sums.close()
        os.close(self.fd)


class Pace:
    """How long to sleep between turns: short while the buffers fill, longer while they do not.

    Urgent records wake it anyway, and so does a buffer that is largely full.
    """

    def __init__(self, slowest: float):
        self.slowest = slowest
        self.seconds = QUICK_S

    def after(self, share: float, answered: bool) -> None:
        """Adapt to the share of a buffer that was filled since the last turn, and to whether the target was answered."""
        if answered:
            self.seconds = min(self.seconds, QUICK_S)
        elif share > BUSY_SHARE:
            self.seconds = max(self.seconds / 2, QUICK_S / 8)
        elif share < IDLE_SHARE:
            self.seconds = min(self.seconds * 2 if self.seconds >= QUICK_S else QUICK_S, self.slowest)
        else:
            self.seconds = min(self.seconds, QUICK_S)


class Drain:
    """The buffers with their files, the token steps seen, and counts of records."""

    def __init__(
        self,
        buffers: dict[str, Buffer],
        folder: Path,
        layouts: dict[str, Any],
        only_slower_ns: int = 0,
        slowest_s: float = SLOW_S,
    ):
        self.buffers, self.layouts = buffers, layouts
        self.files = {name: SlotFile(folder / f"{name}.bin") for name in STREAMS}
        self.tokens = Tokens(layouts)
        self.misses: Misses | None = None
        self.passing = {layouts[name]["kind"] for name in PASSING}
        self.filter = SlowTokens(only_slower_ns, layouts) if only_slower_ns else None
        self.written = np.zeros(256, np.int64)
        self.seen = 0
        self.pace = Pace(slowest_s)
        self._poll = select.epoll()
        for buffer in buffers.values():
            for fd in buffer.fds:
                self.wake_on(fd)

    def wake_on(self, fd: int, once: bool = False) -> None:
        """Have a descriptor end the sleep between turns."""
        self._poll.register(fd, select.EPOLLIN | (select.EPOLLONESHOT if once else 0))

    def sleep(self, most: float) -> None:
        """Sleep until the next turn is due, at most `most` seconds."""
        self._poll.poll(max(0.0, min(self.pace.seconds, most)))

    def turn(self, wanted: tuple[int, ...], last: bool = False) -> list[np.ndarray]:
        """Empty the buffers; returns copies of the slots whose kind is in `wanted`, oldest first."""
        until = time.monotonic_ns() - (0 if last else LAG_NS)
        batches = {name: buffer.take() for name, buffer in self.buffers.items()}
        picked = [slot for batch in batches.values() if len(batch) for slot in batch[is_any(kinds_of(batch), wanted)]]
        picked = [slot.copy() for slot in sorted(picked, key=lambda slot: int(column(slot[None], 0, 8)[0]))]
        self.tokens.read(batches["events"], until)
        if self.misses:
            self.misses.read(batches["events"])
        batches_kept = self.filter.sift(batches, self.tokens, until, last) if self.filter else batches
        for name, slots in batches_kept.items():
            if len(slots):
                self.files[name].append(slots)
                self.written += np.bincount(kinds_of(slots), minlength=256)[:256]
        share = 0.0
        for name, buffer in self.buffers.items():
            share = max(share, batches[name].nbytes / buffer.size)
            self.seen += len(batches[name])
            buffer.release()
        self.pace.after(share, any(int(kinds_of(slot[None])[0]) not in self.passing for slot in picked))
        return picked

    def add(self, slots: np.ndarray) -> None:
        """Append the tracer's own records to the events."""
        self.files["events"].append(slots)
        self.written += np.bincount(kinds_of(slots), minlength=256)[:256]
        self.seen += len(slots)

    def seal(self) -> None:
        """Write the checksums of everything written so far."""
        for file in self.files.values():
            file.sums.seal()

    def counts(self) -> dict[str, int]:
        """Records written so far, by kind."""
        written = self.written
        return {name: int(written[layout["kind"]]) for name, layout in self.layouts.items() if written[layout["kind"]]}

    def bytes_written(self) -> int:
        """Size of the files in bytes."""
        return sum(file.bytes for file in self.files.values())

    def lost_by_cpu(self) -> dict[str, dict[str, int]]:
        """Losses by CPU, if the buffers report them."""
        losses = {name: {cpu: n for cpu, n in buffer.lost().items() if n} for name, buffer in self.buffers.items()}
        return {name: row for name, row in losses.items() if row}

    def close(self) -> None:
        """Close files and buffers."""
        self._poll.close()
        for file in self.files.values():
            file.close()
        for buffer in self.buffers.values():
            buffer.close()
