"""Whatever ends first, at whatever moment: no probe stays, the target lives on, and what was recorded is readable.

`make test-long` tries 100 moments and 2,000 reloads, where otherwise it is one moment of each phase and 100 reloads.
"""

import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from analyzer.tables import store as tables_module
from tests.conftest import LONG, ROOT, begin_trace, manifest_when, recorded_when, trace, wait_until
from tests.test_truth_llama import library
from workloads.compiling import WITH_SITES, compile_c
from workloads.kernel_objects import held_in_kernel, recorder_of, still_in_kernel
from workloads.raw_records import RawRecording

pytestmark = [
    pytest.mark.needs("probes"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
MOMENTS, RELOADS, CALLS, MANY, KILLS, RETURNS = (100, 2000, 3, 200, 50, 20) if LONG else (5, 100, 3, 200, 5, 2)
PHASES = ("start-up", "attach", "learning", "recording", "end")
LEVELS = "token,graph,operator"
STEPS, PROMPT, PAUSE_US = 1900, 10, 20_000  # far longer than a moment takes
PATIENCE_S = 120.0
STEPS_PROGRAM = str(ROOT / "workloads" / "programs" / "steps.py")


def state_of(pid: int) -> str:
    """The state of a process as /proc has it; empty where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def changed_code(pid: int, folder: Path) -> list[str]:
    """Files of a folder whose code in a process is not that of the file: a probe stands there."""
    changed = []
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, flags, offset, _, _, *path = line.split(None, 5)
            if path and "x" in flags and Path(path[0]).parent == folder:
                start, end = (int(part, 16) for part in span.split("-"))
                memory.seek(start)
                code = memory.read(end - start)
                wanted = Path(path[0]).read_bytes()[int(offset, 16) :][: len(code)]
                changed += [path[0]] if code[: len(wanted)] != wanted else []
    return changed


@dataclass
class Run:
    """A tracer over a program that poses as llama.cpp, begun by the tracer; `program` lies alone with its library."""

    folder: Path
    program: Path

    def __post_init__(self) -> None:
        self.recording = self.folder / "run"
        options = ["--no-views", "--levels", LEVELS, "-o", str(self.recording)]
        command = [str(self.program), str(self.folder / "log.csv"), str(STEPS), str(PROMPT), str(PAUSE_US)]
        self.began = time.monotonic()
        self.tracer = begin_trace("run", *options, "--", *command)

    def manifest(self) -> dict:
        """The recording's, empty before there is one."""
        path = self.recording / "manifest.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def target(self) -> int:
        """The program's process; 0 while it does not run."""
        pid = int(self.manifest().get("target", {}).get("pid", 0))
        with contextlib.suppress(OSError):
            return pid if os.readlink(f"/proc/{pid}/exe") == str(self.program) else 0
        return 0

    def is_decided(self) -> bool:
        """Whether the program runs, or never will: who was not let go ends with the tracer."""
        pid = int(self.manifest().get("target", {}).get("pid", 0))
        return bool(self.target()) or state_of(pid) in ("", "Z")

    def close(self) -> None:
        """End both."""
        for pid in (self.target(), self.tracer.pid if self.tracer.poll() is None else 0):
            if pid:
                os.kill(pid, signal.SIGKILL)
        self.tracer.communicate()


@dataclass(frozen=True)
class Lengths:
    """How long the phases of an undisturbed run took, seconds."""

    loading: float
    learning: float
    ending: float


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def lengths(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Lengths:
    """Measured once, to aim by."""
    run = Run(tmp_path_factory.mktemp("lengths"), program)
    assert wait_until(run.target)
    released = time.monotonic()
    assert wait_until(lambda: any(row["retired_ns"] for row in run.manifest()["probes"])), "nothing was learnt"
    learnt = max(row["retired_ns"] for row in run.manifest()["probes"]) / 1e9
    stopped = time.monotonic()
    run.tracer.send_signal(signal.SIGINT)
    run.tracer.wait(PATIENCE_S)
    ended = time.monotonic()
    run.close()
    return Lengths(released - run.began, max(learnt - released, 0.1), ended - stopped)


def reach(run: Run, phase: str, lengths: Lengths, share: float) -> None:
    """Wait for a phase of a run, and for a share of it to pass."""
    if phase == "start-up":
        return time.sleep(share * lengths.loading)
    wait_until(lambda: run.manifest() or run.tracer.poll() is not None)
    if phase in ("attach", "learning"):
        return time.sleep((share + (phase == "learning")) * lengths.learning / 2)
    time.sleep(lengths.learning + (share if phase == "recording" else 0))
    if phase == "end":
        run.tracer.send_signal(signal.SIGINT)
        time.sleep(share * lengths.ending)
    return None


def moments(seed: int) -> Iterator[tuple[str, float]]:
    """(phase, share of it), as many of each phase."""
    draw = random.Random(seed)
    for number in range(MOMENTS):
        yield PHASES[number % len(PHASES)], draw.random()


def kill_tracer(tracer: subprocess.Popen, both: bool = False) -> set[tuple[str, int]]:
    """Kill its recorder, or planner too, in the middle of what it does; what of the kernel's it held."""
    pid = recorder_of(tracer)
    if pid:
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda: state_of(pid) in "TZ")
    held = held_in_kernel(pid)
    for each in {pid, tracer.pid if both or not pid else 0} - {0}:
        os.kill(each, signal.SIGKILL)
    tracer.wait()  # the target still holds the pipes
    return held


def check_readable(folder: Path) -> int:
    """What was recorded can be read, in one piece; the token steps in it."""
    if not (folder / "manifest.json").exists():
        return 0
    seen = RawRecording(folder).records("token_begin")
    tables = tables_module.build_tables(RawRecording(folder))
    assert len(tables["tokens"]) >= len(seen) - 1
    assert tables["tokens"]["token_id"].tolist() == list(range(len(tables["tokens"])))
    return len(tables["tokens"])


@pytest.mark.long
@pytest.mark.alone  # what others load meanwhile takes the processors from the phases that are aimed at
def test_a_tracer_killed_at_any_moment_leaves_the_target_running_and_nothing_in_the_kernel(
    tmp_path: Path, program: Path, lengths: Lengths
) -> None:
    events = Path("/sys/kernel/tracing/uprobe_events")
    running, recorded, held_any = 0, 0, 0
    for number, (phase, share) in enumerate(moments(seed=1)):
        run = Run(tmp_path / str(number), program)
        try:
            reach(run, phase, lengths, share)
            held = kill_tracer(run.tracer, both=number % 2 == 1)
            assert wait_until(lambda held=held: not still_in_kernel(held)), (phase, share, still_in_kernel(held))
            assert not events.exists() or str(program.parent) not in events.read_text()
            assert wait_until(run.is_decided), (phase, share)
            if pid := run.target():
                assert wait_until(lambda pid=pid: not changed_code(pid, program.parent)), (phase, share)
                before = cpu_ticks(pid)
                assert wait_until(lambda pid=pid, before=before: cpu_ticks(pid) > before), (phase, share, state_of(pid))
            running, held_any = running + bool(pid), held_any + bool(held)
            recorded += check_readable(run.recording) > 0
        finally:
            run.close()
    print(f"{MOMENTS} moments: programs were loaded in {held_any}, the target ran in {running}, {recorded} have whole steps")
    assert MOMENTS > held_any >= MOMENTS * 0.4 and running >= MOMENTS * 0.6 and recorded >= MOMENTS * 0.3


@pytest.mark.long
@pytest.mark.alone  # other sessions' probes stand in the same file
def test_a_tracer_killed_while_its_costly_levels_go_and_come_leaves_nothing_in_the_kernel(tmp_path: Path) -> None:
    end, draw = tmp_path / "end", random.Random(4)
    command = [sys.executable, STEPS_PROGRAM, "1000000", "0.004", "--operators", "200", "--until", str(end)]

    def has_gone(manifest: dict) -> bool:
        return any(row["level"] == "operator" and row["done_ns"] for row in manifest["level_changes"])

    try:
        for number in range(RETURNS):
            folder = tmp_path / str(number)
            tracer = begin_trace("run", "--no-views", "--max-overhead", "50%", "-o", str(folder), "--", *command)
            pid = int(manifest_when(has_gone, folder, tracer)["target"]["pid"])
            assert changed_code(pid, ROOT / "runtime" / "telemetry")
            time.sleep(draw.random())
            held = kill_tracer(tracer)
            assert held and wait_until(lambda held=held: not still_in_kernel(held)), still_in_kernel(held)
            assert wait_until(lambda pid=pid: not changed_code(pid, ROOT / "runtime" / "telemetry"))
            before = cpu_ticks(pid)
            assert wait_until(lambda pid=pid, before=before: cpu_ticks(pid) > before), state_of(pid)
            os.kill(pid, signal.SIGKILL)
            tracer.communicate()
            assert check_readable(folder) > 0
    finally:
        end.touch()


@pytest.mark.long
@pytest.mark.alone
def test_a_target_killed_at_any_moment_ends_a_recording_that_is_complete(tmp_path: Path, program: Path, lengths: Lengths) -> None:
    for number, (phase, share) in enumerate(moments(seed=2)):
        run = Run(tmp_path / str(number), program)
        try:
            reach(run, phase if phase != "start-up" else "attach", lengths, share)
            held, pid = held_in_kernel(recorder_of(run.tracer)), int(run.manifest()["target"]["pid"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            said = run.tracer.communicate(timeout=PATIENCE_S)[1]
            assert "Traceback" not in said
            assert run.manifest()["state"] == "complete"
            assert run.manifest()["target"]["exit_code"] in (-signal.SIGKILL, *((None,) if phase == "end" else ()))
            assert wait_until(lambda held=held: not still_in_kernel(held)), (phase, share, still_in_kernel(held))
            check_readable(run.recording)
        finally:
            run.close()


def test_the_hits_of_200_threads_are_counted_each(tmp_path: Path) -> None:
    program = compile_c(tmp_path / "stress", "stress.c", flags=WITH_SITES)
    options = ("--no-views", "--levels", "expert", "--ring-mib", "64", "-o", str(tmp_path / "run"))
    done = trace("run", *options, "--", str(program), "0.05", str(MANY))  # what that makes fits into the ring
    run = RawRecording(tmp_path / "run")
    counts = collections.Counter(run.records("evict")["tid"].tolist())
    assert len(counts) == MANY
    assert sum(counts.values()) + run.manifest["lost"].get("evict", 0) == json.loads(done.stdout)["hits"]
    assert (
        next(row["hits"] for row in run.manifest["probes"] if row["program"] == "moescope_evict")
        == json.loads(done.stdout)["hits"]
    )


@pytest.mark.long
def test_three_tracers_of_one_target_see_every_step_and_leave_it_alone(tmp_path: Path) -> None:
    end = tmp_path / "end"
    command = [sys.executable, STEPS_PROGRAM, "100000", "0.005", "--until", str(end)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True) as target:
        assert wait_until(lambda: "_probes" in Path(f"/proc/{target.pid}/maps").read_text())
        folders = [tmp_path / str(number) for number in range(3)]
        options = ("--no-views", "--levels", "token", "--pid", str(target.pid))
        tracers = [begin_trace("attach", *options, "-o", str(folder)) for folder in folders]
        for folder, tracer in zip(folders, tracers, strict=True):
            recorded_when(lambda run: len(run.records("token_end")) > 20, folder, tracer)
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)
        said = [tracer.communicate(timeout=PATIENCE_S)[1] for tracer in tracers]
        assert [tracer.returncode for tracer in tracers] == [0, 0, 0], said
        end.touch()
        assert target.communicate(timeout=PATIENCE_S)[0].startswith("done ") and target.returncode == 0
    seen = [RawRecording(folder).records("token_end") for folder in folders]
    for rows in seen:
        np.testing.assert_array_equal(rows["seq"], np.arange(rows["seq"][0], rows["seq"][0] + len(rows)))
    assert max(rows["ts"].min() for rows in seen) < min(rows["ts"].max() for rows in seen), "they did not overlap"


def test_a_library_loaded_and_dropped_again_and_again_has_every_call_counted(tmp_path: Path) -> None:
    named = compile_c(tmp_path / "libnamed.so", "named.c", flags=("-shared", "-fPIC", "-fno-ipa-ra", "-Wno-error"))
    program, declared = compile_c(tmp_path / "reload", "reload.c", flags=("-ldl",)), tmp_path / "my.toml"
    declared.write_text(f'[[function]]\nlibrary = "{named}"\nsymbol = "work_other"\nargs = {{ result = "s32 return" }}\n')
    options = ("--no-views", "--levels", "operator", "--probes", str(declared), "-o", str(tmp_path / "run"))
    done = trace("run", *options, "--", str(program), str(named), str(RELOADS), str(CALLS), timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == RELOADS * CALLS
    run = RawRecording(tmp_path / "run")
    assert run.manifest["lost"] == {}
    assert len(run.records("call_begin")) == len(run.records("call_end")) == RELOADS * CALLS
