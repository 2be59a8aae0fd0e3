"""Run SQL over the tables of a recording (DuckDB); without SQL, keep the tables as Parquet in RUN/tables, and list them.
docs/reference/README.md explains their columns.

A folder of recordings, a pattern or an address (s3://...) means all recordings there: each table is that of all of them, with a
column `recording`, the row of the table `recordings` (recording, device, build, run, path). Without SQL, tables and the result
that `history` and `compare` read are kept beside each, where they are not there yet. Unreadable recordings are reported, and the
exit code is 1.

These are derived on demand: time, mean_steps, gaps, operator_times, requests, submissions, npu_gaps, npu_windows, displacements,
displaced_by, operator_states, decode_steps, growth, activations, density, reuse, time_by_distance, cache_hits, cache_curves,
thread_balance
(analyzer/questions/derived.py explains them).

examples:
  moescope query RUN
  moescope query 's3://bucket/device=*/build=v2/*' --dask 8
  moescope query RUN "select type, count(*) n, sum(duration_ns)/1e6 ms from operators group by type order by ms desc"
  moescope query RUN "select * from qnn_events where execute_id = 0" --json
  moescope query RUN "describe tokens"
  moescope query RUN "select cause, sum(duration_ns)/1e6 ms from gaps group by cause"
  moescope query 'runs/**' "select build, avg(duration_ns) from tokens join recordings using (recording) group by 1"
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from analyzer.commands._show import map_recordings
from analyzer.compare.results import of_place
from analyzer.errors import AnalysisError
from analyzer.questions.derived import DERIVED
from analyzer.questions.sql import Database, ManyDatabase, named_in
from analyzer.records.schema import TABLES
from analyzer.tables.recording_folders import Failure, is_many, make_tables, recording_folders
from analyzer.tables.store import LazyTables, load_tables, row_counts
from moescope.answers import print_if_json
from moescope.arguments import add_json
from moescope.terminal import console, counted, grid

SHOWN = 200
Answer = tuple[list[str], list[tuple[Any, ...]]]
"""Column names, rows."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="folder of the recording, or a pattern or an address of many")
    parser.add_argument("sql", metavar="SQL", nargs="?", help="one SQL statement (default: list the tables)")
    parser.add_argument(
        "--dask", metavar="WORKERS", default="", help="for many: number of local processes, or address of a Dask scheduler"
    )
    add_json(parser)


def query_tables(run: str | Path, sql: str) -> Answer:
    """The result for a recording's tables."""
    names = named_in(sql)
    return Database(LazyTables.of(load_tables(run, None if any(name in DERIVED for name in names) else names))).rows(sql)


def execute_on_many(address: str, sql: str, dask: str) -> tuple[Answer, list[Failure]]:
    """(result for the tables of all recordings at an address, unreadable recordings)."""
    names = [name for name in named_in(sql) if name in TABLES]
    ready, failures = map_recordings(partial(make_tables, names=names), recording_folders(address), dask)
    if not ready:
        raise AnalysisError(f"none of the recordings of {address} can be read")
    return ManyDatabase(ready).rows(sql), failures


def run(args: argparse.Namespace) -> int:
    """Run the statement and print the result, or list the tables."""
    many = is_many(args.run)
    if args.sql is None:
        return keep_many(args) if many else list_tables(args)
    (names, rows), failures = execute_on_many(args.run, args.sql, args.dask) if many else (query_tables(args.run, args.sql), [])
    if print_if_json(args, {"rows": [dict(zip(names, row, strict=True)) for row in rows] if args.json else []}):
        return int(bool(failures))
    cells = ([f"{v:,.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows[:SHOWN])
    screen = console(wide=True)
    screen.print(grid(*names, left=len(names), rows=cells))
    if len(rows) > SHOWN:
        screen.print(f"{len(rows) - SHOWN} more rows: use LIMIT, or --json for all")
    return int(bool(failures))


def keep_many(args: argparse.Namespace) -> int:
    """Keep tables and result beside each of many recordings."""
    done, failures = map_recordings(of_place, recording_folders(args.run), args.dask)
    if not print_if_json(args, {"recordings": len(done), "failed": {str(each.place): each.reason for each in failures}}, "many"):
        print(f"tables kept for {counted(len(done), 'recording')}; not readable: {len(failures):,}")
    return int(bool(failures))


def list_tables(args: argparse.Namespace) -> int:
    """Keep the tables of one recording, and print their row counts."""
    rows = row_counts(args.run)
    if print_if_json(args, {"tables": rows}, "tables"):
        return 0
    for name, count in rows.items():
        print(f"{count:>12,}  {name}")
    print("derived when a query uses them:")
    for name, (meaning, _) in DERIVED.items():
        print(f"              {name}: {meaning}")
    return 0
