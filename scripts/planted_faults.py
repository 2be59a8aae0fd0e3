"""Whether the tests find small faults planted into the code.

python -m scripts.planted_faults [--faults FILE] [--tree FOLDER] [NAME...]      exit code 1: a fault was not found

Each fault replaces a text that occurs once in a file and names the tests that should fail. It is planted into a copy of the tree.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLOWEST_S = 600
"""A test that hangs by a fault has found it."""


@dataclass(frozen=True)
class Fault:
    """`old`, which occurs once in `file`, becomes `new`; `tests` are files of tests, or words for pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_faults(path: Path) -> list[Fault]:
    """The faults of a TOML file: tables `fault`; a table `tests` has names for lists of tests."""
    data = tomllib.loads(path.read_text())
    rows = [{**row, "tests": tuple(data["tests"][row["tests"]])} for row in data["fault"]]
    return [Fault(**row) for row in rows]


def any_test_fails(tree: Path, tests: tuple[str, ...]) -> bool:
    """Whether one of the tests fails in this tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=SLOWEST_S)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode > 2:  # neither passed, failed nor could not be imported
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.returncode > 0


def tests_find(tree: Path, fault: Fault) -> bool:
    """Whether the fault's tests find it in this tree, which is left as it was."""
    file = tree / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: the text occurs {text.count(fault.old)} times in {fault.file}, not once")
    try:
        file.write_text(text.replace(fault.old, fault.new))
        return any_test_fails(tree, fault.tests)
    finally:
        file.write_text(text)


def main() -> int:
    """Plant each fault and print whether it was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--faults", type=Path, default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--tree", type=Path, default=ROOT)
    args = parser.parse_args()
    chosen = [fault for fault in read_faults(args.faults) if fault.name in args.names or not args.names]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(args.tree, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", "build", "__pycache__", ".*_cache"))
        for tests in {fault.tests for fault in chosen}:
            if any_test_fails(tree, tests):
                raise SystemExit(f"{' '.join(tests)}: fails without a fault")
        found = 0
        for fault in chosen:
            found += (one := tests_find(tree, fault))
            print(f"{'found ' if one else 'MISSED'}  {fault.name}", flush=True)
    print(f"{found} of {len(chosen)} faults found")
    return int(found < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
