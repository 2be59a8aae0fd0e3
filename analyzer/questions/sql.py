"""SQL over the recorded and derived tables of a recording, by DuckDB."""

import re
from typing import Any

import duckdb
import pandas as pd
import pyarrow
from pyarrow import dataset, fs

from analyzer.errors import AnalysisError
from analyzer.questions.derived import DERIVED
from analyzer.records.schema import TABLES, arrow_schema
from analyzer.tables.recording_folders import RecordingFolder
from analyzer.tables.store import LazyTables

RECORDING = pyarrow.field("recording", pyarrow.int64())
READING = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
"""DuckDB's kinds of statements that write nothing; DESCRIBE, SUMMARIZE, SHOW and WITH are of the first."""


def named_in(sql: str) -> list[str]:
    """The tables that a statement names; all recorded ones if it names none."""
    words = set(re.findall(r"\w+", sql.lower()))
    return [name for name in (*TABLES, *DERIVED) if name in words] or list(TABLES)


class Database:
    """Runs read-only statements that can access the tables and nothing else.

    Cached tables are read from their Parquet files, others from Arrow; a derived one is made when a statement first names it.
    """

    def __init__(self, tables: LazyTables):
        self.tables, self.shown = tables, set[str]()
        self._open([str(path.resolve()) for path in tables.paths.values()])

    def _open(self, paths: list[str]) -> None:
        self.connection = duckdb.connect()
        self.connection.execute("set allowed_paths = $1", [paths])
        self.connection.execute("set enable_external_access = false")
        self.connection.execute("set lock_configuration = true")

    def rows(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """(column names, rows) of a statement; raises AnalysisError."""
        cursor = self._cursor(sql)
        return [column[0] for column in cursor.description or []], cursor.fetchall()

    def frame(self, sql: str) -> pd.DataFrame:
        """The result of a statement as a frame; raises AnalysisError."""
        return self._cursor(sql).df()

    def _cursor(self, sql: str) -> duckdb.DuckDBPyConnection:
        try:
            for name in named_in(sql):
                self._show(name)
            refuse_writing(self.connection, sql)
            return self.connection.execute(sql)
        except duckdb.Error as error:
            raise AnalysisError(f"query: {str(error).splitlines()[0]}") from None

    def _show(self, name: str) -> None:
        """Register a table for statements."""
        if name in self.shown:
            return
        if name in DERIVED and name in TABLES:  # with more columns than the recorded table, which other answers read
            self.connection.register(name, DERIVED[name][1](self.tables))
            self.shown.add(name)
            return
        if name in DERIVED:
            self.tables = self.tables.with_table(name, DERIVED[name][1](self.tables))
        if name in self.tables.paths:
            self.connection.read_parquet(str(self.tables.paths[name].resolve())).create_view(name)
        else:
            self.connection.register(name, self.tables.arrow(name))
        self.shown.add(name)


class ManyDatabase(Database):
    """A Database over many recordings of one store with cached tables: each table has the rows of all recordings.

    A column `recording` numbers the rows of the table `recordings` (recording, device, build, run, path).
    """

    def __init__(self, some: list[RecordingFolder]):
        super().__init__(LazyTables.of({}))
        self.places = some
        about = {name: [place.said(name) for place in some] for name in ("device", "build")}
        about |= {"run": [place.name for place in some], "path": list(map(str, some))}
        self.connection.register("recordings", pyarrow.table({"recording": range(len(some)), **about}))

    def _show(self, name: str) -> None:
        if name in DERIVED and name not in TABLES:
            raise AnalysisError(f"query: {name} is derived from a single recording: give only that one")
        if name not in self.shown:
            self.connection.register(name, union_of(name, self.places))
            self.shown.add(name)


def union_of(name: str, some: list[RecordingFolder]) -> dataset.Dataset:
    """The union of one table of many recordings, read lazily."""
    form, schema = dataset.ParquetFileFormat(), arrow_schema(name).append(RECORDING)
    store = fs.LocalFileSystem() if some[0].is_local else fs.PyFileSystem(fs.FSSpecHandler(some[0].filesystem))
    files = [
        form.make_fragment(f"{place.path}/tables/{name}.parquet", store, dataset.field(RECORDING.name) == number)
        for number, place in enumerate(some)
    ]
    return dataset.FileSystemDataset(files, schema, form, store)


def refuse_writing(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise AnalysisError for statements that write, since the files of the tables are accessible to them."""
    kinds = {statement.type for statement in database.extract_statements(sql)}
    if kinds - READING or (duckdb.StatementType.EXPLAIN in kinds and re.search(r"\bcopy\b", sql, re.IGNORECASE)):
        raise AnalysisError("query: only read-only statements are allowed (SELECT, DESCRIBE, SUMMARIZE, EXPLAIN ...)")
