"""Show how steps spread, drift, swing and jump from step to step, and which operators grow with the context.

RUN is a recording; of one without phases (an imported profile) all steps count, of one without steps the executions of
its NPU graph with the most time. A QNN profile as CSV (see `import`) works, too.

examples:
  moescope trends RUN
  moescope trends qnn-profiling-data.csv
  moescope trends RUN --json | jq .model
"""

import argparse
from pathlib import Path

import pandas as pd

from analyzer.commands._show import print_origin, print_table
from analyzer.imports.csv import read_csv
from analyzer.questions import trends
from analyzer.records.schema import empty_table, fill_missing
from analyzer.tables.store import LazyTables, load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_run_and_json
from moescope.terminal import counted
from tracer.recording.format import RecordingError

prepare_parser = add_run_and_json


def run(args: argparse.Namespace) -> int:
    """Print distributions, changes over time, the latency model and the slopes."""
    tables = of_profile(args.run_dir) if args.run_dir.is_file() else load_tables(args.run_dir)
    facts, growing = trends.trend_summary(tables), trends.context_growth(tables)
    if print_if_json(args, {**facts, "growth": growing, "steps": trends.decode_steps(tables)}):
        return 0
    if "recurrences" in tables:
        print_origin(tables)
    names = ("ttft_ms", "tpot_ms", "step_ms")
    print_table(pd.DataFrame([{"": name, **facts[name]} for name in names]), "ms")
    if "model" not in facts:
        print(f"too few to detect a trend: {counted(facts['step_ms']['n'], facts['of'])}, at least {trends.LEAST} are needed")
        return 0
    lines = [f"{label}: {text}" for label, text, _ in trends.trend_sentences(facts)]
    nothing = f"{facts['step_ms']['n']} {facts['of']}s show no slow first one, no change of level, no drift, no period, no burst"
    print("\n".join(lines or [nothing]))
    m = facts["model"]
    if m and not trends.fits_context(m):
        constant = f"a constant is off by {m['mape_constant']:.1%} on average on {m['judged_on']} unseen steps"
        print(f"the context does not explain how long steps take: {constant}, a line over the context by {m['mape']:.1%}")
    elif m:
        sign = "-" if m["us_per_token"] < 0 else "+"
        print(
            f"step = {m['base_ms']:.2f} ms {sign} {abs(m['us_per_token']):.2f} µs x context; off by {m['mape']:.1%} on average "
            f"on {m['judged_on']} unseen steps ({m['mape_constant']:.1%} for a constant)"
        )
    growing = trends.confident_rows(growing)
    if len(growing):
        print_table(growing, "growth with the context, decode (slopes of more than three times their error)")
    return 0


def of_profile(path: Path) -> LazyTables:
    """The executions of a QNN profile, each as long as its longest event without a parent, one after the other."""
    events = read_csv(path).events
    roots = events[(events["depth"] == 0) & (events["execute"] >= 0) & (events["unit"] == "us")]
    if not len(roots):
        raise RecordingError(f"{path} holds no execution with a time in µs: give a QNN profile of level basic or higher")
    spent = (roots.groupby("execute")["value"].max() * 1000).astype("int64")
    spans = {"execute_id": spent.index, "begin_ns": spent.cumsum() - spent, "end_ns": spent.cumsum(), "duration_ns": spent}
    spans["graph"] = roots.groupby("execute")["graph"].first()
    frame = pd.DataFrame({name: pd.Series(values).to_numpy() for name, values in spans.items()}).assign(complete=True)
    names = ("tokens", "sequences", "operators")
    return LazyTables.of({name: empty_table(name) for name in names} | {"qnn_executes": fill_missing("qnn_executes", frame)})
