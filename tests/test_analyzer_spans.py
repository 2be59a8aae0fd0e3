"""The joins against plain loops that anyone can check."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.errors import AnalysisError
from analyzer.records import loops
from analyzer.records.intervals import Intervals, covered_ns
from analyzer.records.rows import map_distinct
from analyzer.records.schema import TEXT, equals_any, text_array
from analyzer.records.slot_columns import by_kind, columns_of, first_occurrences
from analyzer.records.spans import (
    NestedSpans,
    SpanMarks,
    distinct_sorted,
    first_rows,
    following,
    if_lasting,
    latest,
    next_in_group,
    number_rows,
    pair_spans,
    row_codes,
    running_count,
)
from analyzer.tables.operators import group_sums, known_total
from tests.conftest import drawn
from workloads.recordings import record_layouts, records

TIMES = st.integers(0, 30)
EVENT = st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 2))  # thread, is begin, identity


def marks(rows: list[tuple[int, int, int, int]], known: bool) -> SpanMarks:
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return SpanMarks(columns[0], columns[1], columns[2], columns[3], np.full(len(rows), known))


def split(events: list[tuple[int, bool, int]]) -> tuple[list, list]:
    """Begin and end rows (thread, ts, position, identity) of a stream of one event per nanosecond pair (ties included)."""
    rows = [(thread, i // 2, i, identity, begin) for i, (thread, begin, identity) in enumerate(events)]
    return [r[:4] for r in rows if r[4]], [r[:4] for r in rows if not r[4]]


def stack_reference(begins: list, ends: list) -> dict[int, int]:
    """Position of begin → position of end, with one stack per thread."""
    stream = sorted([(r[2], r[0], True) for r in begins] + [(r[2], r[0], False) for r in ends])
    stacks: dict[int, list[int]] = {}
    answer = {}
    for position, thread, is_begin in stream:
        stack = stacks.setdefault(thread, [])
        if is_begin:
            stack.append(position)
        elif stack:
            answer[stack.pop()] = position
    return answer


@settings(max_examples=drawn(300))
@given(st.lists(EVENT, max_size=40))
def test_pairing_without_identities_equals_a_stack_per_thread(events):
    begins, ends = split(events)
    found = pair_spans(marks(begins, False), marks(ends, False))
    assert {begins[i][2]: ends[e][2] for i, e in enumerate(found.end) if e >= 0} == stack_reference(begins, ends)


@settings(max_examples=drawn(300))
@given(st.lists(EVENT, max_size=40))
def test_pairs_agree_in_identity_and_every_end_is_paired_once_or_reported(events):
    begins, ends = split(events)
    found = pair_spans(marks(begins, True), marks(ends, True))
    used = [e for e in found.end if e >= 0]
    assert sorted([*used, *found.unpaired]) == list(range(len(ends)))
    for i, e in enumerate(found.end):
        if e >= 0:
            assert (begins[i][0], begins[i][3]) == (ends[e][0], ends[e][3])
            assert begins[i][2] < ends[e][2]


@settings(max_examples=drawn(200))
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=12), st.data())
def test_pairing_survives_lost_records_when_identities_are_distinct(shape, data):
    """Nested spans with their own identities: whatever is lost, a pair that is found is the true one."""
    events, stacks = [], {0: [], 1: [], 2: []}
    for number, (thread, pops) in enumerate(shape):
        events.append((thread, True, number))
        stacks[thread].append(number)
        events += [(thread, False, stacks[thread].pop()) for _ in range(min(pops - 1, len(stacks[thread])))]
    events += [(thread, False, identity) for thread, stack in stacks.items() for identity in reversed(stack)]
    kept = [e for e in events if not data.draw(st.booleans())] if events else []
    begins, ends = split(kept)
    found = pair_spans(marks(begins, True), marks(ends, True))
    both = {r[3] for r in begins} & {r[3] for r in ends}
    assert {begins[i][3] for i, e in enumerate(found.end) if e >= 0} == both
    assert all(begins[i][3] == ends[e][3] for i, e in enumerate(found.end) if e >= 0)


ROWS = st.lists(st.tuples(st.integers(0, 3), TIMES), max_size=20)


def columns(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(rows, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


@settings(max_examples=drawn(300))
@given(ROWS, ROWS)
def test_latest_and_following_equal_a_linear_search(right, left):
    before = latest(*columns(right), *columns(left))
    after = following(*columns(right), *columns(left))
    for i, (group, ts) in enumerate(left):
        earlier = [(t, j) for j, (g, t) in enumerate(right) if g == group and t <= ts]
        later = [(t, j) for j, (g, t) in enumerate(right) if g == group and t > ts]
        assert before[i] == (max(earlier)[1] if earlier else -1)
        assert after[i] == (min(later)[1] if later else -1)


@given(ROWS, ROWS, st.data())
def test_what_lasts_long_enough_is_found_by_those_without_an_answer(right, left, data):
    until = np.array(data.draw(st.lists(TIMES, min_size=len(right), max_size=len(right))), np.int64)
    answer = np.array(data.draw(st.lists(st.sampled_from([-1, 7]), min_size=len(left), max_size=len(left))), np.int64)
    found = latest(*columns(right), *columns(left))
    lasts = (found >= 0) & (columns(left)[1] < np.append(until, -1)[found])
    expected = np.where(answer >= 0, answer, np.where(lasts, found, -1))
    if_lasting((*columns(right), until), columns(left), answer)
    assert answer.tolist() == expected.tolist()


SPANS = st.lists(st.tuples(TIMES, TIMES).map(sorted))


@given(SPANS, SPANS)
def test_time_covered_by_each_interval_equals_the_sum_of_what_they_share(spans, windows):
    (opened, closed), (begin, end) = (np.array(each, np.int64).reshape(-1, 2).T for each in (spans, windows))
    expected = [sum(max(0, min(b, y) - max(a, x)) for a, b in spans) for x, y in windows]
    assert covered_ns(Intervals.of(opened, closed), Intervals.of(begin, end)).tolist() == expected


WORDS = st.lists(st.sampled_from(["running", "waiting", "", "rr"]), min_size=1)


@given(WORDS, st.data())
def test_a_column_of_texts_reads_as_its_values_do_and_holds_each_once(values, data):
    codes = np.array(data.draw(st.lists(st.integers(-1, len(values) - 1))), np.int64)
    column, rows = text_array(codes, values), [values[code] for code in codes]
    assert column.to_pylist() == rows and column.type == TEXT
    assert len(set(column.dictionary.to_pylist())) == len(column.dictionary)
    for words in (["running"], ["", "rr"], []):
        assert equals_any(column, *words).tolist() == [row in words for row in rows]


@given(ROWS)
def test_successors_equal_the_next_of_the_group_in_order_of_time(rows):
    ordered = sorted(range(len(rows)), key=lambda i: rows[i][1])
    for i, found in enumerate(next_in_group(*columns(rows))):
        rest = [j for j in ordered[ordered.index(i) + 1 :] if rows[j][0] == rows[i][0]]
        assert found == (rest[0] if rest else -1)


@st.composite
def nested(draw, depth=3, low=0, high=60):
    """Properly nested spans on one thread as (begin, end)."""
    spans, at = [], low
    while at < high - 1 and draw(st.booleans()):
        begin = draw(st.integers(at, high - 1))
        end = draw(st.integers(begin + 1, high))
        spans.append((begin, end))
        if depth and end - begin > 2:
            spans += draw(nested(depth=depth - 1, low=begin + 1, high=end - 1))
        at = end
    return spans


@settings(max_examples=drawn(150))
@given(st.lists(nested(), min_size=1, max_size=3), st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 61)), max_size=15))
def test_innermost_span_and_self_time_equal_a_scan_of_every_nanosecond(threads, points):
    rows = [(thread, begin, end) for thread, spans in enumerate(threads) for begin, end in spans]
    key, begin, end = np.array(rows, np.int64).reshape(-1, 3).T
    nest = NestedSpans(key, begin, end)

    def innermost(thread: int, ts: int) -> int:
        around = [(b, -e, i) for i, (t, b, e) in enumerate(rows) if t == thread and b <= ts < e]
        return max(around)[2] if around else -1

    asked = np.array(points, np.int64).reshape(-1, 2)
    assert nest.innermost(asked[:, 0], asked[:, 1]).tolist() == [innermost(*p) for p in points]
    owner = [innermost(thread, ts) for thread in range(len(threads)) for ts in range(61)]
    pieces = nest.segments()
    own = [sum(pieces.end[pieces.span == i] - pieces.begin[pieces.span == i]) for i in range(len(rows))]
    assert own == [owner.count(i) for i in range(len(rows))]


WIDE = st.lists(st.integers(-5, 12) | st.integers(10**9, 10**9 + 3), max_size=30)


@given(WIDE)
def test_distinct_values_and_numbers_by_first_appearance_equal_pandas(values):
    column = np.array(values, np.int64)
    assert distinct_sorted(column).tolist() == sorted(set(values))
    found, rows = first_rows(column)
    assert found.tolist() == sorted(set(values)) and rows.tolist() == [values.index(v) for v in sorted(set(values))]
    assert row_codes(column).tolist() == [list(dict.fromkeys(values)).index(v) for v in values]


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), st.integers(0, 2)), max_size=40))
def test_numbers_of_combinations_and_their_first_rows_equal_a_dictionary(rows):
    one, other = np.array(rows, np.int64).reshape(-1, 2).T
    code, first = number_rows(one, other)
    known = list(dict.fromkeys(rows))
    assert code.tolist() == [known.index(row) for row in rows] and first.tolist() == [rows.index(row) for row in known]


@given(st.lists(st.binary(max_size=2)) | st.lists(st.integers(2**63 - 2, 2**63 + 2)))
def test_each_distinct_value_is_named_once(values):
    column = np.array(values, np.uint64 if values and isinstance(values[0], int) else "S2")
    named = []
    names = map_distinct(column, lambda value: named.append(value) or repr(value))
    assert names.tolist() == [repr(value) for value in column.tolist()] and len(named) == len(set(column.tolist()))


@given(st.integers(0, 5000), st.integers(1, 2**40))
def test_numbers_are_right_however_many_values_there_are(n, spread):
    column = np.random.default_rng(n).integers(0, spread, n)
    code, first = number_rows(column)
    assert np.array_equal(column[first][code], column) and len(first) == len(np.unique(column))
    assert np.array_equal(first, np.sort(np.unique(column, return_index=True)[1]))


@given(ROWS)
def test_running_counts_by_group_equal_a_sort(rows):
    group, ts = columns(rows)
    ordered = sorted(range(len(rows)), key=lambda i: (rows[i][1], i))
    expected = [sum(rows[j][0] == rows[i][0] for j in ordered[: ordered.index(i)]) for i in range(len(rows))]
    assert running_count(group, ts).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 9)), max_size=20))
def test_summing_equals_a_loop_over_the_rows_of_each_group(rows):
    group, value = columns(rows)
    of = [[v for g, v in rows if g == wanted] for wanted in range(4)]
    known = [[v for v in values if v >= 0] for values in of]
    assert group_sums(group, value, 4).tolist() == [sum(values) for values in of]
    assert known_total(group, value, 4).tolist() == [sum(values) if values else -1 for values in known]


@pytest.mark.parametrize("group", [-1, 4, 2**62])
def test_a_slot_out_of_range_is_refused(group):
    slots = records("op_wait", 4).view("V64")[:, 0]
    with pytest.raises(IndexError):
        columns_of(slots, np.array([group]), record_layouts()["op_wait"][1], ("ts",))


@given(st.lists(st.tuples(st.sampled_from(["op_begin", "op_wait", "sched_switch"]), TIMES, st.integers(0, 3)), max_size=30))
def test_slots_are_sorted_by_kind_and_read_as_numpy_reads_them(rows):
    parts = [records(kind, ts=ts, tid=5 + who, prev_tid=who) if kind == "sched_switch" else records(kind, ts=ts, tid=5 + who)
             for kind, ts, who in rows]  # fmt: skip
    whole = np.concatenate([np.empty((0, 64), np.uint8), *parts])
    whole[3::7, 3] |= 0x40  # discarded
    slots = whole.view("V64")[:, 0]
    found, within = by_kind(slots), by_kind(slots, 5, 20)
    gone = [i % 7 == 3 for i in range(len(rows))]
    assert found.discarded == sum(gone) and found.damaged == 0
    for kind in ("op_begin", "op_wait", "sched_switch"):
        number, dtype = record_layouts()[kind]
        mine = [i for i, row in enumerate(rows) if row[0] == kind and not gone[i]]
        assert found.rows.get(number, np.empty(0)).tolist() == mine
        assert within.rows.get(number, np.empty(0)).tolist() == [i for i in mine if 5 <= rows[i][1] < 20]
        at = np.array(mine, np.int64)
        body = np.ascontiguousarray(whole[at, 8 : 8 + dtype.itemsize]).view(dtype).reshape(-1)
        numbers = [name for name in dtype.names if dtype[name].kind in "iu"]
        for name, column in columns_of(slots, at, dtype, numbers).items():
            assert column.tolist() == body[name].tolist()
        assert rows_by(first_occurrences(slots, at, dtype, ("pid", "tid")), rows) == list(dict.fromkeys(rows[i][2] for i in mine))


def rows_by(at: np.ndarray, rows: list) -> list[int]:
    return [rows[i][2] for i in at.tolist()]


def test_a_library_of_another_source_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loops.ARGUMENTS, "newer_loop", ())
    with pytest.raises(AnalysisError, match="make build"):
        loops._load_library()
