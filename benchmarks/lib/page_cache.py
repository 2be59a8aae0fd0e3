"""Drops single files from the page cache, without affecting others."""

import os
from pathlib import Path


def drop_pages(*paths: Path) -> None:
    """Write these files back and drop them from the page cache."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
