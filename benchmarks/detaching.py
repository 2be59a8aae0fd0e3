"""What it costs to place and to remove a set of probes: perf events one by one and at once, and uprobe_multi links.

    sudo python -m benchmarks.detaching [--repeats 3]

Probes the runtime's sites while no process runs them. A uprobe_multi link (kernel 6.6 and later) holds one program at many
places of a file; `one link` is the set as one, `links` one link for each place, as different programs would need.
"""

import argparse
import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tracer.elf import read_binary
from tracer.libbpf import BpfObject, Kernel
from tracer.paths import BPF_OBJECT
from tracer.perf_events import attach_uprobe

BPF_LINK_CREATE, TRACE_UPROBE_MULTI = 28, 48
BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
LIBRARY = str(Path(__file__).resolve().parent.parent / "runtime" / "_probes.so")

libc = ctypes.CDLL(None, use_errno=True)


class UprobeMulti(ctypes.Structure):
    """The part of union bpf_attr that BPF_LINK_CREATE reads for uprobe_multi."""

    _fields_ = [
        ("prog_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("path", ctypes.c_char_p),
        ("offsets", ctypes.c_void_p),
        ("ref_ctr_offsets", ctypes.c_void_p),
        ("cookies", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("multi_flags", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    ]


def program(kernel: Kernel, multi: bool) -> tuple[BpfObject, int]:
    """An empty program, loaded for one way of attaching or the other."""
    opened = BpfObject(kernel, BPF_OBJECT)
    for ring in ("events", "details"):
        opened.resize_map(ring, 1 << 16)
    if multi:
        kernel.lib.bpf_program__set_expected_attach_type(ctypes.c_void_p(opened.programs["empty"]), TRACE_UPROBE_MULTI)
    opened.load({"empty"})
    return opened, opened.program_fd("empty")


def multi_link(program_fd: int, path: str, offsets: list[int]) -> int:
    """One link that holds a program at many places; raises OSError where the kernel cannot."""
    array = (ctypes.c_uint64 * len(offsets))(*offsets)
    attributes = UprobeMulti(
        program_fd, 0, TRACE_UPROBE_MULTI, 0, path.encode(), ctypes.addressof(array), None, None, len(offsets), 0, 0, 0
    )
    size = ctypes.sizeof(attributes)
    fd = libc.syscall(BPF_SYSCALL[platform.machine()], BPF_LINK_CREATE, ctypes.byref(attributes), size)
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"BPF_LINK_CREATE: {os.strerror(ctypes.get_errno())}")
    return int(fd)


def in_turn(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def at_once(fds: list[int]) -> None:
    with ThreadPoolExecutor(len(fds)) as pool:
        list(pool.map(os.close, fds))


def timed(attach: Callable[[], list[int]], detach: Callable[[list[int]], None]) -> tuple[float, float]:
    began = time.monotonic()
    fds = attach()
    middle = time.monotonic()
    detach(fds)
    return middle - began, time.monotonic() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    kernel, offsets = Kernel(), sorted(read_binary(LIBRARY).usdt.values())
    perf_object, perf = program(kernel, False)
    multi_object, multi = program(kernel, True)
    cases: dict[str, tuple[Callable[[], list[int]], Callable[[list[int]], None]]] = {
        "perf events, in turn": (lambda: [attach_uprobe(perf, LIBRARY, offset, False) for offset in offsets], in_turn),
        "perf events, at once": (lambda: [attach_uprobe(perf, LIBRARY, offset, False) for offset in offsets], at_once),
        "links, in turn": (lambda: [multi_link(multi, LIBRARY, [offset]) for offset in offsets], in_turn),
        "links, at once": (lambda: [multi_link(multi, LIBRARY, [offset]) for offset in offsets], at_once),
        "one link": (lambda: [multi_link(multi, LIBRARY, offsets)], in_turn),
    }
    print(f"{len(offsets)} probes, medians of {args.repeats}")
    for name, case in cases.items():
        times = [timed(*case) for _ in range(args.repeats)]
        attach, detach = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:22} attach {attach:8.1f} ms   detach {detach:8.1f} ms")
    for opened in (perf_object, multi_object):
        opened.close()


if __name__ == "__main__":
    main()
