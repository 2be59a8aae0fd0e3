"""Belady's optimum against every possible choice of victims, the policies against Belady, prefetch against its bounds."""

from collections import Counter
from functools import cache as remember
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache_rules import LFRU, LRU, Form, Static
from runtime.experts.simulation import CPU, Event, Replay, belady, replay

events = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True).map(tuple)),
    min_size=1,
    max_size=9,
)
traces = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True).map(tuple)),
    min_size=1,
    max_size=120,
)


def fewest_misses(trace: list[Event], capacity: int) -> int:
    """Tries every set that could be kept after each event."""

    @remember
    def best(i: int, held: frozenset[tuple[int, int]]) -> int:
        if i == len(trace):
            return 0
        needed = frozenset((trace[i][0], expert) for expert in trace[i][1])
        others = held - needed
        keep = min(capacity - len(needed), len(others))
        kept = [frozenset(some) for some in combinations(sorted(others), keep)]
        return len(needed - held) + min(best(i + 1, needed | some) for some in kept)

    return best(0, frozenset())


@settings(max_examples=60)
@given(events, st.integers(2, 4))
def test_belady_misses_as_little_as_any_choice_of_victims(trace: list[Event], capacity: int) -> None:
    assert belady(trace, capacity).misses == fewest_misses(trace, capacity)


@settings(max_examples=40)
@given(traces, st.integers(2, 12))
def test_no_policy_beats_belady_and_all_count_every_expert_once(trace: list[Event], capacity: int) -> None:
    best = belady(trace, capacity)
    popularity = Counter((layer, expert) for layer, experts in trace for expert in experts)
    for policy in (LRU(), LFRU(), Static(popularity)):
        outcome = replay(trace, capacity, policy)
        assert outcome.reads == outcome.misses >= best.misses
        assert outcome.hits + outcome.misses == best.hits + best.misses == sum(popularity.values())


def test_lfru_keeps_what_is_used_often_where_lru_forgets_it() -> None:
    often, once = (0, (0, 1)), [(0, (e, e + 1)) for e in range(2, 40, 2)]
    trace = [often] * 8 + [event for other in once for event in (other, once[0], often)]
    assert replay(trace, 4, LFRU()).misses < replay(trace, 4, LRU()).misses


@settings(max_examples=40)
@given(traces, st.integers(4, 12), st.floats(0, 1), st.integers(0, 5))
def test_wrong_prefetches_stay_within_their_allowance_and_never_push_out_what_the_layer_needs(
    trace: list[Event], capacity: int, accuracy: float, seed: int
) -> None:
    random, played = np.random.default_rng(seed), Replay(capacity, LRU(), prefetching=True)
    used = asked = 0
    for layer, experts in trace:
        played.begin()
        for expert in experts:
            right = random.random() < accuracy
            asked += played.cache.prefetch(Form(layer, expert if right else int(random.integers(8, 64)), CPU, 0), 0.0)
        before = played.reads.count
        played.run(layer, experts)
        assert played.reads.count - before <= len(experts), "nothing is loaded twice within a layer"
        assert played.cache.reserved <= capacity
        used += len(experts)
    share, at_first = 0.4, 8
    needed = played.outcome().hits + played.outcome().misses
    assert played.reads.count <= needed + share * needed + at_first + 1


def test_perfect_predictions_leave_no_miss() -> None:
    trace = [(i % 4, ((i * 7) % 16, (i * 7 + 5) % 16)) for i in range(400)]
    played = Replay(8, LRU(), prefetching=True)
    for layer, experts in trace:
        played.begin()
        for expert in experts:
            assert played.cache.prefetch(Form(layer, expert, CPU, 0), 0.0)
        played.run(layer, experts)
    assert played.outcome().misses == 0
    assert played.cache.prefetched == played.reads.count
