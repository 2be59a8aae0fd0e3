"""`moescope attach`: trace a process that runs already, without stopping it for good."""

import argparse
from pathlib import Path

from tracer.commands.on_device import add_on_and_libraries, record_on
from tracer.commands.options import add_options, choice_of
from tracer.commands.run import Subject, discarded_unless_begun, record, show_results
from tracer.config import parse
from tracer.traced_program.process import command_line

__all__ = ["EXAMPLES", "parse", "prepare_parser", "run"]

EXAMPLES = """examples:
  sudo moescope attach --pid $(pgrep -n llama-server) --duration 10
  sudo moescope attach --pid $(pgrep -n llama-server)      until Ctrl-C or until it ends
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser)
    add_on_and_libraries(parser)
    parser.add_argument("--pid", type=int, required=True, help="process to follow, with its children")


def run(args: argparse.Namespace) -> int:
    """Trace the process; the exit code is 1 if records were lost."""
    if args.on:
        return record_on(args, [str(args.pid)], show_results)
    command = command_line(args.pid)
    with discarded_unless_begun(args):
        choice = choice_of(args)
        folder = Path(f"/proc/{args.pid}/cwd")
        subject = Subject(command, folder, ["--pid", str(args.pid)], f"process {args.pid}", {"command": command})
        return record(choice, subject, not args.no_views)
