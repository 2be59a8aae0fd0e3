"""Run SQL over the tables of a recording (DuckDB). `tables RUN` lists them, analyzer/records/tables.toml explains them.

A folder of recordings, a pattern or an address (s3://...) means all recordings there: each table is that of all of them, with a
column `recording`, the row of the table `recordings` (recording, device, build, run, path). Unreadable recordings are reported,
and the exit code is 1.

These are derived on demand: time, mean_steps, gaps, operator_times, requests, submissions, npu_gaps, npu_windows, displacements,
displaced_by, operator_states, decode_steps, growth, activations, density, reuse, time_by_distance, cache_hits, cache_curves,
thread_balance
(analyzer/questions/derived.py explains them).

examples:
  python -m analyzer query RUN "select type, count(*) n, sum(duration_ns)/1e6 ms from operators group by type order by ms desc"
  python -m analyzer query RUN "select * from qnn_events where execute_id = 0" --json
  python -m analyzer query RUN "describe tokens"
  python -m analyzer query RUN "select cause, sum(duration_ns)/1e6 ms from gaps group by cause"
  python -m analyzer query 'runs/**' "select build, avg(duration_ns) from tokens join recordings using (recording) group by 1"
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from analyzer.commands._show import answers
from analyzer.errors import AnalysisError
from analyzer.questions.derived import DERIVED
from analyzer.questions.sql import Database, ManyDatabase, named_in
from analyzer.records.schema import TABLES
from analyzer.tables.recording_folders import Failure, is_many, make_tables, recording_folders
from analyzer.tables.store import Tables, load
from moescope.arguments import add_json
from moescope.terminal import console, grid

SHOWN = 200
Answer = tuple[list[str], list[tuple[Any, ...]]]
"""Column names, rows."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="folder of the recording, or a pattern or an address of many")
    parser.add_argument("sql", metavar="SQL", help="one SQL statement")
    add_json(parser)


def execute(run: str | Path, sql: str) -> Answer:
    """The result for a recording's tables."""
    names = named_in(sql)
    return Database(Tables.of(load(run, None if any(name in DERIVED for name in names) else names))).rows(sql)


def execute_on_many(address: str, sql: str) -> tuple[Answer, list[Failure]]:
    """(result for the tables of all recordings at an address, unreadable recordings)."""
    names = [name for name in named_in(sql) if name in TABLES]
    ready, failures = answers(partial(make_tables, names=names), recording_folders(address))
    if not ready:
        raise AnalysisError(f"none of the recordings of {address} can be read")
    return ManyDatabase(ready).rows(sql), failures


def run(args: argparse.Namespace) -> int:
    """Run the statement and print the result."""
    many = is_many(args.run)
    (names, rows), failures = execute_on_many(args.run, args.sql) if many else (execute(args.run, args.sql), [])
    if args.json:
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=str))
        return int(bool(failures))
    cells = ([f"{v:,.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows[:SHOWN])
    screen = console(wide=True)
    screen.print(grid(*names, left=len(names), rows=cells))
    if len(rows) > SHOWN:
        screen.print(f"{len(rows) - SHOWN} more rows: use LIMIT, or --json for all")
    return int(bool(failures))
