"""A recording as columns: every kind of record, whether or not it was written, with its place in the file."""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.records.contents import BLOCK, EVER, IMPOSSIBLE_NS, STREAMED, Contents, Few
from analyzer.records.observed import LEVELS, clipped, gaps_of
from analyzer.records.schema import Columns, Text
from analyzer.records.slot_columns import columns_of
from analyzer.records.spans import Marks, Pairs, in_time, numbered, pair, successors
from tracer.recording.format import FIRST_DETAIL, RING_HEADER_BYTES, STREAMS, Recording, RecordingError

UNKNOWN_U32 = 2**32 - 1
WITHIN_STEPS = ("graph", "op", "expert")
"""Kinds of spans that end before the next step begins, if it begins alone."""
CACHE = np.array(["", "hit", "miss", "prefetched"], object)
SELDOM = ("cpu",)
REASON = np.array(["startup", "demand", "prefetch"], object)
BACKEND_NAMES = " cpu htp cuda vulkan opencl blas metal sycl cann hexagon rpc webgpu meta"
BACKEND = np.array(BACKEND_NAMES.split(" "), object)
"""Names by enum backend_id of bpf/records.h."""


def open_recording(path: str | os.PathLike[str]) -> Recording:
    """Open a recording for analysis; raises RecordingError on anything that is none, a damaged manifest included."""
    try:
        return Recording(path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"{Path(path)}/manifest.json is damaged ({error!r}); record again") from None


def section(manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object of the manifest; empty where it is missing, null or something else."""
    value = manifest.get(name)
    return value if isinstance(value, dict) else {}


class Rows:
    """The records of one kind in time order; a field that the recording does not have reads as zeros.

    They are rows `at` of `held`, which may be the file itself as it is mapped: nothing is copied but the fields asked for.
    """

    def __init__(self, held: np.ndarray, dtype: np.dtype, position: np.ndarray, at: np.ndarray | None = None):
        self.held, self.dtype, self.position = held, dtype, position
        self.at = np.arange(len(held)) if at is None else at
        self._columns: dict[str, np.ndarray] = {}
        self._of: tuple[Rows, np.ndarray] | None = None
        """The rows that these were chosen from, and which."""

    @cached_property
    def slots(self) -> np.ndarray:
        """The records' slots."""
        return self.held[self.at]

    @property
    def records(self) -> np.ndarray:
        """The records as a structured array."""
        width = self.slots.dtype.itemsize
        whole = np.dtype({"names": ["r"], "formats": [self.dtype], "offsets": [RING_HEADER_BYTES], "itemsize": width})
        return self.slots.view(whole)["r"]

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, field: str) -> np.ndarray:
        """A field as int64 (numbers), float64 or bytes; not to be written to."""
        if field not in self._columns:
            self._columns[field] = self._column(field)
        column = self._columns[field]
        column.flags.writeable = False
        return column

    def _column(self, field: str) -> np.ndarray:
        if field not in (self.dtype.names or ()):
            return np.zeros(len(self), np.int64)
        if self._of is not None and self.dtype[field].kind in "iu":
            rows, keep = self._of
            return rows[field][keep]
        numbers = [name for name in self.dtype.names or () if self.dtype[name].kind in "iu" and name != "kind"]
        if field in numbers:  # all in one go, but for what is seldom asked for: each slot is fetched once
            wanted = [name for name in numbers if name == field or (name not in SELDOM and name not in self._columns)]
            self._columns |= columns_of(self.held, self.at, self.dtype, wanted)
            return self._columns[field]
        column = self.records[field]
        return column.astype(np.int64) if column.dtype.kind in "iu" else column.copy()

    def raw(self, field: str) -> np.ndarray:
        """A field as unsigned 64-bit numbers: handles, addresses and values."""
        return self[field].view(np.uint64)

    def where(self, keep: np.ndarray) -> "Rows":
        """Some of the records."""
        if keep.dtype == bool and keep.all():
            return self
        chosen = Rows(self.held, self.dtype, self.position[keep], self.at[keep])
        chosen._of = self, keep
        return chosen

    def marks(self, identity: np.ndarray | None = None, unknown: int | None = None) -> Marks:
        """The records as begins or ends on their threads; an identity equal to `unknown` was not told."""
        known = np.zeros(len(self), bool)
        if identity is None:
            identity = np.zeros(len(self), np.int64)
        else:
            known = identity != unknown if unknown is not None else ~known
        return Marks(self["tid"], self["ts"], self.position, identity, known)


@dataclass(frozen=True)
class Spans:
    """Begin records with their ends: `end` indexes the end records, -1 where there is none."""

    end: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    complete: np.ndarray

    def columns(self) -> dict[str, np.ndarray]:
        """The columns of schema.SPAN."""
        duration = self.end_ns - self.begin_ns
        return {"begin_ns": self.begin_ns, "end_ns": self.end_ns, "duration_ns": duration, "complete": self.complete}

    def until(self) -> np.ndarray:
        """Exclusive end for containment: a span that was still open contains the last instant too."""
        return np.where(self.complete | (self.end_ns == self.begin_ns), self.end_ns, self.end_ns + 1)


class Source:
    """The records of a recording by kind, the span of time they cover, and the ends that found no begin.

    Kinds of which there are many are read for a stretch of time (`within`); by default that is all there is.
    """

    def __init__(self, recording: Recording, block: int = BLOCK):
        self.recording, self.manifest = recording, recording.manifest
        self.contents = Contents(recording, block)
        self.unpaired: dict[str, list[dict[str, np.ndarray]]] = {}
        self.damaged = self.contents.damaged
        """Records left out: their time is none that a clock can show."""
        self.first_ns, self.last_ns = self.contents.first_ns, self.contents.last_ns
        self.step_begins = np.empty(0, np.int64)
        """Times at which a step begins while no other is open: no graph, operator or expert reaches across one."""
        self.told_by_share: np.ndarray | None = None
        """Which of op_begin were made of shares (analyzer/tables/nodes.py): their page faults are their own, no running count."""
        self._few: dict[str, Rows] = {}
        self._stretch(-1, EVER)
        engines = section(self.manifest, "engines")
        known = [(name, e) for name, e in engines.items() if isinstance(e, dict) and "id" in e]
        known.sort(key=lambda each: bool(each[1].get("libraries")))  # of two with one id, that which was found
        self.engine_names = {int(e["id"]): name for name, e in known}

    def _stretch(self, begin_ns: int, end_ns: int) -> None:
        self.begin_ns, self.end_ns = begin_ns, end_ns
        self._many: dict[str, Rows] = {}
        self._slots: dict[str, tuple[np.ndarray, dict[int, np.ndarray], int]] = {}

    def within(self, begin_ns: int, end_ns: int) -> "Source":
        """The same recording, of the kinds of which there are many only the records of that time."""
        piece = copy.copy(self)
        piece._stretch(begin_ns, end_ns)
        return piece

    def rows(self, kind: str) -> Rows:
        """The records of one kind; none where the recording does not know the kind."""
        known = self._many if kind in STREAMED else self._few
        if kind not in known:
            known[kind] = self._read(kind)
        return known[kind]

    def replace(self, kind: str, rows: Rows) -> None:
        """Let other records stand for those of one kind from now on."""
        (self._many if kind in STREAMED else self._few)[kind] = rows

    def _read(self, kind: str) -> Rows:
        if kind not in self.recording.layouts:
            return Rows(np.empty(0, "V64"), np.dtype([("ts", "<u8")]), np.empty(0, np.int64))
        number, dtype = self.recording.layouts[kind]
        stream = "details" if number >= FIRST_DETAIL else "events"
        raw = f"V{STREAMS[stream]}"
        if kind in STREAMED:
            if stream not in self._slots:
                self._slots[stream] = self.contents.between(stream, self.begin_ns, self.end_ns)
            slots, kinds, start = self._slots[stream]
            at = kinds.get(number, np.empty(0, np.int64))
            rows = Rows(slots, dtype, at + start, at)
        else:
            few = self.contents.few.get(number, Few())
            rows = Rows(
                np.concatenate([np.empty(0, raw), *few.slots]), dtype, np.concatenate([np.empty(0, np.int64), *few.position])
            )
            if self.damaged:
                rows = rows.where(rows.raw("ts") < IMPOSSIBLE_NS)
        if not in_time(rows["ts"]):
            rows = rows.where(np.argsort(rows["ts"], kind="stable"))
        return rows

    def count(self) -> dict[str, int]:
        """Records found in the files, by kind; kinds that no layout names under "unknown"."""
        found: dict[str, int] = {}
        for number, count in sorted(self.contents.counts.items()):
            name = self.contents.names.get(number, "unknown")
            found[name] = found.get(name, 0) + count
        return found

    def discarded(self) -> int:
        """Slots that the kernel side reserved and gave up, or never finished."""
        return self.contents.discarded

    def next_step(self, ts: np.ndarray) -> np.ndarray:
        """For times in order, when the next step begins behind each; EVER where none does."""
        cuts = np.searchsorted(ts, self.step_begins)
        return np.repeat(np.append(self.step_begins, EVER), np.diff(cuts, prepend=0, append=len(ts)))

    def thread(self, rows: Rows) -> Columns:
        """The columns of schema.THREAD."""
        return {"engine": self.engines(rows["engine"]), "pid": rows["pid"], "tid": rows["tid"]}

    def engines(self, ids: np.ndarray) -> Text:
        """Names of engine ids."""
        number, first = numbered(ids)
        names = [self.engine_names.get(i, f"engine {i}") for i in ids[first].tolist()]
        return Text(number.astype(np.int32), np.array([*names, ""], object)[:-1])

    def named(self, ids: np.ndarray, types: np.ndarray, table: str) -> Text:
        """Names of operator or graph numbers as the engine with that id declares them in `table`."""
        code, first = numbered(ids, types)
        found = []
        for engine, number in zip(ids[first].tolist(), types[first].tolist(), strict=True):
            declared = section(section(self.manifest, "engines"), self.engine_names.get(engine, "")).get(table) or []
            found.append(declared[number] if 0 <= number < len(declared) else f"{table[:-1]} {number}")
        return Text(code, np.array([*found, ""], object))

    def spans(self, kind: str, identity: tuple[str, ...] = (), unknown: int | None = None, keep: Rows | None = None) -> Spans:
        """Pair <kind>_begin with <kind>_end by thread and identity fields; ends without begin go to `unpaired`."""
        begin, end = self.rows(f"{kind}_begin") if keep is None else keep, self.rows(f"{kind}_end")
        begins, ends = begin.marks(combined(begin, identity), unknown), end.marks(combined(end, identity), unknown)
        pairs: Pairs = pair(begins, ends)
        if kind in WITHIN_STEPS and self._crosses(begins.ts, ends.ts, pairs.end):
            pairs = pair(self._by_step(begins), self._by_step(ends))
        self.leave_unpaired(kind, end.where(pairs.unpaired))
        return self.close(begin, pairs.end, end["ts"], LEVELS.get(kind, kind), kind in WITHIN_STEPS)

    def _crosses(self, begin_ns: np.ndarray, end_ns: np.ndarray, pairs: np.ndarray) -> bool:
        """Whether a pair reaches across the begin of a step: then records were lost, and its end is another's."""
        found = np.flatnonzero(pairs >= 0)
        return bool(np.any(end_ns[pairs[found]] >= self.next_step(begin_ns)[found]))

    def _by_step(self, marks: Marks) -> Marks:
        """The same marks, each on its thread and in its step."""
        step = np.searchsorted(self.step_begins, marks.ts, "right")
        return replace(marks, key=marks.key + (step << 32))

    def leave_unpaired(self, kind: str, rows: Rows) -> None:
        """Note ends that found no begin."""
        if len(rows):
            self.unpaired.setdefault(kind, []).append({"pid": rows["pid"], "tid": rows["tid"], "ts_ns": rows["ts"]})

    def close(self, begin: Rows, end: np.ndarray, end_ts: np.ndarray, level: str, in_step: bool = False) -> Spans:
        """End what never ended: with the recording where nothing of its kind follows on its thread, else where it began.

        What belongs to a step (`in_step`) ends with its step, if not with the recording. Nothing that was open when its level
        was switched off reaches further than that.
        """
        begin_ns = begin["ts"]
        complete = end >= 0
        closing = begin_ns.copy()
        closing[complete] = end_ts[end[complete]]
        if not complete.all():
            after = successors(begin["tid"], begin_ns)
            limit = self.next_step(begin_ns) if in_step else np.full(len(begin), EVER)
            last = ~complete & ((after < 0) | (begin_ns[after] >= limit))
            closing[last] = np.minimum(limit[last], self.last_ns)
            closing[~complete] = clipped(begin_ns[~complete], closing[~complete], gaps_of(self, level))
        return Spans(end, begin_ns, closing, complete)


def combined(rows: Rows, fields: tuple[str, ...]) -> np.ndarray | None:
    """The identity fields of each record as one number."""
    if not fields:
        return None
    answer = rows[fields[0]]
    for field in fields[1:]:
        answer = (answer << 32) ^ (rows[field] & UNKNOWN_U32)
    return answer


def chosen(names: np.ndarray, numbers: np.ndarray) -> Text:
    """names[numbers], "" for numbers beyond the table."""
    known = (numbers >= 0) & (numbers < len(names))
    return Text(np.where(known, numbers, len(names)).astype(np.int32), np.append(names, ""))


def texts(column: np.ndarray) -> np.ndarray:
    """Fixed-size C strings as text: up to the first NUL, undecodable bytes replaced."""
    if column.dtype.kind != "S":
        return np.full(len(column), "", object)
    values, inverse = np.unique(column, return_inverse=True)
    names = [bytes(v).split(b"\0", 1)[0].decode(errors="replace") for v in values.tolist()]
    return np.array([*names, ""], object)[inverse]
