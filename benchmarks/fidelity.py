"""Accuracy of the recorded times: phases against the engine's own timers, kernels against duplication.

sudo python -m benchmarks.fidelity [--rounds 3] [--turns 150] [--extra 3] [--seconds 150] [--model M] [--levels L] [--out FILE]
sudo python -m benchmarks.fidelity --engine llamacpp [--rounds 3] [--turns 40] [--extra 4]        llama.cpp's kernels

A kernel's true time is the median over rounds of the time that EXTRA copies of it add, by the program's own clock, divided by
EXTRA. CPU only: the HTP emulator is not a timing model. A copy must find the caches in the same state as a step's single run: see
programs/runtime_copies.py (steps of our runtime) and programs/ggml_copies.py (llama.cpp: graphs of kernels in the sizes of a
decoded token). Our runtime's copies run in the recorded process, unseen by the tracer, next to the steps whose records count: in
two processes, memory placement changed kernel times by a tenth. So alpha includes both the recording's error and the slowdown by
the probes; the accuracy relative to the kernel's time with probes, by the program's own clock, is given separately. llama.cpp's
copies run in a separate process that alternates with the recorded one. The true times of llama.cpp's phases are from
programs/llama_phases.py.
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

from analyzer.questions import fidelity
from analyzer.tables.store import load_tables
from benchmarks.lib.models import demo_model, seeded_gguf
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes
from benchmarks.programs.ggml_copies import ALONE
from benchmarks.programs.runtime_copies import WARM
from workloads import ROOT

LEVELS = "token,graph,operator"
LONG_MS = 0.1
PROMPT, LEARNING, REST_S = 128, 20, 0.02
"""Tokens of the prompt; rounds while the tracer learns where to look; by which a program's threads have gone to sleep."""


class Run(NamedTuple):
    """ms of one run of a kernel as recorded, by duplication, and in the recorded steps by the program's own clock; alpha by
    phase; runs of a kernel in a decode step."""

    measured: dict[str, float]
    truth: dict[str, float]
    among_probes: dict[str, float]
    alphas: dict[str, float]
    runs: dict[str, float]


def record_words(program: list[str], run: Path, levels: str = LEVELS) -> list[str]:
    """The command that records one of our programs."""
    return [sys.executable, "-m", "tracer", "run", "--no-views", "--levels", levels, "-o", str(run), "--", *program]


def copies_words(name: str, *arguments: object) -> list[str]:
    """The command that runs one of our programs."""
    return [sys.executable, "-m", f"benchmarks.programs.{name}", *map(str, arguments)]


class Paced:
    """A process of one of the programs with copies, which runs a round on request."""

    def __init__(self, command: list[str], rest_s: float = 0.0):
        self.rest_s = rest_s
        self.process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, cwd=ROOT)

    def round(self) -> dict[str, float]:
        """ms by name, by the program's own clock."""
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        line = next(line for line in self.process.stdout if line.startswith("{"))
        time.sleep(self.rest_s)
        return dict(json.loads(line))

    def close(self) -> str:
        """Let it end; returns its last output."""
        said, _ = self.process.communicate()
        assert self.process.returncode == 0, f"{self.process.args!r} answered {self.process.returncode}"
        return str(said)


def rounds_of(own: Paced, rounds: int, until: float, recorded: Paced | None = None) -> pd.DataFrame:
    """ms of `own` in up to `rounds` rounds until the time limit, alternately with `recorded`."""
    taken: list[dict[str, float]] = []
    while not taken or (len(taken) < rounds and time.monotonic() < until):
        taken.append(own.round())
        if recorded:
            recorded.round()
        print(f"\r{len(taken)} rounds", end="", file=sys.stderr)
    print(file=sys.stderr)
    return pd.DataFrame(taken)


def runtime_kernels(folder: Path, args: argparse.Namespace, until: float) -> Run:
    """Our runtime's subgraphs and phases."""
    program = Paced(
        record_words(copies_words("runtime_copies", args.model or demo_model(), args.extra), folder / "run", args.levels)
    )
    rounds = rounds_of(program, args.turns, until)
    seen = rounds.filter(like="seen ").rename(columns=lambda name: name.removeprefix("seen "))
    spent = rounds[list(seen)]
    timed = pd.DataFrame(json.loads(program.close().splitlines()[-1]), columns=["phase", "ns"])
    tables = load_tables(folder / "run")
    steps, own_steps = (
        rows.median() for rows in (tables["tokens"].groupby("phase")["duration_ns"], timed.groupby("phase")["ns"])
    )
    alphas = {phase: fidelity.accuracy_percent(float(steps[phase]), float(own_steps[phase])) for phase in ("prefill", "decode")}
    tokens = tables["tokens"].query("phase == 'decode'")["token_id"].iloc[WARM:].to_numpy()
    counted = tokens.reshape(len(spent), 1 + args.extra)[:, 1:].ravel()
    graphs = tables["graphs"][tables["graphs"]["token_id"].isin(counted)]
    each = graphs.pivot_table(index="token_id", columns="kind", values="duration_ns").loc[counted] / 1e6
    recorded = each.groupby(np.arange(len(counted)) // args.extra).mean()[list(spent)]
    # By rounds: neighbouring steps run at the same pace of the machine, the whole series may not.
    measured = recorded.median()
    truth, among_probes = ((measured * (own / recorded).median()).to_dict() for own in (spent, seen))
    runs = graphs.groupby("kind").size() / len(counted)
    return Run(measured.to_dict(), truth, among_probes, alphas, runs.to_dict())


def llama_kernels(folder: Path, rounds: int, extra: int, until: float) -> tuple[dict[str, float], dict[str, float]]:
    """({kernel: ms as recorded}, {kernel: ms by duplication}); the programs take rounds alternately: both see one machine."""
    own = Paced(copies_words("ggml_copies", extra), REST_S)
    recorded = Paced(record_words(copies_words("ggml_copies", 0), folder / "kernels"), REST_S)
    for _ in range(LEARNING):
        recorded.round()
    table = rounds_of(own, rounds, until, recorded)
    own.close()
    recorded.close()
    operators = load_tables(folder / "kernels")["operators"]
    measured, truth = {}, {}
    for name, rows in operators.groupby(operators["name"].str.partition(".")[0]):
        if name not in table:
            continue  # the first product of every graph
        each = rows["duration_ns"].to_numpy().reshape(-1, 1 + ALONE)[LEARNING:, 1:] / 1e6
        by_round = np.median(each, axis=1)
        measured[str(name)] = float(np.median(by_round))
        # By rounds: neighbouring rounds run at the same pace of the machine, the whole series may not.
        truths = fidelity.kernel_by_repetition(table["base"].to_numpy(), table[name].to_numpy(), extra)
        truth[str(name)] = measured[str(name)] * float(np.median(truths / by_round))
    return measured, truth


def llama_phases(folder: Path, tokens: int) -> dict[str, float]:
    """alpha of the recorded prefill and decode relative to the program's own clock."""
    command = record_words(copies_words("llama_phases", seeded_gguf("llama-1b"), PROMPT, tokens), folder / "steps")
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    timed = json.loads(next(line for line in printed.splitlines() if line.startswith("[") and line.endswith("]")))
    steps = load_tables(folder / "steps")["tokens"]["duration_ns"].to_numpy() / 1e6
    decode = fidelity.accuracy_percent(float(np.median(steps[1:])), float(np.median(timed[1:])))
    return {"prefill": fidelity.accuracy_percent(float(steps[0]), timed[0]), "decode": decode}


def of_llamacpp(folder: Path, args: argparse.Namespace, until: float) -> Run:
    """llama.cpp's kernels, and phases of a model."""
    kernels = llama_kernels(folder, args.turns, args.extra, until)
    return Run(*kernels, {}, llama_phases(folder, args.tokens), {})


def repeat_rounds(once: Callable[[Path, argparse.Namespace, float], Run], args: argparse.Namespace) -> list[Run]:
    """`rounds` repetitions, each within its share of the time."""
    runs, began = [], time.monotonic()
    for number in range(1, 1 + args.rounds):
        print(f"round {number} of {args.rounds}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            runs.append(once(Path(folder), args, began + args.seconds * number / args.rounds))
    return runs


def compare_kernels(runs: list[Run], truth: Callable[[Run], dict[str, float]]) -> pd.DataFrame:
    """Measured time, true time and alpha by kernel and round, since each round has its own pace."""
    rows = [fidelity.compare_times(run.measured, truth(run)).assign(round=i) for i, run in enumerate(runs)]
    return pd.concat(rows).set_index("name")


def add_figures(report: Report, runs: list[Run]) -> None:
    """Every kernel, the mean of the long ones, and both phases."""
    rows, among_probes = compare_kernels(runs, lambda run: run.truth), compare_kernels(runs, lambda run: run.among_probes)
    for name, of_kernel in rows.groupby("name", sort=False):
        report.add(f"{name}: measured", "ms", extremes(of_kernel["measured_ms"]))
        report.add(f"{name}: truth", "ms", extremes(of_kernel["truth_ms"]))
        report.add(f"{name}: alpha", "%", extremes(of_kernel["accuracy_percent"]))
        if name in among_probes.index:
            report.add(f"{name}: alpha among probes", "%", extremes(among_probes.loc[[name], "accuracy_percent"]))
    middle = rows.groupby("name").median(numeric_only=True)
    if len(long := middle.index[middle["truth_ms"] > LONG_MS]):
        by_round = rows.loc[long].groupby("round")["accuracy_percent"].mean()
        report.add(f"mean alpha of {len(long)} kernels above 100 µs", "%", extremes(by_round))
    for phase in ("prefill", "decode"):
        report.add(f"{phase}: alpha", "%", extremes([run.alphas[phase] for run in runs]))


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--engine", choices=("moescope", "llamacpp"), default="moescope")
    parser.add_argument("--turns", type=int, help="of copies in each round, at most; default: 150, of llama.cpp's 40")
    parser.add_argument("--seconds", type=float, default=150, help="after which no further turn begins")
    parser.add_argument("--extra", type=int, help="further runs of a kernel; default: 3, of llama.cpp's 4")
    parser.add_argument("--levels", default=LEVELS, help="to record of our runtime")
    parser.add_argument("--tokens", type=int, default=48, help="of llama.cpp's phases")
    parser.add_argument("--model", type=Path, help="of our runtime (default: its demo model)")
    parser.add_argument("--out", type=Path, help="write the truth there, for: moescope predict fidelity RUN --truth FILE")
    args = parser.parse_args()
    extra, turns = (4, 40) if args.engine == "llamacpp" else (3, 150)
    args.extra, args.turns = args.extra or extra, args.turns or turns
    report, runs = Report("fidelity", args), repeat_rounds(of_llamacpp if args.engine == "llamacpp" else runtime_kernels, args)
    add_figures(report, runs)
    report.finish()
    if args.out:
        truths = pd.DataFrame([run.truth for run in runs]).median()
        a_step = {name: ms * runs[-1].runs.get(name, 1) for name, ms in truths.items()}
        args.out.write_text(json.dumps({"kernels": a_step}))


if __name__ == "__main__":
    main()
