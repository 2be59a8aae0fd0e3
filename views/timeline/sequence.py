"""One packet sequence of a native Perfetto trace: one track's events with incremental time, encoded in batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from views.timeline.nesting import nested_events, nesting_lanes, preorder
from views.timeline.protobuf import VARINT, VARINT_STEP, Form, Part, _messages, encode, field_bytes, tag, valid_text, varint_bytes
from views.timeline.slices import Column, Slices
from views.timeline.trace_file import Packets

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


@dataclass
class Names:
    """Texts and their numbers, by table of InternedData; 0 is "".

    The numbers are the same in the whole trace; each sequence defines those that it uses.
    """

    ids: dict[str, dict[str, int]] = field(
        default_factory=lambda: {t: {"": 0} for t in (CATEGORIES, NAMES, ARG_NAMES, ARG_TEXTS)}
    )

    def of(self, table: str, text: str) -> int:
        """The number of one text."""
        numbers = self.ids[table]
        return numbers.setdefault(valid_text(text), len(numbers))

    def labels(self, table: str, text: pyarrow.DictionaryArray) -> np.ndarray:
        """The numbers of a column's labels."""
        return np.array([self.of(table, label) for label in text.dictionary.to_pylist()] or [0], np.int64)


@dataclass
class TextColumn:
    """A column of texts: the numbers of its labels in a table of InternedData, and which row each slice takes (None: its own)."""

    text: pyarrow.DictionaryArray
    labels: np.ndarray
    table: str
    row: np.ndarray | None

    def by(self, rows: np.ndarray) -> set[int]:
        """The numbers of the texts of some slices."""
        rows, said = rows if self.row is None else self.row[rows], np.zeros(len(self.labels), bool)
        said[self.text.indices.to_numpy()[rows]] = True
        return set(self.labels[said].tolist()) - {0}


@dataclass
class Level:
    """Slices as TrackEvents. `texts`: their text columns; `constant`: numbers of texts that every slice uses.

    `forms`: the forms of begins or instants, each with its number of rows and the row of each slice (None: its own). `parts`
    returns them encoded, waiting if necessary.
    """

    slices: Slices
    forms: list[tuple[Form, int, np.ndarray | None]] = field(default_factory=list)
    parts: Callable[[], list[Part]] = list
    texts: list[TextColumn] = field(default_factory=list)
    constant: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, slices: Slices, names: Names) -> "Level":
        """Number the texts of `slices`."""
        category, level = names.of(CATEGORIES, slices.category), cls(slices)
        level.constant = {CATEGORIES: {category}, ARG_NAMES: set()}
        kind = TrackEvent.TYPE_INSTANT if slices.instant else TrackEvent.TYPE_SLICE_BEGIN
        form = Form().constant(tag(TYPE, VARINT) + varint_bytes(kind) + tag(CATEGORY, VARINT) + varint_bytes(category))
        form.varint(NAME, slices.name.indices.to_numpy(), level.text(names, slices.name, NAMES, slices.row))
        level.arguments(form, names, slices.args, slices.row)
        own = form if slices.row is None else Form()
        level.arguments(own, names, slices.own, None)
        if not slices.complete.all():
            level.arguments(own, names, {"incomplete": np.where(slices.complete, -1, 1)}, None)
        if slices.flow is not None and slices.flow.any():
            ends = np.zeros(len(slices), bool) if slices.ends_flow is None else slices.ends_flow
            own.fixed64(FLOW, np.where(ends, 0, slices.flow), absent=0)
            own.fixed64(TERMINATING_FLOW, np.where(ends, slices.flow, 0), absent=0)
        if slices.step_flow is not None and slices.step_flow.any():
            own.fixed64(FLOW, slices.step_flow, absent=0)
        level.forms = [(form, len(slices.name), slices.row)]
        if own is not form and own.steps:
            level.forms.append((own, len(slices), None))
        return level

    def encoded(self) -> list[Part]:
        """The content of the slices as bytes."""
        return [(*encode(form, n), row) for form, n, row in self.forms]

    def text(self, names: Names, text: pyarrow.DictionaryArray, table: str, row: np.ndarray | None) -> np.ndarray:
        """The numbers of a column's labels; adds the column to `texts`."""
        self.texts.append(TextColumn(text, names.labels(table, text), table, row))
        return self.texts[-1].labels

    def arguments(self, form: Form, names: Names, args: dict[str, Column], row: np.ndarray | None) -> None:
        """Add arguments as annotations."""
        for label, values in args.items():
            number = names.of(ARG_NAMES, label)
            self.constant[ARG_NAMES].add(number)
            head = tag(ARG_NAME, VARINT) + varint_bytes(number)
            if isinstance(values, pyarrow.DictionaryArray):
                labels = self.text(names, values, ARG_TEXTS, row)
                form.member(ANNOTATION, head, ARG_TEXT, values.indices.to_numpy(), labels, absent=0)
            else:
                form.member(ANNOTATION, head, ARG_BOOL if label in BOOLEANS else ARG_INT, values, None, absent=-1)

    def used(self, rows: np.ndarray) -> dict[str, set[int]]:
        """The numbers of the texts that some slices use, by table."""
        numbers = {NAMES: set[int](), ARG_TEXTS: set[int](), **self.constant}
        for column in self.texts:
            numbers[column.table] |= column.by(rows)
        return numbers


@dataclass
class TrackEvents:
    """The slices of one track in `preorder`, and their begin (i) and end (~i) events in time order.

    Slice i is row `row[i]` of `levels[rank[i]]`, whose rows are `rows[rank[i]]`. An instant has no end. `crossed`: slices that
    do not nest, see `nested`.
    """

    levels: list[Level]
    rows: list[np.ndarray]
    begin: np.ndarray
    end: np.ndarray
    row: np.ndarray
    rank: np.ndarray
    complete: np.ndarray
    order: np.ndarray
    crossed: np.ndarray

    @classmethod
    def of(cls, levels: list[Level], rows: list[np.ndarray]) -> "TrackEvents":
        """Rows of some levels, outermost level first."""
        drawn = [(ly, r) for ly, r in zip(levels, rows, strict=True) if len(r)]
        begin, end, complete = (
            np.concatenate([getattr(ly.slices, column)[r] for ly, r in drawn]) for column in ("begin", "end", "complete")
        )
        return cls.arranged([ly for ly, _ in drawn], [r for _, r in drawn], begin, np.maximum(begin, end), complete)

    @classmethod
    def arranged(
        cls, levels: list[Level], rows: list[np.ndarray], begin: np.ndarray, end: np.ndarray, complete: np.ndarray
    ) -> "TrackEvents":
        """Slices level by level."""
        row, rank = np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(r) for r in rows])
        by_begin = preorder(begin, end, rank)
        begin, end, row, rank, complete = (column[by_begin] for column in (begin, end, row, rank, complete))
        order, crossed = nested_events(begin, end, np.array([level.slices.instant for level in levels])[rank])
        return cls(levels, rows, begin, end, row, rank, complete, order, crossed)

    def lanes(self) -> "list[TrackEvents]":
        """Events that nest: these, or these split over as many lanes as needed."""
        if not self.crossed.any():
            return [self]
        lane, end = nesting_lanes(self.begin, self.end, self.rank, self.complete, self.crossed)
        return [self.only(np.flatnonzero(lane == k), end) for k in range(int(lane.max()) + 1)]

    def only(self, some: np.ndarray, end: np.ndarray) -> "TrackEvents":
        """Some of the slices, with the given ends."""
        some = some[np.argsort(self.rank[some], kind="stable")]
        rows = np.split(self.row[some], np.searchsorted(self.rank[some], np.arange(1, len(self.levels))))
        return self.arranged(self.levels, rows, self.begin[some], end[some], self.complete[some])

    def texts(self) -> dict[str, set[int]]:
        """The numbers of the texts that the slices use, by table."""
        by_table: dict[str, set[int]] = {}
        for level, rows in zip(self.levels, self.rows, strict=True):
            for table, numbers in (level.used(rows) if len(rows) else {}).items():
                by_table.setdefault(table, set()).update(numbers)
        return by_table


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


def track_opening(number: int, track: int, events: TrackEvents, names: Names, start: int) -> Packets:
    """The packets that open a track's sequence."""
    return 0, head(number, track, events.texts(), names, start)


def packet_prefix(number: int) -> bytes:
    """The first bytes of every packet of a sequence, up to the time since the previous packet."""
    return tag(SEQUENCE_ID, VARINT) + varint_bytes(number) + tag(TIMESTAMP, VARINT)


def slice_packets(number: int, events: TrackEvents, start: int) -> Iterator[Callable[[], Packets]]:
    """The events of one track, a job for each batch."""
    for first in range(0, len(events.order), BATCH):
        order = events.order[first : first + BATCH]
        yield partial(event_batch, number, events, order, start)
        last = int(order[-1])
        start = int(events.begin[last] if last >= 0 else events.end[~last])


def event_batch(number: int, events: TrackEvents, order: np.ndarray, start: int) -> Packets:
    """Some events in time order."""
    ended, levels = tag(TYPE, VARINT) + varint_bytes(TrackEvent.TYPE_SLICE_END), [level.parts() for level in events.levels]
    columns = (events.rank, events.row, events.begin, events.end)
    return len(order), _messages.events(packet_prefix(number), ended, levels, order, *columns, start)


def counter_packets(number: int, ts: np.ndarray, values: np.ndarray, start: int) -> Packets:
    """The values of one counter."""
    form = Form().open(PACKET).step(VARINT_STEP, packet_prefix(number), np.diff(ts, prepend=start))
    form.open(TRACK_EVENT).constant(tag(TYPE, VARINT) + varint_bytes(TrackEvent.TYPE_COUNTER))
    if np.array_equal(values, np.trunc(values)) and (np.abs(values) < 2**53).all():
        form.varint(COUNTER_VALUE, values.astype(np.int64))
    else:
        form.fixed64(DOUBLE_COUNTER_VALUE, values)
    return len(ts), encode(form.close().close(), len(ts))[0]
