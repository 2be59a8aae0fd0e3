"""The files that the target reads and maps: paths by (device, inode), which is how the BPF programs identify them."""

import contextlib
import os
from pathlib import Path
from typing import Any

MINOR_BITS = 20  # of the kernel's internal dev_t


def kernel_device(major: int, minor: int) -> int:
    """The kernel's internal dev_t, which differs from the one that stat(2) returns."""
    return major << MINOR_BITS | minor


class Files:
    """The files known so far."""

    def __init__(self) -> None:
        self.paths: dict[tuple[int, int], str] = {}

    def note_mapped(self, pid: int) -> None:
        """Remember all files that a process has mapped: some were mapped earlier, or not by a system call of its own."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                row = line.split(None, 5)
                if len(row) == 6 and row[4] != "0":
                    major, minor = (int(part, 16) for part in row[3].split(":"))
                    self.paths.setdefault((kernel_device(major, minor), int(row[4])), row[5])

    def note_open(self, pid: int, fd: int, device: int, inode: int, name: str) -> None:
        """Remember a file that a process has open: by its path if the descriptor still refers to it, else by its bare name."""
        path = name
        with contextlib.suppress(OSError):
            link = f"/proc/{pid}/fd/{fd}"
            if os.stat(link).st_ino == inode:
                path = os.readlink(link)
        if "/" not in self.paths.get((device, inode), ""):
            self.paths[device, inode] = path

    def to_json(self) -> list[dict[str, Any]]:
        """Rows for the manifest."""
        return [{"dev": device, "ino": inode, "path": path} for (device, inode), path in self.paths.items()]
