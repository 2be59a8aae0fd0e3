"""Surroundings that fail a recording: no tracefs, other namespaces, full disks, signals in each phase, two readers at once.

Nothing hangs, nothing stays, what was recorded is readable, and what could not be done is said in one line.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import RECORDED_BY, ROOT, over_recorders, recorded_so_far, rest_long, trace, wait_until
from tests.test_recorder import CALLS, STEPS, processes
from tests.test_tracer_series import state_of
from tracer.errors import FAILED
from workloads.compiling import WITH_SITES, compile_c
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes", "recorder")
LEVELS = ("--levels", "token,graph,operator,expert")
APART = ("unshare", "-m", "sh", "-c")
WITHOUT_TRACEFS = 'umount -R /sys/kernel/tracing; umount -R /sys/kernel/debug/tracing 2> /dev/null; exec "$@"'
NO_MOUNTS = ("capsh", "--drop=cap_sys_admin", "--", "-c", 'exec "$@"')
PATIENCE_S = 60.0
"""What takes longer than this hangs, however busy the machine is."""


def can_unshare(*words: str) -> bool:
    return not subprocess.run(["unshare", *words, "true"], capture_output=True, check=False).returncode


apart = pytest.mark.skipif(not can_unshare("-m"), reason="mount namespaces are not allowed here")


def calls(folder: Path) -> str:
    """A program that loads a library with sites, and calls each of them."""
    return str(compile_c(folder / "usdt_calls", "usdt_calls.c", flags=WITH_SITES))


def run_apart(before: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """The tracer in a mount namespace of its own, behind shell commands that end with `exec "$@"`."""
    command = [*APART, before, "sh", sys.executable, "-m", "tracer", "run", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@apart
@over_recorders
def test_tracefs_is_mounted_where_it_was_not_and_nowhere_else(tmp_path: Path, on: tuple[str, ...]) -> None:
    before = Path("/proc/self/mounts").read_text()
    done = run_apart(WITHOUT_TRACEFS, ["--no-views", *on, *LEVELS, "-o", f"{tmp_path}/run", "--", calls(tmp_path), str(CALLS)])
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert len(run.records("op_end")) == CALLS and run.manifest["warnings"] == []
    assert Path("/proc/self/mounts").read_text() == before


@apart
@pytest.mark.skipif(shutil.which("capsh") is None, reason="capsh is not installed")
@over_recorders
def test_where_tracefs_is_missing_and_cannot_be_mounted_nothing_is_started(tmp_path: Path, on: tuple[str, ...]) -> None:
    before = WITHOUT_TRACEFS.replace('"$@"', f'{shlex.join(NO_MOUNTS)} sh "$@"')
    done = run_apart(before, ["--no-views", *on, "-o", f"{tmp_path}/run", "--", "touch", f"{tmp_path}/ran"])
    assert done.returncode == FAILED and "mount -t tracefs" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


@pytest.mark.skipif(not can_unshare("--pid", "--fork", "--mount-proc"), reason="PID namespaces are not allowed here")
@over_recorders
def test_a_target_in_namespaces_of_its_own_has_every_call_recorded(tmp_path: Path, on: tuple[str, ...]) -> None:
    command = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", calls(tmp_path), str(CALLS)]
    done = trace("run", "--no-views", *on, *LEVELS, "-o", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    rows = run.records("op_end")
    assert len(rows) == CALLS and len(run.records("expert_end")) == CALLS and run.manifest["lost"] == {}
    assert set(rows["pid"].tolist()).isdisjoint({1, 2})  # the kernel's numbers, not the namespace's


@pytest.mark.skipif(not can_unshare("--pid", "--fork", "--mount-proc"), reason="PID namespaces are not allowed here")
def test_a_recorder_in_a_pid_namespace_of_its_own_starts_nothing(tmp_path: Path) -> None:
    box = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "1000"])
    try:
        children = Path(f"/proc/{box.pid}/task/{box.pid}/children")
        assert wait_until(children.read_text)
        machine = f"exec:nsenter --target {children.read_text().strip()} --pid --mount sh -c"
        done = trace("run", "--no-views", "--on", machine, "-o", str(tmp_path / "run"), "--", "touch", str(tmp_path / "ran"))
    finally:
        box.kill()
        box.wait()
    assert done.returncode == FAILED and "PID namespace" in done.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


@pytest.mark.skipif(not can_unshare("--user", "--map-root-user"), reason="user namespaces are not allowed here")
@over_recorders
def test_root_of_a_user_namespace_is_told_why_nothing_is_recorded(tmp_path: Path, on: tuple[str, ...]) -> None:
    words = ["run", "--no-views", *on, "-o", str(tmp_path / "run"), "--", "touch", str(tmp_path / "ran")]
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-m", "tracer", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == FAILED and "user namespace" in done.stderr and "ring buffers" not in done.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


@apart
@over_recorders
def test_a_program_that_ends_at_once_in_another_mount_namespace_costs_neither_records_nor_views(
    tmp_path: Path, on: tuple[str, ...]
) -> None:
    program, inside = calls(tmp_path), tmp_path / "inside"
    inside.mkdir()
    script = f"mount -t tmpfs none {inside} && cp {program} {inside}/p && {inside}/p 3; exec {inside}/p {CALLS}"
    done = trace("run", *on, *LEVELS, "-o", str(tmp_path / "run"), "--", *APART, script)
    assert done.returncode == 0 and "cannot" not in done.stderr, done.stderr
    run = RawRecording(tmp_path / "run")
    assert run.manifest["state"] == "complete" and len(run.records("op_end")) == CALLS + 3
    assert all((tmp_path / "run" / name).stat().st_size for name in ("trace.pftrace", "report.html"))


@apart
def test_an_engine_that_lies_in_another_mount_namespace_is_probed(tmp_path: Path) -> None:
    source, program, inside = ROOT / "workloads" / "programs" / "fake_ggml.c", tmp_path / "fake", tmp_path / "inside"
    subprocess.run(["cc", "-O2", "-Wno-unknown-pragmas", "-fopenmp", "-o", program, source], check=True)
    inside.mkdir()
    script = f"mount -t tmpfs none {inside} && cp {program} {inside}/p && exec {inside}/p 7 1 0"
    done = trace("run", "--no-views", "--levels", "token,graph", "-o", str(tmp_path / "run"), "--", *APART, script)
    assert done.returncode == 0 and "cannot" not in done.stderr, done.stderr
    assert len(RawRecording(tmp_path / "run").records("graph_end")) >= 7


@apart
def test_a_recording_that_finds_no_room_here_waits_there_until_it_is_fetched(tmp_path: Path) -> None:
    words = ["--no-views", *RECORDED_BY["exec"], *LEVELS, "-o", f"{tmp_path}/small/run", "--", calls(tmp_path), "30000"]
    command = shlex.join([sys.executable, "-m", "tracer", "run", *words])
    script = (
        f"mkdir {tmp_path}/small && mount -t tmpfs -o size=256k none {tmp_path}/small || exit\n{command}\necho first $? >&2\n"
    )
    script += (
        f"mount -o remount,size=64m {tmp_path}/small; {command}; echo second $? >&2; cp -r {tmp_path}/small/run {tmp_path}/run"
    )
    done = subprocess.run([*APART, script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert f"first {FAILED}" in done.stderr and "second 0" in done.stderr, done.stderr
    assert "No space left" in done.stderr and "Traceback" not in done.stderr
    run = RawRecording(tmp_path / "run")
    assert run.is_whole and run.manifest["state"] == "complete" and len(run.records("op_end")) == 30000
    assert "remote.json" not in os.listdir(tmp_path / "run")


@dataclass
class Endless:
    """A recording of a program that goes on until it is told to end."""

    folder: Path
    on: tuple[str, ...]

    def __post_init__(self) -> None:
        self.run, self.end, self.said = self.folder / "run", self.folder / "end", self.folder / "said"
        words = ["run", "--no-views", *self.on, *LEVELS, "-o", str(self.run), "--"]
        words += [sys.executable, STEPS, "1000000", "0.002", "--until", str(self.end)]
        with self.said.open("wb") as said:
            command = [sys.executable, "-m", "tracer", *words]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.tracer = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True)

    def place(self) -> Path:
        """Where the recording grows."""
        state = self.run / "remote.json"
        with contextlib.suppress(OSError, ValueError):
            return Path(json.loads(state.read_text())["folder"]) / "recording"
        return self.run

    def manifest(self) -> dict:
        """The newest, empty before there is one."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.place() / "manifest.json").read_text())
        return {}

    def is_loading(self) -> bool:
        """Whether the recorder has begun."""
        return any("moescope-recorder" in os.readlink(f"/proc/{pid}/exe") for pid in processes(self.place()))

    def await_phase(self, phase: str) -> None:
        """Wait until a phase has begun."""
        reached = {
            "begin": lambda: True,
            "loading": self.is_loading,
            "placing": lambda: bool(self.manifest()),
            "recording": lambda: recorded_so_far(self.place(), "token_end") > 50,
        }
        assert wait_until(reached[phase if phase != "ending" else "recording"]), self.said.read_text()

    def close(self) -> None:
        """End both."""
        self.end.touch()
        if self.tracer.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.tracer.pid, signal.SIGKILL)
        self.tracer.wait()


@pytest.mark.parametrize("phase", ["begin", "loading", "placing", "recording", "ending"])
@pytest.mark.parametrize("number", rest_long([signal.SIGTERM, signal.SIGINT], signal.SIGTERM), ids=["TERM", "INT"])
@over_recorders
def test_a_signal_ends_every_phase_and_nothing_stays(
    tmp_path: Path, on: tuple[str, ...], number: signal.Signals, phase: str
) -> None:
    run = Endless(tmp_path, on)
    try:
        run.await_phase(phase)
        pid, place = run.manifest().get("target", {}).get("pid", 0), run.place()
        if phase == "ending":
            run.tracer.send_signal(number)
            time.sleep(0.1)
        began = time.monotonic()
        run.tracer.send_signal(number)
        run.tracer.wait(PATIENCE_S)
        print(f"{phase} {number.name}: {time.monotonic() - began:.2f} s, status {run.tracer.returncode}")
        assert not re.search(rf'File "{ROOT}/(tracer|moescope)/', run.said.read_text())  # the program may print its own traceback
        assert wait_until(lambda: not processes(place)), processes(place)
        assert not pid or state_of(pid) not in ("T", "t")
        if (run.run / "manifest.json").exists():
            recorded = RawRecording(run.run)
            abandoned = ["recording"] if on and phase == "ending" else []  # by the second Ctrl-C
            assert recorded.is_whole and recorded.manifest["state"] in ["complete", *abandoned]
        else:
            assert not run.run.exists() and (phase in ("begin", "loading", "placing") or (on and phase == "ending"))
            assert run.tracer.returncode in (128 + number, -number)  # the latter while Python's modules are imported
        run.end.touch()
        assert not pid or wait_until(lambda: state_of(pid) in ("", "Z"))
    finally:
        run.close()


@pytest.mark.long
def test_two_views_of_a_new_recording_may_be_written_at_once(tmp_path: Path) -> None:
    done = trace("run", "--no-views", *LEVELS, "-o", str(tmp_path / "run"), "--", calls(tmp_path), "20000")
    assert done.returncode == 0, done.stderr
    for turn in range(3):
        shutil.rmtree(tmp_path / "run" / "tables", ignore_errors=True)
        (tmp_path / "run" / "trace.pftrace").unlink(missing_ok=True)
        command = [sys.executable, "-m", "moescope", "write", str(tmp_path / "run"), "--only", "trace"]
        both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in "ab"]
        for each in both:
            said = each.communicate()[1]
            assert each.returncode == 0, (turn, said)
        names = {path.name for path in (tmp_path / "run").iterdir()}
        assert (tmp_path / "run" / "trace.pftrace").stat().st_size > 1 << 20 and not any(name.startswith(".") for name in names)


def test_the_summary_that_the_views_needed_is_kept_for_whoever_asks_next(tmp_path: Path) -> None:
    run, python = str(tmp_path / "run"), sys.executable
    assert trace("run", "--no-views", *LEVELS, "-o", run, "--", calls(tmp_path), str(CALLS)).returncode == 0
    subprocess.run([python, "-m", "moescope", "write", run], cwd=ROOT, capture_output=True, check=True)
    kept = tmp_path / "run" / "tables" / "summary.json"
    written = kept.stat().st_mtime_ns
    shown = subprocess.run([python, "-m", "moescope", "summary", "--json", run], cwd=ROOT, capture_output=True, check=True)
    assert (
        kept.stat().st_mtime_ns == written and json.loads(kept.read_text())["summary"].items() <= json.loads(shown.stdout).items()
    )
