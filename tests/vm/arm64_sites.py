"""What this kernel does with each arm64 instruction under a probe, beside its class in tracer/probes/placement.py.

    python -m tests.vm.arm64_sites LIBRARY       (tests/vm/arm64_sites.c, compiled)

Registering on a file that nobody maps always succeeds, so the library is mapped first; results with a probe must be those
without. Only the refused may differ: a kernel may well take what this project never probes.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable

from tracer.probes.elf import Binary, read_binary
from tracer.probes.placement import REFUSED, arm64_class
from workloads.uprobes import enable_event, perf_event

ARGUMENTS = 41, 1


def outcome(path: str, offset: int, function: Callable[..., int]) -> str:
    """What comes of a probe: `stands`, or what is wrong."""
    bare = function(*ARGUMENTS)
    try:
        fd = perf_event(path, offset)
    except OSError:
        return REFUSED
    enable_event(fd)
    probed = function(*ARGUMENTS)
    hits = struct.unpack("<Q", os.read(fd, 8))[0]
    os.close(fd)
    return "stands" if (hits, probed) == (1, bare) else f"{hits} hits, result {probed:#x} for {bare:#x}"


def function_of(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    """A function of the library: long f(long, long)."""
    function = getattr(library, f"f_{name}")
    function.restype, function.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_long]
    answer: Callable[..., int] = function
    return answer


def site(binary: Binary, name: str) -> int:
    """Where the instruction to probe stands."""
    offset = binary.symbol(f"s_{name}")
    assert offset is not None
    return offset


def main() -> int:
    """A line for each instruction; 1 where one that counts as probeable is not."""
    os.sched_setaffinity(0, {0})  # perf counts what CPU 0 hits
    path = os.path.realpath(sys.argv[1])
    binary, library, wrong = read_binary(path), ctypes.CDLL(path), []
    names = sorted(name[2:] for name in binary.functions(lambda name: name.startswith("s_")).values())
    for name in names:
        offset = site(binary, name)
        cost = arm64_class(int.from_bytes(binary.bytes_at(offset, 4), "little"))
        # refused classes are left alone: an instruction that some kernel oopses on is among them
        result = "not tried" if cost == REFUSED else outcome(path, offset, function_of(library, name))
        print(f"{name:12} {cost:9} {result}", flush=True)
        wrong += [name] if result not in ("stands", "not tried") else []
    print(f"{len(names)} instructions, wrong: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
