"""Faults of the command lines on damaged input, by kind of input (workloads/fuzzing.py defines a fault).

nice python -m benchmarks.fuzz [--cases 1000] [--kinds recording TOML] [--seed 0] [--keep DIR] [--json FILE]

Each kind runs in a separate process, so that a crash is also counted as a fault. --keep writes the input of each distinct fault.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single
from workloads.fuzzing import FAULTS, KINDS, Answer, Bench, damage


def run_campaign(name: str, cases: int, start: int, keep: Path | None) -> dict[str, Any]:
    """Run cases of one kind in this process: counts of each outcome, and the origins of faults."""
    counts: Counter[str] = Counter()
    places: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(KINDS[name], Path(root) / "in")

        for number in range(start, start + cases):
            rng = Random(number)
            verb = rng.choice(KINDS[name].verbs)
            file = rng.choice([each for each in bench.names if f"/{each}" in verb] or bench.names)
            content = damage(rng, bench.sound[file], file)
            outcome, answer = bench.judge(verb, file, content)
            counts[outcome] += 1
            if outcome in (*FAULTS, "last resort"):
                place = f"{outcome}: {answer.where or answer.err.strip()[-160:] or verb}"
                if keep and places[place] == 0:
                    write_case(keep / f"{name.replace(' ', '_')}-{number}", file, content, f"{verb}\n{file}\n{place}", answer)
                places[place] += 1
    return {"counts": counts, "places": places}


def write_case(folder: Path, file: str, content: bytes, what: str, answer: Answer) -> None:
    """Store the input of a fault and the answer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / Path(file).name).write_bytes(content)
    (folder / "case.txt").write_text(f"{what}\n{answer.out[-2000:]}\n{answer.err[-2000:]}\n")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="cases of each kind (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS), help="only these")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case, its random seed (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the input of each distinct fault there")
    parser.add_argument("--here", action="store_true", help="run one kind in this process and print its counts as JSON")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(run_campaign(args.kinds[0], args.cases, args.seed, args.keep)))
        return 0
    report, faults = Report("fuzz", args), 0
    for name in args.kinds:
        words = ["--here", "--kinds", name, "--cases", str(args.cases), "--seed", str(args.seed)]
        words += ["--keep", str(args.keep)] if args.keep else []
        done = subprocess.run([sys.executable, "-m", "benchmarks.fuzz", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            report.note(f"{name}: the process ended with {done.returncode}: {done.stderr[-300:]}")
            faults += 1
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        total = sum(found["counts"].values())
        for outcome, count in sorted(found["counts"].items()):
            report.add(f"{name}: {outcome}", f"of {total:,} cases", single(count, total))
            faults += count * (outcome in FAULTS)
        for place, count in sorted(found["places"].items(), key=lambda row: -row[1]):
            print(f"    {count:6,} {place}", file=sys.stderr)
    report.finish()
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
