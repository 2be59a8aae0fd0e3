"""Show how steps spread, drift, swing and jump across tokens, and which operators grow with the context.

examples:
  python -m analyzer trends RUN
  python -m analyzer trends RUN --json | jq .model
"""

import argparse

import pandas as pd

from analyzer.commands._show import printed, show
from analyzer.questions import trends
from analyzer.tables.store import load
from moescope.arguments import add_run_and_json

prepare_parser = add_run_and_json


def run(args: argparse.Namespace) -> int:
    """Print distributions, changes over time, the latency model and the slopes."""
    tables = load(args.run_dir)
    facts, growing = trends.summary(tables), trends.growth(tables)
    if printed(args, {**facts, "growth": growing, "steps": trends.decode_steps(tables)}):
        return 0
    names = ("ttft_ms", "tpot_ms", "step_ms")
    show(pd.DataFrame([{"": name, **facts[name]} for name in names]), "ms")
    if "model" not in facts:
        print("too few decode steps to detect a trend")
        return 0
    lines = [f"{label}: {text}" for label, text, _ in trends.sentences(facts)]
    nothing = f"{facts['step_ms']['n']} decode steps show no slow first one, no change of level, no drift, no period, no burst"
    print("\n".join(lines or [nothing]))
    m = facts["model"]
    if m and not trends.explains(m):
        constant = f"a constant is off by {m['mape_constant']:.1%} on average on {m['judged_on']} unseen steps"
        print(f"the context does not explain how long steps take: {constant}, a line over the context by {m['mape']:.1%}")
    elif m:
        sign = "-" if m["us_per_token"] < 0 else "+"
        print(
            f"step = {m['base_ms']:.2f} ms {sign} {abs(m['us_per_token']):.2f} µs x context; off by {m['mape']:.1%} on average "
            f"on {m['judged_on']} unseen steps ({m['mape_constant']:.1%} for a constant)"
        )
    growing = trends.certain(growing)
    if len(growing):
        show(growing, "growth with the context, decode (slopes of more than three times their error)")
    return 0
