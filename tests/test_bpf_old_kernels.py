"""The BPF programs of both architectures keep the rule about jumps back that kernels before 6.7 have."""

import struct
from pathlib import Path

import pytest

from tests.bpf_objects import back_edge, compile_object, programs_of
from tests.conftest import ROOT

MOVE, ADD, ALWAYS, LESS, EXIT = 0xB7, 0x07, 0x05, 0xA5, 0x95


def program(*rows: tuple[int, int, int]) -> bytes:
    """Instructions from (operation, offset, number)."""
    return b"".join(struct.pack("<BBhi", operation, 0, offset, number) for operation, offset, number in rows)


def test_a_loop_that_a_jump_closes_is_allowed() -> None:
    assert back_edge(program((MOVE, 0, 0), (ADD, 0, 1), (LESS, -2, 8), (EXIT, 0, 0))) is None


def test_a_loop_that_is_entered_in_its_middle_and_closed_by_falling_through_is_refused() -> None:
    # 1 jumps over 2 into the loop 2..3, whose jump at 3 leads to 2, from where it falls through to 3, which is being walked
    loop = program((MOVE, 0, 0), (ALWAYS, 1, 0), (ADD, 0, 1), (LESS, -2, 8), (EXIT, 0, 0))
    assert back_edge(loop) == (2, 3)


@pytest.mark.parametrize("buffer", ["ring", "perf"])
@pytest.mark.parametrize("arch", ["x86", "arm64"])
def test_no_program_has_a_jump_back_that_old_kernels_refuse(arch: str, buffer: str, tmp_path: Path) -> None:
    flags = ("-DBUFFER_PERF",) if buffer == "perf" else ()
    compiled = compile_object(ROOT / "bpf" / "moescope.bpf.c", tmp_path / "moescope.bpf.o", arch, *flags)
    programs = programs_of(compiled)
    assert len(programs) > 100
    assert {name: edge for name, code in programs.items() if (edge := back_edge(code))} == {}
