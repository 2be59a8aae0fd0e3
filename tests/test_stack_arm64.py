"""Stacks of arm64 programs are unwound on any machine, with signed return addresses too, as the program's backtrace() says."""

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzer.stacks.unwinding import PROGRAM, SAMPLE
from tests.conftest import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS = {
    "plain": [],
    "signed": ["-mbranch-protection=standard"],
    "signed, without frame pointers": ["-mbranch-protection=standard", "-fomit-frame-pointer"],
    "frame pointers alone": ["-fno-asynchronous-unwind-tables", "-fno-unwind-tables"],
}
CLOCK_ID, PID, TIME_NS = 77, 4242, 1_000_000
LAYOUT = ("2", "440")
"""Format of `stacks.bin`, and bytes before the stack in a copy."""
MMAP2, SAMPLED, EXECUTABLE = 10, 9, 1
pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR) and PROGRAM.exists()),
    reason="needs an arm64 compiler, QEMU, the unwinder",
)


def code_segment(program: Path) -> tuple[int, int, int]:
    """(address, bytes, offset) of a 64-bit ELF file's executable segment."""
    data = program.read_bytes()
    at, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    rows = [struct.unpack_from("<IIQQQQQQ", data, at + i * size) for i in range(count)]
    return next((row[3], row[6], row[2]) for row in rows if row[0] == 1 and row[1] & EXECUTABLE)


def record(kind: int, body: bytes) -> bytes:
    """A perf record of whole words."""
    return struct.pack("<IHH", kind, 2, 8 + len(body)) + body


def recording_of(program: Path, said: dict[str, Any]) -> bytes:
    """The records that a kernel would have written: the program's mapping and one sample."""
    address, size, offset = code_segment(program)
    path = str(program).encode()
    path += bytes(8 - len(path) % 8)
    mapping = struct.pack("<IIQQQIIQQII", PID, PID, address, size, offset, 0, 0, 0, 0, 5, 2) + path
    mapping += struct.pack("<IIQQ", PID, PID, TIME_NS - 1, CLOCK_ID)
    stack = bytes.fromhex(said["stack"])
    sample = struct.pack("<QIIQQ", CLOCK_ID, PID, PID, TIME_NS, 0)
    sample += struct.pack("<Q33QQ", 2, *said["registers"], len(stack)) + stack + bytes(8)
    return record(MMAP2, mapping) + record(SAMPLED, sample)


@pytest.mark.parametrize("flags", FLAGS)
def test_a_stack_of_arm64_is_what_backtrace_gave(flags: str, tmp_path: Path) -> None:
    program, source = tmp_path / "dump", ROOT / "workloads" / "programs" / "stack_dump.c"
    words = ["-O2", "-static"]
    subprocess.run([COMPILER, *words, *FLAGS[flags], "-o", program, source], check=True)
    said = json.loads(subprocess.run([EMULATOR, "-cpu", "max", program], check=True, capture_output=True, text=True).stdout)
    (tmp_path / "stacks.bin").write_bytes(recording_of(program, said))
    command: list[str | Path] = [PROGRAM, tmp_path / "stacks.bin", *LAYOUT, "aarch64", str(CLOCK_ID), tmp_path, tmp_path / "out"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    frames = [json.loads(line) for line in (tmp_path / "out.frames").read_text().splitlines()]
    stack = [frames[number] for number in np.fromfile(tmp_path / "out.stacks", "<u8")[1:].tolist()]
    names = [frame.get("function") for frame in stack]
    assert np.fromfile(tmp_path / "out.samples", SAMPLE)["end"].tolist() == [0], names
    assert names[:3] == ["dump", "variable", "deeper"] and names.count("deeper") == 13 and "main" in names
    if flags == "frame pointers alone":
        assert {frame.get("found_by") for frame in stack[1:16]} == {"frame pointer"}
    else:
        assert [frame["address"] for frame in stack[1:]] == [address - 1 for address in said["frames"][1:]]
