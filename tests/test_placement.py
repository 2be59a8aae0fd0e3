"""Probes stand on the cheapest instruction at which what they read is still in place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.placement import NOP5, place_entry, place_tail, place_usdt

NEW_KERNEL = {"nop5": 200.0, "emulated": 450.0, "stepped": 16_000.0}
OLD_KERNEL = {"nop5": 15_000.0, "emulated": 450.0, "stepped": 16_000.0}

# bytes, cost under a probe, whether arguments, stack or control change behind it
X86 = {
    "endbr64": (b"\xf3\x0f\x1e\xfa", "stepped", False),
    "push rbp": (b"\x55", "emulated", True),
    "push r13": (b"\x41\x55", "emulated", True),
    "nop": (b"\x90", "emulated", False),
    "nop5": (b"\x0f\x1f\x44\x00\x00", "nop5", False),
    "mov rax, rdi": (b"\x48\x89\xf8", "stepped", False),
    "mov edi, 1": (b"\xbf\x01\x00\x00\x00", "stepped", True),
    "mov r8b, al": (b"\x41\x88\xc0", "stepped", True),
    "lea r10, [rsp+8]": (b"\x4c\x8d\x54\x24\x08", "stepped", False),
    "sub rsp, 8": (b"\x48\x83\xec\x08", "stepped", True),
    "test rdi, rdi": (b"\x48\x85\xff", "stepped", False),
    "je +3": (b"\x74\x03", "emulated", True),
    "jmp rel32": (b"\xe9\x10\x00\x00\x00", "emulated", True),
    "jmp [rax]": (b"\xff\x20", "stepped", True),
    "call rel32": (b"\xe8\x10\x00\x00\x00", "emulated", True),
    "ret": (b"\xc3", "stepped", True),
}
ARM64 = {
    "bti c": (b"\x5f\x24\x03\xd5", "stepped", False),
    "nop": (b"\x1f\x20\x03\xd5", "emulated", False),
    "stp x29, x30, [sp, #-16]!": (b"\xfd\x7b\xbf\xa9", "stepped", True),
    "mov x9, x0": (b"\xe9\x03\x00\xaa", "stepped", False),
    "mov w0, #1": (b"\x20\x00\x80\x52", "stepped", True),
    "cbz x0, +8": (b"\x40\x00\x00\xb4", "emulated", True),
    "adrp x9, 0": (b"\x09\x00\x00\x90", "emulated", False),
    "b +16": (b"\x04\x00\x00\x14", "emulated", True),
    "ret": (b"\xc0\x03\x5f\xd6", "emulated", True),
}


def expected(names: list[str], table: dict[str, tuple[bytes, str, bool]], costs: dict[str, float]) -> tuple[int, str]:
    """By brute force: the first cheapest instruction up to and including the first that changes anything."""
    best, at = None, 0
    for name in names:
        code, cost, changes = table[name]
        if best is None or costs[cost] < costs[best[1]]:
            best = (at, cost)
        if changes:
            break
        at += len(code)
    assert best is not None
    return best


@pytest.mark.parametrize("costs", [NEW_KERNEL, OLD_KERNEL], ids=["new kernel", "old kernel"])
@pytest.mark.parametrize(("machine", "table"), [("x64", X86), ("AArch64", ARM64)])
def test_any_prologue_gets_its_cheapest_intact_instruction(
    machine: str, table: dict[str, tuple[bytes, str, bool]], costs: dict[str, float]
) -> None:
    @given(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=8))
    def check(names: list[str]) -> None:
        place = place_entry(b"".join(table[name][0] for name in names), machine, costs)
        assert (place.delta, place.cost) == expected(names, table, costs)

    check()


def test_code_of_an_unknown_machine_is_probed_at_the_symbol() -> None:
    place = place_entry(b"\x00" * 16, "RISC-V", NEW_KERNEL)
    assert (place.delta, place.cost) == (0, "stepped")


def test_a_tail_jump_is_found_behind_a_condition() -> None:
    code = b"".join(X86[name][0] for name in ("mov rax, rdi", "test rdi, rdi", "je +3", "jmp rel32"))
    assert place_tail(code, "x64", NEW_KERNEL).delta == 8


def test_a_function_without_a_tail_jump_is_probed_at_its_entry() -> None:
    code = b"".join(X86[name][0] for name in ("endbr64", "push rbp", "call rel32", "jmp rel32"))
    assert place_tail(code, "x64", NEW_KERNEL).delta == 4


def test_a_usdt_site_uses_the_long_nop_in_front_only_where_it_is_cheaper_and_surely_run() -> None:
    assert place_usdt(NOP5, True, NEW_KERNEL).delta == -5
    assert place_usdt(NOP5, True, OLD_KERNEL).delta == 0
    assert place_usdt(NOP5, False, NEW_KERNEL).delta == 0
    assert place_usdt(b"\x90" * 5, True, NEW_KERNEL).delta == 0
