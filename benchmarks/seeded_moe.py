"""The shape `qwen-moe` of tests/gguf_model.py as a package of our runtime, its weights drawn from a seed while it is converted.

Weights are cut from one pool of normal numbers, scaled so that every layer adds about as much as the embedding brings: routing is
near uniform and differs from token to token. No checkpoint is written.
"""

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from safetensors.numpy import save_file

from runtime.convert import Conversion, Target
from runtime.demo_model import train_tokenizer
from runtime.models import read_family
from runtime.package import Package, is_package
from tests.gguf_model import SHAPES, Shape

ROOT = Path(__file__).resolve().parents[1]
POOL = (1 << 25) - 1  # odd: a matrix larger than the pool has no equal rows
CONTEXT = 1024  # as in tests/gguf_model.py


def config(shape: Shape) -> dict[str, Any]:
    """config.json of a Qwen2-MoE of these sizes."""
    return {
        "model_type": "qwen2_moe",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.used,
        "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.shared_width,
        "intermediate_size": shape.width,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
    }


class SeededWeights:
    """Stands where a Checkpoint does: has whatever tensor a Qwen2-MoE is asked for."""

    def __init__(self, seed: int = 0):
        self.pool = np.random.default_rng(seed).standard_normal(POOL, np.float32)

    def __contains__(self, name: str) -> bool:
        return not name.endswith(("gate_up_proj", "o_proj.bias", "lm_head.bias", "gate.bias"))

    def tensor(self, name: str, shape: tuple[int, ...], part: int | slice | None = None) -> np.ndarray:
        """The tensor in float32, or rows of it."""
        if len(shape) == 1:
            return np.zeros(shape, np.float32) if name.endswith("bias") else np.ones(shape, np.float32)
        rows = len(range(*part.indices(shape[0]))) if isinstance(part, slice) else shape[0]
        count = rows * shape[1]
        first = crc32(f"{name} {part}".encode()) % max(POOL - count, 1)
        values = np.resize(self.pool[first : first + count], (rows, shape[1]))
        # The embedding's rows are as large as what a layer adds.
        scaled: np.ndarray = values * np.float32(1 if "embed" in name else shape[1] ** -0.5)
        return scaled

    def optional(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """The tensor, or None where the family has none of this name."""
        return self.tensor(name, shape) if name in self else None


def seeded_package(block: int = 64, name: str = "qwen-moe") -> Package:
    """The package in 4 bits under build/, made the first time. Blocks of 64 take as many bits a weight as Q4_0: 4.5."""
    folder = ROOT / "build" / f"{name}-4bit-{block}"
    if is_package(folder):
        return Package(folder, verify=False)
    donor, working = folder.with_suffix(".config"), folder.with_suffix(".partial")
    donor.mkdir(parents=True, exist_ok=True)
    (donor / "config.json").write_text(json.dumps(config(SHAPES[name])))
    save_file({"nothing": np.zeros(1)}, donor / "model.safetensors")
    train_tokenizer(1024).save(str(donor / "tokenizer.json"))
    working.mkdir(exist_ok=True)
    family = read_family(config(SHAPES[name]), donor)
    conversion = Conversion(working, donor, family, Target("cpu", 4, block), show)
    conversion.checkpoint = SeededWeights()
    conversion.run()
    print()
    working.rename(folder)
    return Package(folder, verify=False)


def show(done: int, whole: int) -> None:
    print(f"\rconverting {done}/{whole}", end="", flush=True)
