"""Write the report of a recording: one self-contained HTML file.

examples:
  python -m views report RUN                RUN/report.html
  python -m views report RUN --out a.html
"""

import argparse

from moescope.terminal import progress
from views.write_outputs import add_arguments, announce, make_report


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the report."""
    with progress("reading the recording") as step:
        written = make_report(args.run_dir, args.out, step)
    announce(written, args.json)
    return 0
