"""The BPF programs of both architectures keep the rule about jumps back that kernels before 6.7 have."""

import shutil
import struct
from pathlib import Path

import pytest

from workloads import bpf_objects
from workloads.bpf_objects import back_edge, broken_programs, compile_object

needs_clang = pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")

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


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    """An object with one program whose loop is entered in its middle."""
    code = "\t.text\n\t.globl looping\n\t.type looping,@function\nlooping:\n\tr0 = 0\n\tgoto inner\nhead:\n\tr0 += 1\n"
    code += "inner:\n\tif r0 < 8 goto head\n\texit\n\t.size looping, .-looping\n"
    (tmp_path / "loop.s").write_text(code)
    return compile_object(tmp_path / "loop.s", tmp_path / "loop.o", "x86", "-Wno-unused-command-line-argument")


@needs_clang
def test_an_object_that_breaks_the_rule_is_found_with_the_program(refused: Path) -> None:
    assert broken_programs(refused) == ["looping: instruction 2 leads back to 3 without a jump"]


@needs_clang
def test_lint_fails_for_an_object_that_breaks_the_rule(
    refused: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bpf_objects, "compile_object", lambda *_: refused)
    assert bpf_objects.main() == 1
    assert "looping: instruction 2" in capsys.readouterr().out


@pytest.mark.long
@needs_clang
def test_no_program_has_a_jump_back_that_old_kernels_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert bpf_objects.main() == 0
    counts = [int(line.split(": ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(counts) == 4 and min(counts) > 100
