"""Write the report of a comparison: one self-contained HTML file.

examples:
  python -m analyzer compare before/ after/ -o regression.html     does both at once
  python -m analyzer compare before/ after/ --json > comparison.json
  python -m views regression comparison.json --out regression.html
"""

import argparse
import json
from pathlib import Path

from moescope.arguments import add_json, add_out
from views.errors import ViewError
from views.write_outputs import announce


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("comparison", metavar="FILE", type=Path, help="output of `python -m analyzer compare --json`")
    add_out(parser, Path("regression.html"))
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the report."""
    from views.regression import write_regression

    try:
        written = write_regression(json.loads(args.comparison.read_text()), args.out)
    except (ValueError, KeyError, TypeError) as error:
        raise ViewError(
            f"{args.comparison} is not a comparison ({error!r}); write one with `python -m analyzer compare --json`"
        ) from None
    announce({"path": str(args.out), "bytes": written}, args.json)
    return 0
