"""Draining a BPF ring buffer of fixed-size records: whole batches from mapped memory to a file, no work per record."""

import contextlib
import mmap
import os
import struct
from pathlib import Path

import numpy as np

from tracer.recording import BUSY, KIND_OFFSET, RecordingError

PAGE = mmap.PAGESIZE
Counts = np.ndarray


class Ring:
    """One ring map, mapped as the kernel lays it out: consumer page, producer page, data twice in a row."""

    def __init__(self, map_fd: int, ring_bytes: int, slot_bytes: int, path: Path):
        self.fd, self.size, self.slot, self.path = map_fd, ring_bytes, slot_bytes, path
        self.consumer = mmap.mmap(map_fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.producer = mmap.mmap(map_fd, PAGE + 2 * ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=PAGE)
        self.slots = np.frombuffer(self.producer, np.uint8, 2 * ring_bytes, PAGE).reshape(-1, slot_bytes)
        self.headers = self.slots[:, :4].view("<u4")[:, 0]
        self.kinds = self.slots[:, KIND_OFFSET : KIND_OFFSET + 2].view("<u2")[:, 0]
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self.position = 0
        self.counts: Counts = np.zeros(256, np.int64)

    def drain(self, wanted: tuple[int, ...] = ()) -> np.ndarray:
        """Append every finished record to the file; returns copies of the slots whose kind is in `wanted`, shape [n, slot]."""
        produced = struct.unpack_from("<Q", self.producer)[0]
        first = self.position % self.size // self.slot
        last = first + (produced - self.position) // self.slot
        busy = np.flatnonzero(self.headers[first:last] & BUSY)
        if len(busy):
            last = first + int(busy[0])
        if last == first:
            return np.empty((0, self.slot), np.uint8)
        self._write(self.slots[first:last].reshape(-1).data)
        kinds = self.kinds[first:last]
        self.counts += np.bincount(kinds, minlength=256)[:256]
        picked = self.slots[first:last][np.isin(kinds, wanted)].copy()
        self.position += (last - first) * self.slot
        struct.pack_into("<Q", self.consumer, 0, self.position)
        return picked

    def _write(self, data: memoryview) -> None:
        try:
            while data:
                data = data[os.write(self.file, data) :]
        except OSError as error:
            raise RecordingError(f"cannot write {self.path}: {error.strerror}; what was written before is readable") from None

    def close(self) -> None:
        """Close the file and unmap."""
        os.close(self.file)
        del self.slots, self.headers, self.kinds
        with contextlib.suppress(BufferError):  # a drain that failed still holds a view
            self.producer.close()
        self.consumer.close()
