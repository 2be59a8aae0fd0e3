"""Where a function that exceptions may pass returns: a return probe would end the program when one does."""

import re
from collections.abc import Iterator

from tracer.errors import ProbeError
from tracer.probes.elf import Binary
from tracer.probes.placement import DIRECT, REFUSED, Placement, arm64_class, decoder_of

LANGUAGES = (b"_Z", b"__cxa_throw", b"__gxx_personality", b"_Unwind_", b"rust_eh_personality")
"""Beginnings of symbols of which files with C++ or Rust code define or import some."""
CALLS = {"x64": re.compile("call"), "AArch64": re.compile("blr?.*")}
JUMPS = {"x64": re.compile("j.*|loop.*"), "AArch64": re.compile("b|b[.].*|br.*|cbn?z|tbn?z")}
RETURNS = re.compile("ret.*")
TABLE_JUMP = re.compile(r".*\*8.*\]")
COLD = re.compile(rb"[.\d]*")
REMEDY = 'record its entry alone (at = "entry"), or write throws = false if no exception ever passes it'


def uses_exceptions(binary: Binary) -> bool:
    """Whether a file has code of a language with exceptions."""
    return any(names.beginning_with(start) for names in binary.names for start in LANGUAGES)


class FunctionCode:
    """The decoded instructions of a function and of the cold parts that the compiler moved away, which symbols name."""

    def __init__(self, binary: Binary, offset: int, name: str):
        cold = [symbol.offset for symbol in binary.beginning_with(name.encode() + b".cold", COLD)]
        self.offset, self.machine = offset, binary.machine
        self.parts = {start: binary.function_bytes(start) for start in (offset, *cold)}
        self.rows = [row for start, code in self.parts.items() for row in self._decoded(start, code)]
        self.is_whole = bool(self.rows) and sum(row[1] for row in self.rows) == sum(map(len, self.parts.values()))

    def _decoded(self, start: int, code: bytes) -> Iterator[tuple[int, int, str, str, bytes]]:
        """(file offset, bytes, mnemonic without prefixes, operands, the bytes themselves) of each instruction of a part."""
        decoder = decoder_of(self.machine)
        for at, size, mnemonic, operands in decoder.disasm_lite(code, start) if decoder else ():
            yield at, size, mnemonic.split()[-1], operands, code[at - start : at - start + size]

    def may_be_passed(self) -> bool:
        """Whether an exception may pass: one that calls no function, nor leaves by a jump, lets none through."""
        return not self.is_whole or bool(self.exit_jumps()) or any(CALLS[self.machine].fullmatch(row[2]) for row in self.rows)

    def exit_jumps(self) -> list[str]:
        """The jumps that may end in another function, as text."""
        before = ("", "")
        leaving = []
        for _, _, mnemonic, operands, _ in self.rows:
            if JUMPS[self.machine].fullmatch(mnemonic) and not self._stays(operands, before):
                leaving.append(f"{mnemonic} {operands}")
            before = mnemonic, operands.partition(",")[0]
        return leaving

    def _stays(self, operands: str, before: tuple[str, str]) -> bool:
        """Whether a jump ends in this function: at a known place, or at one from a table, to which its index was just added."""
        target = DIRECT.search(operands)
        if target:
            return any(0 <= int(target[1], 0) - start < len(code) for start, code in self.parts.items())
        return before == ("add", operands) or bool(TABLE_JUMP.fullmatch(operands))

    def returns(self) -> list[Placement]:
        """All instructions by which it returns; raises ProbeError if it may end elsewhere."""
        jumps = self.exit_jumps() if self.is_whole else ["code that is not decoded"]
        if jumps:
            raise ProbeError(f"exceptions may pass it and its ends are not all known ({jumps[0]}): {REMEDY}")
        places = [self._place(*row) for row in self.rows if RETURNS.fullmatch(row[2])]
        if not places or any(place.cost == REFUSED for place in places):
            raise ProbeError(f"exceptions may pass it, and none of its ends can be probed: {REMEDY}")
        return places

    def _place(self, at: int, size: int, mnemonic: str, _: str, code: bytes) -> Placement:
        cost = arm64_class(int.from_bytes(code, "little")) if self.machine == "AArch64" else "stepped"
        return Placement(at - self.offset, mnemonic, cost, "end of a function that exceptions may pass")
