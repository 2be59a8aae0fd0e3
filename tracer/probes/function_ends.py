"""Where a function that exceptions may pass returns: a return probe would end the program when one does."""

import contextlib
import re
from collections.abc import Iterator

from tracer.errors import ProbeError
from tracer.probes import anchors
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
Instruction = tuple[int, int, str, str, bytes]
"""File offset, size, mnemonic without prefixes, operands, and the bytes themselves."""


def uses_exceptions(binary: Binary) -> bool:
    """Whether a file has code of a language with exceptions."""
    return any(names.beginning_with(start) for names in binary.names for start in LANGUAGES)


def unwound_code(binary: Binary, offset: int) -> tuple[int, bytes]:
    """(file offset, bytes) of the code around a file offset that has unwinding information; no bytes if there is none."""
    with contextlib.suppress(ProbeError):
        image = anchors.image_of(binary.path)
        start, end = image.piece_at(image.address(offset))
        begin = binary.file_offset(start)
        if begin is not None:
            return begin, binary.bytes_at(begin, end - start)
    return offset, b""


class FunctionCode:
    """The decoded instructions of a function and of the cold parts that the compiler moved away.

    Symbols name these parts; or a jump leads to a piece of code without a symbol, which unwinding information has. It may be a
    function of its own, so the ends are only known if it does not return.
    """

    def __init__(self, binary: Binary, offset: int, name: str):
        cold = [symbol.offset for symbol in binary.beginning_with(name.encode() + b".cold", COLD)]
        self.binary, self.offset, self.machine = binary, offset, binary.machine
        self.parts: dict[int, bytes] = {}
        self.rows: list[Instruction] = []
        for start in (offset, *cold):
            self._add(start, binary.function_bytes(start) or unwound_code(binary, start)[1])
        self.unnamed_end = False
        while not self.unnamed_end and (piece := self._next_unnamed()):
            self.unnamed_end = any(RETURNS.fullmatch(row[2]) for row in self._add(*piece))
        self.is_whole = bool(self.rows) and sum(row[1] for row in self.rows) == sum(map(len, self.parts.values()))

    def _add(self, start: int, code: bytes) -> list[Instruction]:
        """Add a part; returns its instructions."""
        rows = list(self._decoded(start, code))
        self.parts[start] = code
        self.rows += rows
        return rows

    def _next_unnamed(self) -> tuple[int, bytes] | None:
        """(file offset, bytes) of a piece of code without a symbol, not yet a part, into which a part jumps."""
        targets = {int(target[1], 0) for _, operands in self._leaving() if (target := DIRECT.search(operands))}
        for start, code in (unwound_code(self.binary, target) for target in sorted(targets)):
            if code and start not in self.parts and not self.binary.begins_function(start):
                return start, code
        return None

    def _decoded(self, start: int, code: bytes) -> Iterator[Instruction]:
        decoder = decoder_of(self.machine)
        for at, size, mnemonic, operands in decoder.disasm_lite(code, start) if decoder else ():
            yield at, size, mnemonic.split()[-1], operands, code[at - start : at - start + size]

    def may_be_passed(self) -> bool:
        """Whether an exception may pass: one that calls no function, nor leaves by a jump, lets none through."""
        return not self.is_whole or any(self._leaving()) or any(CALLS[self.machine].fullmatch(row[2]) for row in self.rows)

    def _leaving(self) -> Iterator[tuple[str, str]]:
        """(mnemonic, operands) of the jumps that may end in another function."""
        before = ("", "")
        for _, _, mnemonic, operands, _ in self.rows:
            if JUMPS[self.machine].fullmatch(mnemonic) and not self._stays(operands, before):
                yield mnemonic, operands
            before = mnemonic, operands.partition(",")[0]

    def _stays(self, operands: str, before: tuple[str, str]) -> bool:
        """Whether a jump ends in this function: at a known place, or at one from a table, to which its index was just added."""
        target = DIRECT.search(operands)
        if target:
            return any(0 <= int(target[1], 0) - start < len(code) for start, code in self.parts.items())
        return before == ("add", operands) or bool(TABLE_JUMP.fullmatch(operands))

    def returns(self) -> list[Placement]:
        """All instructions by which it returns; raises ProbeError if it may end elsewhere."""
        jumps = [" ".join(jump) for jump in self._leaving()] if self.is_whole else ["code that is not decoded"]
        if jumps or self.unnamed_end:
            raise ProbeError(f"exceptions may pass it and its ends are not all known ({[*jumps, 'in code without a symbol'][0]})")
        places = [self._place(*row) for row in self.rows if RETURNS.fullmatch(row[2])]
        if not places or any(place.cost == REFUSED for place in places):
            raise ProbeError("exceptions may pass it, and none of its ends can be probed")
        return places

    def _place(self, at: int, size: int, mnemonic: str, _: str, code: bytes) -> Placement:
        cost = arm64_class(int.from_bytes(code, "little")) if self.machine == "AArch64" else "stepped"
        return Placement(at - self.offset, mnemonic, cost, "end of a function that exceptions may pass")
