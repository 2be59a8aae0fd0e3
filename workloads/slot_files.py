"""Writes the files of synthetic recordings as the recorder does: slots, and a checksum for each segment."""

import os
from pathlib import Path

import numpy as np
import xxhash

from tracer.recording.checksums import ENTRY, SEGMENT_BYTES, sums_of


class Sums:
    """The checksums of a growing file."""

    def __init__(self, path: Path):
        self.fd = os.open(sums_of(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.hash, self.sealed, self.end = xxhash.xxh3_64(), 0, 0

    def add(self, data: memoryview) -> None:
        """Account for appended data."""
        self.hash.update(data)
        self.end += len(data)
        if self.end - self.sealed >= SEGMENT_BYTES:
            self.seal()

    def seal(self) -> None:
        """End the current segment, if it is not empty."""
        if self.end > self.sealed:
            os.write(self.fd, np.array((self.end, self.hash.intdigest()), ENTRY).tobytes())
            self.hash, self.sealed = xxhash.xxh3_64(), self.end

    def close(self) -> None:
        """End the last segment."""
        self.seal()
        os.close(self.fd)


class SlotFile:
    """A file to which slots are appended, and its checksums."""

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.sums = Sums(path)

    def append(self, slots: np.ndarray) -> None:
        """Append whole slots."""
        data = np.ascontiguousarray(slots).reshape(-1).data
        os.write(self.fd, data)
        self.sums.add(data)

    def close(self) -> None:
        """Close the file."""
        self.sums.close()
        os.close(self.fd)
