"""How true the recorded times are: phases against the engine's own timers, kernels against duplication.

python benchmarks/fidelity.py [--repeats 5] [--extra 10] [--tokens 48] [--out truth.json]     our runtime (needs root)
python benchmarks/fidelity.py --engine llamacpp [--repeats 5] [--rounds 40] [--extra 4]        llama.cpp's kernels (needs root)

Untraced runs with and without duplicated kernels are interleaved; a kernel's truth is the median over rounds of the growth of the
decode phase over EXTRA. The trace is of runs of its own, one for each round. CPU only: the HTP emulator is no timing model.
For llama.cpp, ggml computes graphs of kernels of the sizes that a decoded token has (benchmarks/ggml_copies.py).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer import fidelity
from analyzer.tables import load
from benchmarks.ggml_copies import LEARNING

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


def copies(rounds: int, extra: int, *, base: bool, run: Path | None = None) -> dict[str, np.ndarray]:
    """ms of each graph of ggml_copies.py in each round, by its own timer; recorded to `run`, where that is given."""
    program = [sys.executable, str(ROOT / "benchmarks" / "ggml_copies.py"), str(rounds), str(extra), *(["base"] if base else [])]
    if run:
        levels = ["--levels", "token,graph,operator"]
        program = [sys.executable, "-m", "tracer", "run", "--no-views", *levels, "-o", str(run), "--", *program]
    told = subprocess.run(program, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    line = next(line for line in told.splitlines() if line.startswith('{"base"'))
    return {name: np.array(ms) for name, ms in json.loads(line).items()}


def of_llamacpp(repeats: int, rounds: int, extra: int) -> None:
    """Print kernels against duplication, and a graph against the program's own timer."""
    truths: dict[str, list[float]] = {}
    measured: dict[str, list[float]] = {}
    steps = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            untraced = copies(rounds, extra, base=False)
            timed = copies(LEARNING + rounds, 0, base=True, run=Path(folder) / "run")["base"][LEARNING:]
            tables = load(Path(folder) / "run")
        for name in untraced.keys() - {"base"}:
            grown = np.median(untraced[name] - untraced["base"])
            truths.setdefault(name, []).append(fidelity.duplication(0.0, float(grown), extra))
        operators = tables["operators"].assign(kernel=tables["operators"]["name"].str.partition(".")[0])
        for name, rows in operators.groupby("kernel"):
            measured.setdefault(str(name), []).append(float(rows["duration_ns"].iloc[-rounds:].median()) / 1e6)
        graphs = tables["graphs"]["duration_ns"].to_numpy()[-len(timed) :] / 1e6
        steps.append(fidelity.accuracy(float(np.median(graphs)), float(np.median(timed))))
    true = {name: float(np.median(values)) for name, values in truths.items()}
    rows = fidelity.compare({name: float(np.median(values)) for name, values in measured.items()}, true)
    show(rows, truths)
    print(f"mean alpha of kernels above 100 µs: {rows[rows['truth_ms'] > 0.1]['accuracy_percent'].mean():.2f} %")
    print(f"graph      alpha {np.median(steps):.3f} % ({min(steps):.3f} to {max(steps):.3f}, {len(steps)} runs)")


def show(rows: pd.DataFrame, truths: dict[str, list[float]]) -> None:
    """Print each kernel."""
    for row in rows.itertuples():
        spread = f"spread {np.ptp(truths[row.name]) / row.truth_ms:.0%} of {len(truths[row.name])}"
        print(
            f"{row.name:<10} measured {row.measured_ms:.4f} ms, truth {row.truth_ms:.4f} ms ({spread}): "
            f"alpha {row.accuracy_percent:.2f} %, ε* {row.scaled_error:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", choices=("moescope", "llamacpp"), default="moescope")
    parser.add_argument("--rounds", type=int, default=40, help="of llama.cpp's graphs in each repeat")
    parser.add_argument("--extra", type=int, help="further runs of a kernel; default: 10, of llama.cpp's 4")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, help="write the truth there, for: python -m analyzer fidelity RUN --truth FILE")
    args = parser.parse_args()
    if args.engine == "llamacpp":
        of_llamacpp(args.repeats, args.rounds, args.extra or 4)
        return
    args.extra = args.extra or 10
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
    show(rows, truths)
    alphas = [fidelity.accuracy(recorded, timed) for recorded, timed in phases]
    print(f"decode     alpha {np.median(alphas):.3f} % ({min(alphas):.3f} to {max(alphas):.3f}, {len(alphas)} runs)")
    if args.out:
        args.out.write_text(json.dumps({"kernels": true}))


if __name__ == "__main__":
    main()
