"""A BPF ring buffer of fixed-size records: whole batches as views on mapped memory, no work per record."""

import contextlib
import mmap

import numpy as np

from tracer.recording.format import BUSY

PAGE = mmap.PAGESIZE


class Ring:
    """One ring map, mapped as the kernel lays it out: consumer page, producer page, data twice in a row."""

    def __init__(self, map_fd: int, ring_bytes: int, slot_bytes: int):
        self.fds, self.size, self.slot = [map_fd], ring_bytes, slot_bytes
        self.consumer = mmap.mmap(map_fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.producer = mmap.mmap(map_fd, PAGE + 2 * ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=PAGE)
        self.slots = np.frombuffer(self.producer, np.uint8, 2 * ring_bytes, PAGE).reshape(-1, slot_bytes)
        self.headers = self.slots[:, :4].view("<u4")[:, 0]
        # Positions are read and written as whole words: the kernel looks at any moment, and struct.pack_into zeroes first.
        self.produced = np.frombuffer(self.producer, np.uint64, 1)
        self.consumed = np.frombuffer(self.consumer, np.uint64, 1)
        self.position = self.taken = 0

    def take(self) -> np.ndarray:
        """Every finished record as slots, uint8 [n, slot bytes]; a view that holds until `release`."""
        produced = int(self.produced[0])
        first = self.position % self.size // self.slot
        last = first + (produced - self.position) // self.slot
        busy = np.flatnonzero(self.headers[first:last] & BUSY)
        if len(busy):
            last = first + int(busy[0])
        self.taken = (last - first) * self.slot
        return self.slots[first:last]

    def release(self) -> None:
        """Give the kernel the space of what was taken."""
        if not self.taken:
            return
        self.position += self.taken
        self.taken = 0
        self.consumed[0] = self.position

    def lost(self) -> dict[str, int]:
        """Losses by CPU: a ring counts them in the kernel alone, by kind."""
        return {}

    def close(self) -> None:
        """Unmap."""
        del self.slots, self.headers, self.produced, self.consumed
        with contextlib.suppress(BufferError):  # a drain that failed still holds a view
            self.producer.close()
        self.consumer.close()
