"""Write a recording for other tools: Chrome's trace format, CSV or Parquet tables, GraphML of one token's operators.

examples:
  python -m views export RUN --format chrome-json                 RUN/trace.json: the timeline's slices, without scheduling
  python -m views export RUN --format csv --out folder            one file per table
  python -m views export RUN --format parquet --out folder        likewise, with types kept
  python -m views export RUN --format graphml --token 7           RUN/profdag.graphml

In CSV, a text that a spreadsheet would compute (it begins with =, +, - or @) has an apostrophe before it.
"""

import argparse

from moescope.arguments import add_json, add_out, add_run, add_token
from moescope.terminal import progress
from views.exporting import FORMATS
from views.write_outputs import announce


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("--format", choices=sorted(FORMATS), required=True, help="format of the files; --token is for graphml")
    add_out(parser, "inside RUN; for csv and parquet a folder", "PATH")
    add_token(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file or files."""
    with progress("reading the recording") as step:
        step(f"writing {args.format}")
        written = FORMATS[args.format](args.run_dir, args.out, args.token)
    announce(written, args.json)
    return 0
