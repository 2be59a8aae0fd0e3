"""Decode speed with a limited expert cache: demand loading, always prefetching, and prefetching by trial, alternately.

    python -m benchmarks.prefetching PACKAGE... [--share 0.5] [--tokens 768] [--text FILE] [--threads 2] [--window 16]

PACKAGE `qwen-moe`: the seeded one of benchmarks/lib/seeded_moe.py. One process has all three engines and gives each the same
tokens in alternating windows. Figures are ratios of time per window, medians with 95 % bootstrap intervals; the share of all
time is given too, as a median hides a rare slow window. Reads are direct, so that the page cache helps none of the three.
"""

import argparse
from pathlib import Path

import numpy as np

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.seeded_moe import seeded_package
from benchmarks.lib.spread import bootstrap, single
from benchmarks.lib.turns import by_turns
from benchmarks.memory_limited import PROMPT, token_ids
from runtime.backends.cpu import CpuBackend
from runtime.moe import MoE
from runtime.package.layout import Package
from runtime.placement.options import PREFETCH
from runtime.step.sampling import Sampler, Sampling

DEMAND, TRIAL = "off", "auto"


class Side:
    """An engine that decodes given tokens."""

    def __init__(self, package: Package, budget: int, prefetch: str, args: argparse.Namespace):
        self.model = MoE.load(package.folder, budget, prefetch=prefetch, threads=args.threads)
        self.ids = token_ids(package, args.text, PROMPT + args.tokens)
        self.sequence, self.sampler = self.model.engine.begin_sequence(len(self.ids)), Sampler(Sampling())
        self.model.engine.step(self.sequence, self.ids[:PROMPT], self.sampler)

    def window(self, first: int, tokens: int) -> int:
        """Time of the tokens from `first` on, ns."""
        ids = self.ids[PROMPT + first : PROMPT + first + tokens]
        return sum(self.model.engine.step(self.sequence, [token], self.sampler)[0].duration_ns for token in ids)


def compare_package(package: Package, args: argparse.Namespace, report: Report) -> None:
    """Measure one package: times of windows, and ratios by window."""
    family = package.family
    experts = len(family.routed) * family.experts
    budget = int(args.share * experts * CpuBackend(package, args.threads).expert_bytes)
    sides = {prefetch: Side(package, budget, prefetch, args) for prefetch in PREFETCH}
    rounds = args.tokens // args.window
    spent = {prefetch: np.zeros(rounds) for prefetch in sides}
    for number, prefetch in by_turns(list(sides), rounds):
        spent[prefetch][number] = sides[prefetch].window(number * args.window, args.window)
    name = f"{package.manifest['model_type']}, {experts} experts, cache {args.share:.0%}"
    for prefetch, times in spent.items():
        report.add(f"{name}: prefetch {prefetch}", "ms/token", bootstrap(times / args.window / 1e6))
        if prefetch != DEMAND:
            report.add(f"{name}: prefetch {prefetch}, speed", "ratio", bootstrap(spent[DEMAND] / times), against="demand")
            whole = spent[DEMAND].sum() / times.sum()
            report.add(f"{name}: prefetch {prefetch}, speed over all tokens", "ratio", single(whole, rounds), against="demand")
    report.note(f"{name}: the trial chose {sides[TRIAL].model.log.prefetching}")
    for side in sides.values():
        side.model.close()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("packages", nargs="+", type=Path, metavar="PACKAGE")
    parser.add_argument("--text", type=Path, help="text to feed, for packages with a tokenizer of their own")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts that fit into the cache")
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--window", type=int, default=16, help="tokens of one turn")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    report = Report("prefetching", args)
    for path in args.packages:
        compare_package(seeded_package() if path == Path("qwen-moe") else Package(path, verify=False), args, report)
    report.finish()


if __name__ == "__main__":
    main()
