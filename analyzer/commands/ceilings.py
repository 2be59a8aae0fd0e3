"""Measure this machine's peak memory bandwidth and fp32 speed, of one thread and of all CPUs. `roofline` uses it.

examples:
  python -m analyzer ceilings                       measured once (a second), then read from the cache
  python -m analyzer ceilings --fresh --json
  python -m analyzer ceilings --out phone.json      to be given to: roofline RUN --ceilings phone.json, elsewhere
"""

import argparse

from analyzer.commands._show import printed
from analyzer.questions import ceilings
from moescope.arguments import add_json, add_out
from moescope.plain import print_plain


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--fresh", action="store_true", help="measure again, even if earlier results exist")
    add_out(parser, "only in the cache")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure if needed, store and print."""
    measured = ceilings.kept(args.fresh)
    if args.out:
        ceilings.write(measured, args.out)
    if printed(args, measured):
        return 0
    print_plain(f"{measured.cpu_model}, {measured.cpus} CPUs")
    for threads, speed in measured.bandwidth.items():
        flops = measured.flops[threads]
        print(
            f"{threads:>3} threads: {speed / 1e9:6.1f} GB/s, {flops / 1e9:7.1f} GFLOP/s fp32; ridge at {flops / speed:.1f} FLOP/B"
        )
    print(f"shortest call: {measured.launch_ns:,.0f} ns")
    print_plain(f"stored in {ceilings.cache_file()}")
    return 0
