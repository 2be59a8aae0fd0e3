"""Write the ProfDAG page of one token: its operators, what each reads, where the time went.

examples:
  python -m views dag RUN                   the middle decode token, RUN/profdag.html
  python -m views dag RUN --token 0         the first step, usually the prefill
"""

import argparse

from views.write_outputs import add_arguments, announce, make_dag, progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_arguments(parser)
    parser.add_argument("--token", metavar="N", type=int, help="token_id; default: the middle decode token, else the first token")


def run(args: argparse.Namespace) -> int:
    """Write it."""
    with progress() as step:
        made = make_dag(args.run_dir, args.out, step, args.token)
    announce(made, args.json)
    return 0
