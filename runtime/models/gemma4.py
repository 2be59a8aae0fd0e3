"""Gemma 4 with experts: heads that differ by layer, keys used as values, an MLP parallel to the experts, norms on both sides."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from runtime.errors import ModelError
from runtime.graphs.builder import GraphBuilder, Store
from runtime.graphs.checkpoint import Checkpoint
from runtime.graphs.quantize import FLOAT32
from runtime.models.decoder import LOGITS, Decoder, ExpertWeights
from runtime.models.rope import Rope, read_rope
from runtime.models.routers import KINDS, Router
from runtime.models.sizes import LAYER_TYPES, common_sizes, layer_kinds, text_part, windows_of

FULL, SLIDING = LAYER_TYPES
ACTIVATION = "gelu_pytorch_tanh"
EVERY = 6
"""One in this many layers sees all tokens, if the config does not list kinds of layers."""
NOT_BUILT = {
    "hidden_size_per_layer_input": "embeddings of their own for each layer",
    "num_kv_shared_layers": "layers that share keys and values",
}


@dataclass(frozen=True)
class Heads:
    """Heads of the layers that see all tokens. `values_are_keys`: the key projection provides the values too."""

    head_dim: int
    kv_heads: int
    rope: Rope
    values_are_keys: bool


@dataclass(frozen=True, kw_only=True)
class Gemma4(Decoder):
    """The sizes are those of layers with a window; `full` replaces them in the layers `full_at`."""

    full: Heads
    full_at: frozenset[int]
    values_are_keys: bool = False

    FINISHED = True

    @cached_property
    def _seeing_all(self) -> "Gemma4":
        heads = self.full
        sizes: dict[str, Any] = {"head_dim": heads.head_dim, "kv_heads": heads.kv_heads, "rope": heads.rope}
        return replace(self, **sizes, values_are_keys=heads.values_are_keys)

    def at(self, layer: int) -> "Gemma4":
        """The family with the heads and rotary positions of this layer."""
        return self._seeing_all if layer in self.full_at else self

    def check_heads(self) -> None:
        """Refuse heads that ONNX Runtime's attention does not support, in either kind of layer."""
        super().check_heads()
        if self.full_at:
            Decoder.check_heads(self._seeing_all)

    def attention(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Attention with the heads of this layer."""
        return Decoder.attention(self.at(layer), checkpoint, layer, store)

    def portable_attention(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Attention with the heads of this layer, in plain operators."""
        return Decoder.portable_attention(self.at(layer), checkpoint, layer, store)

    def projections(self) -> list[tuple[str, int]]:
        """The projections; of values only if keys are not used as values."""
        return super().projections()[: 2 if self.values_are_keys else 3]

    def projected(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, fused: bool) -> list[str]:
        """Queries, keys and values, each head normed, values without a weight."""
        prefix = f"model.layers.{layer}.self_attn."
        packed = self.packed_projection(g, checkpoint, layer)
        own, others = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, *v = g.split(packed, own, others) if self.values_are_keys else self.heads_of(g, packed)
        values = self.normed_heads(g, v[0] if v else k, prefix + "v_norm", np.ones(self.head_dim, np.float32), self.kv_heads)
        q = self.head_norm(g, checkpoint, q, prefix + "q_norm", self.heads)
        return [q, self.head_norm(g, checkpoint, k, prefix + "k_norm", self.kv_heads), values]

    def added(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, projected: str) -> str:
        """The output of attention after a norm."""
        return self.norm(g, checkpoint, projected, f"model.layers.{layer}.post_attention_layernorm", self.hidden)

    def route(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """The router, with a separate norm of its input; outputs as in the common decoder."""
        prefix = f"model.layers.{layer}."
        g = GraphBuilder(f"router_{layer}", store)
        g.input("hidden", ("T", self.hidden))
        self.norm(g, checkpoint, "hidden", prefix + "pre_feedforward_layernorm_2", self.hidden, "normed")
        scale = checkpoint.tensor(prefix + "router.scale", (self.hidden,)) * np.float32(self.hidden**-0.5)
        rows = self.rms(g, "hidden", "router.norm", scale)
        weight = checkpoint.tensor(prefix + "router.proj.weight", (self.experts, self.hidden))
        g.weight("factors", checkpoint.tensor(prefix + "router.per_expert_scale", (self.experts,)))
        KINDS[self.router.kind](g, g.linear(rows, "gate", weight, FLOAT32, output=LOGITS), self.router)
        self.routed_outputs(g)
        return g.model()

    def shared(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """The MLP parallel to the experts, between two norms. Inputs rows [T, H], not normed; outputs out [T, H]."""
        prefix = f"model.layers.{layer}."
        g = GraphBuilder(f"shared_{layer}", store)
        g.input("rows", ("T", self.hidden))
        normed = self.norm(g, checkpoint, "rows", prefix + "pre_feedforward_layernorm", self.hidden)
        weights = self.mlp_weights(checkpoint, prefix + "mlp", self.shared_width)
        given = self.gated(g, normed, weights, "mlp_out", self.precisions.attention)
        self.norm(g, checkpoint, given, prefix + "post_feedforward_layernorm_1", self.hidden, "out")
        g.output("out", ("T", self.hidden))
        return g.model()

    def finish(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Norm of the experts' sum, norm of the total, residual, and the layer's factor."""
        prefix = f"model.layers.{layer}."
        g = GraphBuilder(f"norm_{layer}", store)
        for name in ("hidden", "common", "routed"):
            g.input(name, ("T", self.hidden))
        routed = self.norm(g, checkpoint, "routed", prefix + "post_feedforward_layernorm_2", self.hidden)
        both = g.node("Add", ["common", routed])
        both = self.norm(g, checkpoint, both, prefix + "post_feedforward_layernorm", self.hidden)
        factor = g.weight("layer_scalar", checkpoint.tensor(prefix + "layer_scalar", (1,)))
        g.node("Mul", [g.node("Add", ["hidden", both]), factor], "hidden_out")
        g.output("hidden_out", ("T", self.hidden))
        return g.model()

    def activation(self, g: GraphBuilder, gate: str, up: str) -> str:
        """GELU in its tanh form, which is x * sigmoid(2 u), times up."""
        cube = g.node("Mul", [g.node("Mul", [gate, gate]), g.number(0.044715)])
        inner = g.node("Mul", [gate, g.node("Add", [cube, g.number(1.0)])])
        opened = g.node("Sigmoid", [g.node("Mul", [inner, g.number(2 * (2 / np.pi) ** 0.5)])])
        return g.node("Mul", [g.node("Mul", [gate, opened]), up])

    def expert_weights(self, checkpoint: Checkpoint, layer: int, expert: int) -> ExpertWeights:
        """Slices of two tensors of the layer."""
        prefix = f"model.layers.{layer}.experts."
        return self.slices(checkpoint, prefix + "gate_up_proj", prefix + "down_proj", expert)


def read(config: dict[str, Any]) -> Gemma4:
    """Sizes from config.json, or from its text part if it has several parts."""
    config = {"tie_word_embeddings": True} | text_part(config, tied=True)
    _refuse_unsupported(config)
    kinds = layer_kinds(config, lambda layer: bool((layer + 1) % EVERY))
    # As in transformers: the last layer sees all tokens.
    kinds = [*kinds[:-1], FULL] if kinds[-1] == SLIDING else kinds
    used = {"hidden_act": "silu", "num_experts_per_tok": config["top_k_experts"], "layer_types": kinds}
    sizes = common_sizes({"head_dim": 256, "num_key_value_heads": 4} | config | used) | {"scale": 1.0}
    return Gemma4(
        **sizes,
        rope=_read_rope(config, SLIDING, sizes["head_dim"]),
        intermediate=int(config["moe_intermediate_size"]),
        router=Router("softmax_scaled", sizes["top_k"], sizes["experts"]),
        shared_width=int(config["intermediate_size"]),
        windows=windows_of(kinds, config.get("sliding_window", 512)),
        embedding_multiplier=sizes["hidden"] ** 0.5,
        logits_cap=float(config.get("final_logit_softcapping") or 0),
        full=_full_heads(config, kinds, sizes),
        full_at=frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL),
    )


def _full_heads(config: dict[str, Any], kinds: list[str], sizes: dict[str, Any]) -> Heads:
    """Heads of the layers that see all tokens, which the config gives once for all or per layer."""
    shared = bool(config.get("attention_k_eq_v"))
    heads: dict[str, Any] = {"head_dim": config.get("global_head_dim", 512)}
    if shared and config.get("num_global_key_value_heads"):
        heads["num_key_value_heads"] = config["num_global_key_value_heads"]
    if (listed := config.get("per_layer_config")) is not None:
        heads = next(iter(listed.values()), {})
        wide = {layer for layer, kind in enumerate(kinds) if kind == FULL and heads}
        named = {int(layer) for layer in listed if layer.isdecimal()}
        if wide != named or len(named) != len(listed) or any(part != heads for part in listed.values()):
            raise ModelError("per_layer_config is not supported where it names more than one change, or not for full_attention")
    head_dim = int(heads.get("head_dim") or sizes["head_dim"])
    return Heads(head_dim, int(heads.get("num_key_value_heads") or sizes["kv_heads"]), _read_rope(config, FULL, head_dim), shared)


def _read_rope(config: dict[str, Any], kind: str, head_dim: int) -> Rope:
    """Rotary positions of one kind of layer."""
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    usual: dict[str, dict[str, Any]] = {FULL: full, SLIDING: {"rope_theta": 1e4}}
    given = (config.get("rope_parameters") or usual).get(kind) or {}
    if given.get("rope_type", "default") == "default":
        given = {"rope_theta": given.get("rope_theta")}
    # transformers looks for `truncate` next to the kinds of layers, where no config has it.
    given = {name: value for name, value in given.items() if name != "truncate"}
    rope = read_rope({"rope_parameters": given, "max_position_embeddings": config.get("max_position_embeddings")}, head_dim)
    if rope.dims != head_dim or rope.long:
        raise ModelError(f"rope_parameters of {kind} turn {rope.dims} of {head_dim} dimensions: this runtime turns whole heads")
    return rope


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Refuse features that transformers supports and this runtime does not."""
    for key, what in NOT_BUILT.items():
        # transformers' default of the first is 256.
        if config.get(key, 256 if key == "hidden_size_per_layer_input" else 0):
            raise ModelError(f"{key} {config.get(key, 256)} ({what}) is not supported: this runtime builds Gemma 4 without")
    if config.get("rope_scaling"):
        raise ModelError(
            "rope_scaling is not supported: this runtime reads rope_parameters of each kind of layer, as transformers"
        )
    if not config.get("enable_moe_block"):
        raise ModelError("enable_moe_block is false: this runtime runs Mixture-of-Experts models")
    if config.get("use_bidirectional_attention") == "all":
        raise ModelError('use_bidirectional_attention "all" is not supported: this runtime looks back only')
    if (activation := config.get("hidden_activation", ACTIVATION)) != ACTIVATION:
        raise ModelError(f"hidden_activation {activation!r} is not supported: this runtime builds {ACTIVATION}")
