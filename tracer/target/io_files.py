"""The files that the target reads and maps: (device, inode), as the kernel side names them, to paths."""

import contextlib
import os
from pathlib import Path
from typing import Any

MINOR_BITS = 20  # of the kernel's own dev_t


def kernel_device(major: int, minor: int) -> int:
    """The kernel's dev_t, which is not the one that stat(2) gives."""
    return major << MINOR_BITS | minor


class Files:
    """What is known so far."""

    def __init__(self) -> None:
        self.paths: dict[tuple[int, int], str] = {}

    def note_mapped(self, pid: int) -> None:
        """Remember every file that a process has mapped: those that no system call of its own maps, or that were there before."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                row = line.split(None, 5)
                if len(row) == 6 and row[4] != "0":
                    major, minor = (int(part, 16) for part in row[3].split(":"))
                    self.paths.setdefault((kernel_device(major, minor), int(row[4])), row[5])

    def note_open(self, pid: int, fd: int, device: int, inode: int, name: str) -> None:
        """Remember a file that a process has open: by its path while the descriptor still leads to it, else by its bare name."""
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
