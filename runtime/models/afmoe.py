"""AFMoE (Trinity): gated attention with normed heads, windows whose layers alone rotate, norms on both sides, sigmoid router."""

from typing import Any

import numpy as np
import onnx

from runtime.errors import ModelError
from runtime.graphs.builder import GraphBuilder, Store
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder
from runtime.models.routers import Router
from runtime.models.sizes import common_settings, first_layers, layer_kinds, windows_of


class Afmoe(Decoder):
    """The common decoder with a gate on attention's output and a norm after each half of a layer."""

    FINISHED = True
    GATE = "router.gate"
    SHARED = "shared_experts"
    MLP_NORM = "pre_mlp_layernorm"
    END_NORM = "post_mlp_layernorm"

    def correction(self, checkpoint: Checkpoint, prefix: str) -> np.ndarray:
        """The bias added to the scores [E] for choosing experts."""
        return checkpoint.tensor(prefix + "mlp.expert_bias", (self.experts,))

    def finish_attention(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, mixed: str, width: int) -> None:
        """Output gate, output projection and residual."""
        weight = checkpoint.tensor(f"model.layers.{layer}.self_attn.gate_proj.weight", (width, self.hidden))
        gate = g.linear("attention_input", "gate_proj", weight, self.precisions.attention)
        super().finish_attention(g, checkpoint, layer, g.node("Mul", [mixed, g.node("Sigmoid", [gate])]), width)

    def added(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, projected: str) -> str:
        """The output of attention after a norm."""
        return self.norm(g, checkpoint, projected, f"model.layers.{layer}.post_attention_layernorm", self.hidden)

    def shared(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """The expert that every token passes, after the router's norm. Inputs rows [T, H], not normed; outputs out [T, H]."""
        return self._normed_mlp(checkpoint, layer, GraphBuilder(f"shared_{layer}", store), True)

    def mlp(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """A layer without experts. Inputs hidden [T, H]; outputs hidden_out [T, H]."""
        return self._normed_mlp(checkpoint, layer, GraphBuilder(f"mlp_{layer}", store), False)

    def _normed_mlp(self, checkpoint: Checkpoint, layer: int, g: GraphBuilder, shared: bool) -> onnx.ModelProto:
        prefix, rows = f"model.layers.{layer}.", "rows" if shared else "hidden"
        name, width = (f"mlp.{self.SHARED}", self.shared_width) if shared else ("mlp", self.dense_width)
        g.input(rows, ("T", self.hidden))
        normed = self.norm(g, checkpoint, rows, prefix + self.MLP_NORM, self.hidden)
        weights = self.mlp_weights(checkpoint, prefix + name, width)
        out = self.gated(g, normed, weights, "out" if shared else "mlp_out", self.precisions.attention)
        if not shared:
            out = g.node("Add", [rows, self.norm(g, checkpoint, out, prefix + self.END_NORM, self.hidden)], "hidden_out")
        g.output(out, ("T", self.hidden))
        return g.model()

    def subgraphs(self, layer: int) -> dict[str, Any]:
        """A layer without experts ends with its MLP."""
        return {"mlp": self.mlp} if layer in self.dense else super().subgraphs(layer)


def read(config: dict[str, Any]) -> Afmoe:
    """Sizes from config.json."""
    config = {"head_dim": 128, "rms_norm_eps": 1e-5} | config
    sizes = common_settings(config)
    every = int(config.get("global_attn_every_n_layers") or 4)
    kinds = layer_kinds(config, lambda layer: bool((layer + 1) % every))
    if config.get("score_func", "sigmoid") != "sigmoid" or not config.get("route_norm", True) or config.get("n_group", 1) != 1:
        raise ModelError("score_func, route_norm and n_group of another router than the published one's are not supported")
    return Afmoe(
        **sizes,
        intermediate=int(config["moe_intermediate_size"]),
        router=Router(
            "sigmoid_groups", sizes["top_k"], sizes["experts"], renormalize=True, scale=float(config.get("route_scale", 1.0))
        ),
        dense=first_layers(config.get("num_dense_layers", 1), sizes),
        dense_width=int(config["intermediate_size"]),
        shared_width=int(config["moe_intermediate_size"]) * int(config.get("num_shared_experts", 2) or 0),
        head_norms=("q_norm", "k_norm"),
        embedding_multiplier=sizes["hidden"] ** 0.5 if config.get("mup_enabled") else 1.0,
        windows=windows_of(kinds, config.get("sliding_window", 1024)),
        unturned=frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention"),
    )
