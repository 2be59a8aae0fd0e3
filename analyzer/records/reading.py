"""A recording as columns: every kind of record, including kinds without records, with positions in the file."""

import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow

from analyzer.records.contents import BLOCK, STREAMED, Contents, SlotSelection
from analyzer.records.damage import damaged_places
from analyzer.records.manifest import section
from analyzer.records.observed import LEVELS, Gaps, clip_at_gaps, level_gaps, token_gaps
from analyzer.records.rows import RecordSpans, Rows, identity_of
from analyzer.records.schema import Columns, text_array
from analyzer.records.spans import EVER, Pairs, SpanMarks, in_time, next_in_group, number_rows, pair_spans
from tracer.recording.format import FIRST_DETAIL, STREAMS, Recording

WITHIN_STEPS = ("graph", "op", "expert")
"""Kinds of spans that end before the next step begins, if it begins alone."""
CACHE = np.array(["", "hit", "miss", "prefetched"], object)
REASON = np.array(["startup", "demand", "prefetch"], object)
BACKEND_NAMES = " cpu htp cuda vulkan opencl blas metal sycl cann hexagon rpc webgpu meta"
BACKEND = np.array(BACKEND_NAMES.split(" "), object)
"""Names by enum backend_id of bpf/records.h."""


USER, FOUND = 6, -1
"""Engines of steps that begin at a function that the user named, and of steps found from outside (tables/found_steps.py)."""
OF_OPERATORS = ("op_begin", "op_wait", "op_shares", "node", "tensor", "route")
"""Kinds that are ignored for engines whose manifest gives a reason for abandoning them."""


class Source:
    """The records of a recording by kind, the time range that they cover, and the end records without a begin.

    Frequent kinds are read for one time range (`between`), by default the whole recording.
    """

    def __init__(self, recording: Recording, block: int = BLOCK):
        self.recording, self.manifest = recording, recording.manifest
        self.contents = Contents(recording, block)
        self.unpaired: dict[str, list[dict[str, np.ndarray]]] = {}
        self.damaged = self.contents.damaged
        """Records omitted: their time is impossible."""
        self.first_ns, self.last_ns = self.contents.first_ns, self.contents.last_ns
        self._few: dict[str, Rows] = {}
        self._stretch(-1, EVER, np.empty(0, np.int64))
        self.attached = bool(section(self.manifest, "options").get("pid"))
        """Whether the program ran before it was recorded."""
        engines = section(self.manifest, "engines")
        declared = [(name, e) for name, e in engines.items() if isinstance(e, dict) and "id" in e]
        declared.sort(key=lambda each: bool(each[1].get("libraries")))  # of two with one id, the one with libraries wins
        self.engine_names = {USER: "user", FOUND: "found"} | {int(e["id"]): name for name, e in declared}
        opened = {int(e["id"]): [str(file.get("path")) for file in e.get("libraries") or []] for _, e in declared}
        others = {int(e["id"]): tuple(e.get("not_language") or ()) for _, e in declared}
        self.not_language = [i for i, files in opened.items() if any(Path(file).name.startswith(others[i]) for file in files)]
        """Engines that the program used for models that are none of language."""
        self.untold = [int(e["id"]) for _, e in declared if e.get("untold")]

    def _stretch(self, begin_ns: int, end_ns: int, step_begins: np.ndarray) -> None:
        self.begin_ns, self.end_ns, self.step_begins = begin_ns, end_ns, step_begins
        self._many: dict[str, Rows] = {}
        self._slots: dict[str, tuple[np.ndarray, dict[int, np.ndarray], int]] = {}

    def between(self, begin_ns: int, end_ns: int, step_begins: np.ndarray) -> "Source":
        """The same recording, with frequent kinds limited to the records of that time range.

        `step_begins`: times at which a step begins while no other is open. No graph, operator or expert run extends across one.
        """
        piece = copy.copy(self)
        piece._stretch(begin_ns, end_ns, step_begins)
        return piece

    def rows(self, kind: str) -> Rows:
        """The records of one kind; empty if the recording does not declare it."""
        cached = self._many if kind in STREAMED else self._few
        if kind not in cached:
            cached[kind] = self._read(kind)
        return cached[kind]

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
            places = kinds.get(number, np.empty(0, np.int64))
            rows = Rows(slots, dtype, places + start, places)
        else:
            few = self.contents.few.get(number, SlotSelection())
            rows = Rows(
                np.concatenate([np.empty(0, raw), *few.slots]), dtype, np.concatenate([np.empty(0, np.int64), *few.position])
            )
            if self.damaged:
                earliest, latest = self.contents.possible
                rows = rows.where((rows.raw("ts") >= earliest) & (rows.raw("ts") <= latest))
        if self.untold and kind in OF_OPERATORS:
            rows = rows.where(~np.isin(rows["engine"], self.untold))
        if not in_time(rows["ts"]):
            rows = rows.where(np.argsort(rows["ts"], kind="stable"))
        return rows

    def count(self) -> dict[str, int]:
        """Number of records by kind; kinds without a layout are counted as "unknown"."""
        counts: dict[str, int] = {}
        for number, count in sorted(self.contents.counts.items()):
            name = self.contents.names.get(number, "unknown")
            counts[name] = counts.get(name, 0) + count
        return counts

    @cached_property
    def damage(self) -> list[str]:
        """One line for each place that the checksums report as damaged."""
        return damaged_places(self.contents)

    def discarded(self) -> int:
        """Number of slots that the kernel side reserved and then discarded or never finished."""
        return self.contents.discarded

    def next_step(self, ts: np.ndarray) -> np.ndarray:
        """For sorted times, the begin of the next step after each; EVER if there is none."""
        cuts = np.searchsorted(ts, self.step_begins)
        return np.repeat(np.append(self.step_begins, EVER), np.diff(cuts, prepend=0, append=len(ts)))

    def thread(self, rows: Rows) -> Columns:
        """The columns of the group `thread`."""
        return {"engine": self.engines(rows["engine"]), "pid": rows["pid"], "tid": rows["tid"]}

    def engines(self, ids: np.ndarray) -> pyarrow.DictionaryArray:
        """Names of engine ids."""
        number, first = number_rows(ids)
        return text_array(number, [self.engine_names.get(i, f"engine {i}") for i in ids[first].tolist()])

    def named(self, ids: np.ndarray, types: np.ndarray, table: str) -> pyarrow.DictionaryArray:
        """Names of operator or graph numbers, as the engine with that id declares them in `table`."""
        code, first = number_rows(ids, types)
        names = []
        for engine, number in zip(ids[first].tolist(), types[first].tolist(), strict=True):
            declared = section(section(self.manifest, "engines"), self.engine_names.get(engine, "")).get(table) or []
            names.append(declared[number] if 0 <= number < len(declared) else f"{table[:-1]} {number}")
        return text_array(code, names)

    def gaps(self, level: str) -> list[Gaps]:
        """All times in which a level was not recorded."""
        switched_off = level_gaps(self.manifest.get("level_changes"), level)
        if not self.manifest.get("dropped"):
            return [switched_off]
        return [switched_off, token_gaps(self.rows("token_begin"), self.rows("token_end"), self.last_ns)]

    def spans(
        self,
        kind: str,
        identity: tuple[str, ...] = (),
        unknown: int | None = None,
        begin: Rows | None = None,
        end: Rows | None = None,
    ) -> RecordSpans:
        """Pair begins with ends by thread and identity fields; ends without a begin go to `unpaired`.

        `begin` and `end` default to the records <kind>_begin and <kind>_end.
        """
        begin = self.rows(f"{kind}_begin") if begin is None else begin
        end = self.rows(f"{kind}_end") if end is None else end
        begins, ends = begin.marks(identity_of(begin, identity), unknown), end.marks(identity_of(end, identity), unknown)
        pairs: Pairs = pair_spans(begins, ends)
        if kind in WITHIN_STEPS and self._crosses(begins.ts, ends.ts, pairs.end):
            pairs = pair_spans(self._by_step(begins), self._by_step(ends))
        self.leave_unpaired(kind, end.where(pairs.unpaired))
        return self.close(begin, pairs.end, end["ts"], LEVELS.get(kind, kind), kind in WITHIN_STEPS)

    def _crosses(self, begin_ns: np.ndarray, end_ns: np.ndarray, pairs: np.ndarray) -> bool:
        """Whether a pair extends across the begin of a step: then records were lost, and the end belongs to another begin."""
        ended = np.flatnonzero(pairs >= 0)
        return bool(np.any(end_ns[pairs[ended]] >= self.next_step(begin_ns)[ended]))

    def _by_step(self, marks: SpanMarks) -> SpanMarks:
        """The same marks, keyed by thread and step."""
        step = np.searchsorted(self.step_begins, marks.ts, "right")
        return replace(marks, key=marks.key + (step << 32))

    def leave_unpaired(self, kind: str, rows: Rows) -> None:
        """Add end records without a begin to `unpaired`."""
        if len(rows):
            self.unpaired.setdefault(kind, []).append({"pid": rows["pid"], "tid": rows["tid"], "ts_ns": rows["ts"]})

    def close(self, begin: Rows, end: np.ndarray, end_ts: np.ndarray, level: str, in_step: bool = False) -> RecordSpans:
        """End spans without an end record: with the recording if none of the kind follows on the thread, else where they began.

        Spans within a step (`in_step`) end with it, or with the recording. A span that was open when its level was switched off
        ends there.
        """
        begin_ns = begin["ts"]
        complete = end >= 0
        closing = begin_ns.copy()
        closing[complete] = end_ts[end[complete]]
        if not complete.all():
            after = next_in_group(begin["tid"], begin_ns)
            limit = self.next_step(begin_ns) if in_step else np.full(len(begin), EVER)
            last = ~complete & ((after < 0) | (begin_ns[after] >= limit))
            closing[last] = np.minimum(limit[last], self.last_ns)
            closing[~complete] = clip_at_gaps(begin_ns[~complete], closing[~complete], self.gaps(level))
        return RecordSpans(end, begin_ns, closing, complete)


def pick_names(names: np.ndarray, numbers: np.ndarray) -> pyarrow.DictionaryArray:
    """names[numbers], "" for numbers beyond the table."""
    inside = (numbers >= 0) & (numbers < len(names))
    return text_array(np.where(inside, numbers, len(names)), np.append(names, ""))
