"""The page for agents, followed on programs that lose time to a planted cause."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from analyzer.questions.causes import CAUSES
from moescope.__main__ import main
from moescope.answers import EMULATOR
from moescope.commands.help import FOLDER, agent_page
from moescope.schemas import answer_tree, declarations, path_segments
from moescope.verbs import FORMS, VERBS
from tests.conftest import ROOT, DemoRun
from tests.test_time_planted import Plant, program, record, record_slow_accelerator, two_cpus  # noqa: F401 (program is a fixture)

SKILL = ROOT / "moescope" / FOLDER / "SKILL.md"
RULES = {
    rule: row
    for row in re.findall(r"^\| (`.*)\|$", agent_page(), re.M)
    if len(row.split(" | ")) == 4
    for rule in re.findall(r"`([^`]+)`", row.split(" | ")[0])
}
"""A finding's rule → its row of the page: rule, meaning, what to look at next, remedy."""
QUESTIONS = [row for row in re.findall(r"^\| ([^`\n]*\| `.*)\|$", agent_page(), re.M)]
"""Question, commands, where the answer is."""
PLANTS = [
    Plant("beside:2000@0", "run queue", ("neighbour", "other"), neighbours=2),
    Plant("lock:2000@0", "lock or other thread", ("thread",)),
    pytest.param(Plant("cold:1500@0", "disk and faults"), marks=pytest.mark.needs("dropping pages")),
    pytest.param(Plant("sleep:1500@0", "asleep"), marks=pytest.mark.long),
    pytest.param(Plant("stop:1500@0", "stopped"), marks=pytest.mark.long),
]


def answer(line: str, run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON of a command of the page."""
    words = [str(run) if word == "RUN" else word for word in shlex.split(line)]
    words = words[words[:1] == ["moescope"] :]
    if str(run) not in words:
        form = max((form for form in FORMS if f"{' '.join(words)} ".startswith(f"{form} ")), key=len)
        words.insert(len(form.split()), str(run))
    assert main([*words, *(["--json"] if "--json" not in words else [])]) in (0, 1), line
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def named_commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, the fields that stand behind it) of a cell such as "`time threads`: `displaced_by[]` names who had it"."""
    found: list[tuple[str, list[str]]] = []
    for code in re.findall(r"`([^`]+)`", text):
        words = code.removeprefix("moescope ").split()
        if words[0] in VERBS and "." not in words[0]:
            found.append((code, []))
        elif found and re.fullmatch(r"\w[\w.\[\]]*", code):
            found[-1][1].append(code)
    return found


def has_field(name: str, path: str) -> bool:
    """Whether an answer's declaration has a field at a path."""
    at: Any = answer_tree(name)
    for segment in path_segments(path):
        free = next((key for key in at if key.startswith("{")), "") if isinstance(at, dict) else ""
        at = next((at[key] for key in (segment, f"{segment}?", free) if isinstance(at, dict) and key in at), None)
    return at is not None


def follow(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The first finding for decode, found as sections 2 and 3 of the page say; what its row names is looked at, too."""
    summary = answer("moescope summary RUN --json", run, capsys)
    assert not summary["records"]["lost"] and summary["recording"]["levels"]
    found = answer("moescope findings RUN --json", run, capsys)["findings"]
    first: dict[str, Any] = max(found, key=lambda one: one["evidence"].get("phases", {}).get("decode", 0))
    for command, fields in named_commands(RULES[first["rule"]].split(" | ")[2]):
        if command.split()[0] in ("open", "write"):
            continue
        shown = answer(command.replace("$QUERY", first["query"]), run, capsys)
        assert all(re.split(r"[.\[]", field)[0] in shown for field in fields)
    assert answer(f"moescope query RUN {shlex.quote(first['query'])} --json", run, capsys)["rows"]
    return first


@pytest.mark.alone
@pytest.mark.needs("probes")
@pytest.mark.flaky(reruns=2, only_rerun="AssertionError")  # shares of time, on machines that other programs use too
@two_cpus
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.text)
def test_the_page_leads_to_a_planted_cause(
    plant: Plant,
    program: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, _ = record(plant, program, tmp_path)
    found = follow(run, capsys)
    assert found["rule"] == found["evidence"]["cause"] == plant.cause
    assert any(name.startswith(plant.below) for name in found["evidence"]["below_ms"])


@pytest.mark.alone
@pytest.mark.needs("probes")
@pytest.mark.flaky(reruns=2, only_rerun="AssertionError")  # as above
def test_the_page_leads_to_a_slow_accelerator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = record_slow_accelerator(tmp_path)
    assert follow(run, capsys)["rule"] == "accelerator"
    assert answer("moescope time RUN", run, capsys)["accelerator"]["works_ms"] > 0


@pytest.mark.needs("probes", "htp")
def test_the_page_leads_to_the_small_cache_of_the_demo_and_warns_of_the_emulator(
    demo: DemoRun, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(demo.folder, capsys)
    found = answer("moescope findings RUN --json", demo.folder, capsys)["findings"]
    assert "expert load" in [one["rule"] for one in found]
    experts = answer("moescope experts RUN --curves", demo.folder, capsys)
    assert experts["emulator"] == EMULATOR and experts["summary"]["misses"] > 0 and experts["curves"]
    assert EMULATOR.partition(":")[0].partition(" ")[2] in agent_page()


def test_every_cause_and_question_of_the_page_names_verbs_and_fields_that_exist() -> None:
    assert {cause for cause in CAUSES if cause not in RULES} == set()
    cells = [*(row.split(" | ")[2] for row in RULES.values()), *(" ".join(row.split(" | ")[1:]) for row in QUESTIONS)]
    assert len(cells) > 25
    for cell in cells:
        for command, fields in named_commands(cell):
            words = command.removeprefix("moescope ")
            form = max((form for form in FORMS if f"{words} ".startswith(f"{form} ")), key=len)
            names = [name for name in declarations() if name.replace(".", " ").startswith(form)]
            assert all(any(has_field(name, field) for name in names) for field in fields), (command, fields)


def test_the_skill_has_the_front_matter_of_its_format_and_fits_a_screen_or_two() -> None:
    head = yaml.safe_load(SKILL.read_text().split("---\n")[1])
    assert head["name"] == SKILL.parent.name and re.fullmatch(r"[a-z0-9-]{1,64}", head["name"])
    assert 0 < len(head["description"]) <= 1024 and len(head["compatibility"]) <= 500
    assert len(SKILL.read_text().splitlines()) <= 100


def test_help_prints_the_page_a_verb_and_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "agent"]) == 0
    shown = capsys.readouterr().out
    assert agent_page() in shown and SKILL.read_text().endswith(agent_page())
    assert Path(shown.splitlines()[-1].partition(": ")[2]).samefile(SKILL.parent)
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {verb} " in shown for verb in VERBS)
