"""Write the page of a simulated sweep: memory against time, and the settings on the Pareto front.

examples:
  python -m analyzer simulate RUN --cache 25%,50%,75%,100% --prefetch off,0.3 --json > sweep.json
  python -m views pareto sweep.json --out pareto.html
"""

import argparse
from pathlib import Path

from moescope.arguments import add_json, add_out
from views.write_outputs import write_from_json


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("sweep", metavar="FILE", type=Path, help="output of `python -m analyzer simulate --json`")
    add_out(parser, Path("pareto.html"))
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    from views.pareto import write_pareto

    return write_from_json(args, args.sweep, "sweep", "simulate", write_pareto)
