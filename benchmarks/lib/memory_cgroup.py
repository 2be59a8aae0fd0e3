"""A memory cgroup for one child process, version 1 or 2, whichever this machine mounts."""

import os
from contextlib import suppress
from pathlib import Path

NAMES = {1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes"), 2: ("memory.max", "memory.peak")}


class NoMemoryCgroupError(Exception):
    """No memory cgroup can be made on this machine or by this user."""


def find_cgroup() -> tuple[int, Path]:
    """(version, folder) in which memory cgroups can be made."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        folder = Path(where)
        if kind == "cgroup" and "memory" in options.split(","):
            return 1, folder
        if kind == "cgroup2" and "memory" in (folder / "cgroup.controllers").read_text().split():
            return 2, folder
    raise NoMemoryCgroupError("no memory cgroup is mounted: mount one, or run where systemd gives one")


class MemoryCgroup:
    """A fresh group with a limit in bytes, for a `with` block; `join` runs in the child before it executes anything."""

    def __init__(self, limit: int):
        self.version, parent = find_cgroup()
        self.folder = parent / f"moescope-{os.getpid()}-{id(self):x}"
        self._limit, self._peak = NAMES[self.version]
        self.limit = limit

    def __enter__(self) -> "MemoryCgroup":
        try:
            if self.version == 2:
                with suppress(OSError):
                    (self.folder.parent / "cgroup.subtree_control").write_text("+memory")
            self.folder.mkdir()
            (self.folder / self._limit).write_text(str(self.limit))
        except OSError as error:
            raise NoMemoryCgroupError(f"{self.folder} cannot be made ({error.strerror}): run as root") from None
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.folder.rmdir()

    def join(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        """Maximum bytes of the group, including page cache."""
        return int((self.folder / self._peak).read_text())
