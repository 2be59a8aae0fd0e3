"""Recording → tables: every table of records/tables.toml, built by column operations, cached beside the recording as Parquet."""

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import pandas as pd
import pyarrow
import pyarrow.parquet as parquet

from analyzer.records.contents import BLOCK, RANGE
from analyzer.records.memory import keep_freed_memory
from analyzer.records.reading import Source
from analyzer.records.schema import IMPORTED, TABLES, arrow_table, frame_of
from analyzer.records.spans import EVER
from analyzer.records.stamps import INPUTS, stat_of
from moescope.plain import doubts, warn
from moescope.scratch import scratch_folder
from tracer.recording.checksums import digest
from tracer.recording.format import Recording, RecordingError, is_whole, with_checksum

if TYPE_CHECKING:
    from analyzer.tables.building import Piece

TABLES_VERSION = 13
"""Increase it when the same records produce different tables: cached ones are then rebuilt."""

GROWING = ("begin_ns", "wait_ns", "end_ns", "ts_ns", "op_id")
"""Columns, by the ends of their names, that mostly grow from row to row."""
ROWS_AT_ONCE = 1 << 17
UNRECORDED = "none"
"""What the manifest of a folder says of its loader where no tracer recorded it: its tables cannot be made again."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class LazyTables(Mapping[str, pd.DataFrame]):
    """Tables by name as pandas frames, each converted from Arrow on first access; `arrow` returns the Arrow table.

    A frame shares the memory of its Arrow table: treat it as read-only; `with_table` replaces a table.
    """

    def __init__(self, readers: Mapping[str, Callable[[], pyarrow.Table]], paths: Mapping[str, Path] | None = None):
        self._readers = dict(readers)
        self._arrow: dict[str, pyarrow.Table] = {}
        self._frames: dict[str, pd.DataFrame] = {}
        self.answers: dict[Any, Any] = {}
        """Of functions that are `answered_once`."""
        self.paths = dict(paths or {})
        """The Parquet files of the tables that are kept."""

    @classmethod
    def of(cls, tables: Mapping[str, pd.DataFrame | pyarrow.Table]) -> "LazyTables":
        """Tables from frames or Arrow tables in memory; returns a `LazyTables` argument itself."""
        if isinstance(tables, LazyTables):
            return tables
        answer = cls(dict.fromkeys(tables, dict))
        for name, table in tables.items():
            (answer._arrow if isinstance(table, pyarrow.Table) else answer._frames)[name] = table
        return answer

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._frames:
            self._frames[name] = frame_of(self.arrow(name))
        return self._frames[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def arrow(self, name: str) -> pyarrow.Table:
        """The Arrow table with columns as declared: texts are dictionary-encoded with int32 codes and unique values."""
        if name not in self._arrow:
            frame = self._frames.get(name)
            self._arrow[name] = compact_table(self._readers[name]()) if frame is None else arrow_of(name, frame)
        return self._arrow[name]

    def with_table(self, name: str, frame: pd.DataFrame) -> "LazyTables":
        """The same tables with one added or replaced."""
        answer = LazyTables(self._readers | {name: dict}, {n: path for n, path in self.paths.items() if n != name})
        answer._arrow = {n: table for n, table in self._arrow.items() if n != name}
        answer._frames = self._frames | {name: frame}
        return answer


def answered_once(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """The function of tables, whose answer LazyTables keep for each of its other arguments; treat it as read-only."""

    @wraps(function)
    def answer(*args: Arguments.args, **options: Arguments.kwargs) -> Answer:
        tables, key = args[0], (function, args[1:], *options.items())
        if not isinstance(tables, LazyTables):
            return function(*args, **options)
        if key not in tables.answers:
            tables.answers[key] = function(*args, **options)
        return tables.answers[key]  # type: ignore[no-any-return]

    return answer


def arrow_of(name: str, frame: pd.DataFrame) -> pyarrow.Table:
    """A frame as an Arrow table: declared tables get the declared columns, others keep theirs."""
    declared = name in TABLES or name in IMPORTED
    return arrow_table(name, frame) if declared else pyarrow.Table.from_pandas(frame, preserve_index=False)


def build_tables(recording: Recording, most: int = EVER, block: int = BLOCK) -> LazyTables:
    """Every table of the schema, in memory. Nothing is dropped: records without a partner have -1 or are in `unpaired`.

    The result does not depend on `most`, the number of records per time range.
    """
    from analyzer.tables.building import LONG, TableBuilder, gap_table  # a tenth of a second: cached tables do not need it

    builder = TableBuilder(Source(recording, block))
    pieces = list(builder.pieces(most))
    tables = {
        name: compact_table(pyarrow.concat_tables(piece[name] for piece in pieces)) for name in LONG
    } | builder.last_tables()
    tables |= gap_table(tables)
    return LazyTables.of({name: tables[name] for name in TABLES})


def compact_table(table: pyarrow.Table) -> pyarrow.Table:
    """The table with each column in one chunk and unique dictionary values."""
    if all(column.num_chunks == 1 for column in table.columns):
        return table  # combining would copy even single chunks
    return table.unify_dictionaries().combine_chunks()


def input_fingerprint(folder: Path) -> dict[str, Any]:
    """The inputs of cached tables: the recording's files and the schema."""
    return stamp_of({name: stat_of(folder / name) for name in INPUTS})


def stamp_of(files: dict[str, list[int] | None]) -> dict[str, Any]:
    """The same, from the sizes and times of INPUTS."""
    schema = {name: [[c.name, c.dtype] for c in columns] for name, columns in TABLES.items()}
    return {"version": TABLES_VERSION, "files": files, "schema": schema}


def load_tables(run_dir: str | os.PathLike[str], names: Iterable[str] | None = None, source: Source | None = None) -> LazyTables:
    """The tables of a recording, or those in `names`: from RUN/tables/ if up to date, else built and, if possible, stored there.

    `source` is the recording's Source, if already read.
    """
    folder = Path(run_dir)
    recording = source.recording if source else Recording(folder)
    stamp, asked = input_fingerprint(folder), tuple(TABLES if names is None else names)
    ready = _cached_tables(folder / "tables", stamp, asked)
    if ready is not None:
        return ready
    if recording.manifest.get("loader") == UNRECORDED:
        raise RecordingError(
            f"{folder} holds tables of another release or damaged ones, and no records: import or simulate it again"
        )
    keep_freed_memory()
    try:
        source = source or Source(recording)
        _warn_unstored(folder, source.damage)
        return _rebuild_tables(source, folder / "tables", stamp, asked)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise RecordingError(f"{folder} holds records that its manifest does not describe ({error!r}); record again") from error


def _rebuild_tables(source: Source, folder: Path, stamp: dict[str, Any], names: Iterable[str]) -> LazyTables:
    """Tables rebuilt and, if possible, stored."""
    with contextlib.suppress(OSError):  # a read-only recording is analysed in memory, every time
        build_and_store(source, folder, stamp)
        return open_cached(folder, names)
    tables = build_tables(source.recording)
    return LazyTables.of({name: tables.arrow(name) for name in names})


def row_counts(run_dir: str | os.PathLike[str]) -> dict[str, int]:
    """Row count of each table of a recording. Missing tables are built and stored; tables are loaded only if they cannot be."""
    tables = load_tables(run_dir)
    if tables.paths:
        return {name: parquet.read_metadata(path).num_rows for name, path in tables.paths.items()}
    return {name: len(table) for name, table in tables.items()}


def _warn_unstored(folder: Path, damage: Iterable[str]) -> None:
    for line in damage:
        warn(f"{folder}: {line}")
        doubts.append(str(folder))


def _cached_tables(folder: Path, stamp: dict[str, Any], names: Iterable[str]) -> LazyTables | None:
    """Cached tables if they were made from exactly this recording by this schema and are undamaged, else None."""
    try:
        index = json.loads((folder / "index.json").read_text())
        files = [f"{name}.parquet" for name in names]
        if not is_whole(index) or index["stamp"] != stamp:
            return None
        if any(sum_of(folder / file) != index["sums"][file] for file in files):
            return None
        _warn_unstored(folder.parent, index["damage"])
        return open_cached(folder, names)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def open_cached(folder: Path, names: Iterable[str]) -> LazyTables:
    """Cached tables. Their files stay open: a rebuild replaces the files and does not change open ones."""
    paths = {name: folder / f"{name}.parquet" for name in names}
    files = {name: parquet.ParquetFile(path, memory_map=True) for name, path in paths.items()}
    return LazyTables({name: file.read for name, file in files.items()}, paths)


def sum_of(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        return digest(view)


@contextlib.contextmanager
def replace_folder(folder: Path, stamp: dict[str, Any] | None, damage: Iterable[str] = ()) -> Iterator[Path]:
    """Context manager: a scratch folder that replaces the files of `folder` on success; the index is renamed last."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent, f".{folder.name}-") as fresh:
        fresh.chmod(0o755)
        yield fresh
        folder.mkdir(exist_ok=True)
        (folder / "index.json").unlink(missing_ok=True)
        index = {"stamp": stamp, "damage": list(damage), "sums": {path.name: sum_of(path) for path in fresh.iterdir()}}
        for path in fresh.iterdir():
            os.replace(path, folder / path.name)
        if stamp is not None:
            (fresh / "index.json").write_text(json.dumps(with_checksum(index)))
            os.replace(fresh / "index.json", folder / "index.json")


def write_tables(frames: Mapping[str, pd.DataFrame], folder: Path, stamp: dict[str, Any] | None = None) -> None:
    """Write the tables as Parquet into `folder`, replacing existing ones."""
    tables = LazyTables.of(frames)
    with replace_folder(folder, stamp) as fresh:
        for name in tables:
            table = tables.arrow(name)
            parquet.write_table(table, fresh / f"{name}.parquet", **parquet_options(table.schema))


def build_and_store(source: Source, folder: Path, stamp: dict[str, Any], most: int = RANGE) -> None:
    """Build the tables of a recording and write them, with one time range in memory at a time."""
    from analyzer.tables.building import GAPS_NEED, TableBuilder, gap_table

    builder = TableBuilder(source)
    with replace_folder(folder, stamp, source.damage) as fresh, GrowingFiles(fresh) as files:
        for piece in builder.pieces(most):
            files.add(piece)
        tables = builder.last_tables()
        files.add(tables)
        needed = files.read(GAPS_NEED if tables["qnn_executes"].num_rows else {})
        files.add(gap_table(tables | needed))


class GrowingFiles:
    """Parquet files that grow by time range, written by a thread while the next range is built."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.worker = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None
        self.writers: dict[str, parquet.ParquetWriter] = {}

    def __enter__(self) -> "GrowingFiles":
        return self

    def __exit__(self, *error: object) -> None:
        with self.worker:
            self.close()

    def close(self) -> None:
        """Finish all files; raises errors of pending writes."""
        try:
            self._wait()
        finally:
            for writer in self.writers.values():
                writer.close()
            self.writers = {}

    def _wait(self) -> None:
        """Wait for the pending write, so that at most one time range is held in memory for writing."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def path(self, name: str) -> Path:
        """The file of a table."""
        return self.folder / f"{name}.parquet"

    def add(self, piece: "Piece") -> None:
        """Append rows to each table."""
        self._wait()
        self.pending = self.worker.submit(self._add, piece)

    def _add(self, piece: "Piece") -> None:
        for name, part in piece.items():
            if name not in self.writers:
                self.writers[name] = parquet.ParquetWriter(self.path(name), part.schema, **parquet_options(part.schema))
            if part.num_rows:
                self.writers[name].write_table(part)

    def read(self, columns: dict[str, tuple[str, ...]]) -> "Piece":
        """Some columns of some tables, read from the finished files."""
        if columns:
            self.close()
        return {name: parquet.ParquetFile(self.path(name)).read(list(some)) for name, some in columns.items()}


def parquet_options(schema: pyarrow.Schema) -> dict[str, Any]:
    """Parquet encodings: dictionary for texts, deltas for mostly increasing numbers, plain for other numbers."""
    texts = [field.name for field in schema if pyarrow.types.is_dictionary(field.type)]
    growing = [f.name for f in schema if f.type == pyarrow.int64() and f.name.endswith(GROWING)]
    encoding = dict.fromkeys(growing, "DELTA_BINARY_PACKED")
    how = {"compression": "lz4", "write_statistics": False, "write_batch_size": ROWS_AT_ONCE}
    return {**how, "use_dictionary": texts, "column_encoding": encoding}
