"""A BPF ring buffer of fixed-size records: reads whole batches as views on mapped memory, with no work per record."""

import contextlib
import mmap

import numpy as np

from tracer.recording.format import BUSY

PAGE = mmap.PAGESIZE


class Ring:
    """A ring map in the kernel's memory layout: consumer page, producer page, then the data mapped twice in a row."""

    def __init__(self, map_fd: int, ring_bytes: int, slot_bytes: int):
        self.fds, self.size, self.slot = [map_fd], ring_bytes, slot_bytes
        self.consumer = mmap.mmap(map_fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.producer = mmap.mmap(map_fd, PAGE + 2 * ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=PAGE)
        self.slots = np.frombuffer(self.producer, np.uint8, 2 * ring_bytes, PAGE).reshape(-1, slot_bytes)
        self.headers = self.slots[:, :4].view("<u4")[:, 0]
        # Positions are accessed as whole words: the kernel may read at any moment, and struct.pack_into zeroes the bytes first.
        self.produced = np.frombuffer(self.producer, np.uint64, 1)
        self.consumed = np.frombuffer(self.consumer, np.uint64, 1)
        self.position = self.taken = 0

    def take(self) -> np.ndarray:
        """All finished records as slots, uint8 [n, slot bytes]; a view that is valid until `release`."""
        produced = int(self.produced[0])
        first = self.position % self.size // self.slot
        last = first + (produced - self.position) // self.slot
        busy = np.flatnonzero(self.headers[first:last] & BUSY)
        if len(busy):
            last = first + int(busy[0])
        self.taken = (last - first) * self.slot
        return self.slots[first:last]

    def release(self) -> None:
        """Return the space of the taken records to the kernel."""
        if not self.taken:
            return
        self.position += self.taken
        self.taken = 0
        self.consumed[0] = self.position

    def lost(self) -> dict[str, int]:
        """Losses by CPU: empty, since a ring's losses are counted in the kernel, by kind."""
        return {}

    def close(self) -> None:
        """Unmap."""
        del self.slots, self.headers, self.produced, self.consumed
        with contextlib.suppress(BufferError):  # a failed drain still holds a view
            self.producer.close()
        self.consumer.close()
