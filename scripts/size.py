"""Lines of each package, blank ones too, against its budget in pyproject.toml.

python -m scripts.size        prints the table; exit code 1 if a package is over its budget
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".c", ".h", ".S", ".toml", ".js", ".css", ".html", ".j2", ".sh", ".md"}
"""Of files that somebody writes; recorded data and results are others."""
RESULTS = "docs/results/"


def package_of(path: str, packages: list[str]) -> str:
    """The package whose folder holds a file, the innermost one; empty if it is in none."""
    return max((name for name in packages if path.startswith(f"{name}/")), key=len, default="")


def lines_by_package(packages: list[str]) -> dict[str, int]:
    """Package → lines of the files that git tracks."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    counts = dict.fromkeys(packages, 0)
    for path in tracked:
        name = package_of(path, packages)
        if name and Path(path).suffix in SUFFIXES and "/data/" not in path and not path.startswith(RESULTS):
            counts[name] += (ROOT / path).read_bytes().count(b"\n")
    return counts


def main() -> int:
    """Print the table; returns 1 if a package is over its budget."""
    budget: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["moescope"]["size"]
    over = False
    for name, count in lines_by_package(list(budget)).items():
        over |= count > budget[name]
        print(f"{name:16} {count:7,} of {budget[name]:7,}{'  OVER' * (count > budget[name])}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
