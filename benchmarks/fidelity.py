"""How true the recorded times are: phases against the engine's own timers, kernels against duplication.

python benchmarks/fidelity.py [--repeats 3] [--rounds 150] [--extra 3] [--seconds 150] [--model M] [--levels L] [--out FILE]
                                                                                                our runtime (needs root)
python benchmarks/fidelity.py --engine llamacpp [--repeats 3] [--rounds 40] [--extra 4]        llama.cpp's kernels (needs root)

A kernel's truth is the median over rounds of what EXTRA copies of it add, by the program's own clock, over EXTRA. CPU only: the
HTP emulator is no timing model. A copy has to find the caches as the one run of a step does: runtime_copies.py (steps of our
runtime) says how, and ggml_copies.py (llama.cpp: graphs of kernels of the sizes that a decoded token has). Our runtime's copies
run in the recorded process, unseen by the tracer, beside the steps whose records count: in two processes, where their memory
lies made kernels differ by a tenth. So alpha holds both what the recording counts too much and what the probes slow a kernel down
by; beside it stands how true it is to what the kernel took among the probes, by the program's own clock. llama.cpp's copies run
in a process of their own that takes turns with the recorded one. Steps by which llama.cpp's phases are told are those of
llama_phases.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import NamedTuple

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.questions import fidelity
from analyzer.tables.store import load
from benchmarks.programs.ggml_copies import ALONE
from benchmarks.programs.runtime_copies import WARM

ROOT = Path(__file__).resolve().parent.parent
MODEL, GGUF = ROOT / "build" / "demo-model", ROOT / "build" / "models" / "llama-1b.gguf"
LEVELS = "token,graph,operator"
PROMPT, LEARNING, REST_S = 128, 20, 0.02
"""Tokens of the prompt; rounds while the tracer learns where to look; by which a program's threads have gone to sleep."""


class Found(NamedTuple):
    """ms of one run of a kernel as recorded, by duplication, and in the recorded steps by the program's own clock; alpha by
    phase; runs of a kernel in a decode step."""

    measured: dict[str, float]
    truth: dict[str, float]
    among_probes: dict[str, float]
    alphas: dict[str, float]
    runs: dict[str, float]


def recording(program: list[str], run: Path, levels: str = LEVELS) -> list[str]:
    """The command that records one of our programs."""
    return [sys.executable, "-m", "tracer", "run", "--no-views", "--levels", levels, "-o", str(run), "--", *program]


def benchmark(name: str, *arguments: object) -> list[str]:
    """The command that runs one of our programs."""
    return [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]


class Paced:
    """A process of one of the programs with copies, which takes a round when it is told to."""

    def __init__(self, command: list[str], rest_s: float = 0.0):
        self.rest_s = rest_s
        self.process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, cwd=ROOT)

    def round(self) -> dict[str, float]:
        """ms by name, by the program's own clock."""
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        told = next(line for line in self.process.stdout if line.startswith("{"))
        time.sleep(self.rest_s)
        return dict(json.loads(told))

    def close(self) -> str:
        """Let it end; its last words."""
        said, _ = self.process.communicate()
        assert self.process.returncode == 0, f"{self.process.args} answered {self.process.returncode}"
        return str(said)


def rounds_of(own: Paced, rounds: int, until: float, recorded: Paced | None = None) -> pd.DataFrame:
    """ms that `own` told in each of as many rounds as there is time for, at most `rounds`, by turns with `recorded`."""
    told: list[dict[str, float]] = []
    while not told or (len(told) < rounds and time.monotonic() < until):
        told.append(own.round())
        if recorded:
            recorded.round()
        print(f"\r{len(told)} rounds", end="", file=sys.stderr)
    print(file=sys.stderr)
    return pd.DataFrame(told)


def runtime_kernels(folder: Path, args: argparse.Namespace, until: float) -> Found:
    """Our runtime's subgraphs and phases."""
    program = Paced(recording(benchmark("runtime_copies.py", args.model, args.extra), folder / "run", args.levels))
    told = rounds_of(program, args.rounds, until)
    seen = told.filter(like="seen ").rename(columns=lambda name: name.removeprefix("seen "))
    spent = told[list(seen)]
    timed = pd.DataFrame(json.loads(program.close().splitlines()[-1]), columns=["phase", "ns"])
    tables = load(folder / "run")
    steps, own_steps = (
        rows.median() for rows in (tables["tokens"].groupby("phase")["duration_ns"], timed.groupby("phase")["ns"])
    )
    alphas = {phase: fidelity.accuracy(float(steps[phase]), float(own_steps[phase])) for phase in ("prefill", "decode")}
    tokens = tables["tokens"].query("phase == 'decode'")["token_id"].iloc[WARM:].to_numpy()
    counted = tokens.reshape(len(spent), 1 + args.extra)[:, 1:].ravel()
    graphs = tables["graphs"][tables["graphs"]["token_id"].isin(counted)]
    each = graphs.pivot_table(index="token_id", columns="kind", values="duration_ns").loc[counted] / 1e6
    recorded = each.groupby(np.arange(len(counted)) // args.extra).mean()[list(spent)]
    # By rounds: neighbouring steps run at one pace of the machine; the whole series may not.
    measured = recorded.median()
    truth, among_probes = ((measured * (own / recorded).median()).to_dict() for own in (spent, seen))
    runs = graphs.groupby("kind").size() / len(counted)
    return Found(measured.to_dict(), truth, among_probes, alphas, runs.to_dict())


def llama_kernels(folder: Path, rounds: int, extra: int, until: float) -> tuple[dict[str, float], dict[str, float]]:
    """({kernel: ms as recorded}, {kernel: ms by duplication}); the programs take rounds by turns: both see one machine."""
    own = Paced(benchmark("ggml_copies.py", extra), REST_S)
    recorded = Paced(recording(benchmark("ggml_copies.py", 0), folder / "kernels"), REST_S)
    for _ in range(LEARNING):
        recorded.round()
    table = rounds_of(own, rounds, until, recorded)
    own.close()
    recorded.close()
    operators = load(folder / "kernels")["operators"]
    measured, truth = {}, {}
    for name, rows in operators.groupby(operators["name"].str.partition(".")[0]):
        if name not in table:
            continue  # what the graphs begin with
        each = rows["duration_ns"].to_numpy().reshape(-1, 1 + ALONE)[LEARNING:, 1:] / 1e6
        by_round = np.median(each, axis=1)
        measured[str(name)] = float(np.median(by_round))
        # By rounds: neighbouring ones run at one pace of the machine; the whole series may not.
        truths = fidelity.duplication(table["base"].to_numpy(), table[name].to_numpy(), extra)
        truth[str(name)] = measured[str(name)] * float(np.median(truths / by_round))
    return measured, truth


def llama_phases(folder: Path, tokens: int) -> dict[str, float]:
    """alpha of prefill and decode, as recorded, against the program's own clock."""
    command = recording(benchmark("llama_phases.py", GGUF, PROMPT, tokens), folder / "steps")
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    timed = json.loads(next(line for line in told.splitlines() if line.startswith("[") and line.endswith("]")))
    steps = load(folder / "steps")["tokens"]["duration_ns"].to_numpy() / 1e6
    decode = fidelity.accuracy(float(np.median(steps[1:])), float(np.median(timed[1:])))
    return {"prefill": fidelity.accuracy(float(steps[0]), timed[0]), "decode": decode}


def of_llamacpp(folder: Path, args: argparse.Namespace, until: float) -> Found:
    """llama.cpp's kernels, and phases of a model."""
    kernels = llama_kernels(folder, args.rounds, args.extra, until)
    return Found(*kernels, {}, llama_phases(folder, args.tokens), {})


def repeated(once: Callable[[Path, argparse.Namespace, float], Found], args: argparse.Namespace) -> list[Found]:
    """As often as asked for, each within its share of the time."""
    found, began = [], time.monotonic()
    for repeat in range(1, 1 + args.repeats):
        print(f"repeat {repeat} of {args.repeats}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            found.append(once(Path(folder), args, began + args.seconds * repeat / args.repeats))
    return found


def show_phases(alphas: list[dict[str, float]]) -> None:
    """Print alpha of prefill and decode."""
    for phase in ("prefill", "decode"):
        values = [of_run[phase] for of_run in alphas]
        print(f"{phase:<10} alpha {np.median(values):.3f} % ({min(values):.3f} to {max(values):.3f}, {len(values)} runs)")


def compared(found: list[Found], of: Callable[[Found], dict[str, float]]) -> pd.DataFrame:
    """By kernel the medians over all repeats, each of which went at a pace of its own; `spread` of the truth, as a share."""
    rows = pd.concat([fidelity.compare(run.measured, of(run)) for run in found]).groupby("name", sort=False)
    truths = rows["truth_ms"]
    return rows.median().assign(spread=(truths.max() - truths.min()) / truths.median())


def show(found: list[Found]) -> None:
    """Print each kernel."""
    rows = compared(found, lambda run: run.truth)
    among_probes = compared(found, lambda run: run.among_probes)["accuracy_percent"]
    for row in rows.itertuples():
        spread = f"spread {row.spread:.0%} of {len(found)}"
        print(
            f"{row.Index:<10} measured {row.measured_ms:.4f} ms, truth {row.truth_ms:.4f} ms ({spread}): "
            f"alpha {row.accuracy_percent:.2f} %, ε* {row.scaled_error:.1f}"
            + (f"; as it ran among probes {among_probes[row.Index]:.2f} %" if row.Index in among_probes else "")
        )
    long = rows[rows["truth_ms"] > 0.1]
    if len(long):
        mean = f"mean alpha of {len(long)} kernels above 100 µs: {long['accuracy_percent'].mean():.2f} %"
        print(mean + (f"; among probes {among_probes[long.index].mean():.2f} %" if len(among_probes) else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("moescope", "llamacpp"), default="moescope")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="of each repeat, at most; default: 150, of llama.cpp's 40")
    parser.add_argument("--seconds", type=float, default=150, help="after which no further round begins")
    parser.add_argument("--extra", type=int, help="further runs of a kernel; default: 3, of llama.cpp's 4")
    parser.add_argument("--levels", default=LEVELS, help="to record of our runtime")
    parser.add_argument("--tokens", type=int, default=48, help="that llama.cpp's phases are told by")
    parser.add_argument("--model", type=Path, default=MODEL, help="of our runtime")
    parser.add_argument("--out", type=Path, help="write the truth there, for: python -m analyzer fidelity RUN --truth FILE")
    args = parser.parse_args()
    extra, rounds = (4, 40) if args.engine == "llamacpp" else (3, 150)
    args.extra, args.rounds = args.extra or extra, args.rounds or rounds
    found = repeated(of_llamacpp if args.engine == "llamacpp" else runtime_kernels, args)
    show(found)
    show_phases([run.alphas for run in found])
    if args.out:
        truths = pd.DataFrame([run.truth for run in found]).median()
        a_step = {name: ms * found[-1].runs.get(name, 1) for name, ms in truths.items()}
        args.out.write_text(json.dumps({"kernels": a_step}))


if __name__ == "__main__":
    main()
