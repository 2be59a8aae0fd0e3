"""How true the recorded times of our runtime are: phases against its own timers, kernels against duplication.

python benchmarks/fidelity.py [--repeats 5] [--extra 10] [--tokens 48] [--out truth.json]     (needs root)

Untraced runs with and without duplicated kernels are interleaved; a kernel's truth is the median over rounds of the growth of the
decode phase over EXTRA. The trace is of runs of its own, one for each round. CPU only: the HTP emulator is no timing model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer import fidelity
from analyzer.tables import load

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("attention", "router", "expert")
MODEL = ROOT / "build" / "demo-model"


def arguments(log: Path, tokens: int) -> list[str]:
    where = ["--prefill-backend", "cpu", "--decode-backend", "cpu", "--ignore-end", "--max-new-tokens", str(tokens)]
    return [str(MODEL), "--prompt", "The router looks at", *where, "--log", str(log)]


def decode_ms(log: Path) -> float:
    """Median ms of a decode step by the runtime's own timers, the first ones left out: they make sessions."""
    steps = [s["duration_ns"] for s in json.loads(log.read_text())["steps"] if s["phase"] == "decode"]
    return float(np.median(steps[8:])) / 1e6


def untraced(folder: Path, kind: str, extra: int, tokens: int) -> float:
    log = folder / "run.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "duplicated.py"), kind, str(extra), *arguments(log, tokens)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return decode_ms(log)


def traced(folder: Path, tokens: int) -> tuple[dict[str, float], float, float]:
    """(median ms of each kind of subgraph in a decode step, that of a step as recorded, and as the runtime's timers tell it)."""
    run, log = folder / "run", folder / "traced.json"
    command = [sys.executable, "-m", "tracer", "run", "--no-views", "-o", str(run), "--"]
    program = [sys.executable, "-m", "runtime", "generate", *arguments(log, tokens)]
    subprocess.run([*command, *program], check=True, capture_output=True, cwd=ROOT)
    tables = load(run)
    steps = tables["tokens"].query("phase == 'decode' and complete").iloc[8:]
    graphs = tables["graphs"][tables["graphs"]["token_id"].isin(steps["token_id"])]
    spent = graphs.pivot_table(index="token_id", columns="kind", values="duration_ns", aggfunc="sum", fill_value=0).median() / 1e6
    return spent.to_dict(), float(steps["duration_ns"].median()) / 1e6, decode_ms(log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--extra", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, help="write the truth there, for: python -m analyzer fidelity RUN --truth FILE")
    args = parser.parse_args()
    truths: dict[str, list[float]] = {kind: [] for kind in KINDS}
    measured: dict[str, list[float]] = {kind: [] for kind in KINDS}
    phases = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for kind in KINDS:
                base, more = (untraced(folder, kind, extra, args.tokens) for extra in (0, args.extra))
                truths[kind].append(fidelity.duplication(base, more, args.extra))
            spent, recorded, timed = traced(folder, args.tokens)
            phases.append((recorded, timed))
            for kind in KINDS:
                measured[kind].append(spent[kind])
    true = {kind: float(np.median(values)) for kind, values in truths.items()}
    rows = fidelity.compare({kind: float(np.median(values)) for kind, values in measured.items()}, true)
    for row in rows.itertuples():
        spread = f"spread {np.ptp(truths[row.name]) / row.truth_ms:.0%} of {args.repeats}"
        print(
            f"{row.name:<10} measured {row.measured_ms:.4f} ms, truth {row.truth_ms:.4f} ms ({spread}): "
            f"alpha {row.accuracy_percent:.2f} %, ε* {row.scaled_error:.1f}"
        )
    alphas = [fidelity.accuracy(recorded, timed) for recorded, timed in phases]
    print(f"decode     alpha {np.median(alphas):.3f} % ({min(alphas):.3f} to {max(alphas):.3f}, {len(alphas)} runs)")
    if args.out:
        args.out.write_text(json.dumps({"kernels": true}))


if __name__ == "__main__":
    main()
