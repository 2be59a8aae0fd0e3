"""Programs that use ggml or ONNX Runtime for other models than of language: graphs and steps, but no tokens, TTFT or decode."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from analyzer.tables.store import load_tables
from moescope.__main__ import main
from tests.conftest import ROOT, made_once, old_package, trace
from tracer.engines import all_engines
from workloads import upscaler_model
from workloads.recordings import LLAMA_OPERATORS, Writer
from workloads.whisper_model import AUDIO_LAYERS, TEXT_LAYERS, write_model

OF_LANGUAGE = re.compile(r"\b(tokens?|tok/s|TTFT|TPOT|ITL|decode|prefill)\b")
WHISPER = "pywhispercpp==1.5.1"


def engine(library: str) -> dict[str, object]:
    """Engines of a manifest: llama.cpp's, with a library that the program opened."""
    declared = all_engines()["llamacpp"]
    names = {"operators": LLAMA_OPERATORS, "graphs": ["ggml"], "not_language": declared.not_language}
    return {"llamacpp": {"id": 2, **names, "libraries": [{"path": f"/opt/{library}", "build_id": ""}]}}


def graphs(steps: int, outside: int) -> Writer:
    """Graphs that are steps, as whisper.cpp's decoder, and others before them, as its encoder or an image model."""
    w = Writer()
    for i in range(outside):
        w.add("graph_begin", engine=2, ts=1000 * i, handle=3, type=0, layer=-1, expert=-1, backend=1)
        w.add("graph_end", engine=2, ts=1000 * i + 400, handle=3)
    for i in range(steps):
        at, n = 100_000 + 1000 * i, 1 if i else 4
        w.add("token_begin", engine=2, ts=at, seq=i, n_tokens=n, position=(1 << 32) - 1)
        w.add("graph_begin", engine=2, ts=at + 10, handle=7, type=0, layer=-1, expert=-1, backend=1, n_tokens=n)
        w.add("graph_end", engine=2, ts=at + 300, handle=7)
        w.add("token_end", engine=2, ts=at + 310, seq=i)
    return w


def summary_of(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict]:
    """The summary as text and as JSON."""
    assert main(["summary", str(run)]) == 0
    shown = capsys.readouterr().out
    assert main(["summary", str(run), "--json"]) == 0
    return shown, json.loads(capsys.readouterr().out)


def test_steps_of_a_speech_model_have_no_phase_and_no_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = graphs(5, 2).write(tmp_path / "run", engines=engine("libwhisper-1ab89ae8.so.1.8.5"))
    shown, answer = summary_of(run, capsys)
    assert not OF_LANGUAGE.search(shown), shown
    assert answer["tokens"]["other_step_ms"]["n"] == answer["tokens"]["steps"] == 5
    assert answer["tokens"]["generations"] == answer["tokens"]["prefill_tokens"] == answer["tokens"]["decode_steps"] == 0
    assert [(row["kind"], row["count"], row["median_ms"]) for row in answer["graphs"]] == [("ggml", 2, 0.0004)]
    assert (load_tables(run)["sequences"]["request"] == -1).all()


def test_the_same_graphs_of_a_language_model_keep_their_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = graphs(5, 0).write(tmp_path / "run", engines=engine("libllama.so"))
    shown, answer = summary_of(run, capsys)
    assert "TTFT" in shown and answer["tokens"]["decode_steps"] == 4 and answer["tokens"]["other_step_ms"]["n"] == 0


def test_graphs_without_steps_are_summed_up_with_their_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = graphs(0, 3).write(tmp_path / "run", engines=engine("libstable-diffusion.so"), levels=["token", "graph"])
    shown, answer = summary_of(run, capsys)
    assert "llamacpp ggml: 3 times" in shown and not re.search("TTFT|TPOT|decode|prefill|no tokens", shown)
    (row,) = answer["graphs"]
    assert (row["count"], row["failed"], row["ms"], row["operators"]) == (3, 0, pytest.approx(0.0012), 0)


@pytest.mark.long
@pytest.mark.needs("probes")
def test_whispers_decodes_are_steps_within_its_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = made_once(WHISPER, old_package(WHISPER))
    if not list(package.glob("_pywhispercpp*")):
        pytest.skip(f"pip finds no {WHISPER}")
    write_model(tmp_path / "model.bin")
    program = [sys.executable, str(ROOT / "workloads/programs/whisper_runs.py"), str(tmp_path / "model.bin"), "2"]
    done = trace("run", "--no-views", "-o", str(tmp_path / "run"), "--", "env", f"PYTHONPATH={package}", *program)
    assert done.returncode == 0, done.stderr
    calls, tables = json.loads(done.stdout.splitlines()[-1]), load_tables(tmp_path / "run")
    steps, ran = tables["tokens"], tables["graphs"][tables["graphs"]["kind"] == "ggml"]
    inside = [steps["begin_ns"].between(begin, end).sum() for begin, end in calls]
    assert inside[0] == inside[1] > 1 and sum(inside) == len(steps) and set(steps["phase"]) == {""}
    per_call = [ran["begin_ns"].between(begin, end).sum() for begin, end in calls]
    assert per_call == [count + 3 for count in inside], "convolutions, encoder and what its layers hand to the decoder"
    last = ran[ran["token_id"] == steps["token_id"].iloc[-1]]["graph_id"]
    layers = tables["operators"][tables["operators"]["graph_id"].isin(last)]
    assert layers["type"].value_counts()["UNARY"] == TEXT_LAYERS < AUDIO_LAYERS
    shown, _ = summary_of(tmp_path / "run", capsys)
    assert not OF_LANGUAGE.search(shown), shown


UPSCALES = """
import json, sys, time
from PIL import Image
from stable_diffusion_cpp import StableDiffusion
model, spans = StableDiffusion(upscaler_path=sys.argv[1], n_threads=2, verbose=False), []
for i in range(3):
    begin = time.monotonic_ns()
    model.upscale([Image.new("RGB", (16, 16), (40 * i, 80, 120))], upscale_factor=2)
    spans.append((begin, time.monotonic_ns()))
print(json.dumps(spans))
"""


@pytest.mark.long
@pytest.mark.needs("probes")
@pytest.mark.skipif(importlib.util.find_spec("stable_diffusion_cpp") is None, reason="stable_diffusion_cpp is not installed")
def test_each_upscaled_image_is_a_graph_within_its_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upscaler_model.write_model(tmp_path / "up.safetensors")
    program = [sys.executable, "-c", UPSCALES, str(tmp_path / "up.safetensors")]
    done = trace("run", "--no-views", "-o", str(tmp_path / "run"), "--", *program)
    assert done.returncode == 0, done.stderr
    calls, tables = json.loads(done.stdout.splitlines()[-1]), load_tables(tmp_path / "run")
    ran, count = tables["graphs"][tables["graphs"]["kind"] == "ggml"], len(list(upscaler_model.convolutions()))
    assert [ran["begin_ns"].between(*call).sum() for call in calls] == [1, 1, 1] and len(tables["tokens"]) == 0
    products = tables["operators"][tables["operators"]["type"] == "MUL_MAT"].groupby("graph_id").size()
    assert products.tolist() == [count] * 3
    shown, _ = summary_of(tmp_path / "run", capsys)
    assert not re.search("TTFT|TPOT|decode|prefill|tokens", shown), shown
