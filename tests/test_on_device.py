"""`--on`: another machine's recording is the one that the collector makes there, and nothing of ours stays there."""

import os
import subprocess
from pathlib import Path

import pytest

from analyzer.tables import store
from tests.conftest import trace
from tests.test_collector import CALLS, SITES, facts
from workloads.compiling import WITH_SITES, compiled
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes", "collector")
LEVELS = "token,graph,operator,expert"
SHELL = "exec:sh -c"


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own as far as its temporary folder goes: a script that runs a line with that folder for /var/tmp."""
    there = tmp_path / "device"
    there.mkdir()
    program = tmp_path / "shell"
    program.write_text(f'#!/bin/sh\nexec unshare -m sh -c \'mount --bind {there} /var/tmp && exec sh -c "$1"\' sh "$1"\n')
    program.chmod(0o755)
    return program


def left_on(device: Path) -> list[str]:
    return os.listdir(device.with_name("device"))


def run_on(*words: str) -> subprocess.CompletedProcess[str]:
    return trace("run", "--no-views", "--levels", LEVELS, "--libraries", str(SITES), *words)


def test_a_recording_from_elsewhere_has_the_tables_of_one_made_here(device: Path, tmp_path: Path) -> None:
    program = str(compiled(tmp_path / "usdt_calls", "usdt_calls.c", flags=WITH_SITES))
    command = ["sh", "-c", f"true; {program} {CALLS}; echo said; echo also >&2; exit 3"]
    done = run_on("--on", f"exec:{device}", "-o", str(tmp_path / "there"), "--", *command)
    assert done.returncode == 1 and done.stdout == "said\n" and "\nalso\n" in done.stderr and "status 3" in done.stderr
    here = trace("run", "--no-views", "--levels", LEVELS, "-o", str(tmp_path / "here"), "--", *command)
    assert here.returncode == 1
    there = RawRecording(tmp_path / "there")
    assert there.is_whole and there.manifest["lost"] == {} and left_on(device) == []
    assert facts(store.build(there)) == facts(store.build(RawRecording(tmp_path / "here")))
    assert sorted(os.listdir(tmp_path / "there")) == sorted(os.listdir(tmp_path / "here"))
