"""Temporary folders for work in progress: removed at its end or, if it was killed, when the next one is made beside them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, locked by the process that works in it; unlocked folders are abandoned ones."""
    remove_abandoned(parent, prefix)
    folder, lock = locked_folder(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A new file that replaces `path` on success; several processes may do so at once."""
    with scratch_folder(path.parent, f".{path.name}-") as folder:
        yield folder / path.name
        os.replace(folder / path.name, path)


def locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """(new folder, descriptor of its lock). Until it is locked, another process may consider it abandoned."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.exists():
                return folder, lock
            os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's folders whose processes were killed."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # already removed, or in use
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(folder)
            finally:
                os.close(lock)
