"""How long a program waits for the tracer: until its first instruction, and stopped while its libraries are probed.

    sudo python -m benchmarks.start [--rounds 10] [--variants "python;demo;node-llama-cpp"] [--json FILE]

`first instruction` is the time from the start of `moescope run` (its process's fork) to main() of a program of a few lines that
notes CLOCK_MONOTONIC, and then becomes the target by execve. `held` is what the recorder itself counts in the manifest: the time
from each stop of the target for a library it opened to its waking; `stops` is how often. `whole` is the command from its start to
its end, against the same without the tracer. The programs take turns. They are `python`, which imports nothing; `demo`, our
runtime with its demo model; `node-llama-cpp`, the llama.cpp of that npm package, whose backends are files of their own that are
opened late. All levels are recorded, and no views are written. What llama.cpp's build was learnt to be is kept in a folder of
this benchmark's, so that only the first round learns it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.lib.models import demo_model, seeded_gguf
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes
from benchmarks.lib.turns import by_turns
from workloads import PROGRAMS, ROOT
from workloads.llama_libraries import library_folder

STAMP = r"""
#include <stdio.h>
#include <time.h>
#include <unistd.h>
int main(int count, char **words)
{
	struct timespec now;
	FILE *file;

	clock_gettime(CLOCK_MONOTONIC, &now);
	file = count > 2 ? fopen(words[1], "w") : NULL;
	if (!file || fprintf(file, "%lld", now.tv_sec * 1000000000LL + now.tv_nsec) < 0 || fclose(file))
		return 1;
	execvp(words[2], words + 2);
	return 1;
}
"""
RECORDING = ("-m", "tracer", "run", "--no-views")
VARIANTS = ("python", "demo", "node-llama-cpp")


class Start(NamedTuple):
    """Times of one run, ms, and how often its target was stopped; nan for what an untraced one has not."""

    first: float
    whole: float
    held: float = float("nan")
    stops: float = float("nan")


def variant_command(name: str) -> tuple[list[str], dict[str, str]]:
    """The command of a variant, and what it needs in its environment."""
    if name == "python":
        return [sys.executable, "-c", "pass"], {}
    if name == "demo":
        return [sys.executable, "-m", "moescope", "generate", str(demo_model()), "--prompt", "a b c", "--max-new-tokens", "4"], {}
    library = next(library_folder().glob("libllama.v*.so"))
    steps = [sys.executable, str(PROGRAMS / "llama_steps.py"), str(seeded_gguf("tiny-moe")), "4", "8"]
    return steps, {"LLAMA_LIBRARY": str(library)}


def run_variant(name: str, stamp: Path, folder: Path, traced: bool) -> Start:
    """Run a variant once."""
    words, environment = variant_command(name)
    noted, run = folder / "noted", folder / "run"
    tracer = [sys.executable, *RECORDING, "-o", str(run), "--"] if traced else []
    began = time.monotonic_ns()
    done = subprocess.run(
        [*tracer, str(stamp), str(noted), *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    whole = time.monotonic_ns() - began
    if done.returncode:
        sys.exit(f"{name} ended with status {done.returncode}: {done.stderr[-2000:]}")
    first = int(noted.read_text()) - began
    if not traced:
        return Start(first / 1e6, whole / 1e6)
    cost = json.loads((run / "manifest.json").read_text())["cost"]
    shutil.rmtree(run)
    return Start(first / 1e6, whole / 1e6, cost["held_ns"] / 1e6, cost["held_stops"])


def main() -> None:
    parser = make_parser(__doc__, rounds=10)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="a choice, separated by semicolons (default: %(default)s)")
    args = parser.parse_args()
    names = [name.strip() for name in args.variants.split(";")]
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(VARIANTS)}")
    report = Report("start", args)
    starts: dict[tuple[str, bool], list[Start]] = {(name, traced): [] for name in names for traced in (False, True)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["MOESCOPE_CACHE"] = str(folder / "learnt")
        stamp = folder / "stamp"
        subprocess.run(["cc", "-O2", "-x", "c", "-", "-o", str(stamp)], input=STAMP, text=True, check=True)
        for _, (name, traced) in by_turns(list(starts), args.rounds):
            starts[name, traced].append(run_variant(name, stamp, folder, traced))
    for name in names:
        bare, probed = (np.array(starts[name, traced]).T for traced in (False, True))
        report.add(f"{name}: first instruction", "ms", extremes(probed[0]))
        report.add(f"{name}: held", "ms", extremes(probed[2]))
        report.add(f"{name}: stops", "count", extremes(probed[3]))
        report.add(f"{name}: whole, untraced", "ms", extremes(bare[1]))
        report.add(f"{name}: whole, traced", "ms", extremes(probed[1]), against="untraced")
    report.finish()


if __name__ == "__main__":
    main()
