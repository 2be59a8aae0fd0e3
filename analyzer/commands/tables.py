"""Write the tables of a recording as Parquet files (analyzer/records/schema.py documents their columns).

examples:
  python -m analyzer tables recordings/run-1
  python -m analyzer tables recordings/run-1 --out /tmp/tables --json
"""

import argparse
import json
from pathlib import Path

from analyzer.questions.derived import DERIVED
from analyzer.tables.store import load, row_counts, write


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write; default: keep them in RUN/tables")
    parser.add_argument("--json", action="store_true", help="print rows per table as JSON")


def run(args: argparse.Namespace) -> int:
    """Build, write and count."""
    rows = row_counts(args.run_dir)
    if args.out:
        write(load(args.run_dir), args.out)
    if args.json:
        print(json.dumps(rows))
        return 0
    for name, count in rows.items():
        print(f"{count:>12,}  {name}")
    print("made when a query names them:")
    for name, (meaning, _) in DERIVED.items():
        print(f"              {name}: {meaning}")
    return 0
