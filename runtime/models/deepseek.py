"""DeepSeek-V2 and V3, GLM-4.7-Flash: latent attention (MLA), group-limited routing, ungated shared experts, dense first layers.

Attention runs in the latent space (arXiv 2405.04434, 2.1.2): the key projection is folded into the queries, the value projection
into the output, so a token keeps one latent and one rotated key, [rank + rope dims], for all heads.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from runtime.graphs.builder import GraphBuilder, Store
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder
from runtime.models.rope import read_rope, rope_settings, yarn_scale
from runtime.models.routers import Router, sigmoid_router
from runtime.models.sizes import common_sizes, first_layers

LATENT_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Deepseek(Decoder):
    """`q_rank`: size of the query's latent, 0 for a plain projection; `kv_rank`: of the keys' and values'; dims per head."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    v_dim: int

    OPTIONAL = (
        ("attention_bias", False, r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|o_proj)\.bias"),
        ("mlp_bias", False, r"(mlp|shared_experts)\.(gate|up|down)_proj\.bias"),
    )
    SHARED = "shared_experts"
    FUSED_ATTENTION = False

    @property
    def key_dim(self) -> int:
        """Size of a latent and a rotated key."""
        return self.kv_rank + self.rope.dims

    @property
    def value_dim(self) -> int:
        """0, since values are the keys' latent."""
        return 0

    def attention(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Attention for the CPU: scatters new rows into the cache, whose input and output share their memory.

        Inputs hidden [T, H], cos, sin [T, 1, R], mask [T, S], past_k [S, D], rows [T, 1] (indices of the new keys).
        Outputs hidden_out [T, H], present_k [S, D].
        """
        g = GraphBuilder(f"attention_{layer}", store)
        self._inputs(g, ("S", self.key_dim))
        g.input("rows", ("T", 1), TensorProto.INT64)
        queries, new = self._latents(g, checkpoint, layer)
        keys = g.node("ScatterND", ["past_k", "rows", new], "present_k")
        self._attend(g, checkpoint, layer, queries, g.node("Unsqueeze", [keys, g.ints(0)]))
        g.output("present_k", ("S", self.key_dim))
        return g.model()

    def portable_attention(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Attention for NPUs: outputs new_k [1, T, D], separate from past_k [1, P, D]."""
        g = GraphBuilder(f"attention_{layer}", store)
        self._inputs(g, (1, "P", self.key_dim))
        queries, new = self._latents(g, checkpoint, layer)
        g.node("Unsqueeze", [new, g.ints(0)], "new_k")
        self._attend(g, checkpoint, layer, queries, g.node("Concat", ["past_k", "new_k"], axis=1))
        g.output("new_k", (1, "T", self.key_dim))
        return g.model()

    def _inputs(self, g: GraphBuilder, past: tuple[int | str, ...]) -> None:
        rope = ("T", 1, self.rope.dims)
        for name, shape in (("hidden", ("T", self.hidden)), ("cos", rope), ("sin", rope), ("mask", ("T", "S")), ("past_k", past)):
            g.input(name, shape)

    def _latents(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int) -> tuple[str, str]:
        """(queries [T, h, rank + R] in the latent space, rows [T, rank + R] that the tokens add to the cache)."""
        prefix, rope = f"model.layers.{layer}.", self.rope.dims
        normed = self.norm(g, checkpoint, "hidden", prefix + "input_layernorm", self.hidden)
        q = g.node("Reshape", [self._queries(g, checkpoint, normed, prefix), g.ints(-1, self.heads, self.nope_dim + rope)])
        nope, turning = g.split(q, self.nope_dim, rope)
        up_keys = self._up(checkpoint, prefix)[:, : self.nope_dim]
        folded = g.node("MatMul", [g.node("Transpose", [nope], perm=[1, 0, 2]), g.weight("k_up", up_keys)])
        folded = g.node("Transpose", [folded], perm=[1, 0, 2])
        queries = g.node("Concat", [folded, self.rotated(g, turning, "rotated_q")], axis=-1)
        name, width = prefix + "self_attn.kv_a_proj_with_mqa", self.kv_rank + rope
        weight, bias = checkpoint.tensor(name + ".weight", (width, self.hidden)), checkpoint.optional(name + ".bias", (width,))
        latent, key = g.split(g.linear(normed, "kv_a_proj", weight, self.precisions.attention, bias), self.kv_rank, rope)
        latent = self._latent_norm(g, checkpoint, latent, prefix + "self_attn.kv_a_layernorm", self.kv_rank)
        key = self.rotated(g, g.node("Unsqueeze", [key, g.ints(1)]), "rotated_k")
        return queries, g.node("Concat", [latent, g.node("Squeeze", [key, g.ints(1)])], axis=-1)

    def _queries(self, g: GraphBuilder, checkpoint: Checkpoint, normed: str, prefix: str) -> str:
        """Queries [T, h * (nope + R)], through a latent if the model has one."""
        width, precision = self.heads * (self.nope_dim + self.rope.dims), self.precisions.attention
        name = prefix + "self_attn.q_proj.weight"
        if not self.q_rank:
            return g.linear(normed, "q_proj", checkpoint.tensor(name, (width, self.hidden)), precision)
        name = prefix + "self_attn.q_a_proj"
        bias = checkpoint.optional(name + ".bias", (self.q_rank,))
        latent = g.linear(normed, "q_a_proj", checkpoint.tensor(name + ".weight", (self.q_rank, self.hidden)), precision, bias)
        latent = self._latent_norm(g, checkpoint, latent, prefix + "self_attn.q_a_layernorm", self.q_rank)
        weight = checkpoint.tensor(prefix + "self_attn.q_b_proj.weight", (width, self.q_rank))
        return g.linear(latent, "q_b_proj", weight, precision)

    def _latent_norm(self, g: GraphBuilder, checkpoint: Checkpoint, value: str, name: str, size: int) -> str:
        """RMS norm of a latent, whose epsilon is not in the config."""
        return replace(self, epsilon=LATENT_EPSILON).norm(g, checkpoint, value, name, size)

    def _attend(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, queries: str, keys: str) -> None:
        """Attention of all heads over one cache [1, S, rank + R], then the value projection."""
        prefix, rank = f"model.layers.{layer}.", self.kv_rank
        values = g.node("Slice", [keys, g.ints(0), g.ints(rank), g.ints(2)])
        turned = g.node("Transpose", [keys], perm=[0, 2, 1])
        mixed = self.attend(g, checkpoint, layer, queries, turned, values, self.key_dim, rank)
        mixed = g.node("Transpose", [g.node("Reshape", [mixed, g.ints(-1, self.heads, rank)])], perm=[1, 0, 2])
        up_values = self._up(checkpoint, prefix)[:, self.nope_dim :].transpose(0, 2, 1)
        mixed = g.node("Transpose", [g.node("MatMul", [mixed, g.weight("v_up", up_values)])], perm=[1, 0, 2])
        mixed = g.node("Reshape", [mixed, g.ints(-1, self.heads * self.v_dim)])
        self.finish_attention(g, checkpoint, layer, mixed, self.heads * self.v_dim)

    def _up(self, checkpoint: Checkpoint, prefix: str) -> np.ndarray:
        """The projection from the latent, by head: [h, nope + v, rank]."""
        width = self.nope_dim + self.v_dim
        weight = checkpoint.tensor(prefix + "self_attn.kv_b_proj.weight", (self.heads * width, self.kv_rank))
        return weight.reshape(self.heads, width, self.kv_rank)

    def rotated(self, g: GraphBuilder, value: str, output: str) -> str:
        """Rotary positions for pairs of neighbouring dimensions, which are separated first, alike in queries and keys."""
        if self.rope.interleaved:
            order = np.concatenate([np.arange(0, self.rope.dims, 2), np.arange(1, self.rope.dims, 2)])
            value = g.node("Gather", [value, g.ints(*order.tolist())], axis=-1)
        return super().rotated(g, value, output)


def read(config: dict[str, Any], family: type[Deepseek] = Deepseek, **further: Any) -> Any:
    """Sizes from config.json; `further`: those of another family."""
    sizes = common_sizes(config)
    third = config["model_type"] != "deepseek_v2"
    rope_dim, nope_dim = int(config["qk_rope_head_dim"]), int(config["qk_nope_head_dim"])
    sizes |= {"kv_heads": 1, "head_dim": int(config["kv_lora_rank"]) + rope_dim, "scale": _scale(config, nope_dim + rope_dim)}
    width = int(config["moe_intermediate_size"])
    return family(
        **sizes,
        **further,
        intermediate=width,
        rope=read_rope(config, rope_dim, interleaved=bool(config.get("rope_interleave", True)) if third else True),
        router=sigmoid_router(config, sizes) if third else _read_router(config, sizes),
        dense=_dense_layers(config, sizes),
        dense_width=int(config["intermediate_size"]),
        shared_width=width * int(config.get("n_shared_experts") or 0),
        q_rank=int(config.get("q_lora_rank") or 0),
        kv_rank=int(config["kv_lora_rank"]),
        nope_dim=nope_dim,
        v_dim=int(config["v_head_dim"]),
    )


def _dense_layers(config: dict[str, Any], sizes: dict[str, Any]) -> frozenset[int]:
    """Layers without experts: those that the config names, for GLM else the first one; the first ones in other families."""
    named = config["model_type"] in ("glm4_moe_lite", "kimi_linear") and config.get("mlp_layer_types")
    if not named and config["model_type"] != "glm4_moe_lite":
        return first_layers(config.get("first_k_dense_replace"), sizes)
    return frozenset(layer for layer, kind in enumerate(named or ["dense"]) if kind == "dense")


def _read_router(config: dict[str, Any], sizes: dict[str, Any]) -> Router:
    """DeepSeek-V2's router."""
    grouped = config.get("topk_method") == "group_limited_greedy"
    return Router(
        "group_limited",
        sizes["top_k"],
        sizes["experts"],
        scale=float(config.get("routed_scaling_factor", 1.0)),
        groups=int(config.get("n_group") or 1) if grouped else 1,
        top_groups=int(config.get("topk_group") or 1) if grouped else 1,
    )


def _scale(config: dict[str, Any], dims: int) -> float:
    """Factor of the attention scores; YaRN with mscale_all_dim raises it."""
    rope = rope_settings(config)
    weight = rope.get("mscale_all_dim") if rope.get("rope_type", rope.get("type", "default")) != "default" else 0
    return float(dims**-0.5 * (yarn_scale(rope["factor"], weight) ** 2 if weight else 1))
