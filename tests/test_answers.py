"""Answers of verbs as JSON: their schemas, and the label of what Qualcomm's emulator computed."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jsonschema.exceptions import ValidationError

from moescope.__main__ import main
from moescope.answers import EMULATOR, json_text, json_value
from moescope.schemas import TYPES, declarations, fields, json_schema, names_of
from moescope.verbs import FORMS
from tests.conftest import validator
from workloads.recordings import runtime

READERS = (
    *(
        "summary",
        "time",
        "time --step 0",
        "time requests",
        "time threads",
        "time stacks",
        "findings",
        "experts",
        "experts --curves",
        "npu",
    ),
    *(
        "npu backends",
        "roofline",
        "trends",
        "query",
        "query SQL",
        "predict steps",
        "write --only report",
        "compare BEFORE --graphs",
    ),
    "compare BEFORE",
)
"""What reads a recording; SQL and BEFORE stand for a statement and another recording."""
OF_RECORDINGS = {"history", "simulate", "predict quantization", "predict fidelity"}
"""What reads recordings in other ways, below."""
WITHOUT_RECORDING = {
    *("probes", "doctor", "import", "inspect", "predict", "predict kernels", "predict device", "predict ceilings"),
    *("generate", "bench", "tune", "bench perplexity", "bench prompts", "tune predictor"),
}
"""What answers without one; those that run on the NPU are labelled by the backend itself."""
WITHOUT_JSON = {
    "run",
    "attach",
    "plan",
    "query perfetto",
    "open",
    "top",
    "compare --",
    "chat",
    "serve",
    "convert",
    "convert demo",
    "help",
}
"""Verbs that do something instead of answering."""


def commands(folder: Path, before: Path) -> list[list[str]]:
    stands = {"SQL": ["select 'nan'::float number, 1 one"], "BEFORE": [str(before)]}
    return [[part for word in _words(line, folder) for part in stands.get(word, [word])] for line in READERS]


def _words(line: str, folder: Path) -> list[str]:
    words = line.split()
    form = next(form for form in sorted(FORMS, key=len, reverse=True) if f"{line} ".startswith(f"{form} "))
    at = len(form.split())
    return [*words[:at], str(folder), *words[at:]]


def recorded(folder: Path, **manifest: Any) -> tuple[Path, Path]:
    """Two recordings of our runtime."""
    after, before = (runtime(steps).write(folder / str(steps), duration_ns=steps, **manifest) for steps in (4, 5))
    return after, before


@pytest.mark.parametrize("emulator", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_answer_about_a_recording_says_if_the_emulator_took_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], emulator: bool
) -> None:
    after, before = recorded(tmp_path, qnn={"backend": 6, "api": "2.30", "emulator": emulator})
    label = EMULATOR if emulator else None
    for words in commands(after, before):
        assert main(words) in (0, 1), capsys.readouterr().err
        assert capsys.readouterr().out.count(EMULATOR) == emulator, words
        assert main([*words, "--json"]) in (0, 1)
        assert json.loads(capsys.readouterr().out)["emulator"] == label, words
    assert main(["predict", "device", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["emulator"] is None


def test_every_form_that_reads_recordings_is_asked_for_its_label() -> None:
    asked = {max((form for form in FORMS if f"{line} ".startswith(f"{form} ")), key=len) for line in READERS}
    assert asked | OF_RECORDINGS | WITHOUT_RECORDING == {form for form in FORMS if names_of(form)}


@pytest.mark.parametrize("emulator", [True, False])
def test_a_stored_history_says_if_the_emulator_took_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], emulator: bool
) -> None:
    runs = [tmp_path / f"device=d/build=b{number}/run" for number in range(2)]
    for run in runs:
        runtime(4).write(run, qnn={"backend": 6, "api": "2.30", "emulator": emulator})
    stored, pattern, label = str(tmp_path / "stored"), f"{tmp_path}/device=*/build=*/*", EMULATOR if emulator else None
    for words in (["history", stored, "--build", "b", "--add", *map(str, runs)], ["history", stored], ["history", pattern]):
        assert main([*words, "--json"]) in (0, 1)
        assert json.loads(capsys.readouterr().out)["emulator"] == label, words
        assert main(words) in (0, 1)
        assert capsys.readouterr().out.count(EMULATOR) == emulator, words


def test_other_readers_of_recordings_are_labelled_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = map(str, recorded(tmp_path, qnn={"backend": 6, "api": "2.30", "emulator": True}))
    truth = tmp_path / "truth.json"
    truth.write_text('{"phases": {"decode": 1.0}}')
    quantization, fidelity = ["quantization", run, other, "--perplexity", "8", "9"], ["fidelity", run, "--truth", str(truth)]
    for words in (["simulate", run], ["predict", *quantization], ["predict", *fidelity]):
        assert main([*words, "--json"]) in (0, 1), capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["emulator"] == EMULATOR, words


def test_the_label_does_not_outlive_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emulated = runtime(4).write(tmp_path / "npu", qnn={"backend": 6, "emulator": True})
    other = runtime(4).write(tmp_path / "cpu")
    for folder, label in ((emulated, EMULATOR), (other, None)):
        main(["summary", str(folder), "--json"])
        assert json.loads(capsys.readouterr().out)["emulator"] == label


def test_every_form_that_answers_has_a_schema_and_no_other() -> None:
    assert {form for form in FORMS if names_of(form)} == set(FORMS) - WITHOUT_JSON
    assert {name for form in FORMS for name in names_of(form)} == set(declarations())


def test_types_of_declared_fields_are_known_and_schemas_are_schemas() -> None:
    for name in declarations():
        validator(f"moescope/{name}/1").check_schema(json_schema(name))
        assert all(kind in TYPES or kind.startswith("as ") for _, kind, _ in fields(name))


@pytest.mark.parametrize(
    "wrong",
    [{"findings": [{"rule": 1}]}, {}, {"findings": [], "more": 1}, {"findings": [], "emulator": "?"}],
    ids=["type", "lacking", "unknown", "label"],
)
def test_an_answer_of_another_form_is_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"schema": "moescope/findings/1", "emulator": None, "findings": []}
    validator("moescope/findings/1").validate(right)
    with pytest.raises(ValidationError):
        validator("moescope/findings/1").validate({**{k: v for k, v in right.items() if k != "findings"}, **wrong})


def test_numbers_that_json_lacks_are_null_in_whatever_holds_them() -> None:
    table = pd.DataFrame({"a": [1.0, float("nan")], "b": [float("inf"), 2.0]})
    assert json_value({"table": table, "array": table["a"].to_numpy(), 3: (float("-inf"), Path("x"))}) == {
        "table": [{"a": 1.0, "b": None}, {"a": None, "b": 2.0}],
        "array": [1.0, None],
        "3": [None, "x"],
    }
    assert json_text(float("nan")) == "null"


def test_the_summary_as_markdown_has_the_screens_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run, _), name = recorded(tmp_path, command=["./engine", "a|b_<c>*"]), r"./engine a\|b\_&lt;c&gt;\*"
    assert main(["summary", str(run)]) == 0
    screen = capsys.readouterr().out
    assert main(["summary", str(run), "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("- **moescope**: ") and name in shown.splitlines()[0]
    items = [line.removeprefix("- ") for line in shown.splitlines() if line.startswith("- ") and "engine" not in line]
    plain = [re.sub(r"\*\*|\\", "", html.unescape(item)) for item in items]
    assert len(plain) > 6 and all("".join(line.split()) in "".join(screen.split()) for line in plain)
    tables = [block.splitlines() for block in shown.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2 and all(len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1 for table in tables)
