"""Which model a command ran: its files, identified by size and a hash of samples, cheap enough for every recording."""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

SUFFIXES = (".gguf", ".safetensors", ".onnx", ".ort", ".pte", ".tflite", ".dlc", ".pt", ".pth", ".bin")
SAMPLES, SAMPLE_BYTES = 8, 1 << 16
MOST_FILES = 256


def named(command: list[str], folder: Path) -> list[Path]:
    """The model files that a command's words name: a file with a model suffix, or all such files directly in a folder."""
    paths: dict[Path, None] = {}
    for word in command:
        for text in (word, word.partition("=")[2]):
            path = os.path.join(folder, text)
            if text and os.path.isfile(path):
                paths[Path(path)] = None
            elif text and os.path.isdir(path):
                with contextlib.suppress(OSError):
                    paths |= dict.fromkeys(sorted(Path(path).iterdir()))
    return [path for path in paths if path.suffix in SUFFIXES and path.is_file()][:MOST_FILES]


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
    paths = [Path(name) for name in sorted(names) if name.endswith(SUFFIXES) and os.path.isfile(name)]
    return sorted(paths, key=lambda path: path.stat().st_size)[-1:]


def describe(paths: list[Path]) -> list[dict[str, Any]]:
    """Rows for the manifest: path, bytes, fingerprint (SHA-256 of the size and of samples spread evenly over the file).

    Half a megabyte is read of each file, whatever its size. Files that differ only outside the samples look the same.
    """
    rows = []
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(size.to_bytes(8, "little"))
            for sample in range(SAMPLES):
                file.seek(sample * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
            rows.append({"path": str(path), "bytes": size, "fingerprint": digest.hexdigest()})
    return rows
