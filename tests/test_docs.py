"""The documents fit a screen, their links lead somewhere, and the programs take every command that stands in them."""

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from analyzer.records.schema import COMPARED, IMPORTED, MADE, TABLES
from moescope.command_line import parser_of
from moescope.verbs import VERBS
from scripts.render_reference import FOLDER, SUBJECTS, all_pages
from workloads import ROOT

FIGURES = sorted([ROOT / "docs" / "results.md", *ROOT.glob("docs/results/*.md")])
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - set(FIGURES))
WIDTH, LENGTH = 120, 150
CASES = sorted(ROOT.glob("docs/case-*.md"))
WRITTEN = [ROOT / "README.md", *sorted({*ROOT.glob("docs/*.md")} - {*FIGURES, *CASES})]
"""Pages by hand, apart from CONTRIBUTING, SECURITY and the changelog."""
MADE_TABLE = re.compile(r"<!-- made by .*?<!-- end -->\n", re.S)
ALL_LINES = 1500
COMMAND = re.compile(r"(?:sudo )?(?:python -m (tracer .*)|(?:\.venv/bin/)?(moescope [a-z-]+ .+))")
SUBSTITUTED = re.compile(r"\$\([^)]*\)")
"""What the shell replaces by a command's output: here a process id."""
MODULE = re.compile(r"(?:python -m |`)((?:workloads|benchmarks|tests|scripts)\.[\w.]*\w)")
TARGET = re.compile(r"^ {4}make ((?:[a-z-]+ ?)+)", re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of lines that can be wrapped: neither rows of tables nor code."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        if not (fenced or line.startswith(("|", "    "))):
            yield number, line


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, from code blocks and from code within sentences of guides, without comments."""
    text = page.read_text()
    inline = [] if page.parent == FOLDER else re.findall(r"`([^`]+)`", text)
    for code in [*re.findall(r"^(?:    |\$ )(.+)$", text, re.M), *inline]:
        for part in re.split(r" (?:&&|\||>|<) ", code.split(" #")[0]):
            if found := COMMAND.fullmatch(part.strip()):
                yield found[1] or found[2]


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_short_and_its_lines_fit(page: Path) -> None:
    assert [(n, len(line)) for n, line in prose(page) if len(line) > WIDTH] == []
    assert len(page.read_text().splitlines()) <= LENGTH or page.name == "CHANGELOG.md"


def test_what_is_written_by_hand_can_be_read_in_an_afternoon() -> None:
    assert sum(MADE_TABLE.sub("", page.read_text()).count("\n") for page in WRITTEN) <= ALL_LINES


@pytest.mark.parametrize("page", CASES, ids=lambda path: path.stem)
def test_a_case_is_one_page(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 60


@pytest.mark.parametrize("page", FIGURES, ids=lambda path: path.stem)
def test_no_page_of_figures_is_endless(page: Path) -> None:
    assert [(n, len(line)) for n, line in prose(page) if len(line) > WIDTH and not line.startswith("- ")] == []
    assert len(page.read_text().splitlines()) <= (50 if page.name == "results.md" else 200)


@pytest.mark.parametrize("page", PAGES + FIGURES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), link
        if anchor:
            assert anchor in {slug(text) for text in re.findall(r"^#+ (.+)$", there.read_text(), re.M)}, link


def test_the_programs_take_every_command_of_the_documents() -> None:
    seen = 0
    for page in PAGES:
        for command in commands(page):
            _, name, *words = shlex.split(SUBSTITUTED.sub("1", command))
            if "--config" in words:
                continue
            assert name in VERBS, f"{page.name}: {command}"
            _, verb, words = VERBS[name].chosen(words)
            parser = parser_of(verb.load(), name, "")
            try:
                parser.parse_args(words)
            except SystemExit:
                pytest.fail(f"{page.name}: {command}")
            seen += 1
    assert seen > 215


def test_modules_and_targets_of_the_documents_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    modules, targets = set(MODULE.findall(text)), {word for line in TARGET.findall(text) for word in line.split()}
    assert len(modules) > 10 and len(targets) > 3
    assert [name for name in modules if find_spec(name) is None] == []
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.M)] == []


def test_the_reference_is_what_the_code_gives() -> None:
    content = dict(all_pages())
    assert {path.name for path in FOLDER.iterdir()} == set(content)
    stale = [name for name, text in content.items() if (FOLDER / name).read_text() != text]
    assert stale == [], "run `make reference`"


def test_every_table_has_a_place_in_the_reference() -> None:
    named = [name for _, names in SUBJECTS.values() for name in names.split()]
    assert sorted(named) == sorted({*TABLES, *IMPORTED, *COMPARED, *MADE}), "samples and waits are declared as recorded, too"


def test_every_page_is_in_the_index() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall((ROOT / "docs" / "README.md").read_text())}
    assert {path.name for path in ROOT.glob("docs/*.md")} - linked == {"README.md"}
