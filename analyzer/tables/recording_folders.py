"""Recordings in a local folder or in an object store that fsspec supports, and tasks over many of them.

    ROOT/device=NAME/build=NAME/RUN/manifest.json      the folders between ROOT and RUN are yours; these two are read

Outputs made from a recording (tables, result) are stored beside it.
"""

import contextlib
import json
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from analyzer.errors import AnalysisError
from analyzer.records.stamps import INPUTS
from analyzer.tables.store import input_fingerprint, load_tables, stamp_of
from moescope.errors import UserError
from moescope.scratch import scratch_folder
from tracer.recording.format import STREAMS, RecordingError, is_whole

MARKS = ("manifest.json", "events.bin")
"""Either file identifies a recording's folder: one without a manifest is an unreadable recording."""
SCRATCH = "moescope-recording-"
MADE = ("tables/*.parquet", "result.parquet")
LOCAL = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
"""A cluster of processes here: one recording at a time each, no server of pages, no lines about lost workers."""


@dataclass(frozen=True)
class RecordingFolder:
    """A recording's folder: the fsspec file system that holds it, and its path there."""

    filesystem: Any
    path: str

    def __str__(self) -> str:
        return self.path if self.is_local else str(self.filesystem.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return "file" in self.filesystem.protocol

    @property
    def name(self) -> str:
        """The name of the run."""
        return posixpath.basename(self.path)

    def said(self, what: str) -> str:
        """The value of `device` or `build` in its path; "" for none."""
        found = re.search(rf"(?:^|/){what}=([^/]*)/", self.path)
        return unquote(found[1]) if found else ""

    def files(self) -> dict[str, Any]:
        """Size and time of each file that the tables depend on, as in `fingerprint`; times of objects in whole seconds."""
        if self.is_local:
            return dict(input_fingerprint(Path(self.path))["files"])
        return {name: self._seen(f"{self.path}/{name}") for name in INPUTS}

    def _seen(self, path: str) -> list[int] | None:
        try:
            return [int(self.filesystem.size(path)), int(self.filesystem.modified(path).timestamp()) * 10**9]
        except FileNotFoundError:
            return None

    def has_tables(self) -> bool:
        """Whether the tables beside it in the object store were made from exactly this recording by this schema."""
        try:
            index = json.loads(self.filesystem.cat_file(f"{self.path}/tables/index.json"))
            return is_whole(index) and bool(index["stamp"] == stamp_of(self.files()))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @contextlib.contextmanager
    def here(self) -> Iterator[Path]:
        """Context manager: the recording as a local folder; outputs that the block writes are copied back to the store."""
        if self.is_local:
            yield Path(self.path)
            return
        with scratch_folder(Path(tempfile.gettempdir()), SCRATCH) as parent:
            folder = parent / self.name
            folder.mkdir()
            self._fetch(folder)
            yield folder
            self._keep(folder)

    def _fetch(self, folder: Path) -> None:
        for name in (*INPUTS, *(f"{stream}.sum" for stream in (*STREAMS, "stacks")), "vdso.so"):
            seen = self._seen(f"{self.path}/{name}")
            if seen:
                self.filesystem.get_file(f"{self.path}/{name}", str(folder / name))
                os.utime(folder / name, ns=(seen[1], seen[1]))

    def _keep(self, folder: Path) -> None:
        """Upload outputs, the index last: when it is present, all files that it names are."""
        files = [path.relative_to(folder).as_posix() for form in MADE for path in folder.glob(form)]
        self.filesystem.put([str(folder / name) for name in files], [f"{self.path}/{name}" for name in files])
        if (folder / "tables" / "index.json").exists():
            self.filesystem.put_file(str(folder / "tables" / "index.json"), f"{self.path}/tables/index.json")


def open_folder(address: str) -> tuple[Any, str]:
    """(fsspec file system, path) of a folder, s3://..., gs://..., memory://... Raises AnalysisError."""
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise AnalysisError(f"{address} cannot be opened: {error}") from None
    return filesystem, str(path)


def is_pattern(address: str) -> bool:
    """Whether the address is a pattern or an object-store address, not a path."""
    return "://" in address or any(letter in address for letter in "*?[")


def is_many(address: str) -> bool:
    """Whether the address names several recordings by a pattern, an object-store address or a parent folder."""
    return is_pattern(address) or (Path(address).is_dir() and not (Path(address) / "manifest.json").exists())


def recording_folders(address: str, must: bool = True) -> list[RecordingFolder]:
    """Every recording that a pattern, folder or address names, by path. Raises AnalysisError if `must` and there is none."""
    filesystem, path = open_folder(address)
    try:
        if "file" in filesystem.protocol:  # whose own pattern leaves out links to folders
            files = [file for folder in glob(path, recursive=True) for file in filesystem.find(folder)]
        else:
            files = filesystem.glob(f"{path}/**")
    except OSError as error:
        raise AnalysisError(f"{address} cannot be read: {error}") from None
    folders = sorted({posixpath.dirname(file) for file in files if posixpath.basename(file) in MARKS})
    if not folders and must:
        raise AnalysisError(f"{address} holds no recording")
    return [RecordingFolder(filesystem, folder) for folder in folders]


def make_tables(place: RecordingFolder, names: Iterable[str] | None = None) -> RecordingFolder:
    """Make a recording's tables if it has none. Raises RecordingError if they cannot be made or stored."""
    if not place.is_local and place.has_tables():
        return place
    with place.here() as folder:
        load_tables(folder, names)
        if not (folder / "tables" / "index.json").exists():
            raise RecordingError(f"{place} cannot be written to, so its tables cannot be kept")
    return place


@dataclass(frozen=True)
class Failure:
    """A recording that could not be read, with the reason in one line."""

    place: RecordingFolder
    reason: str


def map_folders(
    task: Callable[[RecordingFolder], Any], some: Iterable[RecordingFolder], dask: str = ""
) -> Iterator[tuple[RecordingFolder, Any]]:
    """(recording, task's result or Failure) for each recording, in order of completion; a failure does not stop the others.

    One recording at a time, or with `dask` on that many local processes or on the workers of the scheduler at that address.
    """
    if not dask:
        yield from ((place, result_or_failure(task, place)) for place in some)
        return
    from distributed import Client, as_completed
    from distributed.scheduler import KilledWorker

    how = {"n_workers": int(dask)} if dask.isdecimal() else {"address": dask}
    with Client(**how, **(LOCAL if dask.isdecimal() else {})) as client:
        futures = {client.submit(result_or_failure, task, place, pure=False): place for place in some}
        for future in as_completed(list(futures)):
            error, place = future.exception(), futures[future]
            reason = "every worker that read it was lost" if isinstance(error, KilledWorker) else repr(error)
            yield place, Failure(place, f"{place}: {reason}") if error else future.result()
            future.release()


def result_or_failure(task: Callable[[RecordingFolder], Any], place: RecordingFolder) -> Any:
    """The task's result for a recording, or its Failure."""
    try:
        return task(place)
    except (UserError, OSError) as error:
        reason = str(error)
        return Failure(place, reason if str(place) in reason else f"{place}: {reason}")
