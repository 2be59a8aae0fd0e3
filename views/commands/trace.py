"""Write the timeline of a recording as a native Perfetto trace: cpus, threads, NPU, counters.

examples:
  python -m views trace RUN                 RUN/trace.pftrace
  python -m views trace RUN --out a.pftrace
  python -m views trace RUN --gzip          RUN/trace.pftrace.gz, which Perfetto opens as it is
"""

import argparse

from views.making import add_arguments, announce, make_trace, progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_arguments(parser)
    parser.add_argument("--gzip", action="store_true", help="compress: a third of the size or less, half the speed")


def run(args: argparse.Namespace) -> int:
    """Write it."""
    with progress() as step:
        made = make_trace(args.run_dir, args.out, step, args.gzip)
    announce(made, args.json)
    return 0
