"""Show the cause of every moment of a token; causes and residual add up to the token.

The causes are those of the token's own thread; analyzer/records/tables.toml defines them. With an accelerator: what
a faster one would save, at most the time that tokens wait for it.

examples:
  python -m analyzer ledger RUN
  python -m analyzer ledger RUN --tokens --json            every token
  python -m analyzer ledger RUN --faster 20                an accelerator that takes 20 % less time
"""

import argparse
from typing import Any

import pandas as pd

from analyzer.commands._show import number, printed, show
from analyzer.questions import ledger
from analyzer.tables.store import load
from moescope.arguments import add_json, add_run
from moescope.plain import print_plain


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("--tokens", action="store_true", help="show one row per token, in ms")
    parser.add_argument(
        "--faster",
        type=float,
        default=100 * ledger.FASTER,
        metavar="PERCENT",
        help="speed-up of the accelerator's work, in percent",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print means per phase and the whole run; tokens with --tokens."""
    tables = load(args.run_dir)
    answer = ledger.summary(tables, args.faster / 100)
    if args.tokens:
        answer["tokens"] = in_ms(ledger.ledger(tables))
    if printed(args, answer):
        return 0
    if "run_ms" not in answer:
        print("no tokens in this recording")
        return 0
    show(side_by_side(answer), "ms per step of each phase, and of all steps together", 40)
    run_ms = answer["run_ms"]
    print_plain(f"residual {run_ms['residual_share']:.2%} of {run_ms['total']:,.1f} ms in {len(tables['tokens'])} steps")
    if answer["accelerator"]:
        print_plain(ledger.gain(answer["accelerator"]))
    if args.tokens:
        show(answer["tokens"])
    return 0


def side_by_side(answer: dict[str, Any]) -> pd.DataFrame:
    """A row per cause, two columns per phase, then all steps; residual and total last."""
    spent = {phase or "step": part for phase, part in answer["phases_ms"].items()} | {"all steps": answer["run_ms"]}
    names = [name for name in (*ledger.CAUSES, ledger.RESIDUAL, "total") if any(part.get(name) for part in spent.values())]
    table = pd.DataFrame({"": [name.replace("_", " ") for name in names]})
    for title, part in spent.items():
        table[title] = [part.get(name, 0.0) for name in names]
        table[f"{title} share"] = [
            number(part.get(name, 0.0) / part["total"] if part["total"] else None, ".1%") for name in names
        ]
    return table


def in_ms(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens with times in ms, without causes that never occur."""
    used = [name for name in (*ledger.CAUSES, ledger.RESIDUAL, "total") if name == "total" or (rows[name] != 0).any()]
    return pd.concat([rows[["token_id", "phase", "position"]], rows[used] / 1e6], axis=1)
