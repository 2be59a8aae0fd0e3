"""Names of symbols by how they begin: what the index finds is what a look at every row finds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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
