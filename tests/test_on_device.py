"""`--on`: another machine's recording is the one that the recorder makes there, and nothing of ours stays there."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from analyzer.tables import store
from tests.adb_stand_in import Phone
from tests.conftest import LONG, ROOT, forget_loops, recorded_so_far, rest_long, trace, wait_until
from tests.test_recorder import CALLS, PATIENCE_S, SITES, STEPS, facts, llama, processes
from tests.test_tracer_series import state_of
from tracer.commands.options import RING_MIB, RING_MIB_ON_DEVICES
from tracer.errors import FAILED
from tracer.kernel.features import VMLINUX
from tracer.remote.device import PATIENCE_S as KEEPER_S
from tracer.remote.device import VISIT
from tracer.remote.transport import transport_to
from workloads.compiling import WITH_SITES, compile_c
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes", "recorder")
LEVELS = "token,graph,operator,expert"
MOMENTS, PARTS, LATEST_S = (10, 10, 6.0) if LONG else (2, 1, 6.0)
"""Moments of a part, parts, and the last moment after the begin; `make test-long` tries 100."""
SSHD = Path("/usr/sbin/sshd")


@pytest.fixture
def android(device: Path, tmp_path: Path) -> Path:
    """The same with Android's shell and tools alone: mksh and toybox."""
    toybox, mksh, tools = shutil.which("toybox"), shutil.which("mksh"), tmp_path / "tools"
    if not toybox or not mksh:
        pytest.skip("toybox and mksh are not installed")
    tools.mkdir()
    (tools / "sh").symlink_to(mksh)
    for name in set(subprocess.run([toybox], capture_output=True, text=True, check=True).stdout.split()) - {"sh"}:
        (tools / name).symlink_to(toybox)
    device.write_text(device.read_text().replace("exec sh -c", f"exec env -i PATH={tools} {tools}/sh -c"))
    return device


@pytest.fixture
def unlearnt() -> None:
    """Forget the graph loops that earlier recordings taught."""
    forget_loops()


def left_on(device: Path) -> list[str]:
    return os.listdir(device.with_name("device"))


@pytest.mark.parametrize("machine", ["device", "android"])
def test_where_nobody_reads_the_name_of_our_folder_it_is_removed(machine: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue(machine)
    read_by_nobody, output = os.pipe()
    os.close(read_by_nobody)
    subprocess.run(
        transport_to(f"exec:{device}").command(VISIT), stdin=subprocess.DEVNULL, stdout=output, check=False, timeout=30
    )
    os.close(output)
    assert left_on(device) == []


def run_on(*words: str) -> subprocess.CompletedProcess[str]:
    return trace("run", "--no-views", "--levels", LEVELS, "--libraries", str(SITES), *words)


def test_a_recording_from_elsewhere_has_the_tables_of_one_made_here(device: Path, tmp_path: Path) -> None:
    program = str(compile_c(tmp_path / "usdt_calls", "usdt_calls.c", flags=WITH_SITES))
    command = ["sh", "-c", f"true; {program} {CALLS}; echo said; echo also >&2; exit 3"]
    done = run_on("--on", f"exec:{device}", "-o", str(tmp_path / "there"), "--", *command)
    assert done.returncode == 3 and done.stdout == "said\n" and "\nalso\n" in done.stderr and "status 3" in done.stderr
    here = trace("run", "--no-views", "--levels", LEVELS, "-o", str(tmp_path / "here"), "--", *command)
    assert here.returncode == 3
    there = RawRecording(tmp_path / "there")
    assert there.is_whole and there.manifest["lost"] == {} and left_on(device) == []
    assert there.manifest["options"]["ring-mib"] == RING_MIB_ON_DEVICES
    assert facts(store.build_tables(there)) == facts(store.build_tables(RawRecording(tmp_path / "here")))
    assert sorted(os.listdir(tmp_path / "there")) == sorted(os.listdir(tmp_path / "here"))


def test_a_file_holds_the_types_of_a_device_whose_kernel_holds_none(device: Path, tmp_path: Path) -> None:
    types = tmp_path / "types.btf"
    types.write_bytes(VMLINUX.read_bytes())
    hidden = "mount -t tmpfs none /sys/kernel/btf && mount --bind"
    device.write_text(device.read_text().replace("mount --bind", hidden))
    words = ("--on", f"exec:{device}", "-o", str(tmp_path / "run"))
    command = ("--", str(compile_c(tmp_path / "usdt_calls", "usdt_calls.c", flags=WITH_SITES)), str(CALLS))
    refused = run_on(*words, *command)
    assert refused.returncode == FAILED and "--btf FILE" in refused.stderr and not (tmp_path / "run").exists()
    done = run_on(*words, "--btf", str(types), *command)
    assert done.returncode == 0, done.stderr
    assert len(RawRecording(tmp_path / "run").records("op_end")) == CALLS and left_on(device) == []


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
        """How many steps were recorded so far, on the device: this machine."""
        with contextlib.suppress(OSError, ValueError):
            place = json.loads((self.folder / "remote.json").read_text())["folder"]
            return recorded_so_far(Path(place) / "recording", "token_end")
        return 0

    def outlives(self, steps: int) -> bool:
        """Whether it gets so many steps further."""
        before = self.steps()
        return wait_until(lambda: self.steps() > before + steps)


@pytest.fixture(params=rest_long(["exec", "ssh"], "exec"))
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    remote = Remote(request.getfixturevalue("server").target if request.param == "ssh" else "exec:sh -c", tmp_path)
    yield remote
    remote.end.touch()
    remote.process.kill()
    remote.process.wait()


@pytest.mark.long
@pytest.mark.parametrize("remote", ["ssh"], indirect=True)
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


def test_transfers_go_on_where_they_were_cut(tmp_path: Path) -> None:
    program, mark, lines, cut_at = tmp_path / "shell", tmp_path / "was-cut", tmp_path / "lines", 100_000
    cut = f'touch {mark}; head -c {cut_at} | sh -c "$1" 2> /dev/null | head -c {cut_at}; exit 255'
    case = f'case "$1" in *"cat >"* | *"tail -c"*) echo "$1" >> {lines}; [ -e {mark} ] || {{ {cut}; }} ;; esac'
    program.write_text(f'#!/bin/sh\n{case}\nexec sh -c "$1"\n')
    program.chmod(0o755)
    content, way = random.Random(0).randbytes(3 * cut_at), transport_to(f"exec:{program}")
    (tmp_path / "file").write_bytes(content)
    way.push(tmp_path / "file", str(tmp_path / "there"))
    mark.unlink()
    way.pull(str(tmp_path / "there"), tmp_path / "here")
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes() == content
    assert re.findall(r"cat >+|tail -c \+\d+", lines.read_text()) == ["cat >", "cat >>", "tail -c +1", f"tail -c +{cut_at + 1}"]


def test_the_same_command_fetches_what_a_host_that_died_left_behind(remote: Remote) -> None:
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


def recorder_of(place: str) -> int:
    """The recorder that records into a folder on the device; 0 while there is none."""
    found = [
        pid for pid in map(int, processes(Path(place) / "recording")) if "moescope-recorder" in os.readlink(f"/proc/{pid}/exe")
    ]
    return min(found, default=0)


def is_fetched(remote: Remote) -> bool:
    """Whether the same command gets what a host that was killed left on the device; False where nothing had begun."""
    had_begun = (remote.folder / "remote.json").exists()
    remote.end.touch()
    remote.begin()
    assert remote.process.wait(PATIENCE_S) == 0, remote.said.read_text()
    assert RawRecording(remote.folder).manifest["state"] == "complete" and not (remote.folder / "remote.json").exists()
    return had_begun


def is_told(remote: Remote, place: str) -> bool:
    """Whether a host whose recorder is killed says so in one line, has what was recorded, and the target runs to its end."""
    if not (pid := recorder_of(place)):
        return False
    os.kill(pid, signal.SIGKILL)
    assert remote.process.wait(PATIENCE_S) == FAILED, remote.said.read_text()
    said = remote.said.read_text()
    assert said.count("the recorder was killed (status ") == 1 and "Traceback" not in said, said
    if not (remote.folder / "manifest.json").exists():  # killed before it recorded: the program was not let go, and is gone
        return True
    run = RawRecording(remote.folder)
    target = run.manifest["target"]["pid"]
    assert run.is_whole and wait_until(lambda: state_of(target) not in "Tt")
    remote.end.touch()
    assert wait_until(lambda: state_of(target) in ("", "Z")), state_of(target)
    return True


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_any_moment_host_and_recorder_leave_nothing_on_the_device_and_the_target_lives(
    device: Path, tmp_path: Path, part: int
) -> None:
    draw, fetched, told = random.Random(part), 0, 0
    for number in range(MOMENTS):
        (tmp_path / str(number)).mkdir()
        remote = Remote(f"exec:{device}", tmp_path / str(number))
        try:
            time.sleep(draw.uniform(0, LATEST_S))
            if number % 2:
                os.killpg(remote.process.pid, signal.SIGKILL)
                remote.process.wait()
                fetched += is_fetched(remote)
            else:
                assert wait_until(lambda remote=remote: (remote.folder / "remote.json").exists()), remote.said.read_text()
                place = json.loads((remote.folder / "remote.json").read_text())["folder"]
                wait_until(lambda place=place: recorder_of(place))
                told += is_told(remote, place)
        finally:
            remote.end.touch()
            remote.process.kill()
            remote.process.wait()
    assert wait_until(lambda: left_on(device) == [], PATIENCE_S + KEEPER_S), left_on(device)
    print(f"{MOMENTS} moments: {fetched} recordings fetched after the host's end, {told} after the recorder's")
    assert told == MOMENTS - MOMENTS // 2


def test_the_second_recording_of_a_build_knows_its_graph_loop(tmp_path: Path, unlearnt: None) -> None:
    command, library = llama(tmp_path, pause_s=0.3)
    runs = []
    for name in ("first", "second"):
        words = ("--on", "exec:sh -c", "--libraries", str(library), "-o", str(tmp_path / name), "--", *command)
        done = trace("run", "--no-views", "--levels", LEVELS, *words)
        assert done.returncode == 0, done.stderr
        runs.append(RawRecording(tmp_path / name))
    assert [run.manifest["records"].get("site", 0) > 0 for run in runs] == [True, False]
    learnt = [{row["program"]: row["hits"] for row in run.manifest["probes"]}.get("ggml_op_done", 0) for run in runs]
    assert 0 < learnt[0] < learnt[1]  # the first has learnt it, and had it probed, before its end
    assert {row["program"] for row in runs[0].manifest["probes"] if row["retired_ns"]} >= {"ggml_op_begin", "ggml_op_wait"}
    assert facts(store.build_tables(runs[0])) == facts(store.build_tables(runs[1]))


def test_a_library_that_the_plan_lacks_is_planned_when_the_program_opens_it(device: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "runtime", tmp_path / "far" / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    command = ["env", f"PYTHONPATH={tmp_path / 'far'}", sys.executable, "-S", STEPS, "50", "0.002"]
    words = ("--levels", LEVELS, "--on", f"exec:{device}", "-o", str(tmp_path / "run"), "--", *command)
    done = trace("run", "--no-views", *words)
    assert done.returncode == 0, done.stderr
    manifest = RawRecording(tmp_path / "run").manifest
    library = str(tmp_path / "far" / "runtime" / "telemetry" / "_probes.so")
    assert {row["library"] for row in manifest["probes"] if row["engine"] == "moescope"} == {library}
    assert manifest["records"]["token_end"] == 50 and manifest["warnings"] == [] and left_on(device) == []
    assert library in [row["path"] for row in manifest["engines"]["moescope"]["libraries"]]


def test_recording_there_stops_after_so_many_tokens_and_the_command_goes_on(device: Path, tmp_path: Path) -> None:
    command = [sys.executable, STEPS, "300", "0.005"]
    options = ("--tokens", "20", "--ring-mib", str(RING_MIB))
    done = run_on("--on", f"exec:{device}", *options, "-o", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 0 and "done 300" in done.stdout, done.stderr
    run = RawRecording(tmp_path / "run")
    assert 20 <= len(run.records("token_end")) < 200 and run.manifest["options"]["ring-mib"] == RING_MIB


def test_with_sudo_there_the_command_runs_as_who_logged_in(device: Path, tmp_path: Path) -> None:
    device.write_text(
        device.read_text().replace("exec unshare", "exec env SUDO_UID=65534 SUDO_GID=65534 SUDO_USER=nobody unshare")
    )
    done = run_on("--on", f"exec:{device}", "-o", str(tmp_path / "run"), "--", "sh", "-c", 'id -u; id -G; echo "$HOME"')
    assert done.stdout == "65534\n65534\n/nonexistent\n", done.stderr
    assert RawRecording(tmp_path / "run").manifest["target"]["uid"] == 65534


def test_several_devices_record_at_the_same_time_and_one_that_fails_stops_no_other(device: Path, tmp_path: Path) -> None:
    listed = tmp_path / "devices.txt"
    listed.write_text(f"# ours\nexec:{device}\n\nexec:{tmp_path}/nothing\n")
    program = str(compile_c(tmp_path / "usdt_calls", "usdt_calls.c", flags=WITH_SITES))
    words = (
        "--on",
        f"@{listed}",
        "--on",
        "exec:sh -c",
        "-o",
        str(tmp_path / "all"),
        "--",
        "sh",
        "-c",
        f"true; {program} {CALLS}; echo said",
    )
    done = run_on(*words)
    assert done.returncode == FAILED and f"exec:{tmp_path}/nothing " in done.stderr
    assert sorted(done.stdout.splitlines()) == sorted([f"exec:{device}: said", "exec:sh -c: said"])
    kept = [RawRecording(path.parent) for path in (tmp_path / "all").glob("*/*/manifest.json")]
    assert [len(run.records("op_end")) for run in kept] == [CALLS, CALLS] and left_on(device) == []
    builds = {run.path.name for run in kept}
    assert len(builds) == 1 and all(re.fullmatch("[0-9a-f]{8}", build) for build in builds)


def assert_followed(device: Path, target: subprocess.Popen[bytes], run: Path) -> None:
    """Attached there for two seconds, a process that computes tokens has them recorded, and lives on."""
    words = ("--no-views", "--on", f"exec:{device}", "--pid", str(target.pid), "--duration", "2s", "-o", str(run))
    done = trace("attach", *words)
    assert done.returncode == 0 and "keeps running" in done.stderr, done.stderr
    assert RawRecording(run).manifest["records"]["token_end"] > 10 and left_on(device) == []
    assert target.poll() is None


def test_a_running_process_is_followed_there(device: Path, tmp_path: Path) -> None:
    end = tmp_path / "end"
    target = subprocess.Popen([sys.executable, STEPS, "100000", "0.01", "--until", str(end)], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: str(SITES) in Path(f"/proc/{target.pid}/maps").read_text())
        assert_followed(device, target, tmp_path / "run")
    finally:
        end.touch()
        target.wait(PATIENCE_S)


def test_androids_shell_and_tools_suffice(android: Path, tmp_path: Path) -> None:
    program, end = compile_c(tmp_path / "usdt_calls", "usdt_calls.c", flags=WITH_SITES), tmp_path / "end"
    done = run_on(
        "--on", f"exec:{android}", "-o", str(tmp_path / "run"), "--", "sh", "-c", f"{program} {CALLS}; echo said; exit 3"
    )
    assert done.returncode == 3 and done.stdout == "said\n" and "status 3" in done.stderr
    run = RawRecording(tmp_path / "run")
    assert run.is_whole and len(run.records("op_end")) == CALLS and left_on(android) == []
    target = subprocess.Popen([sys.executable, STEPS, "100000", "0.01", "--until", str(end)], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: str(SITES) in Path(f"/proc/{target.pid}/maps").read_text())
        assert_followed(android, target, tmp_path / "followed")
    finally:
        end.touch()
        target.wait(PATIENCE_S)


@pytest.mark.long
def test_a_running_process_of_another_mount_namespace_is_followed_there(device: Path, tmp_path: Path) -> None:
    end = tmp_path / "end"
    script = f"mount -t tmpfs none /mnt && cp -r {ROOT}/runtime /mnt && PYTHONPATH=/mnt "
    script += f"exec {sys.executable} -S {STEPS} 100000 0.01 --until {end}"
    target = subprocess.Popen(["unshare", "-m", "sh", "-c", script], cwd="/", stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: "/mnt/runtime/telemetry/_probes" in Path(f"/proc/{target.pid}/maps").read_text())
        assert_followed(device, target, tmp_path / "run")
    finally:
        end.touch()
        target.wait(PATIENCE_S)


def test_doctor_tells_what_a_device_offers_and_probes_what_would_stand_there(device: Path) -> None:
    done = trace("doctor", "--json", "--on", f"exec:{device}")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = {row["name"]: row["seen"] for row in json.loads(done.stdout)["checks"]}
    assert seen["arch"] == os.uname().machine and seen["kernel"] == os.uname().release and seen["uprobes"] == "there"
    keys = ("program", "library", "symbol", "offset", "at", "instruction", "why")
    placed = [
        [[row[key] for key in keys] for row in json.loads(trace("probes", "--json", *words, str(SITES)).stdout)["probes"]]
        for words in (("--on", f"exec:{device}"), ())
    ]
    assert placed[0] == placed[1] and len(placed[0]) == 12 and left_on(device) == []


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ('setpriv --reuid 65534 --clear-groups sh -c "$1"', "provides no root shell, which probes need: log in as root"),
        ('bash -c "uname() { echo armv7l; }; $1"', "is an armv7l machine: moescope-recorder runs on x86_64 and aarch64"),
        ('bash -c "uname() { echo aarch64; }; $1"', "cannot execute binary file: Exec format error"),
    ],
)
def test_what_a_device_lacks_is_said_in_one_line(tmp_path: Path, shell: str, said: str) -> None:
    program = tmp_path / "shell"
    program.write_text(f"#!/bin/sh\nexec {shell}\n")
    program.chmod(0o755)
    done = run_on("--on", f"exec:{program}", "-o", str(tmp_path / "run"), "--", "true")
    assert done.returncode == FAILED and said in done.stderr.splitlines()[-1] and not (tmp_path / "run").exists()


def test_a_kernel_without_types_is_said_in_one_line_and_leaves_nothing(device: Path, tmp_path: Path) -> None:
    device.write_text(
        device.read_text().replace("unshare -m sh -c '", "unshare -m sh -c 'mount -t tmpfs none /sys/kernel/btf && ")
    )
    done = run_on("--on", f"exec:{device}", "-o", str(tmp_path / "run"), "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == FAILED and "BTF" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists() and left_on(device) == []


@pytest.mark.parametrize(("size", "said"), [("1m", "No space left on device"), ("2600k", "the device's disk is full")])
def test_a_full_disk_there_is_said_and_what_was_recorded_is_here(device: Path, tmp_path: Path, size: str, said: str) -> None:
    there = device.with_name("device")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(there)], check=True)
    try:
        command = [sys.executable, STEPS, "30000", "0"]
        done = run_on("--on", f"exec:{device}", "-o", str(tmp_path / "run"), "--", *command)
        assert done.returncode == FAILED and said in done.stderr and left_on(device) == []
    finally:
        subprocess.run(["umount", str(there)], check=True)
    if size != "1m":
        run = RawRecording(tmp_path / "run")
        assert run.is_whole and len(run.records("token_end")) > 100


@pytest.mark.skipif(not shutil.which("adb"), reason="adb is not installed")
def test_adb_carries_a_recording_from_a_stand_in_for_the_daemon(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("HOME", str(tmp_path))
    device.write_text(device.read_text().replace('"$1"\n', '"$2"\n'))
    phone = Phone(str(device))
    program = str(compile_c(tmp_path / "usdt_calls", "usdt_calls.c", flags=WITH_SITES))
    try:
        subprocess.run(["adb", "connect", phone.serial], check=True, timeout=PATIENCE_S, capture_output=True)
        command = ["sh", "-c", f"true; {program} {CALLS}; echo said; exit 3"]
        done = run_on("--on", f"adb:{phone.serial}", "-o", str(tmp_path / "run"), "--", *command)
    finally:
        subprocess.run(["adb", "kill-server"], check=True)
    assert done.returncode == 3 and done.stdout == "said\n" and "status 3" in done.stderr
    assert len(RawRecording(tmp_path / "run").records("op_end")) == CALLS and left_on(device) == []
