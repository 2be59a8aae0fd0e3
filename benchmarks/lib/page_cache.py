"""Leaves single files out of the page cache; the machine keeps what others have there."""

import os
from pathlib import Path


def drop_pages(*paths: Path) -> None:
    """Out of the page cache with these files, once they are written."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
