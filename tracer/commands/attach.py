"""`tracer attach`: trace a process that runs already, without stopping it for good."""

import argparse

from tracer.commands.on_device import add_on_and_libraries, record_on
from tracer.commands.options import add_options, session_options
from tracer.commands.run import record, show_results
from tracer.config import parse
from tracer.target.process import Followed

__all__ = ["EXAMPLES", "parse", "prepare_parser", "run"]

EXAMPLES = """examples:
  sudo python -m tracer attach --pid $(pgrep -n llama-server) --duration 10
  sudo python -m tracer attach --pid $(pgrep -n llama-server)      until Ctrl-C or until it ends
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser)
    add_on_and_libraries(parser)
    parser.add_argument("--pid", type=int, required=True, help="process to follow, with its children")


def run(args: argparse.Namespace) -> int:
    """Trace the process."""
    if args.on:
        return record_on(args, [str(args.pid)], show_results)
    options = session_options(args)
    return record(options, lambda: Followed(args.pid), not args.no_views)
