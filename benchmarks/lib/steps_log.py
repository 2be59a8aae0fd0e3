"""A log of decoded tokens: their times, and the process's reads from storage by then."""

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
    """Writes a file of records; each is readable as soon as its token has ended."""

    def __init__(self, path: Path):
        self._file = path.open("wb", buffering=0)

    def add(self, begin_ns: int) -> None:
        """Log a token that began at `begin_ns` and ends now."""
        end, usage = time.monotonic_ns(), resource.getrusage(resource.RUSAGE_SELF)
        self._file.write(RECORD.pack(begin_ns, end, usage.ru_inblock * SECTOR, usage.ru_majflt))


def read_log(path: Path) -> list[LoggedStep]:
    """The finished steps; empty if nothing was written."""
    raw = path.read_bytes() if path.exists() else b""
    return [LoggedStep(*record) for record in RECORD.iter_unpack(raw[: len(raw) // RECORD.size * RECORD.size])]
