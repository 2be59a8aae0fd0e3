"""Speed-up of the C loops in analyzer and views over NumPy, pandas and the perfetto package.

    python -m benchmarks.c_loops [--rows 1000000] [--rounds 7] [--json FILE]

Both sides get the same columns and must return the same result. Figures are ns of CPU time per row, measured alternately. The
runtime's C is measured by `benchmarks.products` (kernels) and `benchmarks.usdt` (probes). The loop over thread states has no peer
here, since each row depends on the previous one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from analyzer.records.slot_columns import by_kind, columns_of
from analyzer.records.spans import NONE, SpanMarks, following, latest, number_rows, pair_spans, stack_depth
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes
from benchmarks.lib.turns import by_turns
from tracer.recording.format import RING_HEADER_BYTES
from views.timeline.protobuf import Form, encode
from workloads.recordings import record_layouts, records

THREADS = 16
FIELDS = ("ts", "tid", "tensor", "layer")


@dataclass(frozen=True)
class Case:
    """One loop: the C version, its alternative, and the number of rows."""

    name: str
    in_c: Callable[[], object]
    library: str
    without: Callable[[], object]
    rows: int


def join_cases(rows: int, rng: np.random.Generator) -> list[Case]:
    """Cases: latest and next row of a group, distinct combinations, begins with their ends."""
    right, left = (np.sort(rng.integers(0, 10 * rows, rows)) for _ in range(2))
    theirs, ours = (rng.integers(0, THREADS, rows) for _ in range(2))

    def merged(direction: str, exact: bool) -> np.ndarray:
        one = pd.DataFrame({"ts": left, "group": ours})
        other = pd.DataFrame({"ts": right, "group": theirs, "row": np.arange(rows)})
        options = {"on": "ts", "by": "group", "direction": direction, "allow_exact_matches": exact}
        return pd.merge_asof(one, other, **options)["row"].fillna(NONE).to_numpy(np.int64)  # type: ignore[call-overload]

    def factorized() -> np.ndarray:
        return pd.factorize(ours * rows + theirs % 64)[0]

    begin, end = nested_spans(rows // 2)
    return [
        Case(
            "latest row of a group", lambda: latest(theirs, right, ours, left), "pandas", lambda: merged("backward", True), rows
        ),
        Case(
            "next row of a group", lambda: following(theirs, right, ours, left), "pandas", lambda: merged("forward", False), rows
        ),
        Case("distinct combinations of two columns", lambda: number_rows(ours, theirs % 64)[0], "pandas", factorized, rows),
        Case("begins with their ends", lambda: pair_spans(begin, end).end, "NumPy", lambda: pair_by_sorting(begin, end), rows),
    ]


def nested_spans(spans: int) -> tuple[SpanMarks, SpanMarks]:
    """Begins and ends of spans nested two deep, on THREADS threads alternately."""
    inner = np.arange(spans) % 2 == 1
    start = np.where(inner, 8 * np.arange(spans) - 5, 8 * np.arange(spans))
    stop = np.where(inner, start + 2, start + 6)
    thread, nothing = np.arange(spans) // 2 % THREADS, np.zeros(spans, np.int64)
    order = np.argsort(stop, kind="stable")
    return (
        SpanMarks(thread, start, 2 * start, nothing, nothing > 0),
        SpanMarks(thread[order], stop[order], 2 * stop[order], nothing, nothing > 0),
    )


def pair_by_sorting(begin: SpanMarks, end: SpanMarks) -> np.ndarray:
    """`pair` without identities by sorting: a begin's end is the next event of its thread at its depth."""
    thread, ts = np.concatenate((begin.key, end.key)), np.concatenate((begin.position, end.position))
    step = np.repeat([1, -1], (len(begin.ts), len(end.ts)))
    order = np.lexsort((ts, thread))
    depth, unopened = stack_depth(thread[order], step[order])
    level = depth + (step[order] < 0)
    kept = np.flatnonzero(~unopened)
    by_level = kept[np.lexsort((kept, level[kept], thread[order][kept]))]
    first, second = order[by_level[:-1]], order[by_level[1:]]
    opens = (step[first] > 0) & (step[second] < 0)
    answer = np.full(len(begin.ts), NONE, np.int64)
    answer[first[opens]] = second[opens] - len(begin.ts)
    return answer


def slot_cases(rows: int) -> list[Case]:
    """Cases: slots of a recording by kind, and fields of some of the records."""
    dtype = record_layouts()["op_begin"][1]
    table = np.concatenate([records(kind, rows // 2, ts=np.arange(rows // 2)) for kind in ("op_begin", "op_end")])
    table = table[np.argsort(np.arange(len(table)) % (rows // 2), kind="stable")].view(f"V{table.shape[1]}")[:, 0]
    chosen = np.flatnonzero(np.arange(len(table)) % 2 == 0)
    raw = np.ascontiguousarray(table).view(np.uint8).reshape(len(table), -1)

    def fields() -> np.ndarray:
        width = slice(RING_HEADER_BYTES, RING_HEADER_BYTES + dtype.itemsize)
        body = np.ascontiguousarray(raw[chosen, width]).view(dtype)[:, 0]
        return np.stack([body[name].astype(np.int64) for name in FIELDS])

    def sorted_by_kind() -> dict[int, np.ndarray]:
        kinds = raw[:, RING_HEADER_BYTES + 16 : RING_HEADER_BYTES + 18].copy().view("<u2")[:, 0]
        return {kind: np.flatnonzero(kinds == kind) for kind in np.unique(kinds).tolist()}

    return [
        Case("slots by kind", lambda: by_kind(table).rows, "NumPy", sorted_by_kind, len(table)),
        Case(
            f"{len(FIELDS)} fields of records",
            lambda: np.stack([*columns_of(table, chosen, dtype, FIELDS).values()]),
            "NumPy",
            fields,
            len(chosen),
        ),
    ]


def message_case(rows: int) -> Case:
    """Case: packets of a Perfetto trace, each with one event of a track."""
    columns = {name: np.arange(rows, dtype=np.int64) * factor + 1 for name, factor in (("ts", 1000), ("type", 0), ("track", 3))}

    def in_c() -> bytes:
        form = Form().open(1).varint(8, columns["ts"]).open(11)
        return bytes(encode(form.varint(9, columns["type"]).varint(11, columns["track"]).close().close(), rows)[0])

    def by_package() -> bytes:
        trace = Trace()
        for ts, kind, track in zip(*(column.tolist() for column in columns.values()), strict=True):
            packet = trace.packet.add(timestamp=ts)
            packet.track_event.type = kind
            packet.track_event.track_uuid = track
        return trace.SerializeToString()

    return Case("packets of a trace", in_c, "perfetto's protobuf", by_package, rows)


def cpu_ns(work: Callable[[], object]) -> int:
    """CPU time of one call."""
    begin = time.process_time_ns()
    work()
    return time.process_time_ns() - begin


def same_result(one: object, other: object) -> bool:
    """Whether both sides returned the same result."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)
    return one == other if isinstance(one, bytes) else np.array_equal(one, other)  # type: ignore[arg-type]


def measure_case(case: Case, rounds: int, report: Report) -> None:
    """Compare the results of both sides, then time them."""
    if not same_result(case.in_c(), case.without()):
        raise SystemExit(f"{case.name}: C and {case.library} give different answers")
    sides = {"C": case.in_c, case.library: case.without}
    spent: dict[str, list[int]] = {side: [] for side in sides}
    for _, side in by_turns(list(sides), rounds):
        spent[side].append(cpu_ns(sides[side]))
    for side, times in spent.items():
        report.add(f"{case.name}: {side}", "ns/row", extremes(np.array(times) / case.rows))
    ratios = np.array(spent[case.library]) / np.array(spent["C"])
    report.add(f"{case.name}: speed", "ratio", extremes(ratios), against=case.library)


def main() -> None:
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each table (default: %(default)s)")
    args = parser.parse_args()
    report = Report("c_loops", args)
    for case in (*join_cases(args.rows, np.random.default_rng(0)), *slot_cases(args.rows), message_case(args.rows // 10)):
        measure_case(case, args.rounds, report)
    report.finish()


if __name__ == "__main__":
    main()
