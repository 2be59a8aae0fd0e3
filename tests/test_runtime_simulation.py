"""Belady's optimum against every possible choice of victims, the policies against Belady, prefetch against its bounds."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache as remember
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.questions.replays import belady, belady_with_bypass, lfru, lfu, lru, nearest_reuse
from runtime.cache_rules.eviction import LFRU, LRU
from runtime.cache_rules.forms import CPU, Form
from runtime.cache_rules.replay import Event, Outcome, Replay, replay
from tests.cache_requests import requests_of_events
from tests.conftest import drawn


def event(layer: int, experts: list[int]) -> Event:
    return Event(tuple(Form(layer, expert, CPU, 0) for expert in experts))


events = st.lists(
    st.builds(event, st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True)),
    min_size=1,
    max_size=9,
)
traces = st.lists(
    st.builds(event, st.integers(0, 3), st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True)),
    min_size=1,
    max_size=120,
)


def fewest_misses(trace: list[Event], capacity: int, bypass: bool = False) -> int:
    """Tries every set that could be kept after each event; with `bypass` also those without what was just run."""

    @remember
    def best(i: int, held: frozenset[Form]) -> int:
        if i == len(trace):
            return 0
        needed = frozenset(trace[i].keys)
        stays = frozenset() if bypass else needed
        others = (held | needed) - stays
        keep = min(capacity - len(stays), len(others))
        kept = [frozenset(some) for some in combinations(sorted(others), keep)]
        return len(needed - held) + min(best(i + 1, stays | some) for some in kept)

    return best(0, frozenset())


@settings(max_examples=drawn(60))
@given(events, st.integers(2, 4))
def test_belady_misses_as_little_as_any_choice_of_victims(trace: list[Event], capacity: int) -> None:
    assert belady(requests_of_events(trace), capacity).misses == fewest_misses(trace, capacity)


@settings(max_examples=drawn(60))
@given(events, st.integers(2, 4))
def test_a_cache_that_may_leave_out_what_it_was_asked_for_hits_as_often_or_more(trace: list[Event], capacity: int) -> None:
    requests = requests_of_events(trace)
    most = belady_with_bypass(requests, capacity)
    assert most.misses == fewest_misses(trace, capacity, bypass=True)
    assert most.hits >= belady(requests, capacity).hits


def test_leaving_out_pays_where_something_is_asked_for_once() -> None:
    requests = requests_of_events([event(0, [expert]) for expert in (0, 1, 2, 0, 1, 3, 0, 1)])
    assert (belady_with_bypass(requests, 2).hits, belady(requests, 2).hits) == (4, 2)


@settings(max_examples=drawn(60))
@given(st.one_of(events, traces), st.integers(1, 12))
def test_the_quick_lru_is_the_rule_with_lru(trace: list[Event], capacity: int) -> None:
    assert lru(requests_of_events(trace), capacity) == replay(trace, capacity, LRU())


@settings(max_examples=drawn(60))
@given(st.one_of(events, traces), st.integers(1, 12))
def test_the_quick_lfru_is_the_rule_with_lfru(trace: list[Event], capacity: int) -> None:
    assert lfru(requests_of_events(trace), capacity) == replay(trace, capacity, LFRU())


@settings(max_examples=drawn(60))
@given(traces, st.integers(2, 12), st.sampled_from([lru, lfu, lfru, belady, belady_with_bypass]), st.integers(1, 9))
def test_a_budget_in_bytes_of_equal_experts_is_a_number_of_them(
    trace: list[Event], capacity: int, policy: Callable[..., Outcome], size: int
) -> None:
    requests = requests_of_events(trace)
    by_number = policy(requests, capacity)
    for rest in {0, size - 1}:
        by_bytes = policy(replace(requests, sizes=np.full(requests.experts, size)), capacity * size + rest)
        assert by_bytes == by_number._replace(read_bytes=by_number.misses * size)


@settings(max_examples=drawn(60))
@given(traces, st.integers(8, 60))
def test_lru_in_bytes_is_the_rule_with_lru_in_bytes(trace: list[Event], budget: int) -> None:
    sizes = {form: 1 + 3 * (form.layer % 2) for forms, _ in trace for form in forms}
    played = Replay(budget, LRU(), size=sizes.__getitem__)
    for forms, _ in trace:
        played.begin()
        played.run(forms)
    assert lru(requests_of_events(trace, sizes), budget)[:3] == played.outcome()[:3]


def evicting_by_sorting(trace: list[Event], budget: int, sizes: dict[Form, int], policy: Callable[..., Outcome]) -> Outcome:
    """The replay of a policy that sorts all held keys for each eviction."""
    bypass, rule = policy in (lfu, belady_with_bypass), LFRU()
    held: dict[Form, float] = {}
    used: Counter[Form] = Counter()
    hits, missed = 0, []

    def rank(now: int, key: Form) -> float:
        if policy is lfru:
            rule.used(key)
            return rule.ranks()[1][key]
        used[key] += policy is lfu
        later = next((i for i in range(now + 1, len(trace)) if key in trace[i].keys), len(trace))
        return used[key] * (len(trace) + 1) + now if policy is lfu else -later

    def evict(candidates: list[Form], needed: int) -> None:
        for key in sorted(candidates, key=lambda key: (held[key], key)):
            if sum(sizes[key] for key in held) + needed > budget:
                del held[key]

    for now, (keys, _) in enumerate(trace):
        absent = [key for key in keys if key not in held]
        missed += absent
        hits += len(keys) - len(absent)
        held |= {key: rank(now, key) for key in keys if key in held}
        if not bypass:
            evict([key for key in held if key not in keys], sum(sizes[key] for key in absent))
        for key in (key for key in absent if sizes[key] <= budget):
            if not bypass:
                evict([other for other in held if other in keys], sizes[key])
            held[key] = rank(now, key)
        evict(list(held), 0)
    return Outcome(hits, len(missed), len(missed), sum(sizes[key] for key in missed))


@settings(max_examples=drawn(300))
@given(
    st.one_of(events, traces),
    st.integers(1, 60),
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.sampled_from([lfu, lfru, belady, belady_with_bypass]),
)
def test_a_quick_replay_is_the_slow_one_for_experts_of_any_sizes(
    trace: list[Event], budget: int, some: list[int], policy: Callable[..., Outcome]
) -> None:
    keys = sorted({form for forms, _ in trace for form in forms})
    sizes = {key: some[i % len(some)] for i, key in enumerate(keys)}
    assert policy(requests_of_events(trace, sizes), budget) == evicting_by_sorting(trace, budget, sizes, policy)


@settings(max_examples=drawn(200))
@given(traces, st.sampled_from([1, 5]))
def test_lru_hits_in_a_cache_of_the_nearest_reuse_and_in_none_below(trace: list[Event], wide: int) -> None:
    sizes = {form: 1 + wide * (form.layer % 2) for forms, _ in trace for form in forms}
    requests = requests_of_events(trace, sizes)
    nearest = nearest_reuse(requests)
    assert lru(requests, (nearest or 2**62) - 1).hits == 0
    assert nearest is None or lru(requests, nearest).hits > 0


@settings(max_examples=drawn(40))
@given(traces, st.integers(2, 12))
def test_no_policy_beats_belady_and_all_count_every_expert_once(trace: list[Event], capacity: int) -> None:
    best = belady(requests_of_events(trace), capacity)
    for policy in (LRU(), LFRU()):
        outcome = replay(trace, capacity, policy)
        assert outcome.reads == outcome.misses >= best.misses
        assert outcome.hits + outcome.misses == best.hits + best.misses == sum(len(forms) for forms, _ in trace)


def test_lfru_keeps_what_is_used_often_where_lru_forgets_it() -> None:
    often, once = event(0, [0, 1]), [event(0, [e, e + 1]) for e in range(2, 40, 2)]
    trace = [often] * 8 + [one for other in once for one in (other, once[0], often)]
    assert replay(trace, 4, LFRU()).misses < replay(trace, 4, LRU()).misses


@settings(max_examples=drawn(40))
@given(traces, st.integers(4, 12), st.floats(0, 1), st.integers(0, 5))
def test_wrong_prefetches_stay_within_their_allowance_and_never_push_out_what_the_layer_needs(
    trace: list[Event], capacity: int, accuracy: float, seed: int
) -> None:
    random, played = np.random.default_rng(seed), Replay(capacity, LRU(), prefetching=True)
    used = asked = 0
    for forms, _ in trace:
        played.begin()
        for form in forms:
            right = random.random() < accuracy
            asked += played.cache.prefetch(form if right else form._replace(expert=int(random.integers(8, 64))), 0.0)
        before = played.cache.begun
        played.run(forms)
        assert played.cache.begun - before <= len(forms), "nothing is loaded twice within a layer"
        assert played.cache.reserved <= capacity
        used += len(forms)
    share, at_first = 0.4, 8
    needed = played.outcome().hits + played.outcome().misses
    assert played.cache.begun <= needed + share * needed + at_first + 1


def test_perfect_predictions_leave_no_miss() -> None:
    trace = [event(i % 4, [(i * 7) % 16, (i * 7 + 5) % 16]) for i in range(400)]
    played = Replay(8, LRU(), prefetching=True)
    for forms, _ in trace:
        played.begin()
        for form in forms:
            assert played.cache.prefetch(form, 0.0)
        played.run(forms)
    assert played.outcome().misses == 0
    assert played.cache.prefetched == played.cache.begun
