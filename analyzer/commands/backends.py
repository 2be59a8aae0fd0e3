"""Compare CPU and accelerators: median times of operators of equal type, role in the model and shape.

Work that the host only submits has a time if the accelerator's profile reports one.

examples:
  moescope npu backends RUN
  moescope npu backends RUN OTHER                    one on the CPU, the other on an accelerator
"""

import argparse
from pathlib import Path

from analyzer.commands._show import print_table
from analyzer.questions.backends import compare_backends
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_run


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER", help="another recording of the model")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print a row for each kind of operator that ran on both."""
    rows = compare_backends(*(load_tables(path) for path in (args.run_dir, args.other) if path))
    if print_if_json(args, {"operators": rows}):
        return 0
    if not len(rows):
        print("no operator of equal type, name and shape has a known time both on the CPU and elsewhere")
        return 0
    print_table(rows, "median µs of equal operators", 40)
    return 0
