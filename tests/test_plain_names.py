"""Names from a recording, a process, a file or the command line are shown by every verb and never obeyed."""

import io
import json
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.tables.store import input_fingerprint, write_tables
from moescope.__main__ import main
from moescope.plain import one_line, plain_lines, plain_text
from moescope.terminal import PlainConsole, grid, words
from workloads import tables_fixture as fixture

HOSTILE = "[red]x[/red]\x1b[2J\x9b1m:smile:\r\n\u202e[/]\\"
SHOWN = r"[red]x[/red]\x1b[2J\x9b1m:smile:\r\n\u202e[/]" + "\\"
NAMES = ("operators name", "operators type", "operators shape", "qnn_executes graph_name", "tensors name", "qnn_events name")
NAMES += ("threads name", "counters name", "qnn_calls name", "qnn_objects name", "sessions name", "calls function", "faults file")
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
VERBS = [
    "summary RUN",
    "summary RUN --json",
    "findings RUN --queries",
    "time RUN --by both",
    "time RUN --step 1",
    "time threads RUN",
    "trends RUN",
    "roofline RUN --by shape",
    "npu RUN",
    "experts RUN --curves",
    "query RUN",
    "predict steps RUN",
    "simulate RUN --cache 50%,100%",
    "write RUN --format json --fold --out -",
    "compare RUN RUN --graphs",
    "top RUN --once",
    "query RUN select|*|from|operators|limit|3",
    "query RUN select|1|as|HOSTILE",
    "query RUN no|such|HOSTILE",
    "compare RUN RUN",
    "compare RUN nowhere-HOSTILE",
    "summary nowhere-HOSTILE",
    "query perfetto HOSTILE",
    "inspect nowhere-HOSTILE",
    "import CSV",
    "import LOG --out nowhere-HOSTILE",
    "HOSTILE",
    "summary RUN HOSTILE",
    "tune RUN --runs HOSTILE",
]
texts = st.text(st.characters(), max_size=30)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording whose every name tries to paint, to clear the screen and to break the line."""
    folder = tmp_path_factory.mktemp("run")
    manifest, tables = fixture.make_tables()
    for name in NAMES:
        table, column = name.split()
        tables[table] = tables[table].assign(**{column: tables[table][column].astype(str) + HOSTILE})
    manifest["command"], manifest["machine"]["cpu_model"] = [HOSTILE], HOSTILE
    manifest["engines"][HOSTILE] = manifest["engines"]["moescope"] | {"id": 2}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_tables(tables, folder / "tables", input_fingerprint(folder))
    return folder


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / f"{HOSTILE.replace('/', '')}.csv"
    head = "Msg Timestamp,Message,Time,Unit of Measurement,Timing Source,Event Level,Event Identifier\n"
    path.write_text(head + f'1,ROOT,100,US,BACKEND,ROOT,"{HOSTILE}"\n', newline="")
    return path


@pytest.mark.parametrize("words", VERBS)
def test_no_verb_obeys_a_name(run_dir: Path, csv: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    given = {"RUN": str(run_dir), "CSV": str(csv)}
    typed = [given.get(word, word).replace("|", " ").replace("HOSTILE", f'"{HOSTILE}"') for word in words.split()]
    try:
        assert main(typed) in (0, 1, 2)
    except SystemExit as ended:
        assert ended.code == 2
    shown = capsys.readouterr()
    assert shown.out + shown.err and not OBEYED.search(shown.out + shown.err)


@pytest.mark.parametrize("words", ["summary RUN", "roofline RUN", "query RUN select|type|from|operators|limit|1"])
def test_a_hostile_name_is_shown_as_it_is(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch, words: str) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main([word.replace("RUN", str(run_dir)).replace("|", " ") for word in words.split()]) == 0
    assert SHOWN in capsys.readouterr().out


@pytest.mark.parametrize("form", ["dot", "graphml"])
def test_a_graph_on_a_terminal_holds_no_control_character(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch, form
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["write", str(run_dir), "--format", form, "--out", "-"]) == 0
    shown = capsys.readouterr().out
    assert "[red]x[/red]" in shown and not OBEYED.search(shown)


def test_an_error_names_a_hostile_file_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(tmp_path / HOSTILE.replace("/", "|"))]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_doctor_prints_its_remedies_with_their_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    from tracer.commands.doctor import Check, print_checks

    print_checks([Check("onnxruntime-qnn", "NPU", False, False, HOSTILE, "pip install 'moescope[npu]'")])
    shown = capsys.readouterr().out
    assert "onnxruntime-qnn: pip install 'moescope[npu]'\n" in shown and not OBEYED.search(shown)


@given(texts)
def test_plain_text_holds_no_control_character_and_changes_nothing_else(text: str) -> None:
    shown = plain_text(text)
    assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in shown)
    assert "\n" not in one_line(text) and plain_text(shown) == shown
    if text.isprintable():
        assert shown == text
    assert shown.encode().decode() == shown
    assert plain_lines("a\n\tb\x1b") == "a\n\tb\\x1b"


@given(st.lists(texts, min_size=1, max_size=3), texts, texts)
def test_a_console_shows_cells_titles_and_lines_as_they_are(cells: list[str], title: str, line: str) -> None:
    file = io.StringIO()
    screen: Any = PlainConsole(file=file, width=4000, color_system=None)
    table = grid(*cells, "wide", title=title)  # a title wraps at its table's width
    table.add_row(*cells, "w" * 400)
    screen.print(table)
    screen.print(line)
    screen.print(words((line, "bold"), line))
    shown = file.getvalue()
    assert not OBEYED.search(shown)
    assert all(plain_text(text).strip() in shown for text in (*cells, title, line))
    assert shown.count("\n") <= 5


@given(st.lists(st.integers(1, 10**7).map(lambda n: n / 100), min_size=2, max_size=7), st.integers(0, 60))
def test_a_number_never_wraps_within_itself(numbers: list[float], length: int) -> None:
    heads = [f"mean of figure {i}, ms" for i in range(len(numbers))]
    cells = [f"{number:,.2f}" for number in numbers]
    file = io.StringIO()
    PlainConsole(file=file, width=98, color_system=None).print(grid("name", *heads, rows=[("x" * length, *cells)]))
    assert [cell for cell in file.getvalue().split() if cell in cells] == cells
    assert max(map(len, file.getvalue().splitlines())) <= 98
