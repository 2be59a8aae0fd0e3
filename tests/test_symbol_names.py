"""Names of symbols by how they begin, and sections however they are counted: pyelftools and a look at every row agree."""

import struct
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import given
from hypothesis import strategies as st

from tracer.probes.elf_headers import SECTION, Headers
from tracer.probes.symbol_names import SymbolNames

NAMES = st.lists(st.text("ab_", max_size=20).map(str.encode), max_size=120)


@given(NAMES, st.data())
def test_the_rows_of_a_beginning_are_those_that_a_look_at_each_finds(names: list[bytes], data: st.DataObject) -> None:
    strings = b"\0" + b"".join(name + b"\0" for name in names)
    anywhere = st.integers(0, len(strings) + 9)  # tails of names are shared; a damaged row points behind the table
    positions = np.array(data.draw(st.lists(anywhere, max_size=200)), np.uint32)
    start = data.draw(st.sampled_from([*names, b"a", b"\xff"])) + data.draw(st.sampled_from([b"", b"\0"]))
    table = SymbolNames(positions, strings)
    found = [(int(place), row) for row, place in enumerate(positions) if strings.startswith(start, int(place))]
    if start:
        assert table.beginning_with(start) == [row for _, row in sorted(found)]


def test_many_names_of_one_namespace_are_told_apart_by_their_later_letters() -> None:
    names = [f"_ZN11namespace{number:04d}".encode() for number in range(1000)]
    strings = b"".join(name + b"\0" for name in names)
    table = SymbolNames(np.arange(len(names), dtype=np.uint32) * len(names[0] + b"\0"), strings)
    assert table.beginning_with(b"_ZN11namespace0123\0") == [123] and table.name(123) == names[123]
    assert table.beginning_with(b"_ZN11namespace012") == list(range(120, 130))
    assert table.beginning_with(b"_ZN11namespace0123 and more") == table.beginning_with(b"_ZN12") == []


@pytest.mark.parametrize("count", [2, 0xFF00, 70_000])
def test_a_header_too_small_for_the_number_of_sections_has_it_in_the_first_one(tmp_path: Path, count: int) -> None:
    sections, names = np.zeros(count, SECTION), b"\0.last\0"
    is_large = count >= 0xFF00
    sections[-1] = (1, 3, 0, 0, 64 + count * 64, len(names), 0, 0, 0, 0)
    if is_large:
        sections["size"][0], sections["link"][0] = count, count - 1
    counted = (0, 0xFFFF) if is_large else (count, count - 1)
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, 183, 1, 0, 0, 64, 0, 64, 56, 0, 64, *counted)
    (tmp_path / "file").write_bytes(head + sections.tobytes() + names)
    with open(tmp_path / "file", "rb") as file:
        mine, theirs = Headers(file), ELFFile(file)
        assert len(mine.sections) == theirs.num_sections() == count
        assert mine.machine == theirs.get_machine_arch()
        section = mine.named(".last")
        assert section is not None and mine.data(section) == theirs.get_section(count - 1).data() == names
