"""Perf buffers, one per CPU, drained in batches: used instead of a ring on kernels without BPF ring buffers (before 5.8)."""

import contextlib
import mmap
import os
import struct
from pathlib import Path

import numpy as np

from tracer.errors import ProbeError
from tracer.kernel.libbpf import Kernel
from tracer.probes.perf_events import open_output
from tracer.recording.format import RING_HEADER_BYTES

PAGE = mmap.PAGESIZE
DATA_HEAD, DATA_TAIL = 1024, 1032  # in struct perf_event_mmap_page
RECORD_LOST, RECORD_SAMPLE = 2, 9
RAW_OFFSET = 12  # of a sample's bytes: struct perf_event_header, u32 size
LOST_COUNT = 16  # in a lost record: header, u64 id, u64 lost
FIRST_LOOK = 64
ONLINE = Path("/sys/devices/system/cpu/online")


def stride_of(slot_bytes: int) -> int:
    """Bytes of the sample that carries one slot's record: header and record, padded to 8."""
    return (RAW_OFFSET + slot_bytes - RING_HEADER_BYTES + 7) // 8 * 8


def decode(data: np.ndarray, slot_bytes: int) -> tuple[np.ndarray, int]:
    """(slots as a ring would hold them, records lost) of complete perf records in the order in which they were written.

    All samples have the same size, so whole runs of them are copied at once; between runs there are records of losses.
    """
    stride, record = stride_of(slot_bytes), slot_bytes - RING_HEADER_BYTES
    runs: list[np.ndarray] = []
    lost, position, look = 0, 0, FIRST_LOOK
    while position < len(data):
        rows = data[position : position + min(look, (len(data) - position) // stride) * stride].reshape(-1, stride)
        good = (rows[:, :4].view("<u4")[:, 0] == RECORD_SAMPLE) & (rows[:, 6:8].view("<u2")[:, 0] == stride)
        count = len(good) if good.all() else int(good.argmin())
        if count:
            runs.append(rows[:count, RAW_OFFSET : RAW_OFFSET + record])
            position += count * stride
            look *= 2
            continue
        kind, _, size = struct.unpack_from("<IHH", data.data, position)
        if kind == RECORD_LOST:
            lost += struct.unpack_from("<Q", data.data, position + LOST_COUNT)[0]
        position += max(size, 8)
        look = FIRST_LOOK
    slots = np.zeros((sum(map(len, runs)), slot_bytes), np.uint8)
    slots[:, :4].view("<u4")[:] = record
    if runs:
        np.concatenate(runs, out=slots[:, RING_HEADER_BYTES:])
    return slots, lost


class CpuBuffer:
    """One CPU's buffer: a page with head and tail, then the data, mapped once."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int):
        self.memory, self.slot = memory, slot_bytes
        self.data = np.frombuffer(memory, np.uint8, offset=PAGE)
        self.lost = 0
        # Written as whole words: the kernel may read at any moment, and struct.pack_into zeroes the bytes first.
        self.head_word = np.frombuffer(memory, np.uint64, 1, DATA_HEAD)
        self.tail_word = np.frombuffer(memory, np.uint64, 1, DATA_TAIL)
        self.tail = int(self.tail_word[0])

    def take(self) -> np.ndarray:
        """Copies of all records written so far; their space is returned to the kernel."""
        head = int(self.head_word[0])
        size = len(self.data)
        first, length = self.tail % size, head - self.tail
        data = self.data[first : first + length]
        if len(data) < length:
            data = np.concatenate((data, self.data[: length - len(data)]))
        slots, lost = decode(data, self.slot)
        self.lost += lost
        self.tail = head
        self.tail_word[0] = head
        return slots

    def close(self) -> None:
        """Unmap."""
        del self.data, self.head_word, self.tail_word
        with contextlib.suppress(BufferError):  # a failed drain still holds a view
            self.memory.close()


class PerfBuffer:
    """A perf event array with a buffer per CPU; has the interface of `ring.Ring`."""

    def __init__(self, kernel: Kernel, map_fd: int, total_bytes: int, slot_bytes: int):
        cpus = online()
        share = max(PAGE, 1 << (max(total_bytes // len(cpus), 1).bit_length() - 1))
        self.fds: list[int] = []
        self.cpus: dict[int, CpuBuffer] = {}
        self.slot, self.size = slot_bytes, share * len(cpus)
        for cpu in cpus:
            fd = open_output(cpu, wakeup_bytes=share // 2)
            self.fds.append(fd)
            self.cpus[cpu] = CpuBuffer(mapped(fd, PAGE + share, mmap.PROT_READ | mmap.PROT_WRITE), slot_bytes)
            kernel.update(map_fd, struct.pack("<I", cpu), struct.pack("<I", fd))

    def take(self) -> np.ndarray:
        """All finished records as slots, uint8 [n, slot bytes], CPU by CPU."""
        return np.concatenate([cpu.take() for cpu in self.cpus.values()])

    def release(self) -> None:
        """Does nothing: `take` copies, so the space is already free."""

    def lost(self) -> dict[str, int]:
        """Records lost by CPU, as the buffers report them: each loss with the next record that fits."""
        return {str(number): cpu.lost for number, cpu in self.cpus.items()}

    def close(self) -> None:
        """Unmap and close."""
        for cpu in self.cpus.values():
            cpu.close()
        for fd in self.fds:
            os.close(fd)


class Doorbell:
    """Wakes the reader immediately for records that the target waits on; its buffers are overwritten and never read."""

    def __init__(self, kernel: Kernel, map_fd: int):
        self.fds: list[int] = []
        self.memory: list[mmap.mmap] = []
        for cpu in online():
            fd = open_output(cpu, wakeup_bytes=0)
            self.fds.append(fd)
            self.memory.append(mapped(fd, 2 * PAGE, mmap.PROT_READ))
            kernel.update(map_fd, struct.pack("<I", cpu), struct.pack("<I", fd))

    def close(self) -> None:
        """Unmap and close."""
        for memory in self.memory:
            memory.close()
        for fd in self.fds:
            os.close(fd)


def mapped(fd: int, size: int, access: int) -> mmap.mmap:
    """Map a perf event's buffer."""
    try:
        return mmap.mmap(fd, size, mmap.MAP_SHARED, access)
    except OSError as error:
        raise ProbeError(
            f"cannot map a perf buffer of {size >> 10} KiB: {error.strerror}; give a smaller --ring-mib, "
            "or raise /proc/sys/kernel/perf_event_mlock_kb"
        ) from None


def online() -> list[int]:
    """Numbers of the CPUs that are online."""
    cpus: list[int] = []
    for part in ONLINE.read_text().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
