"""Reads a table of names, an array of pointers to text, from a program's file; for programs that cannot be asked."""

import re

import numpy as np

from tracer.probes.elf_headers import RELOCATION, Headers, as_probe_error, find_offsets
from tracer.probes.reach import opening_path
from tracer.recording.user_files import open_regular

RELATIVE = {"x64": 8, "AArch64": 1027}
NAME = re.compile(rb"([A-Z0-9_]+)\0")
MOST, LONGEST = 1024, 64


def read_name_table(path: str, first: tuple[str, ...]) -> list[str]:
    """The names in the table that begins with `first`; empty if the file has no such table."""
    with as_probe_error(path), open_regular(opening_path(path)) as file:
        return _find_names(Headers(file), first)


def _find_names(headers: Headers, first: tuple[str, ...]) -> list[str]:
    wanted: list[list[int]] = []
    for text in first:
        wanted.append(text_addresses(headers, text))
        if not wanted[-1]:
            return []
    slots, targets = possible_pointers(headers)
    for row in np.flatnonzero(np.isin(targets, wanted[0])).tolist():
        table = targets[row : row + MOST][slots[row : row + MOST] == slots[row] + 8 * np.arange(len(slots[row : row + MOST]))]
        if all(i < len(table) and int(table[i]) in known for i, known in enumerate(wanted)):
            return names_in_table(headers, table.tolist())
    return []


def text_addresses(headers: Headers, text: str) -> list[int]:
    """The virtual addresses of a NUL-terminated text."""
    return [
        place - offset + address
        for address, offset, size in headers.constants()
        for place in find_offsets(headers.file, text.encode() + b"\0", offset, offset + size)
    ]


def possible_pointers(headers: Headers) -> tuple[np.ndarray, np.ndarray]:
    """(address, target) of possible pointers, sorted by address: the relocated ones, or every aligned word if there are none."""
    section = headers.named(".rela.dyn")
    rows = np.frombuffer(headers.data(section), RELOCATION) if section is not None else np.empty(0, RELOCATION)
    rows = rows[rows["info"] == RELATIVE.get(headers.machine, -1)]
    if len(rows):
        order = np.argsort(rows["offset"])
        return rows["offset"][order].astype(np.int64), rows["addend"][order]
    slots, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for address, offset, size in headers.loads:
        skip = -address % 8
        words = np.frombuffer(headers.at(offset + skip, max(0, size - skip) // 8 * 8), "<i8")
        slots.append(address + skip + 8 * np.arange(len(words)))
        targets.append(words)
    return np.concatenate(slots), np.concatenate(targets)


def names_in_table(headers: Headers, table: list[int]) -> list[str]:
    """The texts that a table of pointers points to, up to the first that is not a name."""
    answer: list[str] = []
    for target in table:
        place = next((target - start + offset for start, offset, size in headers.loads if start <= target < start + size), None)
        match = NAME.match(headers.at(place, min(LONGEST, headers.bytes - place))) if place is not None else None
        if match is None:
            break
        answer.append(match[1].decode())
    return answer
