"""How slices become bytes: texts as numbers, slices that nest, messages as protobuf reads them."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, FtraceEventBundle, Trace, TrackEvent

from tests.conftest import drawn
from views.timeline.columns import map_rows
from views.timeline.nesting import nested_events, nesting_lanes, preorder
from views.timeline.protobuf import Form, _messages, encode, field_bytes, packed_varints, tag, varint_bytes


@given(st.lists(st.tuples(st.sampled_from(["", "a", "é"]), st.sampled_from([-1, 0, 7, 1 << 40]), st.integers(0, 3))))
def test_joined_texts_are_made_once_per_distinct_row(rows: list[tuple[str, int, int]]) -> None:
    made: list[tuple[Any, ...]] = []
    columns = (
        pd.Series([f"{row[0]}x"[:-1] for row in rows], dtype=object),
        *(pd.Series([row[i] for row in rows], dtype=np.int64) for i in (1, 2)),
    )
    text = map_rows(lambda *row: made.append(row) or str(row), *columns)
    assert text.to_pylist() == [str(row) for row in rows]
    assert sorted(made) == sorted(set(rows))


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.booleans(), st.integers(0, 3)), max_size=40)


@given(SPANS)
@settings(max_examples=drawn(300))
def test_every_lane_nests_and_finished_slices_keep_their_length(spans: list[tuple[int, int, bool, int]]) -> None:
    begin = np.array([s[0] for s in spans], np.int64)
    end = begin + np.array([s[1] for s in spans], np.int64)
    complete, rank = np.array([s[2] for s in spans], bool), np.array([s[3] for s in spans], np.int64)
    order = preorder(begin, end, rank)
    _, crossed = nested_events(begin[order], end[order], np.zeros(len(begin), bool))
    crossed[order] = crossed.copy()
    assert crossed.any() == any(a < c < b < d for a, b in zip(begin, end, strict=True) for c, d in zip(begin, end, strict=True))
    lane, closed = nesting_lanes(begin, end, rank, complete, crossed)
    assert crossed.any() or not lane.any()
    assert (closed[complete] == end[complete]).all() and (closed >= begin).all() and (closed <= end).all()
    for k in range(int(lane.max(initial=-1)) + 1):
        of = np.flatnonzero(lane == k)
        of = of[preorder(begin[of], closed[of], rank[of])]
        order, odd = nested_events(begin[of], closed[of], np.zeros(len(of), bool))
        ts = np.where(order < 0, closed[of][~order], begin[of][order])
        assert not odd.any() and (np.diff(ts) >= 0).all()
        assert brackets(order) and len(order) == 2 * len(of)


def brackets(order: np.ndarray) -> bool:
    """Whether every end (~i) closes the slice that began last."""
    stack: list[int] = []
    for event in order.tolist():
        if event >= 0:
            stack.append(event)
        elif stack.pop() != ~event:
            return False
    return not stack


NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20)


@given(NUMBERS, st.integers(0, 63), st.integers(0, 300), st.data())
def test_the_encoder_writes_what_protobuf_reads(values: list[int], shift: int, length: int, data: st.DataObject) -> None:
    column, n = np.array(values, np.int64) >> shift, len(values)
    absent, text = data.draw(st.sampled_from(column.tolist())), "é" * length
    named = field_bytes(22, text.encode())
    rich = Form().open(1).varint(8, np.arange(n)).open(11).varint(10, np.arange(n), 3 * np.arange(n)).constant(named)
    rich.member(4, bytes((8, 5)), 4, column, None, absent).fixed64(47, column, absent=0).close().close()
    plain = Form().open(1).varint(8, np.arange(n)).open(11).fixed64(44, column.astype(np.float64)).close().close()
    for form in (rich, plain):
        encoded, offsets = encode(form, n)
        packets = Trace.FromString(encoded).packet
        ends = np.cumsum([len(field_bytes(1, packet.SerializeToString())) for packet in packets])
        assert [packet.timestamp for packet in packets] == list(range(n)) and offsets.tolist() == [0, *ends.tolist()]
        for r, event in enumerate(packet.track_event for packet in packets):
            value = int(column[r])
            if form is plain:
                assert event == TrackEvent(double_counter_value=value)
                continue
            told = [] if value == absent else [DebugAnnotation(name_iid=5, int_value=value)]
            assert list(event.debug_annotations) == told and list(event.categories) == [text]
            assert list(event.flow_ids) == ([value & 2**64 - 1] if value else []) and event.name_iid == 3 * r
    packed = packed_varints(column)
    switches = FtraceEventBundle.CompactSched.FromString(tag(1, 2) + varint_bytes(len(packed)) + packed)
    assert list(switches.switch_timestamp) == [value & 2**64 - 1 for value in column.tolist()]


def test_numbers_at_the_edges_of_their_bytes_are_as_long_as_they_must_be() -> None:
    values = [edge + d for edge in (1 << 7 * k for k in range(1, 9)) for d in (-1, 0, 1)]
    assert packed_varints(np.array(values, np.int64)) == b"".join(map(_VarintBytes, values))


PARTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 99)), min_size=1, max_size=30)


@given(PARTS, st.integers(0, 70))
def test_a_slice_says_all_its_parts_at_its_time(slices: list[tuple[int, int, int]], length: int) -> None:
    """Two levels of three rows: the first says one part, the second a part that its slices share and one of each slice's own."""
    rank, row, pause = (np.array(column, np.int64) for column in zip(*slices, strict=True))
    begin = np.cumsum(pause) + 7
    text, shared = "x" * length, np.array([2, 0, 2])
    alone = encode(Form().varint(10, np.arange(3)).constant(field_bytes(22, text.encode())), 3)
    common, own = encode(Form().varint(10, 10 + np.arange(3)), 3), encode(Form().fixed64(47, 5 + np.arange(3)), 3)
    levels = [[(*alone, None)], [(*common, shared), (*own, None)]]
    order = np.stack([np.arange(len(row)), ~np.arange(len(row))]).T.ravel()
    data = _messages.events(tag(10, 0) + b"\x09" + tag(8, 0), tag(9, 0) + b"\x02", levels, order, rank, row, begin, begin + 1, 3)
    packets = Trace.FromString(data).packet
    assert {packet.trusted_packet_sequence_id for packet in packets} == {9}
    stamps = np.stack([begin, begin + 1]).T.ravel()
    assert [packet.timestamp for packet in packets] == [d & 2**64 - 1 for d in np.diff(stamps, prepend=3).tolist()]
    assert all(packet.track_event == TrackEvent(type=TrackEvent.TYPE_SLICE_END) for packet in packets[1::2])
    for packet, (level, r, _) in zip(packets[::2], slices, strict=True):
        first = TrackEvent(name_iid=r, categories=[text])
        assert packet.track_event == (TrackEvent(name_iid=10 + shared[r], flow_ids=[5 + r]) if level else first)


def test_the_encoder_reads_no_row_that_is_not_there() -> None:
    three, one = np.arange(3), np.zeros(1, np.int64)
    for form, n in ((Form().varint(1, three), 4), (Form().varint(1, three, one), 2), (Form().varint(1, three - 1, three), 1)):
        with pytest.raises(IndexError):
            encode(form, n)
    for unfinished in (Form().open(1), Form().close(), Form().member(4, b"x" * 200, 4, three, None, 0)):
        with pytest.raises(ValueError, match="no message"):
            encode(unfinished, 1)


def test_no_slice_is_written_that_is_not_there() -> None:
    zero, three = np.zeros(1, np.int64), encode(Form().varint(10, np.arange(3)), 3)
    write = lambda order, rank, row, part: _messages.events(b"", b"", [[part]], order, rank, row, zero, zero, 0)  # noqa: E731
    assert write(zero, zero, zero, (*three, None))
    odd = three[1].copy()
    odd[1] = 100
    for order, rank, row, part in (
        (zero + 1, zero, zero, (*three, None)),
        (zero - 3, zero, zero, (*three, None)),
        (zero, zero + 1, zero, (*three, None)),
        (zero, zero - 1, zero, (*three, None)),
        (zero, zero, zero + 3, (*three, None)),
        (zero, zero, zero - 1, (*three, None)),
        (zero, zero, zero + 1, (*three, zero)),
        (zero, zero, zero, (*three, zero + 3)),
        (zero, zero, zero, (three[0], odd, None)),
    ):
        with pytest.raises(IndexError, match="no slice"):
            write(order, rank, row, part)
    with pytest.raises(ValueError, match="lengths"):
        write(zero, zero, np.arange(2), (*three, None))
