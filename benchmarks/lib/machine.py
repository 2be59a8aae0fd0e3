"""The machine that a benchmark runs on."""

from pathlib import Path

from benchmarks.lib.results import Machine
from tracer.recording.machine import describe_machine

X86 = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")


def instruction_sets() -> list[str]:
    """Instruction sets of this CPU that matter to kernels."""
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(value.split())
            break
    return [name for name in (*X86, *ARM) if name in flags]


def this_machine() -> Machine:
    """This machine."""
    about = describe_machine()
    names = ("cpu_model", "cpus", "arch", "kernel", "os", "memory_bytes")
    return Machine(features=instruction_sets(), **{name: about[name] for name in names})
