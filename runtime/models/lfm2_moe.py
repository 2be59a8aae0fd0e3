"""LFM2-MoE: layers of gated short convolutions or of attention with normed heads, sigmoid router, dense first layers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Shapes
from runtime.models.recurrent import RecurrentDecoder, causal_convolution
from runtime.models.routers import sigmoid_router
from runtime.models.sizes import common_settings, first_layers


@dataclass(frozen=True, kw_only=True)
class Lfm2Moe(RecurrentDecoder):
    """`kernel`: number of tokens that a convolution sees; `corrected`: a bias is used in choosing experts."""

    kernel: int
    corrected: bool

    OPTIONAL = (("conv_bias", False, r"\.conv\.(in_proj|conv|out_proj)\.bias"),)
    MOE = DENSE = "feed_forward"
    PROJECTIONS = DENSE_PROJECTIONS = ("w1", "w3", "w2")
    FINAL_NORM = "model.embedding_norm"
    ATTENTION_NORM = "operator_norm"
    MLP_NORM = "ffn_norm"
    OUTPUT = "self_attn.out_proj"

    def states(self, layer: int) -> Shapes:
        """The last rows of a convolution's input."""
        return ((self.kernel - 1, self.hidden),) if layer in self.recurrent else ()

    def mixed(self, g: GraphBuilder, checkpoint: Checkpoint, prefix: str, normed: str) -> str:
        """Two gates around a convolution: c * conv(b * x)."""
        width, precision = self.hidden, self.precisions.attention
        name = prefix + "conv."
        bias = checkpoint.optional(name + "in_proj.bias", (3 * width,))
        weight = checkpoint.tensor(name + "in_proj.weight", (3 * width, width))
        b, c, x = g.split(g.linear(normed, "in_proj", weight, precision, bias), width, width, width)
        kernel = checkpoint.tensor(name + "conv.weight", (width, 1, self.kernel))[:, 0]
        bias = checkpoint.optional(name + "conv.bias", (width,))
        gated = g.node("Mul", [c, causal_convolution(g, g.node("Mul", [b, x]), kernel, bias)])
        bias = checkpoint.optional(name + "out_proj.bias", (width,))
        return g.linear(gated, "out_proj", checkpoint.tensor(name + "out_proj.weight", (width, width)), precision, bias)

    def correction(self, checkpoint: Checkpoint, prefix: str) -> np.ndarray:
        """The bias added to the scores [E] for choosing experts."""
        if not self.corrected:
            return np.zeros(self.experts, np.float32)
        return checkpoint.tensor(prefix + "feed_forward.expert_bias", (self.experts,))


def read(config: dict[str, Any]) -> Lfm2Moe:
    """Sizes from config.json."""
    config = {"rms_norm_eps": config.get("norm_eps", 1e-5), "hidden_act": "silu"} | config
    config["tie_word_embeddings"] = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    sizes = common_settings(config, 1e6, ("full_attention", "conv"))
    kernel = int(config.get("conv_L_cache", 3))
    return Lfm2Moe(
        **sizes,
        intermediate=int(config["moe_intermediate_size"]),
        router=sigmoid_router(config, sizes, floor=1e-6),
        head_norms=("q_layernorm", "k_layernorm"),
        dense=first_layers(config.get("num_dense_layers", 2), sizes),
        dense_width=int(config["intermediate_size"]),
        recurrent=frozenset(layer for layer, kind in enumerate(config["layer_types"]) if kind == "conv"),
        kernel=kernel,
        corrected=bool(config.get("use_expert_bias", True)),
    )
