"""gpt-oss: attention sinks, sliding windows in every other layer, biases, a clamped SwiGLU, softmax over the chosen experts."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder, ExpertWeights
from runtime.models.routers import Router
from runtime.models.sizes import common_settings, layer_kinds, windows_of

MXFP4_BLOCK = 32
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Rotary positions where config.json says nothing of them, as in transformers."""
_STEPS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_STEPS, *(-step for step in _STEPS)], np.float32)
"""The values of the 16 codes of a 4-bit float (OCP Microscaling Formats)."""


@dataclass(frozen=True, kw_only=True)
class GptOss(Decoder):
    """`alpha` and `limit`: constants of the activation."""

    alpha: float = 1.702
    limit: float = 7.0

    OPTIONAL = (("attention_bias", True, r"self_attn\.[qkvo]_proj\.bias"), ("", True, r"mlp\.router\.bias"))
    GATE = "router"

    def sinks(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int) -> str:
        """One logit per head that takes part in the softmax without a value."""
        name = f"model.layers.{layer}.self_attn.sinks"
        return g.weight(name, checkpoint.tensor(name, (self.heads,)))

    def activation(self, g: GraphBuilder, gate: str, up: str) -> str:
        """(clip(up) + 1) * gate * sigmoid(alpha * gate), with gate clipped only from above."""
        gate = g.node("Min", [gate, g.number(self.limit)])
        up = g.node("Clip", [up, g.number(-self.limit), g.number(self.limit)])
        glu = g.node("Mul", [gate, g.node("Sigmoid", [g.node("Mul", [gate, g.number(self.alpha)])])])
        return g.node("Mul", [g.node("Add", [up, g.number(1.0)]), glu])

    def expert_weights(self, checkpoint: Checkpoint, layer: int, expert: int) -> ExpertWeights:
        """Slices of fused tensors [E, in, out], in which gate and up columns alternate."""
        prefix, e, width, hidden = f"model.layers.{layer}.mlp.experts.", self.experts, self.intermediate, self.hidden
        bias = checkpoint.tensor(prefix + "gate_up_proj_bias", (e, 2 * width), expert)
        order = [*range(0, 2 * width, 2), *range(1, 2 * width, 2)]
        down_bias = checkpoint.tensor(prefix + "down_proj_bias", (e, hidden), expert)
        if prefix + "gate_up_proj_blocks" in checkpoint:
            both, down = (self._mxfp4(checkpoint, prefix + name, *shape, expert) for name, shape in self._shapes().items())
        else:
            both = checkpoint.tensor(prefix + "gate_up_proj", (e, hidden, 2 * width), expert).T
            down = checkpoint.tensor(prefix + "down_proj", (e, width, hidden), expert).T
        return ExpertWeights(both[0::2], both[1::2], down, bias[order], down_bias)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        return {"gate_up_proj": (2 * self.intermediate, self.hidden), "down_proj": (self.hidden, self.intermediate)}

    def _mxfp4(self, checkpoint: Checkpoint, name: str, rows: int, columns: int, expert: int) -> np.ndarray:
        """Dequantize a matrix [rows, columns] whose blocks of 32 numbers share a power of two."""
        blocks = columns // MXFP4_BLOCK
        packed = checkpoint.packed(name + "_blocks", (self.experts, rows, blocks, MXFP4_BLOCK // 2), expert)
        scales = checkpoint.packed(name + "_scales", (self.experts, rows, blocks), expert)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, blocks, MXFP4_BLOCK)
        exponents = scales.astype(np.int32)[..., None] - 127
        whole: np.ndarray = np.ldexp(E2M1[codes], exponents).reshape(rows, columns)
        return whole


def read(config: dict[str, Any]) -> GptOss:
    """Sizes from config.json."""
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = config | {"rope_parameters": YARN}
    sizes = common_settings(config, 150000.0)
    kinds = layer_kinds(config, lambda layer: layer % 2 == 0)
    return GptOss(
        **sizes,
        intermediate=int(config["intermediate_size"]),
        router=Router("topk_softmax", sizes["top_k"], sizes["experts"]),
        windows=windows_of(kinds, config.get("sliding_window")),
        alpha=float(config.get("swiglu_alpha") or 1.702),
        limit=float(config.get("swiglu_limit") or 7.0),
    )
