"""Qwen3-MoE: attention with per-head norms of q and k, softmax router, SwiGLU experts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from runtime.checkpoint import Checkpoint
from runtime.errors import ModelError
from runtime.graph_builder import GraphBuilder


@dataclass(frozen=True)
class Qwen3Moe:
    """Sizes of a Qwen3-MoE model and the builders of its subgraphs (shapes: runtime.models.Family)."""

    hidden: int
    layers: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    rope_theta: float
    epsilon: float
    renormalize: bool
    tied: bool
    end_ids: tuple[int, ...]

    @property
    def expert_parameters(self) -> int:
        """Numbers in one expert's three matrices."""
        return 3 * self.hidden * self.intermediate

    def embed(self, checkpoint: Checkpoint) -> onnx.ModelProto:
        """Rows of the embedding table."""
        g = GraphBuilder("embed")
        g.input("ids", ("T",), TensorProto.INT64)
        g.weight("table", checkpoint.tensor("model.embed_tokens.weight", (self.vocabulary, self.hidden)))
        g.node("Gather", ["table", "ids"], "hidden")
        g.output("hidden", ("T", self.hidden))
        return g.model()

    def head(self, checkpoint: Checkpoint) -> onnx.ModelProto:
        """Last norm and the projection to the vocabulary."""
        name = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
        g = GraphBuilder("head")
        g.input("hidden", ("T", self.hidden))
        normed = self._norm(g, checkpoint, "hidden", "model.norm.weight", self.hidden)
        g.weight("lm_head", checkpoint.tensor(name, (self.vocabulary, self.hidden)).T)
        g.node("MatMul", [normed, "lm_head"], "logits")
        g.output("logits", ("T", self.vocabulary))
        return g.model()

    def router(self, checkpoint: Checkpoint, layer: int) -> onnx.ModelProto:
        """Norm, gate, softmax, top-k and, where the config says so, renormalisation."""
        prefix = f"model.layers.{layer}."
        g = GraphBuilder(f"router_{layer}")
        g.input("hidden", ("T", self.hidden))
        self._norm(g, checkpoint, "hidden", prefix + "post_attention_layernorm.weight", self.hidden, "normed")
        g.weight("gate", checkpoint.tensor(prefix + "mlp.gate.weight", (self.experts, self.hidden)).T)
        scores = g.node("Softmax", [g.node("MatMul", ["normed", "gate"])], axis=-1)
        values, _ = g.nodes_of("TopK", [scores, g.ints(self.top_k)], ["top" if self.renormalize else "weights", "experts"])
        if self.renormalize:
            g.node("Div", [values, g.node("ReduceSum", [values, g.ints(-1)], keepdims=1)], "weights")
        g.output("normed", ("T", self.hidden))
        g.output("experts", ("T", self.top_k), TensorProto.INT64)
        g.output("weights", ("T", self.top_k))
        return g.model()

    def expert(self, checkpoint: Checkpoint, layer: int, expert: int) -> onnx.ModelProto:
        """down(silu(gate(x)) * up(x))."""
        gate, up, down = self._expert_weights(checkpoint, layer, expert)
        g = GraphBuilder(f"expert_{layer}_{expert}")
        g.input("rows", ("T", self.hidden))
        g.weight("gate", gate.T)
        g.weight("up", up.T)
        g.weight("down", down.T)
        gated = g.node("MatMul", ["rows", "gate"], "gate_proj")
        silu = g.node("Mul", [gated, g.node("Sigmoid", [gated])], "silu")
        g.node("MatMul", [g.node("Mul", [silu, g.node("MatMul", ["rows", "up"], "up_proj")]), "down"], "out")
        g.output("out", ("T", self.hidden))
        return g.model()

    def attention(self, checkpoint: Checkpoint, layer: int) -> onnx.ModelProto:
        """Norm, projections, rotary positions, masked softmax attention over past and new keys, residual."""
        prefix, d, kv, groups = f"model.layers.{layer}.", self.head_dim, self.kv_heads, self.heads // self.kv_heads
        g = GraphBuilder(f"attention_{layer}")
        g.input("hidden", ("T", self.hidden))
        g.input("cos", ("T", 1, d))
        g.input("sin", ("T", 1, d))
        g.input("mask", ("T", "S"))
        g.input("past_k", ("P", kv, d))
        g.input("past_v", ("P", kv, d))
        normed = self._norm(g, checkpoint, "hidden", prefix + "input_layernorm.weight", self.hidden)
        q = self._rotated(g, self._normed_heads(g, checkpoint, normed, prefix, "q", self.heads), "rotated_q")
        self._rotated(g, self._normed_heads(g, checkpoint, normed, prefix, "k", kv), "new_k")
        v = self._projection(g, checkpoint, normed, prefix + "self_attn.v_proj", self.hidden, kv * d)
        g.node("Reshape", [v, g.ints(-1, kv, d)], "new_v")
        keys = g.node("Transpose", [g.node("Concat", ["past_k", "new_k"], axis=0)], perm=[1, 2, 0])
        values = g.node("Transpose", [g.node("Concat", ["past_v", "new_v"], axis=0)], perm=[1, 0, 2])
        q = g.node("Transpose", [g.node("Reshape", [q, g.ints(-1, kv, groups, d)])], perm=[1, 2, 0, 3])
        q = g.node("Reshape", [q, g.ints(kv, -1, d)])
        q = g.node("Mul", [q, g.weight("scale", np.array(d**-0.5, np.float32))])
        mask = g.node("Concat", ["mask"] * groups, axis=0)
        scores = g.node("Softmax", [g.node("Add", [g.node("MatMul", [q, keys], "scores"), mask])], axis=-1)
        mixed = g.node("Reshape", [g.node("MatMul", [scores, values], "mix"), g.ints(kv, groups, -1, d)])
        mixed = g.node("Reshape", [g.node("Transpose", [mixed], perm=[2, 0, 1, 3]), g.ints(-1, self.heads * d)])
        projected = self._projection(g, checkpoint, mixed, prefix + "self_attn.o_proj", self.heads * d, self.hidden)
        g.node("Add", ["hidden", projected], "hidden_out")
        g.output("hidden_out", ("T", self.hidden))
        g.output("new_k", ("T", kv, d))
        g.output("new_v", ("T", kv, d))
        return g.model()

    def _norm(self, g: GraphBuilder, checkpoint: Checkpoint, value: str, name: str, size: int, output: str = "") -> str:
        weight = g.weight(name, checkpoint.tensor(name, (size,)))
        return g.node("RMSNormalization", [value, weight], output, axis=-1, epsilon=self.epsilon)

    def _projection(self, g: GraphBuilder, checkpoint: Checkpoint, value: str, name: str, taken: int, given: int) -> str:
        weight = g.weight(name + ".weight", checkpoint.tensor(name + ".weight", (given, taken)).T)
        out = g.node("MatMul", [value, weight], name.rpartition(".")[2])
        if name + ".bias" in checkpoint:
            out = g.node("Add", [out, g.weight(name + ".bias", checkpoint.tensor(name + ".bias", (given,)))])
        return out

    def _normed_heads(self, g: GraphBuilder, checkpoint: Checkpoint, value: str, prefix: str, which: str, heads: int) -> str:
        """Project to heads and norm each: [T, heads, D]. The norm runs on [T*heads, D], where HTP is right for every D."""
        projected = self._projection(g, checkpoint, value, f"{prefix}self_attn.{which}_proj", self.hidden, heads * self.head_dim)
        rows = g.node("Reshape", [projected, g.ints(-1, self.head_dim)])
        normed = self._norm(g, checkpoint, rows, f"{prefix}self_attn.{which}_norm.weight", self.head_dim)
        return g.node("Reshape", [normed, g.ints(-1, heads, self.head_dim)])

    def _rotated(self, g: GraphBuilder, value: str, output: str) -> str:
        """Rotary positions; the sign of the swapped half lies in the input `sin`."""
        half = self.head_dim // 2
        first, second = g.nodes_of("Split", [value, g.ints(half, half)], [f"{output}_1", f"{output}_2"], axis=-1)
        swapped = g.node("Concat", [second, first], axis=-1)
        return g.node("Add", [g.node("Mul", [value, "cos"]), g.node("Mul", [swapped, "sin"])], output)

    def _expert_weights(self, checkpoint: Checkpoint, layer: int, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """gate, up [I, H] and down [H, I], from separate tensors or from transformers' fused ones."""
        prefix, h, i = f"model.layers.{layer}.mlp.experts.", self.hidden, self.intermediate
        if prefix + "gate_up_proj" in checkpoint:
            both = checkpoint.tensor(prefix + "gate_up_proj", (self.experts, 2 * i, h), expert)
            return both[:i], both[i:], checkpoint.tensor(prefix + "down_proj", (self.experts, h, i), expert)
        one = f"{prefix}{expert}."
        return (
            checkpoint.tensor(one + "gate_proj.weight", (i, h)),
            checkpoint.tensor(one + "up_proj.weight", (i, h)),
            checkpoint.tensor(one + "down_proj.weight", (h, i)),
        )


def _rope_theta(config: dict[str, Any]) -> float:
    """transformers 5 writes rope_parameters, earlier releases rope_theta (and rope_scaling)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelError(f"rotary scaling {kind!r} is not supported: use a model with plain rotary positions")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def read(config: dict[str, Any]) -> Qwen3Moe:
    """Sizes from config.json; parts of the family this runtime does not build are refused."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError("some layers of this model have a dense MLP: this runtime builds models whose every layer has experts")
    if config.get("use_sliding_window"):
        raise ModelError("this model uses sliding-window attention: this runtime builds full attention only")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"activation {config['hidden_act']!r} is not supported: this runtime builds silu")
    end = config.get("eos_token_id")
    heads = int(config["num_attention_heads"])
    return Qwen3Moe(
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        experts=int(config.get("num_experts") or config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["moe_intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        context=int(config.get("max_position_embeddings", 32768)),
        rope_theta=_rope_theta(config),
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
        renormalize=bool(config.get("norm_topk_prob", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
        end_ids=tuple(end) if isinstance(end, list) else () if end is None else (int(end),),
    )
