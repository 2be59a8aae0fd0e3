"""Recording → tables: every table of records/schema.py, built with column operations, kept beside the recording as Parquet."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet as parquet

from analyzer.records.contents import BLOCK, EVER
from analyzer.records.reading import Source, open_recording
from analyzer.records.schema import TABLES, Column, Columns, Text, conform
from analyzer.tables.building import GAPS_NEED, LONG, MOST, Builder, Piece, gap_table
from tracer.recording.format import Recording, RecordingError

TABLES_VERSION = 6
"""Raise it when the same records give other tables: cached ones are then made again."""

GROWING = ("begin_ns", "wait_ns", "end_ns", "ts_ns", "op_id")
"""Columns, by the ends of their names, that mostly grow from row to row."""
ROWS_AT_ONCE = 1 << 17
INPUTS = ("manifest.json", "events.bin", "details.bin")


def build(recording: Recording, most: int = EVER, block: int = BLOCK) -> dict[str, pd.DataFrame]:
    """Every table of the schema, in memory. Nothing is dropped: what finds no partner has -1 or stands in `unpaired`.

    The answer is the same whatever the number of records that are looked at in one go, `most`.
    """
    builder = Builder(Source(recording, block))
    pieces = list(builder.pieces(most))
    tables = {name: conform(name, joined([piece[name] for piece in pieces])) for name in LONG} | builder.rest()
    tables |= gap_table(tables)
    return {name: tables[name] for name in TABLES}


def joined(parts: list[Columns]) -> Columns:
    """The rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    plain = [{name: c.objects() if isinstance(c, Text) else c for name, c in part.items()} for part in parts]
    return {name: np.concatenate([part[name] for part in plain]) for name in plain[0]}


def fingerprint(folder: Path) -> dict[str, Any]:
    """What cached tables depend on: the recording's files and the schema."""
    files = {}
    for name in INPUTS:
        path = folder / name
        stat = path.stat() if path.exists() else None
        files[name] = [stat.st_size, stat.st_mtime_ns] if stat else None
    schema = {name: [[c.name, c.dtype] for c in columns] for name, columns in TABLES.items()}
    return {"version": TABLES_VERSION, "files": files, "schema": schema}


def load(
    run_dir: str | os.PathLike[str], names: Iterable[str] | None = None, source: Source | None = None
) -> dict[str, pd.DataFrame]:
    """The tables of a recording, or those named: from RUN/tables/ where up to date, else built and, if possible, kept there.

    `source` is the recording's, where it is at hand.
    """
    folder = Path(run_dir)
    recording = source.recording if source else open_recording(folder)
    stamp, wanted = fingerprint(folder), tuple(TABLES if names is None else names)
    cached = _read(folder / "tables", stamp, wanted)
    if cached is not None:
        return cached
    tables = None
    try:
        with contextlib.suppress(OSError):  # a read-only recording is analysed in memory, every time
            tables = keep(source or Source(recording), folder / "tables", stamp)
            tables = _read(folder / "tables", stamp, wanted) if tables is None else tables
        tables = build(recording) if tables is None else tables
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RecordingError(f"{folder} holds records that its manifest does not describe ({error!r}); record again") from error
    return {name: tables[name] for name in wanted}


def row_counts(run_dir: str | os.PathLike[str]) -> dict[str, int]:
    """Rows of each table of a recording. Tables are made and kept where they are not yet; none is loaded if they can be kept."""
    load(run_dir, ())
    try:
        return {name: parquet.read_metadata(Path(run_dir) / "tables" / f"{name}.parquet").num_rows for name in TABLES}
    except OSError:
        return {name: len(table) for name, table in load(run_dir).items()}


def _read(folder: Path, stamp: dict[str, Any], names: Iterable[str]) -> dict[str, pd.DataFrame] | None:
    """Cached tables that were made from exactly this recording by this schema, else None."""
    try:
        if json.loads((folder / "index.json").read_text()) != stamp:
            return None
        return {name: _read_table(name, folder / f"{name}.parquet") for name in names}
    except (OSError, ValueError, KeyError):
        return None


def _read_table(name: str, path: Path) -> pd.DataFrame:
    """One table."""
    with parquet.ParquetFile(path) as file:
        held = file.read()
    return conform(name, {column.name: read_column(held.column(column.name)) for column in TABLES[name]})


def read_column(column: pyarrow.ChunkedArray) -> np.ndarray | Text:
    """A column as `conform` takes it; texts share their strings."""
    whole = column.combine_chunks()
    if pyarrow.types.is_list(whole.type):
        return np.asarray(whole.to_pandas(), object)
    if not pyarrow.types.is_dictionary(whole.type):
        return whole.to_numpy(zero_copy_only=False)
    return Text(whole.indices.to_numpy(), np.array([*whole.dictionary.to_pylist(), ""], object)[:-1])


@contextlib.contextmanager
def replaced(folder: Path, stamp: dict[str, Any] | None) -> Iterator[Path]:
    """A folder whose files take the place of those in `folder`, if all goes well; the index is written last, by rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        yield fresh
        folder.mkdir(exist_ok=True)
        (folder / "index.json").unlink(missing_ok=True)
        for path in fresh.iterdir():
            os.replace(path, folder / path.name)
        if stamp is not None:
            (fresh / "index.json").write_text(json.dumps(stamp))
            os.replace(fresh / "index.json", folder / "index.json")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write(tables: dict[str, pd.DataFrame], folder: Path, stamp: dict[str, Any] | None = None) -> None:
    """Write the tables as Parquet into `folder`, replacing what was there."""
    with replaced(folder, stamp) as fresh:
        for name, table in tables.items():
            part = arrow(name, table)
            parquet.write_table(part, fresh / f"{name}.parquet", **options(part.schema))


def keep(source: Source, folder: Path, stamp: dict[str, Any], most: int = MOST) -> dict[str, pd.DataFrame] | None:
    """Make the tables of a recording and write them, with one stretch of it in memory at a time.

    Answers the tables where one stretch was all.
    """
    builder = Builder(source)
    with replaced(folder, stamp) as fresh, Files(fresh) as files:
        count = 0
        for piece in builder.pieces(most):
            files.add(piece)
            count += 1
        alone, tables = count == 1, builder.rest()
        files.add(tables)
        told = {name: conform(name, columns) for name, columns in piece.items()} if alone else {}
        wanted = GAPS_NEED if not alone and len(tables["qnn_executes"]) else {}
        gaps = gap_table(tables | told | files.read(wanted))
        files.add(gaps)
    return told | tables | gaps if alone else None


class Files:
    """Parquet files that grow by stretches, written by a thread while the next stretch is made."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.worker = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None
        self.writers: dict[str, parquet.ParquetWriter] = {}

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *error: object) -> None:
        with self.worker:
            self.close()

    def close(self) -> None:
        """Finish all files; raises what went wrong with the last ones."""
        try:
            self._wait()
        finally:
            for writer in self.writers.values():
                writer.close()
            self.writers = {}

    def _wait(self) -> None:
        """Wait for what was added last: no more than one stretch is held for writing."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def path(self, name: str) -> Path:
        """The file of a table."""
        return self.folder / f"{name}.parquet"

    def add(self, piece: Piece | dict[str, pd.DataFrame]) -> None:
        """Append rows to each table."""
        self._wait()
        self.pending = self.worker.submit(self._add, piece)

    def _add(self, piece: Piece | dict[str, pd.DataFrame]) -> None:
        for name, columns in piece.items():
            part = arrow(name, columns)
            if name not in self.writers:
                self.writers[name] = parquet.ParquetWriter(self.path(name), part.schema, **options(part.schema))
            if part.num_rows:
                self.writers[name].write_table(part)

    def read(self, columns: dict[str, tuple[str, ...]]) -> dict[str, pd.DataFrame]:
        """Some columns of some tables, which are complete."""
        if columns:
            self.close()
        return {name: parquet.read_table(self.path(name), columns=list(some)).to_pandas() for name, some in columns.items()}


def arrow(name: str, columns: pd.DataFrame | Columns) -> pyarrow.Table:
    """A table as Arrow has it, its types as declared."""
    arrays = [arrow_column(columns[column.name], column) for column in TABLES[name]]
    fields = zip(TABLES[name], arrays, strict=True)
    return pyarrow.table(arrays, pyarrow.schema([pyarrow.field(column.name, a.type, nullable=False) for column, a in fields]))


def arrow_column(values: Any, column: Column) -> pyarrow.Array:
    """One column; texts by a dictionary where they come so."""
    if isinstance(values, Text):
        once = values.unique()
        indices = pyarrow.array(once.codes.astype(np.int32, copy=False))
        return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(once.values, pyarrow.string()))
    array = pyarrow.array(np.asarray(values), arrow_type(column))
    return array.dictionary_encode() if column.dtype == "object" and column.name != "sources" else array


def arrow_type(column: Column) -> pyarrow.DataType:
    """The Arrow type of a column."""
    if column.dtype == "object":
        return pyarrow.list_(pyarrow.uint64()) if column.name == "sources" else pyarrow.string()
    return pyarrow.from_numpy_dtype(column.dtype)


def options(schema: pyarrow.Schema) -> dict[str, Any]:
    """How a Parquet file is written: texts by a dictionary, what mostly grows by its differences, other numbers plain."""
    texts = [field.name for field in schema if pyarrow.types.is_dictionary(field.type)]
    growing = [f.name for f in schema if f.type == pyarrow.int64() and f.name.endswith(GROWING)]
    encoding = dict.fromkeys(growing, "DELTA_BINARY_PACKED")
    how = {"compression": "lz4", "write_statistics": False, "write_batch_size": ROWS_AT_ONCE}
    return {**how, "use_dictionary": texts, "column_encoding": encoding}
