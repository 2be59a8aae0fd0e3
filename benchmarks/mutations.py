"""Whether the tests find small faults that are planted in the product, one at a time (mutations.toml).

python -m benchmarks.mutations [--json FILE] [--only TEXT...]     as root; a few seconds per fault, tens for one in C
python -m benchmarks.mutations --resume                           keeps the scores of a run that was interrupted
python -m benchmarks.mutations --check                            whether each fault still has its place
python -m benchmarks.mutations --only TEXT --search FILE...       which tests of these files find a fault
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.lib.report import Report, commit_label, make_parser
from benchmarks.lib.spread import single
from workloads import ROOT

LIST = Path(__file__).with_suffix(".toml")
KEPT = ROOT / "build" / "mutations.json"
LONGEST_S = 300
"""A run of tests that takes longer has found a hang."""
SHARED = (".venv", ".git")
LEFT_OUT = ("recordings", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis")
OUTCOME = re.compile(r"^(tests/\S+?\.py::.*?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|RERUN)\b.*| ?)$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in `file`, becomes `new`. found_by: tests that fail then; those not marked long come first."""

    file: str
    kind: str
    old: str
    new: str
    found_by: list[str]

    @property
    def name(self) -> str:
        """File and kind."""
        return f"{self.file}, {self.kind}"

    @property
    def package(self) -> str:
        """The package, with what is C apart."""
        package = self.file.partition("/")[0]
        return f"{package}, C" if self.file.endswith((".c", ".h")) and package != "bpf" else package

    @property
    def target(self) -> str:
        """What has to be built; empty for Python."""
        machine = os.uname().machine
        if self.file.startswith(("bpf/", "tracer/recorder/")):
            return f"bpf-moescope recorder-{machine}"
        return "" if self.file.endswith(".py") else "_probes _joins _messages _blocks"

    def has_place(self) -> bool:
        """Whether the old text stands exactly once in the file."""
        path = ROOT / self.file
        return path.is_file() and path.read_text().count(self.old) == 1


def read_faults() -> list[Fault]:
    """All faults."""
    return [Fault(**row) for row in tomllib.loads(LIST.read_text())["fault"]]


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the tree with what is built."""
    with tempfile.TemporaryDirectory(prefix="moescope-mutations-") as name:
        tree = Path(name) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*SHARED, *LEFT_OUT))
        yield tree


def output_in_copy(tree: Path, command: str, limit_s: float | None = None) -> str:
    """The output of a command that sees the copy in the tree's place, so that paths in what is built stay true."""
    shared = [f"mkdir -p {tree}/{name}; mount --bind {ROOT}/{name} {tree}/{name}; " for name in SHARED if (ROOT / name).is_dir()]
    script = f"{''.join(shared)}mount --rbind {tree} {ROOT} && cd {ROOT} && {command}"
    words = ["unshare", "--mount", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True) as process:
        try:
            return process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired as late:
            return (late.stdout or b"").decode(errors="replace")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a test left behind


def failing_tests(tests: list[str], fault: Fault | None = None) -> list[str]:
    """Those of the tests that fail with the fault, or that a crash or a hang ended."""
    quoted = shlex.join(tests)
    with copied_tree() as tree:
        if fault:
            plant_fault(fault, tree)
        command = f"{sys.executable} -m pytest -v --tb=no --no-summary -p no:cacheprovider -p no:xdist {quoted}"
        output = output_in_copy(tree, command, LONGEST_S if fault else None)
    outcomes = dict(OUTCOME.findall(output))
    if not outcomes or "ERROR: not found" in output:
        raise SystemExit(f"these tests did not run: {quoted}\n{output[-2000:]}")
    return [test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR", "")]


def plant_fault(fault: Fault, tree: Path) -> None:
    """Put a fault into a copy of the tree, and build it."""
    path = tree / fault.file
    path.write_text(path.read_text().replace(fault.old, fault.new))
    if target := fault.target:
        steps = f"cmake --build build/cmake --target {target} && cmake --install build/cmake --prefix ."
        if complaint := output_in_copy(tree, f"({steps}) > build/mutation.log 2>&1 || cat build/mutation.log"):
            raise SystemExit(f"{fault.name}: cannot be built\n{complaint[-2000:]}")


def quick_tests(tests: list[str]) -> set[str]:
    """Those of the tests that are not marked long."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not long", "-p", "no:cacheprovider", *tests]
    return set(tests) & set(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines())


class Scores:
    """What is known of each fault, (word, commit) by name, kept on disk: so many runs of tests may be interrupted."""

    def __init__(self, resume: bool):
        self.commit, self.known = commit_label(), dict[str, list[str]]()
        if resume and KEPT.exists():
            self.known = json.loads(KEPT.read_text())

    def add(self, fault: Fault, word: str) -> None:
        """Keep a fault's score."""
        self.known[fault.name] = [word, self.commit]
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(self.known, indent=1))


def score_fault(fault: Fault, quick: set[str], broken: set[str], scores: Scores) -> str:
    """Which tests find a fault: `short` ones, `long` ones alone, or `none`. Those that are broken without it do not count."""
    if fault.name in scores.known:
        return scores.known[fault.name][0]
    tests = [test for test in fault.found_by if test not in broken]
    parts = {"short": [test for test in tests if test in quick], "long": [test for test in tests if test not in quick]}
    found = next((word for word, part in parts.items() if part and failing_tests(part, fault)), "none")
    print(f"{fault.name}: found by {found}", flush=True)
    scores.add(fault, found)
    return found


def main(args: Namespace, report: Report, faults: list[Fault]) -> int:
    """Run the tests of each fault; returns the number that none finds."""
    scores = Scores(args.resume)
    tests = sorted({test for fault in faults if fault.name not in scores.known for test in fault.found_by})
    quick, broken = (quick_tests(tests), set(failing_tests(tests))) if tests else (set(), set())
    if broken:
        report.note(f"Fail without a fault, and do not count: {', '.join(sorted(broken))}")
    with ThreadPoolExecutor(args.jobs) as pool:
        words = list(pool.map(partial(score_fault, quick=quick, broken=broken, scores=scores), faults))
    commits = sorted({scores.known[fault.name][1] for fault in faults} - {scores.commit})
    if commits:
        report.note(f"In several runs, also at {', '.join(commits)}.")
    for package in ["", *sorted({fault.package for fault in faults})]:
        found = [word for word, fault in zip(words, faults, strict=True) if package in ("", fault.package)]
        for word in ("short", "long", "none"):
            report.add(f"{package or 'all'}: found by {word}", "faults", single(found.count(word), len(found)))
    return words.count("none")


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="faults whose file or kind contains one of these")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at the same time (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the scores of the last run, which was interrupted")
    parser.add_argument("--check", action="store_true", help="only whether each fault still has its place")
    parser.add_argument("--search", nargs="+", metavar="FILE", help="print which tests of these files find the chosen faults")
    words = parser.parse_args()
    chosen = [fault for fault in read_faults() if any(text in fault.name for text in words.only)]
    if lost := [fault.name for fault in chosen if not fault.has_place()]:
        sys.exit("the old text does not stand exactly once in its file: " + "; ".join(lost))
    if words.search:
        for one in chosen:
            noticed = failing_tests(words.search, one)
            false = failing_tests(noticed) if noticed else []
            print(one.name, [test for test in noticed if test not in false], flush=True)
    elif not words.check:
        kept = Report("mutations", words)
        missed = main(words, kept, chosen)
        kept.finish()
        sys.exit(bool(missed))
