"""Write the ProfDAG page of one token: its operators, their inputs and times.

examples:
  python -m views dag RUN                   the middle decode token, RUN/profdag.html
  python -m views dag RUN --token 0         the first step, usually the prefill
"""

import argparse

from moescope.arguments import add_token
from moescope.terminal import progress
from views.write_outputs import add_arguments, announce, make_dag


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_arguments(parser)
    add_token(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    with progress("reading the recording") as step:
        written = make_dag(args.run_dir, args.out, step, args.token)
    announce(written, args.json)
    return 0
