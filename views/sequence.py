"""One packet sequence of a native Perfetto trace: one track's events with incremental time, encoded in batches."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from views.protobuf import VARINT, Form, encode, encode_all, field_bytes, tag, varint_bytes
from views.slices import Column, Slices, Text, lanes, nested, preorder

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


def valid(text: str) -> str:
    """A text as protobuf takes it: a command line may hold bytes that are no UTF-8."""
    return text if text.isascii() else text.encode(errors="replace").decode()


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

    def labels(self, table: str, text: Text) -> np.ndarray:
        """The numbers of a column's labels."""
        return np.array([self.of(table, label) for label in text.labels] or [0], np.int64)


@dataclass
class Level:
    """Slices as TrackEvents: `form` begins each one (or is it, if an instant).

    `texts`: columns of texts, the numbers of their labels, and the table of these; `constant`: numbers that every slice uses.
    """

    slices: Slices
    form: Form
    texts: list[tuple[Text, np.ndarray, str]]
    constant: dict[str, set[int]]

    @classmethod
    def of(cls, slices: Slices, names: Names) -> "Level":
        """Number the texts of `slices`."""
        category, labels = names.of(CATEGORIES, slices.category), names.labels(NAMES, slices.name)
        kind = TrackEvent.TYPE_INSTANT if slices.instant else TrackEvent.TYPE_SLICE_BEGIN
        form = Form().constant(tag(TYPE, VARINT) + varint_bytes(kind) + tag(CATEGORY, VARINT) + varint_bytes(category))
        form.varint(NAME, slices.name.codes, labels)
        texts = [(slices.name, labels, NAMES)]
        args: dict[str, Column] = dict(slices.args)
        if not slices.complete.all():
            args["incomplete"] = np.where(slices.complete, -1, 1)
        for label, values in args.items():
            head = tag(ARG_NAME, VARINT) + varint_bytes(names.of(ARG_NAMES, label))
            if isinstance(values, Text):
                texts.append((values, names.labels(ARG_TEXTS, values), ARG_TEXTS))
                form.member(ANNOTATION, head, ARG_TEXT, values.codes, texts[-1][1], absent=0)
            else:
                form.member(ANNOTATION, head, ARG_BOOL if label in BOOLEANS else ARG_INT, values, None, absent=-1)
        if slices.flow is not None:
            ends = np.zeros(len(slices), bool) if slices.ends_flow is None else slices.ends_flow
            form.fixed64(FLOW, np.where(ends, 0, slices.flow), absent=0)
            form.fixed64(TERMINATING_FLOW, np.where(ends, slices.flow, 0), absent=0)
        constant = {CATEGORIES: {category}, ARG_NAMES: {names.of(ARG_NAMES, label) for label in args}}
        return cls(slices, form, texts, constant)

    def used(self, rows: np.ndarray) -> dict[str, set[int]]:
        """The numbers of the texts that some rows use, by table."""
        found = {NAMES: set[int](), ARG_TEXTS: set[int](), **self.constant}
        for text, labels, table in self.texts:
            found[table] |= set(labels[np.flatnonzero(np.bincount(text.codes[rows]))].tolist()) - {0}
        return found


@dataclass
class Events:
    """The slices of one track, in the order of their levels, and their begin (i) and end (~i) events in order of time.

    Slice i is row `row[i]` of `levels[rank[i]]`. An instant has no end. `crossed`: slices that do not nest, see `nested`.
    """

    levels: list[Level]
    begin: np.ndarray
    end: np.ndarray
    row: np.ndarray
    rank: np.ndarray
    complete: np.ndarray
    order: np.ndarray
    crossed: np.ndarray

    @classmethod
    def of(cls, levels: list[Level], rows: list[np.ndarray]) -> "Events":
        """Rows of some levels, outermost level first."""
        drawn = [(ly, r) for ly, r in zip(levels, rows, strict=True) if len(r)]
        begin, end, complete = (
            np.concatenate([getattr(ly.slices, column)[r] for ly, r in drawn]) for column in ("begin", "end", "complete")
        )
        rank = np.repeat(np.arange(len(drawn)), [len(r) for _, r in drawn])
        row = np.concatenate([r for _, r in drawn])
        return cls.arranged([ly for ly, _ in drawn], begin, np.maximum(begin, end), row, rank, complete)

    @classmethod
    def arranged(
        cls, levels: list[Level], begin: np.ndarray, end: np.ndarray, row: np.ndarray, rank: np.ndarray, complete: np.ndarray
    ) -> "Events":
        """Slices in their order."""
        instant = np.array([level.slices.instant for level in levels])[rank]
        order, crossed = nested(preorder(begin, end, rank), begin, end, instant)
        return cls(levels, begin, end, row, rank, complete, order, crossed)

    def lanes(self) -> "list[Events]":
        """Events that nest: these, or parts of these on as many lanes as that takes."""
        if not self.crossed.any():
            return [self]
        lane, end = lanes(self.begin, self.end, self.rank, self.complete, self.crossed)
        return [self.only(np.flatnonzero(lane == k), end) for k in range(int(lane.max()) + 1)]

    def only(self, some: np.ndarray, end: np.ndarray) -> "Events":
        """Some of the slices, with ends that may be new."""
        begin, row, rank, complete = (column[some] for column in (self.begin, self.row, self.rank, self.complete))
        return self.arranged(self.levels, begin, end[some], row, rank, complete)

    def of_level(self) -> Iterator[tuple[Level, np.ndarray]]:
        """Each level that is drawn, with its rows."""
        for rank, level in enumerate(self.levels):
            if len(rows := self.row[self.rank == rank]):
                yield level, rows


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


def packet(number: int, delta: np.ndarray) -> Form:
    """The beginning of a packet; `delta`: time since the packet before."""
    form = Form().open(PACKET).constant(tag(SEQUENCE_ID, VARINT) + varint_bytes(number))
    return form.each(TIMESTAMP, delta)


def slice_packets(number: int, events: Events, start: int) -> Iterator[bytes]:
    """The events of one track, batch by batch."""
    last = start
    ended_event = field_bytes(TRACK_EVENT, tag(TYPE, VARINT) + varint_bytes(TrackEvent.TYPE_SLICE_END))
    for at in range(0, len(events.order), BATCH):
        order = events.order[at : at + BATCH]
        ended = order < 0
        index = np.where(ended, ~order, order)
        ts = np.where(ended, events.end[index], events.begin[index])
        delta = np.diff(ts, prepend=last)
        last = int(ts[-1])
        begins = (packet(number, delta).open(TRACK_EVENT).then(level.form).close().close() for level in events.levels)
        forms = [packet(number, delta).constant(ended_event).close(), *begins]
        yield encode(forms, np.where(ended, 0, events.rank[index] + 1), np.where(ended, 0, events.row[index]))


def counter_packets(number: int, ts: np.ndarray, values: np.ndarray, start: int) -> bytes:
    """The values of one counter."""
    form = (
        packet(number, np.diff(ts, prepend=start))
        .open(TRACK_EVENT)
        .constant(tag(TYPE, VARINT) + varint_bytes(TrackEvent.TYPE_COUNTER))
    )
    if np.array_equal(values, np.trunc(values)) and (np.abs(values) < 2**53).all():
        form.varint(COUNTER_VALUE, values.astype(np.int64))
    else:
        form.fixed64(DOUBLE_COUNTER_VALUE, values)
    return encode_all(form.close().close(), len(ts))
