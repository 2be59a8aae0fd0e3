"""The list of rewordings names what reads differently in a later commit, and nothing else."""

import csv
import io
import subprocess
from pathlib import Path

import pytest

from scripts.list_rewordings import main

BEFORE = '''"""Reads meters."""

LIMIT = 3
"""So many are told at most."""


class Meter:
    """A meter, which stays as it is
    over two lines."""

    def read(self, name):
        """The figure that it says."""
        print(f"{name}: nothing was said")
        print("the same in both")
        raise ValueError(f"{name!r} is none: " + "take another")

    def _hidden(self):
        """Not for users."""


def prepare(parser):
    parser.add_argument("--seed", help="of the draws")
    parser.add_argument("--runs", help="number of runs")
    return {"key": "value", "label": "what is left"}


def gone():
    """Removed later."""

''' + "".join(f"def figure_{number}():\n    return {number}\n\n" for number in range(30))
REWORDED = {
    "So many are told at most.": "Maximum number of rows shown.",
    "which stays as it is\n    over two lines": "which stays as it is over\n    two lines",
    "The figure that it says.": "The meter's value.",
    "nothing was said": "no value",
    "{name!r} is none: ": "there is no meter {name!r}: ",
    '"take another"': '"choose another"',
    "Not for users.": "Internal.",
    '"of the draws"': '"random seed"',
    "what is left": "the remainder",
    "def gone": "def added",
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits: a module, then the same renamed and reworded; a test beside it that changes, too."""
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "somebody@example.org")
    after = BEFORE
    for old, new in REWORDED.items():
        assert old in after
        after = after.replace(old, new)
    commit("tools/meter.py", BEFORE, "tests/test_meter.py", "def test_a() -> None:\n    print('one text')\n")
    (tmp_path / "tools" / "meter.py").unlink()
    commit("tools/gauge.py", after, "tests/test_meter.py", "def test_a() -> None:\n    print('another text')\n")
    return tmp_path


def commit(*files: str) -> None:
    if not Path(".git").exists():
        subprocess.run(["git", "init", "-q"], check=True)
    for path, content in zip(files[::2], files[1::2], strict=True):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(content)
    subprocess.run(["git", "add", "-A"], check=True)
    subprocess.run(["git", "commit", "-q", "-m", "texts"], check=True)


def test_each_reworded_text_is_a_row_with_its_name_and_kind(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["HEAD~1"])
    said = capsys.readouterr()
    rows = list(csv.reader(io.StringIO(said.out)))
    assert rows[0] == ["file", "name", "kind", "before", "after"]
    assert {row[0] for row in rows[1:]} == {"tools/gauge.py"}
    assert [row[1:] for row in rows[1:]] == [
        ["LIMIT", "docstring", "So many are told at most.", "Maximum number of rows shown."],
        ["Meter.read", "docstring", "The figure that it says.", "The meter's value."],
        ["Meter.read", "error", "{name} is none: take another", "there is no meter {name}: choose another"],
        ["Meter.read", "output", "{name}: nothing was said", "{name}: no value"],
        ["prepare", "other", "what is left", "the remainder"],
        ["prepare.--seed", "help", "of the draws", "random seed"],
    ]
    totals = [line.split() for line in said.err.splitlines()]
    assert ["tools", "docstring", "2"] in totals and ["all", "docstring", "2"] in totals
    assert [["all", kind, "1"] in totals for kind in ("error", "help", "other", "output")] == [True] * 4
    assert ["unmatched", "docstring", "2"] in totals


def test_nothing_is_listed_between_equal_commits(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["HEAD", "HEAD"])
    assert capsys.readouterr() == ("file,name,kind,before,after\n", "")
