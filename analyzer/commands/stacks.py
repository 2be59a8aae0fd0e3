"""Show where threads compute and wait, by their stacks: record with `--stacks`.

examples:
  moescope time stacks RUN                functions by samples, and the longest waits with who ended them
  moescope time stacks RUN --by cause     also part
  moescope write RUN --only flame         the same as a flame graph
"""

import argparse

import numpy as np
import pandas as pd

from analyzer.commands._show import print_origin, print_table
from analyzer.questions import stacks
from analyzer.questions.stack_summary import stack_remarks, stack_summary
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_run_and_json
from moescope.plain import print_plain
from tracer.recording.format import Recording

MOST = 20


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_and_json(parser)
    parser.add_argument("--by", choices=("part", "cause"), help="the functions of each part or cause (default: of all)")


def run(args: argparse.Namespace) -> int:
    """Print functions by their share of samples, and waits by their sum."""
    tables, manifest = load_tables(args.run_dir), Recording(args.run_dir).manifest
    summary = stack_summary(tables, manifest)
    samples, waits = (stacks.joined(tables, name) for name in ("samples", "waits"))
    functions = shares(tables, samples, args.by)
    waited = longest(tables, waits)
    remarks = stack_remarks(summary)
    if print_if_json(args, {"summary": summary, "remarks": remarks, "functions": functions, "waits": waited}):
        return 0
    if not summary["hz"]:
        print("no stacks in this recording: record with --stacks")
        return 0
    print_origin(tables)
    print(f"{summary['samples']} samples at {summary['hz']} Hz, {summary['whole'] or 0:.1%} of them with a whole stack;")
    if summary["long_wait_us"]:
        least_ms = summary["long_wait_us"] / 1e3
        print(f"{summary['waits']} waits of {least_ms:g} ms or longer, {summary['waits_ms']:.1f} ms together")
    else:
        print("waits were not recorded: their stacks need Linux 5.15, its BTF, and the loader libbpf")
    for remark in remarks:
        print_plain(remark)
    print_table(functions.head(MOST), "functions by samples, shares")
    if len(waited):
        print_table(waited.head(MOST), "waits by where the thread waited and where the thread was that woke it")
    return 0


def shares(tables: stacks.Tables, samples: pd.DataFrame, by: str | None) -> pd.DataFrame:
    """`function_shares` as shares of all samples, of each value of the column `by`."""
    groups = samples.groupby(by, sort=False) if by and len(samples) else [("", samples)]
    parts = [stacks.function_shares(tables, rows, np.ones(len(rows))).assign(**{by or "part": name}) for name, rows in groups]
    answer = pd.concat(parts, ignore_index=True)
    answer[["self", "total"]] /= max(len(samples), 1)
    answer = answer.sort_values(["self", "total"], ascending=False, ignore_index=True)
    return answer if by else answer.drop(columns="part")


def longest(tables: stacks.Tables, waits: pd.DataFrame) -> pd.DataFrame:
    """Waits by the functions on both sides: how often, how long together."""
    places = stacks.waiting_places(tables)
    rows = waits.assign(
        waits_in=places[waits["stack_id"].to_numpy()],
        woken_in=places[waits["waker_stack_id"].to_numpy()],
        ms=waits["duration_ns"] * 1e-6,
    )
    answer = rows.groupby(["waits_in", "woken_in", "cause", "part"], sort=False)["ms"].agg(["count", "sum", "max"]).reset_index()
    return answer.rename(columns={"sum": "ms", "max": "most_ms"}).sort_values("ms", ascending=False, ignore_index=True)
