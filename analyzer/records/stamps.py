"""What identifies a version of a recording: sizes and times of its files, and the stamp in traces and pages made from it."""

import contextlib
import gzip
import re
import zlib
from pathlib import Path
from typing import Any

from tracer.recording.format import with_checksum

HEAD_BYTES = 4096
MARK = "MoEScope, recording "
MARKED = re.compile(MARK.encode() + b"[0-9a-f]{16}")
INPUTS = ("manifest.json", "events.bin", "details.bin", "stacks.bin", "meter.csv")
"""The files of a recording that its tables are made from."""
VIEWS = (".pftrace", ".gz", ".html")


def stat_of(path: Path) -> list[int] | None:
    """Size and time (ns) of a file; None if it does not exist."""
    with contextlib.suppress(OSError):
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns]
    return None


def recording_stamp(manifest: dict[str, Any]) -> str:
    """The stamp of a recording: the checksum of its manifest, which has the counts of all records."""
    return MARK + str(with_checksum(manifest)["checksum"])


def stamp_of(view: Path) -> str:
    """The stamp in a view; "" if it has none or cannot be read."""
    with contextlib.suppress(OSError, EOFError, zlib.error), (gzip.open if view.suffix == ".gz" else open)(view, "rb") as file:
        stamp = MARKED.search(file.read(HEAD_BYTES))
        return stamp[0].decode() if stamp else ""
    return ""


def outdated_views(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Views in a recording's folder that were made from another recording, or from an earlier version of this one."""
    views = sorted(path for path in folder.iterdir() if path.suffix in VIEWS and path.is_file())
    return [path.name for path in views if stamp_of(path) not in ("", recording_stamp(manifest))]
