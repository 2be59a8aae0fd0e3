"""Engines beside llama.cpp and QNN: onnxruntime-genai and OpenVINO with real models, ExecuTorch by its symbol."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analyzer.questions.summary import summarize
from analyzer.tables import store
from tests.conftest import ROOT, trace
from tracer.recording.format import Recording

TOKENS, CALLS = 7, 20
needs_genai = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai is not installed"
)
needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino_genai") is None, reason="openvino-genai is not installed")
ANSWER = 50
"""Tokens that OpenVINO GenAI generates."""

METHOD = """
struct method { int calls; char more[60]; };
int execute(struct method *) __asm__("_ZN10executorch7runtime6Method7executeEv");
int execute(struct method *method) { return ++method->calls % 5 ? 0 : 0x12; }
"""
RUNNER = """
#include <stdio.h>
struct method { int calls; char more[60]; };
int execute(struct method *) __asm__("_ZN10executorch7runtime6Method7executeEv");
int main(void) {
    struct method methods[2] = {{0}, {0}};
    for (int i = 0; i < %d; i++) printf("%%d ", execute(&methods[i %% 2]));
}
"""


@needs_genai
@pytest.mark.needs("probes")
def test_prompts_and_tokens_of_onnxruntime_genai_are_steps(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "workloads/programs/genai_steps.py"), str(tmp_path / "model"), str(TOKENS)]
    done = trace("run", "--no-views", "--levels", "token,graph", "-o", str(tmp_path / "run"), "--", *program)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    tables = store.load_tables(tmp_path / "run")
    tokens, graphs = tables["tokens"], tables["graphs"]
    refused = ["refused", told[-1][1]]
    assert tokens[["phase", "n_tokens"]].values.tolist() == [*told[:-1], refused] and len(told) == 2 * TOKENS + 3
    assert tokens["result"].tolist() == [0] * (len(told) - 1) + [-1], "the last prompt is longer than the model takes"
    assert set(tokens["engine"]) == {"onnxruntime-genai"} and tokens["complete"].all()
    assert tokens["context"].tolist() == [0] * (TOKENS + 1) + [1] * (TOKENS + 1) + [0]
    made = graphs[graphs["engine"] == "onnxruntime-genai"]
    assert made["kind"].tolist() == ["create_model"] and made["status"].tolist() == [0]
    runs = graphs[(graphs["engine"] == "onnxruntime") & graphs["kind"].str.startswith("run")]
    without = {step for step, kind in enumerate(told) if kind[0] == "decode" and told[step - 1][0] == "prefill"}
    ran = set(range(len(told) - 1)) - without
    assert set(runs["token_id"]) == ran and len(runs) == len(ran), "the first token of an answer comes out of the prompt's run"


@pytest.mark.needs("probes")
def test_runs_of_executorch_are_steps_and_graphs(tmp_path: Path) -> None:
    (tmp_path / "method.c").write_text(METHOD)
    (tmp_path / "runner.c").write_text(RUNNER % CALLS)
    library = tmp_path / "libexecutorch.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "method.c"], check=True)
    links = ["-o", tmp_path / "runner", tmp_path / "runner.c", library, f"-Wl,-rpath,{tmp_path}"]
    subprocess.run(["cc", "-O1", *links], check=True)
    done = trace("run", "--no-views", "--levels", "token,graph", "-o", str(tmp_path / "run"), "--", str(tmp_path / "runner"))
    assert done.returncode == 0, done.stderr
    told = [int(each) for each in done.stdout.split()]
    tables = store.load_tables(tmp_path / "run")
    tokens, graphs = tables["tokens"], tables["graphs"]
    assert tokens["result"].tolist() == graphs["status"].tolist() == told and told.count(0x12) == 4
    assert tokens["context"].tolist() == [0, 1] * (CALLS // 2) and graphs["token_id"].tolist() == tokens["token_id"].tolist()
    assert set(graphs["kind"]) == {"run"} and set(graphs["engine"]) == set(tokens["engine"]) == {"executorch"}


def traced_tables(tmp_path: Path, program: str, *arguments: str) -> tuple[dict, dict]:
    """What a program of workloads/programs printed last, as JSON, and the tables of its recording."""
    command = [sys.executable, str(ROOT / "workloads/programs" / program), *arguments]
    done = trace("run", "--no-views", "--levels", "token,graph", "-o", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), store.load_tables(tmp_path / "run")


@needs_openvino
@pytest.mark.needs("probes")
def test_steps_of_openvino_genai_are_those_that_it_measured_itself(tmp_path: Path) -> None:
    told, tables = traced_tables(tmp_path, "openvino_steps.py", str(tmp_path / "model"), str(ANSWER), "SDPA", "PA")
    tokens, graphs = tables["tokens"], tables["graphs"]
    assert len(tokens) == 2 * ANSWER and tokens["complete"].all() and tokens["tid"].nunique() == tokens["context"].nunique() == 2
    for way, rows in (("SDPA", 7), ("PA", 5)):
        steps = next(mine for _, mine in tokens.groupby("context") if mine["n_tokens"].iloc[0] == rows)
        assert steps["n_tokens"].tolist() == [rows] + [1] * (ANSWER - 1)
        assert steps["phase"].tolist() == ["prefill"] + ["decode"] * (ANSWER - 1)
        around_us = np.array(told[way]) - (steps["end_ns"] - steps["begin_ns"]).to_numpy() / 1000
        assert around_us.min() > -1, "its own durations, in whole microseconds, contain the recorded ones"
        if way == "SDPA":
            assert steps["position"].tolist() == [0, *range(rows, rows + ANSWER - 1)]
            assert np.median(around_us) < 100, "paged, it includes the preparation of the inputs"
    runs = graphs[graphs["kind"].isin(["infer", "start_async"])]
    assert sorted(runs["token_id"]) == tokens["token_id"].tolist() and set(runs["backend"]) == {"cpu"}
    assert graphs["kind"].value_counts()["compile_model"] == 2 and set(tokens["engine"]) == {"openvino"}


@needs_openvino
@pytest.mark.needs("probes")
def test_parts_that_openvinos_npu_plugin_runs_are_rows_in_their_steps(tmp_path: Path) -> None:
    told, tables = traced_tables(tmp_path, "openvino_steps.py", str(tmp_path / "model"), str(ANSWER), "NPUW")
    steps, graphs = tables["tokens"].sort_values("begin_ns"), tables["graphs"]
    assert steps["n_tokens"].tolist() == [9] + [1] * (ANSWER - 1) and steps["complete"].all()
    assert steps["position"].tolist() == [0, *range(9, 9 + ANSWER - 1)]
    around_us = np.array(told["NPUW"]) - (steps["end_ns"] - steps["begin_ns"]).to_numpy() / 1000
    assert around_us.min() > -1 and np.median(around_us) < 100
    runs = graphs[graphs["kind"].isin(["infer", "start_async"])]
    assert runs["complete"].all() and set(runs["name"]) == {"model on NPU", "model on CPU"}
    models = runs.groupby("token_id")["handle"].agg(list)[steps["token_id"].tolist()]
    assert all(len(each) == len(set(each)) > 3 for each in models) and len({frozenset(each) for each in models[1:]}) == 1
    waited = graphs[graphs["kind"] == "wait_async"]["handle"].value_counts()
    assert waited.to_dict() == graphs[graphs["kind"] == "start_async"]["handle"].value_counts().to_dict()


@needs_openvino
@pytest.mark.needs("probes")
def test_runs_of_openvino_are_recorded_in_each_way_and_exceptions_reach_their_handlers(tmp_path: Path) -> None:
    told, tables = traced_tables(tmp_path, "openvino_runs.py", str(tmp_path / "cache"))
    graphs = tables["graphs"]
    assert len(tables["tokens"]) == 0, "an image model has no steps"
    of_kind = {kind: rows[["begin_ns", "end_ns"]].to_numpy() for kind, rows in graphs.groupby("kind", observed=True)}
    assert {kind: len(rows) for kind, rows in of_kind.items()} == {
        **{"compile_model": 4, "look_up_cache": 3, "write_cache": 1},
        **{"infer": 20, "start_async": 2 + 15, "wait_async": 2 + 15},
    }
    for kind in ("infer", "start_async", "wait_async"):
        mine, theirs = of_kind[kind][: len(told[kind])], np.array(told[kind])
        assert (theirs[:, 0] < mine[:, 0]).all() and (mine[:, 1] < theirs[:, 1]).all()
    compiled = graphs[graphs["kind"] == "compile_model"]
    assert compiled["complete"].tolist() == [False, True, True, True], "the first was refused by an exception"
    (written,), (begin, end) = of_kind["write_cache"], told["compile"][0]
    assert begin < written[0] < written[1] < end, "the model was written when it was compiled; later it was loaded"
    runs = {run["kind"]: run for run in summarize(Recording(tmp_path / "run"), tables)["graphs"]}
    assert {kind: run["count"] for kind, run in runs.items()} == {k: len(v) - (k == "compile_model") for k, v in of_kind.items()}
    assert runs["infer"]["ms"] == pytest.approx(np.diff(of_kind["infer"]).sum() / 1e6)
    ran = graphs[graphs["kind"] == "infer"]
    assert set(ran["name"]) == {"model on CPU"} and set(ran["backend"]) == {"cpu"} and ran["handle"].nunique() == 1
