"""Short attaches to an engine with short steps: how long are its steps while a recording of operators stands?

    sudo python -m benchmarks.attach_series [tiny-moe] [--rounds 20] [--seconds 1] [--threads 2] [--forget] [--json FILE]

One process decodes a tiny model continuously and logs begin and end of every step itself. In each round it runs untraced for a
while, then `moescope attach --duration` follows it at the levels token, graph, operator and expert, as a user would type it. A
step counts as one with probes from the first begin of a step in the recording to the last end: the first graphs, in which a
tracer may have to learn where operators begin, are part of it. The others are the steps between the end of one tracer and the
start of the next. Each round gives one ratio of medians, with probes to without; `within` counts the rounds whose ratio is at
most 1.15. Operators per step, from the recording, tell whether operators were recorded at all.

What a build was learnt to be is kept in a folder of this benchmark's: the first attach learns it, the others find it; with
--forget every attach is the first. Rounds in which the host took more than 2 % of the CPUs' time are left out as long as others
remain. Two threads on two CPUs leave none to the tracer: --threads 1 leaves one.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.lib.decoding import Engine, default_library
from benchmarks.lib.models import seeded_gguf
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from workloads import ROOT
from workloads.gguf_model import SHAPES
from workloads.host_time import MOST_STOLEN, HostTime
from workloads.raw_records import RawRecording

LEVELS = "token,graph,operator,expert"
ALLOWED = 1.15
"""Largest ratio of a step with probes to one without that counts as within."""
REST_S, WARM_UP_S = 1.0, 3.0


class Round(NamedTuple):
    """Where an engine's log has steps without probes and with them (begin, end), and what was recorded in the latter."""

    without: tuple[int, int]
    traced: tuple[int, int]
    operators_per_step: float
    lost: int
    stolen: float


def run_round(engine: Engine, folder: Path, args: argparse.Namespace) -> Round:
    """One round; `folder` is new."""
    host, began = HostTime(), time.monotonic_ns()
    time.sleep(max(REST_S, args.seconds))
    ended = time.monotonic_ns()
    command = [sys.executable, "-m", "tracer", "attach", "--pid", str(engine.process.pid), "--duration", str(args.seconds)]
    done = subprocess.run(
        [*command, "--levels", LEVELS, "--no-views", "-o", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):  # 1: records were lost, which is counted
        sys.exit(f"the tracer ended with status {done.returncode}: {done.stderr[-2000:]}")
    run = RawRecording(folder)
    begins, ends = run.records("token_begin")["ts"], run.records("token_end")["ts"]
    traced = (int(begins.min()), int(ends.max())) if len(begins) and len(ends) else (0, 0)
    operators = int(run.records("op_shares")["count"].sum()) / max(1, len(ends))
    return Round((began, ended), traced, operators, sum(run.manifest["lost"].values()), host.share())


def median_step(tokens: np.ndarray, span: tuple[int, int]) -> float:
    """The median duration, ns, of the steps within a span; nan if there is none."""
    inside = tokens[(tokens[:, 0] >= span[0]) & (tokens[:, 1] <= span[1])]
    return float(np.median(inside[:, 1] - inside[:, 0])) if len(inside) else float("nan")


def add_figures(report: Report, rounds: list[Round], tokens: np.ndarray) -> None:
    """Steps of both kinds, their ratios, and what was recorded."""
    kept = [each for each in rounds if each.stolen <= MOST_STOLEN] or rounds
    without, traced = (np.array([median_step(tokens, getattr(each, name)) for each in kept]) for name in ("without", "traced"))
    ratios = (traced / without)[np.isfinite(traced / without)]
    if not len(ratios):
        sys.exit("no recording has a step, and its neighbour one: give more --seconds")
    report.add("median step without probes", "ms", extremes(without / 1e6))
    report.add("median step with operators", "ms", extremes(traced[np.isfinite(traced)] / 1e6), against="no probes")
    report.add("ratio of the two", "", extremes(ratios), against="no probes")
    report.add(f"attaches within {ALLOWED}", "count", single(int((ratios <= ALLOWED).sum()), len(ratios)))
    report.add("shares of operators per step", "count", extremes([each.operators_per_step for each in kept]))
    report.add("records lost", "count", single(sum(each.lost for each in kept), len(kept)))
    if len(ratios) < len(rounds):
        report.note(f"{len(rounds) - len(ratios)} of {len(rounds)} rounds left out: the host took CPU time, or they have no step")


def main() -> None:
    parser = make_parser(__doc__, rounds=20, help_rounds="attaches")
    parser.add_argument(
        "model", nargs="?", choices=list(SHAPES), default="tiny-moe", help="shape of the model (default: tiny-moe)"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each recording (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of the engine (default: %(default)s)")
    parser.add_argument("--forget", action="store_true", help="forget before each attach what the build was learnt to be")
    parser.add_argument("--library", help="file that exports llama.h's functions (default: the package xllamacpp)")
    args = parser.parse_args()
    report = Report("attach_series", args)
    with tempfile.TemporaryDirectory() as name:
        folder, learnt = Path(name), Path(name) / "learnt"
        os.environ["MOESCOPE_CACHE"] = str(learnt)
        log = folder / "steps.bin"
        words = [args.library or default_library(), str(seeded_gguf(args.model)), str(log), str(args.threads)]
        with contextlib.closing(
            Engine([sys.executable, "-m", "benchmarks.programs.decode", *words], log, args.threads)
        ) as engine:
            engine.wait_for_tokens(2)
            time.sleep(WARM_UP_S)
            rounds = []
            for number in range(args.rounds):
                if args.forget:
                    shutil.rmtree(learnt, ignore_errors=True)
                rounds.append(run_round(engine, folder / "run", args))
                shutil.rmtree(folder / "run")
                print(f"\r{number + 1}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        add_figures(report, rounds, engine.tokens())
    report.finish()


if __name__ == "__main__":
    main()
