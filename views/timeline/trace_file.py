"""The file of a trace: data that is appended directly and data that other threads encode, in the order of the calls."""

import gzip
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO, TypeVar

GZIP_LEVEL = 3
AHEAD = 8
Result = TypeVar("Result")
Packets = tuple[int, bytes]
"""(number of events, packets with these events)."""


def usable_cpus() -> int:
    """The CPUs on which this process may run."""
    return len(os.sched_getaffinity(0))


class TraceFile:
    """Writes bytes to `out` in the order of `emit` and `later`, so that they do not depend on the number of threads.

    `threads`: number of worker threads; with 1, the caller does all work. `zipped`: as gzip, one member per job.
    At most AHEAD jobs per thread are started but not written, so that memory stays bounded.
    """

    def __init__(self, out: BinaryIO, threads: int, zipped: bool):
        self.out, self.zipped, self.ahead = out, zipped, AHEAD * threads
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self.begun: deque[Callable[[], Packets]] = deque()
        self.pending = bytearray()
        self.events = 0

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def begin(self, job: Callable[[], Result]) -> Callable[[], Result]:
        """Start a job; returns a function that waits for its result. A job may wait for results of earlier jobs."""
        if self.pool:
            return self.pool.submit(job).result
        result = job()
        return lambda: result

    def emit(self, data: bytes) -> None:
        """Append packets."""
        self.pending += data

    def later(self, job: Callable[[], Packets]) -> None:
        """Append the packets that `job` makes; jobs may run concurrently."""
        pending, self.pending = bytes(self.pending), bytearray()
        self.begun.append(self.begin(lambda: self.packed(pending, job)))
        self.write(self.ahead)

    def packed(self, pending: bytes, job: Callable[[], Packets]) -> Packets:
        """The bytes appended before a job and the packets of the job, in the file's format."""
        events, data = job()
        data = pending + data if pending else data
        return events, gzip.compress(data, GZIP_LEVEL, mtime=0) if self.zipped else data

    def write(self, left: int) -> None:
        """Write finished jobs in order, until at most `left` jobs remain."""
        while len(self.begun) > left:
            events, data = self.begun.popleft()()
            self.events += events
            self.out.write(data)

    def finish(self) -> None:
        """Write the remaining jobs."""
        self.later(lambda: (0, b""))
        self.write(0)
