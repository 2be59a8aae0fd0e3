"""Nemotron-H with experts: each layer is one of Mamba-2, attention without positions, experts, an MLP; matrices have no gates.

transformers raises steps of Mamba-2 to time_step_min in prefill, not in decode; here they have no bound, as published.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from runtime.errors import ModelError
from runtime.graphs.builder import GraphBuilder, Store
from runtime.graphs.checkpoint import Checkpoint
from runtime.graphs.quantize import Precision
from runtime.models.decoder import ExpertWeights, Maker
from runtime.models.mamba2 import Mamba2Decoder, check_time_steps
from runtime.models.routers import sigmoid_router
from runtime.models.sizes import check_layer_types, common_settings

LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
"""Letters of hybrid_override_pattern → transformers' names of layers."""
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
ONLY = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mlp_bias": False, "attention_bias": False}
"""Keys of which only these values are built."""


@dataclass(frozen=True, kw_only=True)
class NemotronH(Mamba2Decoder):
    """attention_layers: layers with attention."""

    attention_layers: frozenset[int]

    OPTIONAL = (
        ("use_conv_bias", True, r"mamba\.conv1d\.bias"),
        ("use_bias", False, r"mamba\.(in|out)_proj\.bias"),
    )
    SHARED = "shared_experts"
    ATTENTION_NORM = MLP_NORM = "norm"

    def attends(self, layer: int) -> bool:
        """Whether this layer is attention."""
        return layer in self.attention_layers

    @property
    def expert_parameters(self) -> int:
        """Number of weights in an expert's two matrices."""
        return 2 * self.hidden * self.intermediate

    def attention(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Attention or Mamba-2; layers of another kind begin with what enters them."""
        if layer in self.attention_layers | self.recurrent:
            return super().attention(checkpoint, layer, store)
        return self._unchanged(f"attention_{layer}")

    def subgraphs(self, layer: int) -> dict[str, Maker]:
        """Layers of attention or Mamba-2 end with it."""
        if layer in self.attention_layers | self.recurrent:
            return {"mlp": lambda checkpoint, layer, store: self._unchanged(f"mlp_{layer}")}
        return super().subgraphs(layer)

    def _unchanged(self, name: str) -> onnx.ModelProto:
        """Input hidden [T, H], output hidden_out, the same."""
        g = GraphBuilder(name)
        g.input("hidden", ("T", self.hidden))
        g.node("Identity", ["hidden"], "hidden_out")
        g.output("hidden_out", ("T", self.hidden))
        return g.model()

    def gated(self, g: GraphBuilder, rows: str, weights: ExpertWeights, output: str, precision: Precision) -> str:
        """down(relu(up(x))²)."""
        active = g.node("Relu", [g.linear(rows, "up", weights.up, precision)])
        return g.linear(g.node("Mul", [active, active]), "down", weights.down, precision, None, output)

    def mlp_weights(self, checkpoint: Checkpoint, prefix: str, width: int) -> ExpertWeights:
        """Two matrices."""
        up = checkpoint.tensor(f"{prefix}.up_proj.weight", (width, self.hidden))
        down = checkpoint.tensor(f"{prefix}.down_proj.weight", (self.hidden, width))
        return ExpertWeights(np.empty((0, self.hidden)), up, down)


def read(config: dict[str, Any]) -> NemotronH:
    """Sizes from config.json, in the published layout or transformers'."""
    for key, value in ONLY.items():
        if config.get(key, value) != value:
            raise ModelError(f"{key} {config[key]!r} is not supported: this runtime builds {value!r}")
    if config.get("moe_latent_size"):
        raise ModelError(f"moe_latent_size {config['moe_latent_size']} is not supported: this runtime builds experts without")
    check_time_steps(config.get("time_step_limit"))
    kinds = _layer_kinds(config)
    at = {kind: frozenset(layer for layer, name in enumerate(kinds) if name == kind) for kind in LETTERS.values()}
    plain = {key: value for key, value in config.items() if key not in ("layer_types", "layers_block_type")}
    defaults = {"head_dim": 128, "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5), "num_experts_per_tok": 2}
    sizes = common_settings(defaults | plain | {"num_hidden_layers": len(kinds), "hidden_act": "silu"})
    heads, groups = int(config.get("mamba_num_heads", 128)), int(config.get("n_groups", 8))
    if heads % groups:
        raise ModelError(f"n_groups {groups} does not divide mamba_num_heads {heads}: take the model's own config")
    return NemotronH(
        **sizes,
        intermediate=int(config["moe_intermediate_size"]),
        router=sigmoid_router(config, sizes),
        dense=frozenset(range(len(kinds))) - at["moe"],
        dense_width=int(config.get("intermediate_size") or 0),
        shared_width=int(config.get("moe_shared_expert_intermediate_size") or config.get("intermediate_size") or 0),
        unturned=frozenset(range(len(kinds))),
        recurrent=at["linear_attention"],
        attention_layers=at["full_attention"],
        mamba_heads=heads,
        mamba_dim=int(config.get("mamba_head_dim", 64)),
        groups=groups,
        state=int(config.get("ssm_state_size", 128)),
        kernel=int(config.get("conv_kernel", 4)),
    )


def _layer_kinds(config: dict[str, Any]) -> list[str]:
    """transformers' name of each layer's kind."""
    listed = config.get("layers_block_type") or config.get("layer_types")
    named = [OLDER.get(kind, kind) for kind in listed or ()]
    kinds = named or [LETTERS.get(letter, letter) for letter in config["hybrid_override_pattern"]]
    check_layer_types({"layer_types": kinds, "num_hidden_layers": len(kinds)}, tuple(LETTERS.values()))
    return kinds
