"""A traced llama.cpp's operators, shapes and experts are those that llama.cpp itself tells its evaluation callback."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analyzer.questions import profdag, structure
from analyzer.tables import store as tables_module
from tests.conftest import ROOT, last_json, rest_long, trace
from tracer.recording.format import Recording
from workloads.gguf_model import BOTH_WAYS, DENSE, ENCODER, SMALL, Shape, write_model

pytestmark = [
    pytest.mark.needs("probes"),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]
PROGRAMS = ROOT / "workloads" / "programs"
NEW, PAUSE_S = 12, 0.1
RENAMES_MEMORY = {"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}
Operator = tuple[str, str, str]
Edge = tuple[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True)
class Run:
    """A model, the first batches of each context, and how llama.cpp is called (workloads/programs/llama_steps.py)."""

    batches: list[list[int]]
    shape: Shape = SMALL
    part: int = 512
    call: str = "decode"
    threads_of: str = ""
    library: str = ""
    levels: str = "token,graph,operator,expert"

    def environment(self) -> dict[str, str]:
        way = {"LLAMA_PART": str(self.part), "LLAMA_CALL": self.call, "LLAMA_THREADS_OF": self.threads_of}
        return way | {"LLAMA_LIBRARY": self.library}


class Both:
    """One model and prompt: what llama.cpp told of a run, and the tables of another, traced one."""

    def __init__(self, folder: Path, run: Run):
        write_model(folder / "model.gguf", run.shape, quantized=False)
        self.run = run
        batches = "/".join(",".join(map(str, mine)) for mine in run.batches)
        words = [str(folder / "model.gguf"), batches, str(NEW), str(PAUSE_S)]
        oracle, way = [sys.executable, str(PROGRAMS / "llama_oracle.py"), *words], run.environment()
        alone = {**os.environ, **way, "LLAMA_THREADS_OF": ""}
        done = subprocess.run(oracle, capture_output=True, text=True, check=True, env=alone)
        told = last_json(done)
        options = ["--no-views", "--levels", run.levels, "-o", str(folder / "run")]
        done = trace("run", *options, "--", sys.executable, str(PROGRAMS / "llama_steps.py"), *words, env=way)
        if crash := re.search(r"the command ended with signal (\d+)", done.stderr):
            raise subprocess.CalledProcessError(-int(crash[1]), done.args)
        assert done.returncode == 0, done.stderr
        assert last_json(done) == told["made"]
        recording = Recording(folder / "run")
        assert recording.manifest["lost"] == {}
        self.manifest = recording.manifest
        self.nodes: list[dict[str, Any]] = told["nodes"]
        self.tables = tables_module.build_tables(recording)
        self.place = self.places()
        """Of each traced step, its context and which of its steps it is."""
        self.step = {tuple(node["at"]): [] for node in self.nodes}
        for node in self.nodes:
            self.step[tuple(node["at"])].append(node)

    def learnt(self) -> bool:
        """Whether the graph loop's own probe came to stand."""
        return any(row["program"] == "ggml_op_done" and row["hits"] for row in self.manifest["probes"])

    def expected(self) -> list[list[int]]:
        """How many tokens the steps of each context are fed."""
        return [[*mine, *[1] * NEW] for mine in self.run.batches]

    def places(self) -> list[tuple[int, int]]:
        """(context, step) of each traced step: contexts take turns, or have a thread each, told by what it was fed first."""
        expected = self.expected()
        if self.run.threads_of != "contexts":
            rounds = range(max(map(len, expected)))
            return [(context, step) for step in rounds for context, mine in enumerate(expected) if step < len(mine)]
        tokens = self.tables["tokens"]
        first = [mine[0] for mine in expected]
        context = tokens.groupby("tid")["n_tokens"].first().map(first.index)
        return list(zip(tokens["tid"].map(context), tokens.groupby("tid").cumcount(), strict=True))

    def computed(self, step: int) -> list[Operator]:
        """What was computed in a step, in llama.cpp's order: no views, nothing empty, nothing that is not asked for."""
        return [
            (node["op"], node["name"], "x".join(map(str, node["ne"])))
            for node in self.step[self.place[step]]
            if node["computed"] and all(node["ne"]) and node["op"] not in RENAMES_MEMORY
        ]

    def traced(self, step: int) -> list[Operator]:
        """The same from the table `operators`. What has no elements is passed by the threads, and computed by none."""
        rows = self.tables["operators"].query("token_id == @step").sort_values("order")
        rows = rows[rows["shape"].str.count("x") == 3]  # dims of 0 are not written
        return list(zip(rows["type"], rows["name"], rows["shape"], strict=True))

    def chosen(self) -> dict[tuple[int, int], list[list[int]]]:
        """(traced step, layer) → the experts of every token, from the routing tensors' contents."""
        found: dict[tuple[int, int], list[list[int]]] = {}
        for step, place in enumerate(self.place):
            for node in self.step[place]:
                if node["name"].startswith("ffn_moe_down-"):
                    found.setdefault((step, int(node["name"].split("-")[1])), []).extend(node["experts"])
        return found


ONE = replace(SMALL, layers=1)
RUNS = {
    "three layers": Run([[20]]),
    "prompt in three graphs": Run([[1100]], ONE),
    "graphs of at most 128 tokens by llama_process": Run([[256, 1, 200]], ONE, part=128, call="process"),
    "batches of many sizes": Run([[20, 1, 7, 12, 1, 1, 5, 20, 7, 1, 1, 12, 3]], ONE),
    "llama": Run([[4]], DENSE["llama"]),
    "gemma2": Run([[4]], DENSE["gemma2"]),
    "two contexts alternately": Run([[20, 1, 7], [3, 200]], ONE, part=128),
    "two contexts at once by llama_process": Run([[20, 1, 7], [3, 200, 4]], ONE, part=128, call="process", threads_of="contexts"),
    "a thread for each step": Run([[20, 7], [3]], ONE, threads_of="steps"),
    "encoder with experts": Run([[20, 1, 7]], ENCODER, call="encode"),
}


@pytest.fixture(scope="module", params=rest_long(RUNS, "three layers", "prompt in three graphs", "two contexts alternately"))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tmp_path_factory.mktemp("truth"), RUNS[request.param])


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
    tokens, graphs, expected = both.tables["tokens"], both.tables["graphs"], both.expected()
    fed = [expected[context][step] for context, step in both.place]
    assert tokens["n_tokens"].tolist() == fed
    assert graphs.groupby("token_id").size().tolist() == [-(-size // both.run.part) for size in fed]
    assert graphs.groupby("token_id")["n_tokens"].sum().tolist() == fed
    assert tokens["complete"].all() and graphs["complete"].all()
    in_order = {context: number for number, context in enumerate(dict.fromkeys(context for context, _ in both.place))}
    assert tokens["context"].tolist() == [in_order[context] for context, _ in both.place]


def test_what_is_encoded_or_of_several_tokens_is_prefill(both: Both) -> None:
    calls, expected = both.run.call.split(","), both.expected()
    encodes = ["encode" in calls[min(step, len(calls) - 1)] for _, step in both.place]
    prefill = [encoded or expected[context][step] > 1 for encoded, (context, step) in zip(encodes, both.place, strict=True)]
    assert both.tables["tokens"]["phase"].tolist() == ["prefill" if first else "decode" for first in prefill]


def test_an_encoder_and_its_decoder_take_steps_of_their_own(tmp_path: Path) -> None:
    both = Both(tmp_path, Run([[20, 4]], BOTH_WAYS, call="process_encode,process"))
    test_every_step_has_its_batchs_tokens_in_as_many_graphs_as_they_fill(both)
    test_what_is_encoded_or_of_several_tokens_is_prefill(both)


def test_every_operator_of_every_step_is_seen_in_order_with_its_name_and_shape(both: Both) -> None:
    for step in range(len(both.place)):
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
            others = [read for read in reads if read[0] != node["id"]]  # ggml_cast names its result among what it reads
            edges |= {(label.get(address, (kind, name)), label[node["id"]]) for address, kind, name in others}
    return edges


def test_the_profdags_edges_are_those_of_llama_cpps_graph(both: Both) -> None:
    graphs = both.tables["graphs"].groupby("token_id").size()
    for step in (0, 1, len(both.place) - 1):
        if graphs[step] > 1:
            continue  # a second graph's fused norms and views at known addresses are not told anew
        graph = structure.without_views(profdag.build_profdag(both.tables, step))
        label = {node: (values["type"], values["name"]) for node, values in graph.nodes(data=True)}
        data = {(label[a], label[b]) for a, b, kind in graph.edges(data="kind") if kind == "data"}
        assert data == edges_told(both.step[both.place[step]]), f"step {step}"


def test_every_token_is_routed_to_the_experts_that_llama_cpp_used(both: Both) -> None:
    routes = both.tables["routes"].sort_values(["token_id", "layer", "row", "rank"])
    rows = routes.groupby(["token_id", "layer", "row"])["expert"].agg(list)
    seen: dict[tuple[int, int], list[list[int]]] = {}
    for (token, layer, _), experts in rows.items():
        seen.setdefault((token, layer), []).append(experts)
    assert seen == both.chosen()


def test_contexts_with_a_thread_each_take_their_steps_at_the_same_time(both: Both) -> None:
    tokens, threads = both.tables["tokens"].sort_values("begin_ns"), both.tables["tokens"]["tid"].nunique()
    assert threads == {"": 1, "contexts": len(both.run.batches), "steps": len(tokens)}[both.run.threads_of]
    overlaps = (tokens["begin_ns"].shift(-1) < tokens["end_ns"]).sum()
    assert overlaps > NEW / 3 if both.run.threads_of == "contexts" else overlaps == 0


def test_the_tables_name_each_operator_on_as_many_rows_as_threads_took_part(both: Both) -> None:
    operators, shares = both.tables["operators"], both.tables["op_threads"]
    counted = shares.groupby("op_id")["tid"].nunique()
    assert operators.set_index("op_id")["n_threads"].equals(pd.Series(counted, dtype="int64").rename("n_threads"))
