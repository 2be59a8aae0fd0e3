"""The NPU backend, on Qualcomm's HTP or on its emulator."""

import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import MoE
from runtime.backends import htp
from runtime.backends.qnn_profiling import Profiling, SwitchingSession
from runtime.cache_rules.forms import CPU, HTP, Reason
from runtime.errors import BackendError, RequestError
from runtime.package.convert import PackageFormat, convert, open_or_convert
from runtime.package.demo_model import DemoSizes, write_demo_model
from runtime.placement.options import Options
from runtime.step.attention import Sequence, make_attention
from runtime.step.engine import make_backends
from runtime.step.sampling import Sampler, Sampling
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind
from tests.runtime_models import PROMPT, random_model

htp_only = pytest.mark.skipif(bool(htp.why_unavailable()), reason=htp.why_unavailable() or "HTP at hand")
ROOT = Path(__file__).resolve().parents[1]


def tokens(model: MoE, count: int = 12) -> list[int]:
    ids = [token.id for token in model.generate(PROMPT, count)]
    model.close()
    return ids


@htp_only
def test_prefill_on_htp_gives_the_text_of_the_cpu_and_runs_where_it_was_told(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path)
    expected = tokens(MoE.load(folder))
    model = MoE.load(folder, prefill_backend="htp", chunk=16, expert_cache="2MiB")
    assert tokens(model) == expected
    prefill, decode = model.log.steps[0], model.log.steps[1:]
    chunks = -(-prefill.n_tokens // 16)
    assert model.log.graphs[Kind.ATTENTION, HTP] == 4 * chunks
    assert model.log.graphs[Kind.ATTENTION, CPU] == 4 * len(decode)
    assert model.log.graphs[Kind.EXPERT, HTP] > 0
    assert {kind for kind, backend in model.log.graphs if backend == HTP} == {Kind.ATTENTION, Kind.EXPERT}


@pytest.mark.long
@htp_only
def test_a_prompt_loads_each_expert_once_where_the_cache_holds_less_than_a_layer(tmp_path: Path) -> None:
    package = convert(write_demo_model(tmp_path / "demo"), tmp_path / "package").folder
    logits, loads = [], []
    for cache, chunk in (("all", 64), ("7%", 64), ("7%", 16)):
        with MoE.load(package, cache, prefill_backend="attention=cpu,expert=htp", chunk=chunk) as model:
            ids = np.random.default_rng(0).integers(0, 1024, 300).tolist()
            logits.append(model.engine.step(model.engine.begin_sequence(301), ids, Sampler(Sampling()))[1])
            loads.append(model.log.loads[Reason.DEMAND])
            chosen = {(layer, expert) for _, layer, experts, _ in model.log.routing for expert in np.unique(experts).tolist()}
    assert loads[1:] == [len(chosen)] * 2
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])


@htp_only
def test_decode_on_htp_gives_the_text_of_the_cpu(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path)
    expected = tokens(MoE.load(folder), 6)
    model = MoE.load(folder, prefill_backend="cpu", decode_backend="htp", expert_cache="3MiB", tiers=(1,))
    assert tokens(model, 6) == expected
    assert model.log.graphs[Kind.EXPERT, HTP] == 5 * 4 * 2


@htp_only
def test_asynchronous_experts_are_deterministic(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path)
    rows = []
    for _ in range(2):
        model = MoE.load(folder, prefill_backend="htp", chunk=8, tiers=(8,), expert_cache="2MiB")
        list(model.generate(PROMPT * 2, 2))
        rows.append(np.concatenate([weights for _, _, _, weights in model.log.routing]).tobytes())
        model.close()
    assert rows[0] == rows[1]


@htp_only
@pytest.mark.parametrize("head_dim", [32, 64])
def test_attention_on_htp_is_close_to_the_cpu_for_small_heads_too(tmp_path: Path, head_dim: int) -> None:
    folder = random_model(tmp_path, head_dim=head_dim, num_hidden_layers=1, initializer_range=0.1)
    package = open_or_convert(folder)
    backends = make_backends(package, Options(prefill_backend="htp", chunk=16))
    family, random, results = package.family, np.random.default_rng(0), []
    hidden = random.standard_normal((24, family.hidden)).astype(np.float32)
    for backend in (backends[CPU], backends[HTP]):
        attention, sequence = make_attention(family, backend, RunLog(), 16), Sequence(family, 64)
        out = [attention.run(0, hidden[:16], sequence, 0), attention.run(0, hidden[16:], sequence, 16)]
        results.append((np.concatenate(out), sequence.keys[0][:, :24], sequence.values[0][:, :24]))
    for cpu_value, htp_value in zip(*results, strict=True):
        assert np.abs(cpu_value - htp_value).max() < 0.01 * np.abs(cpu_value).max()


@htp_only
def test_graphs_are_compiled_once_and_a_damaged_binary_is_compiled_again(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path)
    options: dict[str, Any] = {"prefill_backend": "htp", "chunk": 32, "tiers": (32,)}
    expected = tokens(MoE.load(folder, **options), 2)
    made = {path: path.stat().st_mtime_ns for path in (folder / ".moescope-package" / "htp").glob("*/graph.onnx")}
    assert made
    assert tokens(MoE.load(folder, **options), 2) == expected
    assert {path: path.stat().st_mtime_ns for path in made} == made
    victim = next(iter(made))
    victim.write_bytes(b"damaged")
    assert tokens(MoE.load(folder, **options), 2) == expected
    assert victim.stat().st_size > 100
    assert not list((folder / ".moescope-package" / "htp").glob(".compiling*"))


@htp_only
def test_qnn_profiling_writes_one_csv_for_each_session_and_stdout_holds_text_only(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path / "demo")
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "moescope", "generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "3", "--json"]
    command += ["--prefill-backend", "htp", "--chunk", "32", "--qnn-profile", "detailed", "--qnn-profile-dir", "csv"]
    done = subprocess.run(command, cwd=work, env=_environment(), capture_output=True, text=True, timeout=180, check=True)
    statistics = json.loads(done.stdout)["statistics"]
    csvs = sorted((work / "csv").glob("*.csv"))
    rows = Counter(row["Event Identifier"] for path in csvs for row in csv.DictReader(path.open()))
    assert rows["QNN (execute) time"] == statistics["qnn_executes"] > 0
    assert any("o_proj" in name for name in rows)
    assert [path.name for path in work.iterdir()] == ["csv"], "nothing else is left in the user's folder"


@pytest.mark.parametrize(
    ("text", "every", "most", "kind", "levels"),
    [
        ("detailed", 1, None, "expert", ["detailed"] * 5),
        ("attention=basic,expert=off", 1, None, "expert", ["off"] * 5),
        ("attention=basic", 1, None, "attention", ["basic"] * 5),
        ("detailed,attention=optrace", 2, None, "attention", ["optrace", "off", "optrace", "off", "optrace"]),
        ("basic", 2, 2, "expert", ["basic", "off", "basic", "off", "off"]),
        ("basic", 1, 0, "expert", ["off"] * 5),
    ],
)
def test_each_run_has_the_level_of_its_kind_and_turn(text: str, every: int, most: int, kind: str, levels: list[str]) -> None:
    class Session:
        def __init__(self, level: str):
            self.level = level

        def run(self, names: Any, feeds: Any) -> str:
            return self.level

    session = SwitchingSession(kind, Profiling.parse(text, every, most), lambda level: (Session(level), ""))
    assert [session.run(None, {}) for _ in range(5)] == levels


def test_a_level_that_onnxruntime_has_not_is_refused_with_those_it_has() -> None:
    with pytest.raises(RequestError, match=r"linting.*basic, detailed, optrace"):
        Options(qnn_profile="expert=linting")


@htp_only
def test_profiling_is_switched_while_the_model_runs(tmp_path: Path) -> None:
    folder, csvs = write_demo_model(tmp_path / "demo"), tmp_path / "csv"
    model = MoE.load(folder, decode_backend="htp", tiers=(1,), qnn_profile_dir=csvs)
    list(model.generate(PROMPT, 2))
    assert not csvs.exists()
    model.engine.backends[HTP].profiling.levels["attention"] = "basic"  # type: ignore[attr-defined]
    list(model.generate(PROMPT, 3))
    model.close()
    assert {path.name.split("_")[0] for path in csvs.glob("*.csv")} == {"attention"}


def test_without_the_qnn_package_htp_says_how_to_get_it_and_auto_takes_the_cpu(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path)
    block = "import sys; sys.modules['onnxruntime_qnn'] = None; from moescope.__main__ import main; sys.exit(main(sys.argv[1:]))"
    base = [
        sys.executable,
        "-c",
        block,
        "generate",
        str(folder),
        "--prompt",
        "A cache",
        "--max-new-tokens",
        "2",
        "--prefill-backend",
    ]
    refused = subprocess.run([*base, "htp"], env=_environment(), capture_output=True, text=True, timeout=180)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "pip install 'moescope[npu]'" in refused.stderr
    taken = subprocess.run([*base, "auto"], env=_environment(), capture_output=True, text=True, timeout=180)
    assert taken.returncode == 0
    assert re.search("prefill .*CPU", taken.stderr)


@htp_only
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (8, False)])
def test_quantized_weights_run_wholly_on_htp_and_close_to_the_cpu(tmp_path: Path, bits: int, symmetric: bool) -> None:
    sizes = DemoSizes(hidden=64, layers=2, experts=4, intermediate=64, vocabulary=400)
    model = write_demo_model(tmp_path / "model", sizes=sizes)
    package = convert(model, tmp_path / "package", None, PackageFormat(bits=bits, symmetric=symmetric)).folder
    logits = []
    for backend in ("cpu", "htp"):
        engine = MoE.load(package, prefill_backend=backend, decode_backend=backend, chunk=16, tiers=(1, 8))
        ids = engine.encode(PROMPT)
        sequence = engine.engine.begin_sequence(len(ids) + 2)
        logits.append(np.stack([engine.engine.step(sequence, fed, Sampler(Sampling()))[1] for fed in (ids, ids[:1])]))
        engine.close()
    assert {kind for kind, where in engine.log.graphs if where == HTP} == {Kind.ATTENTION, Kind.EXPERT}
    assert not {(kind, CPU) for kind in (Kind.ATTENTION, Kind.EXPERT)} & engine.log.graphs.keys()
    assert np.linalg.norm(logits[0] - logits[1]) < 0.05 * np.linalg.norm(logits[0])


@htp_only
def test_a_graph_that_htp_cannot_run_is_an_error_and_never_falls_back(tmp_path: Path) -> None:
    package = open_or_convert(write_demo_model(tmp_path))
    backend = make_backends(package, Options(prefill_backend="htp"))[HTP]
    with pytest.raises(BackendError, match="refuses expert_00_000"):
        backend.session("expert_00_000", {})


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@htp_only
def test_evicted_and_reloaded_context_binaries_leave_nothing_and_two_run_from_two_threads(tmp_path: Path) -> None:
    sizes = DemoSizes(hidden=64, layers=1, experts=2, intermediate=64, vocabulary=400)
    package = convert(write_demo_model(tmp_path / "model", sizes=sizes), tmp_path / "package")
    script = (
        "import sys; from pathlib import Path; from workloads.htp_cycles import *\n"
        "from runtime.backends.cpu import return_freed_memory; from runtime.package.layout import Package\n"
        "return_freed_memory(); backend = HtpBackend(Package(Path(sys.argv[1])), (1,))\n"
        "names = ['expert_00_000', 'expert_00_001']\n"
        "warm, half, end = run_cycles(backend, names, 16); assert from_two_threads(backend, names, 5)\n"
        "assert end['threads'] == warm['threads'] and end['files'] == warm['files'] and end['pss'] - warm['pss'] < 8 << 20"
    )
    command = [sys.executable, "-c", script, str(package.folder)]
    done = subprocess.run(command, env=_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
