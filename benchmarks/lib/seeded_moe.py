"""The shape `qwen-moe` of workloads/gguf_model.py as a package of our runtime, seeded.

    python -m benchmarks.lib.seeded_moe [--train 1024]

Embedding and routers are taken from a pool of normal numbers, scaled so that every layer adds about as much as the embedding
has: routing differs from token to token. Some experts are chosen more often than others: a cache of half of them is hit for two
thirds of the choices. 4-bit matrices are drawn directly, as in workloads/gguf_model.py:
quantizing five billion numbers takes minutes and would not affect the measured times.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
from safetensors.numpy import save_file

from runtime.experts import predictor
from runtime.graphs.quantize import MeasuredPrecision, Precision, Quantized
from runtime.models import Family, read_family
from runtime.models.decoder import Precisions
from runtime.moe import MoE
from runtime.package.convert import Conversion, PackageFormat
from runtime.package.demo_model import train_tokenizer
from runtime.package.layout import Package, is_package
from runtime.prepare import training
from workloads import ROOT
from workloads.gguf_model import SHAPES, SPREAD, Shape

POOL = CODES = (1 << 26) - 1
FLOATS = ("embed_tokens.weight", "gate.weight", "shared_expert_gate.weight")
BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
SEGMENT = 128  # tokens of one sequence to calibrate with
CONTEXT = 1024  # as in workloads/gguf_model.py


def seeded_config(shape: Shape) -> dict[str, Any]:
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
    """Replaces a Checkpoint: has every tensor of a Qwen2-MoE, and draws quantized ones."""

    def __init__(self, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.pool = self.rng.standard_normal(POOL, np.float32)
        self.quantization: dict[str, Any] = {}
        # Codes 1 to 15 mean -7 to 7.
        self.codes = self.rng.integers(1, 16, CODES, np.uint8) | self.rng.integers(1, 16, CODES, np.uint8) << 4
        self.drawn = 0  # matrices

    def __contains__(self, name: str) -> bool:
        return not name.endswith("gate_up_proj") and (not name.endswith(".bias") or name.endswith(BIASES))

    def tensor(self, name: str, shape: tuple[int, ...], part: int | slice | None = None) -> np.ndarray:
        """The tensor in float32, or rows of it; zeros for tensors made by `draw`."""
        if len(shape) == 1:
            return np.zeros(shape, np.float32) if name.endswith("bias") else np.ones(shape, np.float32)
        if not name.endswith(FLOATS):
            return np.broadcast_to(np.float32(0), shape)
        rows = len(range(*part.indices(shape[0]))) if isinstance(part, slice) else shape[0]
        first = crc32(f"{name} {part}".encode()) % (POOL - rows * shape[1])
        values = self.pool[first : first + rows * shape[1]].reshape(rows, shape[1])
        # The embedding's rows have the norm of a layer's contribution.
        return values * np.float32(1 if "embed" in name else shape[1] ** -0.5)

    def draw(self, weight: np.ndarray, precision: Precision) -> Quantized:
        """Random codes for a matrix [N, K], scaled to keep a row's norm."""
        rows, columns = weight.shape
        self.drawn += 1
        values = np.empty((rows, columns // precision.block, precision.block // 2), np.uint8)
        flat, done = values.reshape(-1), 0
        while done < len(flat):
            first = int(self.rng.integers(CODES))
            piece = self.codes[first : first + len(flat) - done]
            flat[done : done + len(piece)] = piece
            done += len(piece)
        return Quantized(values, np.full(values.shape[:2], columns**-0.5 / SPREAD, np.float16), None, 0.0)

    def optional(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """The tensor, or None if the family has none of this name."""
        return self.tensor(name, shape) if name in self else None


def drawn_format(weights: SeededWeights, block: int) -> PackageFormat:
    """The format of 4 bits in blocks, drawn instead of computed from a matrix."""

    class DrawnPrecision(MeasuredPrecision):
        def pack(self, weight: np.ndarray) -> Quantized:
            return weights.draw(weight, self)

    class DrawnFormat(PackageFormat):
        def precisions(self, kind: Callable[..., Precision] = Precision) -> Precisions:
            made = Precision if kind is Precision else DrawnPrecision
            return Precisions(*(made(self.bits, self.block) for _ in range(3)))

    return DrawnFormat("cpu", 4, block)


def seeded_package(block: int = 32, name: str = "qwen-moe") -> Package:
    """The 4-bit package under build/, made on first use. Blocks of 32 take as many bits per weight as Q4_0: 4.5."""
    folder = ROOT / "build" / f"{name}-4bit-{block}"
    if is_package(folder):
        return Package(folder, verify=False)
    donor, working = folder.with_suffix(".config"), folder.with_suffix(".partial")
    donor.mkdir(parents=True, exist_ok=True)
    (donor / "config.json").write_text(json.dumps(seeded_config(SHAPES[name])))
    save_file({"nothing": np.zeros(1)}, donor / "model.safetensors")
    train_tokenizer(1024).save(str(donor / "tokenizer.json"))
    shutil.rmtree(working, ignore_errors=True)  # an interrupted conversion would resume without drawing
    working.mkdir()
    family = read_family(seeded_config(SHAPES[name]), donor)
    weights = SeededWeights()
    conversion = Conversion(working, donor, family, drawn_format(weights, block), show_progress)
    conversion.checkpoint = weights  # type: ignore[assignment]
    conversion.run()
    print()
    if weights.drawn < family.layers * family.experts:
        raise SystemExit(f"{working} has zeros instead of drawn weights: the conversion does not call Precision.pack any more")
    working.rename(folder)
    return Package(folder, verify=False)


def show_progress(done: int, whole: int) -> None:
    print(f"\rconverting {done}/{whole}", end="", flush=True)


def train_predictor(package: Package, tokens: int, threads: int) -> dict[str, list[float]]:
    """Calibrate the package's predictor on seeded ids; returns recall at k, 2k, 4k by view, on held-out ids.

    The maps are those of the routers: a regression would need many more tokens than the model's hidden size.
    """
    model = MoE.load(package.folder, prefetch="off", threads=threads, chunk=SEGMENT)
    family, ids = package.family, np.random.default_rng(1)
    *known, test = [ids.integers(0, family.vocabulary, SEGMENT).tolist() for _ in range(max(tokens // SEGMENT, 2))]
    views = router_views(family)
    training.calibrate_views(views, training.collect_routing(model.engine, known), family.top_k)
    judged = training.judge(views, training.collect_routing(model.engine, [test]), family.layers, family.experts, family.top_k)
    model.close()
    predictor.save_views(views, package)
    return {view: report["recall"] for view, report in judged.items()}


def router_views(family: Family) -> dict[str, predictor.View]:
    """Every view, with the maps of its layer's router applied to the current state or embedding; norm weights are one."""
    weights, shape = SeededWeights(), (family.experts, family.hidden)
    maps = np.zeros((family.layers, family.hidden + 1, family.experts), np.float32)
    for layer in range(family.layers):
        gate = weights.tensor(f"model.layers.{layer}.mlp.gate.weight", shape)
        maps[layer, :-1] = (gate - gate.mean(axis=0)).T
    history = np.zeros((family.layers, 2 * family.experts, family.experts), np.float32)
    token = np.concatenate([maps[:, :-1], history, maps[:, -1:]], axis=1)
    never = np.tile(np.array([0, training.NEVER], np.float32), (family.layers, 1))
    return {view: predictor.View(token if view == "token" else maps, never.copy()) for view in predictor.VIEWS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", type=int, default=32, help="weights that share a scale")
    parser.add_argument("--train", type=int, default=0, metavar="TOKENS", help="calibrate a predictor too")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    package = seeded_package(args.block)
    print(package.folder)
    for view, recall in train_predictor(package, args.train, args.threads).items() if args.train else ():
        print(f"{view:<6} recall at k, 2k, 4k: {', '.join(f'{share:.3f}' for share in recall)}")


if __name__ == "__main__":
    main()
