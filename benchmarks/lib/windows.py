"""Windows of time with and without probes on a running process, and the slowdown by the probes."""

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.decoding import Engine
from benchmarks.lib.spread import Spread, bootstrap
from tracer.commands.options import add_options, session_options
from tracer.session import Session
from tracer.target.process import Followed
from workloads.host_time import MOST_STOLEN, HostTime

LEARN_S = 20.0
"""Maximum seconds for the tracer to place its probes."""


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


def window(seconds: float) -> Window:
    """Wait; returns the window."""
    begin, cpu, host = time.monotonic_ns(), time.process_time_ns(), HostTime()
    time.sleep(seconds)
    return Window(begin, time.monotonic_ns(), time.process_time_ns() - cpu, host.share())


@contextlib.contextmanager
def recording(engine: Engine, words: str, folder: Path) -> Iterator[Session]:
    """A session that follows the engine in a separate thread, once its probes are in place."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = session_options(parser.parse_args([*words.split(), "--no-views", "-o", str(folder)]))
    with Session(options) as session:
        session.load()
        session.follow(Followed(engine.process.pid))
        running = threading.Thread(target=session.run, args=(lambda _: None,))
        running.start()
        try:
            until = time.monotonic() + LEARN_S
            while "operator" in options.levels and session.watcher.is_learning() and time.monotonic() < until:
                time.sleep(0.1)
            yield session
        finally:
            session.stop_requested = True
            running.join()
            session.finish()


def times(tokens: np.ndarray, *windows: Window) -> np.ndarray:
    """Durations, ns, of the tokens within one of the windows, without each window's first, which records structure again."""
    inside = [np.flatnonzero((tokens[:, 0] >= window.begin) & (tokens[:, 1] <= window.end))[1:] for window in windows]
    return (tokens[:, 1] - tokens[:, 0])[np.concatenate(inside)]


@dataclass(frozen=True)
class Slowdown:
    """The cost of probes: spread of (ratio - 1) over rounds; number of omitted rounds; the tracer's share of a core."""

    spread: Spread
    left_out: int
    tracer_cpu: float


def slowdown(blocks: list[Block], tokens: np.ndarray) -> Slowdown:
    """The slowdown of windows with probes relative to those before and after, without rounds in which the host took too much."""
    rounds, cpu = [], []
    for block in blocks:
        for around in zip(block.windows[:-2:2], block.windows[1::2], block.windows[2::2], strict=True):
            inside = [times(tokens, window) for window in around]
            if all(map(len, inside)):
                before, during, behind = (float(block.middle(each)) for each in inside)
                rounds.append(((during / before, during / behind), max(window.stolen for window in around)))
            cpu.append(around[1].cpu_ns / (around[1].end - around[1].begin))
    if not rounds:
        sys.exit(TOO_SLOW)
    ratios = [pair for pair, stolen in rounds if stolen <= MOST_STOLEN] or [pair for pair, _ in rounds]
    return Slowdown(bootstrap(np.array(ratios) - 1), len(rounds) - len(ratios), float(np.mean(cpu)))
