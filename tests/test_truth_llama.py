"""A C program that poses as llama.cpp knows what it computed, waited and chose; the tables say the same."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyzer.tables import store as tables_module
from tests.conftest import ROOT, rest_long, trace
from tests.truth import DISTURBED_NS, always_running, in_log_order, read_log, skip_where_stolen
from tracer.recording.format import Recording
from workloads.compiling import compile_c
from workloads.host_time import HostTime

pytestmark = [
    pytest.mark.needs("probes"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
STEPS, PROMPT, THREADS, LAYERS, EXPERTS, TOP_K = 60, 300, 2, 2, 8, 2
PAUSE_US = 10_000  # the tracer learns from the first graphs and goes on in another way: both are to be true
LONG_NS, SHORT_NS = 200_000, 50_000
LAYER = [("RMS_NORM+MUL", "ffn_norm"), ("MUL_MAT", "ffn_moe_logits"), ("ARGSORT", "ffn_moe_argsort")]
LAYER += [("MUL_MAT_ID", f"ffn_moe_{part}") for part in ("gate", "up", "down")]
PRECISION_NS = 2_000


@dataclass
class Traced:
    """A traced run beside the program's own log."""

    log: Path
    recording: Recording
    tables: dict[str, pd.DataFrame]
    stolen: float  # of the CPUs' time, by the host

    def shares(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """(the log's, the table's) rows of operators on single threads, in the same order."""
        return read_log(self.log, "op"), in_log_order(self.tables["op_threads"])

    def undisturbed(self) -> pd.Series:
        """Which of these shares had both of their operator's threads on their CPUs from its begin to its end."""
        log, table = self.shares()
        begin = np.minimum(table["begin_ns"], log["before_begin"])
        kept = pd.Series(always_running(log["tid"], begin, log["after_end"], self.tables["thread_states"]))
        return kept.groupby([log["id"], log["detail"]]).transform("all")

    def cost(self, key: str) -> float:
        """Calibrated ns of the dearest of the operators' probes."""
        return max(row[key] for row in self.recording.manifest["probes"] if row["level"] == "operator")


def recorded(folder: Path, program: Path) -> Recording:
    """A traced run of a program, which writes its log."""
    command = [str(program), str(folder / "log.csv"), str(STEPS), str(PROMPT), str(PAUSE_US)]
    done = trace("run", "--no-views", "-o", str(folder / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    return Recording(folder / "run")


def library(folder: Path, *flags: str) -> Path:
    """The engine in a library of its own."""
    compile_c(folder / "libggml-truth.so", "truth_llama.c", flags=("-fPIC", "-shared", *flags))
    where = (f"-L{folder}", "-lggml-truth", f"-Wl,-rpath,{folder}")
    return compile_c(folder / "program", "truth_llama_main.c", flags=where)


def inside(folder: Path) -> Path:
    """The engine linked into the program."""
    return compile_c(folder / "program", "truth_llama.c", "truth_llama_main.c")


@pytest.fixture(scope="module", params=[library, inside], ids=["library", "inside"])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("truth")
    program, host = request.param(folder), HostTime()
    recording = recorded(folder, program)
    stolen = host.share()
    assert recording.manifest["lost"] == {}
    return Traced(folder / "log.csv", recording, tables_module.build_tables(recording), stolen)


@pytest.mark.alone  # while it is recorded; the tests behind it read
def test_steps_are_those_that_the_program_took(traced: Traced) -> None:
    tokens = traced.tables["tokens"]
    assert tokens["n_tokens"].tolist() == [PROMPT] + [1] * (STEPS - 1)
    assert tokens["position"].tolist() == [0, *range(PROMPT, PROMPT + STEPS - 1)]
    assert tokens["phase"].tolist() == ["prefill"] + ["decode"] * (STEPS - 1)
    log = read_log(traced.log, "token")
    assert (tokens["begin_ns"] >= log["before_begin"]).all() and (tokens["end_ns"] <= log["after_end"]).all()
    assert traced.tables["graphs"]["token_id"].tolist() == list(range(STEPS))


ONE_STEP = [("GET_ROWS", "embd", -1)]
ONE_STEP += [(kind, f"{name}-{layer}", layer) for layer in range(LAYERS) for kind, name in LAYER]
ONE_STEP += [("MUL_MAT", "result_output", -1)]


def in_order(operators: pd.DataFrame) -> list[tuple[str, str, int]]:
    return list(zip(operators["type"], operators["name"], operators["layer"], strict=True))


def test_every_step_has_the_programs_operators_in_its_order(traced: Traced) -> None:
    operators = traced.tables["operators"].sort_values(["token_id", "order"])
    assert in_order(operators) == ONE_STEP * STEPS
    assert (operators["n_threads"] == THREADS).all()
    first = operators[operators["token_id"] == 0]
    assert (first["n_tokens"] == PROMPT).all() and set(first["shape"].str.split("x").str[1]) == {str(PROMPT)}


@pytest.mark.long
def test_every_thread_began_and_waited_when_it_says(traced: Traced) -> None:
    log, table = traced.shares()
    assert log["tid"].tolist() == table["tid"].tolist()
    skip_where_stolen(traced.stolen)
    kept = traced.undisturbed()
    if kept.mean() < 0.1:
        pytest.skip("both threads hardly ever had a CPU at the same time: the machine is too busy to measure on")
    begin = (table["begin_ns"] - log["before_begin"])[kept].abs()
    wait = (table["wait_ns"] - log["before_end"])[kept].abs()
    busy = (table["wait_ns"] - table["begin_ns"] - (log["before_end"] - log["after_begin"]))[kept].abs()
    cold = traced.cost("ns_per_hit_cold")
    for error, hits in ((begin, 1), (wait, 1), (busy, 2)):
        assert error.median() < hits * (PRECISION_NS + cold)
        assert error.quantile(0.75) < hits * (PRECISION_NS + cold + DISTURBED_NS)


@pytest.mark.long
def test_the_thread_with_less_work_waits_for_the_other(traced: Traced) -> None:
    skip_where_stolen(traced.stolen)
    log, table = traced.shares()
    kept = traced.undisturbed()
    if kept.mean() < 0.1:
        pytest.skip("both threads hardly ever had a CPU at the same time: the machine is too busy to measure on")
    busy, wait = (table["wait_ns"] - table["begin_ns"])[kept], (table["end_ns"] - table["wait_ns"])[kept]
    long = (log["before_end"] - log["after_begin"] > (LONG_NS + SHORT_NS) / 2)[kept]
    assert abs(busy[long].median() - LONG_NS) < 4 * PRECISION_NS
    assert abs(busy[~long].median() - SHORT_NS) < 4 * PRECISION_NS
    assert abs(wait[~long].median() - (LONG_NS - SHORT_NS)) < 10 * PRECISION_NS
    assert wait[long].median() < 4 * PRECISION_NS


def test_page_faults_of_an_operator_are_those_of_its_threads(traced: Traced) -> None:
    operators = traced.tables["operators"].sort_values(["token_id", "order"])
    log = read_log(traced.log, "op").groupby(["id", "detail"])[["min_flt", "maj_flt"]].sum().reset_index()
    # A thread that only helps has no reading before its first or behind its last operator of a step.
    inner = operators["order"].between(1, operators["order"].max() - 1).to_numpy()
    # The kernel takes a fault of its own now and then (a page it aged or moved) between the program's reading and the probe.
    more = operators["min_flt"].to_numpy()[inner] - log["min_flt"].to_numpy()[inner]
    assert more.min() == 0 and (more > 0).mean() < 0.02
    assert operators["maj_flt"][inner].tolist() == log["maj_flt"].to_numpy()[inner].tolist()
    assert log["min_flt"].sum() > STEPS * 10
    tokens = read_log(traced.log, "token")
    more = traced.tables["tokens"]["min_flt"].to_numpy() - tokens["min_flt"].to_numpy()
    assert more.min() >= 0 and more.sum() < 0.02 * tokens["min_flt"].sum()


def test_every_choice_of_the_router_is_in_routes(traced: Traced) -> None:
    routes = traced.tables["routes"]
    rows = np.array([PROMPT] + [1] * (STEPS - 1))
    assert len(routes) == rows.sum() * LAYERS * TOP_K
    assert (routes["expert"] == (routes["token_id"] + routes["row"] + 3 * routes["layer"] + routes["rank"]) % EXPERTS).all()
    assert not routes.duplicated(["token_id", "layer", "row", "rank"]).any()


OF_2024 = [("-DGRADIENT", "-DONE_CALL"), ("-DGRADIENT", "-DCOUNTERS", "-DONE_CALL"), ("-DONE_CALL",)]


@pytest.mark.parametrize("flags", rest_long(OF_2024, OF_2024[1]), ids=["gradient", "gradient and counters", "one call"])
def test_operators_and_choices_of_older_builds_are_told_as_rightly(tmp_path: Path, flags: tuple[str, ...]) -> None:
    recording = recorded(tmp_path, compile_c(tmp_path / "program", "truth_llama.c", "truth_llama_main.c", flags=flags))
    tables = tables_module.build_tables(recording)
    operators, routes = tables["operators"].sort_values(["token_id", "order"]), tables["routes"]
    assert in_order(operators) == ONE_STEP * STEPS and (operators["n_threads"] == THREADS).all()
    assert len(routes) == (PROMPT + STEPS - 1) * LAYERS * TOP_K
    assert (routes["expert"] == (routes["token_id"] + routes["row"] + 3 * routes["layer"] + routes["rank"]) % EXPERTS).all()
    standing = {row["program"] for row in recording.manifest["probes"] if row["level"] == "operator" and not row["retired_ns"]}
    assert standing == {"ggml_op_done"} and recording.manifest["warnings"] == []


WRONG = {
    "STRANGE": "the tensors of its graphs have an unknown layout",
    "TWICE": "its graph loop differs from the learnt one: a node came twice, or does not belong to its graph",
}


@pytest.mark.parametrize("flag", rest_long(WRONG, "STRANGE"))
def test_what_fits_no_known_build_is_not_recorded_and_the_summary_says_so(tmp_path: Path, flag: str) -> None:
    program = compile_c(tmp_path / "program", "truth_llama.c", "truth_llama_main.c", flags=(f"-D{flag}",))
    recording = recorded(tmp_path, program)
    said = f"llamacpp: levels operator and expert are switched off: {WRONG[flag]}"
    assert recording.manifest["warnings"] == [said]
    tables = tables_module.build_tables(recording)
    assert len(tables["tokens"]) == len(tables["graphs"]) == STEPS
    assert len(tables["operators"]) == len(tables["routes"]) == len(tables["tensors"]) == 0
    assert not {row["program"] for row in recording.manifest["probes"] if row["level"] == "operator" and not row["retired_ns"]}


def test_a_graph_that_looks_tokens_up_is_a_step_where_no_function_that_takes_steps_runs(tmp_path: Path) -> None:
    tables = tables_module.build_tables(recorded(tmp_path, library(tmp_path, "-DNAMELESS")))
    tokens = tables["tokens"]
    assert tokens["n_tokens"].tolist() == [PROMPT] + [1] * (STEPS - 1) and tokens["complete"].all()
    assert tokens["phase"].tolist() == ["prefill"] + ["decode"] * (STEPS - 1)
    assert (tokens["context"] == -1).all() and tables["graphs"]["token_id"].tolist() == list(range(STEPS))
    assert tables["operators"].groupby("token_id").size().tolist() == [len(ONE_STEP)] * STEPS


RESTED, REST_S = 14, 0.1
GIVES_WAY_WITHIN_A_GRAPH = f"""
import sys, time
from tracer.__main__ import main
from tracer.planning.answers import Answers

answer, probe, learn, ends = Answers.answer, Answers._probe_loop, Answers._learn, [0, 0]

def note(self, message):
    if message.get("site", {{}}).get("last"):
        ends[:] = ends[1], message["site"]["ts"] / 1e9
    return answer(self, message)

def wait(seconds_behind_end):
    time.sleep((seconds_behind_end - (time.monotonic() - ends[1])) % (ends[1] - ends[0]))

Answers.answer = note
Answers._probe_loop = lambda *given: (wait({2.5 * REST_S}), probe(*given))[1]
Answers._learn = lambda self, what: (what == "LEARN_NOTHING" and wait({0.8 * REST_S}), learn(self, what))[1]
sys.exit(main())
"""
"""The tracer; the learnt probes come between a graph's two layers, and those that taught go in front of another's first."""


@pytest.mark.long
def test_no_choice_is_lost_where_learnt_probes_come_and_their_teachers_go_within_graphs(tmp_path: Path) -> None:
    flags = (f"-DREST_US={round(1e6 * REST_S)}",)
    program = compile_c(tmp_path / "program", "truth_llama.c", "truth_llama_main.c", flags=flags)
    words = ["run", "--no-views", "-o", str(tmp_path / "run"), "--", str(program), str(tmp_path / "log.csv")]
    command = [sys.executable, "-c", GIVES_WAY_WITHIN_A_GRAPH, *words, str(RESTED), "1", str(PAUSE_US)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=True)
    recording = Recording(tmp_path / "run")
    assert any(row["retired_ns"] for row in recording.manifest["probes"])
    routes = tables_module.build_tables(recording)["routes"]
    assert routes.groupby(["token_id", "layer"]).size().tolist() == [TOP_K] * LAYERS * RESTED
