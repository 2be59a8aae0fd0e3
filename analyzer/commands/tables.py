"""Write the tables of a recording as Parquet files (analyzer/records/tables.toml documents their columns).

examples:
  python -m analyzer tables recordings/run-1
  python -m analyzer tables recordings/run-1 --out /tmp/tables --json
"""

import argparse
import json

from analyzer.questions.derived import DERIVED
from analyzer.tables.store import load, row_counts, write
from moescope.arguments import add_json, add_out, add_run


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    add_out(parser, "keep them in RUN/tables", "DIR")
    add_json(parser)


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
