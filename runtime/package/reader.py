"""Explicit reads: one aligned pread per expert, bypassing the page cache if the file system supports it.

O_DIRECT needs aligned addresses, offsets and lengths. If a file system refuses it (some overlays, older tmpfs), the file is
read through the page cache and its pages are dropped at once, so that memory holds an expert only once.
"""

import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from runtime.cache_rules.rule import PIECE
from runtime.errors import PackageError

ALIGNMENT = 4096
OPEN_FILES = 128
# Free blocks kept for the loads that they made room for: freeing and allocating a block costs a millisecond.
SPARE_BLOCKS = 32
# Large blocks are allocated side by side in arenas of huge pages, which direct reads fill more than twice as fast as single
# pages, with a quarter of the kernel's work. Smaller ones would hold more memory than requested.
HUGE_PAGE, ARENA = 2 << 20, 64 << 20
REMEDY = "delete the package and convert again"


@dataclass(frozen=True)
class FileRange:
    """A range of bytes in a file."""

    path: Path
    offset: int
    bytes: int


def page_aligned(count: int) -> int:
    """`count` rounded up to whole pages."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class BlockPool:
    """Page-aligned memory blocks [bytes] uint8, reused. At most `spare` free ones keep their memory; the system gets the rest."""

    def __init__(self, spare: int = SPARE_BLOCKS):
        self.spare = spare
        self._warm: dict[int, list[np.ndarray]] = {}
        self._empty: dict[int, list[np.ndarray]] = {}
        self._lock = Lock()

    def take(self, count: int) -> np.ndarray:
        """Take a block of at least `count` bytes."""
        size = page_aligned(count)
        with self._lock:
            for free in (self._warm.get(size), self._empty.get(size)):
                if free:
                    return free.pop()
            self._empty[size] = allocate_blocks(size)
            return self._empty[size].pop()

    def give(self, block: np.ndarray) -> None:
        """Return a block after its last use."""
        with self._lock:
            kept = sum(map(len, self._warm.values())) < self.spare
            if not kept:
                release_memory(block)
            (self._warm if kept else self._empty).setdefault(len(block), []).append(block)


def allocate_blocks(size: int) -> list[np.ndarray]:
    """Adjacent blocks of this size, the first one last; their memory is allocated when they are written."""
    count = max(ARENA // size, 1)
    memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE // 4:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    return [whole[first : first + size] for first in range((count - 1) * size, -1, -size)]


def release_memory(block: np.ndarray) -> None:
    """Return a block's pages to the system; it reads as zeros until it is written again."""
    whole: Any = block.base
    whole.base.obj.madvise(mmap.MADV_DONTNEED, block.ctypes.data - whole.ctypes.data, len(block))


class OpenFile:
    """An open file of a Reader, closed with its last user. `direct`: its reads bypass the page cache."""

    def __init__(self, path: Path, direct: bool):
        self.path, self.direct = path, direct
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        weakref.finalize(self, os.close, self.descriptor)


class Reader:
    """Reads file ranges into blocks, from any thread; calls `between` after each piece."""

    def __init__(self, direct: bool = True, between: Callable[[], None] = lambda: None):
        self.between = between
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._open: OrderedDict[Path, OpenFile] = OrderedDict()
        self._lock = Lock()

    def read(self, span: FileRange, block: np.ndarray) -> np.ndarray:
        """Read a range; returns its bytes as a view of `block`."""
        first = span.offset // ALIGNMENT * ALIGNMENT
        skip = span.offset - first
        count = skip + span.bytes
        if page_aligned(count) > len(block):
            raise ValueError(f"a block of {len(block)} bytes cannot take {count}")
        try:
            done = self._fill(self.file(span.path), block.data[: page_aligned(count)], first, count)
        except OSError as error:
            raise PackageError(f"{span.path} cannot be read ({error.strerror}): {REMEDY}") from None
        if done < count:
            raise PackageError(f"{span.path} ends {count - done} bytes early: {REMEDY}")
        return block[skip:count]

    def file(self, path: Path) -> OpenFile:
        """The open file, which stays open while somebody holds it."""
        with self._lock:
            if path not in self._open:
                self._open[path] = self._opened(path)
                if len(self._open) > OPEN_FILES:
                    self._open.popitem(last=False)
            self._open.move_to_end(path)
            return self._open[path]

    def close(self) -> None:
        """Forget every file; the ones that are being read are closed afterwards."""
        with self._lock:
            self._open.clear()

    def _fill(self, file: OpenFile, view: memoryview, first: int, count: int) -> int:
        done = 0
        while done < count:
            try:
                read = os.preadv(file.descriptor, [view[done : done + PIECE]], first + done)
            except OSError:
                if not file.direct:
                    raise
                file = self._reopened(file.path)
                continue
            done += read
            if read == 0 or (file.direct and read % ALIGNMENT):
                break
            self.between()
        if not file.direct:
            os.posix_fadvise(file.descriptor, first, page_aligned(count), os.POSIX_FADV_DONTNEED)
        return done

    def _opened(self, path: Path) -> OpenFile:
        if self.direct:
            try:
                return OpenFile(path, True)
            except FileNotFoundError:
                raise
            except OSError:
                self.direct = False
        return OpenFile(path, False)

    def _reopened(self, path: Path) -> OpenFile:
        """Read this and all later files through the page cache: the file system accepted O_DIRECT but refused the read."""
        self.direct = False
        with self._lock:
            self._open[path] = OpenFile(path, False)
            return self._open[path]
