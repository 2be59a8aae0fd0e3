"""What it costs to place and to remove a set of probes: by perf events, and by uprobe_multi links; in turn and at once.

    sudo python -m benchmarks.detaching [--repeats 3]

Probes the runtime's sites while no process runs them.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

from tracer.kernel.libbpf import BpfObject, Kernel
from tracer.probes.elf import read_binary
from tracer.probes.perf_events import connect
from tracer.probes.uprobes import detach, has_multi_links, multi_link, perf_event
from tracer.recording.paths import BPF_OBJECT

LIBRARY = str(Path(__file__).resolve().parent.parent / "runtime" / "telemetry" / "_probes.so")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    offsets = sorted(read_binary(LIBRARY).usdt.values())
    opened = BpfObject(Kernel(), BPF_OBJECT)
    for ring in ("events", "details"):
        opened.resize_map(ring, 1 << 16)
    opened.load({"empty"})
    program = opened.program_fd("empty")
    attachers = {"perf events": attach_event} | ({"links": attach_link} if has_multi_links() else {})
    closers = {"in turn": in_turn, "at once": detach}
    print(f"{len(offsets)} probes, medians of {args.repeats}")
    for (by, attacher), (how, closer) in product(attachers.items(), closers.items()):
        times = [timed([(program, LIBRARY, offset) for offset in offsets], attacher, closer) for _ in range(args.repeats)]
        placing, removing = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        print(f"{by + ', ' + how:22} attach {placing:8.1f} ms   detach {removing:8.1f} ms")
    opened.close()


if __name__ == "__main__":
    main()
