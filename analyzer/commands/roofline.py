"""Show what bounds each group of operators: compute, memory bandwidth, disk or launch, against this machine's measured ceilings.

examples:
  moescope predict ceilings                        once on the machine that ran the model
  moescope roofline RUN --phase decode
  moescope roofline RUN --by shape --json
  moescope roofline RUN --ceilings phone.json
"""

import argparse
import sys

from analyzer.commands._show import print_table
from analyzer.questions import ceilings, roofline
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_ceilings, add_json, add_phase, add_run
from tracer.recording.format import Recording

SHOWN = ("count", "ms", "median_us", "intensity", "gflops", "gbytes_per_s", "roof_us", "share_of_roof", "above_ms", "bound")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "--by", choices=tuple(roofline.GROUPINGS), default="type", help="what operators are grouped by (default: type)"
    )
    add_phase(parser)
    add_ceilings(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the groups of operators, time by complexity, and equal subgraphs on several backends."""
    tables = load_tables(args.run_dir)
    machine = ceilings.ceilings_for(Recording(args.run_dir).manifest, args.ceilings)
    rows = roofline.roofline_rows(tables, machine, args.by, args.phase)
    fits, backends = roofline.complexity_fits(tables, args.phase or "decode"), roofline.subgraph_backends(tables)
    if print_if_json(args, {"ceilings": machine, "operators": rows, "complexity": fits, "backends": backends}):
        return 0
    if machine is None:
        print("no ceilings of the recorded machine; measure them: moescope predict ceilings", file=sys.stderr)
    print_table(rows[[*roofline.GROUPINGS[args.by], "backend", *SHOWN]])
    if len(fits):
        print_table(fits, "time = launch + flops / speed, over the shapes of a type")
    if len(backends):
        print_table(backends, "equal subgraphs on several backends")
    return 0
