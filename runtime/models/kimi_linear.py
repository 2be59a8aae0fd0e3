"""Kimi-Linear: layers of delta nets that fade by channel (KDA), latent attention without positions, DeepSeek-V3's experts."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.errors import ModelError
from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.graphs.quantize import FLOAT32, Precision
from runtime.models import deepseek
from runtime.models.decoder import Shapes
from runtime.models.delta_rule import run_delta_rule, unit_heads
from runtime.models.recurrent import RecurrentDecoder, causal_convolution, silu
from runtime.models.sizes import check_layer_types

NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Keys of published configs → DeepSeek's."""
LINEAR = {"full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size"}
"""Keys of linear_attn_config in this variant."""
ONLY = {
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}
"""Keys of which only these values are built."""


@dataclass(frozen=True, kw_only=True)
class KimiLinear(RecurrentDecoder, deepseek.Deepseek):
    """Sizes of a delta net: heads, their dimensions, and the tokens that its convolutions see."""

    linear_heads: int
    linear_dim: int
    kernel: int

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.linear_heads * self.linear_dim

    def states(self, layer: int) -> Shapes:
        """The last rows of the convolutions' inputs, and a matrix per head."""
        matrices = (self.linear_heads, self.linear_dim, self.linear_dim)
        return ((self.kernel - 1, 3 * self.width), matrices) if layer in self.recurrent else ()

    def mixed(self, g: GraphBuilder, checkpoint: Checkpoint, prefix: str, normed: str) -> str:
        """The delta net of one layer."""
        name, width, precision = prefix + "self_attn.", self.width, self.precisions.attention
        both = [checkpoint.tensor(f"{name}{part}_proj.weight", (width, self.hidden)) for part in "qkv"]
        rows = g.linear(normed, "in_proj", np.concatenate(both), precision)
        kernels = [checkpoint.tensor(f"{name}{part}_conv1d.weight", (width, 1, self.kernel))[:, 0] for part in "qkv"]
        rows = silu(g, causal_convolution(g, rows, np.concatenate(kernels)))
        heads = self._remember(g, checkpoint, name, rows, normed)
        heads = self.norm(g, checkpoint, heads, name + "o_norm", self.linear_dim)
        opened = g.node("Sigmoid", [self._narrow(g, checkpoint, normed, name + "g", precision)])
        gated = g.node("Mul", [g.node("Reshape", [heads, g.ints(-1, width)]), opened])
        return g.linear(gated, "out_proj", checkpoint.tensor(name + "o_proj.weight", (self.hidden, width)), precision)

    def _narrow(self, g: GraphBuilder, checkpoint: Checkpoint, rows: str, name: str, precision: Precision) -> str:
        """A projection to all channels through as many dimensions as a head has."""
        shapes = {"a": (self.linear_dim, self.hidden), "b": (self.width, self.linear_dim)}
        for part, shape in shapes.items():
            rows = g.linear(rows, f"{name[-1]}_{part}", checkpoint.tensor(f"{name}_{part}_proj.weight", shape), precision)
        return rows

    def _remember(self, g: GraphBuilder, checkpoint: Checkpoint, name: str, rows: str, normed: str) -> str:
        """The heads' reads from their matrices [T, heads, 1, D]; what decides how long they last is not rounded."""
        heads, dim, width = self.linear_heads, self.linear_dim, self.width
        q, k, v = g.split(rows, width, width, width)
        q = g.node("Mul", [unit_heads(g, q, heads, dim), g.number(dim**-0.5)])
        v = g.node("Reshape", [v, g.ints(-1, heads, 1, dim)])
        weight = checkpoint.tensor(name + "b_proj.weight", (heads, self.hidden))
        beta = g.node("Sigmoid", [g.linear(normed, "b", weight, FLOAT32)])
        bias = g.weight("dt_bias", checkpoint.tensor(name + "dt_bias", (width,)))
        steps = g.node("Softplus", [g.node("Add", [self._narrow(g, checkpoint, normed, name + "f", FLOAT32), bias])])
        rate = -np.exp(checkpoint.tensor(name + "A_log", (1, 1, heads, 1))).reshape(heads, 1, 1)
        steps = g.node("Mul", [g.node("Reshape", [steps, g.ints(-1, heads, dim, 1)]), g.weight("rate", rate)])
        inputs = [q, unit_heads(g, k, heads, dim), v, g.node("Reshape", [beta, g.ints(-1, heads, 1, 1)]), g.node("Exp", [steps])]
        return run_delta_rule(g, inputs, heads, dim, dim, fading=dim)


def read(config: dict[str, Any]) -> KimiLinear:
    """Sizes from config.json, in the published layout or transformers'."""
    for key, value in ONLY.items():
        if config.get(key, value) != value:
            raise ModelError(f"{key} {config[key]!r} is not supported: this runtime builds {value!r}")
    config = {NAMES.get(key, key): value for key, value in config.items()}
    layers, linear = int(config["num_hidden_layers"]), config.get("linear_attn_config") or {}
    if unknown := sorted(linear.keys() - LINEAR):
        raise ModelError(f"{unknown[0]} in linear_attn_config is not supported: this runtime builds Kimi-Linear's variant")
    kinds = config.get("layer_types") or _listed_kinds(linear, layers)
    check_layer_types({"layer_types": kinds, "num_hidden_layers": layers}, ("full_attention", "linear_attention"))
    plain = {key: value for key, value in config.items() if key not in ("layer_types", "rope_scaling", "rope_parameters")}
    return deepseek.read(
        {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "rope_interleave": False} | plain,
        KimiLinear,
        unturned=frozenset(range(layers)),
        recurrent=frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        linear_heads=int(linear.get("num_heads", config.get("linear_num_heads", 32))),
        linear_dim=int(linear.get("head_dim", config.get("linear_head_dim", 128))),
        kernel=int(linear.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4))),
    )


def _listed_kinds(linear: dict[str, Any], layers: int) -> list[str]:
    """The kind of each layer by the published lists, which count from 1."""
    full = {int(layer) for layer in linear.get("full_attn_layers") or ()}
    kda = {int(layer) for layer in linear.get("kda_layers") or ()}
    if full & kda or full | kda != set(range(1, layers + 1)):
        raise ModelError(f"linear_attn_config names not each of {layers} layers once: take the config that came with the weights")
    return ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(layers)]
