"""Time to attach and remove a set of probes: perf events and uprobe_multi links, one by one and together.

    sudo python -m benchmarks.detaching [--rounds 3]

Probes the runtime's sites while no process executes them.
"""

import os
import time
from collections.abc import Callable
from itertools import product

import numpy as np

from benchmarks.lib.report import Report, arguments
from benchmarks.lib.spread import extremes
from tracer.kernel.libbpf import BpfObject, Kernel
from tracer.probes.elf import read_binary
from tracer.probes.perf_events import connect
from tracer.probes.uprobes import detach, has_multi_links, multi_link, perf_event
from tracer.recording.paths import BPF_OBJECT
from workloads import ROOT

LIBRARY = str(ROOT / "runtime" / "telemetry" / "_probes.so")
Site = tuple[int, str, int]


def attach_event(program_fd: int, path: str, offset: int) -> int:
    return connect(perf_event(path, offset, False), program_fd, path)


def attach_link(program_fd: int, path: str, offset: int) -> int:
    return multi_link(program_fd, path, offset, False, 0)


def in_turn(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def timed(sites: list[Site], attach: Callable[[int, str, int], int], close: Callable[[list[int]], None]) -> tuple[float, float]:
    began = time.monotonic()
    fds = [attach(*site) for site in sites]
    middle = time.monotonic()
    close(fds)
    return middle - began, time.monotonic() - middle


def main() -> None:
    args = arguments(__doc__, rounds=3).parse_args()
    report, offsets = Report("detaching", args), sorted(read_binary(LIBRARY).usdt.values())
    opened = BpfObject(Kernel(), BPF_OBJECT)
    for ring in ("events", "details"):
        opened.resize_map(ring, 1 << 16)
    opened.load({"empty"})
    sites: list[Site] = [(opened.program_fd("empty"), LIBRARY, offset) for offset in offsets]
    attachers = {"perf events": attach_event} | ({"links": attach_link} if has_multi_links() else {})
    closers = {"in turn": in_turn, "at once": detach}
    for (kind, attacher), (how, closer) in product(attachers.items(), closers.items()):
        times = 1000 * np.array([timed(sites, attacher, closer) for _ in range(args.rounds)])
        for what, column in zip(("place", "remove"), times.T, strict=True):
            report.add(f"{what} {len(sites)} probes, {kind}, {how}", "ms", extremes(column))
    opened.close()
    report.finish()


if __name__ == "__main__":
    main()
