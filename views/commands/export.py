"""Write a recording for other tools: Chrome's trace format, CSV or Parquet tables, GraphML of one token's operators.

examples:
  python -m views export RUN --format chrome-json                 RUN/trace.json: the timeline's slices, without scheduling
  python -m views export RUN --format csv --out folder            one file per table
  python -m views export RUN --format parquet --out folder        likewise, with types kept
  python -m views export RUN --format graphml --token 7           RUN/profdag.graphml

In CSV, a text that a spreadsheet would compute (it begins with =, +, - or @) has an apostrophe before it.
"""

import argparse
from pathlib import Path

from views.exporting import FORMATS
from views.write_outputs import announce, progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")
    parser.add_argument("--format", choices=sorted(FORMATS), required=True)
    parser.add_argument("--out", metavar="PATH", type=Path, help="file, for csv and parquet a folder; default: inside RUN")
    parser.add_argument("--token", metavar="N", type=int, help="graphml: token_id; default: the middle decode token")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write it."""
    with progress() as step:
        step(f"writing {args.format}")
        made = FORMATS[args.format](args.run_dir, args.out, args.token)
    announce(made, args.json)
    return 0
