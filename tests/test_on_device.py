"""`--on`: another machine's recording is the one that the collector makes there, and nothing of ours stays there."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from analyzer.tables import store
from tests.conftest import ROOT, trace
from tests.test_collector import CALLS, PATIENCE_S, SITES, STEPS, facts, wait_until
from workloads.compiling import WITH_SITES, compiled
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes", "collector")
LEVELS = "token,graph,operator,expert"
SSHD = Path("/usr/sbin/sshd")


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


class Server:
    """A real sshd on the loopback, with keys of its own; `cut` ends its connections, and `close` all of it."""

    def __init__(self, folder: Path):
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        settings = f"ListenAddress 127.0.0.1:{self.port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        settings += "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
        (folder / "config").write_text(settings)
        Path("/run/sshd").mkdir(exist_ok=True)
        words = [str(SSHD), "-D", "-e", "-f", str(folder / "config")]
        self.process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        known = "-F none -o StrictHostKeyChecking=no -o LogLevel=ERROR -o UserKnownHostsFile=/dev/null"
        self.target = f"ssh:{known} -i {folder}/user -p {self.port} root@127.0.0.1"
        assert wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) == 0)

    def cut(self) -> int:
        """How many connections there were."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        return len(children)

    def close(self) -> None:
        self.process.kill()
        self.cut()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if not SSHD.exists():
        pytest.skip("openssh-server is not installed")
    server = Server(tmp_path)
    yield server
    server.close()


class Remote:
    """`run --on` over `steps.py`, which goes on until it is told to end."""

    def __init__(self, target: str, folder: Path):
        self.folder, self.end, self.said = folder / "run", folder / "end", folder / "said"
        words = ["run", "--no-views", "--levels", "token", "--libraries", str(SITES), "--on", target, "-o", str(self.folder)]
        self.command = [
            sys.executable,
            "-m",
            "tracer",
            *words,
            "--",
            sys.executable,
            STEPS,
            "100000",
            "0.01",
            "--until",
            str(self.end),
        ]
        self.begin()

    def begin(self) -> None:
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)

    def steps(self) -> int:
        told = re.findall(r"(\d+) steps", self.said.read_text())
        return int(told[-1]) if told else 0

    def outlives(self, steps: int) -> bool:
        """Whether it gets so many steps further."""
        before = self.steps()
        return wait_until(lambda: self.steps() > before + steps)


@pytest.fixture
def remote(server: Server, tmp_path: Path) -> Iterator[Remote]:
    remote = Remote(server.target, tmp_path)
    yield remote
    remote.end.touch()
    remote.process.kill()
    remote.process.wait()


def test_a_link_that_is_cut_in_the_middle_costs_no_record(server: Server, remote: Remote) -> None:
    assert wait_until(lambda: remote.steps() > 50), remote.said.read_text()
    for _ in range(2):
        assert server.cut() > 0 and remote.outlives(100), remote.said.read_text()
    remote.end.touch()
    assert remote.process.wait(PATIENCE_S) == 0, remote.said.read_text()
    run = RawRecording(remote.folder)
    sequence = run.records("token_end")["seq"].tolist()
    assert run.is_whole and run.manifest["state"] == "complete" and sequence == list(range(len(sequence)))
    assert f"done {len(sequence)}" in remote.said.read_text()
    assert not (remote.folder / "remote.json").exists()


def test_the_same_command_fetches_what_a_host_that_died_left_behind(server: Server, remote: Remote) -> None:
    assert wait_until(lambda: remote.steps() > 50), remote.said.read_text()
    place = json.loads((remote.folder / "remote.json").read_text())["folder"]
    remote.process.kill()
    remote.process.wait()
    assert Path(place).is_dir() and not (remote.folder / "manifest.json").exists()
    remote.begin()
    remote.end.touch()
    assert remote.process.wait(PATIENCE_S) == 0, remote.said.read_text()
    assert RawRecording(remote.folder).manifest["state"] == "complete" and not Path(place).exists()


def test_ctrl_c_ends_the_recording_there_and_fetches_it(remote: Remote) -> None:
    assert wait_until(lambda: remote.steps() > 50), remote.said.read_text()
    place = json.loads((remote.folder / "remote.json").read_text())["folder"]
    os.killpg(remote.process.pid, signal.SIGINT)
    remote.process.wait(PATIENCE_S)
    run = RawRecording(remote.folder)
    assert run.manifest["state"] == "complete" and run.manifest["records"]["token_end"] > 50 and not Path(place).exists()
