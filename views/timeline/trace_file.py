"""The file of a trace: what is appended at once and what other threads encode, in the order in which it was asked for."""

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
"""A number of events, and the packets that hold them."""


def usable_cpus() -> int:
    """The CPUs on which this process may run."""
    return len(os.sched_getaffinity(0))


class TraceFile:
    """Bytes go to `out` in the order of `emit` and `later`, so that they are the same however many threads there are.

    `threads`: how many work besides the caller, who alone does it all where that is 1. `zipped`: as gzip, a member for each job.
    At most AHEAD jobs for each thread are begun and not written, so that memory stays bounded.
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
        """Start a job; call what is returned for its result. A job may wait for results of jobs that began before it."""
        if self.pool:
            return self.pool.submit(job).result
        result = job()
        return lambda: result

    def emit(self, data: bytes) -> None:
        """Append packets."""
        self.pending += data

    def later(self, job: Callable[[], Packets]) -> None:
        """Append the packets that `job` makes; it may run beside others."""
        pending, self.pending = bytes(self.pending), bytearray()
        self.begun.append(self.begin(lambda: self.packed(pending, job)))
        self.write(self.ahead)

    def packed(self, pending: bytes, job: Callable[[], Packets]) -> Packets:
        """What was appended before a job and what the job makes, as the file has it."""
        events, data = job()
        data = pending + data if pending else data
        return events, gzip.compress(data, GZIP_LEVEL, mtime=0) if self.zipped else data

    def write(self, left: int) -> None:
        """Write what is done, in order, until at most `left` jobs are not written."""
        while len(self.begun) > left:
            events, data = self.begun.popleft()()
            self.events += events
            self.out.write(data)

    def finish(self) -> None:
        """Write what is left."""
        self.later(lambda: (0, b""))
        self.write(0)
