"""A C program that poses as our runtime knows what it did; the tables say the same: counts, times, faults, sleeps."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyzer.tables import store as tables_module
from tests.conftest import trace
from tests.truth import CLOCK_NS, DISTURBED_NS, always_running, in_log_order, read_log, skip_where_stolen, time_asleep
from tracer.recording.format import Recording
from workloads.compiling import WITH_SITES, compile_c
from workloads.host_time import HostTime

pytestmark = [
    pytest.mark.needs("probes"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
STEPS, THREADS, LAYERS, EXPERTS, TOP_K, SLEEP_NS = 100, 2, 2, 8, 2, 3_000_000
PRECISION_NS = 2_000
TABLE_OF = {"token": "tokens", "graph": "graphs", "op": "operators", "expert": "experts", "load": "loads"}


@dataclass
class Traced:
    """A traced run beside the program's own log."""

    log: Path
    recording: Recording
    tables: dict[str, pd.DataFrame]
    stolen: float  # of the CPUs' time, by the host

    def both(self, what: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """(the log's rows, the table's rows) in the same order."""
        table = self.tables[TABLE_OF[what]]
        if what == "load":
            table = table[table["action"] == "load"]
        return read_log(self.log, what), in_log_order(table)

    def cost(self, key: str) -> float:
        """Calibrated ns of the dearest of the engine's probes."""
        return max(row[key] for row in self.recording.manifest["probes"] if row["engine"] == "moescope")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("truth")
    program = compile_c(folder / "truth_runtime", "truth_runtime.c", flags=WITH_SITES)
    host, command = HostTime(), [str(program), str(folder / "log.csv"), str(STEPS), str(THREADS), str(folder / "cold")]
    done = trace("run", "--no-views", "-o", str(folder / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    stolen, recording = host.share(), Recording(folder / "run")
    return Traced(folder / "log.csv", recording, tables_module.build_tables(recording), stolen)


@pytest.mark.alone  # while it is recorded; the tests behind it read
def test_every_table_has_as_many_rows_as_the_program_did_things(traced: Traced) -> None:
    assert traced.recording.manifest["lost"] == {}
    steps, runs = STEPS * THREADS, STEPS * THREADS * LAYERS
    moved = 2 * runs  # a load and an eviction
    expected = {
        "tokens": steps,
        "graphs": runs,
        "operators": runs,
        "op_threads": runs,
        "experts": runs * TOP_K,
        "loads": moved,
        "routes": runs * TOP_K,
    }
    assert {name: len(traced.tables[name]) for name in expected} == expected
    assert len(traced.tables["unpaired"]) == 0
    assert all(traced.tables[name]["complete"].all() for name in ("tokens", "graphs", "operators", "experts", "loads"))


@pytest.mark.parametrize("what", TABLE_OF)
def test_every_begin_and_end_lies_between_the_programs_own_readings(traced: Traced, what: str) -> None:
    log, table = traced.both(what)
    assert log["tid"].tolist() == table["tid"].tolist()
    assert (table["begin_ns"] >= log["before_begin"] - CLOCK_NS).all()
    assert (table["begin_ns"] <= log["after_begin"] + CLOCK_NS).all()
    assert (table["end_ns"] >= log["before_end"] - CLOCK_NS).all()
    assert (table["end_ns"] <= log["after_end"] + CLOCK_NS).all()


def test_a_span_ends_where_its_program_says_and_else_when_the_probe_was_passed(traced: Traced) -> None:
    for what in ("token", "op"):
        log, table = traced.both(what)
        assert table["end_ns"].tolist() == log["before_end"].tolist()
    log, table = traced.both("graph")  # says 0, which is no time of this clock
    assert (table["end_ns"] > log["before_end"]).all()


@pytest.mark.long
@pytest.mark.parametrize("what", TABLE_OF)
def test_times_are_off_by_no_more_than_the_probes_cost(traced: Traced, what: str) -> None:
    skip_where_stolen(traced.stolen)
    log, table = traced.both(what)
    kept = always_running(log["tid"], log["before_begin"], log["after_end"], traced.tables["thread_states"])
    if kept.mean() < 0.1:
        pytest.skip("the machine is too busy to measure on")
    true = log["before_end"] - log["after_begin"]
    error = (table["duration_ns"] - true)[kept].abs()
    late = (table["begin_ns"] - log["before_begin"])[kept]
    cold = traced.cost("ns_per_hit_cold")
    assert late.median() < PRECISION_NS + cold
    assert error.median() < PRECISION_NS + cold
    assert error.quantile(0.75) < PRECISION_NS + cold + DISTURBED_NS


@pytest.mark.parametrize("what", ["token", "op", "expert"])
def test_page_faults_are_those_that_the_kernel_counted_for_the_thread(traced: Traced, what: str) -> None:
    log, table = traced.both(what)
    # The kernel takes a fault of its own now and then (a page it aged or moved) between the program's reading and the probe.
    more = table["min_flt"].to_numpy() - log["min_flt"].to_numpy()
    assert more.min() == 0 and (more > 0).mean() < 0.02
    assert table["maj_flt"].tolist() == log["maj_flt"].tolist()
    assert log["min_flt"].nunique() >= 3


def test_major_faults_happened_in_the_steps_that_read_the_disk(traced: Traced) -> None:
    log, table = traced.both("token")
    if not log["maj_flt"].any():
        pytest.skip("this file system keeps its pages in memory")
    read = table["seq"] % 10 == 9
    assert (table["maj_flt"][~read] == 0).all() and (table["maj_flt"][read] == 1).all()


def test_what_the_program_says_of_its_work_is_in_the_tables(traced: Traced) -> None:
    tokens, experts = in_log_order(traced.tables["tokens"]), in_log_order(traced.tables["experts"])
    log = read_log(traced.log, "token")
    assert tokens["seq"].tolist() == log["id"].tolist() and tokens["result"].tolist() == log["detail"].tolist()
    runs = read_log(traced.log, "expert")
    assert (experts["layer"] * 100 + experts["expert"]).tolist() == runs["detail"].tolist()
    assert experts["cache"].tolist() == [("hit", "miss", "prefetched")[seq % 3] for seq in runs["id"]]
    assert tokens.set_index("token_id").loc[experts["token_id"], "seq"].tolist() == runs["id"].tolist()
    operators = traced.tables["operators"].set_index("op_id").loc[experts["op_id"]]
    assert operators["layer"].tolist() == experts["layer"].tolist() and (operators["type"] == "expert").all()


def test_routes_follow_the_programs_rule(traced: Traced) -> None:
    routes = traced.tables["routes"]
    seq = traced.tables["tokens"].set_index("token_id").loc[routes["token_id"], "seq"].to_numpy()
    assert (routes["expert"].to_numpy() == (seq + 3 * routes["layer"] + routes["rank"]) % EXPERTS).all()
    assert (routes["weight"].to_numpy() == np.where(routes["rank"] == 0, 0.75, 0.25)).all()


@pytest.mark.long
def test_a_sleeping_thread_is_seen_asleep_for_as_long_as_it_slept(traced: Traced) -> None:
    skip_where_stolen(traced.stolen)
    states, sleeps = traced.tables["thread_states"], read_log(traced.log, "sleep")
    assert len(sleeps) == THREADS * STEPS // 10
    for row in sleeps.itertuples():
        asleep = time_asleep(states, row.tid, row.before_begin, row.after_end)
        assert SLEEP_NS - 100_000 < asleep <= row.after_end - row.before_begin


def test_states_tile_the_time_of_every_thread(traced: Traced) -> None:
    states = traced.tables["thread_states"]
    for tid in read_log(traced.log, "token")["tid"].unique():
        mine = states[states["tid"] == tid].sort_values("begin_ns")
        assert (mine["end_ns"].iloc[:-1].to_numpy() == mine["begin_ns"].iloc[1:].to_numpy()).all()
