"""Write the timeline of a recording as a native Perfetto trace: CPUs, threads, NPU, counters.

examples:
  python -m views trace RUN                 RUN/trace.pftrace
  python -m views trace RUN --out a.pftrace
  python -m views trace RUN --gzip          RUN/trace.pftrace.gz, which Perfetto opens as it is
  python -m views trace RUN --optrace chrometrace.json --execute 12

An optrace does not say which execution it is of; without --execute it is drawn in the first one whose time on the NPU is known.
"""

import argparse
from pathlib import Path

from moescope.terminal import progress
from views.write_outputs import add_arguments, announce, make_trace


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_arguments(parser)
    parser.add_argument("--gzip", action="store_true", help="compress the file: a third of the size or less, at half the speed")
    parser.add_argument(
        "--optrace", metavar="FILE", type=Path, help="draw the NPU's threads too, from an optrace in Chrome's format"
    )
    parser.add_argument("--execute", metavar="N", type=int, help="execute_id of the execution in the optrace")


def run(args: argparse.Namespace) -> int:
    """Write the trace."""
    with progress("reading the recording") as step:
        written = make_trace(args.run_dir, args.out, step, args.gzip, args.optrace, args.execute)
    announce(written, args.json)
    return 0
