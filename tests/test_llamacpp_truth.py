"""A traced llama.cpp's operators, shapes and experts are those that llama.cpp itself tells its evaluation callback."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analyzer.questions import profdag, structure
from analyzer.tables import store as tables_module
from tests.conftest import ROOT, trace
from tracer.recording.format import Recording
from workloads.gguf_model import DENSE, SMALL, Shape, write

pytestmark = [
    pytest.mark.needs("probes"),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]
PROGRAMS = ROOT / "workloads" / "programs"
NEW, PAUSE_S = 12, 0.1
RENAMES_MEMORY = {"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}
Operator = tuple[str, str, str]
Edge = tuple[tuple[str, str], tuple[str, str]]


class Both:
    """One model and prompt: what llama.cpp told of a run, and the tables of another, traced one."""

    def __init__(self, folder: Path, batches: list[int], shape: Shape, part: int = 512):
        write(folder / "model.gguf", shape, quantized=False)
        self.batches, self.part = [*batches, *[1] * NEW], part
        words = [str(folder / "model.gguf"), ",".join(map(str, batches)), str(NEW), str(PAUSE_S)]
        oracle, limits = [sys.executable, str(PROGRAMS / "llama_oracle.py"), *words], {"LLAMA_PART": str(part)}
        done = subprocess.run(oracle, capture_output=True, text=True, check=True, env={**os.environ, **limits})
        told = json.loads(done.stdout.splitlines()[-1])
        options = ["--no-views", "--levels", "token,graph,operator,expert", "-o", str(folder / "run")]
        done = trace("run", *options, "--", sys.executable, str(PROGRAMS / "llama_steps.py"), *words, env=limits)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == told["made"]
        recording = Recording(folder / "run")
        assert recording.manifest["lost"] == {}
        self.nodes: list[dict[str, Any]] = told["nodes"]
        self.tables = tables_module.build(recording)

    def computed(self, step: int) -> list[Operator]:
        """What was computed in a step, in llama.cpp's order: no views, nothing empty, nothing that is not asked for."""
        return [
            (node["op"], node["name"], "x".join(map(str, node["ne"])))
            for node in self.nodes
            if node["step"] == step and node["computed"] and all(node["ne"]) and node["op"] not in RENAMES_MEMORY
        ]

    def traced(self, step: int) -> list[Operator]:
        """The same from the table `operators`. What has no elements is passed by the threads, and computed by none."""
        rows = self.tables["operators"].query("token_id == @step").sort_values("order")
        rows = rows[rows["shape"].str.count("x") == 3]  # dims of 0 are not written
        return list(zip(rows["type"], rows["name"], rows["shape"], strict=True))

    def chosen(self) -> dict[tuple[int, int], list[list[int]]]:
        """(step, layer) → the experts of every token, from the routing tensors' contents."""
        found: dict[tuple[int, int], list[list[int]]] = {}
        for node in self.nodes:
            if node["name"].startswith("ffn_moe_gate-"):
                found.setdefault((node["step"], int(node["name"].split("-")[1])), []).extend(node["experts"])
        return found


RUNS = {
    "three layers": ([20], SMALL),
    "one layer, prompt in three graphs": ([1100], replace(SMALL, layers=1)),
    "graphs of at most 128 tokens": ([256, 1, 200], replace(SMALL, layers=1), 128),
    "batches of many sizes": ([20, 1, 7, 12, 1, 1, 5, 20, 7, 1, 1, 12, 3], replace(SMALL, layers=1)),
    "llama": ([4], DENSE["llama"]),
    "gemma2": ([4], DENSE["gemma2"]),
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tmp_path_factory.mktemp("truth"), *request.param)


def fused(told: list[Operator]) -> list[Operator]:
    """llama.cpp's CPU backend computes a norm and the product behind it in one go: one operator, with the product's name."""
    made: list[Operator] = []
    for kind, name, shape in told:
        if kind == "MUL" and made and made[-1][0] == "RMS_NORM":
            made[-1] = ("RMS_NORM+MUL", name, shape)
        else:
            made.append((kind, name, shape))
    return made


def test_every_step_has_its_batchs_tokens_in_as_many_graphs_as_they_fill(both: Both) -> None:
    tokens, graphs = both.tables["tokens"], both.tables["graphs"]
    assert tokens["n_tokens"].tolist() == both.batches
    assert graphs.groupby("token_id").size().tolist() == [-(-size // both.part) for size in both.batches]


def test_every_operator_of_every_step_is_seen_in_order_with_its_name_and_shape(both: Both) -> None:
    for step in range(len(both.batches)):
        assert both.traced(step) == fused(both.computed(step)), f"step {step}"


def edges_told(nodes: list[dict[str, Any]]) -> set[Edge]:
    """llama.cpp's own edges: ((operator, name) that is read, that which reads). A norm and the product behind it are one."""
    edges: set[Edge] = set()
    inputs: dict[int, list[Any]] = {}
    label: dict[int, tuple[str, str]] = {}
    for before, node in pairwise([{"op": ""}, *nodes]):
        fuses = (before["op"], node["op"]) == ("RMS_NORM", "MUL")
        label[node["id"]] = "RMS_NORM+MUL" if fuses else node["op"], node["name"]
        inputs[node["id"]] = node["reads"]
        reads = [
            one for source in node["reads"] for one in (inputs[source[0]] if fuses and source[1] == "RMS_NORM" else [source])
        ]
        if node["computed"] and node["op"] not in {*RENAMES_MEMORY, "RMS_NORM"} and all(node["ne"]):
            edges |= {(label.get(address, (kind, name)), label[node["id"]]) for address, kind, name in reads}
    return edges


def test_the_profdags_edges_are_those_of_llama_cpps_graph(both: Both) -> None:
    graphs = both.tables["graphs"].groupby("token_id").size()
    for step in (0, 1, len(both.batches) - 1):
        if graphs[step] > 1:
            continue  # a second graph's fused norms and views at known addresses are not told anew
        graph = structure.resolved(profdag.build_profdag(both.tables, step))
        label = {node: (values["type"], values["name"]) for node, values in graph.nodes(data=True)}
        data = {(label[a], label[b]) for a, b, kind in graph.edges(data="kind") if kind == "data"}
        assert data == edges_told([node for node in both.nodes if node["step"] == step]), f"step {step}"


def test_every_token_is_routed_to_the_experts_that_llama_cpp_used(both: Both) -> None:
    routes = both.tables["routes"].sort_values(["token_id", "layer", "row", "rank"])
    rows = routes.groupby(["token_id", "layer", "row"])["expert"].agg(list)
    seen: dict[tuple[int, int], list[list[int]]] = {}
    for (token, layer, _), experts in rows.items():
        seen.setdefault((token, layer), []).append(experts)
    assert seen == both.chosen()


def test_the_tables_name_each_operator_on_as_many_rows_as_threads_took_part(both: Both) -> None:
    operators, shares = both.tables["operators"], both.tables["op_threads"]
    counted = shares.groupby("op_id")["tid"].nunique()
    assert operators.set_index("op_id")["n_threads"].equals(pd.Series(counted, dtype="int64").rename("n_threads"))
