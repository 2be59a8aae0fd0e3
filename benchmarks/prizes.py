"""Estimated savings of findings against measured ones: plants causes, reads each finding, applies its remedy, measures again.

sudo python -m benchmarks.prizes [--rounds 5] [--causes small cache,cold file]

Each round records the planted run and the run with the remedy, alternately. `predicted` is the finding's estimated saving and
`won` the reduction of step time, both as a share of the planted run's step time; an estimate is right within a factor of 1.5. The
causes "other process" and "thread too many" need an otherwise idle machine. The fallback from the NPU to the CPU uses llama.cpp's
own Hexagon backend over a stand-in (workloads/hexagon), whose operators take OPERATOR_US: the NPU's times are not real.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.questions.findings import findings
from analyzer.records.schema import Tables
from analyzer.tables.store import load_tables
from benchmarks.lib.models import demo_model, seeded_gguf
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from benchmarks.lib.turns import by_turns
from workloads import ROOT
from workloads.hexagon import backend
from workloads.llama_libraries import library_folder

LEVELS = "token,graph,operator,expert,qnn,sched,io"
FACTOR = 1.5
PROMPT = "The router looks at the token and picks a few experts. A cache keeps the experts that were used last."
BURN = "while True: pass"
FILE_BYTES, COLD_STEPS = 256 << 20, 32
OPERATOR_US = 20


@dataclass(frozen=True)
class Run:
    """A command with its environment, its CPUs, the number of processes that load them during the run, the folder with
    files to drop from the page cache before it, and the folder to remove before it.
    """

    words: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cpus: str = ""
    burners: int = 0
    cold: Path | None = None
    removed: Path | None = None


@dataclass(frozen=True)
class Cause:
    """A planted run, the rules of the findings that must detect it, and the run that the first one's evidence proposes."""

    name: str
    rules: tuple[str, ...]
    planted: Run
    remedy: Callable[[dict[str, Any]], Run]
    label: str = ""


def runtime_run(model: Path, *words: str) -> Run:
    """A run of our runtime."""
    command = (sys.executable, "-m", "moescope", "generate", str(model), "--prompt", PROMPT, "--ignore-end")
    return Run((*command, "--max-new-tokens", "100", *words))


def llama_run(threads: int) -> Run:
    """A run of llama.cpp."""
    program = (sys.executable, "workloads/programs/llama_steps.py", str(seeded_gguf("small-moe")), "16", "60", "0.005")
    return Run(program, {"LLAMA_THREADS": str(threads)})


def hexagon_run() -> Run:
    """A run of llama.cpp's Hexagon backend over the stand-in."""
    library = backend.real_backend()
    backend.stand_in(library.parent)
    words = ("-m", "workloads.hexagon.steps", str(library_folder()), str(library), str(seeded_gguf("small-moe")), "16", "40")
    env = {"GGML_HEXAGON_PROFILE": "1", "GGML_HEXAGON_VMEM": "3000", "LD_LIBRARY_PATH": str(library.parent)}
    return Run((sys.executable, *words), env | {"STANDIN_OP_US": str(OPERATOR_US), "LLAMA_THREADS": "1"})


def planted_causes(folder: Path) -> Iterator[Cause]:
    """All planted causes."""
    model = demo_model()
    small = runtime_run(model, "--expert-cache", "1.5MiB")

    def cached(evidence: dict[str, Any]) -> Run:
        return runtime_run(model, "--expert-cache", str(int(evidence["budget_bytes"])))

    yield Cause("small cache", ("expert loads",), small, cached)
    alone = replace(llama_run(1), cpus="0")
    yield Cause("another process", ("run queue",), replace(alone, burners=1), lambda _: alone)
    crowded = replace(llama_run(2), cpus="0")
    yield Cause("a thread too many", ("crowded",), crowded, lambda _: alone)
    package = folder / "package"
    convert = [sys.executable, "-m", "moescope", "convert", str(model), str(package)]
    subprocess.run(convert, cwd=ROOT, check=True, capture_output=True)
    weights = folder / "weights" / "file"
    weights.parent.mkdir()
    weights.write_bytes(os.urandom(FILE_BYTES))
    warm = Run((sys.executable, "workloads/programs/cold_steps.py", str(weights), str(COLD_STEPS)))
    yield Cause("cold file", ("disk and faults",), replace(warm, cold=weights.parent), lambda _: warm)
    place = ("--prefill-backend", "htp", "--tiers", "1,8", "--chunk", "16", "--expert-cache", "3MiB", "--max-new-tokens", "8")
    ahead = runtime_run(model, "--package", str(package), *place)
    late = replace(ahead, removed=package / "htp")
    yield Cause("graphs compiled in steps", ("compiling",), late, lambda _: ahead, "emulator")
    on_npu = hexagon_run()
    filtered = replace(on_npu, env=on_npu.env | {"GGML_HEXAGON_OPFILTER": "MUL_MAT_ID"})
    yield Cause("NPU fallback", ("fallback",), filtered, lambda _: on_npu, "stand-in")


def drop_cached(folder: Path) -> None:
    """Drop all files of a folder from the page cache."""
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def prepared_run(run: Run) -> Iterator[None]:
    """Context of a recorded run: its preparation and the load on its CPUs."""
    pin = ["taskset", "-c", run.cpus] if run.cpus else []
    if run.cold:
        drop_cached(run.cold)
    if run.removed:
        shutil.rmtree(run.removed, ignore_errors=True)
    burning = [subprocess.Popen([*pin, sys.executable, "-c", BURN]) for _ in range(run.burners)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def record_run(run: Run, folder: Path) -> Tables:
    """The tables of a traced run."""
    pin = ["taskset", "-c", run.cpus] if run.cpus else []
    command = [sys.executable, "-m", "tracer", "run", "--no-views", "--levels", LEVELS, "-o", str(folder), "--", *pin, *run.words]
    with prepared_run(run):
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **run.env}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip()[-300:])
    return load_tables(folder)


def promised_saving(tables: Tables, rules: tuple[str, ...]) -> tuple[float, dict[str, Any]]:
    """(sum of the largest saving of each rule, as a share of step time; the rules do not overlap; evidence of the first)."""
    found = {finding.rule: finding for finding in reversed(findings(tables))}  # the largest of each rule
    first = next((found[rule].evidence for rule in rules if rule in found), {})
    return sum(found[rule].saving_share for rule in rules if rule in found), first


def step_ms(tables: Tables) -> float:
    """Total ms of all steps."""
    return float(tables["tokens"]["duration_ns"].sum()) / 1e6


def try_cause(cause: Cause, rounds: int, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, won) of each round, shares of the planted run's step time."""
    predicted, evidence = promised_saving(record_run(cause.planted, folder / "first"), cause.rules)
    sides = (("planted", cause.planted), ("remedied", cause.remedy(evidence))) if evidence else ()
    took: dict[str, list[float]] = {"planted": [], "remedied": []}
    savings = []
    for number, (side, run) in by_turns(sides, rounds):
        tables = record_run(run, folder / f"{side}-{number}")
        took[side].append(step_ms(tables))
        if side == "planted":
            savings.append(promised_saving(tables, cause.rules)[0])
    return np.array(savings or [predicted]), 1 - np.array(took["remedied"]) / np.array(took["planted"])


def judge_cause(report: Report, cause: Cause, predicted: np.ndarray, won: np.ndarray) -> bool:
    """Whether the estimated saving is right within FACTOR; adds its figures."""
    labels = (cause.label,) if cause.label else ()
    report.add(f"{cause.name}: predicted", "%", extremes(100 * predicted), labels=labels)
    if len(won):
        report.add(f"{cause.name}: won", "%", extremes(100 * won), labels=labels)
    if not len(won) or np.median(won) <= 0:
        report.note(f"{cause.name}: {'nothing was won' if len(won) else 'no finding'}")
        return False
    ratio = float(np.median(predicted) / np.median(won))
    report.add(f"{cause.name}: predicted / won", "", single(ratio, len(won)), labels=labels)
    return 1 / FACTOR <= ratio <= FACTOR


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--causes", metavar="NAMES", help="only these, separated by commas")
    args = parser.parse_args()
    report, right = Report("prizes", args), []
    with tempfile.TemporaryDirectory() as temporary:
        for number, cause in enumerate(planted_causes(Path(temporary))):
            if args.causes and cause.name not in args.causes.split(","):
                continue
            predicted, won = try_cause(cause, args.rounds, Path(temporary) / str(number))
            right.append(judge_cause(report, cause, predicted, won))
    report.add(f"causes whose estimated saving is right within a factor of {FACTOR}", "", single(sum(right), len(right)))
    report.finish()


if __name__ == "__main__":
    main()
