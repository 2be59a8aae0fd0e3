"""Windows of time with and without probes on a running process, and the slowdown by the probes."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.decoding import Engine
from benchmarks.lib.spread import Spread, bootstrap
from tracer.engines import all_engines
from workloads import ROOT
from workloads.host_time import MOST_STOLEN, HostTime
from workloads.kernel_objects import recorder_of

LEARN_S = 20.0
"""Maximum seconds for the tracer to place its probes."""
SETTLED = 0, 1
"""Exit codes of a recording that ended by itself; 1: records were lost, which its manifest counts."""


TOO_SLOW = "the process was too slow: no round has two tokens in each of its windows; give more --seconds"


@dataclass
class Window:
    """A time range, ns, with or without probes, the tracer's CPU time in it, and the host's share of the CPUs."""

    begin: int
    end: int
    cpu_ns: int = 0
    stolen: float = 0.0


@dataclass
class Block:
    """Windows without probes at even indexes and with probes at odd ones, and the slowdown according to the tracer.

    middle: the statistic of a window's tokens; if probes are switched within a window, only the mean shows the loss.
    kernel: the share of all CPUs' time in programs on the kernel's events.
    """

    windows: list[Window]
    middle: Callable[[np.ndarray], np.floating[Any]] = np.median
    warm: float = float("nan")
    cold: float = float("nan")
    kernel: float = float("nan")
    bytes_per_token: float = float("nan")
    lost: int = 0


@dataclass(frozen=True)
class Tracer:
    """A running `moescope attach`: the planner, and the recorder that it started."""

    planner: subprocess.Popen[str]
    folder: Path

    def cpu_ns(self) -> int:
        """CPU time of both processes so far."""
        return sum(cpu_ns(pid) for pid in (self.planner.pid, recorder_of(self.planner)))

    def is_placed(self) -> bool:
        """Whether the recording has begun, and probes that teach the places of others have been removed."""
        path = self.folder / "manifest.json"
        if not path.exists():
            return False
        teachers = {probe.program for engine in all_engines().values() for probe in engine.probes if probe.teaches}
        rows = json.loads(path.read_text())["probes"]
        return not any(row["program"] in teachers and not row["retired_ns"] for row in rows)


def cpu_ns(pid: int) -> int:
    """CPU time of a process's living threads; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return 0


def wait_window(seconds: float, tracer: Tracer | None = None) -> Window:
    """Wait; returns the window."""
    begin, cpu, host = time.monotonic_ns(), tracer.cpu_ns() if tracer else 0, HostTime()
    time.sleep(seconds)
    return Window(begin, time.monotonic_ns(), tracer.cpu_ns() - cpu if tracer else 0, host.share())


@contextlib.contextmanager
def follow_engine(engine: Engine, words: str, folder: Path) -> Iterator[Tracer]:
    """A tracer that follows the engine, once its probes are in place; afterwards it has ended. Exits if it fails."""
    command = [sys.executable, "-m", "tracer", "attach", *words.split(), "--no-views", "-o", str(folder)]
    planner = subprocess.Popen([*command, "--pid", str(engine.process.pid)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with planner:
        tracer, until = Tracer(planner, folder), time.monotonic() + LEARN_S
        try:
            while planner.poll() is None and not tracer.is_placed() and time.monotonic() < until:
                time.sleep(0.02)
            yield tracer
        finally:
            planner.send_signal(signal.SIGINT)
            said = planner.communicate()[1]
    if planner.returncode not in SETTLED:
        sys.exit(f"the tracer ended with status {planner.returncode}: {said[-2000:]}")


def alternate_windows(
    engine: Engine, words: str, rounds: int, seconds: float, folder: Path, settle_s: float = 0
) -> tuple[list[Window], list[dict[str, Any]]]:
    """Windows without, with, without, with ... without probes, and the manifest of each recording.

    Every window with probes has a recording of its own; it begins `settle_s` after these were placed.
    """
    windows, manifests = [wait_window(seconds)], []
    for _ in range(rounds):
        with follow_engine(engine, words, folder) as tracer:
            time.sleep(settle_s)
            windows.append(wait_window(seconds, tracer))
        manifests.append(json.loads((folder / "manifest.json").read_text()))
        manifests[-1]["written"] = sum(path.stat().st_size for path in folder.glob("*.bin"))
        shutil.rmtree(folder)
        windows.append(wait_window(seconds))
    return windows, manifests


def token_times(tokens: np.ndarray, *windows: Window) -> np.ndarray:
    """Durations, ns, of the tokens within one of the windows, without each window's first, which records structure again."""
    inside = [np.flatnonzero((tokens[:, 0] >= window.begin) & (tokens[:, 1] <= window.end))[1:] for window in windows]
    return (tokens[:, 1] - tokens[:, 0])[np.concatenate(inside)]


@dataclass(frozen=True)
class Slowdown:
    """The cost of probes: spread of (ratio - 1) over rounds; number of omitted rounds; the tracer's share of a core."""

    spread: Spread
    left_out: int
    tracer_cpu: float


def measure_slowdown(blocks: list[Block], tokens: np.ndarray) -> Slowdown:
    """The slowdown of windows with probes relative to those before and after, without rounds in which the host took too much."""
    rounds, cpu = [], []
    for block in blocks:
        for around in zip(block.windows[:-2:2], block.windows[1::2], block.windows[2::2], strict=True):
            inside = [token_times(tokens, window) for window in around]
            if all(map(len, inside)):
                before, during, behind = (float(block.middle(each)) for each in inside)
                rounds.append(((during / before, during / behind), max(window.stolen for window in around)))
            cpu.append(around[1].cpu_ns / (around[1].end - around[1].begin))
    if not rounds:
        sys.exit(TOO_SLOW)
    ratios = [pair for pair, stolen in rounds if stolen <= MOST_STOLEN] or [pair for pair, _ in rounds]
    return Slowdown(bootstrap(np.array(ratios) - 1), len(rounds) - len(ratios), float(np.mean(cpu)))
