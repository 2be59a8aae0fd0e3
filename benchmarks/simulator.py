"""The what-if simulator against the runtime: one recording gives the costs, every setting is then run for real and simulated.

    sudo .venv/bin/python -m benchmarks.simulator MODEL_DIR --caches 25%,50%,100% --chunks 8,64 --runs 5 --tokens 32

Runs of all settings are interleaved and untraced; their median stands beside the simulation of the recorded routes. Prints the
error of TTFT and TPOT, the difference of the hit rate in points, and the rank correlation of TPOT over the settings.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from analyzer.commands.simulate import cache_bytes
from analyzer.predict import costs, simulator, trace
from analyzer.tables import load

PROMPT = "The router looks at the token and picks a few experts. A cache keeps the experts that were used last. " * 3


def generate(args: argparse.Namespace, cache: int | None, chunk: int) -> list[str]:
    """The runtime's command line."""
    words = [sys.executable, "-m", "runtime", "generate", str(args.model), "--prompt", PROMPT]
    return [
        *words,
        "--max-new-tokens",
        str(args.tokens),
        "--ignore-end",
        "--json",
        "--chunk",
        str(chunk),
        "--expert-cache",
        "all" if cache is None else str(cache),
    ]


def record(args: argparse.Namespace, cache: int, folder: Path) -> dict[str, Any]:
    """Tables of one traced run with a cache that misses."""
    levels = ["--levels", "token,graph,operator,expert"]
    command = [sys.executable, "-m", "tracer", "run", "-o", str(folder), "--no-views", *levels, "--"]
    subprocess.run([*command, *generate(args, cache, args.chunks[0])], check=True, capture_output=True)
    return load(folder)


def measured(args: argparse.Namespace, settings: list[tuple[int | None, int]]) -> dict[tuple[int | None, int], np.ndarray]:
    """[runs, 3] of each setting: TTFT ms, TPOT ms, hit rate."""
    seen: dict[tuple[int | None, int], list[tuple[float, float, float]]] = {one: [] for one in settings}
    for _, one in itertools.product(range(args.runs), settings):
        done = subprocess.run(generate(args, *one), check=True, capture_output=True, text=True)
        told = json.loads(done.stdout)["statistics"]
        seen[one].append((told["prefill_ns"] / 1e6, told["decode_ns_per_token"] / 1e6, told["hit_rate"]))
    return {one: np.array(rows) for one, rows in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--caches", default="25%,50%,100%", type=lambda text: text.split(","))
    parser.add_argument("--chunks", default="8,64", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--recordings", type=int, default=3, help="the fastest gives the costs")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    sizes = json.loads(subprocess.check_output([sys.executable, "-m", "runtime", "inspect", str(args.model), "--json"]))
    caches = [cache_bytes(word, sizes["all_experts_bytes"]["cpu"]) for word in args.caches]
    smallest = min(size for size in caches if size is not None)
    with tempfile.TemporaryDirectory() as folder:
        recordings = [record(args, smallest, Path(folder) / str(i)) for i in range(args.recordings)]
    tables = min(recordings, key=lambda one: float(one["tokens"]["duration_ns"].sum()))
    routes, cost = trace.from_tables(tables), costs.from_tables(tables)
    settings = list(itertools.product(caches, args.chunks))
    real = measured(args, settings)
    figures = "measured (spread) simulated error"
    print(f"{'cache':>10} {'chunk':>5}  TTFT ms {figures}   TPOT ms {figures}   hits")
    order = []
    for one in settings:
        found = simulator.simulate(routes, cost, simulator.Settings(one[0], one[1])).summary()
        middle, spread = np.median(real[one], 0), np.ptp(real[one], 0)
        cells = [
            f"{middle[i]:9.2f} ({spread[i]:6.2f}) {found[name]:9.2f} {found[name] / middle[i] - 1:+7.1%}"
            for i, name in enumerate(("ttft_ms", "tpot_ms"))
        ]
        hits = f"{100 * (found['hit_rate'] - middle[2]):+.1f} points"
        print(f"{one[0] or 'all':>10} {one[1]:5}  {cells[0]}   {cells[1]}   {hits}")
        order.append((middle[1], found["tpot_ms"]))
    print(f"rank correlation of TPOT over {len(order)} settings: {spearmanr(*zip(*order, strict=True)).statistic:.2f}")


if __name__ == "__main__":
    main()
