"""Times in which a level was off, or tokens were dropped, are no part of any span."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from analyzer.records.observed import EVER, clip_at_gaps, level_gaps
from analyzer.tables import store as tables_module
from tracer.recording.format import Recording
from workloads.recordings import MAIN, WORKER, Writer

CHANGES = [
    {"ts_ns": 100, "done_ns": 110, "level": "sched", "on": False, "tps": 1.0, "why": "slow"},
    {"ts_ns": 150, "done_ns": 155, "level": "expert", "on": False, "tps": 1.0, "why": "slow"},
    {"ts_ns": 200, "done_ns": 210, "level": "sched", "on": True, "tps": 9.0, "why": "fast"},
]


@given(st.lists(st.integers(0, 300), max_size=12), st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), max_size=20))
def test_a_span_ends_at_the_first_instant_at_which_nobody_looked(edges: list[int], spans: list[tuple[int, int]]) -> None:
    edges = sorted(set(edges))
    gaps = list(zip(edges[::2], edges[1::2], strict=False))
    begin = np.array([b for b, _ in spans], np.int64)
    end = begin + np.array([n for _, n in spans], np.int64)
    arrays = np.array([a for a, _ in gaps], np.int64), np.array([b for _, b in gaps], np.int64)
    for b, e, cut in zip(begin.tolist(), end.tolist(), clip_at_gaps(begin, end, [arrays]).tolist(), strict=True):
        expected = b
        while expected < e and not any(first <= expected < last for first, last in gaps):
            expected += 1
        assert cut == expected


def test_a_level_is_off_from_its_shedding_until_its_probes_stand_again() -> None:
    begins, ends = level_gaps(CHANGES, "sched")
    assert (begins.tolist(), ends.tolist()) == ([100], [210])
    begins, ends = level_gaps(CHANGES, "expert")
    assert (begins.tolist(), ends.tolist()) == ([150], [EVER])
    assert all(len(part) == 0 for part in level_gaps([None, {"level": "sched"}, 3], "sched"))


def recording(folder: Path, **changes) -> dict:
    """A thread that runs from 10 on and is switched out at 290; an expert begins at 140 and is never seen to end."""
    writer = Writer()
    writer.add("sched_switch", ts=10, tid=0, pid=0, engine=0, prev_tid=0, next_tid=MAIN, cpu=1)
    for begin, end in ((20, 60), (120, 190), (220, 260)):
        writer.add("token_begin", ts=begin, seq=begin).add("token_end", ts=end, seq=begin)
    writer.add("expert_begin", ts=140, tid=WORKER, layer=1, expert=5)
    writer.add("sched_switch", ts=290, engine=0, prev_tid=MAIN, next_tid=0, prev_state=1, cpu=1)
    writer.add("sched_switch", ts=300, tid=0, pid=0, engine=0, prev_tid=0, next_tid=MAIN, cpu=1)
    return tables_module.build_tables(Recording(writer.write(folder, **changes)))


def test_states_and_open_spans_stop_where_their_level_was_shed(tmp_path: Path) -> None:
    whole, cut = recording(tmp_path / "a"), recording(tmp_path / "b", level_changes=CHANGES)
    states = whole["thread_states"].query("state == 'running'")
    assert states[["begin_ns", "end_ns"]].to_numpy().tolist() == [[10, 290]]
    states = cut["thread_states"].query("state == 'running'")
    assert states[["begin_ns", "end_ns"]].to_numpy().tolist() == [[10, 100]]
    assert whole["experts"]["end_ns"].tolist() == [220]  # the next step begins
    assert cut["experts"]["end_ns"].tolist() == [150]


def test_where_fast_tokens_were_dropped_states_stop_with_the_slow_ones(tmp_path: Path) -> None:
    cut = recording(tmp_path / "a", dropped={"slower_than_ns": 5, "tokens": 3, "token_ns": 9, "records": {"op_end": 4}})
    assert cut["thread_states"].empty  # it began between tokens: how it went on is not known
    assert cut["experts"]["end_ns"].tolist() == [190]
    assert len(cut["tokens"]) == 3
