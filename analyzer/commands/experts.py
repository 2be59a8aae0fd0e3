"""Show which experts ran: distinct experts, cache hits and reuse by layer.

examples:
  python -m analyzer experts RUN
  python -m analyzer experts RUN --phase decode --json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from analyzer import experts
from analyzer.tables import load


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")
    parser.add_argument("--phase", choices=("prefill", "decode"), help="only steps of this phase")
    parser.add_argument("--json", action="store_true", help="print JSON")


def layers(tables: dict[str, pd.DataFrame], phase: str | None) -> pd.DataFrame:
    """One row per layer: distinct experts, per step, top experts, hit rate and median reuse distance in steps."""
    seen = experts.distinct(tables, phase).set_index("layer")
    rates = experts.hit_rate(tables, phase).groupby("layer")[["hits", "misses"]].sum()
    reuse = experts.reuse_distance(tables, phase).groupby("layer")["distance"].median()
    used = experts.activations(tables, phase).groupby(["layer", "expert"])["n_tokens"].sum().reset_index()
    used = used.sort_values(["layer", "n_tokens"], ascending=[True, False])
    top = used.groupby("layer")["expert"].agg(lambda values: " ".join(str(v) for v in values.head(4)))
    rate = rates["hits"] / (rates["hits"] + rates["misses"])
    return seen.assign(most_used=top, hit_rate=rate.reindex(seen.index), reuse_steps=reuse.reindex(seen.index)).reset_index()


def run(args: argparse.Namespace) -> int:
    """Print the layers."""
    tables = load(args.run_dir)
    rows = layers(tables, args.phase)
    if args.json:
        plain = rows.astype(object).where(rows.notna(), None).to_dict("records")
        print(json.dumps({"layers": plain, "summary": experts.summary(tables)}, default=_plain))
        return 0
    console = Console()
    if len(rows) == 0:
        console.print("no routes and no expert runs in this recording: record at level expert, with a Mixture-of-Experts model")
        return 0
    table = Table(box=None, header_style="bold")
    for name in ("layer", "steps", "experts", "per step", "most used", "hit rate", "reuse, steps"):
        table.add_column(name, justify="left" if name == "most used" else "right")
    for row in rows.to_dict("records"):
        shown = [_number(row["hit_rate"], ".0%"), _number(row["reuse_steps"], ".1f")]
        table.add_row(
            str(row["layer"]), str(row["steps"]), str(row["experts"]), f"{row['per_step']:.1f}", row["most_used"], *shown
        )
    console.print(table)
    return 0


def _number(value: float, form: str) -> str:
    return "-" if value != value else format(value, form)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)
