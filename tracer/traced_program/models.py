"""Which model a command ran: its files, identified by size and a hash of samples, cheap enough for every recording."""

import contextlib
import hashlib
import os
from itertools import islice
from pathlib import Path
from typing import Any

from tracer.recording.user_files import is_regular, names_in, open_regular, regular_size

SUFFIXES = (".gguf", ".safetensors", ".onnx", ".ort", ".pte", ".tflite", ".dlc", ".pt", ".pth", ".bin")
SAMPLES, SAMPLE_BYTES = 8, 1 << 16
MOST_FILES = 256


def models_named(command: list[str], folder: Path) -> list[Path]:
    """The model files that a command's words name: a file with a model suffix, or all such files directly in a folder."""
    paths: dict[Path, None] = {}
    for word in command:
        for text in (word, word.partition("=")[2]):
            path = os.path.join(folder, text)
            if text and path.endswith(SUFFIXES):
                paths[Path(path)] = None
            if text:
                paths |= dict.fromkeys(each for each in names_in(path) if each.suffix in SUFFIXES)
    return list(islice(filter(is_regular, paths), MOST_FILES))


def largest_in_use(pid: int) -> list[Path]:
    """The largest model file that a process has mapped or open, for commands that do not name theirs; empty if there is none."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        rows = (line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines())
        names |= {row[5] for row in rows if len(row) == 6}
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                names.add(os.readlink(link))
    sizes = {name: regular_size(name) for name in sorted(names) if name.endswith(SUFFIXES)}
    return [Path(max(sizes, key=sizes.__getitem__))] if max(sizes.values(), default=-1) >= 0 else []


def model_rows(paths: list[Path]) -> list[dict[str, Any]]:
    """Rows for the manifest: path, bytes, fingerprint (SHA-256 of the size and of samples spread evenly over the file).

    Half a megabyte is read of each file, whatever its size. Files that differ only outside the samples look the same.
    """
    rows = []
    for path in paths:
        with contextlib.suppress(OSError), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(size.to_bytes(8, "little"))
            for sample in range(SAMPLES):
                file.seek(sample * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
            rows.append({"path": str(path), "bytes": size, "fingerprint": digest.hexdigest()})
    return rows
