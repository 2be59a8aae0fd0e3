"""Write the report of a recording: one HTML file that needs nothing else, not even a network.

examples:
  python -m views report RUN                RUN/report.html
  python -m views report RUN --out a.html
"""

import argparse
from pathlib import Path

from views.making import announce, make_report, progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")
    parser.add_argument("--out", metavar="FILE", type=Path, help="default: inside RUN")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write it."""
    with progress() as step:
        made = make_report(args.run_dir, args.out, step)
    announce(made, args.json)
    return 0
