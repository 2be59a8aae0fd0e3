"""Run SQL over the tables of a recording (DuckDB). `tables RUN` lists them, analyzer/records/schema.py explains them.

Besides, these are made when asked for: phases, gaps, npu_gaps, npu_windows, displacements, operator_states, decode_steps, growth,
density, reuse, cache_curves (analyzer/questions/derived.py explains them).

examples:
  python -m analyzer query RUN "select type, count(*) n, sum(duration_ns)/1e6 ms from operators group by type order by ms desc"
  python -m analyzer query RUN "select * from qnn_events where execute_id = 0" --json
  python -m analyzer query RUN "describe tokens"
  python -m analyzer query RUN "select cause, sum(duration_ns)/1e6 ms from gaps group by cause"
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import duckdb

from analyzer.errors import AnalysisError
from analyzer.questions.derived import DERIVED
from analyzer.records.schema import TABLES
from analyzer.tables.store import Tables, load
from moescope.arguments import add_json, add_run
from moescope.terminal import console, grid

SHOWN = 200
READING = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
"""DuckDB's kinds of statements that write nothing; DESCRIBE, SUMMARIZE, SHOW and WITH are of the first."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("sql", metavar="SQL", help="one statement")
    add_json(parser)


def named_in(sql: str) -> list[str]:
    """The tables that a statement names; all recorded ones where it names none."""
    words = set(re.findall(r"\w+", sql.lower()))
    return [name for name in (*TABLES, *DERIVED) if name in words] or list(TABLES)


def execute(run_dir: Path, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """(column names, rows) of a statement; the statement sees the tables and nothing outside, and changes nothing."""
    names = named_in(sql)
    tables = load(run_dir, None if any(name in DERIVED for name in names) else names)
    for name in (name for name in names if name in DERIVED):
        tables = tables.with_table(name, DERIVED[name][1](tables))
    with duckdb.connect() as database:
        try:
            show_tables(database, names, tables)
            refuse_writing(database, sql)
            cursor = database.execute(sql)
            return [column[0] for column in cursor.description or []], cursor.fetchall()
        except duckdb.Error as error:
            raise AnalysisError(f"query: {str(error).splitlines()[0]}") from None


def show_tables(database: duckdb.DuckDBPyConnection, names: list[str], tables: Tables) -> None:
    """Let a statement see some tables, and no other file: those that are kept as their Parquet files, others from Arrow."""
    files = {name: str(tables.paths[name].resolve()) for name in names if name in tables.paths}
    for name in names:
        if name in files:
            database.read_parquet(files[name]).create_view(name)
        else:
            database.register(name, tables.arrow(name))
    database.execute("set allowed_paths = $1", [list(files.values())])
    database.execute("set enable_external_access = false")
    database.execute("set lock_configuration = true")


def refuse_writing(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise AnalysisError for what does more than read: the files of the tables are open to the statement."""
    kinds = {statement.type for statement in database.extract_statements(sql)}
    if kinds - READING or (duckdb.StatementType.EXPLAIN in kinds and re.search(r"\bcopy\b", sql, re.IGNORECASE)):
        raise AnalysisError("query: only statements that read are run (SELECT, DESCRIBE, SUMMARIZE, EXPLAIN ...)")


def run(args: argparse.Namespace) -> int:
    """Print the answer."""
    names, rows = execute(args.run_dir, args.sql)
    if args.json:
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=str))
        return 0
    table = grid(*names, left=len(names), fold=True)
    for row in rows[:SHOWN]:
        table.add_row(*(f"{v:,.3f}" if isinstance(v, float) else str(v) for v in row))
    screen = console(wide=True)
    screen.print(table)
    if len(rows) > SHOWN:
        screen.print(f"{len(rows) - SHOWN} more rows: use LIMIT, or --json for all")
    return 0
