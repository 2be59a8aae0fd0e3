"""Probes stand on the cheapest instruction at which what they read is still in place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.errors import ProbeError
from tracer.probes.placement import NOP5, arm64_class, place_entry, place_exits, place_tail, place_usdt

NEW_KERNEL, OLD_KERNEL = True, False  # whether a probed nop is executed without a step
COSTS = {
    NEW_KERNEL: {"nop5": 200.0, "emulated": 450.0, "stepped": 16_000.0},
    OLD_KERNEL: {"nop5": 15_000.0, "emulated": 450.0, "stepped": 16_000.0},
}

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
    "nop": (b"\x1f\x20\x03\xd5", "nop5", False),
    "stp x29, x30, [sp, #-16]!": (b"\xfd\x7b\xbf\xa9", "stepped", True),
    "mov x9, x0": (b"\xe9\x03\x00\xaa", "stepped", False),
    "mov w0, #1": (b"\x20\x00\x80\x52", "stepped", True),
    "cbz x0, +8": (b"\x40\x00\x00\xb4", "emulated", True),
    "ldr x9, +8": (b"\x49\x00\x00\x58", "refused", False),
    "ldr x10, [x9]": (b"\x2a\x01\x40\xf9", "stepped", False),
    "adrp x9, 0": (b"\x09\x00\x00\x90", "emulated", False),
    "b +16": (b"\x04\x00\x00\x14", "emulated", True),
    "ret": (b"\xc0\x03\x5f\xd6", "emulated", True),
}


def expected(names: list[str], table: dict[str, tuple[bytes, str, bool]], fast_nop: bool) -> tuple[int, str] | None:
    """By brute force: the first cheapest instruction up to and including the first that changes anything; None: all refused."""
    best, at, costs = None, 0, COSTS[fast_nop]
    for name in names:
        code, cost, changes = table[name]
        if cost != "refused" and (best is None or costs[cost] < costs[best[1]]):
            best = (at, cost)
        if changes:
            break
        at += len(code)
    return best


@pytest.mark.parametrize("fast_nop", [NEW_KERNEL, OLD_KERNEL], ids=["new kernel", "old kernel"])
@pytest.mark.parametrize(("machine", "table"), [("x64", X86), ("AArch64", ARM64)])
def test_any_prologue_gets_its_cheapest_intact_instruction(
    machine: str, table: dict[str, tuple[bytes, str, bool]], fast_nop: bool
) -> None:
    @given(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=8))
    def check(names: list[str]) -> None:
        code, wanted = b"".join(table[name][0] for name in names), expected(names, table, fast_nop)
        if wanted is None:
            with pytest.raises(ProbeError):
                place_entry(code, machine, fast_nop)
        else:
            place = place_entry(code, machine, fast_nop)
            assert (place.delta, place.cost) == wanted

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


@pytest.mark.parametrize(
    ("machine", "code", "ends"),
    [
        # push rbx; jne +7; pop rbx; mov rdi, rax; jmp out of the function; pop rbx; ret; jmp to its cold part; jmp back
        ("x64", "53 7507 5b 4889c7 e900100000 5b c3 e900200000 ebf7", [7, 13]),
        # stp x29, x30, [sp, #-16]!; cbz x0, +16; ldp x29, x30, [sp], #16; mov x0, x1; b out; ldp ...; ret; b to its cold part
        ("AArch64", "fd7bbfa9 800000b4 fd7bc1a8 e00301aa 00040014 fd7bc1a8 c0035fd6 00080014", [16, 24]),
    ],
)
def test_a_function_ends_at_its_returns_and_at_the_jumps_that_follow_its_epilogue(
    machine: str, code: str, ends: list[int]
) -> None:
    assert [place.delta for place in place_exits(bytes.fromhex(code), machine)] == ends


def test_a_function_without_an_end_is_not_probed_there() -> None:
    with pytest.raises(ProbeError):
        place_exits(bytes.fromhex("53 ebfd"), "x64")


def test_a_usdt_site_uses_the_long_nop_in_front_only_where_it_is_cheaper_and_surely_run() -> None:
    assert place_usdt(NOP5, True, NEW_KERNEL).delta == -5
    assert place_usdt(NOP5, True, OLD_KERNEL).delta == 0
    assert place_usdt(NOP5, False, NEW_KERNEL).delta == 0
    assert place_usdt(b"\x90" * 5, True, NEW_KERNEL).delta == 0


ARM64_CLASSES = {
    "bl +16": (0x94000004, "emulated"),
    "b.ne +8": (0x54000041, "emulated"),
    "cbnz w0, +8": (0x35000040, "emulated"),
    "tbnz x0, #63, +8": (0xB7F80040, "emulated"),
    "adr x0, +4": (0x10000020, "emulated"),
    "adrp x0, 0": (0x90000000, "emulated"),
    "br x16": (0xD61F0200, "emulated"),
    "blr x8": (0xD63F0100, "emulated"),
    "ret": (0xD65F03C0, "emulated"),
    "ldr w0, literal": (0x18000040, "refused"),
    "ldr x0, literal": (0x58000040, "refused"),
    "ldrsw x0, literal": (0x98000040, "refused"),
    "ldr q0, literal": (0x9C000040, "refused"),
    "prfm literal": (0xD8000040, "refused"),
    "retaa": (0xD65F0BFF, "refused"),
    "svc #0": (0xD4000001, "refused"),
    "msr tpidr_el0, x0": (0xD51BD040, "refused"),
    "mrs x0, tpidr_el0": (0xD53BD040, "stepped"),
    "ldxr x0, [x1]": (0xC85F7C20, "refused"),
    "autiasp": (0xD50323BF, "refused"),
    "yield": (0xD503203F, "refused"),
    "paciasp": (0xD503233F, "stepped"),
    "bti c": (0xD503245F, "stepped"),
    "nop": (0xD503201F, "nop5"),
    "stp x29, x30, [sp, #-16]!": (0xA9BF7BFD, "stepped"),
}


@pytest.mark.parametrize(("word", "cost"), ARM64_CLASSES.values(), ids=ARM64_CLASSES.keys())
def test_an_arm64_instruction_has_the_class_of_the_kernels_decoder(word: int, cost: str) -> None:
    assert arm64_class(word) == cost


def test_an_instruction_that_the_kernel_refuses_is_never_chosen() -> None:
    code = (0xD503203F).to_bytes(4, "little") + ARM64["stp x29, x30, [sp, #-16]!"][0]
    assert place_entry(code, "AArch64", NEW_KERNEL).delta == 4


def test_the_return_address_is_not_signed_yet_where_an_arm64_function_is_probed() -> None:
    bti, paciasp, push = (word.to_bytes(4, "little") for word in (0xD503245F, 0xD503233F, 0xA9BF7BFD))
    branch = ARM64["b +16"][0]
    assert place_entry(bti + paciasp + push + branch, "AArch64", NEW_KERNEL).delta == 0
    assert place_entry(paciasp + branch, "AArch64", NEW_KERNEL).delta == 0


def test_a_cheap_instruction_inside_a_loop_is_not_chosen() -> None:
    head = X86["mov rax, rdi"][0] + X86["test rdi, rdi"][0]
    loop = X86["je +3"][0] + X86["mov rax, rdi"][0]
    back = bytes([0xEB, 0x100 - len(X86["test rdi, rdi"][0] + loop) - 2])
    assert place_entry(head + loop + back + X86["ret"][0], "x64", NEW_KERNEL).delta == 0
    assert place_entry(head + loop + X86["ret"][0], "x64", NEW_KERNEL).delta == len(head)


def test_a_jump_within_the_function_is_no_tail_jump() -> None:
    inside = b"\xeb\x02" + X86["nop"][0] * 2
    code = X86["mov rax, rdi"][0] + inside + b"\xe9\x00\x10\x00\x00"
    assert place_tail(code, "x64", NEW_KERNEL).delta == 7
