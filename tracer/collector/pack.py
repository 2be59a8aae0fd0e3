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


def main(header: str, folder: str, *compiled: str) -> None:
    """Write the files."""
    for path in map(Path, compiled):
        content = path.read_bytes()
        path.with_suffix(".z").write_bytes(struct.pack("<Q", len(content)) + zlib.compress(content, 9))
    Path(header).write_text(f'#define SOURCES "{number_of(Path(folder))}"\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
