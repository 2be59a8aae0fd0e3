"""Predict each decode step from the preceding ones (context length, expert misses), and report the error.

examples:
  python -m analyzer steps RUN
  python -m analyzer steps RUN --json
"""

import argparse

from analyzer.commands._show import printed
from analyzer.predict.steps import replay
from analyzer.tables.store import load
from moescope.arguments import add_run_and_json

prepare_parser = add_run_and_json

FEW = 20


def signed(ms: float) -> str:
    """A summand with its sign."""
    return f"{'-' if ms < 0 else '+'} {abs(ms):.3f}"


def run(args: argparse.Namespace) -> int:
    """Print the coefficients and the error."""
    rows, learner = replay(load(args.run_dir))
    error, fit = learner.error(), [float(value) for value in learner.coefficients]
    names = ("seconds", "seconds_per_1000_tokens", "seconds_per_miss")
    if printed(args, {"coefficients": dict(zip(names, fit, strict=True)), "error": error, "steps": rows}):
        return 0
    text = f"{fit[0] * 1e3:.3f} ms {signed(fit[1] * 1e3)} ms per 1000 tokens {signed(fit[2] * 1e3)} ms per miss"
    print(f"a decode step: {text}")
    if error["steps"]:
        sizes = f"median {error['median']:.1%}, p90 {error['p90']:.1%}, bias {error['bias']:+.1%}"
        print(f"predicted before each of {error['steps']:.0f} steps: error {sizes}")
    if len(rows) < FEW:
        print(f"warning: only {len(rows)} decode steps: the coefficients are uncertain")
    return 0
