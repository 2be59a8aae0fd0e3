"""Show which experts ran: distinct experts, cache hits and reuse by layer.

examples:
  moescope experts RUN
  moescope experts RUN --phase decode --json
  moescope experts RUN --curves                 hit rates of LRU, LFU and Belady's optimum by cache size
  moescope experts trace.csv --curves           of routes that another program wrote (see `import`)
  moescope experts RUN --curves 2000MiB 4000MiB 50% --phase decode    budgets in bytes, or shares of all experts seen
  moescope experts RUN --curves 8 16 64 --json         numbers of experts
  moescope experts RUN --curves --policies lru lfru belady_without_bypass      as the runtime's cache would do
"""

import argparse
from typing import Any

import pandas as pd

from analyzer.commands._show import number, print_table
from analyzer.errors import PredictError
from analyzer.imports.routes import tables_of
from analyzer.predict.sizes import byte_count
from analyzer.questions import cache_curves, experts
from analyzer.questions.figures import cache_hits
from analyzer.records.schema import Tables
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_phase, add_run
from moescope.terminal import console, grid


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    add_phase(parser)
    parser.add_argument(
        "--curves",
        metavar="SIZE",
        nargs="*",
        help="show hit rates by cache size: 4000MiB, 25%%, or a number of experts (default: eighths of all)",
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


def layer_rows(tables: Tables, phase: str | None) -> pd.DataFrame:
    """One row per layer: distinct experts, per step, top experts, hit rate and median reuse distance in steps."""
    rows = experts.distinct_experts(tables, phase).set_index("layer")
    rates = cache_hits(tables, phase).groupby("layer")[["hits", "misses"]].sum()
    reuse = experts.reuse_distance(tables, phase).groupby("layer")["distance"].median()
    used = experts.activations(tables, phase).groupby(["layer", "expert"])["n_tokens"].sum().reset_index()
    used = used.sort_values(["layer", "n_tokens"], ascending=[True, False])
    top = used.groupby("layer")["expert"].agg(lambda values: values.head(4).tolist())
    rate = rates["hits"] / (rates["hits"] + rates["misses"])
    balance = experts.routing_entropy(tables, phase).set_index("layer")["balance"]
    rows = rows.assign(balance=balance.reindex(rows.index))
    return rows.assign(most_used=top, hit_rate=rate.reindex(rows.index), reuse_steps=reuse.reindex(rows.index)).reset_index()


def run(args: argparse.Namespace) -> int:
    """Print the layers."""
    tables = tables_of(args.run_dir)
    rows = layer_rows(tables, args.phase)
    curves = (
        cache_curves.hit_rate_curves(tables, sizes_from_texts(tables, args.curves, args.phase), args.phase, args.policies)
        if args.curves is not None
        else None
    )
    cliff = cache_curves.lru_cliff(tables) if curves is not None else None
    more = {"curves": curves, "lru_cliff": cliff} if curves is not None else {}
    if print_if_json(args, all_figures(tables, rows, args.phase) | more if args.json else {}):
        return 0
    screen = console()
    if len(rows) == 0:
        screen.print("no routes and no expert runs in this recording: record at level expert, with a Mixture-of-Experts model")
        return 0
    columns = ("layer", "steps", "experts", "per step", "most used", "hit rate", "reuse, steps", "balance")
    table = grid(*columns, left=("most used",))
    for row in rows.to_dict("records"):
        figures = [number(row["hit_rate"], ".0%"), number(row["reuse_steps"], ".1f"), number(row["balance"], ".2f")]
        used = " ".join(map(str, row["most_used"]))
        table.add_row(str(row["layer"]), str(row["steps"]), str(row["experts"]), f"{row['per_step']:.1f}", used, *figures)
    screen.print(table)
    if curves is not None:
        print_table(curves.dropna(axis=1, how="all"), "hit rate by the cache's size, all layers together")
        if cliff:
            show_cliff(cliff)
        print("replayed, not measured; to verify: run the engine with a cache of that size, and compare its hits")
    return 0


def sizes_from_texts(tables: Tables, words: list[str], phase: str | None) -> list[int] | None:
    """The sizes as `cache_curves.hit_rate_curves` takes them; None for its own. Raises PredictError."""
    asked = cache_curves.requests_of(tables, phase)
    total, known = int(asked.weights.sum()), asked.sizes is not None
    mean = total / asked.experts if known and asked.experts else None
    return [size_from_text(word, total, mean) for word in words] if words and asked.experts else None


def size_from_text(word: str, total: int, expert_bytes: float | None) -> int:
    """`25%` of `total`, `4000MiB`, or a number of experts, in bytes; in experts if their bytes are not known (None)."""
    text = word.strip()
    unit = text.rstrip("%")[-1:].isalpha()
    if unit and expert_bytes is None:
        raise PredictError(f"{word}: the bytes of an expert are not known: give a number of experts, or a share like 25%")
    number = byte_count(text.rstrip("%"))
    size = number * total / 100 if text.endswith("%") else number if unit else number * (expert_bytes or 1)
    if size < 1:
        raise PredictError(f"{word!r} holds no expert: write 4000MiB, 25%, or a number of experts")
    return round(size)


def show_cliff(cliff: cache_curves.Cliff) -> None:
    """Say in which cache LRU hits nothing."""
    known = cliff.bytes == cliff.bytes
    asked = f"{cliff.experts} experts" + (f", {cliff.bytes / cache_curves.MIB:,.1f} MiB" if known else "")
    limit = f"{cliff.nothing_below / cache_curves.MIB:,.1f} MiB" if known else f"{cliff.nothing_below} experts"
    console(soft_wrap=True).print(
        f"a decoded token requests up to {asked}; in a cache of up to {limit} LRU hits nothing in decode"
    )


def all_figures(tables: Tables, rows: pd.DataFrame, phase: str | None) -> dict[str, Any]:
    """All figures of the experts, by layer and in total."""
    matrices = experts.activation_matrices(tables, phase)
    return {
        "layers": rows,
        "summary": experts.expert_summary(tables),
        "density": experts.activation_shares(tables, phase),
        "co_activation": {layer: experts.co_activation(table) for layer, (_, table) in matrices.items()},
        "activation": {layer: {"token_id": tokens, "rows": table} for layer, (tokens, table) in matrices.items()},
        "distance": experts.time_by_distance(tables),
        "distance_effect": experts.distance_effect(tables),
        "prefetch": experts.prefetch_counts(tables),
    }
