"""The target comes to no harm: whatever ends first, no probe stays and what was recorded is readable."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from analyzer.tables import store as tables_module
from tests.conftest import RECORDER, ROOT, begin_trace, manifest_when, recorded_so_far, trace, wait_until
from tracer.errors import FAILED
from workloads.attach_cycles import changed_sites
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes")
STEPS_LONG = 100_000  # of 10 ms: until the test has seen what it wants, however busy the machine
PATIENCE_S = 120
I386 = b"\x7fELF\1\1\1" + bytes(9) + struct.pack("<HHIIIIIHHHHHH", 3, 3, 1, 0, 0, 0, 0, 52, 32, 0, 40, 0, 0)
"""The header of a library for 32-bit x86 that holds nothing."""
STEPS = str(ROOT / "workloads" / "programs" / "steps.py")


TELLS_ITS_POLICY = """
import os, sys
from tracer.__main__ import main
from tracer.planning.answers import Answers
from tracer.planning.here import Recorder

answer, start, urgent, recorders = Answers.answer, Recorder.start, os.SCHED_RR | os.SCHED_RESET_ON_FORK, []
Recorder.start = lambda *given: recorders.append(start(*given)) or recorders[0]

def tell(self, message):
    if "ask" in message:
        print("while asked:", *(os.sched_getscheduler(pid) == urgent for pid in (0, recorders[0].process.pid)))
    return answer(self, message)

Answers.answer = tell
code = main()
print("afterwards:", os.sched_getscheduler(0))
sys.exit(code)
"""
"""The tracer; it prints the scheduling policies of both its processes, too."""


class Traced:
    """A tracer over `steps.py`, both alive; the target goes on until it is told to end."""

    def __init__(self, folder: Path, levels: str):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.folder = folder
        self.output, self.end = folder.parent / "target-output", folder.parent / "end"
        command = [sys.executable, "-m", "tracer", "run", "--no-views", "--levels", levels, "-o", str(folder), "--"]
        command += [sys.executable, STEPS, str(STEPS_LONG), "0.01", "--until", str(self.end)]
        with self.output.open("wb") as out:
            self.tracer = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)

    def finishes(self) -> bool:
        """Whether the target does its last work when told to end."""
        self.end.touch()
        return wait_until(lambda: "done " in self.output.read_text())

    def wait_for_records(self, kind: str, count: int) -> dict:
        """The manifest, once there are `count` records of a kind."""
        assert wait_until(lambda: recorded_so_far(self.folder, kind) >= count), self.output.read_text()
        return json.loads((self.folder / "manifest.json").read_text())


@pytest.fixture(params=["token"])
def traced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Traced]:
    run = Traced(tmp_path / "run", request.param)
    yield run
    run.end.touch()
    if run.tracer.poll() is None:
        run.tracer.kill()
        run.tracer.wait()


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def recorders_of(folder: Path) -> list[str]:
    """The processes that record into a folder."""
    found = subprocess.run(["pgrep", "-f", f"moescope-recorder.*{folder}"], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.parametrize("traced", ["all"], indirect=True)
def test_a_killed_tracer_leaves_no_probe_a_living_target_and_a_readable_recording(traced: Traced) -> None:
    traced.wait_for_records("token_end", 100)
    manifest = manifest_when(
        lambda known: any(row["engine"] != "kernel" for row in known["probes"]), traced.folder, traced.tracer
    )
    pid = manifest["target"]["pid"]
    sites = sum(probe["engine"] != "kernel" for probe in manifest["probes"])
    assert changed_sites(pid, manifest) == sites > 0
    traced.tracer.send_signal(signal.SIGKILL)
    traced.tracer.wait()
    assert wait_until(lambda: changed_sites(pid, manifest) == 0)
    assert alive(pid)
    assert wait_until(lambda: RawRecording(traced.folder).manifest["state"] == "complete")
    run = RawRecording(traced.folder)
    assert any("planner" in warning for warning in run.manifest["warnings"])
    tables = tables_module.build_tables(run)
    assert len(tables["tokens"]) >= 100
    assert tables["tokens"]["seq"].tolist() == list(range(len(tables["tokens"])))
    assert traced.finishes(), "the target did not finish its work"


def test_an_interrupted_tracer_detaches_and_completes_its_recording(traced: Traced) -> None:
    pid = traced.wait_for_records("token_end", 50)["target"]["pid"]
    traced.tracer.send_signal(signal.SIGINT)
    assert traced.tracer.wait(PATIENCE_S) == 0
    assert alive(pid)
    done = RawRecording(traced.folder).manifest
    assert done["probes"] and wait_until(lambda: changed_sites(pid, done) == 0)  # others may trace processes of the same library
    assert done["state"] == "complete" and done["records"]["token_end"] >= 50
    assert "keeps running" in traced.output.read_text()
    assert traced.finishes()


def test_ctrl_c_ends_both_and_the_recording_tells_how(traced: Traced) -> None:
    traced.wait_for_records("token_end", 50)
    os.killpg(traced.tracer.pid, signal.SIGINT)
    code = traced.tracer.wait(PATIENCE_S)
    done = RawRecording(traced.folder).manifest
    assert done["state"] == "complete" and done["target"]["exit_code"] in (-signal.SIGINT, 1, 130)
    status = done["target"]["exit_code"]
    assert code == (status if status >= 0 else 128 - status)


def test_a_target_that_is_killed_ends_the_recording_cleanly(traced: Traced) -> None:
    pid = traced.wait_for_records("token_end", 50)["target"]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert traced.tracer.wait(PATIENCE_S) == 128 + signal.SIGKILL
    done = RawRecording(traced.folder).manifest
    assert done["state"] == "complete" and done["target"]["exit_code"] == -signal.SIGKILL


def test_a_running_process_is_followed_and_let_go(tmp_path: Path) -> None:
    environment, end = {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path / "end"
    command = [sys.executable, STEPS, str(STEPS_LONG), "0.01", "--until", str(end)]
    target = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert wait_until(lambda: "_probes" in Path(f"/proc/{target.pid}/maps").read_text())
    done = trace(
        "attach", "--no-views", "--levels", "token", "--pid", str(target.pid), "--duration", "1", "-o", str(tmp_path / "run")
    )
    assert done.returncode == 0, done.stderr
    assert alive(target.pid)
    end.touch()
    told = target.communicate(timeout=PATIENCE_S)[0]
    seen = RawRecording(tmp_path / "run").records("token_end")["seq"]
    assert seen.tolist() == list(range(seen[0], seen[0] + len(seen)))
    assert seen[0] > 0 and seen[-1] + 1 < int(told.removeprefix("done ")) and target.returncode == 0


def test_other_threads_wait_while_the_target_does(tmp_path: Path) -> None:
    words = ["run", "--no-views", "-o", str(tmp_path / "run"), "--", sys.executable, STEPS, "3", "0"]
    command = [sys.executable, "-c", TELLS_ITS_POLICY, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    seen = [line for line in done.stdout.splitlines() if line.startswith(("while asked", "afterwards"))]
    assert seen == ["while asked: True True"] * (len(seen) - 1) + [f"afterwards: {os.SCHED_OTHER}"]
    assert len(seen) > 1


def test_the_command_finds_signals_and_descriptors_as_if_untraced(tmp_path: Path) -> None:
    look = ["sh", "-c", "grep -E 'SigIgn' /proc/$$/status; ls /proc/$$/fd; ulimit -a; pwd"]
    plain = subprocess.run(look, cwd=ROOT, capture_output=True, text=True, check=True)
    traced = trace("run", "--no-views", "-o", str(tmp_path / "run"), "--", *look)
    assert traced.stdout == plain.stdout


def test_a_process_that_outlives_the_command_that_started_it_is_said(tmp_path: Path) -> None:
    command = ["sh", "-c", "setsid sleep 600 > /dev/null 2>&1 & echo $!; sleep 0.5"]
    done = trace("run", "--no-views", "--levels", "token", "-o", str(tmp_path / "run"), "--", *command)
    pid = int(done.stdout.split()[-1])
    os.kill(pid, signal.SIGKILL)
    assert f"process {pid} " in done.stderr
    summary = subprocess.run([sys.executable, "-m", "moescope", "summary", str(tmp_path / "run")], capture_output=True, text=True)
    assert f"process {pid} " in summary.stdout


def test_a_full_disk_ends_the_recording_in_one_line_and_keeps_what_was_written(tmp_path: Path) -> None:
    small = f'mount -t tmpfs -o size=600k none {tmp_path} && exec "$@"'
    inner = [
        sys.executable,
        "-m",
        "tracer",
        "run",
        "--no-views",
        "--levels",
        "token",
        "-o",
        str(tmp_path / "run"),
        "--",
        sys.executable,
        STEPS,
        "30000",
        "0",
    ]
    count = f"{sys.executable} -m moescope query {tmp_path}/run 'SELECT count(*) > 1000 AS many FROM tokens'"
    read = f"cd {ROOT}; {' '.join(inner)}; echo status $?; {count}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", small, "sh", "sh", "-c", read],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr or "mount" in done.stderr.split("tracer:")[0]:
        pytest.skip("mount namespaces are not allowed here")
    assert f"status {FAILED}" in done.stdout and "True" in done.stdout
    assert "No space" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_runs_as_the_invoking_user_and_the_output_is_theirs(open_folder: Path) -> None:
    user = {"SUDO_UID": "65534", "SUDO_GID": "65534", "SUDO_USER": "nobody"}
    done = trace("run", "--no-views", "--levels", "token", "-o", str(open_folder / "a" / "run"), "--", "id", "-u", env=user)
    assert done.stdout.strip() == "65534"
    owners = {path.stat().st_uid for path in (open_folder / "a").rglob("*")} | {(open_folder / "a").stat().st_uid}
    assert owners == {65534}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--engine", "vllm"), "unknown engine 'vllm'; known: auto,"),
        (("run", "--levels", "token,atom"), "unknown level atom; known: all,"),
        (("run", "--ring-mib", "3"), "--ring-mib 3 is not a power of two"),
        (("run", "-o", "/proc/nowhere/run"), "cannot write to /proc/nowhere/run"),
        (("run", "-o", "{tmp}/run", "--", "no-such-command"), "cannot run 'no-such-command': No such file or directory"),
        (("run", "-o", "{tmp}/run", "--", "/"), "cannot run '/': Permission denied"),
        (("attach", "--pid", "4194000", "-o", "{tmp}/run"), "no process 4194000"),
        (("probes", "/nowhere.so"), "/nowhere.so is not a file"),
        (("run", "-o", "/dev/null", "--", "true"), "cannot write to /dev/null: File exists"),
        (("run", "-o", "{tmp}/" + "x" * 300, "--", "true"), "File name too long"),
        (("run", "--engine", "auto,foo"), "unknown engine 'foo'; known: auto,"),
        (("run", "--levels", "token,,graph"), "--levels 'token,,graph' has an empty name"),
        (("run", "--pmc", ","), "--pmc ',' has an empty name"),
        (("run", "--pmc", "r" + "f" * 30), "rfff"),
        (("attach", "--pid", "2", "-o", "{tmp}/run"), "2 is a kernel thread"),
        (("attach", "--pid", "-1", "-o", "{tmp}/run"), "no process -1"),
        (("probes", "{tmp}"), "is not a file"),
        (("probes", "{tmp}/text"), "it is not an ELF file"),
        (("probes", "{tmp}/empty"), "cannot be read as a program or library"),
        (("probes", "{tmp}/cut"), "cannot be read as a program or library"),
        (("probes", "{tmp}/i386"), "is code for x86, but this machine runs"),
    ],
)
def test_wrong_use_is_answered_in_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "text").write_text("no program\n")
    (tmp_path / "empty").touch()
    (tmp_path / "cut").write_bytes(Path("/bin/sh").read_bytes()[:300])
    (tmp_path / "i386").write_bytes(I386)
    done = trace(*(argument.format(tmp=tmp_path) for argument in arguments))
    last = [line for line in done.stderr.splitlines() if line.startswith(("tracer:", "moescope: cannot run"))]
    assert done.returncode == (FAILED if arguments[0] == "run" else 2)
    assert len(last) == 1 and words in last[0]
    assert "Traceback" not in done.stderr


def test_a_command_that_fails_at_once_is_said_in_one_line(tmp_path: Path) -> None:
    done = trace("run", "--no-views", "--levels", "token", "-o", str(tmp_path / "run"), "--", "false")
    assert done.returncode == 1
    assert "status 1" in done.stderr and "no engine" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    "words", [("-o", ""), ("--duration", "0"), ("--duration", "nan"), ("--duration", "-1"), ("--max-overhead", "0")]
)
def test_a_value_that_no_option_has_is_refused_by_its_name(words: tuple[str, str]) -> None:
    done = trace("run", *words, "--", "true")
    assert done.returncode == FAILED
    assert f"argument {'-o/--output' if words[0] == '-o' else words[0]}" in done.stderr and "Traceback" not in done.stderr


def test_a_process_that_has_ended_unasked_is_said(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        done = trace("attach", "--pid", str(child), "-o", str(tmp_path / "run"))
    finally:
        os.waitpid(child, 0)
    assert done.returncode == 2 and f"process {child} " in done.stderr and f"process {os.getpid()}," in done.stderr
    assert "Traceback" not in done.stderr


def test_numbers_of_sudo_that_are_none_are_refused(tmp_path: Path) -> None:
    for text in ("abc", "-1", "4294967295", "1e3"):
        done = trace("run", "-o", str(tmp_path / "run"), "--", "true", env={"SUDO_UID": text})
        assert done.returncode == FAILED and f"SUDO_UID={text!r}" in done.stderr and "Traceback" not in done.stderr


def test_the_doctor_serves_without_root() -> None:
    script = "import os, sys; import tracer.__main__ as program; import tracer.commands.doctor, email.parser\n"
    script += "os.setuid(65534); sys.argv = ['tracer', 'doctor', '--json']; sys.exit(program.main())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    checks = {check["name"]: check["ok"] for check in json.loads(done.stdout)["checks"]}
    assert checks["root"] is False and checks["built parts"] is True


def test_without_root_one_line_says_how(tmp_path: Path) -> None:
    script = "import os, sys; import tracer.__main__ as program; import tracer.commands.run\n"
    script += "os.setuid(65534); sys.argv = ['tracer', 'run', '--', 'true']; sys.exit(program.main())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == FAILED
    assert done.stderr.count("\n") == 1 and "sudo python3 -m tracer" in done.stderr


def test_where_programs_have_other_pids_than_the_kernel_says_one_line_says_so(tmp_path: Path) -> None:
    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    recorders = {
        "tracer": [sys.executable, "-m", "tracer", "run", "-o", str(tmp_path / "run"), "--", "true"],
        "recorder": [str(RECORDER), "--plan", "plan.json", "-o", str(tmp_path / "run"), "--", "true"],
    }
    for name, command in recorders.items():
        done = subprocess.run([*inside, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and done.stderr.count("\n") == 1, name
        assert "PID namespace" in done.stderr and not (tmp_path / "run").exists(), name


def test_a_kernel_without_btf_and_headers_is_said_in_one_line(tmp_path: Path) -> None:
    hide = 'mount -t tmpfs none /sys/kernel/btf && mount -t tmpfs none /lib/modules && exec "$@"'
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        hide,
        "sh",
        sys.executable,
        "-m",
        "tracer",
        "run",
        "-o",
        str(tmp_path / "run"),
        "--",
        "true",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr.split("tracer:")[0]:
        pytest.skip("mount namespaces are not allowed here")
    assert done.returncode == FAILED
    assert "has no BTF" in done.stderr and "--btf FILE" in done.stderr
    assert not (tmp_path / "run").exists()


def test_doctor_lists_requirements_and_remedies() -> None:
    done = trace("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0
    assert checks["recorder loads and probes"]["ok"] and "emulated" in checks["recorder loads and probes"]["seen"]
    assert all(check["remedy"] for check in checks.values())


def test_a_tracer_that_nobody_listens_to_any_more_ends_and_the_command_never_runs(tmp_path: Path) -> None:
    command = ["-m", "tracer", "run", "--no-views", "-o", str(tmp_path / "run"), "--", "touch", str(tmp_path / "ran")]
    tracer = subprocess.Popen([sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None and "recording touch" in tracer.stderr.readline()
    tracer.kill()
    tracer.wait(timeout=PATIENCE_S)
    assert wait_until(lambda: not recorders_of(tmp_path / "run"))
    assert not (tmp_path / "ran").exists()


def test_a_tracer_that_fails_before_it_lets_the_command_go_ends_and_the_command_never_runs(tmp_path: Path) -> None:
    script = "import sys, tracer.__main__ as program, tracer.planning.answers as answers; from tracer.errors import ProbeError\n"
    script += "def fail(*_): raise ProbeError('no such luck')\n"
    script += "answers.Answers.plan = fail\n"
    script += f"sys.argv = ['tracer', 'run', '-o', '{tmp_path}/run', '--', 'touch', '{tmp_path}/ran']; sys.exit(program.main())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == FAILED and "no such luck" in done.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def test_a_recorder_that_is_killed_is_said_and_leaves_a_readable_recording(traced: Traced) -> None:
    manifest = traced.wait_for_records("token_end", 50)
    pid = manifest["target"]["pid"]
    os.kill(manifest["tracer_pid"], signal.SIGKILL)
    assert traced.tracer.wait(PATIENCE_S) == FAILED
    assert "signal 9" in traced.output.read_text()
    assert wait_until(lambda: changed_sites(pid, manifest) == 0) and alive(pid)
    assert RawRecording(traced.folder).manifest["state"] == "recording"
    assert traced.finishes()


def test_a_recorder_that_is_killed_after_it_was_asked_to_end_gives_its_signal(traced: Traced) -> None:
    recorder = traced.wait_for_records("token_end", 50)["tracer_pid"]
    os.kill(recorder, signal.SIGSTOP)
    traced.tracer.send_signal(signal.SIGINT)
    os.kill(recorder, signal.SIGKILL)
    assert traced.tracer.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert traced.finishes()


def test_a_followed_process_whose_parent_does_not_wait_for_it_has_ended(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        tracer = begin_trace("attach", "--no-views", "--pid", str(process.pid), "-o", str(tmp_path / "run"))
        manifest_when(lambda manifest: True, tmp_path / "run", tracer)
        process.kill()
        assert tracer.communicate(timeout=PATIENCE_S) and tracer.returncode == 0
        assert Path(f"/proc/{process.pid}").exists()
    finally:
        process.kill()
        process.wait()
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["state"] == "complete"
