"""`compare -- A :: B`: trace two commands alternately until it is clear which is faster, and where."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from moescope.errors import FAILED
from moescope.plain import print_plain
from moescope.terminal import counted
from tracer.commands.cooling import Cooling
from tracer.commands.machine_options import add_on
from tracer.commands.options import add_power, make_output, minutes, need_root, output_folder, seconds, share
from tracer.commands.run import print_progress, python
from tracer.errors import TargetError, TracerError
from tracer.recording.paths import ROOT, Owner, invoking_user

EXAMPLES = """examples:
  sudo moescope compare -- ./llama-bench-old -m m.gguf :: ./llama-bench-new -m m.gguf
  sudo moescope compare --budget 600 --width 2% -o cmp -- python gen.py --threads 2 :: python gen.py --threads 4
  sudo moescope compare --cool -- ./old -m m.gguf :: ./new -m m.gguf   each run begins as cool as the first
  sudo moescope compare --trace "--levels token,operator" --runs 5 -- ./old -m m.gguf :: ./new -m m.gguf
the order is A B B A, so that a drift of the machine affects both alike; the first pair warms caches and is not compared
results: DIR/base, DIR/cand (recordings), DIR/regression.html, DIR/comparison.json
the exit code is that of `moescope compare` for recordings
"""
SEPARATOR = "::"
WARMUP = "warmup"  # folder of the runs that are not compared
BUDGET_S = 300.0
LONGEST_COOLING_S = 300.0
LEAST_PAIRS = 5
"""The interval of fewer runs per side is too narrow: four medians show only a part of their spread."""
EARLY_ALPHA = 0.001
"""A verdict ends the runs only at this level (R. Peto, 1976): testing after every pair inflates false alarms. A sufficiently
narrow interval ends them whatever the verdict, which does not affect the error rate."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "-o", "--output", type=output_folder, help="folder of the comparison (default: recordings/compare-<time>)"
    )
    parser.add_argument("--runs", type=int, default=0, metavar="N", help="number of runs per side (default: as many as needed)")
    parser.add_argument(
        "--budget",
        type=seconds,
        metavar="TIME",
        help="longest time for all runs together, in seconds (default: 300; with --runs, none)",
    )
    parser.add_argument(
        "--width",
        type=share,
        default=0.03,
        metavar="PERCENT",
        help="stop once every confidence interval is narrower than this (default: 3%%)",
    )
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="warm-up runs per side, excluded from the comparison (default: 1)"
    )
    parser.add_argument(
        "--cool",
        type=minutes,
        nargs="?",
        const=LONGEST_COOLING_S,
        default=0.0,
        metavar="MINUTES",
        help="before each run wait until temperatures and limits of clocks are those of before the first, for at most MINUTES "
        f"({LONGEST_COOLING_S / 60:.0f} unless given)",
    )
    parser.add_argument(
        "--trace", default="", metavar="OPTIONS", help='options for `moescope run`, as one argument: "--levels token"'
    )
    parser.add_argument("--fail-on", action="append", default=[], metavar="WHAT", help="as in `moescope compare` for recordings")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND_A ARGUMENTS :: COMMAND_B ARGUMENTS")


def split_commands(words: list[str]) -> tuple[list[str], list[str]]:
    """(command A, command B); raises TracerError unless there are exactly two."""
    words = words[1:] if words[:1] == ["--"] else words
    if words.count(SEPARATOR) != 1:
        raise TracerError(f"two commands are needed: moescope compare -- COMMAND_A {SEPARATOR} COMMAND_B")
    middle = words.index(SEPARATOR)
    if not words[:middle] or not words[middle + 1 :]:
        raise TracerError(f"a command is empty: moescope compare -- COMMAND_A {SEPARATOR} COMMAND_B")
    return words[:middle], words[middle + 1 :]


def run(args: argparse.Namespace) -> int:
    """Record alternately, compare, stop when the result is clear; returns the last comparison's exit code."""
    need_root()
    commands = split_commands(args.command)
    if args.warmup < 0 or args.runs < 0:
        raise TracerError("--warmup and --runs are numbers of runs: give 0 or more")
    owner, folder = invoking_user(), args.output or Path("recordings") / time.strftime("compare-%Y%m%d-%H%M%S")
    make_output(folder, owner)
    budget = args.budget or (float("inf") if args.runs else BUDGET_S)
    began, pairs, cooling = time.monotonic(), 0, cooling_of(args, owner)
    for number in range(args.warmup):
        record_pair(args, commands, folder / WARMUP, number, None)
    while True:
        record_pair(args, commands, folder, pairs, cooling)
        pairs += 1
        spent = time.monotonic() - began
        if has_enough_pairs(args, folder, pairs, owner):
            break
        if spent + spent / (pairs + args.warmup) > budget:
            print_progress(f"--budget {budget:g} s does not allow another run of each side: give a longer one")
            break
    print_progress(f"{counted(pairs, 'run')} per side in {time.monotonic() - began:.0f} s")
    return write_report(args, folder, owner)


def cooling_of(args: argparse.Namespace, owner: Owner) -> Cooling | None:
    """What --cool waits for, if it was given; raises TracerError where the machine's heat cannot be read from here."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_power(parser)
    add_on(parser)
    traced = parser.parse_known_args(args.trace.split())[0]
    if args.cool and traced.on:
        raise TracerError("--cool reads the heat of this machine alone: leave it out with --on")
    return Cooling.begun(Path(traced.sysfs or "/sys"), owner, args.cool) if args.cool else None


def record_pair(
    args: argparse.Namespace, commands: tuple[list[str], list[str]], folder: Path, number: int, cooling: Cooling | None
) -> None:
    """Record each command once: A B in even pairs, B A in odd ones."""
    sides, label = list(zip(("base", "cand"), commands, strict=True)), "warm-up, " if folder.name == WARMUP else ""
    for side, command in sides if number % 2 == 0 else sides[::-1]:
        target = folder / side / f"run-{number:03}"
        waited_s = cooling.wait(print_progress) if cooling else 0.0
        cooled = f" (after {waited_s:.0f} s of cooling down)" if waited_s >= 1 else ""
        print_progress(f"{label}{side} {number + 1}{cooled}: {' '.join(command)[:100]}")
        words = ["-m", "tracer", "run", "--no-views", *args.trace.split(), "-o", str(target), "--", *command]
        tracing = subprocess.Popen([python(), *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ)
        code, errors = wait_for_tracer(tracing)
        if not (target / "manifest.json").exists() or code == FAILED:
            raise TargetError(
                f"{side} was not recorded: {errors.strip().splitlines()[-1] if errors.strip() else f'status {code}'}"
            )
        if status := json.loads((target / "manifest.json").read_text()).get("target", {}).get("exit_code"):
            raise TargetError(f"{side} failed with status {status}: {' '.join(command)[:200]}; run it without the tracer first")


def wait_for_tracer(tracing: subprocess.Popen[bytes]) -> tuple[int, str]:
    """(status, standard error) of a tracer; Ctrl-C reaches it too, so it is left to finish."""
    try:
        errors = tracing.communicate()[1]
    except KeyboardInterrupt:
        tracing.send_signal(signal.SIGINT)
        tracing.communicate()
        raise
    return tracing.returncode, errors.decode(errors="replace")


def compare_recordings(folder: Path, owner: Owner, *more: str) -> tuple[int, dict[str, Any]]:
    """(exit code, document) of `moescope compare` over the recordings so far, run as the invoking user."""
    command = ["-m", "moescope", "compare", str(folder / "base"), str(folder / "cand"), "--json", *more]
    drop = owner.become if os.geteuid() == 0 and owner.uid else None
    done = subprocess.run(
        [python(), *command], capture_output=True, preexec_fn=drop, env=owner.environment(), cwd=ROOT, check=False
    )
    if done.returncode not in (0, 1):
        raise TracerError(f"the runs cannot be compared: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.returncode, json.loads(done.stdout)


def has_enough_pairs(args: argparse.Namespace, folder: Path, pairs: int, owner: Owner) -> bool:
    """Whether to stop: the number of pairs is reached, or each interval of speed is narrow enough or its verdict certain."""
    if args.runs:
        return pairs >= args.runs
    if pairs < LEAST_PAIRS:
        return False
    document = compare_recordings(folder.resolve(), owner, "--alpha", str(EARLY_ALPHA))[1]
    speed = [m for m in document["metrics"] if m["family"] == "speed" and m["low"] is not None]
    open_ones = [m for m in speed if m["verdict"] not in ("slower", "faster") and m["high"] - m["low"] > args.width]
    for metric in open_ones:
        print_progress(f"{metric['metric']}: {100 * (metric['low'] - 1):+.1f} to {100 * (metric['high'] - 1):+.1f} %, continuing")
    return bool(speed) and not open_ones


def write_report(args: argparse.Namespace, folder: Path, owner: Owner) -> int:
    """Write and print the result; returns the exit code."""
    here = folder.resolve()
    limits = [word for limit in args.fail_on for word in ("--fail-on", limit)]
    code, document = compare_recordings(here, owner, "--html", str(here / "regression.html"), *limits)
    with owner.acting():
        (here / "comparison.json").write_text(json.dumps(document))
    for one in document["words"]:
        print_plain(one["text"])
    for failure in document["failures"]:
        print_plain(f"limit broken: {failure}", sys.stderr)
    print_plain(f"report        {folder / 'regression.html'}   open it in a browser")
    return code
