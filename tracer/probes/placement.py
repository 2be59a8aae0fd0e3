"""Where to place a probe: the cheapest instruction at which everything that the probe reads is still in place.

A uprobe's cost depends on the probed instruction: the kernel emulates some and single-steps the others out of line, which
costs ten times as much on a virtual machine.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import capstone
from capstone import x86_const

from tracer.errors import ProbeError

ARGUMENT_REGISTERS = {
    "x64": {"rdi", "rsi", "rdx", "rcx", "r8", "r9", "rsp"},
    "AArch64": {f"x{i}" for i in range(8)} | {"sp", "x30", "lr"},
}
# What arch_uprobe_analyze_insn emulates, by mnemonic.
X86_BRANCHES = {"call", "jmp"}
# What arm_probe_decode_insn simulates (since Linux 4.10), as (mask, value): b and bl, b.cond, cbz and cbnz, tbz and tbnz, adr
# and adrp, br, blr, ret.
ARM64_SIMULATED = (
    (0x7C000000, 0x14000000),
    (0xFF000010, 0x54000000),
    (0x7E000000, 0x34000000),
    (0x7E000000, 0x36000000),
    (0x1F000000, 0x10000000),
    (0xFFFFFC1F, 0xD61F0000),
    (0xFFFFFC1F, 0xD63F0000),
    (0xFFFFFC1F, 0xD65F0000),
)
# Never probed: other branches to registers (with authentication), exceptions, msr, exclusives, memory copy and set, all
# loads and prefetches of literals. Until Linux 6.12, literal loads into general registers were simulated, but wrongly, and some
# kernels oops there (acc450aa0709 "arm64: probes: Remove broken LDR (literal) uprobe support", in the stable series too).
ARM64_REFUSED = (
    (0xFE000000, 0xD6000000),
    (0xFF000000, 0xD4000000),
    (0xFFF8F01F, 0xD500401F),
    (0xFFF00000, 0xD5100000),
    (0x3F800000, 0x08000000),
    (0x3B200C00, 0x19000400),
    (0x3B000000, 0x18000000),
)
ARM64_HINT, ARM64_NOP = (0xFFFFF01F, 0xD503201F), 0xD503201F
ARM64_STEPPED_HINTS = {7, 8, 10, 24, 25, 26, 27, 32, 34, 36, 38}  # XPACLRI, PACI*, BTI
REFUSED = "refused"
NOP5 = b"\x0f\x1f\x44\x00\x00"
LONGEST = 16  # bytes of an instruction
# Branches that may encode their target in the instruction, and that target as capstone prints it.
BRANCH = {"x64": re.compile("j.*|call|loop.*"), "AArch64": re.compile("bl?|b[.].*|cbn?z|tbn?z")}
DIRECT = re.compile("(?:^|#)(0x[0-9a-f]+|[0-9]+)$")
# What removes a function's frame, and the most instructions from there to the jump that leaves it.
RESTORES = {"x64": re.compile("pop .*|leave .*|add rsp, .*"), "AArch64": re.compile("ldp .*x30, \\[sp.*|ldr x30, \\[sp.*")}
EPILOGUE = 8
CALL_BYTES = 5  # a direct call: 5 bytes on x86-64, 4 on arm64


@dataclass(frozen=True)
class Placement:
    """A chosen instruction: its distance from the function's start in bytes, its text, its cost class, and the reason."""

    delta: int
    instruction: str
    cost: str
    why: str


@cache
def decoder_of(machine: str) -> capstone.Cs | None:
    """The decoder of an architecture's code; None if it is not known."""
    modes = {
        "x64": (capstone.CS_ARCH_X86, capstone.CS_MODE_64),
        "AArch64": (capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM),
    }
    if machine not in modes:
        return None
    decoder = capstone.Cs(*modes[machine])
    decoder.detail = True
    return decoder


def cost_class(instruction: capstone.CsInsn, machine: str) -> str:
    """`nop5`, `emulated`, `stepped` or `refused`: how the kernel executes the instruction under a probe."""
    name = instruction.mnemonic
    if machine == "AArch64":
        return arm64_class(int.from_bytes(instruction.bytes, "little"))
    if bytes(instruction.bytes) == NOP5:
        return "nop5"
    operand = instruction.operands[0] if instruction.operands else None
    register = operand is not None and operand.type == x86_const.X86_OP_REG
    direct = operand is not None and operand.type == x86_const.X86_OP_IMM
    is_jump = name in X86_BRANCHES or (name.startswith("j") and name not in ("jrcxz", "jecxz"))
    emulated = bytes(instruction.bytes) == b"\x90" or (name == "push" and register) or (is_jump and direct)
    return "emulated" if emulated else "stepped"


def arm64_class(word: int) -> str:
    """The cost class of an arm64 instruction; a nop, simulated since Linux 6.13, has class `nop5`, which is measured on one."""
    if word == ARM64_NOP:
        return "nop5"
    if any(word & mask == value for mask, value in ARM64_SIMULATED):
        return "emulated"
    if word & ARM64_HINT[0] == ARM64_HINT[1]:
        return "stepped" if word >> 5 & 0x7F in ARM64_STEPPED_HINTS else REFUSED
    return REFUSED if any(word & mask == value for mask, value in ARM64_REFUSED) else "stepped"


def cost_rank(cost: str, fast_nop: bool) -> int:
    """Rank of a cost class, cheapest first: by how the kernel executes it, independent of measurements on a busy machine.

    A nop of class `nop5` is executed without a single step if `fast_nop` (tracer/probes/fast_nop.py), and otherwise stepped.
    """
    return {"nop5": 0 if fast_nop else 2, "emulated": 1, "stepped": 3}[cost]


def _branch_target(instruction: capstone.CsInsn) -> int | None:
    """The target of a direct branch, relative to the function's start; None for all other instructions."""
    if not _is_branch(instruction) or not instruction.operands:
        return None
    operand = instruction.operands[-1]
    return int(operand.imm) if operand.type == capstone.CS_OP_IMM else None


def _decode_lazily(code: bytes, machine: str) -> Iterator[capstone.CsInsn]:
    """Decode instructions in full detail, lazily: most callers need only the first few, and detail is slow."""
    decoder, offset = decoder_of(machine), 0
    while decoder:
        instruction = next(decoder.disasm(code[offset : offset + LONGEST], offset, 1), None)
        if instruction is None:
            return
        yield instruction
        offset += instruction.size


def _loop_begins(code: bytes, machine: str) -> int:
    """The first place after the entry to which later code jumps back: from there on, code may run more than once per call."""
    decoder, targets = decoder_of(machine), []
    for offset, _, mnemonic, operands in decoder.disasm_lite(code, 0) if decoder else ():
        target = DIRECT.search(operands) if BRANCH[machine].fullmatch(mnemonic) else None
        if target and 0 < int(target[1], 0) <= offset:
            targets.append(int(target[1], 0))
    return min(targets, default=1 << 31)


def _is_branch(instruction: capstone.CsInsn) -> bool:
    groups = {capstone.CS_GRP_JUMP, capstone.CS_GRP_CALL, capstone.CS_GRP_RET}
    return bool(groups & set(instruction.groups))


def _written_registers(instruction: capstone.CsInsn, machine: str) -> set[str]:
    names = {instruction.reg_name(register) for register in instruction.regs_access()[1]}
    if machine == "x64":
        wide = {"e": "r"}
        names |= {wide[n[0]] + n[1:] for n in names if n and n[0] in wide}
        names |= {n.rstrip("dwb") for n in names if n.startswith("r") and n[1:2].isdigit()}
    else:
        names |= {"x" + n[1:] for n in names if n.startswith("w")}
    return names


@lru_cache(maxsize=1024)
def place_entry(code: bytes, machine: str, fast_nop: bool) -> Placement:
    """The cheapest instruction on the straight path from the entry at which arguments, stack and return address are intact.

    `fast_nop`: whether this kernel emulates a probed nop. Raises ProbeError if no instruction can be probed.
    """
    is_decoded = False
    candidates: list[tuple[int, int, str, str]] = []
    for instruction in _decode_lazily(code, machine):
        is_decoded = True
        cost = cost_class(instruction, machine)
        text = f"{instruction.mnemonic} {instruction.op_str}".strip()
        if cost != REFUSED:
            candidates.append((cost_rank(cost, fast_nop), instruction.address, text, cost))
        if _is_branch(instruction) or _written_registers(instruction, machine) & ARGUMENT_REGISTERS[machine]:
            break
    if not is_decoded:
        return Placement(0, "", "stepped", "code of this architecture is not decoded: probe at the symbol")
    if candidates and min(candidates)[1] > 0:  # the first instruction is in no loop, so most functions need no search for loops
        loop = _loop_begins(code, machine)
        candidates = [candidate for candidate in candidates if candidate[1] < loop]
    if not candidates:
        raise ProbeError("no instruction can be probed before the arguments change")
    _, delta, text, cost = min(candidates)
    why = (
        "first instruction" if delta == 0 else f"cheaper than the first instruction; at +{delta} the arguments are still in place"
    )
    return Placement(delta, text, cost, why + ("; no cheaper instruction before they change" if cost == "stepped" else ""))


def place_tail(code: bytes, machine: str, fast_nop: bool) -> Placement:
    """The tail jump of a short function, or the entry if there is none."""
    for instruction in _decode_lazily(code, machine):
        target = _branch_target(instruction)
        leaves = target is not None and not 0 <= target < len(code)
        if instruction.mnemonic in ("jmp", "b") and leaves and cost_class(instruction, machine) == "emulated":
            text = f"{instruction.mnemonic} {instruction.op_str}".strip()
            return Placement(instruction.address, text, "emulated", "tail jump: emulated, executed by every waiting thread")
        if instruction.mnemonic in ("ret", "call", "bl"):
            break
    return place_entry(code, machine, fast_nop)


def place_exits(code: bytes, machine: str) -> list[Placement]:
    """Where a whole function ends: each `ret`, and each jump to another function after its frame was removed.

    Unlike a return probe, a probe there lets exceptions pass to their handlers.
    """
    places, restored = [], -EPILOGUE
    for number, each in enumerate(_decode_lazily(code, machine)):
        target = _branch_target(each)
        leaves = each.mnemonic in ("jmp", "b", "br") and not (target is not None and 0 <= target < len(code))
        if each.mnemonic == "ret" or (leaves and number - restored <= EPILOGUE):
            places.append(Placement(each.address, each.mnemonic, cost_class(each, machine), "end of a function that may throw"))
        if RESTORES[machine].fullmatch(f"{each.mnemonic} {each.op_str}"):
            restored = number
        elif _is_branch(each):
            restored = -EPILOGUE
    if not places:
        raise ProbeError("no instruction was found at which the function returns")
    return [place for place in places if place.cost != REFUSED]


def place_call(before: bytes, machine: str, why: str) -> Placement | None:
    """The direct call at the end of the `CALL_BYTES` bytes before a return address; None if there is no such call."""
    decoder, size = decoder_of(machine), 4 if machine == "AArch64" else CALL_BYTES
    instructions = list(decoder.disasm(before[-size:], 0)) if decoder else []
    call = instructions[0] if len(instructions) == 1 else None
    if call is None or call.mnemonic not in ("call", "bl") or cost_class(call, machine) != "emulated":
        return None
    return Placement(-size, call.mnemonic, "emulated", why)


def place_usdt(before: bytes, is_entry: bool, fast_nop: bool, machine: str = "x64") -> Placement:
    """A USDT site, or the 5-byte nop before it if that is cheaper and is the function's entry, hence always executed.

    `before` holds the five bytes before the site; `is_entry`: whether a function begins with them.
    """
    if before == NOP5 and is_entry and cost_rank("nop5", fast_nop) == 0:
        return Placement(
            -len(NOP5), "nop5", "nop5", "before the USDT site: this kernel turns it into a system call, cheaper than a trap"
        )
    return Placement(0, "nop", "nop5" if machine == "AArch64" else "emulated", "USDT site")


def place_fixed(instruction: str, cost: str, why: str) -> Placement:
    """The placement at a site that must not or need not be inspected."""
    return Placement(0, instruction, cost, why)
