"""Compiles BPF objects like the build, for both architectures, and checks the rule on backward jumps of kernels before 6.7.

python -m workloads.bpf_objects        both architectures, both buffers; exit code 1 if a program breaks the rule
"""

import itertools
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

JUMP, JUMP32 = 5, 6  # instruction classes
ALWAYS, CALL, EXIT = 0x05, 0x85, 0x95
PSEUDO_CALL = 1
BEHIND_THE_PROGRAM = -1
"""What an object has in place of the distance to a function of its own, which the loader appends: no edge goes back."""
SOURCE = Path(__file__).resolve().parents[1] / "bpf" / "moescope.bpf.c"
BUFFERS = {"ring": (), "perf": ("-DBUFFER_PERF",)}
ARCHITECTURES = ("x86", "arm64")


def compile_object(source: Path, output: Path, arch: str, *flags: str) -> Path:
    """Compile an object for `x86` or `arm64`; raises FileNotFoundError without clang."""
    include = f"-I/usr/include/{platform.machine()}-linux-gnu"
    command = ["clang", "-O2", "-g", "-Wall", "-Werror", "-target", "bpf", f"-D__TARGET_ARCH_{arch}", include, *flags]
    subprocess.run([*command, "-c", str(source), "-o", str(output)], check=True)
    return output


def programs_of(path: Path) -> dict[str, bytes]:
    """Program, or function that some call → its instructions."""
    with open(path, "rb") as file:
        elf = ELFFile(file)
        tables = [section for section in elf.iter_sections() if isinstance(section, SymbolTableSection)]
        functions = [s for table in tables for s in table.iter_symbols() if s["st_info"]["type"] == "STT_FUNC"]
        programs = {}
        for symbol in functions:
            code = elf.get_section(symbol["st_shndx"]).data()
            programs[symbol.name] = code[symbol["st_value"] : symbol["st_value"] + symbol["st_size"]]
        return programs


def jump_targets(code: list[tuple[int, int, int, int]], at: int) -> list[tuple[int, bool]]:
    """(instruction, whether an edge to it may close a loop: old kernels allow it for jumps only), in these kernels' order."""
    operation, registers, offset, number = code[at]
    if operation == EXIT:
        return []
    if operation == CALL:
        called = [(at + number + 1, False)] if registers >> 4 == PSEUDO_CALL and number != BEHIND_THE_PROGRAM else []
        return [(at + 1, False), *called]
    if operation == ALWAYS:
        return [(at + offset + 1, True)]
    if operation & 7 in (JUMP, JUMP32):
        return [(at + 1, True), (at + offset + 1, True)]
    return [(at + 1, False)]


def back_edge(instructions: bytes) -> tuple[int, int] | None:
    """The first edge (from, to) for which kernels before 6.7 reject a program: one that closes a loop without a jump.

    Linux 6.7 ended this rule with "bpf: fix control-flow graph checking in privileged mode" (10e14e9652bf).
    """
    code = list(struct.iter_unpack("<BBhi", instructions))
    walking, done, path = {0}, set(), [(0, iter(jump_targets(code, 0)))]
    while path:
        at, following = path[-1]
        for to, may_loop in following:
            if to in walking and not may_loop:
                return at, to
            if to not in walking and to not in done:
                walking.add(to)
                path.append((to, iter(jump_targets(code, to))))
                break
        else:
            path.pop()
            walking.discard(at)
            done.add(at)
    return None


def broken_programs(path: Path) -> list[str]:
    """The programs of an object that break the rule, each with the offending edge."""
    edges = {name: back_edge(code) for name, code in programs_of(path).items()}
    return [f"{name}: instruction {edge[0]} leads back to {edge[1]} without a jump" for name, edge in edges.items() if edge]


def main() -> int:
    """Compile and check; prints a line for each object and for each program that breaks the rule."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch, (buffer, flags) in itertools.product(ARCHITECTURES, BUFFERS.items()):
            compiled = compile_object(SOURCE, Path(folder) / "object.o", arch, *flags)
            lines = broken_programs(compiled)
            checked = len(programs_of(compiled))
            print(f"jumps back, {arch}, {buffer}: {checked} programs, {len(lines)} break the rule of Linux before 6.7")
            print(*lines, sep="\n", end="\n" if lines else "")
            wrong += len(lines)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
