"""Estimated savings of remedies, by replaying them; first loads, compiling and evictions are distinguished."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.questions import expert_loads
from analyzer.questions.findings import findings
from runtime.cache_rules.forms import Cache, Form, Reason
from runtime.experts.cache import ExpertCache
from tests.conftest import drawn
from workloads.tables_fixture import Tables, frame, make_tables

SIZE, STEP, LOAD = 100, 10_000, 50


class Log:
    """What the runtime's own cache does, as rows of `loads` at the time `now`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self.now = self.token = self.begun = 0

    def load_begin(self, form: Form, size: int, reason: Reason) -> None:
        self.begun, self.now = self.now, self.now + LOAD

    def load_end(self, form: Form, size: int, resident: int) -> None:
        self.note("load", form, resident, self.begun)

    def evicted(self, form: Form, size: int, resident: int) -> None:
        self.note("evict", form, resident, self.now)

    def waited(self, duration_ns: int) -> None: ...

    def note(self, action: str, form: Form, resident: int, begin: int) -> None:
        reason, backend = ("demand", "cpu") if action == "load" else ("", "")
        row = {"token_id": self.token, "action": action, "reason": reason, "backend": backend, "resident_bytes": resident}
        self.rows.append(
            {**row, "layer": form.layer, "expert": form.expert, "bytes": SIZE, "begin_ns": begin, "end_ns": self.now}
        )


def ran(trace: list[list[tuple[int, ...]]], held: int, around: int = 0) -> Tables:
    """Tables of a run of the runtime's own cache with room for `held` experts; `trace[step][layer]` are the experts used.

    A run that misses takes `around` ns besides its load and the 10 ns of every run.
    """
    log, runs, tokens = Log(), [], []
    cache: ExpertCache[None] = ExpertCache(held * SIZE, lambda form: SIZE, lambda form: None, log)
    for log.token, step in enumerate(trace):
        log.now = begin = STEP * log.token
        for layer, experts in enumerate(step):
            cache.begin_event()
            forms = [Form(layer, expert, 1, 0) for expert in experts]
            cache.name(forms)
            for i in cache.resident_first(forms):
                at, hit = log.now, cache.state(forms[i]) is not Cache.MISS
                cache.acquire(forms[i])
                cache.release(forms[i])
                log.now += 10 if hit else 10 + around
                run = {"token_id": log.token, "layer": layer, "expert": experts[i], "begin_ns": at, "end_ns": log.now}
                runs.append(run | {"tier": 0, "backend": "cpu", "cache": "hit" if hit else "miss", "run_id": len(runs)})
        tokens.append({"token_id": log.token, "phase": "decode", "begin_ns": begin, "end_ns": log.now, "tid": 1})
    _, tables = make_tables(tokens=1)
    empty = {name: table.iloc[:0] for name, table in tables.items()}
    rows = {"loads": log.rows, "experts": runs, "tokens": tokens}
    made = {name: frame(name, **{key: [row[key] for row in part] for key in part[0]}) for name, part in rows.items() if part}
    made["loads"]["load_id"] = np.arange(len(made["loads"]))
    return {**empty, **made}


def loaded(tables: Tables) -> int:
    return int((tables["loads"]["action"] == "load").sum())


def spent(tables: Tables) -> pd.Series:
    loads = tables["loads"]
    return loads.groupby("token_id")["duration_ns"].sum().astype(float)


STEPS = st.lists(
    st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True).map(tuple), min_size=2, max_size=2),
    min_size=3,
    max_size=12,
)


@settings(max_examples=drawn(15), deadline=None)
@given(STEPS, st.integers(2, 5))
def test_the_loads_a_cache_would_avoid_are_those_the_runtimes_cache_of_that_size_does_not_make(trace, held):
    small = ran(trace, held)
    rows = expert_loads.step_loads(small, spent(small))
    better = expert_loads.larger_cache(small, rows)
    again = loaded(small) - len({(layer, e) for step in trace for layer, experts in enumerate(step) for e in experts})
    assert int(rows["again"].sum()) == again
    if better is None:
        assert again == 0
        return
    large = ran(trace, int(better.budget_bytes) // SIZE)
    assert better.loads == loaded(small) - loaded(large)
    assert better.won_ns == pytest.approx(better.loads * LOAD) and better.won_ns >= expert_loads.ENOUGH * again * LOAD
    assert better.budget_bytes > held * SIZE


def test_a_cache_wins_nothing_of_first_loads_nor_of_compiling():
    tables = ran([[(0, 1)], [(2, 3)], [(4, 5)]], 2)
    load = tables["loads"].query("action == 'load'").iloc[0]
    tables["qnn_calls"] = frame(
        "qnn_calls", call=["graphFinalize"], tid=[load["tid"]], begin_ns=[load["begin_ns"] + 5], end_ns=[load["begin_ns"] + 35]
    )
    found = {finding.rule: finding for finding in findings(tables)}
    assert "expert loads" not in found
    assert found["compiling"].saving_ms == pytest.approx(30e-6)
    assert found["first loads"].saving_ms == pytest.approx((6 * LOAD - 30) * 1e-6)


def test_a_cache_that_thrashes_is_told_the_size_that_keeps_everything_and_what_that_wins():
    tables = ran([[(0, 1)], [(2, 3)]] * 10, 3)
    found = {finding.rule: finding for finding in findings(tables)}["expert loads"]
    evidence = found.evidence
    assert evidence["budget_bytes"] == 4 * SIZE and evidence["first"] == 4
    assert found.saving_ms == pytest.approx(evidence["loads"] * LOAD * 1e-6)
    assert "would avoid" in found.text


@pytest.mark.parametrize(("beside", "tid"), [(False, 1), (True, 7)])
def test_a_load_costs_its_step_what_the_run_took_longer_than_those_that_found_their_expert(beside, tid):
    tables = ran([[(0, 1)], [(0, 2)], [(0, 3)], [(0, 1)]], 2, around=30)
    tables["loads"]["tid"], tables["experts"]["n_tokens"], tables["experts"]["tid"] = tid, 1, 1
    charged = spent(tables) * (0 if beside else 1)  # a load on another thread, for which the step's own waits, is not charged
    rows = expert_loads.step_loads(tables, charged)
    assert (tables["experts"]["cache"] == "hit").any() and rows["cost_ns"].to_numpy() == pytest.approx(LOAD + 30)
    tables["experts"]["cache"] = "miss"  # how long a run takes that finds its expert is not known
    assert expert_loads.step_loads(tables, charged)["cost_ns"].to_numpy() == pytest.approx(0 if beside else LOAD)
