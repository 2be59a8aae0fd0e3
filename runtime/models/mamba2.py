"""Layers of Mamba-2 (arXiv 2405.21060): each keeps a matrix per head that fades and takes in an outer product of each token.

They run token by token, so that results do not depend on how many rows run at once.
"""

from dataclasses import dataclass

import numpy as np
import onnx

from runtime.errors import ModelError
from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Shapes
from runtime.models.recurrent import RecurrentDecoder, causal_convolution, silu

UNLIMITED = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Values of time_step_limit without an effect, as transformers writes them."""


def check_time_steps(limit: object) -> None:
    """Refuse limits of the step sizes."""
    if limit not in UNLIMITED:
        raise ModelError(f"time_step_limit {limit} is not supported: this runtime builds layers without")


@dataclass(frozen=True, kw_only=True)
class Mamba2Decoder(RecurrentDecoder):
    """Sizes of a Mamba-2 layer: heads, their dimensions, groups that share B and C, the state's width, the kernel's length."""

    mamba_heads: int
    mamba_dim: int
    groups: int
    state: int
    kernel: int

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.mamba_heads * self.mamba_dim

    @property
    def convolved(self) -> int:
        """Channels of the heads, B and C."""
        return self.inner + 2 * self.groups * self.state

    def states(self, layer: int) -> Shapes:
        """The last rows of the convolution's input, and a matrix per head."""
        matrices = (self.mamba_heads, self.mamba_dim, self.state)
        return ((self.kernel - 1, self.convolved), matrices) if layer in self.recurrent else ()

    def mixed(self, g: GraphBuilder, checkpoint: Checkpoint, prefix: str, normed: str) -> str:
        """The Mamba-2 layer's output times the residual multiplier."""
        name, precision, rows = prefix + "mamba.", self.precisions.attention, self.inner + self.convolved + self.mamba_heads
        weight = checkpoint.tensor(name + "in_proj.weight", (rows, self.hidden))
        bias = checkpoint.optional(name + "in_proj.bias", (rows,))
        gate, both, steps = g.split(
            g.linear(normed, "in_proj", weight, precision, bias), self.inner, self.convolved, self.mamba_heads
        )
        kernel = checkpoint.tensor(name + "conv1d.weight", (self.convolved, 1, self.kernel))[:, 0]
        both = silu(g, causal_convolution(g, both, kernel, checkpoint.optional(name + "conv1d.bias", (self.convolved,))))
        read = self._remember(g, checkpoint, name, both, steps)
        gated = g.node("Mul", [g.node("Reshape", [read, g.ints(-1, self.inner)]), silu(g, gate)])
        grouped = g.node("Reshape", [gated, g.ints(-1, self.groups, self.inner // self.groups)])
        even = self.rms(g, grouped, name + "even", np.ones(self.inner // self.groups, np.float32))
        factor = g.weight("mamba_norm", checkpoint.tensor(name + "norm.weight", (self.inner,)))
        even = g.node("Mul", [g.node("Reshape", [even, g.ints(-1, self.inner)]), factor])
        multiplier = np.float32(self.residual_multiplier)
        weight = checkpoint.tensor(name + "out_proj.weight", (self.hidden, self.inner)) * multiplier
        bias = checkpoint.optional(name + "out_proj.bias", (self.hidden,))
        return g.linear(even, "out_proj", weight, precision, None if bias is None else bias * multiplier)

    def _remember(self, g: GraphBuilder, checkpoint: Checkpoint, name: str, both: str, steps: str) -> str:
        """The heads' reads from their matrices [T, heads, D, 1], token by token; also creates next_1."""
        heads, width = self.mamba_heads, self.groups * self.state
        x, b, c = g.split(both, self.inner, width, width)
        x = g.node("Reshape", [x, g.ints(-1, heads, self.mamba_dim, 1)])
        group = [head * self.groups // heads for head in range(heads)]
        b = g.node("Gather", [g.node("Reshape", [b, g.ints(-1, self.groups, 1, self.state)]), g.ints(*group)], axis=1)
        c = g.node("Gather", [g.node("Reshape", [c, g.ints(-1, self.groups, self.state, 1)]), g.ints(*group)], axis=1)
        bias, rate, skip = (checkpoint.tensor(name + part, (heads,)) for part in ("dt_bias", "A_log", "D"))
        steps = g.node("Softplus", [g.node("Add", [steps, g.weight("dt_bias", bias)])])
        decay = g.node("Exp", [g.node("Mul", [steps, g.weight("rate", -np.exp(rate))])])
        steps, decay = (g.node("Reshape", [column, g.ints(-1, heads, 1, 1)]) for column in (steps, decay))
        inputs = ["state_1", g.node("Mul", [x, steps]), b, c, decay]
        read = g.nodes_of("Scan", inputs, ["next_1", "read"], body=self._step(), num_scan_inputs=4)[1]
        return g.node("Add", [read, g.node("Mul", [x, g.weight("skip", skip.reshape(heads, 1, 1))])])

    def _step(self) -> onnx.GraphProto:
        """One token: fade the matrices, add the outer product, and read them."""
        heads, dim, state = self.mamba_heads, self.mamba_dim, self.state
        g = GraphBuilder("mamba_step")
        shapes = {"before": (heads, dim, state), "x": (heads, dim, 1), "b": (heads, 1, state), "c": (heads, state, 1)}
        for name, shape in (shapes | {"decay": (heads, 1, 1)}).items():
            g.input(name, shape)
        g.node("Add", [g.node("Mul", ["before", "decay"]), g.node("Mul", ["x", "b"])], "after")
        g.node("MatMul", ["after", "c"], "out")
        g.output("after", (heads, dim, state))
        g.output("out", (heads, dim, 1))
        return g.graph()
