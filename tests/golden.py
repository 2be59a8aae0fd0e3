"""The sentences that verbs print, kept in tests/data/golden/VERB.txt: a section for each test that prints some.

`pytest --update-golden` writes the sections of the tests that it runs; their change is then read in the diff.
"""

import fcntl
import re
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "data" / "golden"
HEAD = re.compile(r"^=== (.+)\n", re.M)
Golden = Callable[[str, str], None]


def sections_of(path: Path) -> dict[str, str]:
    """Test → its text."""
    parts = HEAD.split(path.read_text())[1:] if path.exists() else []
    return dict(zip(parts[::2], parts[1::2], strict=True))


def update_section(path: Path, test: str, text: str) -> None:
    """Replace or add a section; several workers may write the same file."""
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sections = sections_of(path) | {test: text}
        path.write_text("".join(f"=== {name}\n{sections[name]}" for name in sorted(sections)))


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Golden:
    """Hold a text of this test to its section in VERB.txt; the test's folder is written as FOLDER, lines are not broken."""
    monkeypatch.setenv("COLUMNS", "400")

    def compare(verb: str, text: str) -> None:
        path, test = FOLDER / f"{verb}.txt", request.node.name
        plain = text.replace(str(tmp_path), "FOLDER").rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            update_section(path, test, plain)
        assert plain == sections_of(path).get(test)

    return compare
