"""Models for the runtime's tests: random ones written by transformers, the demo model, the trained one where it is at hand."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime.package.convert import PackageFormat, convert
from runtime.package.demo_model import write_demo_model
from tests.conftest import made_once

PROMPT = "The router looks at the token and picks a few experts. A cache keeps the experts that were used last."


def trained_model() -> Path:
    """A small trained model: the folder in MOESCOPE_TEST_MODEL, or one that lies beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "models" / "tinymoe"
    folder = Path(os.environ.get("MOESCOPE_TEST_MODEL", beside))
    if not (folder / "config.json").exists():
        pytest.skip("no trained model at hand: set MOESCOPE_TEST_MODEL")
    return folder


def trained_package() -> Path:
    """The trained model converted for the CPU, once for all workers."""
    model = trained_model()
    return made_once("trained", lambda folder: convert(model, folder / "package", None, PackageFormat(backend="cpu"))) / "package"


def random_model(folder: Path, **changes: object) -> Path:
    """A random Qwen3-MoE in transformers' own files, with the demo's tokenizer; `changes` go into its config."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, object] = {
        "hidden_size": 64,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "intermediate_size": 96,
        "vocab_size": 1024,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(1)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(sizes | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    donor = write_demo_model(folder / "donor")
    (folder / "tokenizer.json").write_bytes((donor / "tokenizer.json").read_bytes())
    return folder


def fuse_experts(folder: Path) -> None:
    """Rewrite the checkpoint with transformers' fused expert tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    config = json.loads((folder / "config.json").read_text())
    experts = config.get("num_experts") or config["num_local_experts"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        one = [{n: tensors.pop(f"{prefix}{e}.{n}_proj.weight") for n in ("gate", "up", "down")} for e in range(experts)]
        tensors[prefix + "gate_up_proj"] = np.stack([np.concatenate([e["gate"], e["up"]]) for e in one])
        tensors[prefix + "down_proj"] = np.stack([e["down"] for e in one])
    save_file(tensors, path, {"format": "pt"})


def shard(folder: Path, parts: int = 3) -> None:
    """Split the checkpoint into shards with an index."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    weight_map: dict[str, str] = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        mine = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % parts == part}
        save_file(mine, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
