"""Measure this machine's peak memory bandwidth and fp32 speed, of one thread and of all CPUs. `roofline` uses it.

examples:
  moescope predict ceilings                       measured once (a second), then read from the cache
  moescope predict ceilings --fresh --json
  moescope predict ceilings --out phone.json      to be given to: roofline RUN --ceilings phone.json, elsewhere
"""

import argparse

from analyzer.questions import ceilings
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_out
from moescope.plain import print_plain


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--fresh", action="store_true", help="measure again, even if earlier results exist")
    add_out(parser, "only in the cache")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure if needed, store and print."""
    measured = ceilings.stored_or_measured(args.fresh)
    if args.out:
        ceilings.write_ceilings(measured, args.out)
    if print_if_json(args, vars(measured)):
        return 0
    print_plain(f"{measured.cpu_model}, {measured.cpus} CPUs")
    for threads, speed in measured.bandwidth.items():
        flops = measured.flops[threads]
        of = f"{threads:>3} {'thread:' if threads == 1 else 'threads:':<8}"
        print(f"{of} {speed / 1e9:6.1f} GB/s, {flops / 1e9:7.1f} GFLOP/s fp32; ridge at {flops / speed:.1f} FLOP/B")
    print(f"shortest call: {measured.launch_ns:,.0f} ns")
    print_plain(f"stored in {ceilings.cache_file()}")
    return 0
