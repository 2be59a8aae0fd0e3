"""Write the report of a comparison: one self-contained HTML file.

examples:
  python -m analyzer compare before/ after/ -o regression.html     does both at once
  python -m analyzer compare before/ after/ --json > comparison.json
  python -m views regression comparison.json --out regression.html
"""

import argparse
from pathlib import Path

from moescope.arguments import add_json, add_out
from views.write_outputs import write_from_json


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("comparison", metavar="FILE", type=Path, help="output of `python -m analyzer compare --json`")
    add_out(parser, Path("regression.html"))
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the report."""
    from views.regression import write_regression

    return write_from_json(args, args.comparison, "comparison", "compare", write_regression)
