"""Unwinds a recording's stacks with the program `moescope-unwind` (unwind.c), once, when its tables are built."""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moescope.errors import UserError

PROGRAM = Path(__file__).parent / "bin" / f"moescope-unwind-{os.uname().machine}"
SAMPLE = np.dtype(
    [
        *((name, "<u8") for name in ("ts", "since")),
        *((name, "<u4") for name in ("pid", "tid", "waited", "stack")),
        ("kind", "u1"),
        ("end", "u1"),
        ("pad", "V6"),
    ]
)
"""struct sample of unwind.c."""
CLOCK, WAIT, WAKER = range(3)
ENDS = ("whole", "cut", "unknown", "too deep")
OF_KERNEL = np.uint64(1 << 63)
NOWHERE = -1
"""Stands for a frame, of which nothing is known, of stacks that have none."""


@dataclass
class Unwound:
    """Samples in order of time, frames, and for each stack the numbers of its frames, innermost first."""

    samples: np.ndarray
    stacks: list[np.ndarray]
    frames: list[dict[str, Any]]


def unwind(folder: Path, manifest: dict[str, Any]) -> Unwound | None:
    """All stacks of a recording; None if it has none. Raises UserError where the program is not built."""
    recorded, path = manifest.get("stacks"), folder / "stacks.bin"
    if not isinstance(recorded, dict) or not path.exists():
        return None
    if not PROGRAM.exists():
        raise UserError(f"{path} cannot be unwound: {PROGRAM} is missing; build it where elfutils' libdw is installed")
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        arch = str((manifest.get("machine") or {}).get("arch"))
        ids = ",".join(map(str, recorded.get("clock_ids") or []))
        layout = [str(recorded.get(name, "unknown")) for name in ("format", "head_bytes")]
        command: list[str | Path] = [PROGRAM, path, *layout, arch, ids, folder, out]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"{path} cannot be unwound: {done.stderr.strip() or f'{PROGRAM.name} ended with {done.returncode}'}")
        return _read(out, recorded.get("kernel") or {})


def _read(out: Path, kernel: dict[str, str]) -> Unwound:
    samples = np.fromfile(f"{out}.samples", SAMPLE)
    frames = [json.loads(line) for line in Path(f"{out}.frames").read_text().splitlines()]
    words, stacks, at = np.fromfile(f"{out}.stacks", "<u8"), [], 0
    numbers: dict[int, int] = {}
    while at < len(words):
        stack = words[at + 1 : at + 1 + int(words[at])]
        at += 1 + len(stack)
        for address in stack[stack >= OF_KERNEL].tolist():
            if address not in numbers:
                numbers[address] = len(frames)
                frames.append({"file": "[kernel]", "function": kernel.get(f"{address:x}", ""), "address": address})
        if not len(stack) and NOWHERE not in numbers:
            numbers[NOWHERE] = len(frames)
            frames.append({})
        stacks.append(np.array([numbers.get(word, word) for word in stack.tolist() or [NOWHERE]], np.int64))
    return Unwound(samples, stacks, frames)
