"""What-if simulator: the runtime itself is the truth for its policy, closed forms for its clock."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.errors import PredictError
from analyzer.model import read_config
from analyzer.predict import costs, devices, simulator, timeline
from analyzer.predict.costs import Costs, Line
from analyzer.predict.simulator import Outcome, Settings, on_pareto_front, simulate_trace
from analyzer.predict.trace import Step, Trace, from_tables
from analyzer.records.schema import empty_table
from analyzer.tables.store import load_tables
from moescope.__main__ import main
from runtime.cache_rules.batches import TokenBuffers, early_experts, slice_chunks, smallest_tier
from runtime.cache_rules.forms import Form, Reason
from runtime.cache_rules.rule import LARGE_EXPERT, PIECE, URGENT, Entry
from runtime.experts.cache import ExpertCache
from runtime.experts.loader import ExpertLoader
from runtime.package.demo_model import write_demo_model
from tests.conftest import drawn
from views.commands.simulate import cache_bytes
from workloads import tables_fixture
from workloads.tables_fixture import frame, spans

SIZE = 100
KINDS = ("attention", "router", "dispatch", "combine", "outside", "expert")
EVEN = Costs(
    {(kind, unit): Line(1e-3) for kind in KINDS for unit in ("cpu", "npu")}, Line(5e-3), {"cpu": SIZE, "npu": SIZE}, "test"
)


def random_trace(seed: int, prompt: int = 5, decode: int = 6, layers: int = 3, experts: int = 6, k: int = 2) -> Trace:
    random = np.random.default_rng(seed)

    def routes(rows: int) -> tuple[np.ndarray, ...]:
        return tuple(random.random((rows, experts)).argsort(1)[:, :k] for _ in range(layers))

    steps = [Step("prefill", 0, routes(prompt))] + [Step("decode", prompt + i, routes(1)) for i in range(decode)]
    return Trace(tuple(steps), experts)


class Silent:
    def load_begin(self, form: Form, size: int, reason: Reason) -> None: ...

    def load_end(self, form: Form, size: int, resident: int) -> None: ...

    def evicted(self, form: Form, size: int, resident: int) -> None: ...

    def waited(self, duration_ns: int) -> None: ...


class Manual(ExpertLoader):
    """A loader without threads, whose loads end when the test says so."""

    def __init__(self) -> None:
        super().__init__(0)

    def land(self) -> None:
        while self._waiting:
            ticket = min(self._waiting, key=lambda waiting: waiting.urgency)
            self._waiting.remove(ticket)
            ticket.run()


def through_the_runtime(trace: Trace, budget: int, chunk: int, tiers: tuple[int, ...]) -> tuple[int, int]:
    """(hits, misses) of the runtime's own cache and buffers, driven as its engine drives them, where loads end in time."""
    loader = Manual()
    cache: ExpertCache[None] = ExpertCache(budget, lambda form: SIZE, lambda form: None, Silent(), loader=loader)
    for step in trace.steps:
        cache.background = step.phase == "prefill" and not tiers
        for layer, chosen in enumerate(step.routes):
            cache.begin_event()
            buffers = TokenBuffers(trace.experts, max(tiers, default=None), early_experts(budget, SIZE))
            ran: defaultdict[int, set[int]] = defaultdict(set)
            chunks = []
            for rows in slice_chunks(len(chosen), chunk, bool(tiers)):
                chunks.append(buffers.add(rows.start, chosen[rows]))
                if cache.background:
                    cache.name([Form(layer, expert, 1, 0) for expert in np.unique(chosen[rows]).tolist()])
                    loader.land()
            for batches in [*chunks, buffers.flush()]:
                forms = []
                for batch in batches:
                    tier = smallest_tier(tiers, len(batch), ran[batch.expert])
                    ran[batch.expert].add(tier)
                    forms.append(Form(layer, batch.expert, 1, tier))
                cache.name(forms)
                while forms:
                    form = next(filter(cache.ready, forms), forms[0])
                    forms.remove(form)
                    cache.state(form)
                    cache.acquire(form)
                    cache.release(form)
    return cache.hits, cache.misses


@settings(max_examples=drawn(30))
@given(st.integers(0, 10_000), st.integers(2, 18), st.integers(1, 6), st.booleans())
def test_hits_are_those_of_the_runtimes_cache(seed: int, held: int, chunk: int, npu: bool) -> None:
    trace = random_trace(seed)
    unit = "npu" if npu else "cpu"
    tiers = (1, 2, 4)
    quick = replace(EVEN, load=Line(1e-12))
    found = simulate_trace(trace, quick, Settings(held * SIZE, chunk, tiers, prefill_unit=unit, decode_unit=unit))
    assert (found.hits, found.misses) == through_the_runtime(trace, held * SIZE, chunk, tiers if npu else ())
    assert found.peak_bytes <= held * SIZE


def asked_at_random(trace: Trace, seed: int) -> Trace:
    """The trace with loads ahead, of this layer or the next, some of them in vain."""
    random = np.random.default_rng(seed)

    def asked() -> dict[int, list[tuple[int, int]]]:
        pairs = {(at, (min(at + int(random.integers(2)), trace.layers - 1), int(random.integers(trace.experts))))
                 for at in range(trace.layers) for _ in range(3)}  # fmt: skip
        return {at: [what for where, what in sorted(pairs) if where == at] for at in range(trace.layers)}

    return Trace(tuple(replace(step, asked=asked()) if step.phase == "decode" else step for step in trace.steps), trace.experts)


@settings(max_examples=drawn(30))
@given(st.integers(0, 10_000), st.integers(2, 14))
def test_hits_with_prefetching_are_those_of_the_runtimes_cache_where_loads_end_in_time(seed: int, held: int) -> None:
    trace = asked_at_random(random_trace(seed, prompt=3, decode=20), seed)
    loader = Manual()
    cache: ExpertCache[None] = ExpertCache(held * SIZE, lambda form: SIZE, lambda form: None, Silent(), loader=loader)
    for step in trace.steps:
        for layer, chosen in enumerate(step.routes):
            cache.begin_event()
            for target, expert in step.asked.get(layer, ()):
                cache.prefetch(Form(target, expert, 1, 0), 100.0 * (target - layer))
            loader.land()
            forms = [Form(layer, expert, 1, 0) for expert in np.unique(chosen).tolist()]
            cache.name(forms)
            while forms:
                form = next(filter(cache.ready, forms), forms[0])
                forms.remove(form)
                cache.state(form)
                cache.acquire(form)
                cache.release(form)
                loader.land()
    cost = replace(EVEN, load=Line(1e-12))
    found = simulate_trace(trace, cost, Settings(held * SIZE, 64, prefetch="recorded"))
    assert (found.hits, found.misses) == (cache.hits, cache.misses)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize("budget", ["1.2MiB", "2.4MiB"])
def test_hits_are_those_of_a_real_run(demo: Path, budget: str) -> None:
    from runtime import MoE

    model = MoE.load(demo, budget)
    list(model.generate("The router looks at the token and picks a few experts.", max_new_tokens=8, ignore_end=True))
    model.close()
    log, layers = model.log, model.package.family.layers
    routes = [tuple(e.astype(np.int64) for _, _, e, _ in log.routing[i : i + layers]) for i in range(0, len(log.routing), layers)]
    steps = [Step(s.phase.name.lower(), s.position, r) for s, r in zip(log.steps, routes, strict=True)]
    size = model.engine.experts.bytes_of(Form(0, 0, 1, 0))
    cost = Costs(EVEN.work, EVEN.load, {"cpu": size}, "test")
    found = simulate_trace(Trace(tuple(steps), model.package.family.experts), cost, Settings(model.options.expert_cache))
    assert (found.hits, found.misses) == (log.hits, log.misses)
    assert found.loaded_bytes == log.loaded_bytes


def test_on_one_unit_with_everything_loaded_a_step_is_the_sum_of_its_parts() -> None:
    trace = random_trace(1, prompt=4)
    found = simulate_trace(trace, EVEN, Settings(None, chunk=2))
    distinct = sum(len(np.unique(chosen)) for chosen in trace.steps[0].routes)
    chunks, layers = 2, 3
    expected = 1e-3 * (layers * (chunks * 3 + 1 + 1) + distinct + 1)
    assert found.durations("prefill")[0] == pytest.approx(expected)
    assert found.durations("decode") == pytest.approx(1e-3 * (layers * (3 + 2 + 1) + 1))
    assert found.stall_s == 0


def test_every_miss_of_a_decoded_token_waits_for_its_load() -> None:
    trace = random_trace(2)
    trace = replace(trace, steps=trace.steps[1:])
    all_there, few = (simulate_trace(trace, EVEN, Settings(size)) for size in (None, 2 * SIZE))
    loads = few.loaded_bytes // SIZE
    assert few.stall_s == pytest.approx(5e-3 * loads)
    assert few.steps[-1][3] - all_there.steps[-1][3] == pytest.approx(few.stall_s)


def test_large_experts_are_read_while_the_layer_runs_those_it_has() -> None:
    trace = Trace(tuple(Step("decode", i, (np.array([[0, 1 + i]]),)) for i in range(3)), 6)
    cost = replace(EVEN, expert_bytes={"cpu": LARGE_EXPERT})
    apart, beside = (simulate_trace(trace, c, Settings(3 * c.expert_bytes["cpu"])) for c in (EVEN, cost))
    assert (apart.hits, apart.misses) == (beside.hits, beside.misses) == (2, 4)
    # Both experts miss at first and nothing else can run; then a load of 5 ms overlaps the other expert's run of 1 ms.
    assert apart.stall_s == pytest.approx(4 * 5e-3)
    assert beside.stall_s == pytest.approx(5e-3 + 4e-3 + 2 * 4e-3)
    assert {span.unit for span in beside.spans if span.kind == "load"} == {"storage"}


def test_the_loaders_first_load_of_an_expert_has_its_own_cost() -> None:
    trace = Trace(tuple(Step("decode", i, (np.array([[expert]]),)) for i, expert in enumerate((0, 1, 0, 1))), 2)
    cost = replace(EVEN, expert_bytes={"cpu": LARGE_EXPERT}, behind=Line(2e-3), behind_first=Line(7e-3))
    found = simulate_trace(trace, cost, Settings(LARGE_EXPERT))
    took = [span.end - span.begin for span in found.spans if span.unit == "storage"]
    assert took == pytest.approx([7e-3, 7e-3, 2e-3, 2e-3])


def test_the_npu_works_beside_the_cpu_but_never_two_things_at_once() -> None:
    trace = random_trace(3, prompt=32)
    apart, beside = (simulate_trace(trace, EVEN, Settings(None, 4, (1, 2, 4), prefill_unit=unit)) for unit in ("cpu", "npu"))
    assert beside.durations("prefill")[0] < sum(span.end - span.begin for span in beside.spans if span.step == 0)
    assert apart.durations("prefill")[0] == pytest.approx(sum(span.end - span.begin for span in apart.spans if span.step == 0))
    for unit in ("cpu", "npu"):
        spans = sorted((span.begin, span.end) for span in beside.spans if span.unit == unit)
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(spans))


def test_prefetching_what_always_follows_removes_stalls() -> None:
    cycle = [Step("decode", i, (np.array([[2 * (i % 3), 2 * (i % 3) + 1]]),) * 4) for i in range(24)]
    cost = Costs(EVEN.work, Line(1e-3), {"cpu": SIZE}, "test")
    trace = Trace(tuple(cycle), 6)
    without, ahead = (simulate_trace(trace, cost, Settings(8 * SIZE, prefetch=p)) for p in (None, 0.5))
    assert without.hits == 0
    assert ahead.hits / (ahead.hits + ahead.misses) > 0.5
    assert ahead.stall_s < 0.5 * without.stall_s
    assert ahead.steps[-1][3] < without.steps[-1][3]


@given(st.floats(1e-5, 1e-2), st.floats(1e-7, 1e-4), st.floats(1e-9, 1e-6))
def test_a_fitted_line_is_the_line(fixed: float, per_row: float, per_pair: float) -> None:
    rows, context = (grid.ravel().astype(float) for grid in np.meshgrid([1, 8, 32, 64], [1, 100, 400]))
    line = costs.fit_line(fixed + per_row * rows + per_pair * rows * context, rows, context)
    for r, c in ((1, 50), (64, 400), (16, 10)):
        assert line.seconds(r, c) == pytest.approx(fixed + per_row * r + per_pair * r * c, rel=1e-4)


def test_a_slower_device_is_slower(demo: Path) -> None:
    trace, model = random_trace(4, experts=8), read_config(demo)
    spans = []
    for name in ("rk3588", "snapdragon-x-elite"):
        found = simulate_trace(trace, costs.from_device(model, devices.load_device(name)), Settings(8 * 150_000)).summary()
        spans.append(found["tpot_ms"])
    assert spans[0] > 1.2 * spans[1]


def test_a_simulated_run_can_be_drawn_like_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate_trace(random_trace(5), EVEN, Settings(4 * SIZE, prefetch=0.2))
    timeline.write_run(tmp_path / "sim", found, "test costs")
    tables = load_tables(tmp_path / "sim")
    assert len(tables["experts"]) == sum(span.kind == "expert" for span in found.spans)
    assert tables["tokens"]["duration_ns"].sum() == pytest.approx(
        1e9 * sum(end - begin for *_, begin, end in found.steps), abs=10
    )
    assert main(["write", str(tmp_path / "sim"), "--json", "--only", "trace"]) == 0
    assert json.loads(capsys.readouterr().out)["files"][0]["slices"] > len(found.spans) // 2
    assert main(["simulate", str(tmp_path / "sim")]) == 2
    assert "no routes" in capsys.readouterr().err


def test_steps_without_all_their_routes_are_left_out() -> None:
    _, tables = tables_fixture.make_tables()
    whole = from_tables(tables)
    routes = tables["routes"]
    last = routes["token_id"] == routes["token_id"].max()
    cut = from_tables({**tables, "routes": routes[~(last & (routes["rank"] == 0))]})
    assert len(cut.steps) == len(whole.steps) - 1


def test_only_unbeaten_settings_are_on_the_front() -> None:
    trace = random_trace(6)
    found = [simulate_trace(trace, EVEN, Settings(n * SIZE)) for n in (2, 9, 18)]
    worse = Outcome(Settings(), [("decode", 1, 0.0, 99.0)], peak_bytes=10**9)
    assert on_pareto_front([*found, worse]) == [True, True, True, False]


def test_cache_sizes_are_bytes_or_shares() -> None:
    assert cache_bytes("25%", 1000) == 250
    assert cache_bytes("1.5KiB", 10_000) == 1536
    assert cache_bytes("100%", 1000) is cache_bytes("all", 1000) is None
    for wrong in ("two", "nan%", "inf%"):
        with pytest.raises(PredictError, match=wrong.rstrip("%")):
            cache_bytes(wrong, 1000)


WORK = {"attention": Line(3e-4, 2e-5), "router": Line(1e-4, 4e-6), "combine": Line(4e-5, 1e-6)}
RUN, LOAD_S, FIRST_S, LEAD_S = Line(1.5e-4, 3e-5), 2e-3, 7e-4, 2e-5


def recording(pace: float = 1.0, phase: str = "prefill", limited: bool = True) -> dict[str, pd.DataFrame]:
    """One step whose pieces of work follow each other as WORK says; of a limited cache every other expert is missed."""
    rows = np.random.default_rng(0).integers(1, 64, 200)
    missed = (np.arange(200) % 2 == 0) & limited
    lasted = {kind: np.array([line.seconds(r) for r in rows]) for kind, line in WORK.items()}
    lasted["expert"] = np.array([RUN.seconds(r) for r in rows]) + missed * (LOAD_S + FIRST_S)
    lengths = np.round(np.stack(list(lasted.values()), 1).ravel() * pace * 1e9).astype(np.int64)
    lead = round(LEAD_S * pace * 1e9)
    begin = (np.cumsum(lengths + lead) - lengths).reshape(200, -1)
    lengths = lengths.reshape(200, -1)
    faults = {"token_id": 0, "maj_flt": 0, "min_flt": 0}
    tables = {name: empty_table(name) for name in ("operators", "experts", "loads", "tokens", "routes", "graphs")}
    operators = [
        frame("operators", op_id=np.arange(200), type=kind, n_tokens=rows, **faults, **spans(begin[:, i], lengths[:, i]))
        for i, kind in enumerate(WORK)
    ]
    tables["operators"] = pd.concat(operators, ignore_index=True)
    state = {"cache": list(np.where(missed, "miss", "hit")), "n_tokens": rows, "tier": 0, "backend": "cpu"}
    tables["experts"] = frame("experts", run_id=np.arange(200), **state, **faults, **spans(begin[:, 3], lengths[:, 3]))
    # Loads at startup lie outside of the step.
    reason, which = ("demand", missed) if limited else ("startup", np.ones(200, bool))
    load = {"action": "load", "reason": reason, "backend": "cpu", "bytes": 5000, "load_id": np.arange(which.sum())}
    taken = np.full(which.sum(), round(LOAD_S * pace * 1e9))
    tables["loads"] = frame("loads", **load, **spans(begin[which, 3] + (1000 if limited else 10**12), taken))
    step = spans(np.array([0]), int(begin[-1, 3] + lengths[-1, 3]))
    tables["tokens"] = frame("tokens", token_id=np.array([0]), phase=phase, position=0, n_tokens=64, **step)
    return tables


def test_costs_come_out_of_a_recording_as_they_went_in_with_what_lies_before_them() -> None:
    found = costs.from_tables(recording())
    for kind, line in [*WORK.items(), ("expert", RUN)]:
        assert found.line(kind, "cpu", "prefill").seconds(32) == pytest.approx(line.seconds(32) + LEAD_S, rel=1e-3)
    assert found.load.seconds(5000) == pytest.approx(LOAD_S, rel=1e-3)
    assert found.first[costs.LOADED, "prefill", costs.DEMAND] == pytest.approx(FIRST_S, rel=1e-3)
    assert found.expert_bytes == {"cpu": 5000}


def test_chunks_that_nearly_all_run_beside_the_loader_cost_what_they_take_whatever_a_layers_first_chunk_does() -> None:
    rows = np.tile([12.0, 96.0], 100)
    chunks = pd.DataFrame({"rows": rows, "context": 0.0, "bare": 30e-6 + 2e-6 * rows, "beside": True, "asked": 0})
    first = pd.DataFrame({"rows": np.tile([12.0, 96.0], 5), "context": 0.0, "bare": 600e-6, "beside": False, "asked": 0})
    work = pd.concat([chunks, first]).assign(seconds=lambda part: part["bare"])
    line = costs.line_of_work(work)
    for size in (8, 64):
        assert line.seconds(size) * line.beside == pytest.approx(30e-6 + 2e-6 * size, rel=0.25)


def test_recordings_taken_while_the_machine_was_slower_are_brought_to_the_pace_of_the_first() -> None:
    found = costs.from_tables(recording(phase="decode"), recording(2.5, "decode", limited=False))
    for mode in (costs.DEMAND, costs.RESIDENT):
        for kind, line in [*WORK.items(), ("expert", RUN)]:
            assert found.line(kind, "cpu", "decode", mode).seconds(32) == pytest.approx(line.seconds(32) + LEAD_S, rel=1e-2)


def test_between_the_pieces_of_a_read_ahead_comes_what_a_layer_waits_for() -> None:
    size = 10 * PIECE
    trace = Trace((Step("decode", 0, (np.array([[0, 1]]),) * 2, {0: [(1, 5)]}),), 6)
    cost = replace(EVEN, load=Line(per_row=1e-3 / PIECE), expert_bytes={"cpu": size}, loads_at_once=2)
    found = simulate_trace(trace, cost, Settings(4 * size, prefetch="recorded"))
    by_loader = {(span.layer, span.expert): span for span in found.spans if span.unit == "storage"}
    ahead, needed = by_loader[1, 5], by_loader[0, 1]
    assert ahead.begin < needed.begin
    assert needed.end < ahead.end
    assert ahead.end - ahead.begin == pytest.approx(0.02)


def test_perfetto_reads_two_loaders_of_a_simulated_run_on_threads_of_their_own(tmp_path: Path) -> None:
    from tests.judge import Judge

    trace = asked_at_random(random_trace(5), 1)
    found = simulate_trace(trace, replace(EVEN, loaders=2, loads_at_once=3), Settings(5 * SIZE, prefetch="recorded"))
    timeline.write_run(tmp_path / "sim", found, "test costs")
    assert main(["write", str(tmp_path / "sim"), "--only", "trace"]) == 0
    counted = (
        "select thread.name, sum(dur) from slice join thread_track on slice.track_id = thread_track.id "
        "join thread using(utid) where thread.name glob '*storage*' group by 1"
    )
    units = ("storage", "storage 2")
    expected = {f"expert loader: simulated {u}": 1e9 * sum(s.end - s.begin for s in found.spans if s.unit == u) for u in units}
    assert dict(Judge(tmp_path / "sim" / "trace.pftrace").rows(counted)) == pytest.approx(expected, abs=100)
    assert all(expected.values())


def test_two_runs_are_scored_as_original_and_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = {key: Line(line.fixed / 2) for key, line in EVEN.work.items()}
    for name, cost in (("original", EVEN), ("quantized", replace(EVEN, work=quick))):
        timeline.write_run(tmp_path / name, simulate_trace(random_trace(7), cost, Settings()), "test costs")
    runs = [str(tmp_path / "original"), str(tmp_path / "quantized")]
    assert main(["predict", "quantization", *runs, "--accuracy", "0.8", "0.72", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert [score["accuracy"], score["prefill"], score["decode"]] == pytest.approx([0.9, 2, 2], rel=1e-3)
    assert score["score"] == pytest.approx(3 / (1 / 0.9 + 1 / 2 + 1 / 2), rel=1e-3)
    assert main(["predict", "quantization", *runs, "--perplexity", "10", "12.5"]) == 0
    assert "harmonic quantization score" in capsys.readouterr().out
    assert main(["predict", "quantization", *runs, "--perplexity", "0.5", "12.5"]) == 2
    assert "1 or more" in capsys.readouterr().err


def test_waiting_loads_begin_with_the_most_urgent() -> None:
    env, begun = simpy.Environment(), list[float]()

    def load(entry: Entry, thread: str) -> simulator.Work:
        begun.append(entry.urgency)
        yield env.timeout(1)

    loader = simulator.SimulatedLoader(env, load, threads=1)
    for urgency in (2.0, 3.0, 1.0, URGENT):
        loader.submit(Entry(Form(0, 0, 1, 0), 1, Reason.PREFETCH, urgency))
    env.run()
    assert begun == [URGENT, 1, 2, 3] and env.now == 4
