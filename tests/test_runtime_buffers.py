"""Expert-wise token buffers: no row is lost, doubled or out of order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.cache_rules.batches import TokenBuffers, smallest_tier

EXPERTS = 6


def choices(draw: st.DrawFn) -> list[np.ndarray]:
    k = draw(st.integers(1, 3))
    one = st.lists(st.integers(0, EXPERTS - 1), min_size=k, max_size=k, unique=True)
    chunks = draw(st.lists(st.lists(one, min_size=1, max_size=12), min_size=1, max_size=5))
    return [np.array(chunk) for chunk in chunks]


@given(st.composite(choices)(), st.one_of(st.none(), st.integers(1, 9)))
def test_every_chosen_row_runs_exactly_once_in_full_tiers_and_one_rest(chunks: list[np.ndarray], tier: int | None) -> None:
    buffers, first = TokenBuffers(EXPERTS, tier), 0
    full = []
    for chunk in chunks:
        full += buffers.add(first, chunk)
        first += len(chunk)
    rest = buffers.flush()
    whole = np.concatenate(chunks)
    seen = [
        (int(token), int(slot), batch.expert)
        for batch in full + rest
        for token, slot in zip(batch.tokens, batch.slots, strict=True)
    ]
    assert sorted(seen) == [(t, s, int(whole[t, s])) for t in range(len(whole)) for s in range(whole.shape[1])]
    assert all(len(batch) == tier for batch in full)
    assert len({batch.expert for batch in rest}) == len(rest)
    assert tier is None or all(len(batch) < tier for batch in rest)
    for expert in range(EXPERTS):
        tokens = [int(t) for batch in full + rest if batch.expert == expert for t in batch.tokens]
        assert tokens == sorted(tokens)
    assert buffers.flush() == []


@given(st.composite(choices)(), st.integers(1, 9), st.integers(0, EXPERTS))
def test_experts_that_wait_run_in_the_same_batches_each_in_one_go(chunks: list[np.ndarray], tier: int, early: int) -> None:
    eager, waiting, first = TokenBuffers(EXPERTS, tier), TokenBuffers(EXPERTS, tier, early), 0
    expected, full = [], []
    for chunk in chunks:
        expected += eager.add(first, chunk)
        full += waiting.add(first, chunk)
        first += len(chunk)
    assert len({batch.expert for batch in full}) <= early
    expected, rest = expected + eager.flush(), waiting.flush()
    in_turn = [batch.expert for batch in rest]
    assert in_turn == sorted(in_turn)
    for expert in range(EXPERTS):
        one, other = ([(*b.tokens, *b.slots) for b in made if b.expert == expert] for made in (expected, full + rest))
        assert one == other


@given(st.lists(st.integers(1, 64), min_size=1, unique=True), st.integers(1, 64))
def test_the_smallest_tier_that_holds_the_rows_is_taken(tiers: list[int], rows: int) -> None:
    tier = smallest_tier(tuple(tiers), rows)
    assert tier == 0 if max(tiers) < rows else tier == min(t for t in tiers if t >= rows)
