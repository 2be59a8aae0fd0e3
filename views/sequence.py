"""One packet sequence of a native Perfetto trace: one track's events with incremental time, encoded in batches."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from views.protobuf import VARINT, Messages, field_bytes, interleave, tag, varint_bytes
from views.slices import Slices, Text, event_order

PACKET, TIMESTAMP, SEQUENCE_ID, TRACK_EVENT = 1, 8, 10, 11
CATEGORY, ANNOTATION, TYPE, NAME = 3, 4, 9, 10
COUNTER_VALUE, DOUBLE_COUNTER_VALUE, FLOW, TERMINATING_FLOW = 30, 44, 47, 48
ARG_NAME, ARG_BOOL, ARG_INT, ARG_TEXT = 1, 2, 4, 17
BOOLEANS = {"estimated", "incomplete"}
MONOTONIC, INCREMENTAL = 3, 64
BATCH = 1 << 15


@dataclass
class Names:
    """Texts and the numbers that stand for them; the numbers hold for the whole trace, each sequence defines those it uses."""

    ids: dict[str, int] = field(default_factory=lambda: {"": 0})

    def of(self, text: str) -> int:
        """The number of one text; 0 for "" """
        return self.ids.setdefault(text, len(self.ids))

    def column(self, text: Text) -> np.ndarray:
        """The numbers of a column."""
        return np.array([self.of(label) for label in text.labels] or [0], np.int64)[text.codes]


@dataclass
class Level:
    """Slices with every text replaced by its number."""

    slices: Slices
    category: int
    name: np.ndarray
    args: list[tuple[int, int, np.ndarray]]

    @classmethod
    def of(cls, slices: Slices, names: Names) -> "Level":
        """Number the texts of `slices`."""
        args = []
        for label, values in slices.args.items():
            if isinstance(values, Text):
                args.append((names.of(label), ARG_TEXT, names.column(values)))
            else:
                args.append((names.of(label), ARG_BOOL if label in BOOLEANS else ARG_INT, values))
        if not slices.complete.all():
            args.append((names.of("incomplete"), ARG_BOOL, np.where(slices.complete, -1, 1)))
        return cls(slices, names.of(slices.category), names.column(slices.name), args)

    def texts(self, rows: np.ndarray) -> dict[str, set[int]]:
        """The numbers that some rows use, by table of InternedData."""
        values = [np.unique(column[rows]) for _, kind, column in self.args if kind == ARG_TEXT]
        return {
            "event_categories": {self.category},
            "event_names": set(np.unique(self.name[rows]).tolist()),
            "debug_annotation_names": {name for name, _, _ in self.args},
            "debug_annotation_string_values": set(np.concatenate(values).tolist()) - {0} if values else set(),
        }

    def events(self, rows: np.ndarray) -> Messages:
        """The TrackEvents that begin some rows (or are them, if instants)."""
        kind = TrackEvent.TYPE_INSTANT if self.slices.instant else TrackEvent.TYPE_SLICE_BEGIN
        event = Messages(len(rows)).constant(
            tag(TYPE, VARINT) + varint_bytes(kind) + tag(CATEGORY, VARINT) + varint_bytes(self.category)
        )
        event.varint(NAME, self.name[rows])
        for name, arg, column in self.args:
            values = column[rows]
            present = values > 0 if arg == ARG_TEXT else values != -1
            if present.any():
                annotation = Messages(len(rows)).constant(tag(ARG_NAME, VARINT) + varint_bytes(name))
                event.message(ANNOTATION, annotation.varint(arg, np.where(present, values, 0)), present)
        if self.slices.flow is not None:
            flow = self.slices.flow[rows].astype(np.uint64)
            ends = np.zeros(len(rows), bool) if self.slices.ends_flow is None else self.slices.ends_flow[rows]
            event.fixed64(FLOW, flow, (flow > 0) & ~ends).fixed64(TERMINATING_FLOW, flow, (flow > 0) & ends)
        return event


@dataclass
class Events:
    """The begin (i) and end (~i) events of one track, in order; slice i is row `row[i]` of level `level[i]`."""

    order: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    level: np.ndarray
    row: np.ndarray

    @classmethod
    def of(cls, begin: np.ndarray, end: np.ndarray, level: np.ndarray, row: np.ndarray, instant: np.ndarray) -> "Events":
        """Put the events of a track in order; an instant has no end event."""
        order = event_order(begin, end, level)
        if instant.any():
            order = order[(order >= 0) | ~instant[np.where(order < 0, ~order, 0)]]
        return cls(order, begin, end, level, row)


def head(number: int, track: int, texts: dict[str, set[int]], labels: list[str], start: int) -> bytes:
    """The packets that open a sequence: its clock, default track and texts."""
    packet = TracePacket(trusted_packet_sequence_id=number, sequence_flags=TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
    packet.trace_packet_defaults.timestamp_clock_id = INCREMENTAL
    packet.trace_packet_defaults.track_event_defaults.track_uuid = track
    packet.clock_snapshot.clocks.add(clock_id=INCREMENTAL, timestamp=0, is_incremental=True)
    packet.clock_snapshot.clocks.add(clock_id=MONOTONIC, timestamp=start)
    for table, numbers in texts.items():
        for iid in sorted(numbers):
            text = labels[iid]
            value = text.encode() if table == "debug_annotation_string_values" else None
            entry = getattr(packet.interned_data, table).add(iid=iid)
            if value is None:
                entry.name = text
            else:
                entry.str = value
    return field_bytes(PACKET, packet.SerializeToString())


def packets(number: int, delta: np.ndarray, events: Messages) -> Messages:
    """TrackEvents with their times, as the packets of a trace."""
    packet = Messages(len(delta)).constant(tag(SEQUENCE_ID, VARINT) + varint_bytes(number)).varint(TIMESTAMP, delta)
    return Messages(len(delta)).message(PACKET, packet.message(TRACK_EVENT, events))


def slice_packets(number: int, levels: list[Level], events: Events, start: int) -> Iterator[bytes]:
    """The events of one track, batch by batch."""
    last = start
    for at in range(0, len(events.order), BATCH):
        order = events.order[at : at + BATCH]
        ended = order < 0
        index = np.where(ended, ~order, order)
        ts = np.where(ended, events.end[index], events.begin[index])
        delta = np.diff(ts, prepend=last)
        last = int(ts[-1])
        places = [np.flatnonzero(ended)]
        over = Messages(len(places[0])).constant(tag(TYPE, VARINT) + varint_bytes(TrackEvent.TYPE_SLICE_END))
        batches = [packets(number, delta[places[0]], over)]
        level = np.where(ended, -1, events.level[index])
        for k in np.unique(level[~ended]).tolist():
            place = np.flatnonzero(level == k)
            places.append(place)
            batches.append(packets(number, delta[place], levels[k].events(events.row[index[place]])))
        yield interleave(batches, places)


def counter_packets(number: int, ts: np.ndarray, values: np.ndarray, start: int) -> bytes:
    """The values of one counter."""
    event = Messages(len(ts)).constant(tag(TYPE, VARINT) + varint_bytes(TrackEvent.TYPE_COUNTER))
    if np.array_equal(values, np.trunc(values)) and (np.abs(values) < 2**53).all():
        event.varint(COUNTER_VALUE, values.astype(np.int64))
    else:
        event.fixed64(DOUBLE_COUNTER_VALUE, values)
    return packets(number, np.diff(ts, prepend=start), event).tobytes()
