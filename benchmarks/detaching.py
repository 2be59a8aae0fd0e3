"""Time to attach and remove a set of probes: perf events and uprobe_multi links, one by one and together.

    sudo python -m benchmarks.detaching [--rounds 3]

Probes the runtime's sites while no process executes them.
"""

import os
import time
from collections.abc import Callable
from itertools import product

import numpy as np

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes
from tracer.kernel.trial import features
from tracer.probes.elf import read_binary
from workloads import ROOT
from workloads.uprobes import attach_uprobe, detach_all, empty_program, multi_link

LIBRARY = str(ROOT / "runtime" / "telemetry" / "_probes.so")
Site = tuple[int, str, int]


def in_turn(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def time_attachments(
    sites: list[Site], attach_one: Callable[[int, str, int], int], close: Callable[[list[int]], None]
) -> tuple[float, float]:
    began = time.monotonic()
    fds = [attach_one(*site) for site in sites]
    middle = time.monotonic()
    close(fds)
    return middle - began, time.monotonic() - middle


def main() -> None:
    args = make_parser(__doc__, rounds=3).parse_args()
    report, offsets = Report("detaching", args), sorted(read_binary(LIBRARY).usdt.values())
    attachers: dict[str, tuple[bool, Callable[[int, str, int], int]]] = {"perf events": (False, attach_uprobe)}
    attachers |= {"links": (True, multi_link)} if features()["uprobe_multi"] else {}
    closers = {"in turn": in_turn, "at once": detach_all}
    for (kind, (multi, attacher)), (how, closer) in product(attachers.items(), closers.items()):
        program = empty_program(multi)
        sites = [(program, LIBRARY, offset) for offset in offsets]
        times = 1000 * np.array([time_attachments(sites, attacher, closer) for _ in range(args.rounds)])
        for what, column in zip(("place", "remove"), times.T, strict=True):
            report.add(f"{what} {len(sites)} probes, {kind}, {how}", "ms", extremes(column))
        os.close(program)
    report.finish()


if __name__ == "__main__":
    main()
