"""Predict each decode step from the preceding ones (context length, expert misses), and report the error.

examples:
  moescope predict steps RUN
  moescope predict steps RUN --json
"""

import argparse

from analyzer.predict.steps import replay_steps
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_run_and_json

prepare_parser = add_run_and_json

FEW = 20


def signed_text(ms: float) -> str:
    """A summand with its sign."""
    return f"{'-' if ms < 0 else '+'} {abs(ms):.3f}"


def run(args: argparse.Namespace) -> int:
    """Print the coefficients and the error."""
    rows, learner = replay_steps(load_tables(args.run_dir))
    error, fit = learner.error(), [1e3 * float(value) for value in learner.coefficients]
    names = ("ms", "ms_per_1000_tokens", "ms_per_miss")
    if print_if_json(args, {"coefficients": dict(zip(names, fit, strict=True)), "error": error, "steps": rows}):
        return 0
    text = f"{fit[0]:.3f} ms {signed_text(fit[1])} ms per 1000 tokens {signed_text(fit[2])} ms per miss"
    print(f"a decode step: {text}")
    if error["steps"]:
        sizes = f"median {error['median']:.1%}, p90 {error['p90']:.1%}, bias {error['bias']:+.1%}"
        print(f"predicted before each of {error['steps']:.0f} steps: error {sizes}")
    if len(rows) < FEW:
        print(f"warning: only {len(rows)} decode steps: the coefficients are uncertain")
    return 0
