"""Show which experts ran: distinct experts, cache hits and reuse by layer.

examples:
  python -m analyzer experts RUN
  python -m analyzer experts RUN --phase decode --json
  python -m analyzer experts RUN --curves                 hit rates of LRU, LFU and Belady's optimum by cache size
  python -m analyzer experts trace.csv --curves           of routes that another program wrote (see `routes`)
  python -m analyzer experts RUN --curves 8 16 64 --json
  python -m analyzer experts RUN --curves --policies lru lfru belady_without_bypass      as the runtime's cache would do
"""

import argparse
from typing import Any

import pandas as pd

from analyzer.commands._show import number, printed, show
from analyzer.commands.routes import tables_of
from analyzer.questions import cache_curves, experts
from analyzer.questions.figures import cache_hits
from analyzer.records.schema import Tables
from moescope.arguments import add_json, add_phase, add_run
from moescope.terminal import console, grid


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    add_phase(parser)
    parser.add_argument(
        "--curves",
        metavar="SLOTS",
        type=int,
        nargs="*",
        help="show hit rates by cache size, in experts (default: eighths of all)",
    )
    parser.add_argument(
        "--policies",
        metavar="NAME",
        nargs="+",
        choices=tuple(cache_curves.POLICIES),
        default=cache_curves.SHOWN,
        help=f"eviction policies of --curves: {', '.join(cache_curves.POLICIES)} (default: {' '.join(cache_curves.SHOWN)})",
    )
    add_json(parser)


def layers(tables: Tables, phase: str | None) -> pd.DataFrame:
    """One row per layer: distinct experts, per step, top experts, hit rate and median reuse distance in steps."""
    rows = experts.distinct(tables, phase).set_index("layer")
    rates = cache_hits(tables, phase).groupby("layer")[["hits", "misses"]].sum()
    reuse = experts.reuse_distance(tables, phase).groupby("layer")["distance"].median()
    used = experts.activations(tables, phase).groupby(["layer", "expert"])["n_tokens"].sum().reset_index()
    used = used.sort_values(["layer", "n_tokens"], ascending=[True, False])
    top = used.groupby("layer")["expert"].agg(lambda values: " ".join(str(v) for v in values.head(4)))
    rate = rates["hits"] / (rates["hits"] + rates["misses"])
    balance = experts.entropy(tables, phase).set_index("layer")["balance"]
    rows = rows.assign(balance=balance.reindex(rows.index))
    return rows.assign(most_used=top, hit_rate=rate.reindex(rows.index), reuse_steps=reuse.reindex(rows.index)).reset_index()


def run(args: argparse.Namespace) -> int:
    """Print the layers."""
    tables = tables_of(args.run_dir)
    rows = layers(tables, args.phase)
    curves = cache_curves.curves(tables, args.curves or None, args.phase, args.policies) if args.curves is not None else None
    if printed(args, everything(tables, rows, args.phase) | ({"curves": curves} if curves is not None else {})):
        return 0
    screen = console()
    if len(rows) == 0:
        screen.print("no routes and no expert runs in this recording: record at level expert, with a Mixture-of-Experts model")
        return 0
    columns = ("layer", "steps", "experts", "per step", "most used", "hit rate", "reuse, steps", "balance")
    table = grid(*columns, left=("most used",))
    for row in rows.to_dict("records"):
        figures = [number(row["hit_rate"], ".0%"), number(row["reuse_steps"], ".1f"), number(row["balance"], ".2f")]
        table.add_row(
            str(row["layer"]), str(row["steps"]), str(row["experts"]), f"{row['per_step']:.1f}", row["most_used"], *figures
        )
    screen.print(table)
    if curves is not None:
        show(curves, "hit rate by the cache's size in experts, all layers together")
    return 0


def everything(tables: Tables, rows: pd.DataFrame, phase: str | None) -> dict[str, Any]:
    """All figures of the experts, by layer and in total."""
    numbers = rows["layer"].tolist()
    matrices = {layer: experts.matrix(tables, layer, phase) for layer in numbers}
    return {
        "layers": rows,
        "summary": experts.summary(tables),
        "density": experts.density(tables, phase),
        "co_activation": {layer: experts.co_activation(tables, layer, phase) for layer in numbers},
        "activation": {layer: {"token_id": tokens, "rows": table} for layer, (tokens, table) in matrices.items()},
        "distance": experts.time_by_distance(tables),
        "distance_effect": experts.distance_effect(tables),
        "prefetch": experts.lateness(tables),
    }
