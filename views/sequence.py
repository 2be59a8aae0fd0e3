"""One packet sequence of a native Perfetto trace: one track's events with incremental time, encoded in batches."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from views.protobuf import VARINT, Rows, field_bytes, interleave, tag, varint_bytes
from views.slices import Slices, Text, crossing, event_order, lanes

PACKET, TIMESTAMP, SEQUENCE_ID, TRACK_EVENT = 1, 8, 10, 11
CATEGORY, ANNOTATION, TYPE, NAME = 3, 4, 9, 10
COUNTER_VALUE, DOUBLE_COUNTER_VALUE, FLOW, TERMINATING_FLOW = 30, 44, 47, 48
ARG_NAME, ARG_BOOL, ARG_INT, ARG_TEXT = 1, 2, 4, 17
CATEGORIES, NAMES, ARG_NAMES, ARG_TEXTS = (
    *("event_categories", "event_names"),
    *("debug_annotation_names", "debug_annotation_string_values"),
)
BOOLEANS = {"estimated", "incomplete"}
MONOTONIC, INCREMENTAL = 3, 64
BATCH = 1 << 16
SHORT = (1 << 14, 1 << 21)
"""Times since the event before that fit two and three bytes: events are encoded with others of their class."""


def valid(text: str) -> str:
    """A text as protobuf takes it: a command line may hold bytes that are no UTF-8."""
    return text.encode(errors="replace").decode()


@dataclass
class Names:
    """Texts and the numbers that stand for them, by table of InternedData; 0 is "".

    The numbers hold for the whole trace, each sequence defines those it uses.
    """

    ids: dict[str, dict[str, int]] = field(
        default_factory=lambda: {t: {"": 0} for t in (CATEGORIES, NAMES, ARG_NAMES, ARG_TEXTS)}
    )

    def of(self, table: str, text: str) -> int:
        """The number of one text."""
        known = self.ids[table]
        return known.setdefault(valid(text), len(known))

    def column(self, table: str, text: Text) -> np.ndarray:
        """The numbers of a column."""
        return np.array([self.of(table, label) for label in text.labels] or [0], np.int64)[text.codes]


@dataclass
class Level:
    """Slices with every text replaced by its number; `shape`: which of `shapes` each one has.

    A shape is the set of a slice's arguments, as bits in their order, and two bits more: begins a flow, ends one.
    """

    slices: Slices
    category: int
    name: np.ndarray
    args: list[tuple[int, int, np.ndarray]]
    shape: np.ndarray
    shapes: list[int]

    @classmethod
    def of(cls, slices: Slices, names: Names) -> "Level":
        """Number the texts of `slices`."""
        args = []
        for label, values in slices.args.items():
            if isinstance(values, Text):
                args.append((names.of(ARG_NAMES, label), ARG_TEXT, names.column(ARG_TEXTS, values)))
            else:
                args.append((names.of(ARG_NAMES, label), ARG_BOOL if label in BOOLEANS else ARG_INT, values))
        if not slices.complete.all():
            args.append((names.of(ARG_NAMES, "incomplete"), ARG_BOOL, np.where(slices.complete, -1, 1)))
        shape, shapes = pd.factorize(shapes_of(slices, args))
        name = names.column(NAMES, slices.name)
        return cls(slices, names.of(CATEGORIES, slices.category), name, args, shape, shapes.tolist())

    def texts(self, rows: np.ndarray) -> dict[str, set[int]]:
        """The numbers that some rows use, by table of InternedData."""
        values = [used(column[rows]) for _, kind, column in self.args if kind == ARG_TEXT]
        return {
            CATEGORIES: {self.category},
            NAMES: used(self.name[rows]),
            ARG_NAMES: {name for name, _, _ in self.args},
            ARG_TEXTS: set().union(*values) - {0},
        }

    def events(self, rows: np.ndarray, shape: int) -> Rows:
        """The TrackEvents that begin some rows of one shape (or are them, if instants)."""
        kind = TrackEvent.TYPE_INSTANT if self.slices.instant else TrackEvent.TYPE_SLICE_BEGIN
        event = Rows(len(rows)).constant(tag(TYPE, VARINT) + varint_bytes(kind) + tag(CATEGORY, VARINT))
        event.constant(varint_bytes(self.category)).varint(NAME, self.name[rows])
        for i, (name, arg, column) in enumerate(self.args):
            if shape >> i & 1:
                annotation = Rows(len(rows)).constant(tag(ARG_NAME, VARINT) + varint_bytes(name))
                event.message(ANNOTATION, annotation.varint(arg, column[rows]))
        flows = shape >> len(self.args)
        if flows and self.slices.flow is not None:
            event.fixed64(TERMINATING_FLOW if flows & 2 else FLOW, self.slices.flow[rows])
        return event


def used(numbers: np.ndarray) -> set[int]:
    """The distinct ones of small numbers."""
    return set(np.flatnonzero(np.bincount(numbers)).tolist())


def shapes_of(slices: Slices, args: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
    """The shape of every slice, as Level has it."""
    shape = np.zeros(len(slices), np.int64)
    for i, (_, kind, column) in enumerate(args):
        shape |= (column > 0 if kind == ARG_TEXT else column != -1).astype(np.int64) << i
    if slices.flow is not None:
        ends = 0 if slices.ends_flow is None else slices.ends_flow
        shape |= np.where(slices.flow > 0, 1 + ends, 0) << len(args)
    return shape


@dataclass
class Events:
    """The slices of one track, in the order of their levels, and their begin (i) and end (~i) events in order of time.

    Slice i is row `row[i]` of its level and of `kinds[kind[i]]`: (level, shape).
    """

    begin: np.ndarray
    end: np.ndarray
    row: np.ndarray
    rank: np.ndarray
    kind: np.ndarray
    kinds: list[tuple[Level, int]]
    instant: np.ndarray
    complete: np.ndarray
    order: np.ndarray

    @classmethod
    def of(cls, levels: list[Level], rows: list[np.ndarray]) -> "Events":
        """Rows of some levels, outermost level first."""
        drawn = [(ly, r) for ly, r in zip(levels, rows, strict=True) if len(r)]
        kinds: list[tuple[Level, int]] = []
        kind = []
        for level, r in drawn:
            kind.append(level.shape[r] + len(kinds))
            kinds += [(level, shape) for shape in level.shapes]
        begin, end, complete = (
            np.concatenate([getattr(ly.slices, column)[r] for ly, r in drawn]) for column in ("begin", "end", "complete")
        )
        rank, instant = (
            np.repeat(of, [len(r) for _, r in drawn]) for of in (range(len(drawn)), [ly.slices.instant for ly, _ in drawn])
        )
        end = np.maximum(begin, end)
        order = event_order(begin, end, rank)
        return cls(begin, end, np.concatenate([r for _, r in drawn]), rank, np.concatenate(kind), kinds, instant, complete, order)

    def lanes(self) -> "list[Events]":
        """Events that nest: these, or parts of these on as many lanes as that takes."""
        crossed = crossing(self.order, len(self.begin))
        if not crossed.any():
            return [self]
        lane, end = lanes(self.begin, self.end, self.rank, self.complete, crossed)
        return [self.only(np.flatnonzero(lane == k), end) for k in range(int(lane.max()) + 1)]

    def only(self, some: np.ndarray, end: np.ndarray) -> "Events":
        """Some of the slices, with ends that may be new."""
        columns = {name: getattr(self, name)[some] for name in ("begin", "row", "rank", "kind", "instant", "complete")}
        order = event_order(columns["begin"], end[some], columns["rank"])
        return replace(self, end=end[some], order=order, **columns)

    def of_level(self) -> Iterator[tuple[Level, np.ndarray]]:
        """Each level that is drawn, with its rows."""
        for rank in sorted(used(self.rank)):
            mine = np.flatnonzero(self.rank == rank)
            yield self.kinds[self.kind[mine[0]]][0], self.row[mine]

    def written(self) -> np.ndarray:
        """The events to write, in order: an instant has no end."""
        if not self.instant.any():
            return self.order
        return self.order[(self.order >= 0) | ~self.instant[np.where(self.order < 0, ~self.order, self.order)]]


def head(number: int, track: int, texts: dict[str, set[int]], names: Names, start: int) -> bytes:
    """The packets that open a sequence: its clock, default track and texts."""
    packet = TracePacket(trusted_packet_sequence_id=number, sequence_flags=TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
    packet.trace_packet_defaults.timestamp_clock_id = INCREMENTAL
    packet.trace_packet_defaults.track_event_defaults.track_uuid = track
    packet.clock_snapshot.clocks.add(clock_id=INCREMENTAL, timestamp=0, is_incremental=True)
    packet.clock_snapshot.clocks.add(clock_id=MONOTONIC, timestamp=start)
    for table, numbers in texts.items():
        labels, entries = list(names.ids[table]), getattr(packet.interned_data, table)
        for iid in sorted(numbers):
            text = {"str": labels[iid].encode()} if table == ARG_TEXTS else {"name": labels[iid]}
            entries.add(iid=iid, **text)
    return field_bytes(PACKET, packet.SerializeToString())


def packets(number: int, delta: np.ndarray, events: Rows) -> np.ndarray:
    """TrackEvents with their times, as the packets of a trace."""
    packet = Rows(len(delta)).constant(tag(SEQUENCE_ID, VARINT) + varint_bytes(number)).varint(TIMESTAMP, delta)
    return Rows(len(delta)).message(PACKET, packet.message(TRACK_EVENT, events)).encoded()


def grouped(code: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each distinct one of small numbers, with where it stands."""
    narrow = code.astype(np.min_scalar_type(int(code.max(initial=0))))
    order, counts = np.argsort(narrow, kind="stable"), np.bincount(code)
    ends = np.cumsum(counts)
    for value in np.flatnonzero(counts).tolist():
        yield value, order[ends[value] - counts[value] : ends[value]]


def slice_packets(number: int, events: Events, start: int) -> Iterator[bytes]:
    """The events of one track, batch by batch."""
    last, whole = start, events.written()
    for at in range(0, len(whole), BATCH):
        order = whole[at : at + BATCH]
        ended = order < 0
        index = np.where(ended, ~order, order)
        ts = np.where(ended, events.end[index], events.begin[index])
        delta = np.diff(ts, prepend=last)
        last = int(ts[-1])
        wide = sum((delta >= limit).astype(np.int64) for limit in SHORT)
        code = np.where(ended, 0, events.kind[index] + 1) * (len(SHORT) + 1) + wide
        batches, places = [], []
        for value, place in grouped(code):
            kind = value // (len(SHORT) + 1) - 1
            if kind < 0:
                event = Rows(len(place)).constant(tag(TYPE, VARINT) + varint_bytes(TrackEvent.TYPE_SLICE_END))
            else:
                level, shape = events.kinds[kind]
                event = level.events(events.row[index[place]], shape)
            batches.append(packets(number, delta[place], event))
            places.append(place)
        yield interleave(batches, places)


def counter_packets(number: int, ts: np.ndarray, values: np.ndarray, start: int) -> bytes:
    """The values of one counter."""
    event = Rows(len(ts)).constant(tag(TYPE, VARINT) + varint_bytes(TrackEvent.TYPE_COUNTER))
    if np.array_equal(values, np.trunc(values)) and (np.abs(values) < 2**53).all():
        event.varint(COUNTER_VALUE, values.astype(np.int64))
    else:
        event.fixed64(DOUBLE_COUNTER_VALUE, values)
    return packets(number, np.diff(ts, prepend=start), event).tobytes()
