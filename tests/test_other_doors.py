"""Engines that reach the NPU through QNN without being QNN: onnxruntime-genai with a real model, ExecuTorch by its symbol."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from analyzer.tables import store
from tests.conftest import ROOT, trace

TOKENS, CALLS = 7, 20
needs_genai = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai is not installed"
)

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
