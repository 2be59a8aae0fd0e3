"""The GitHub action: its shell steps, run with a stand-in for GitHub's event, files and command line."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.conftest import ROOT
from workloads.recordings import runtime

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
"""As GitHub runs a step with `shell: bash`."""
GH = """#!/bin/sh
printf '%s\\n' "$@" > "$GH_CALLED"
"""


@dataclass
class Job:
    """A job with one use of the action, in a folder of its own."""

    folder: Path
    inputs: dict[str, str]
    uploaded: str = "https://github.com/o/r/actions/runs/1/artifacts/2"
    codes: list[int] = field(default_factory=list)
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)

    def run(self) -> "Job":
        """Run each step until one fails."""
        for step in ACTION["runs"]["steps"]:
            if self.is_asked(step.get("if", "")) and not any(self.codes):
                self.take(step)
        return self

    def value(self, text: str) -> str:
        """A text with its expressions replaced."""
        known = {f"inputs.{name}": self.inputs.get(name, each.get("default", "")) for name, each in ACTION["inputs"].items()}
        known |= {f"steps.{step}.outputs.{name}": v for step, named in self.outputs.items() for name, v in named.items()}
        known |= {"github.event.pull_request.number": "17", "github.repository": "o/r", "github.token": "secret"}
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: known[found[1]], text)

    def is_asked(self, condition: str) -> bool:
        """`inputs.a == 'b'`, `inputs.a != 'b'`; no condition holds."""
        left, sign, right = condition.split() if condition else ("", "==", "''")
        holds = (self.value("${{ " + left + " }}") if left else "") == right.strip("'")
        return holds == (sign == "==")

    def take(self, step: dict) -> None:
        if "uses" in step:
            self.outputs[step["id"]] = {"artifact-url": self.uploaded}
            return
        output = self.folder / "output"
        output.write_text("")
        env = {name: self.value(text) for name, text in step["env"].items()}
        files = {"GITHUB_OUTPUT": output, "GITHUB_STEP_SUMMARY": self.folder / "summary.md", "GH_CALLED": self.folder / "gh"}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            [*BASH, step["run"]], cwd=self.folder, env={**os.environ, **env, **files, "PATH": path}, check=False, timeout=300
        )
        self.codes.append(done.returncode)
        self.outputs[step.get("id", "")] = dict(line.split("=", 1) for line in output.read_text().splitlines())


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, str]:
    """Four recordings of each side, as fast but on other kernels, and stand-ins for what GitHub installs."""
    for steps in range(4, 12):
        side, kernel = ("base", "6.1") if steps % 2 else ("candidate", "6.18")
        runtime(steps).write(tmp_path / side / f"run-{steps}", duration_ns=steps, machine={"kernel": kernel})
    (tmp_path / "bin").mkdir()
    for name, text in (("gh", GH), ("moescope", f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m moescope "$@"\n')):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return {"base": "base", "candidate": "candidate", "comment": "true"}


def test_the_action_writes_the_verdict_where_a_reviewer_reads_it(tmp_path: Path, inputs: dict[str, str]) -> None:
    address = "https://traces.example.com/pull/17/trace.pftrace.gz"
    job = Job(tmp_path, inputs | {"trace-url": address}).run()
    assert job.codes == [0, 0, 0, 0]
    results = tmp_path / "moescope-comparison"
    document = json.loads((results / "comparison.json").read_text())
    assert job.outputs["compare"] == {"code": "0", "verdict": document["sentence"]}
    assert document["runs"] == {"base": [f"run-{n}" for n in (11, 5, 7, 9)], "cand": [f"run-{n}" for n in (10, 4, 6, 8)]}
    assert {path.name for path in results.iterdir()} == {
        *("comparison.json", "comparison.md", "junit.xml", "regression.html", "trace.pftrace.gz")
    }
    shown = (tmp_path / "summary.md").read_text()
    assert shown == (results / "comparison.md").read_text() and "| TPOT, median |" in shown and job.uploaded in shown
    (link,) = re.findall(r"\((https://ui\.perfetto\.dev/[^)]+)\)", shown)
    assert parse_qs(urlsplit(link).fragment.partition("?")[2]) == {"url": [address]}
    called = (tmp_path / "gh").read_text().split()
    assert called[:3] == ["pr", "comment", "17"] and called[-1] == "moescope-comparison/comparison.md"


@pytest.mark.long
def test_the_action_fails_only_after_it_has_written_everything(tmp_path: Path, inputs: dict[str, str]) -> None:
    job = Job(tmp_path, inputs | {"fail-on": "slower:5% unlike", "comment": "false"}).run()
    assert job.codes == [0, 0, 1] and job.outputs["compare"]["code"] == "1"
    assert not (tmp_path / "gh").exists() and "ui.perfetto.dev/#!" not in (tmp_path / "summary.md").read_text()


def test_wrong_use_stops_the_action_at_once(tmp_path: Path, inputs: dict[str, str]) -> None:
    job = Job(tmp_path, inputs | {"candidate": "nowhere"}).run()
    assert job.codes == [1] and not (tmp_path / "summary.md").exists()


@pytest.mark.long
def test_two_command_lines_are_recorded_by_turns_with_their_quotes_kept(tmp_path: Path, inputs: dict[str, str]) -> None:
    stand_in = tmp_path / "bin" / "recording"
    stand_in.write_text('#!/bin/sh\n[ "$2" = -o ] || exec moescope "$@"\nprintf "%s|" "$@" > asked\n')
    stand_in.write_text(stand_in.read_text() + 'mkdir "$3"; cp -r base "$3/base"; cp -r candidate "$3/cand"\n')
    stand_in.chmod(0o755)
    commands = {"base-command": "./old 'a b' -t 2", "candidate-command": './new "c d"'}
    job = Job(tmp_path, inputs | commands | {"moescope": "recording", "comment": "false"}).run()
    assert job.codes == [0, 0, 0]
    folder = "moescope-comparison/runs"
    assert (tmp_path / "asked").read_text() == (
        f"compare|-o|{folder}|--budget|600|--fail-on|nothing|--|./old|a b|-t|2|::|./new|c d|"
    )
