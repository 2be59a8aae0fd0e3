"""QNN's serialized profiles: files that the target writes and Qualcomm's tools read, copied whole into the recording."""

import errno
import os
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "qnn-logs"


@dataclass
class SerializedLogs:
    """The serialized profiles that the target opened, in order."""

    paths: list[str] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)
    named: set[str] = field(default_factory=set)

    def note(self, path: str) -> None:
        """Remember a file, whose content is read at the end. The target opens it again for every harvest."""
        if path in self.named:
            return
        self.named.add(path)
        real = os.path.realpath(path)
        if real not in self.paths:
            self.paths.append(real)

    def keep(self, recording: Path, ended: bool, uid: int) -> list[str]:
        """Copy each file into the recording, unless it is there already; returns a message for each problem.

        `ended`: the target has written its last byte. Only files of user `uid` are read: the tracer may read more than they.
        """
        amiss, inside = [], os.path.realpath(recording)
        self.kept = []
        for number, path in enumerate(self.paths):
            try:
                place = Path(path)
                if not path.startswith(inside + os.sep):
                    place = Path(inside) / FOLDER / f"{number:03d}_{Path(path).name}"
                    place.parent.mkdir(exist_ok=True)
                    copy_owned(path, place, uid)
                row = {"from": path, "file": str(place.relative_to(inside)), "bytes": place.stat().st_size, "whole": ended}
                self.kept.append(row)
                if not row["bytes"]:
                    amiss.append(f"qnn: the serialized log {path} is empty: the program ended before QNN wrote it")
            except OSError as error:
                amiss.append(f"qnn: the serialized log {path} could not be kept: {error.strerror}")
        return amiss


def copy_owned(path: str, place: Path, uid: int) -> None:
    """Copy a regular file that belongs to `uid`; raises PermissionError if it does not."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as source:
        status = os.fstat(source.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
            raise PermissionError(errno.EPERM, "it belongs to a user other than the command's")
        with place.open("wb") as copy:
            shutil.copyfileobj(source, copy)
