"""The expert cache against a plain model of what it promises."""

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.cache_rules.forms import Cache, Form, Reason
from runtime.errors import BudgetError
from runtime.experts.cache import ExpertCache
from runtime.experts.loader import ExpertLoader
from runtime.units import parse_budget


class Account:
    """Hears of loads and evictions and keeps its own sum."""

    def __init__(self) -> None:
        self.bytes = 0
        self.loads = 0
        self.evictions = 0

    def load_begin(self, form: Form, size: int, reason: Reason) -> None:
        self.loads += 1

    def load_end(self, form: Form, size: int, resident: int) -> None:
        self.bytes += size
        assert resident == self.bytes

    def evicted(self, form: Form, size: int, resident: int) -> None:
        self.evictions += 1
        self.bytes -= size
        assert resident == self.bytes

    def waited(self, duration_ns: int) -> None:
        assert duration_ns >= 0


def size_of(form: Form) -> int:
    return 10 + form.expert % 3


def make(budget: int | None) -> tuple[ExpertCache[str], Account]:
    account = Account()
    return ExpertCache(budget, size_of, lambda form: f"session of {form}", account), account


def run_event(cache: ExpertCache[str], layer: int, experts: list[int]) -> list[Cache]:
    cache.begin_event()
    forms = [Form(layer, expert, 1, 0) for expert in experts]
    cache.name(forms)
    states = []
    for form in forms:
        states.append(cache.state(form))
        assert cache.acquire(form) == f"session of {form}"
        cache.release(form)
    return states


events = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)), max_size=40)


@given(events, st.integers(48, 200))
def test_the_cache_never_holds_more_than_its_budget_and_its_watcher_agrees(
    sequence: list[tuple[int, list[int]]], budget: int
) -> None:
    cache, account = make(budget)
    for layer, experts in sequence:
        run_event(cache, layer, experts)
        assert cache.resident == account.bytes == sum(size_of(form) for form in cache.forms()) <= budget
    assert account.loads - account.evictions == len(cache.forms())


@given(events, st.integers(48, 200))
def test_a_hit_is_what_the_cache_held_when_the_layer_began(sequence: list[tuple[int, list[int]]], budget: int) -> None:
    cache, account = make(budget)
    for layer, experts in sequence:
        before = set(cache.forms())
        states = run_event(cache, layer, experts)
        expected = [Cache.HIT if Form(layer, expert, 1, 0) in before else Cache.MISS for expert in experts]
        assert states == expected
    assert cache.hits + cache.misses == sum(len(experts) for _, experts in sequence)
    assert cache.misses == account.loads, "a decode step's named experts stay, so only misses load"


@given(events, st.integers(48, 200))
def test_the_least_recently_used_expert_that_the_layer_does_not_need_leaves_first(
    sequence: list[tuple[int, list[int]]], budget: int
) -> None:
    cache, _ = make(budget)
    held: dict[Form, None] = {}
    for layer, experts in sequence:
        run_event(cache, layer, experts)
        needed = [Form(layer, expert, 1, 0) for expert in experts]
        for form in needed:
            missing = form not in held
            while missing and sum(map(size_of, held)) + size_of(form) > budget:
                del held[next(other for other in held if other not in needed)]
            held.pop(form, None)
            held[form] = None
        assert cache.forms() == list(held)


def test_an_expert_that_runs_is_never_evicted() -> None:
    cache, _ = make(22)
    cache.begin_event()
    cache.acquire(Form(0, 0, 1, 0))
    cache.acquire(Form(0, 3, 1, 0))
    with pytest.raises(BudgetError, match="--expert-cache"):
        cache.acquire(Form(0, 6, 1, 0))
    cache.release(Form(0, 0, 1, 0))
    cache.acquire(Form(0, 6, 1, 0))
    assert cache.forms() == [Form(0, 3, 1, 0), Form(0, 6, 1, 0)]


def test_an_expert_counts_once_in_a_layer_however_often_it_runs() -> None:
    cache, account = make(None)
    for _ in range(2):
        run_event(cache, 0, [5])
        assert cache.state(Form(0, 5, 1, 0)) == (Cache.MISS if cache.hits == 0 else Cache.HIT)
    assert (cache.hits, cache.misses, account.loads) == (1, 1, 1)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1.5MiB", 1572864), ("800kB", 800000), ("4096", 4096), ("2 GiB", 2 << 30), ("all", None), ("12.5%", 1000), ("100%", None)],
)
def test_budgets_are_read_in_binary_and_decimal_units_and_as_shares(text: str, size: int | None) -> None:
    assert parse_budget(text, 8000) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1XiB", "1.5.2MiB", "%", "-5%"])
def test_a_budget_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BudgetError):
        parse_budget(text, 8000)


class Session:
    """Something that weak references can follow."""


@pytest.mark.parametrize("threads", [0, 1])
def test_what_left_is_gone_at_once(threads: int) -> None:
    loader = ExpertLoader(threads) if threads else None
    cache = ExpertCache(10, lambda _: 10, lambda _: Session(), Account(), loader=loader)
    gc.disable()  # a cycle would wait for it, with all its memory
    try:
        cache.begin_event()
        first = weakref.ref(cache.acquire(Form(0, 0, 1, 0)))
        cache.release(Form(0, 0, 1, 0))
        cache.begin_event()
        cache.prefetch(Form(0, 1, 1, 0), 0.0)
        cache.acquire(Form(0, 1, 1, 0))
        cache.release(Form(0, 1, 1, 0))
        cache.begin_event()
        cache.acquire(Form(0, 2, 1, 0))
        assert first() is None and len(cache.forms()) == 1
    finally:
        gc.enable()
        if loader:
            loader.close()
