"""Show each request: TTFT, TPOT, prompt, cached and generated tokens; percentiles, concurrency, throughput, accepted drafts.

examples:
  moescope time requests RUN
  moescope time requests RUN --json | jq '.requests[].ttft_ms'
"""

import argparse
from typing import Any

import pandas as pd

from analyzer.commands._show import number, print_table
from analyzer.questions import requests
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_run_and_json
from moescope.terminal import counted

prepare_parser = add_run_and_json
HELD = 0.05
"""Share of the time between tokens from which the wait for other requests' prompts is named."""
NEEDED = ("tokens", "sequences")


def run(args: argparse.Namespace) -> int:
    """Print all requests and what they have in common."""
    tables = load_tables(args.run_dir, NEEDED)
    rows, summary = requests.request_table(tables), requests.request_summary(tables)
    if print_if_json(args, {"summary": summary, "requests": rows}):
        return 0
    if not summary:
        print("no requests in this recording: no step of a language model was seen")
        return 0
    for line in (*request_lines(summary), *speculative_lines(summary["speculative"])):
        print(line)
    print_table(request_columns(rows), "requests; times in ms, `begin` from the first request's")
    return 0


def request_lines(summary: dict[str, Any]) -> list[str]:
    """Concurrency and throughput, and percentiles."""
    at_once = summary["concurrency"]
    together = f"{number(summary['generated_per_s'])} tok/s generated together"
    answer = [
        f"{counted(summary['count'], 'request')}, at most {at_once['most']} at once (mean {at_once['mean']:.1f}): {together}"
    ]
    for label, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        values = ", ".join(f"{name} {number(value, ',.2f')}" for name, value in summary[key].items())
        answer.append(f"{label} of requests in ms: {values.replace('most', 'longest')}")
    if (share := summary["held_share"] or 0.0) >= HELD:
        held = f"prompts of other requests hold up decode for {share:.0%} of the time between tokens"
        answer.append(f"{held}; smaller batches make each wait shorter, not their sum")
    return answer


def speculative_lines(about: dict[str, Any]) -> list[str]:
    """Speculative decoding in a line or two."""
    if not about:
        return []
    accepted = f"{about['accepted']:,} of {about['judged']:,} drafted tokens accepted ({number(about['acceptance'], '.0%')})"
    kept = f"{number(about['kept_per_check'], '.2f')} tokens per verification of {number(about['check_ms'], '.2f')} ms"
    drafts = (
        f"; {about['draft_steps']:,} draft steps of {number(about['draft_step_ms'], '.2f')} ms" if about["draft_steps"] else ""
    )
    return [f"speculative decoding: {accepted}, {kept}{drafts}"]


def request_columns(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns of the screen."""
    begin = (rows["begin_ns"] - rows["begin_ns"].min()) / 1e6
    where = ["pid", "context"] if rows["pid"].nunique() > 1 else ["context"]
    names = ["request", *where, "sequence", "begin", "ttft_ms", "tpot_ms", "held_ms", "prompt", "cached", "generated", "steps"]
    more = ["drafted", "accepted"] if rows["checks"].sum() else []
    return rows.assign(begin=begin)[names + more]
