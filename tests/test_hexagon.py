"""llama.cpp's Hexagon backend: what goes through its queues is recorded as the stand-in for its processor logged it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.questions import accelerators, step_time
from analyzer.tables import store
from analyzer.tables.hexagon_nodes import FUSIONS, GivenGraph, Node, match_nodes
from moescope.__main__ import main
from tests.conftest import rest_long, trace
from tests.test_step_time import by_step
from tracer.engines import all_engines
from workloads.gguf_model import SHAPES, write_model
from workloads.hexagon import backend
from workloads.llama_libraries import ggml_source, library_folder

STEPS, LAYERS, OPERATORS_A_LAYER = 4, 3, 6
Tables = dict[str, pd.DataFrame]


def traced(folder: Path, *command: object, **env: str) -> Tables:
    """The tables of a program whose processor is the stand-in; its output is in output.txt, the stand-in's log in log.txt."""
    options = ("--no-views", "--levels", "token,graph,operator,sched", "-o", str(folder / "run"))
    shell = f'"$@" > {folder / "output.txt"} 2>&1'
    done = trace(
        "run", *options, "--", "sh", "-c", shell, "sh", *map(str, command), env={"STANDIN_LOG": str(folder / "log.txt"), **env}
    )
    assert done.returncode == 0, done.stderr
    return store.load_tables(folder / "run")


def logged(folder: Path, what: str) -> list[list[int]]:
    """Lines of the stand-in's log that begin with `what`, as numbers."""
    lines = (line.split() for line in (folder / "log.txt").read_text().splitlines())
    return [[int(word, 0) for word in words[1:]] for words in lines if words[0] == what]


def rows(table: pd.DataFrame, *columns: str) -> list[list[object]]:
    return table[list(columns)].to_numpy(object).tolist()


@pytest.mark.needs("probes")
@pytest.mark.parametrize("layout", rest_long([1, 2, 3, 4], 1))
@pytest.mark.parametrize("most_ops", [1280, 5])  # of a batch: a graph's operators fit, or go on in the next ones
def test_every_operator_of_each_message_layout_is_joined_to_its_nodes(tmp_path: Path, layout: int, most_ops: int) -> None:
    tables = traced(tmp_path, backend.build_fake_backend(tmp_path, layout), STEPS, LAYERS, most_ops, STANDIN_OP_US="3")
    batches, operators = tables["npu_batches"], tables["npu_operators"]
    sent = [line.split() for line in (tmp_path / "output.txt").read_text().splitlines()]
    assert len(sent) == STEPS * LAYERS * OPERATORS_A_LAYER
    told = rows(operators, "token_id", "position", "opcode", "type", "name")
    assert [list(map(str, row)) for row in told] == sent
    assert set(operators["n_nodes"]) == {1, 2, 3} and set(operators["layer"]) == set(range(LAYERS))
    seq = batches["seq"].to_numpy()[operators["batch_id"]]
    measured = np.column_stack((seq, operators[["position", "opcode", "us", "cycles"]]))
    assert measured.tolist() == [[*row[:3], *row[4:]] for row in logged(tmp_path, "op")]
    assert rows(batches, "seq", "n_ops") == [row[:2] for row in logged(tmp_path, "batch")]
    assert set(batches["layout"]) == {layout} and set(batches["status"]) == {1} and batches["complete"].all()
    assert tables["npu_calls"]["function"].tolist() == ["fastrpc_mmap", "remote_handle64_invoke"]


@pytest.mark.needs("probes")
def test_of_an_unknown_message_layout_the_waits_are_known_and_the_npus_own_time_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = traced(tmp_path, backend.build_fake_backend(tmp_path, 9), STEPS, LAYERS, STANDIN_OP_US="1000")
    batches, log = tables["npu_batches"], np.array(logged(tmp_path, "batch"))
    assert rows(batches, "seq", "n_ops", "layout", "status") == [[row[0], 0, 0, -1] for row in log.tolist()]
    taken, _, _, answered = log[:, 2:].T
    assert batches["complete"].all() and tables["npu_operators"].empty and batches["npu_us"].isna().all()
    assert (batches["begin_ns"].to_numpy() <= taken).all() and (batches["end_ns"].to_numpy() >= answered).all()
    assert (batches["wait_ns"] - (answered - taken)).abs().median() < 20e6  # a neighbour may hold the reader after some answers
    assert main(["summary", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["npu_queues"]["unread"] == STEPS and told["npu_queues"]["npu_ms"] is None
    assert told["accelerator"]["unprofiled"] == told["accelerator"]["submissions"] == STEPS
    causes = told["time"]["run"]["cause_ms"]
    assert causes["accelerator"] > 0.5 * told["time"]["run"]["ms"] and "transport" not in causes


def layout_of_header(header: Path, folder: Path) -> dict[str, int]:
    """The message layout that a release of llama.cpp declares, in the words of hexagon.toml."""
    declared = {kind: re.search(rf"struct htp_opbatch_{kind} {{(.*?)}};", header.read_text(), re.S) for kind in ("req", "rsp")}
    request, response = (found[1] if found else "" for found in declared.values())
    number = "seq" if re.search(r"\bseq;", request) else "id"
    asked = {
        "id_bytes": f"sizeof(((struct htp_opbatch_req *)0)->{number})",
        "tensor_bytes": "sizeof(struct htp_tensor)",
        "data_bytes": "sizeof(((struct htp_tensor *)0)->data)",
        "buffer_at": "offsetof(struct htp_tensor, bi)",
        "ne_at": "offsetof(struct htp_tensor, ne)",
        "op_bytes": "sizeof(struct htp_op_desc)",
        "dst_at": "offsetof(struct htp_op_desc, dst)",
        "status_at": "offsetof(struct htp_opbatch_rsp, status)",
        "usecs_at": "offsetof(struct htp_opbatch_rsp, usecs)" if re.search(r"\busecs;", response) else "0",
        "request": "sizeof(struct htp_opbatch_req)",
        "buffer": "sizeof(struct htp_buf_desc)",
        "profile": "sizeof(struct htp_prof_desc)",
        "counts": "offsetof(struct htp_opbatch_rsp, n_bufs) - offsetof(struct htp_opbatch_rsp, status)",
    }
    prints = "".join(f'printf("%zu ", (size_t)({what}));' for what in asked.values())
    (folder / "ask.c").write_text(
        f'#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n#include "{header}"\nint main(void) {{ {prints} }}'
    )
    subprocess.run(["cc", "-w", str(folder / "ask.c"), "-o", str(folder / "ask")], check=True)
    answer = subprocess.run([str(folder / "ask")], capture_output=True, text=True, check=True).stdout
    return dict(zip(asked, map(int, answer.split()), strict=True))


@pytest.mark.long
@pytest.mark.needs("wheels")
@pytest.mark.parametrize("release", ["==0.3.28", "==0.3.31", "==0.3.32", "==0.3.35", "==0.3.36", ""])
def test_the_layouts_are_those_that_llama_cpp_declares(tmp_path: Path, release: str) -> None:
    header = next(ggml_source(tmp_path, f"llama-cpp-python{release}").glob("ggml-hexagon/htp/htp-ops.h"))
    layout = layout_of_header(header, tmp_path)
    fixed = {"request": 24, "buffer": 24, "profile": 48, "counts": 4}
    assert {name: layout.pop(name) for name in fixed} == fixed
    known = all_engines()["hexagon"].settings["hexagon_layouts"]
    assert layout in [{name: value for name, value in row.items() if name != "number"} for row in known]


@pytest.mark.needs("probes")
def test_waits_that_were_planted_are_in_their_columns(tmp_path: Path) -> None:
    queued, woken = 30_000, 20_000
    env = {"STANDIN_QUEUE_US": str(queued), "STANDIN_WAKE_US": str(woken), "STANDIN_OP_US": "100"}
    batches = traced(tmp_path, backend.build_fake_backend(tmp_path), STEPS, LAYERS, **env)["npu_batches"]
    log = np.array(logged(tmp_path, "batch"))
    taken, begun, ended, answered = log[:, 2:].T
    assert (batches["begin_ns"].to_numpy() <= taken).all() and (batches["end_ns"].to_numpy() >= answered).all()
    assert np.allclose(batches["npu_us"] * 1e3, ended - begun, atol=20_000, rtol=0.05)
    assert (batches["wait_ns"] - (answered - taken)).abs().median() < 20e6  # a neighbour may hold the reader after some answers
    assert (batches["in_flight"] == 1).all()


def fallback_by_step(tables: Tables) -> pd.Series:
    """ns of each step computing operators that fell back to the CPU."""
    left = tables["operators"].loc[accelerators.fallen_back(tables), "op_id"]
    rows = step_time.step_time(tables)
    spent = rows[rows["op_id"].isin(left) & (rows["cause"] == "computing")].groupby("token_id")["duration_ns"].sum()
    return spent.reindex(tables["tokens"]["token_id"], fill_value=0)


def may_be_urgent() -> bool:
    """Whether threads may run before all ordinary ones here."""
    ordinary = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, *ordinary)
    return True


@pytest.mark.needs("probes")
@pytest.mark.skipif(not may_be_urgent(), reason="no thread may have a real-time priority here")
@pytest.mark.parametrize("layout", [1, 3])  # the first tells of operators only how long they took
def test_causes_planted_in_front_of_behind_and_between_batches_are_in_their_rows(tmp_path: Path, layout: int) -> None:
    waits = {"STANDIN_QUEUE_US": "5000", "STANDIN_WAKE_US": "3000", "STANDIN_HOG_US": "4000", "STANDIN_OP_US": "200"}
    tables = traced(tmp_path, backend.build_fake_backend(tmp_path, layout), STEPS, LAYERS, 1280, 3000, **waits)
    lines = [line.split() for line in (tmp_path / "output.txt").read_text().splitlines()]
    on_cpu = np.array([[int(word) for word in words[1:]] for words in lines if words[0] == "cpu"])
    sent = [words for words in lines if words[0] != "cpu"]
    named = rows(tables["npu_operators"], "token_id", "position", "opcode", "type", "name")
    assert [list(map(str, row)) for row in named] == sent and len(on_cpu) == STEPS * LAYERS
    step = tables["npu_batches"]["token_id"].to_numpy()
    (_, begun, ended, answered), (asked, returned) = (
        np.array(logged(tmp_path, what))[:, first:].T for what, first in (("batch", 2), ("read", 1))
    )
    planted = {
        "accelerator": (step, ended - begun),
        "transport": (step, answered - asked - (ended - begun)),  # nobody tells a queue in front from an answer that comes late
        "completion": (step, returned - answered),
        "fallback": on_cpu.T,
    }
    found = by_step(tables)
    assert (found["residual"] < 0.01 * found.sum(axis=1)).all()
    found["fallback"] = fallback_by_step(tables)
    for cause, (of, spent) in planted.items():
        truth = np.bincount(of, spent, STEPS)
        off = np.abs(found[cause].to_numpy() - truth)
        assert (truth > 1e6).all()
        assert np.sum(off > np.maximum(0.05 * truth, 20_000)) <= 1, (cause, off, truth)  # a neighbour may displace one step


PROFILED = re.compile(r"profile-op ([^|]+)\|([^|]*)\|.*usec (\d+) cycles (\d+) start (\d+)")
GGML = {"SWIGLU": "GLU", "SILU": "UNARY"}
"""The backend's log names what an operator does, ggml's graph the kind of operator."""


@pytest.fixture(scope="module")
def real_backend() -> Path:
    """libggml-hexagon.so, with the stand-in beside it."""
    if not shutil.which("npm"):
        pytest.skip("npm, which brings llama.cpp's libraries, is not installed")
    try:
        path = backend.real_backend()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"llama.cpp's source cannot be fetched or built here: {error}")
    backend.stand_in(path.parent)
    return path


def of_the_real_backend(folder: Path, library: Path, **env: str) -> Tables:
    """The tables of llama.cpp on its own backend, whose operators are those of the profile in its log."""
    write_model(folder / "model.gguf", SHAPES["tiny-moe"], quantized=True)
    steps = (sys.executable, "-m", "workloads.hexagon.steps", library_folder(), library, folder / "model.gguf", 5, 6)
    env |= {"GGML_HEXAGON_PROFILE": "1", "GGML_HEXAGON_VMEM": "3000", "LD_LIBRARY_PATH": str(library.parent)}
    tables = traced(folder, *steps, **env)
    operators, log = tables["npu_operators"], (folder / "output.txt").read_text(errors="replace")
    profile = [match.groups() for match in PROFILED.finditer(log) if match[1] != "OPBATCH"]
    assert len(operators) == len(profile)
    for operator, (name, tensors, *measured) in zip(operators.itertuples(), profile, strict=True):
        repeated = [name.removesuffix("_NX")] * operator.n_nodes if name.endswith("_NX") else name.split("+")
        assert operator.type == "+".join(GGML.get(each, each) for each in repeated)
        assert operator.name == tensors.split(" -> ")[-1]
        assert [operator.us, operator.cycles, operator.start_cycles] == list(map(int, measured))
    assert operators["token_id"].max() == 6 and (operators["n_nodes"] > 0).all()
    return tables


@pytest.mark.long
@pytest.mark.needs("probes")
def test_the_real_backend_agrees_with_its_own_profile(tmp_path: Path, real_backend: Path) -> None:
    operators = of_the_real_backend(tmp_path, real_backend)["npu_operators"]
    assert len(operators) == 931
    assert main(["import", str(tmp_path / "output.txt"), "--out", str(tmp_path / "imported")]) == 0
    told = store.load_tables(tmp_path / "imported")["npu_operators"]
    columns = ["batch_id", "position", "type", "name", "layer", "n_nodes", "us", "start_cycles", "cycles"]
    pd.testing.assert_frame_equal(told[columns], operators[columns])
    assert (told["shape"] == operators["shape"].where(told["shape"] != "", "")).all() and (told["shape"] == "").sum() == 84


@pytest.mark.needs("probes")
@pytest.mark.long
def test_operators_that_the_real_backend_leaves_to_the_cpu_are_fallback_and_the_others_keep_their_nodes(
    tmp_path: Path, real_backend: Path
) -> None:
    tables = of_the_real_backend(tmp_path, real_backend, GGML_HEXAGON_OPFILTER="SOFT_MAX|ROPE")
    left = tables["operators"][accelerators.fallen_back(tables)]
    assert len(tables["npu_operators"]) == 847 and set(left["type"]) == {"SOFT_MAX", "ROPE"} and len(left) == 84
    found = by_step(tables)
    assert (fallback_by_step(tables) > 0).all() and (found["residual"] < 0.01 * found.sum(axis=1)).all()


SINGLE = [("ADD",), ("MUL",), ("MUL_MAT",), ("ROPE",), ("RMS_NORM",), ("UNARY",)]


@given(st.data())
def test_nodes_that_were_fused_are_found_again_wherever_addresses_tell_them_apart(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.sampled_from([*SINGLE, *FUSIONS]), min_size=1, max_size=30))
    at = iter(range(1, 1000))
    cuts = [
        tuple(Node(kind, f"n{number}", number, 64 * number) for kind, number in zip(group, at, strict=False)) for group in groups
    ]
    number = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    opcodes = np.array([number[group] for group in groups])
    made = np.array([data.draw(st.sampled_from([cut[0], cut[-1]])).data for cut in cuts])
    nodes = tuple(node for cut in cuts for node in cut)
    times = np.arange(len(cuts)) + 10
    joined = match_nodes(times, opcodes, made, np.array([0]), [GivenGraph(5, nodes)])
    assert [node for group in joined for node in group] == list(nodes)  # each once, in order
    for group, cut, address in zip(joined, cuts, made.tolist(), strict=True):
        assert any(node.data == address for node in group) and set(group) & set(cut)


def test_what_one_graph_leaves_open_another_tells_and_none_takes_what_was_sent_for_the_next() -> None:
    kinds = {7: ("MUL_MAT", "MUL_MAT"), 1: ("ADD",), 4: ("MUL_MAT",)}
    clear = tuple(Node(kind, f"c{i}", i, 64 * i) for i, kind in enumerate(("MUL_MAT", "MUL_MAT", "ADD", "MUL_MAT"), 1))
    open_ = tuple(Node(kind, f"o{i}", 10 + i, 640) for i, kind in enumerate(("MUL_MAT", "MUL_MAT", "ADD")))  # or 1 and 2
    opcodes, made = np.array([7, 1, 7, 1, 4]), np.array([640, 640, 128, 192, 256])
    joined = match_nodes(np.arange(5) + 10, opcodes, made, np.array([0, 2]), [GivenGraph(5, open_), GivenGraph(11, clear)])
    assert [tuple(node.type for node in group) for group in joined] == [kinds[opcode] for opcode in opcodes.tolist()]
    add = (Node("MUL_MAT", "m", 1, 64), Node("ADD", "a", 2, 64))
    joined = match_nodes(
        np.arange(2) + 10, np.array([8, 1]), np.array([64, 64]), np.array([0, 1]), [GivenGraph(5, add), GivenGraph(11, add[1:])]
    )
    assert joined == [add, add[1:]]  # not MUL_MAT, and the next graph's ADD


def test_operators_of_another_graph_stay_without_nodes() -> None:
    nodes = tuple(Node("ADD", f"n{i}", i, 64 * i) for i in range(1, 5))
    times, made = np.arange(8), np.array([7, 7, 7, 7, 64, 128, 192, 256])
    joined = match_nodes(times, np.ones(8, int), made, np.array([0, 4]), [GivenGraph(0, nodes)])
    assert joined == [()] * 4 + [(node,) for node in nodes]
