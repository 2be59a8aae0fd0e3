"""Options from the command line and from a file, limits on what is recorded, and the line that says how it goes."""

import argparse
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moescope.command_line import Program
from tests.conftest import ROOT, drawn, trace
from tests.golden import Golden
from tracer.commands import options
from tracer.commands import run as run_verb
from tracer.commands.options import seconds
from tracer.commands.status import Reading, status_line
from tracer.config import options_by_name
from tracer.errors import FAILED, RequirementError
from tracer.recording.format import Recording

STEPS = str(ROOT / "workloads" / "programs" / "steps.py")
ENV = {"PYTHONPATH": str(ROOT)}


class Verb:
    """The verb `run`, but for what it does with its options."""

    EXAMPLES, help, failure = "", "", 2
    words: Mapping[str, "Verb"] = {}
    parse = staticmethod(run_verb.parse)
    prepare_parser = staticmethod(run_verb.prepare_parser)

    def __init__(self) -> None:
        self.args = argparse.Namespace()

    def chosen(self, words: list[str]) -> tuple[str, "Verb", list[str]]:
        return "", self, words

    def load(self) -> "Verb":
        return self

    def prepare(self) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        self.args = args
        return 0


def dispatch(verb: Verb, *words: str) -> int:
    return Program("tracer", "tracer", "", {"": {"run": verb}}).main(["run", *words])


def parsed(*words: str) -> argparse.Namespace:
    verb = Verb()
    assert dispatch(verb, *words) == 0
    return verb.args


def known() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser()
    run_verb.prepare_parser(parser)
    return options_by_name(parser)


VALUES = {
    "levels": st.sampled_from(["token", "token,expert", ["token", "graph"]]),
    "buffer": st.sampled_from(["ring", "perf"]),
    "ring-mib": st.sampled_from([1, 2, 64]),
    "duration": st.sampled_from([3, 0.5, "250ms"]),
    "tokens": st.integers(0, 100),
    "min-tps": st.sampled_from([0, 2.5, 7]),
    "only-slower-than": st.sampled_from(["50ms", "1s"]),
    "no-views": st.booleans(),
    "output": st.sampled_from(["a/b"]),
}


@settings(max_examples=drawn(40))
@given(st.fixed_dictionaries({}, optional=VALUES), st.fixed_dictionaries({}, optional=VALUES))
def test_an_option_in_the_file_is_as_good_as_one_typed_and_what_is_typed_wins(tmp_path_factory, in_file, typed) -> None:
    path = tmp_path_factory.mktemp("config") / "options.toml"
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in in_file.items()))

    def words(values) -> list[str]:
        flat = {key: ",".join(value) if isinstance(value, list) else value for key, value in values.items()}
        flags = [f"--{key}" for key, value in flat.items() if value is True]
        return [w for key, value in flat.items() if not isinstance(value, bool) for w in (f"--{key}", str(value))] + flags

    typed = {key: value for key, value in typed.items() if value is not False}  # a flag cannot be typed off
    one = parsed(*words(typed), "--config", str(path), "--", "prog", "--config", "its own")
    same = parsed(*words({**in_file, **typed}), "--", "prog", "--config", "its own")
    assert {**vars(one), "config": None} == vars(same)
    assert (one.config == path and one.command == ["--", "prog", "--config", "its own"]) or one.command[-1] == "its own"


BAD = ("leves = 'token'", "buffer = 'pipe'", "ring-mib = 'big'", "no-views = 1", "duration = true", "levels = ")


def test_a_wrong_key_or_value_is_one_line_that_names_it(tmp_path: Path, capsys, golden: Golden) -> None:
    path = tmp_path / "options.toml"
    for text in (*BAD, "only-slower-than = 'fast'"):
        path.write_text(text)
        assert dispatch(Verb(), "--config", str(path)) == 2
    assert dispatch(Verb(), "--config", str(tmp_path / "no.toml")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == len(BAD) + 2 == said.count(str(tmp_path))
    golden("run", said)


def test_every_option_has_a_value_in_this_test_or_is_known_to_be_a_choice_of_names() -> None:
    assert set(VALUES) <= set(known())


@given(st.floats(1e-3, 1e6))
def test_times_are_read_in_their_units(value: float) -> None:
    assert seconds(f"{value!r}s") == seconds(repr(value)) == value
    assert seconds(f"{value!r}ms") == pytest.approx(value / 1e3)
    assert seconds(f"{value!r}us") == pytest.approx(value / 1e6)


@pytest.mark.parametrize("text", ["", "s", "0", "-1s", "inf", "nan", "1 h", "5m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        seconds(text)


def test_the_status_line_gives_rates_between_two_readings() -> None:
    before = Reading(10, 1000, 0, 0, ("token",))
    line = status_line(before, Reading(25, 4000, 7, 30_000_000, ("graph", "token")), 2.0)
    assert line == "7.5 decode steps/s | 1,500 records/s | 7 lost | probes 1.5% of a CPU | graph,token"
    assert "probes 0.0% of a CPU" in status_line(Reading(25, 4000, 7, 30_000_000, ()), Reading(30, 5000, 7, 20_000_000, ()), 2.0)


@pytest.mark.needs("probes")
def test_options_that_were_used_stand_in_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text('levels = ["token", "sched"]\nno-views = true\n')
    done = trace("run", "--config", str(tmp_path / "options.toml"), "--tokens", "1000", "-o", str(tmp_path / "run"), "--", "true")
    assert done.returncode == 0, done.stderr
    manifest = Recording(tmp_path / "run").manifest
    assert manifest["levels"] == ["sched", "token"]
    assert manifest["options"]["tokens"] == 1000 and manifest["options"]["levels"] == "token,sched"
    assert manifest["options"]["config"] == str(tmp_path / "options.toml") and manifest["options"]["buffer"] == "ring"


@pytest.mark.needs("probes")
@pytest.mark.parametrize("limit", [("--tokens", "50"), ("--duration", "700ms")])
def test_after_a_limit_the_command_goes_on_untraced_and_the_tracer_waits_for_it(tmp_path: Path, limit: tuple[str, str]) -> None:
    end, pipe = tmp_path / "end", subprocess.PIPE
    command = [
        sys.executable,
        "-m",
        "tracer",
        "run",
        "--no-views",
        "--levels",
        "token",
        *limit,
        "-o",
        str(tmp_path / "run"),
        "--",
    ]
    command += [sys.executable, STEPS, "100000", "0.01", "--until", str(end)]
    tracer = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENV}, stdout=pipe, stderr=pipe, text=True)
    try:
        assert tracer.stderr is not None
        while "keeps running, untraced" not in (line := tracer.stderr.readline()):
            assert line, "the tracer ended"
        assert tracer.poll() is None
        manifest = Recording(tmp_path / "run").manifest
        steps = manifest["records"]["token_end"]
    finally:
        end.touch()
    printed, _ = tracer.communicate(timeout=120)
    assert tracer.returncode == 0
    assert manifest["state"] == "complete" and manifest["target"]["exit_code"] is None
    assert manifest["duration_ns"] >= 5e8
    assert int(printed.removeprefix("done ")) > steps >= (50 if limit[0] == "--tokens" else 1)


@pytest.mark.needs("probes")
def test_the_exit_code_is_the_commands_even_after_a_limit(tmp_path: Path) -> None:
    command = ("sh", "-c", "sleep 1; exit 3")
    done = trace("run", "--no-views", "--levels", "token", "--duration", "0.2", "-o", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 3


@pytest.mark.needs("probes")
def test_limits_that_go_by_tokens_need_the_level_token(tmp_path: Path) -> None:
    for option in (("--tokens", "5"), ("--min-tps", "5"), ("--only-slower-than", "5ms")):
        done = trace("run", "--levels", "graph", *option, "-o", str(tmp_path / "run"), "--", "true")
        assert done.returncode == FAILED and "token to --levels" in done.stderr


@pytest.mark.needs("probes")
def test_a_terminal_gets_one_line_that_is_rewritten(tmp_path: Path) -> None:
    options = ["--no-views", "-o", str(tmp_path / "run"), "--", sys.executable, STEPS, "250", "0.01"]
    leader, follower = pty.openpty()
    tracer = subprocess.Popen(
        [sys.executable, "-m", "tracer", "run", *options],
        cwd=ROOT,
        env={**os.environ, **ENV, "TERM": "xterm", "COLUMNS": "120"},
        stderr=follower,
        stdout=subprocess.DEVNULL,
    )
    os.close(follower)
    said = b""
    try:
        while data := os.read(leader, 4096):
            said += data
    except OSError:  # the other side is closed
        pass
    assert tracer.wait(120) == 0
    os.close(leader)
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", said.decode())
    lines = [line for line in shown.replace("\r", "\n").split("\n") if "steps/s" in line]
    assert len(lines) >= 2 and any("operator,qnn" in line for line in lines)
    rates = [float(line.rsplit("decode steps/s", 1)[0].split()[-1]) for line in lines]
    assert 0 < np.median(rates) < 150  # the steps last 10 ms at least
    assert b"\x1b[2K" in said


@pytest.mark.long
@pytest.mark.needs("probes")
def test_an_idle_recording_takes_little_of_the_machine(tmp_path: Path) -> None:
    done = trace("run", "--no-views", "-o", str(tmp_path / "run"), "--", "sleep", "4")
    assert done.returncode == 0
    cost = Recording(tmp_path / "run").manifest["cost"]
    assert 0 < cost["tracer_core_share"] < 0.1
    assert cost["bytes_per_record"] >= 64 and cost["written_bytes"] > 0


def test_bcc_is_refused_where_only_the_recorders_file_has_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(options, "need_root", lambda: None)
    with pytest.raises(RequirementError, match="bcc"):
        options.choice_of(parsed("--loader", "bcc", "true"))
