"""Files that the user names, or the traced program can change: opened with that user's rights, never waited for, never unbounded.

Root could open more than the user, and would wait for the writer of a FIFO or read a device without end. Whatever is opened
here the user could have opened, so following links discloses nothing.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from tracer.recording.paths import TRACER, invoking_user

MOST_TEXT = 8 << 20
"""Bytes of a text file (JSON, TOML) that are read at most."""
PIECE = 1 << 20
AS_MAPPED = "/map_files/"


def open_regular(path: str | os.PathLike[str], most: int | None = None) -> BinaryIO:
    """A regular file opened for reading, unbuffered; raises OSError if it is of another kind or longer than `most` bytes.

    `/proc/PID/map_files/...` is opened with root's rights, which it needs: the process has the file mapped. So are the
    tracer's own parts.
    """
    name = os.fspath(path)
    if AS_MAPPED in name or name.startswith(f"{TRACER}{os.sep}"):
        return _open_checked(name, most)
    with invoking_user().acting():
        return _open_checked(name, most)


def _open_checked(name: str, most: int | None) -> BinaryIO:
    place = os.open(name, os.O_PATH | os.O_CLOEXEC)  # acts on nothing: opening a device or FIFO may, though nothing is read
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        if most is not None and status.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", name)
        return os.fdopen(os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    finally:
        os.close(place)


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """A regular file's content; raises OSError as `open_regular` does."""
    parts, left = [], most
    with open_regular(path, most) as file:
        while left > 0 and (part := file.read(min(left, PIECE))):
            parts.append(part)
            left -= len(part)
    return b"".join(parts)


def read_text(path: str | os.PathLike[str]) -> str:
    """A small text file's content; raises OSError as `open_regular` does, and UnicodeDecodeError."""
    return read_bytes(path, MOST_TEXT).decode()


def regular_size(path: str | os.PathLike[str]) -> int:
    """Bytes of a regular file that the user can open, else -1."""
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size
    except (OSError, ValueError):
        return -1


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether there is a regular file that the user can open."""
    return regular_size(path) >= 0


def names_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The entries of a folder that the user can read, sorted; empty if it is none."""
    try:
        with invoking_user().acting():
            return [Path(folder, name) for name in sorted(os.listdir(folder))]
    except (OSError, ValueError):
        return []
