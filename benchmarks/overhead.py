"""What tracing costs the traced program: interleaved runs of our runtime, untraced and traced at several levels.

    sudo python -m benchmarks.overhead [--rounds 15] [--json FILE]

Every round runs each variant once, in an order that alternates between rounds. The unit is the run: its decode time per token by
the runtime's own clock. A slowdown is the median over rounds of the ratio to the untraced run of the same round; the interval is
its 95 % bootstrap. Beside it stands the accounting: hits times the calibrated cost of a hit (with warm and with cold
caches), plus the time inside the BPF programs, as a share of the time of all steps.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tracer.paths import BUILD

VARIANTS = {"token,graph": "token,graph", "operator": "token,graph,operator", "all levels": "all"}
OPTIONS = "--prefill-backend cpu --decode-backend cpu --max-new-tokens 200 --ignore-end"


def command(log: Path) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "runtime",
        "generate",
        str(BUILD / "demo-model"),
        "--prompt",
        "Experts sleep.",
        *OPTIONS.split(),
    ]
    return [*words, "--log", str(log)]


def run_once(levels: str | None, folder: Path) -> tuple[float, float, float]:
    """(decode ns per token, accounted share of step time with warm and with cold caches) of one run; levels None: untraced."""
    log = folder / "log.json"
    words = command(log)
    if levels:
        words = [sys.executable, "-m", "tracer", "run", "--no-views", "--levels", levels, "-o", str(folder / "run"), "--", *words]
    subprocess.run(words, check=True, capture_output=True)
    facts = json.loads(log.read_text())["statistics"]
    warm = cold = 0.0
    if levels:
        manifest = json.loads((folder / "run" / "manifest.json").read_text())
        cost = manifest["cost"]
        warm, cold = ((cost[kind] + cost["bpf_ns"]) / facts["total_ns"] for kind in ("trap_ns", "trap_cold_ns"))
        assert not manifest["lost"]
        shutil.rmtree(folder / "run")
    return facts["decode_ns_per_token"], warm, cold


def interval(ratios: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """(median, low, high): the median and its 95 % bootstrap interval."""
    medians = np.median(rng.choice(ratios, (10_000, len(ratios))), axis=1)
    return float(np.median(ratios)), float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    variants: dict[str, str | None] = {"untraced": None, "untraced again": None, **VARIANTS}
    spent: dict[str, list[float]] = {name: [] for name in variants}
    shares: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for name in variants:
        run_once(variants[name], folder)
    for number in range(args.rounds):
        for name in list(variants) if number % 2 == 0 else reversed(list(variants)):
            ns, *share = run_once(variants[name], folder)
            spent[name].append(ns)
            shares[name].append((share[0], share[1]))
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    base, rng, rows = np.array(spent["untraced"]), np.random.default_rng(0), []
    print(f"{'variant':16} {'ms/token':>9} {'slowdown %':>11} {'95 % interval':>16} {'accounted %, warm .. cold':>26}")
    for name in variants:
        median, low, high = interval(np.array(spent[name]) / base, rng)
        row = {
            "variant": name,
            "ms_per_token": float(np.median(spent[name])) / 1e6,
            "slowdown": median - 1,
            "interval": [low - 1, high - 1],
            "accounted": np.median(shares[name], axis=0).tolist(),
            "rounds": args.rounds,
        }
        rows.append(row)
        accounted = " .. ".join(f"{100 * share:.1f}" for share in row["accounted"])
        bounds = f"{100 * (low - 1):.1f} .. {100 * (high - 1):.1f}"
        print(f"{name:16} {row['ms_per_token']:9.3f} {100 * (median - 1):11.1f} {bounds:>16} {accounted:>26}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
