"""A log of decoded tokens: when each one ran, and what storage had brought to the process by then."""

import resource
import struct
import time
from pathlib import Path
from typing import NamedTuple

RECORD = struct.Struct("<QQQQ")
SECTOR = 512  # bytes of a block in getrusage's count


class LoggedStep(NamedTuple):
    """A token: its time, CLOCK_MONOTONIC ns, and the process's bytes read from storage and major faults so far."""

    begin_ns: int
    end_ns: int
    read_bytes: int
    major_faults: int


class StepLog:
    """Writes a file of records; each is there for a reader as soon as its token has ended."""

    def __init__(self, path: Path):
        self._file = path.open("wb", buffering=0)

    def add(self, begin_ns: int) -> None:
        """A token has ended that began then."""
        end, usage = time.monotonic_ns(), resource.getrusage(resource.RUSAGE_SELF)
        self._file.write(RECORD.pack(begin_ns, end, usage.ru_inblock * SECTOR, usage.ru_majflt))


def read_log(path: Path) -> list[LoggedStep]:
    """The steps that have ended; none where nothing was written."""
    raw = path.read_bytes() if path.exists() else b""
    return [LoggedStep(*record) for record in RECORD.iter_unpack(raw[: len(raw) // RECORD.size * RECORD.size])]
