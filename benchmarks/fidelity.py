"""How true the recorded times are: phases against the engine's own timers, kernels against duplication.

python benchmarks/fidelity.py [--repeats 5] [--extra 10] [--tokens 48] [--model M] [--kinds K ...] [--out truth.json]
                                                                                                our runtime (needs root)
python benchmarks/fidelity.py --engine llamacpp [--repeats 5] [--rounds 40] [--extra 4]        llama.cpp's kernels (needs root)

Untraced runs with and without duplicated kernels are interleaved; a kernel's truth is the median over rounds of the growth of the
decode phase over EXTRA. The trace is of runs of its own, one for each round. CPU only: the HTP emulator is no timing model.
Copies of our runtime's attention and experts are other layers', so that their weights are as cold; they still take less time than
the one run of a step, and why is not known: that truth is too short.

For llama.cpp, ggml computes graphs of kernels of the sizes that a decoded token has (benchmarks/ggml_copies.py), and a model
takes the steps that phases are told by (benchmarks/llama_phases.py).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer import fidelity
from analyzer.tables import load
from benchmarks.ggml_copies import ALONE

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("attention", "router", "expert")
MODEL, GGUF = ROOT / "build" / "demo-model", ROOT / "build" / "models" / "llama-1b.gguf"
SENTENCE = "The router looks at the token and picks a few experts, and a cache keeps those that were used last. "
PROMPT, LEARNING, REST_S = 128, 20, 0.02
"""Tokens of the prompt; rounds while the tracer learns where to look; by which a program's threads have gone to sleep."""


def arguments(args: argparse.Namespace, log: Path) -> list[str]:
    """Of `runtime generate`, for a prompt of some hundred tokens."""
    where = ["--prefill-backend", "cpu", "--decode-backend", "cpu", "--ignore-end", "--max-new-tokens", str(args.tokens)]
    return [str(args.model), "--prompt", SENTENCE * 12, *where, "--log", str(log)]


def own_ms(log: Path) -> tuple[float, float]:
    """ms of the prefill and, but for the first, which make sessions, of a decode step (median), by the runtime's own timers."""
    steps = json.loads(log.read_text())["steps"]
    spent = {phase: [s["duration_ns"] / 1e6 for s in steps if s["phase"] == phase] for phase in ("prefill", "decode")}
    return float(np.median(spent["prefill"])), float(np.median(spent["decode"][8:]))


def untraced(args: argparse.Namespace, folder: Path, kind: str, extra: int) -> float:
    log = folder / "run.json"
    command = benchmark("duplicated.py", kind, extra, *arguments(args, log))
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return own_ms(log)[1]


def traced(args: argparse.Namespace, folder: Path) -> tuple[dict[str, float], dict[str, float], list[float]]:
    """(median ms and runs of each kind of subgraph in a decode step, alpha of prefill and decode against the runtime's own)."""
    run, log = folder / "run", folder / "traced.json"
    command = [sys.executable, "-m", "tracer", "run", "--no-views", "-o", str(run), "--"]
    program = [sys.executable, "-m", "runtime", "generate", *arguments(args, log)]
    subprocess.run([*command, *program], check=True, capture_output=True, cwd=ROOT)
    tables = load(run)
    of_phase = dict(iter(tables["tokens"][tables["tokens"]["complete"]].groupby("phase")))
    steps = of_phase["decode"].iloc[8:]
    graphs = tables["graphs"][tables["graphs"]["token_id"].isin(steps["token_id"])]
    spent = graphs.pivot_table(index="token_id", columns="kind", values="duration_ns", aggfunc="sum", fill_value=0).median() / 1e6
    runs = graphs.groupby("kind").size() / len(steps)
    recorded = (float(rows["duration_ns"].median()) / 1e6 for rows in (of_phase["prefill"], steps))
    return spent.to_dict(), runs.to_dict(), [fidelity.accuracy(*both) for both in zip(recorded, own_ms(log), strict=True)]


def recording(program: list[str], run: Path) -> list[str]:
    """The command that records one of our programs."""
    levels = ["--levels", "token,graph,operator"]
    return [sys.executable, "-m", "tracer", "run", "--no-views", *levels, "-o", str(run), "--", *program]


def benchmark(name: str, *arguments: object) -> list[str]:
    """The command that runs one of our programs."""
    return [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]


class Paced:
    """A process of ggml_copies.py that takes a round when it is told to."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, cwd=ROOT)

    def round(self) -> dict[str, float]:
        """ms of each graph, by the program's own clock."""
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        told = next(line for line in self.process.stdout if line.startswith('{"'))
        time.sleep(REST_S)
        return dict(json.loads(told))

    def close(self) -> None:
        """Let it end."""
        self.process.communicate()
        assert self.process.returncode == 0, f"{self.process.args} answered {self.process.returncode}"


def llama_kernels(folder: Path, rounds: int, extra: int) -> tuple[dict[str, float], dict[str, float]]:
    """({kernel: ms as recorded}, {kernel: ms by duplication}); the programs take rounds by turns: both see one machine."""
    own = Paced(benchmark("ggml_copies.py", extra))
    recorded = Paced(recording(benchmark("ggml_copies.py", 0), folder / "kernels"))
    for _ in range(LEARNING):
        recorded.round()
    spent = []
    for _ in range(rounds):
        spent.append(own.round())
        recorded.round()
    own.close()
    recorded.close()
    table = pd.DataFrame(spent)
    grown = table.drop(columns="base").sub(table["base"], axis=0).median()
    operators = load(folder / "kernels")["operators"]
    measured = {}
    for name, rows in operators.groupby(operators["name"].str.partition(".")[0]):
        each = rows["duration_ns"].to_numpy().reshape(-1, 1 + ALONE)[LEARNING:, 1:]
        measured[str(name)] = float(np.median(each)) / 1e6
    return measured, {str(name): fidelity.duplication(0.0, ms, extra) for name, ms in grown.items()}


def llama_phases(folder: Path, tokens: int) -> list[float]:
    """alpha of prefill and decode, as recorded, against the program's own clock."""
    command = recording(benchmark("llama_phases.py", GGUF, PROMPT, tokens), folder / "steps")
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    timed = json.loads(next(line for line in told.splitlines() if line.startswith("[") and line.endswith("]")))
    steps = load(folder / "steps")["tokens"]["duration_ns"].to_numpy() / 1e6
    both = zip((steps[0], np.median(steps[1:])), (timed[0], np.median(timed[1:])), strict=True)
    return [fidelity.accuracy(float(one), float(other)) for one, other in both]


def of_llamacpp(repeats: int, rounds: int, extra: int, tokens: int) -> None:
    """Print kernels against duplication, and a model's steps against the program's own timer."""
    truths: dict[str, list[float]] = {}
    measured: dict[str, list[float]] = {}
    phases = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for found, all_found in zip(llama_kernels(Path(folder), rounds, extra), (measured, truths), strict=True):
                for name, ms in found.items():
                    all_found.setdefault(name, []).append(ms)
            phases.append(llama_phases(Path(folder), tokens))
    medians = ({name: float(np.median(values)) for name, values in found.items()} for found in (measured, truths))
    show(fidelity.compare(*medians), truths)
    show_phases(phases)


def show_phases(alphas: list[list[float]]) -> None:
    """Print alpha of prefill and decode."""
    for phase, values in zip(("prefill", "decode"), zip(*alphas, strict=True), strict=True):
        print(f"{phase:<10} alpha {np.median(values):.3f} % ({min(values):.3f} to {max(values):.3f}, {len(values)} runs)")


def show(rows: pd.DataFrame, truths: dict[str, list[float]]) -> None:
    """Print each kernel."""
    for row in rows.itertuples():
        spread = f"spread {np.ptp(truths[row.name]) / row.truth_ms:.0%} of {len(truths[row.name])}"
        print(
            f"{row.name:<10} measured {row.measured_ms:.4f} ms, truth {row.truth_ms:.4f} ms ({spread}): "
            f"alpha {row.accuracy_percent:.2f} %, ε* {row.scaled_error:.1f}"
        )
    long = rows[rows["truth_ms"] > 0.1]
    if len(long):
        print(f"mean alpha of {len(long)} kernels above 100 µs: {long['accuracy_percent'].mean():.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", choices=("moescope", "llamacpp"), default="moescope")
    parser.add_argument("--rounds", type=int, default=40, help="of llama.cpp's graphs in each repeat")
    parser.add_argument("--extra", type=int, help="further runs of a kernel; default: 10, of llama.cpp's 4")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", type=Path, default=MODEL, help="of our runtime")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="kernels of our runtime; none: only phases")
    parser.add_argument("--out", type=Path, help="write the truth there, for: python -m analyzer fidelity RUN --truth FILE")
    args = parser.parse_args()
    if args.engine == "llamacpp":
        of_llamacpp(args.repeats, args.rounds, args.extra or 4, args.tokens)
        return
    args.extra = args.extra or 10
    truths: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    measured: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    phases = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as name:
            grown = {}
            for kind in args.kinds:
                base, more = (untraced(args, Path(name), kind, extra) for extra in (0, args.extra))
                grown[kind] = fidelity.duplication(base, more, args.extra)
            spent, runs, alphas = traced(args, Path(name))
            phases.append(alphas)
            for kind in args.kinds:
                truths[kind].append(grown[kind] / runs[kind])
                measured[kind].append(spent[kind] / runs[kind])
    true = {kind: float(np.median(values)) for kind, values in truths.items()}
    rows = fidelity.compare({kind: float(np.median(values)) for kind, values in measured.items()}, true)
    show(rows, truths)
    show_phases(phases)
    if args.out:
        args.out.write_text(json.dumps({"kernels": {kind: ms * runs[kind] for kind, ms in true.items()}}))


if __name__ == "__main__":
    main()
