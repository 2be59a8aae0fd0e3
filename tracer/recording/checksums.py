"""Checksums of a recording's files, one per segment, by which damage is detected and located.

`events.sum` and `details.sum` hold 16 bytes per segment: its end offset in `events.bin` or `details.bin`, and its XXH3 (64 bits).
A segment ends after a MiB, and whenever the manifest is written: a crash leaves only the last one without a checksum.
"""

from pathlib import Path

import numpy as np
import xxhash

METHOD = "xxh3_64"
SEGMENT_BYTES = 1 << 20
ENTRY = np.dtype([("end", "<u8"), ("sum", "<u8")])


def digest(data: bytes | memoryview) -> str:
    """The checksum of some bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def sums_of(path: Path) -> Path:
    """The path of a file's checksums."""
    return path.with_suffix(".sum")


def check_file(path: Path) -> tuple[list[tuple[int, int]], int]:
    """(damaged byte ranges of a file, offset up to which it has checksums). Raises OSError if it has none."""
    raw = sums_of(path).read_bytes()
    entries = np.frombuffer(raw[: len(raw) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)
    size = path.stat().st_size if path.exists() else 0
    content = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    damaged: list[tuple[int, int]] = []
    begin = 0
    for end, expected in entries.tolist():
        if end <= begin or end > size or xxhash.xxh3_64_intdigest(content[begin:end].data) != expected:
            begin_of = damaged.pop()[0] if damaged and damaged[-1][1] == begin else begin
            damaged.append((begin_of, max(end, begin)))
        begin = max(begin, end)
    return damaged, begin
