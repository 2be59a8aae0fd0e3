"""Show where the time of steps goes: by part (what is done), by cause (what takes the time), or by both; they add up to the step.

A step is seen from its own thread; while it waits for another thread, that thread's state counts. docs/times.md has the causes.

examples:
  moescope time RUN
  moescope time RUN --by cause                   a column for each phase, and all steps together
  moescope time RUN --step 12 --json             one step, and its pieces in order
  moescope time RUN --over-time                  decode speed with clock, heat, power and what a token took more
  moescope time RUN --faster 20                  what 20 % less time on the accelerator would save
"""

import argparse
from typing import Any

import pandas as pd

from analyzer.commands._show import number, print_origin, print_table
from analyzer.errors import AnalysisError
from analyzer.questions import accelerators, step_time
from analyzer.questions.npu_windows import npu_sum
from analyzer.questions.speed_curve import rails_without, speed_over_time
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_run
from moescope.plain import print_plain
from moescope.terminal import counted


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "--by", choices=("part", "cause", "both"), default="both", help="divide by part, by cause, or by both (default: both)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="only step N (its token_id)")
    text = "decode speed in windows of equal length, with clocks, heat, power and the causes of its drop"
    parser.add_argument("--over-time", action="store_true", help=text)
    percent = 100 * accelerators.FASTER
    parser.add_argument(
        "--faster", type=float, default=percent, metavar="PERCENT", help="less time on the accelerator, in percent"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the mean step of each phase, the whole run, and what a faster accelerator would save."""
    tables = load_tables(args.run_dir)
    if args.over_time:
        return show_over_time(args, tables)
    time = step_time.step_time(tables)
    answer = of_step(tables, time, args.step) if args.step is not None else of_run(tables, time, args.faster / 100)
    if print_if_json(args, answer, "" if args.step is None else "step"):
        return 0
    print_origin(tables)
    if not answer["phases"]:
        print("no complete steps in this recording")
        return 0
    if args.by == "both":
        for phase, part in answer["phases"].items():
            print_table(time_matrix(part), f"{phase or 'step'}: ms of a mean step ({counted(part['steps'], 'step')})", 40)
    else:
        print_table(side_by_side(answer, args.by), f"ms by {args.by}: a mean step of each phase, and all steps together", 40)
    for line in closing_lines(answer):
        print_plain(line)
    return 0


def show_over_time(args: argparse.Namespace, tables: step_time.Tables) -> int:
    """Print decode speed in windows."""
    windows = speed_over_time(tables)
    without = rails_without(tables, windows)
    if print_if_json(args, {"windows": windows.to_dict("records"), "rails_without": without}, "over-time"):
        return 0
    if len(windows):
        title = "decode over time; ms: of a token, more than in the fastest window"
        print_table(windows.dropna(axis=1, how="all"), title, len(windows))
        for row in without:
            print_plain(f"no watts of {row['rail']} ({row['source']}): {row['why']}")
    else:
        print("too few decode steps in this recording")
    return 0


def of_run(tables: step_time.Tables, time: pd.DataFrame, faster: float) -> dict[str, Any]:
    """step_time.time_summary, with the whole run, what a faster accelerator would save, and the NPU's runs of graphs."""
    answer: dict[str, Any] = {"phases": {}, **step_time.time_summary(tables, time), "span_ms": step_time.whole_run(tables)}
    return answer | {"accelerator": accelerators.accelerator_saving(tables, time, faster), "npu_runs": npu_sum(tables)}


def of_step(tables: step_time.Tables, time: pd.DataFrame, step: int) -> dict[str, Any]:
    """step_time.time_summary of one step, complete or not, and its pieces; raises AnalysisError if there is none."""
    tokens = tables["tokens"]
    mine = tokens[tokens["token_id"] == step].assign(complete=True)
    if not len(mine):
        raise AnalysisError(
            f"no step {step}: there are steps 0 to {len(tokens) - 1}" if len(tokens) else "this recording has no steps"
        )
    pieces = time[time["token_id"] == step]
    return {**step_time.time_summary({**tables, "tokens": mine}, pieces), "pieces": pieces}


def time_matrix(part: dict[str, Any]) -> pd.DataFrame:
    """Parts as rows, causes as columns, both by size; the sums are last."""
    cells = pd.DataFrame(part["cells"]).pivot(index="part", columns="cause", values="ms")
    cells = cells.reindex(index=list(part["part_ms"]), columns=list(part["cause_ms"]))
    cells["all"] = cells.sum(axis=1)
    cells.loc["all"] = cells.sum()
    shares = [number(ms / part["ms"] if part["ms"] else None, ".1%") for ms in cells["all"]]
    return cells.assign(share=shares).rename_axis("").reset_index()


def side_by_side(answer: dict[str, Any], by: str) -> pd.DataFrame:
    """A row for each part or cause, two columns for each phase and for all steps; the total is last."""
    table = pd.DataFrame({"": [*answer["run"][f"{by}_ms"], "all"]})
    for phase, part in {**answer["phases"], "all steps": answer["run"]}.items():
        table[phase or "step"] = table[""].map({**part[f"{by}_ms"], "all": part["ms"]})
        table[f"{phase or 'step'} share"] = (table[phase or "step"] / part["ms"]).map(lambda share: number(share, ".1%"))
    return table


def closing_lines(answer: dict[str, Any]) -> list[str]:
    """The whole run, the NPU's runs of graphs, and a faster accelerator, a line each."""
    lines = []
    if span := answer.get("span_ms"):
        parts = ", ".join(f"{name} {ms:,.1f}" for name, ms in span.items() if name not in ("total", "concurrent"))
        shared = f" - {span['concurrent']:,.1f} of steps that overlap" if span["concurrent"] >= 0.05 else ""
        lines.append(f"run {span['total']:,.1f} ms = {parts}{shared}")
    if npu := answer.get("npu_runs"):
        summands = " + ".join(f"{name} {npu[f'{name}_ms']:,.2f}" for name in ("before", "accelerator", "after", "residual"))
        more = f" ({npu['unprofiled']} more without a profile)" if npu["unprofiled"] else ""
        lines.append(f"{counted(npu['windows'], 'graph')} on the NPU {npu['total_ms']:,.2f} ms = {summands}{more}")
    if answer.get("accelerator"):
        lines.append(accelerators.saving_text(answer["accelerator"]))
    return lines
