"""Qwen3-Next and Qwen3.5-MoE: layers of gated delta nets or gated attention, norms around 1, a gated shared expert."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.graphs.quantize import FLOAT32
from runtime.models.decoder import Shapes
from runtime.models.delta_rule import run_delta_rule, unit_heads
from runtime.models.recurrent import RecurrentDecoder, causal_convolution, silu
from runtime.models.routers import Router
from runtime.models.sizes import common_settings, dense_layers, partly_rotated, text_part

LAYER_TYPES = ("full_attention", "linear_attention")


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(RecurrentDecoder):
    """Sizes of a delta net: heads of keys and of values, their dimensions, and the tokens that its convolution sees."""

    key_heads: int
    value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    kernel: int

    @property
    def convolved(self) -> int:
        """Total channels of queries, keys and values."""
        return 2 * self.key_heads * self.linear_key_dim + self.value_heads * self.linear_value_dim

    OPTIONAL = (*RecurrentDecoder.OPTIONAL, ("", True, r"shared_expert_gate\.weight"))

    def states(self, layer: int) -> Shapes:
        """The last rows of the convolution's input, and a matrix per head."""
        matrices = (self.value_heads, self.linear_key_dim, self.linear_value_dim)
        return ((self.kernel - 1, self.convolved), matrices) if layer in self.recurrent else ()

    def norm_weight(self, checkpoint: Checkpoint, name: str, size: int) -> np.ndarray:
        """The factor of a norm, which is stored as its difference from 1."""
        return np.asarray(checkpoint.tensor(name + ".weight", (size,)) + np.float32(1))

    def projection(self, checkpoint: Checkpoint, name: str, width: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Weight and bias of a projection; queries are stored together with the gates of their heads."""
        if not name.endswith("q_proj"):
            return super().projection(checkpoint, name, width)
        return self._query_part(checkpoint, name, 0)

    def _query_part(self, checkpoint: Checkpoint, name: str, part: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Queries (part 0) or gates (part 1) of the common projection."""
        weight, bias = super().projection(checkpoint, name, 2 * self.heads * self.head_dim)
        shape = (self.heads, 2, self.head_dim)
        own = weight.reshape(*shape, self.hidden)[:, part].reshape(-1, self.hidden)
        return own, None if bias is None else bias.reshape(shape)[:, part].reshape(-1)

    def finish_attention(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, mixed: str, width: int) -> None:
        """Output gate, output projection and residual."""
        weight, bias = self._query_part(checkpoint, f"model.layers.{layer}.self_attn.q_proj", 1)
        gate = g.linear("attention_input", "gate_proj", weight, self.precisions.attention, bias)
        super().finish_attention(g, checkpoint, layer, g.node("Mul", [mixed, g.node("Sigmoid", [gate])]), width)

    def mixed(self, g: GraphBuilder, checkpoint: Checkpoint, prefix: str, normed: str) -> str:
        """The delta net of one layer."""
        name, width = prefix + "linear_attn.", self.value_heads * self.linear_value_dim
        both, gates = self._inputs(checkpoint, name)
        rows, z = g.split(g.linear(normed, "in_proj", both, self.precisions.attention), self.convolved, width)
        kernel = checkpoint.tensor(name + "conv1d.weight", (self.convolved, 1, self.kernel))[:, 0]
        rows = silu(g, causal_convolution(g, rows, kernel))
        heads = self._remember(g, checkpoint, name, rows, g.linear(normed, "gates", gates, FLOAT32))
        weight = checkpoint.tensor(name + "norm.weight", (self.linear_value_dim,))
        heads = self.rms(g, heads, name + "norm", weight)
        gated = g.node("Mul", [g.node("Reshape", [heads, g.ints(-1, width)]), silu(g, z)])
        out = checkpoint.tensor(name + "out_proj.weight", (self.hidden, width))
        return g.linear(gated, "out_proj", out, self.precisions.attention)

    def _inputs(self, checkpoint: Checkpoint, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(stacked weights of queries, keys, values and z [.., H]; those of b and a [2 * heads, H])."""
        values, key_heads, hidden = self.value_heads * self.linear_value_dim, self.key_heads, self.hidden
        if name + "in_proj_qkvz.weight" not in checkpoint:
            wide = (("in_proj_qkv", self.convolved), ("in_proj_z", values))
            narrow = (("in_proj_b", self.value_heads), ("in_proj_a", self.value_heads))
            first, second = ([checkpoint.tensor(f"{name}{n}.weight", (w, hidden)) for n, w in parts] for parts in (wide, narrow))
            return np.concatenate(first), np.concatenate(second)
        keys, group = self.linear_key_dim, values // key_heads
        stored = checkpoint.tensor(name + "in_proj_qkvz.weight", (self.convolved + values, hidden))
        parts = np.split(stored.reshape(key_heads, -1, hidden), [keys, 2 * keys, 2 * keys + group], axis=1)
        stored = checkpoint.tensor(name + "in_proj_ba.weight", (2 * self.value_heads, hidden))
        return _stack_rows(parts), _stack_rows(np.split(stored.reshape(key_heads, -1, hidden), 2, axis=1))

    def _remember(self, g: GraphBuilder, checkpoint: Checkpoint, name: str, rows: str, gates: str) -> str:
        """The heads' reads from their matrices [T, heads, 1, D'], token by token; also creates next_1."""
        keys, values, heads = self.linear_key_dim, self.linear_value_dim, self.value_heads
        q, k, v = g.split(rows, self.key_heads * keys, self.key_heads * keys, heads * values)
        q = g.node("Mul", [self._repeated(g, q), g.number(keys**-0.5)])
        v = g.node("Reshape", [v, g.ints(-1, heads, 1, values)])
        b, a = g.split(gates, heads, heads)
        a = g.node("Softplus", [g.node("Add", [a, g.weight("dt_bias", checkpoint.tensor(name + "dt_bias", (heads,)))])])
        rate = g.weight("rate", -np.exp(checkpoint.tensor(name + "A_log", (heads,))))
        columns = [g.node("Sigmoid", [b]), g.node("Exp", [g.node("Mul", [a, rate])])]
        beta, decay = (g.node("Reshape", [column, g.ints(-1, heads, 1, 1)]) for column in columns)
        return run_delta_rule(g, [q, self._repeated(g, k), v, beta, decay], heads, keys, values)

    def _repeated(self, g: GraphBuilder, rows: str) -> str:
        """Heads of length 1 [T, value heads, 1, D]; each key head is repeated for its group of value heads."""
        x, group = unit_heads(g, rows, self.key_heads, self.linear_key_dim), self.value_heads // self.key_heads
        return x if group == 1 else g.node("Gather", [x, g.ints(*(head // group for head in range(self.value_heads)))], axis=1)


def _stack_rows(parts: list[np.ndarray]) -> np.ndarray:
    """Parts [heads, rows, H] stacked along the rows."""
    return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])


def read(config: dict[str, Any]) -> Qwen3Next:
    """Sizes from config.json, or from its text part for Qwen3.5-MoE."""
    config = {"partial_rotary_factor": 0.25, "head_dim": 256} | text_part(config)
    sizes = partly_rotated(common_settings(config, layer_types=LAYER_TYPES, partly=True))
    every = int(config.get("full_attention_interval") or 4)
    kinds = config.get("layer_types") or [LAYER_TYPES[bool((layer + 1) % every)] for layer in range(sizes["layers"])]
    return Qwen3Next(
        **sizes,
        head_norms=("q_norm", "k_norm"),
        intermediate=int(config["moe_intermediate_size"]),
        router=Router("softmax_topk", sizes["top_k"], sizes["experts"], renormalize=bool(config.get("norm_topk_prob", True))),
        dense=dense_layers(config),
        dense_width=int(config.get("intermediate_size") or 0),
        shared_width=int(config["shared_expert_intermediate_size"]),
        recurrent=frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        key_heads=int(config["linear_num_key_heads"]),
        value_heads=int(config["linear_num_value_heads"]),
        linear_key_dim=int(config["linear_key_head_dim"]),
        linear_value_dim=int(config["linear_value_head_dim"]),
        kernel=int(config.get("linear_conv_kernel_dim", 4)),
    )
