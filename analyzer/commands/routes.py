"""Export a recording's routes in another tool's format, or convert such a format into another.

examples:
  python -m analyzer routes RUN --out trace.csv                         BigMoeOnEdge's route_trace v1
  python -m analyzer routes RUN --format layer-expert --out moe.csv     rows of llama.cpp's moe-trace
  python -m analyzer routes trace.csv --format counts --out counts.csv  tokens per expert

`experts` and `simulate` take a file in any of the formats in place of RUN.
"""

import argparse
from pathlib import Path

from analyzer.imports.routes import FORMATS, read_routes, write_routes
from analyzer.records.schema import Tables
from analyzer.tables.store import load


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording, or a file of routes")
    meanings = "; ".join(f"{name}: {form.meaning}" for name, form in FORMATS.items())
    parser.add_argument("--format", choices=tuple(FORMATS), default="route-trace", help=f"{meanings} (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="where to write")


def run(args: argparse.Namespace) -> int:
    """Write the file."""
    tables = tables_of(args.run_dir)
    write_routes(tables, args.out, args.format)
    print(f"{args.out}: routes of {len(tables['tokens']):,} steps")
    return 0


def tables_of(path: Path) -> Tables:
    """The tables of a recording's folder, or of a file of routes."""
    return read_routes(path) if path.is_file() else load(path)
