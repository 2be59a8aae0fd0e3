"""A token's prepared items: the extension and what stands in for it do the same; errors say where they come from."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import MoE
from runtime.backends import calls
from runtime.backends.calls import Item, LogEntry, PlainCombine, TokenRun, combine_experts
from runtime.errors import BackendError
from runtime.package.demo_model import write_demo_model
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind, result_id
from tests.runtime_models import PROMPT

ROOT = Path(__file__).resolve().parents[1]
built = pytest.mark.skipif(not probes.built, reason="runtime/telemetry/_probes.so is not built: run make")
DIGEST = """
import sys
if {plain}: sys.modules["runtime.telemetry._probes"] = None
from runtime import MoE
model = MoE.load({folder!r}, {cache!r})
ids = [token.id for token in model.generate({prompt!r}, 8)]
print(ids, b"".join(weights.tobytes() for *_, weights in model.log.routing).hex())
"""


def an_item(run: object, layer: int = 0, kind: Kind = Kind.ATTENTION) -> Item:
    call = calls.Call(run, None, 1, kind, layer, -1, 1, result_id(kind, layer), probes.pack_sources(1, 2))
    return Item(call, LogEntry(kind, layer, -1, (kind, 1)))


@built
@given(st.integers(1, 8), st.integers(1, 67), st.sampled_from([1.0, 0.22]), st.booleans(), st.integers(0, 1 << 30))
def test_the_extension_sums_up_to_the_same_bits_as_numpy_does_for_many_rows(
    k: int, hidden: int, multiplier: float, has_common: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows, weights = random.standard_normal((9, hidden), np.float32), random.random(k, np.float32)
    common = random.standard_normal(hidden, np.float32) if has_common else None
    attended, out = random.standard_normal(hidden, np.float32), np.empty(hidden, np.float32)
    chosen = random.permutation(9)[:k]
    results = probes.pack_sources(*(result_id(Kind.EXPERT, 3, expert) for expert in range(9)))
    parts = result_id(Kind.COMBINE, 3), b"", results, chosen, weights, rows, common, multiplier, attended
    calls.run([calls.Combine(*parts, out)], [0], np.zeros((1, 2), np.int64), 0)
    plain = np.empty(hidden, np.float32)
    PlainCombine(*parts, plain).run(None, None)
    assert out.tobytes() == plain.tobytes()
    twice = [np.stack([value, value]) if value is not None else None for value in (weights, rows[chosen], common, attended)]
    many = combine_experts(twice[0], twice[1], twice[2], multiplier, twice[3])
    assert many[1].tobytes() == out.tobytes()


@pytest.mark.parametrize("cache", ["all", "2MiB"])
def test_a_token_has_the_same_bits_without_the_extension(tmp_path: Path, cache: str) -> None:
    folder = str(write_demo_model(tmp_path))
    scripts = [DIGEST.format(plain=plain, folder=folder, cache=cache, prompt=PROMPT) for plain in (False, True)]
    said = [
        subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True
        ).stdout
        for script in scripts
    ]
    assert said[0] == said[1] != ""


def test_a_graph_that_fails_is_named_and_what_ran_before_is_counted() -> None:
    ran: list[int] = []

    def good(binding: None, options: None) -> None:
        ran.append(1)

    def bad(binding: None, options: None) -> None:
        raise RuntimeError("no such shape\nand more")

    log = RunLog()
    token = TokenRun(log, 4)
    for item in (an_item(good), an_item(bad, 2, Kind.ROUTER), an_item(good, 3)):
        token.put(item)
    with pytest.raises(BackendError, match=r"router 2 \(no such shape\)"):
        token.flush()
    token.put(an_item(good))
    token.account()
    assert ran == [1]
    assert log.graphs == {(Kind.ATTENTION, 1): 1}
    assert log.operators == {Kind.ATTENTION: 1}
    token.flush()
    assert ran == [1], "what waited when the account was made is forgotten"


def test_an_interrupted_graph_passes_the_interrupt_on() -> None:
    def interrupted(binding: None, options: None) -> None:
        raise KeyboardInterrupt

    token = TokenRun(RunLog(), 1)
    token.put(an_item(interrupted))
    with pytest.raises(KeyboardInterrupt):
        token.flush()


@built
def test_items_that_do_not_belong_together_are_refused() -> None:
    times, numbers, floats = np.zeros((1, 2), np.int64), np.zeros(4, np.int64), np.zeros(4, np.float32)
    item = an_item(lambda binding, options: None).work
    for wrong in (([item], [0, 0], times, 0), ([item], [0], times, 1), ([item], [0], times, -1), ([3], [0], times, 0)):
        with pytest.raises((TypeError, ValueError)):
            calls.run(*wrong)
    fixed = (1, Kind.ROUTER, 0, -1, 1, 1, b"")
    for chosen, weights in ((numbers, floats[:3]), (np.zeros(65, np.int64), np.zeros(65, np.float32)), (numbers, None)):
        with pytest.raises(ValueError, match="at most 64"):
            calls.Call(print, None, *fixed, chosen, weights)
    rows, out = np.zeros((2, 4), np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="belong together"):
        calls.Combine(1, b"", bytes(24), numbers, floats, rows, None, 1.0, out, out)
    outside = calls.Combine(1, b"", bytes(16), numbers + 2, floats, rows, None, 1.0, out.copy(), out)
    with pytest.raises(ValueError):
        calls.run([outside], [0], times, 0)


@pytest.mark.parametrize("kind", [pytest.param("Choice", marks=built), "PlainChoice"])
def test_a_choice_runs_what_the_router_has_chosen_by_then_and_prepares_it_once(kind: str) -> None:
    ran: list[int] = []
    made: list[int] = []
    kept: list[object] = [None] * 3
    call = calls.Call if kind == "Choice" else calls.PlainCall
    run = calls.run if kind == "Choice" else calls.plain_run

    def prepare(expert: int) -> object:
        made.append(expert)
        fixed = 1, Kind.EXPERT, 0, expert, 1, result_id(Kind.EXPERT, 0, expert), b""
        kept[expert] = call(lambda binding, options: ran.append(expert), None, *fixed)
        return kept[expert]

    chosen, times = np.zeros((2, 1), np.int64), np.zeros((2, 2), np.int64)
    items = [getattr(calls, kind)(kept, prepare, chosen[place, 0, ...]) for place in range(2)]
    for chosen[:, 0] in ([2, 0], [0, 2], [2, 0]):
        run(items, [0, 0], times, 0)
    assert (ran, made) == ([2, 0, 0, 2, 2, 0], [2, 0])
    chosen[0] = 3
    with pytest.raises((ValueError, IndexError)):
        run(items, [0, 0], times, 0)


def test_where_every_expert_stays_all_runs_are_hits_and_are_those_that_the_routers_chose(tmp_path: Path) -> None:
    model = MoE.load(write_demo_model(tmp_path))
    list(model.generate(PROMPT, 6))
    decoded = [experts for _, _, experts, _ in model.log.routing if len(experts) == 1]
    everything = [(layer, int(e)) for _, layer, experts, _ in model.log.routing for e in np.unique(experts)]
    assert model.log.expert_runs == Counter(everything)
    assert model.engine.experts.cache.misses == 0
    assert model.engine.experts.cache.hits == len(everything) > sum(map(np.size, decoded)) > 0
    model.close()


@built
def test_a_choice_that_cannot_be_is_refused() -> None:
    times, one = np.zeros((1, 2), np.int64), np.zeros((), np.int64)
    for wrong in (([None], print, np.zeros(2, np.int64)), ((None,), print, one)):
        with pytest.raises(ValueError, match="one int64"):
            calls.Choice(*wrong)
    with pytest.raises(TypeError, match="neither a call"):
        calls.run([calls.Choice([None], lambda expert: 3, one)], [0], times, 0)


def test_the_first_token_of_another_sequence_reads_its_own_keys(tmp_path: Path) -> None:
    model = MoE.load(write_demo_model(tmp_path))
    first = [token.id for token in model.generate(PROMPT, 6)]
    list(model.generate("Something else", 6))
    assert [token.id for token in model.generate(PROMPT, 6)] == first
    model.close()
