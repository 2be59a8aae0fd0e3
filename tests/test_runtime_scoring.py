"""Scores of a given text are transformers' own, and a layer that computes something else is the first that is named."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moescope.__main__ import main
from runtime import MoE
from runtime.package.convert import PackageFormat, convert
from runtime.package.demo_model import TEXT, write_demo_model
from runtime.prepare.scoring import Score, first_beyond, layer_differences
from tests.test_runtime_htp import htp_only

WORDS = TEXT.read_text(encoding="utf-8")[:500]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("scoring") / "demo")


def scored(model: Path, **options: object) -> Score:
    with MoE.load(model, **options) as loaded:
        return loaded.score(WORDS, states=True)


def test_log_probabilities_and_routes_are_those_of_transformers(demo: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    score = scored(demo, expert_cache="25%", chunk=16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    with torch.no_grad():
        out = theirs(torch.tensor([score.ids]), output_router_logits=True, output_hidden_states=True)
    logs = torch.log_softmax(out.logits[0, :-1].double(), -1).numpy()
    expected = logs[np.arange(len(logs)), score.ids[1:]]
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)
    assert sorted(score.routes) == list(range(4))
    for layer, experts in score.routes.items():
        best = out.router_logits[layer].topk(experts.shape[1]).indices.numpy()
        assert (np.sort(best) == np.sort(experts)).all(axis=1).mean() > 0.99, "all but ties"
    for mine, hidden in zip(score.states[:-1], out.hidden_states, strict=False):
        np.testing.assert_allclose(mine, hidden[0].numpy(), atol=1e-3)


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_first_layer_that_computes_something_else_is_named(demo: Path, tmp_path: Path, bits: int, layer: int) -> None:
    altered = write_demo_model(tmp_path / "altered")
    tensors = load_file(altered / "model.safetensors")
    tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] *= 1.3
    save_file(tensors, altered / "model.safetensors", {"format": "pt"})
    kind = PackageFormat(backend="cpu", bits=bits)
    packages = [convert(model, tmp_path / str(i), None, kind).folder for i, model in enumerate((demo, altered))]
    whole, changed = map(scored, packages)
    rows = layer_differences(whole, changed, bits)
    assert first_beyond(rows) == layer
    assert all(row.state == 0 for row in rows[:layer])
    assert first_beyond(layer_differences(whole, scored(packages[0], chunk=16, expert_cache="25%"), bits)) is None


@htp_only
@pytest.mark.parametrize("bits", [32, 4])
def test_the_npu_differs_from_the_cpu_by_rounding_alone(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: int
) -> None:
    package = convert(demo, tmp_path / "package", None, PackageFormat(bits=bits)).folder
    (tmp_path / "text").write_text(WORDS)
    assert main(["generate", str(package), "--score", str(tmp_path / "text"), "--against", "htp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "first_beyond" not in found
    assert len(found["layers"]) == 4
    assert all(0 < row["state"] < row["allowed"] for row in found["layers"])
    np.testing.assert_allclose(found["logprobs"], found["logprobs_against"], atol=0.5)
    assert main(["generate", str(package), "--prompt", "a", "--against", "htp"]) == 2
