"""Shared by all families: sizes, and the subgraphs of a pre-norm decoder with routed experts. Families override what differs.

Shapes: T rows of one run, H hidden, h heads over KV key heads of D dimensions, P past rows, S = P + T, E experts, k chosen ones.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import TensorProto

from runtime.errors import ModelError
from runtime.graphs.builder import MICROSOFT, GraphBuilder, Store
from runtime.graphs.checkpoint import Checkpoint
from runtime.graphs.quantize import FLOAT32, Precision
from runtime.models.rope import Rope
from runtime.models.routers import CORRECTED, KINDS, Router

Shapes = tuple[tuple[int, ...], ...]
OptionalTensors = tuple[tuple[str, bool, str], ...]
Maker = Callable[[Checkpoint, int, Store | None], onnx.ModelProto]
LOGITS = "gate_out"
HEAD_MULTIPLE = 16


@dataclass(frozen=True)
class ExpertWeights:
    """One gated MLP: gate and up [I, H], down [H, I], biases or None."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None


@dataclass(frozen=True)
class Precisions:
    """How weights are stored, by their use."""

    experts: Precision = FLOAT32
    attention: Precision = FLOAT32
    head: Precision = FLOAT32


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a model and the builders of its subgraphs.

    windows: rows of sliding-window attention per layer, 0 for all. dense: layers whose MLP has no experts, `dense_width` wide.
    shared_width: of the expert that every token passes, 0 for none. rotary_order: a head's dimensions in the order in which
    its halves are pairs; empty if the checkpoint has this order. logits_cap: bound that logits approach, 0 for none.
    unturned: layers whose heads do not rotate.
    OPTIONAL: (flag of config.json, its default, pattern of names) of tensors that a checkpoint has if the flag is true; others
    that subgraphs ask for as optional it must not have. An empty flag stands for the default.
    FINISHED: a layer ends with `finish`, and its shared expert reads the router's input, not the norm of it.
    """

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
    rope: Rope
    router: Router
    epsilon: float
    tied: bool
    end_ids: tuple[int, ...]
    scale: float
    windows: tuple[int, ...] = ()
    dense: frozenset[int] = frozenset()
    dense_width: int = 0
    shared_width: int = 0
    rotary_order: tuple[int, ...] = ()
    head_norms: tuple[str, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float = 0.0
    unturned: frozenset[int] = frozenset()
    precisions: Precisions = field(default=Precisions(), repr=False)

    OPTIONAL: ClassVar[OptionalTensors] = (("attention_bias", False, r"self_attn\.[qkvo]_proj\.bias"),)
    MOE = "mlp"
    GATE = "gate"
    SHARED = "shared_expert"
    PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
    DENSE = "mlp"
    DENSE_PROJECTIONS = PROJECTIONS
    FINAL_NORM = "model.norm"
    ATTENTION_NORM = "input_layernorm"
    MLP_NORM = "post_attention_layernorm"
    END_NORM = "post_feedforward_layernorm"
    OUTPUT = "self_attn.o_proj"
    FUSED_ATTENTION = True
    PORTABLE = True
    FINISHED = False

    @property
    def routed(self) -> list[int]:
        """Layers with experts."""
        return [layer for layer in range(self.layers) if layer not in self.dense]

    @property
    def expert_parameters(self) -> int:
        """Number of weights in an expert's three matrices."""
        return 3 * self.hidden * self.intermediate

    @property
    def key_dim(self) -> int:
        """Numbers that a key head stores per token."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Numbers that a value head stores per token; 0 if values are part of the keys."""
        return self.head_dim

    def flag_of(self, name: str, config: dict[str, Any]) -> tuple[str, bool]:
        """(flag of config.json that decides whether a checkpoint has this optional tensor, whether it does)."""
        for flag, default, pattern in self.OPTIONAL:
            if re.search(pattern, name):
                return flag, bool(config.get(flag, default))
        return "", False

    def at(self, layer: int) -> "Decoder":
        """The family with the heads and rotary positions of this layer, if layers differ."""
        return replace(self, rope=Rope((0.0,) * (self.rope.dims // 2))) if layer in self.unturned else self

    def check_heads(self) -> None:
        """Refuse heads that cannot share keys, or that ONNX Runtime's fused attention cannot rotate."""
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            problem = f"num_attention_heads {self.heads} cannot share num_key_value_heads {self.kv_heads}"
            raise ModelError(f"{problem}, which must divide it: use the model's own config")
        turned = self.rope.dims
        if self.FUSED_ATTENTION and (self.head_dim % HEAD_MULTIPLE or turned % HEAD_MULTIPLE):
            problem = f"heads of {self.head_dim} dimensions (head_dim), {turned} of them rotary"
            raise ModelError(f"{problem}, are not supported: ONNX Runtime's attention needs multiples of {HEAD_MULTIPLE}")

    def window(self, layer: int) -> int:
        """Number of rows that this layer's attention sees, the current one included; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def attends(self, layer: int) -> bool:
        """Whether this layer has attention, and so keys and values."""
        return True

    def states(self, layer: int) -> Shapes:
        """Shapes of the states that this layer keeps instead of keys and values; none for attention."""
        return ()

    def subgraphs(self, layer: int) -> dict[str, Maker]:
        """Kind → builder of the layer's subgraphs after attention, without experts, in the order in which they run."""
        graphs: dict[str, Maker] = {"mlp": self.mlp} if layer in self.dense else {"router": self.route}
        if self.shared_width and layer not in self.dense:
            graphs["shared"] = self.shared
        return graphs | ({"norm": self.finish} if self.FINISHED else {})

    def head(self, checkpoint: Checkpoint, store: Store | None) -> onnx.ModelProto:
        """Inputs hidden [T, H]; outputs logits [T, V]."""
        g = GraphBuilder("head", store)
        g.input("hidden", ("T", self.hidden))
        normed = self.norm(g, checkpoint, "hidden", self.FINAL_NORM, self.hidden)
        name = "model.embed_tokens" if self.tied else "lm_head"
        weight = checkpoint.tensor(name + ".weight", (self.vocabulary, self.hidden)) / np.float32(self.logits_divisor)
        bias = checkpoint.optional("lm_head.bias", (self.vocabulary,))
        logits = g.linear(normed, "lm_head", weight, self.precisions.head, bias, "" if self.logits_cap else "logits")
        if self.logits_cap:
            share = g.node("Tanh", [g.node("Div", [logits, g.number(self.logits_cap)])])
            g.node("Mul", [share, g.number(self.logits_cap)], "logits")
        g.output("logits", ("T", self.vocabulary))
        return g.model()

    def route(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Inputs hidden [T, H]; outputs normed [T, H], experts [T, k] (int64), weights [T, k]."""
        prefix = f"model.layers.{layer}."
        gate = f"{prefix}{self.MOE}.{self.GATE}"
        g = GraphBuilder(f"router_{layer}", store)
        g.input("hidden", ("T", self.hidden))
        self.norm(g, checkpoint, "hidden", prefix + self.MLP_NORM, self.hidden, "normed")
        weight = checkpoint.tensor(gate + ".weight", (self.experts, self.hidden))
        logits = g.linear("normed", "gate", weight, FLOAT32, checkpoint.optional(gate + ".bias", (self.experts,)), LOGITS)
        if self.router.kind in CORRECTED:
            g.weight("correction", self.correction(checkpoint, prefix))
        KINDS[self.router.kind](g, logits, self.router)
        self.routed_outputs(g)
        return g.model()

    def routed_outputs(self, g: GraphBuilder) -> None:
        """Declare the outputs of a router."""
        g.output("normed", ("T", self.hidden))
        g.output("experts", ("T", self.top_k), TensorProto.INT64)
        g.output("weights", ("T", self.top_k))

    def correction(self, checkpoint: Checkpoint, prefix: str) -> np.ndarray:
        """The bias added to the scores [E], only for choosing experts."""
        return checkpoint.tensor(f"{prefix}{self.MOE}.{self.GATE}.e_score_correction_bias", (self.experts,))

    def expert(self, checkpoint: Checkpoint, layer: int, expert: int, store: Store | None) -> onnx.ModelProto:
        """Inputs rows [T, H]; outputs out [T, H]."""
        g = GraphBuilder("expert", store)
        g.input("rows", ("T", self.hidden))
        self.gated(g, "rows", self.expert_weights(checkpoint, layer, expert), "out", self.precisions.experts)
        g.output("out", ("T", self.hidden))
        return g.model()

    def shared(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """The expert that every token passes. Inputs rows [T, H]; outputs out [T, H]."""
        prefix = f"model.layers.{layer}.{self.MOE}.{self.SHARED}"
        g = GraphBuilder(f"shared_{layer}", store)
        g.input("rows", ("T", self.hidden))
        weights = self.mlp_weights(checkpoint, prefix, self.shared_width)
        gate = checkpoint.optional(f"{prefix}_gate.weight", (1, self.hidden))
        out = self.gated(g, "rows", weights, "out" if gate is None else "ungated", self.precisions.attention)
        if gate is not None:
            opened = g.node("Sigmoid", [g.linear("rows", "shared_gate", gate, FLOAT32)])
            g.node("Mul", [out, opened], "out")
        g.output("out", ("T", self.hidden))
        return g.model()

    def finish(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """The end of a layer of a FINISHED family: norm of all experts' sum, and residual. Inputs hidden, common, routed [T, H]:
        the router's input, the shared expert's output if there is one, the sum of the experts' outputs. Output hidden_out.
        """
        g = GraphBuilder(f"norm_{layer}", store)
        for name in ("hidden", *(("common",) if self.shared_width else ()), "routed"):
            g.input(name, ("T", self.hidden))
        total = g.node("Add", ["common", "routed"]) if self.shared_width else "routed"
        normed = self.norm(g, checkpoint, total, f"model.layers.{layer}.{self.END_NORM}", self.hidden)
        g.node("Add", ["hidden", normed], "hidden_out")
        g.output("hidden_out", ("T", self.hidden))
        return g.model()

    def mlp(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Norm, MLP and residual of a layer without experts. Inputs hidden [T, H]; outputs hidden_out [T, H]."""
        prefix = f"model.layers.{layer}."
        g = GraphBuilder(f"mlp_{layer}", store)
        g.input("hidden", ("T", self.hidden))
        normed = self.norm(g, checkpoint, "hidden", prefix + self.MLP_NORM, self.hidden)
        weights = self.mlp_weights(checkpoint, prefix + self.DENSE, self.dense_width)
        g.node("Add", ["hidden", self.gated(g, normed, weights, "mlp_out", self.precisions.attention)], "hidden_out")
        g.output("hidden_out", ("T", self.hidden))
        return g.model()

    def attention(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Attention for the CPU, which reads and writes the cache in place.

        Inputs hidden [T, H], past_k, past_v [1, KV, P, D] (the cache, P its rows), seqlens [1] (rows after this run - 1), total
        (rows after this run), cos, sin [P, D/2]. Outputs hidden_out [T, H], present_k, present_v: the same cache.
        """
        g = GraphBuilder(f"attention_{layer}", store)
        g.input("hidden", ("T", self.hidden))
        cache = (1, self.kv_heads, "P", self.head_dim)
        g.input("past_k", cache)
        g.input("past_v", cache)
        g.input("seqlens", (1,), TensorProto.INT32)
        g.input("total", (), TensorProto.INT32)
        g.input("cos", ("M", self.rope.dims // 2))
        g.input("sin", ("M", self.rope.dims // 2))
        queries = [g.node("Unsqueeze", [part, g.ints(0)]) if part else "" for part in self.projected(g, checkpoint, layer, True)]
        inputs = [*queries, "past_k", "past_v", "seqlens", "total", "cos", "sin"]
        if sinks := self.sinks(g, checkpoint, layer):
            inputs += ["", "", sinks]
        sizes: dict[str, Any] = {"num_heads": self.heads, "kv_num_heads": self.kv_heads, "scale": self.scale, "do_rotary": 1}
        sizes |= {"rotary_interleaved": int(self.rope.interleaved)}
        sizes |= {"local_window_size": self.window(layer)} if self.window(layer) else {}
        mixed = g.nodes_of("GroupQueryAttention", inputs, ["mixed", "present_k", "present_v"], domain=MICROSOFT, **sizes)[0]
        self.finish_attention(g, checkpoint, layer, g.node("Squeeze", [mixed, g.ints(0)]), self.heads * self.head_dim)
        g.output("present_k", cache)
        g.output("present_v", cache)
        return g.model()

    def portable_attention(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """Attention in plain operators, for NPUs: it outputs the new keys and values, and the caller stores them in the cache.

        Inputs hidden [T, H], cos, sin [T, 1, D], mask [T, S], past_k, past_v [KV, P, D].
        Outputs hidden_out [T, H], new_k, new_v [KV, T, D].
        """
        d, kv = self.head_dim, self.kv_heads
        g = GraphBuilder(f"attention_{layer}", store)
        g.input("hidden", ("T", self.hidden))
        g.input("cos", ("T", 1, self.rope.dims))
        g.input("sin", ("T", 1, self.rope.dims))
        g.input("mask", ("T", "S"))
        g.input("past_k", (kv, "P", d))
        g.input("past_v", (kv, "P", d))
        q, k, v = self.projected(g, checkpoint, layer, False)
        q = self.rotated(g, g.node("Reshape", [q, g.ints(-1, self.heads, d)]), "rotated_q")
        k = self.rotated(g, g.node("Reshape", [k, g.ints(-1, kv, d)]), "rotated_k")
        g.node("Transpose", [k], "new_k", perm=[1, 0, 2])
        g.node("Transpose", [g.node("Reshape", [v, g.ints(-1, kv, d)])], "new_v", perm=[1, 0, 2])
        keys = g.node("Transpose", [g.node("Concat", ["past_k", "new_k"], axis=1)], perm=[0, 2, 1])
        values = g.node("Concat", ["past_v", "new_v"], axis=1)
        mixed = self.attend(g, checkpoint, layer, q, keys, values, d)
        self.finish_attention(g, checkpoint, layer, mixed, self.heads * d)
        g.output("new_k", (kv, "T", d))
        g.output("new_v", (kv, "T", d))
        return g.model()

    def attend(
        self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, q: str, keys: str, values: str, d: int, value_dim: int = 0
    ) -> str:
        """Softmax attention in plain operators: q [T, h, D], keys [KV, D, S], values [KV, S, D'] → [T, h * D']."""
        kv, groups, value_dim = self.kv_heads, self.heads // self.kv_heads, value_dim or d
        q = g.node("Transpose", [g.node("Reshape", [q, g.ints(-1, kv, groups, d)])], perm=[1, 2, 0, 3])
        q = g.node("Mul", [g.node("Reshape", [q, g.ints(kv, -1, d)]), g.number(self.scale)])
        mask = g.node("Concat", ["mask"] * groups, axis=0)
        scores = g.node("Add", [g.node("MatMul", [q, keys], "scores"), mask])
        sinks = self.sinks(g, checkpoint, layer)
        if sinks:
            rows = g.node("Shape", ["hidden"], end=1)
            column = g.node("Reshape", [sinks, g.ints(kv, groups, 1, 1)])
            column = g.node("Expand", [column, g.node("Concat", [g.ints(kv, groups), rows, g.ints(1)], axis=0)])
            scores = g.node("Concat", [g.node("Reshape", [column, g.ints(kv, -1, 1)]), scores], axis=-1)
        weights = g.node("Softmax", [scores], axis=-1)
        if sinks:
            weights = g.node("Slice", [weights, g.ints(1), g.ints(1 << 30), g.ints(2)])
        mixed = g.node("Reshape", [g.node("MatMul", [weights, values], "mix"), g.ints(kv, groups, -1, value_dim)])
        return g.node("Reshape", [g.node("Transpose", [mixed], perm=[2, 0, 1, 3]), g.ints(-1, self.heads * value_dim)])

    def finish_attention(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, mixed: str, width: int) -> None:
        """Output projection and residual."""
        name = f"model.layers.{layer}.{self.OUTPUT}"
        factor = np.float32(self.residual_multiplier)
        weight = checkpoint.tensor(name + ".weight", (self.hidden, width)) * factor
        bias = checkpoint.optional(name + ".bias", (self.hidden,))
        projected = g.linear(mixed, "o_proj", weight, self.precisions.attention, None if bias is None else bias * factor)
        g.node("Add", ["hidden", self.added(g, checkpoint, layer, projected)], "hidden_out")
        g.output("hidden_out", ("T", self.hidden))

    def added(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, projected: str) -> str:
        """The value that attention adds to its input."""
        return projected

    def projected(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, fused: bool) -> list[str]:
        """Queries, keys and values [T, heads * D] of the normed input; `fused` allows one packed value and two empty names.

        `head_norms`: the norms applied to each head of queries and keys.
        """
        packed = self.packed_projection(g, checkpoint, layer)
        if not self.head_norms:
            return [packed, "", ""] if fused else self.heads_of(g, packed)
        q, k, v = self.heads_of(g, packed)
        of_q, of_k = (f"model.layers.{layer}.self_attn.{name}" for name in self.head_norms)
        q = self.head_norm(g, checkpoint, q, of_q, self.heads)
        return [q, self.head_norm(g, checkpoint, k, of_k, self.kv_heads), v]

    def packed_projection(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int) -> str:
        """Input norm, then queries, keys and values side by side."""
        prefix = f"model.layers.{layer}."
        normed = self.norm(g, checkpoint, "hidden", prefix + self.ATTENTION_NORM, self.hidden, "attention_input")
        d, weights, biases = self.head_dim, [], []
        for which, heads in self.projections():
            name = f"{prefix}self_attn.{which}_proj"
            weight, bias = self.projection(checkpoint, name, heads * d)
            weights.append(weight if which == "v" else self.paired(weight))
            biases.append(bias if which == "v" or bias is None else self.paired(bias))
        filled = [bias if bias is not None else np.zeros(len(w), np.float32) for bias, w in zip(biases, weights, strict=True)]
        bias = np.concatenate(filled) if any(b is not None for b in biases) else None
        return g.linear(normed, "qkv_proj", np.concatenate(weights), self.precisions.attention, bias)

    def projections(self) -> list[tuple[str, int]]:
        """(name, number of heads) of each projection of the normed input."""
        return [("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)]

    def projection(self, checkpoint: Checkpoint, name: str, width: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Weight [width, H] and bias [width] of queries, keys or values."""
        return checkpoint.tensor(name + ".weight", (width, self.hidden)), checkpoint.optional(name + ".bias", (width,))

    def paired(self, values: np.ndarray) -> np.ndarray:
        """Rows [heads * D, ..] with each head's dimensions in `rotary_order`; products of queries and keys do not change."""
        if not self.rotary_order:
            return values
        return values.reshape(-1, self.head_dim, *values.shape[1:])[:, list(self.rotary_order)].reshape(values.shape)

    def heads_of(self, g: GraphBuilder, packed: str) -> list[str]:
        """Split queries, keys and values from the packed projection."""
        own, others = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return g.split(packed, own, others, others)

    def sinks(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int) -> str:
        """Name of the attention sinks [h], if the family has them."""
        return ""

    def rotated(self, g: GraphBuilder, value: str, output: str) -> str:
        """Rotary positions in plain operators: value * cos + swapped(value) * sin; `sin` carries the sign."""
        half = self.rope.dims // 2
        first, second = g.split(value, half, half)
        swapped = g.node("Concat", [second, first], axis=-1)
        return g.node("Add", [g.node("Mul", [value, "cos"]), g.node("Mul", [swapped, "sin"])], output)

    def norm(self, g: GraphBuilder, checkpoint: Checkpoint, value: str, name: str, size: int, output: str = "") -> str:
        """RMS norm over the last axis."""
        return self.rms(g, value, name, self.norm_weight(checkpoint, name, size), output)

    def head_norm(self, g: GraphBuilder, checkpoint: Checkpoint, value: str, name: str, heads: int) -> str:
        """RMS norm of every head; heads and rows share one axis (HTP's 3-D norm is wrong for heads of 32)."""
        return self.normed_heads(g, value, name, self.paired(self.norm_weight(checkpoint, name, self.head_dim)), heads)

    def normed_heads(self, g: GraphBuilder, value: str, name: str, weight: np.ndarray, heads: int) -> str:
        """RMS norm of every head with this weight [D]."""
        rows = self.rms(g, g.node("Reshape", [value, g.ints(-1, self.head_dim)]), name, weight)
        return g.node("Reshape", [rows, g.ints(-1, heads * self.head_dim)])

    def rms(self, g: GraphBuilder, value: str, name: str, weight: np.ndarray, output: str = "") -> str:
        """RMS norm over the last axis with this weight."""
        return g.node("RMSNormalization", [value, g.weight(name + ".weight", weight)], output, axis=-1, epsilon=self.epsilon)

    def norm_weight(self, checkpoint: Checkpoint, name: str, size: int) -> np.ndarray:
        """The factor of a norm [size]."""
        return checkpoint.tensor(name + ".weight", (size,))

    def gated(self, g: GraphBuilder, rows: str, weights: ExpertWeights, output: str, precision: Precision) -> str:
        """down(activation(gate(x), up(x))), with gate and up as one matrix."""
        width = len(weights.gate)
        both = np.concatenate([weights.gate, weights.up])
        gate, up = g.split(g.linear(rows, "gate_up", both, precision, weights.gate_up_bias), width, width)
        return g.linear(self.activation(g, gate, up), "down", weights.down, precision, weights.down_bias, output)

    def activation(self, g: GraphBuilder, gate: str, up: str) -> str:
        """SwiGLU: gate * sigmoid(gate) * up."""
        return g.node("Mul", [g.node("Mul", [gate, g.node("Sigmoid", [gate])]), up])

    def expert_weights(self, checkpoint: Checkpoint, layer: int, expert: int) -> ExpertWeights:
        """Weights of one expert: single tensors, or slices of transformers' fused ones."""
        prefix = f"model.layers.{layer}.{self.MOE}.experts"
        if f"{prefix}.gate_up_proj" not in checkpoint:
            return self.mlp_weights(checkpoint, f"{prefix}.{expert}", self.intermediate)
        return self.slices(checkpoint, f"{prefix}.gate_up_proj", f"{prefix}.down_proj", expert)

    def slices(self, checkpoint: Checkpoint, gate_up: str, down: str, expert: int) -> ExpertWeights:
        """Weights of one expert from two tensors of all: gate and up [E, 2 I, H], down [E, H, I]."""
        width = self.intermediate
        both = checkpoint.tensor(gate_up, (self.experts, 2 * width, self.hidden), expert)
        return ExpertWeights(both[:width], both[width:], checkpoint.tensor(down, (self.experts, self.hidden, width), expert))

    def mlp_weights(self, checkpoint: Checkpoint, prefix: str, width: int) -> ExpertWeights:
        """Weights of a gated MLP with one tensor per matrix."""
        names = [f"{prefix}.{name}.weight" for name in (self.PROJECTIONS if ".experts." in prefix else self.DENSE_PROJECTIONS)]
        wide, narrow = (width, self.hidden), (self.hidden, width)
        gate, up, down = (checkpoint.tensor(name, shape) for name, shape in zip(names, (wide, wide, narrow), strict=True))
        sizes = (width, width, self.hidden)
        biases = [checkpoint.optional(n.removesuffix("weight") + "bias", (s,)) for n, s in zip(names, sizes, strict=True)]
        first = [bias for bias in biases[:2] if bias is not None]
        if len(first) == 1:
            raise ModelError(f"{prefix} has a bias at one of gate and up alone: this runtime does not build this variant")
        return ExpertWeights(gate, up, down, np.concatenate(first) if len(first) == 2 else None, biases[2])
