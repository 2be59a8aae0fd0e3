"""Run SQL over the tables of a recording (DuckDB). `tables RUN` lists them, analyzer/records/tables.toml explains them.

Besides, these are made when asked for: phases, gaps, npu_gaps, npu_windows, displacements, operator_states, decode_steps, growth,
activations, density, reuse, time_by_distance, cache_hits, cache_curves, thread_balance, displaced_by
(analyzer/questions/derived.py explains them).

examples:
  python -m analyzer query RUN "select type, count(*) n, sum(duration_ns)/1e6 ms from operators group by type order by ms desc"
  python -m analyzer query RUN "select * from qnn_events where execute_id = 0" --json
  python -m analyzer query RUN "describe tokens"
  python -m analyzer query RUN "select cause, sum(duration_ns)/1e6 ms from gaps group by cause"
"""

import argparse
import json
from pathlib import Path
from typing import Any

from analyzer.questions.derived import DERIVED
from analyzer.questions.sql import Database, named_in
from analyzer.tables.store import Tables, load
from moescope.arguments import add_json, add_run
from moescope.terminal import console, grid

SHOWN = 200


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("sql", metavar="SQL", help="one SQL statement")
    add_json(parser)


def execute(run_dir: Path, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """(column names, rows) of a statement; the statement sees the tables and nothing outside, and changes nothing."""
    names = named_in(sql)
    return Database(Tables.of(load(run_dir, None if any(name in DERIVED for name in names) else names))).rows(sql)


def run(args: argparse.Namespace) -> int:
    """Print the answer."""
    names, rows = execute(args.run_dir, args.sql)
    if args.json:
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=str))
        return 0
    cells = ([f"{v:,.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows[:SHOWN])
    screen = console(wide=True)
    screen.print(grid(*names, left=len(names), fold=True, rows=cells))
    if len(rows) > SHOWN:
        screen.print(f"{len(rows) - SHOWN} more rows: use LIMIT, or --json for all")
    return 0
