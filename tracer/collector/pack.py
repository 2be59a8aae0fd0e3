"""Deflates a BPF object for object.S, and writes the hash of the programs' sources: pack.py OBJECT PACKED SOURCES FOLDER.

FOLDER holds the sources; the planner computes their hash by this module.
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


def main(compiled: str, packed: str, header: str, folder: str) -> None:
    """Write both files."""
    content = Path(compiled).read_bytes()
    Path(packed).write_bytes(struct.pack("<Q", len(content)) + zlib.compress(content, 9))
    Path(header).write_text(f'#define SOURCES "{number_of(Path(folder))}"\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
