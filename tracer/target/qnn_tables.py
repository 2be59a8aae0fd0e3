"""Finds QNN's function tables in the memory of a program that obtained them before it was followed.

A provider is recognised by its structure, as documented in docs/qnn.md: backend, name, API version, then addresses in QNN's
libraries. Only data that a library returned to the program is read, never code.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from tracer.kernel.definitions import constant
from tracer.probes import reach

API_AT, SLOTS_AT = 2, 5  # words into a provider: API version, the first address
MOST_BACKENDS = 64
FEWEST = 20  # the fewest addresses that count as a table
NAME, LONGEST_NAME = re.compile(rb"[A-Za-z][\x20-\x7e]{1,62}\0"), 64
LARGEST = 64 << 20  # mappings are searched up to this many bytes: malloc's arenas are no larger, models are


@dataclass(frozen=True)
class Area:
    """One mapping of a process."""

    start: int
    end: int
    flags: str
    path: str


@dataclass(frozen=True)
class Provider:
    """A provider's backend, core API version, and addresses by slot."""

    backend: int
    api: tuple[int, ...]
    slots: tuple[int, ...]


def areas(pid: int) -> list[Area]:
    """All mappings of a process; empty if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    mapped = []
    for row in (line.split(None, 5) for line in lines):
        start, end = (int(part, 16) for part in row[0].split("-"))
        path = row[5] if len(row) > 5 else ""
        mapped.append(Area(start, end, row[1], reach.mapped(pid, path, int(row[4]), row[0]) if path.startswith("/") else path))
    return mapped


def find(pid: int, libraries: set[str], major: int) -> set[Provider]:
    """The providers of a major API version in a process's memory: first in these libraries' data and the heap, else elsewhere.

    A provider's addresses are in the libraries' code.
    """
    mapped = areas(pid)
    code = np.array([(area.start, area.end) for area in mapped if "x" in area.flags and area.path in libraries], np.uint64)
    if not len(code):
        return set()
    near = [area for area in mapped if area.path == "[heap]" or area.path in libraries]
    far = [area for area in mapped if not area.path and area.end - area.start <= LARGEST]
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            matching = ({one for one in _providers(memory, group, code) if one.api[0] == major} for group in (near, far))
            return next(filter(None, matching), set())
    except OSError:
        return set()


def _providers(memory: FileIO, group: list[Area], code: np.ndarray) -> Iterator[Provider]:
    low, high, most = code[:, 0].min(), code[:, 1].max(), constant("TABLE_PARTS") * constant("TABLE_SLOTS")
    for area in group:
        data = _read(memory, area.start, area.end - area.start) if "x" not in area.flags else b""
        words = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
        first = np.flatnonzero(words[SLOTS_AT + 1 :] - low < high - low)  # slot 1 creates a backend: every provider has it
        for at in first[words[first] - np.uint64(1) < MOST_BACKENDS].tolist():
            version = tuple(words[at + API_AT : at + SLOTS_AT].view("<u4")[:3].tolist())
            slots = words[at + SLOTS_AT : at + SLOTS_AT + most]
            inside = np.logical_or.reduce([(start <= slots) & (slots < end) for start, end in code])
            length = int(np.argmin(np.append(inside | (slots == 0), False)))
            if inside[:length].sum() >= FEWEST and NAME.match(_read(memory, int(words[at + 1]), LONGEST_NAME)):
                yield Provider(int(words[at]), version, tuple(slots[:length].tolist()))


def _read(memory: FileIO, address: int, count: int) -> bytes:
    """`count` bytes at an address; empty if they cannot be read."""
    try:
        memory.seek(address)
        return memory.read(count)
    except (OSError, OverflowError):
        return b""
