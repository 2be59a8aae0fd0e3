"""A recording as columns: every kind of record, whether or not it was written, with its place in the file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.observed import LEVELS, clipped, gaps_of
from analyzer.spans import Marks, Pairs, distinct, first_rows, pair
from tracer.recording import BUSY, DISCARD, FIRST_DETAIL, RING_HEADER_BYTES, STREAMS, Recording, RecordingError

UNKNOWN_U32 = 2**32 - 1
IMPOSSIBLE_NS = 1 << 62
CACHE = np.array(["", "hit", "miss", "prefetched"], object)
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
    """The records of one kind in time order; a field that the recording does not have reads as zeros."""

    def __init__(self, slots: np.ndarray, dtype: np.dtype, position: np.ndarray):
        self.slots, self.dtype, self.position = slots, dtype, position
        self._columns: dict[str, np.ndarray] = {}

    @property
    def records(self) -> np.ndarray:
        """The records as a structured array."""
        width = self.slots.dtype.itemsize
        whole = np.dtype({"names": ["r"], "formats": [self.dtype], "offsets": [RING_HEADER_BYTES], "itemsize": width})
        return self.slots.view(whole)["r"]

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, field: str) -> np.ndarray:
        """A field as int64 (numbers), float64 or bytes; not to be written to."""
        if field not in self._columns:
            column = self._column(field)
            column.flags.writeable = False
            self._columns[field] = column
        return self._columns[field]

    def _column(self, field: str) -> np.ndarray:
        if field not in (self.dtype.names or ()):
            return np.zeros(len(self), np.int64)
        column = self.records[field]
        return column.astype(np.int64) if column.dtype.kind in "iu" else column.copy()

    def raw(self, field: str) -> np.ndarray:
        """A field as unsigned 64-bit numbers: handles, addresses and values."""
        return self[field].view(np.uint64)

    def where(self, keep: np.ndarray) -> "Rows":
        """Some of the records."""
        if keep.dtype == bool and keep.all():
            return self
        return Rows(self.slots[keep], self.dtype, self.position[keep])

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
    """All records of a recording by kind, the span of time they cover, and the ends that found no begin."""

    def __init__(self, recording: Recording):
        self.recording, self.manifest = recording, recording.manifest
        self.unpaired: list[dict[str, np.ndarray]] = []
        self.damaged = 0
        """Records left out: their time is none that a clock can show."""
        self._rows: dict[str, Rows] = {}
        self.first_ns, self.last_ns = self._extent()
        engines = section(self.manifest, "engines")
        known = [(name, e) for name, e in engines.items() if isinstance(e, dict) and "id" in e]
        known.sort(key=lambda each: bool(each[1].get("libraries")))  # of two with one id, that which was found
        self.engine_names = {int(e["id"]): name for name, e in known}

    def _extent(self) -> tuple[int, int]:
        first, last = [], []
        for stream in STREAMS:
            slots, kinds = self.recording.slots(stream), self.recording.kinds(stream)
            ts = slots[:, RING_HEADER_BYTES : RING_HEADER_BYTES + 8].view("<u8")[:, 0][kinds > 0]
            if len(ts) and ts.max() >= IMPOSSIBLE_NS:
                self.damaged += int(np.count_nonzero(ts >= IMPOSSIBLE_NS))
                ts = ts[ts < IMPOSSIBLE_NS]
            if len(ts):
                first.append(int(ts.min()))
                last.append(int(ts.max()))
        return min(first, default=0), max(last, default=0)

    def rows(self, kind: str) -> Rows:
        """The records of one kind; none where the recording does not know the kind."""
        if kind not in self._rows:
            self._rows[kind] = self._read(kind)
        return self._rows[kind]

    def replace(self, kind: str, rows: Rows) -> None:
        """Let other records stand for those of one kind from now on."""
        self._rows[kind] = rows

    def _read(self, kind: str) -> Rows:
        if kind not in self.recording.layouts:
            return Rows(np.empty(0, "V64"), np.dtype([("ts", "<u8")]), np.empty(0, np.int64))
        number, dtype = self.recording.layouts[kind]
        stream = "details" if number >= FIRST_DETAIL else "events"
        slots, slot = self.recording.slots(stream), np.flatnonzero(self.recording.kinds(stream) == number)
        rows = Rows(np.asarray(slots).view(f"V{STREAMS[stream]}")[:, 0][slot], dtype, slot)
        if self.damaged:
            rows = rows.where(rows.raw("ts") < IMPOSSIBLE_NS)
        if np.any(rows["ts"][1:] < rows["ts"][:-1]):
            rows = rows.where(np.argsort(rows["ts"], kind="stable"))
        return rows

    def count(self) -> dict[str, int]:
        """Records found in the files, by kind; kinds that no layout names under "unknown"."""
        names = {number: kind for kind, (number, _) in self.recording.layouts.items()}
        found: dict[str, int] = {}
        for stream in STREAMS:
            numbers, counts = np.unique(self.recording.kinds(stream), return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                if number:
                    name = names.get(number, "unknown")
                    found[name] = found.get(name, 0) + count
        return found

    def discarded(self) -> int:
        """Slots that the kernel side reserved and gave up, or never finished."""
        streams = (self.recording.slots(stream)[:, :4].copy().view("<u4") for stream in STREAMS)
        return sum(int(np.count_nonzero(s & (BUSY | DISCARD))) for s in streams)

    def thread(self, rows: Rows) -> dict[str, np.ndarray]:
        """The columns of schema.THREAD."""
        return {"engine": self.engines(rows["engine"]), "pid": rows["pid"], "tid": rows["tid"]}

    def engines(self, ids: np.ndarray) -> np.ndarray:
        """Names of engine ids."""
        names = np.array([self.engine_names.get(i, f"engine {i}") for i in range(256)], object)
        return names[ids]

    def named(self, ids: np.ndarray, types: np.ndarray, table: str) -> np.ndarray:
        """Names of operator or graph numbers as the engine with that id declares them in `table`."""
        answer = np.full(len(ids), "", object)
        for engine in distinct(ids).tolist():
            declared = section(section(self.manifest, "engines"), self.engine_names.get(engine, "")).get(table) or []
            mine = ids == engine
            inverse, values = pd.factorize(types[mine])
            names = [declared[v] if 0 <= v < len(declared) else f"{table[:-1]} {v}" for v in values.tolist()]
            answer[mine] = np.array(names, object)[inverse]
        return answer

    def spans(self, kind: str, identity: tuple[str, ...] = (), unknown: int | None = None, keep: Rows | None = None) -> Spans:
        """Pair <kind>_begin with <kind>_end by thread and identity fields; ends without begin go to `unpaired`."""
        begin, end = self.rows(f"{kind}_begin") if keep is None else keep, self.rows(f"{kind}_end")
        pairs: Pairs = pair(begin.marks(combined(begin, identity), unknown), end.marks(combined(end, identity), unknown))
        self.leave_unpaired(kind, end.where(pairs.unpaired))
        return self.close(begin, pairs.end, end["ts"], LEVELS.get(kind, kind))

    def leave_unpaired(self, kind: str, rows: Rows) -> None:
        """Note ends that found no begin."""
        kinds = np.full(len(rows), kind, object)
        self.unpaired.append({"kind": kinds, "pid": rows["pid"], "tid": rows["tid"], "ts_ns": rows["ts"]})

    def close(self, begin: Rows, end: np.ndarray, end_ts: np.ndarray, level: str) -> Spans:
        """End what never ended: with the recording where nothing of its kind follows on its thread, else where it began.

        Nothing that was open when its level was switched off reaches further than that.
        """
        begin_ns, tid = begin["ts"], begin["tid"]
        complete = end >= 0
        closing = begin_ns.copy()
        closing[complete] = end_ts[end[complete]]
        _, first_from_back = first_rows(tid[::-1])
        final = np.zeros(len(tid), bool)
        final[len(tid) - 1 - first_from_back] = True
        closing[final & ~complete] = self.last_ns
        if not complete.all():
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


def chosen(names: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """names[numbers], "" for numbers beyond the table."""
    table = np.append(names, "")
    return table[np.where((numbers >= 0) & (numbers < len(names)), numbers, len(names))]


def texts(column: np.ndarray) -> np.ndarray:
    """Fixed-size C strings as text: up to the first NUL, undecodable bytes replaced."""
    if column.dtype.kind != "S":
        return np.full(len(column), "", object)
    values, inverse = np.unique(column, return_inverse=True)
    names = [bytes(v).split(b"\0", 1)[0].decode(errors="replace") for v in values.tolist()]
    return np.array([*names, ""], object)[inverse]
