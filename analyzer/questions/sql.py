"""SQL over the tables of a recording and those that follow from them, by DuckDB."""

import re
from typing import Any

import duckdb
import pandas as pd

from analyzer.errors import AnalysisError
from analyzer.questions.derived import DERIVED
from analyzer.records.schema import TABLES
from analyzer.tables.store import Tables

READING = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
"""DuckDB's kinds of statements that write nothing; DESCRIBE, SUMMARIZE, SHOW and WITH are of the first."""


def named_in(sql: str) -> list[str]:
    """The tables that a statement names; all recorded ones where it names none."""
    words = set(re.findall(r"\w+", sql.lower()))
    return [name for name in (*TABLES, *DERIVED) if name in words] or list(TABLES)


class Database:
    """Answers statements that see the tables and nothing outside, and change nothing.

    Kept tables are read from their Parquet files, others from Arrow; a derived one is made when a statement first names it.
    """

    def __init__(self, tables: Tables):
        self.tables, self.shown = tables, set[str]()
        self.connection = duckdb.connect()
        self.connection.execute("set allowed_paths = $1", [[str(path.resolve()) for path in tables.paths.values()]])
        self.connection.execute("set enable_external_access = false")
        self.connection.execute("set lock_configuration = true")

    def rows(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """(column names, rows) of a statement; raises AnalysisError."""
        cursor = self._cursor(sql)
        return [column[0] for column in cursor.description or []], cursor.fetchall()

    def frame(self, sql: str) -> pd.DataFrame:
        """The same as a frame."""
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
        """Let statements see a table."""
        if name in self.shown:
            return
        if name in DERIVED:
            self.tables = self.tables.with_table(name, DERIVED[name][1](self.tables))
        if name in self.tables.paths:
            self.connection.read_parquet(str(self.tables.paths[name].resolve())).create_view(name)
        else:
            self.connection.register(name, self.tables.arrow(name))
        self.shown.add(name)


def refuse_writing(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise AnalysisError for what does more than read: the files of the tables are open to the statement."""
    kinds = {statement.type for statement in database.extract_statements(sql)}
    if kinds - READING or (duckdb.StatementType.EXPLAIN in kinds and re.search(r"\bcopy\b", sql, re.IGNORECASE)):
        raise AnalysisError("query: only statements that read are run (SELECT, DESCRIBE, SUMMARIZE, EXPLAIN ...)")
