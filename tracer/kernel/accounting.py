"""Cost of the BPF programs: the kernel side counts every run; time per run is sampled in short windows.

The kernel can time every run, but that costs more than some of the programs themselves.
"""

import os
import struct
import time

import numpy as np

from tracer.kernel.definitions import program_numbers
from tracer.kernel.libbpf import Kernel
from tracer.kernel.loaders import LibbpfLoader

FIRST_WINDOW_S, WINDOW_S = 0.3, 0.05
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 16.0  # between windows: each wakes the tracer twice, and the first are the most informative


def possible_cpus() -> int:
    """Number of CPUs for which per-CPU maps hold values."""
    with open("/sys/devices/system/cpu/possible") as file:
        return int(file.read().strip().replace(",", "-").split("-")[-1]) + 1


class Accounting:
    """Number of runs of every program, and the time spent in it."""

    def __init__(self, kernel: Kernel, loader: LibbpfLoader):
        self.kernel, self.loader = kernel, loader
        self.numbers, self.cpus = program_numbers(), possible_cpus()
        self._window, self._pause = kernel.enable_stats(), FIRST_PAUSE_S
        self._closes = time.monotonic() + FIRST_WINDOW_S

    def due(self) -> float:
        """When to close the open window (time.monotonic); infinity if none is open."""
        return self._closes if self._window >= 0 else float("inf")

    def turn(self) -> None:
        """Open or close the window if it is due."""
        now = time.monotonic()
        if self._window >= 0 and now >= self._closes:
            self.close()
            self._closes, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE_S)
        elif self._window < 0 and now >= self._closes:
            self._window, self._closes = self.kernel.enable_stats(), now + WINDOW_S

    def runs(self, program: str) -> int:
        """How often a program ran: on the target's threads if it is attached to a uprobe, otherwise on all threads."""
        raw = self.kernel.lookup(self.loader.map_fd("runs"), struct.pack("<I", self.numbers[program]), 8 * self.cpus)
        return int(np.frombuffer(raw, "<u8").sum())

    def of(self, program: str) -> tuple[int, int, int]:
        """(exact number of runs, ns in them extrapolated from the windows, events that the kernel kept from the program)."""
        timed, inside, skipped = self.kernel.program_stats(self.loader.program_fd(program))
        runs = self.runs(program)
        return runs, round(runs * inside / timed) if timed else 0, skipped

    def close(self) -> None:
        """Close the window."""
        if self._window >= 0:
            os.close(self._window)
            self._window = -1
