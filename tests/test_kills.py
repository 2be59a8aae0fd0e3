"""What dies last leaves nothing: the recorder, the planner, the target or the connection is killed at random moments of `--on`.

`make test-long` kills each 25 times. The table that is printed says what was left each time.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import LONG, wait_until
from tests.test_on_device import Remote, recorder_of
from tests.test_recorder import SITES, processes
from tests.test_tracer_series import changed_code, cpu_ticks, state_of
from tracer.remote.device import PATIENCE_S as KEEPER_S
from workloads.kernel_objects import Held, held_in_kernel, still_in_kernel
from workloads.raw_records import RawRecording

pytestmark = [pytest.mark.long, pytest.mark.needs("probes", "recorder")]
KILLS = 25 if LONG else 2
LATEST_S = 5.0
"""The last moment after the begin; examining the machine takes one second, and so does what is short of a recording."""
PATIENCE_S = 120.0


@dataclass
class Victim:
    """A recording over `exec:`, whose parts are killed."""

    remote: Remote
    there: Path
    """The machine's folder for temporary files, as it is seen here."""

    def place(self) -> str:
        """Our folder on the machine; empty before there is a job."""
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads((self.remote.folder / "remote.json").read_text())["folder"])
        return ""

    def recorder(self) -> int:
        """The recorder's process; 0 while there is none."""
        return recorder_of(self.place()) if self.place() else 0

    def target(self) -> int:
        """The target's process; 0 before it was let go."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = self.there / Path(self.place()).name / "recording" / "manifest.json"
            pid = int(json.loads(manifest.read_text())["target"]["pid"])
            return pid if "python" in os.readlink(f"/proc/{pid}/exe") else 0
        return 0

    def connections(self) -> list[int]:
        """The processes through which the host reaches the machine."""
        host = self.remote.process.pid
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{host}/task").glob("*/children")
            return [int(pid) for task in tasks for pid in task.read_text().split()]
        return []

    def kill(self, who: str) -> bool:
        """Kill a part, if it runs."""
        host = self.remote.process
        pids = {"planner": [host.pid], "connection": self.connections()}.get(who) or [
            self.recorder() if who == "recorder" else self.target()
        ]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return any(pids)


def outcome(victim: Victim, who: str, target: int) -> str:
    """What became of the recording once the target was told to end: its state, as fetched by the same command if need be."""
    remote = victim.remote
    if who != "target" and target:
        before = cpu_ticks(target)
        assert wait_until(lambda: cpu_ticks(target) > before), state_of(target)
    if who == "recorder" and target:
        assert wait_until(lambda: not changed_code(target, SITES.parent))
    remote.end.touch()
    if who == "planner":
        remote.process.wait()
        remote.begin()
    remote.process.wait(PATIENCE_S)
    if target:
        assert wait_until(lambda: state_of(target) in ("", "Z"))
    if not (remote.folder / "manifest.json").exists():
        return "none"
    run = RawRecording(remote.folder)
    steps = run.records("token_end")["seq"].tolist()
    assert run.is_whole and steps == list(range(len(steps)))
    return str(run.manifest["state"])


@pytest.mark.parametrize("who", ["recorder", "planner", "target", "connection"])
def test_killed_at_a_random_moment_it_leaves_nothing_in_the_kernel_and_a_readable_recording(
    device: Path, tmp_path: Path, who: str
) -> None:
    draw, seen = random.Random(who), Counter[str]()
    for number in range(KILLS):
        (tmp_path / str(number)).mkdir()
        victim = Victim(Remote(f"exec:{device}", tmp_path / str(number)), device.with_name("device"))
        try:
            time.sleep(draw.uniform(0.2, LATEST_S))
            parts = {"recorder": victim.recorder, "target": victim.target, "connection": victim.connections}
            assert wait_until(parts.get(who, lambda: True)), victim.remote.said.read_text()
            held, target, place = held_in_kernel(victim.recorder()), victim.target(), victim.place()
            seen["killed"] += victim.kill(who)
            seen["while programs were loaded"] += bool(held)
            seen["while the target ran"] += bool(target)
            seen[f"recording {outcome(victim, who, target)}"] += 1
            check_nothing_left(held, place)
        finally:
            victim.remote.end.touch()
            victim.remote.process.kill()
            victim.remote.process.wait()
    print(f"{who}: {dict(seen)}")
    there = device.with_name("device")
    assert wait_until(lambda: not os.listdir(there), PATIENCE_S + KEEPER_S), [str(path) for path in there.rglob("*")]
    assert seen["killed"] >= KILLS * 0.8


def check_nothing_left(held: Held, place: str) -> None:
    """Neither a process, nor what the recorder held in the kernel."""
    assert not place or wait_until(lambda: not processes(Path(place) / "recording")), processes(Path(place) / "recording")
    assert wait_until(lambda: not still_in_kernel(held)), still_in_kernel(held)
