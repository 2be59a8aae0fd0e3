"""Show a token's time by operator group, idle time by cause, and the unexplained residual.

Groups, causes and residual add up to the step. `host`: the engine's own code between operators; `scheduling`: the token's
thread was ready and had no CPU; `asleep`, `disk wait`, `stopped` (by a signal): its state in between.

examples:
  python -m analyzer phases RUN
  python -m analyzer phases RUN --tokens --json            every token
  python -m analyzer phases RUN --gaps                     idle gaps between operators, and of the NPU, by cause
"""

import argparse
from typing import Any

import pandas as pd

from analyzer.commands._show import number, printed, show
from analyzer.questions import phases
from analyzer.tables.store import load
from moescope.arguments import add_json, add_run
from moescope.plain import print_plain


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("--tokens", action="store_true", help="show one row per token, in ms")
    parser.add_argument("--gaps", action="store_true", help="show the idle gaps")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print means per phase and the whole run; tokens with --tokens, gaps with --gaps."""
    tables = load(args.run_dir)
    rows = phases.per_token(tables)
    shares, run_shares = phases.phase_shares(rows), phases.whole_run(tables, rows)
    steps, npu = phases.steps_sum(rows), phases.npu_sum(tables)
    answer: dict[str, Any] = {"phases_ms": shares, "run": run_shares, "steps_ms": steps, "npu_ms": npu}
    if args.tokens:
        answer["tokens"] = in_ms(rows)
    if args.gaps:
        answer |= {"gaps": phases.gaps(tables), "npu_gaps": phases.npu_gaps(tables), "npu_windows": phases.npu_windows(tables)}
    if printed(args, answer):
        return 0
    if not shares:
        print("no complete tokens in this recording")
        return 0
    show(side_by_side(shares), "ms per step", 40)
    print_plain(closing(run_shares))
    print(f"{steps['steps']} steps {added(steps, ('operators', 'gaps'))}")
    if npu:
        without_events = f"; {npu['untold']} more without profile events" if npu["untold"] else ""
        print(f"{npu['windows']} NPU windows {added(npu, ('before', 'accelerator', 'after'))}{without_events}")
    if args.tokens:
        show(in_ms(rows))
    if args.gaps:
        for title in ("gaps", "npu_gaps"):
            show(by_cause(answer[title]), {"gaps": "gaps between operators", "npu_gaps": "NPU idle within tokens"}[title])
        windows = answer["npu_windows"]
        show(windows.drop(columns=["graph_id", "execute_id", "token_id"]).describe().loc[["mean", "max"]] / 1e6, "NPU window, ms")
    return 0


def side_by_side(shares: dict[str, dict[str, float]]) -> pd.DataFrame:
    """A row per group and cause, two columns per phase; residual and total last."""
    names = list(dict.fromkeys(name for phase in shares.values() for name in phase if name not in (phases.RESIDUAL, "total")))
    table = pd.DataFrame({"": [*names, phases.RESIDUAL, "total"]})
    for phase, spent in shares.items():
        table[phase] = table[""].map(spent).astype(float)
        table[f"{phase} share"] = (table[phase] / spent["total"]).map(lambda share: number(share, ".1%"))
    return table


def closing(run: dict[str, Any]) -> str:
    """The whole run in one line."""
    parts = ", ".join(f"{name} {ms:,.1f} ms" for name, ms in run["phases_ms"].items())
    return (
        f"run {run['total_ms']:,.1f} ms = {parts}, between steps {run['between_steps_ms']:,.1f} ms"
        f" (- {max(run['concurrent_ms'], 0):,.1f} ms at the same time); residual {run['residual_share']:.2%} of the steps"
    )


def added(spent: dict[str, float], parts: tuple[str, ...]) -> str:
    """A sum with its parts and its residual."""
    summands = " + ".join(f"{name} {spent[name]:,.2f}" for name in (*parts, phases.RESIDUAL))
    return f"{spent['total']:,.2f} ms = {summands} ms; residual {spent['residual_share']:.2%}"


def in_ms(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens with times in ms, without columns that are zero everywhere."""
    times = rows.select_dtypes("float64") / 1e6
    used = [name for name in times.columns if name in (phases.RESIDUAL, "total") or (times[name] != 0).any()]
    return pd.concat([rows[["phase", "position"]], times[used]], axis=1).reset_index()


def by_cause(gaps: pd.DataFrame) -> pd.DataFrame:
    """Number, sum and maximum of the gaps of each cause."""
    causes = gaps.groupby("cause")["duration_ns"].agg(gaps="size", ms="sum", median_us="median", max_us="max")
    causes = causes.sort_values("ms", ascending=False).reset_index()
    return causes.assign(ms=causes["ms"] / 1e6, median_us=causes["median_us"] / 1e3, max_us=causes["max_us"] / 1e3)
