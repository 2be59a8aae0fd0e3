"""Deflates BPF objects for object.S, and writes the hash of the programs' sources: pack.py SOURCES FOLDER OBJECT...

FOLDER holds the sources; the planner computes their hash by this module. NAME.bpf.o becomes NAME.bpf.z.
"""

import hashlib
import struct
import sys
import zlib
from pathlib import Path


def number_of(folder: Path) -> str:
    """A hash of all sources in a folder, as 16 hexadecimal digits."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def without_dwarf(elf: bytes) -> bytes:
    """An object (64 bits, little-endian) with zeros for its DWARF, which libbpf does not read and deflating removes."""
    start, (width, count, names) = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<I20xQQ", elf, start + width * number) for number in range(count)]
    content = bytearray(elf)
    for name, offset, size in sections:
        if b".debug" in elf[sections[names][1] + name :].split(b"\0", 1)[0]:
            content[offset : offset + size] = bytes(size)
    return bytes(content)


def main(header: str, folder: str, *compiled: str) -> None:
    """Write the files."""
    for path in map(Path, compiled):
        content = path.read_bytes()
        path.with_suffix(".z").write_bytes(struct.pack("<Q", len(content)) + zlib.compress(without_dwarf(content), 9))
    Path(header).write_text(f'#define SOURCES "{number_of(Path(folder))}"\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
