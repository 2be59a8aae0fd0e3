"""A real llama.cpp, as it comes in a Python binding, is traced without knowing of it."""

import importlib.util
import json
import platform
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import networkx
import pandas as pd
import pytest
from elftools.elf.elffile import ELFFile

from analyzer.questions import profdag, step_time
from analyzer.tables import store as tables_module
from tests.conftest import ROOT, last_json, trace
from tests.test_step_time import by_step
from tracer.probes.elf import read_binary
from tracer.recording.format import Recording
from workloads.gguf_model import EXPERTS, LAYERS, TOP_K, write_moe
from workloads.programs import llama_steps

pytestmark = [
    pytest.mark.needs("probes"),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]
PROMPT, NEW, PAUSE_S = 20, 12, 0.1
SH_OFFSET = 24  # bytes into a section's header


def learnt_halfway(folder: Path) -> dict[str, str]:
    """The environment of a run that knows no build (stripping keeps its id) and learns the graph loop in its first half."""
    return {"MOESCOPE_CACHE": str(folder), "LLAMA_LEARNT": str(folder / "loops")}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("llama")
    write_moe(folder / "model.gguf")
    program = str(ROOT / "workloads" / "programs" / "llama_steps.py")
    command = [sys.executable, program, str(folder / "model.gguf"), str(PROMPT), str(NEW), str(PAUSE_S)]
    done = trace("run", "--no-views", "-o", str(folder / "run"), "--", *command, env=learnt_halfway(folder))
    assert done.returncode == 0, done.stderr
    assert len(last_json(done)) == NEW + 1
    return Recording(folder / "run")


def without_names(library: Path, folder: Path) -> Path:
    """A copy of a library that names nothing of llama.cpp to whoever reads the file; the loader still finds what it needs.

    The section table points to other strings than the dynamic segment does.
    """
    copy = folder / library.name
    shutil.copy(library, copy)
    subprocess.run(["strip", str(copy)], check=True)
    with copy.open("rb") as file:
        elf = ELFFile(file)
        number, names = elf.get_section_index(".dynstr"), elf.get_section_by_name(".dynstr").data()
        place = elf["e_shoff"] + number * elf["e_shentsize"] + SH_OFFSET
    content = bytearray(copy.read_bytes())
    struct.pack_into("<Q", content, place, len(content))
    copy.write_bytes(content + re.sub(rb"\0(ggml|llama)_", rb"\0\1~", names))
    return copy


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The same run on a library without names."""
    folder = tmp_path_factory.mktemp("stripped")
    write_moe(folder / "model.gguf")
    package = importlib.util.find_spec("xllamacpp")
    assert package is not None and package.submodule_search_locations
    library = next(Path(package.submodule_search_locations[0]).glob("*.so"))
    binary, called = read_binary(str(library)), re.findall(r"lib\.(llama_\w+)", Path(llama_steps.__file__).read_text())
    (folder / "offsets.json").write_text(json.dumps({name: binary.symbol(name) for name in called}))
    program = str(ROOT / "workloads" / "programs" / "llama_stripped.py")
    command = [sys.executable, program, str(without_names(library, folder)), str(folder / "offsets.json")]
    command += [str(folder / "model.gguf"), str(PROMPT), str(NEW), str(PAUSE_S)]
    environment = {"PYTHONPATH": str(ROOT)} | learnt_halfway(folder)
    done = trace("run", "--no-views", "-o", str(folder / "run"), "--", *command, env=environment)
    assert done.returncode == 0, done.stderr
    return Recording(folder / "run")


@pytest.fixture(scope="module")
def tables(recording: Recording) -> dict[str, pd.DataFrame]:
    return tables_module.build_tables(recording)


def test_tokens_and_graphs_are_the_programs(tables: dict[str, pd.DataFrame]) -> None:
    tokens = tables["tokens"]
    assert tokens["n_tokens"].tolist() == [PROMPT] + [1] * NEW
    assert tokens["phase"].tolist() == ["prefill"] + ["decode"] * NEW
    assert (tokens["result"] == 0).all() and tokens["complete"].all()
    assert tables["graphs"]["token_id"].tolist() == list(range(NEW + 1))
    assert set(tables["graphs"]["backend"]) == {"cpu"}


def test_every_step_runs_the_same_operators_on_both_threads(recording: Recording, tables: dict[str, pd.DataFrame]) -> None:
    operators = tables["operators"]
    per_step = operators.groupby("token_id")["type"].value_counts().unstack(fill_value=0)
    assert (per_step["MUL_MAT_ID"] == 3 * LAYERS).all()
    assert per_step.iloc[1:].nunique().eq(1).all()
    assert (operators["n_threads"] == 2).mean() > 0.95
    assert "MUL_MAT" in recording.manifest["engines"]["llamacpp"]["operators"]


def test_operator_times_lie_within_their_step_and_close(tables: dict[str, pd.DataFrame]) -> None:
    operators, tokens = tables["operators"], tables["tokens"]
    step = tokens.set_index("token_id").loc[operators["token_id"]]
    assert (operators["begin_ns"].to_numpy() >= step["begin_ns"].to_numpy()).all()
    assert (operators["end_ns"].to_numpy() <= step["end_ns"].to_numpy()).all()
    shares = tables["op_threads"].merge(operators[["op_id", "token_id"]], on="op_id")
    shares["ns"] = shares["end_ns"] - shares["begin_ns"]
    whole = tokens.set_index("token_id")["duration_ns"]
    spent = shares.groupby(["tid", "token_id"])["ns"].sum().unstack("tid").div(whole, axis=0)
    assert (spent <= 1).all(axis=None) and (spent.median() > 0.5).all()
    assert (operators["busy_ns"] + operators["wait_ns"] <= 2.001 * operators["duration_ns"]).all()


def test_every_moment_of_a_step_has_a_part_and_a_cause(tables: dict[str, pd.DataFrame]) -> None:
    rows = by_step(tables)
    assert (rows["residual"] < 0.02 * rows.sum(axis=1)).all()
    parts = step_time.per_step(tables, step_time.step_time(tables), "part")
    assert (parts[["embedding", "attention", "copy", "routing", "experts"]] > 0).all(axis=None)


def test_the_router_chooses_k_distinct_experts_for_every_token_and_layer(tables: dict[str, pd.DataFrame]) -> None:
    routes = tables["routes"]
    choices = routes.groupby(["token_id", "layer", "row"])["expert"].agg(["size", "nunique"])
    assert (choices["size"] == TOP_K).all() and (choices["nunique"] == TOP_K).all()
    assert routes["expert"].between(0, EXPERTS - 1).all()
    assert set(routes["layer"]) == set(range(LAYERS))
    prefill = routes[(routes["token_id"] == 0) & (routes["layer"] == 0)]
    assert prefill["row"].nunique() == PROMPT


def test_the_profdag_follows_the_layers(tables: dict[str, pd.DataFrame]) -> None:
    graph = profdag.build_profdag(tables, token_id=2)
    assert networkx.is_directed_acyclic_graph(graph)
    names = {data["name"] for _, data in graph.nodes(data=True)}
    assert {"ffn_moe_logits-0", "ffn_moe_gate-0", "result_output"} <= names
    assert any(data["role"] == "constant" and data["name"] == "blk.0.ffn_gate_inp.weight" for _, data in graph.nodes(data=True))


def test_probes_stand_on_instructions_that_the_kernel_emulates(recording: Recording) -> None:
    rows = [row for row in recording.manifest["probes"] if row["engine"] == "llamacpp"]
    assert {row["level"] for row in rows} == {"token", "graph", "operator"}
    learnt = [row for row in rows if "learnt" in row["why"]]
    standing = [row for row in rows if not row["retired_ns"] and row["program"] != "llama_decode_end"]  # it may throw
    # arm64's functions begin by changing the stack, which is stepped: there what every operator passes is what counts
    assert {row["cost"] for row in (learnt if platform.machine() == "aarch64" else standing)} <= {"emulated", "nop5"}
    assert learnt
    assert Path(rows[0]["library"]).name.startswith("xllamacpp")


def test_operators_come_to_cost_one_hit_each_once_the_graph_loop_is_learnt(recording: Recording) -> None:
    rows = {row["program"]: row for row in recording.manifest["probes"] if row["engine"] == "llamacpp"}
    assert {name for name, row in rows.items() if row["retired_ns"]} == {"ggml_op_begin", "ggml_fused_begin", "ggml_op_wait"}
    assert {name for name, row in rows.items() if "learnt" in row["why"]} == {"ggml_op_done", "ggml_graph_done"}
    assert rows["ggml_op_done"]["instruction"].startswith(("call", "bl"))


def test_fused_operators_are_told_in_every_step(tables: dict[str, pd.DataFrame]) -> None:
    fused = tables["operators"].query("type == 'RMS_NORM+MUL'")
    assert fused.groupby("token_id").size().tolist() == [2 * LAYERS + 1] * (NEW + 1)


def test_one_thread_alone_teaches_nothing_and_is_recorded_nevertheless(tmp_path: Path, tables: dict[str, pd.DataFrame]) -> None:
    """It enters no barrier, by which the graph loop is found: the probes that would learn from it stay."""
    write_moe(tmp_path / "model.gguf")
    program = str(ROOT / "workloads" / "programs" / "llama_steps.py")
    command = [sys.executable, program, str(tmp_path / "model.gguf"), str(PROMPT), str(NEW)]
    options = ("--no-views", "--max-overhead", "10%", "-o", str(tmp_path / "run"))
    done = trace("run", *options, "--", *command, env={"LLAMA_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    alone = tables_module.build_tables(Recording(tmp_path / "run"))["operators"]
    assert (alone["n_threads"] == 1).all() and (alone["wait_ns"] == 0).all()
    for step in range(NEW + 1):
        here, there = (rows[rows["token_id"] == step][["type", "name", "layer"]] for rows in (alone, tables["operators"]))
        assert here.to_numpy().tolist() == there.to_numpy().tolist()


def test_a_library_without_names_shows_the_same_operators_once_its_graph_loop_is_learnt(
    stripped: Recording, tables: dict[str, pd.DataFrame]
) -> None:
    rows = {row["program"]: row for row in stripped.manifest["probes"] if row["engine"] == "llamacpp"}
    assert rows.keys() >= {"llama_decode_begin", "ggml_cpu_graph_begin", "ggml_op_done", "ggml_graph_done"}
    assert "ggml_op_begin" not in rows and rows["ggml_op_wait"]["retired_ns"]
    nameless = tables_module.build_tables(stripped)
    assert nameless["tokens"]["n_tokens"].tolist() == tables["tokens"]["n_tokens"].tolist()
    for step in range((NEW + 1) // 2, NEW + 1):
        here, there = (t["operators"].query(f"token_id == {step}") for t in (nameless, tables))
        assert here[["type", "name", "layer"]].to_numpy().tolist() == there[["type", "name", "layer"]].to_numpy().tolist()
        here, there = (t["routes"].query(f"token_id == {step}") for t in (nameless, tables))
        assert here[["layer", "row", "expert"]].to_numpy().tolist() == there[["layer", "row", "expert"]].to_numpy().tolist()
        assert len(there)


@pytest.mark.parametrize(("levels", "table"), [("token,operator", "operators"), ("token,expert", "routes")])
def test_a_level_brings_the_one_that_names_what_it_records_and_says_so(tmp_path: Path, levels: str, table: str) -> None:
    write_moe(tmp_path / "model.gguf")
    program = str(ROOT / "workloads" / "programs" / "llama_steps.py")
    command = [sys.executable, program, str(tmp_path / "model.gguf"), str(PROMPT), str(NEW), str(PAUSE_S)]
    done = trace("run", "--no-views", "--levels", levels, "-o", str(tmp_path / "run"), "--", *command)
    assert any("graph" in line and levels.removeprefix("token,") in line for line in done.stderr.splitlines())
    tables = tables_module.load_tables(tmp_path / "run")
    assert len(tables["graphs"]) == len(tables["tokens"]) == NEW + 1
    if table == "operators":
        assert len(tables["operators"]) > 0 and (tables["operators"]["name"] != "").all()
    else:
        assert sorted(tables["routes"]["layer"].unique()) == list(range(LAYERS))
        assert tables["routes"].groupby(["token_id", "layer"]).size().sum() == len(tables["routes"]) >= LAYERS * (NEW + 1)
