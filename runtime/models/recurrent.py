"""Decoders with layers that keep a fixed-size state instead of keys and values, and their short causal convolution."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import onnx

from runtime.graphs.builder import GraphBuilder, Store
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder

END = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RecurrentDecoder(Decoder, ABC):
    """`recurrent`: layers with a state, which cannot be rewound: a sequence of such a model only grows."""

    recurrent: frozenset[int]

    PORTABLE = False

    def attends(self, layer: int) -> bool:
        """Whether this layer has attention instead of a state."""
        return layer not in self.recurrent

    def attention(self, checkpoint: Checkpoint, layer: int, store: Store | None) -> onnx.ModelProto:
        """With a state: inputs hidden [T, H], state_0, ..; outputs hidden_out [T, H], next_0, ..; other layers as in Decoder."""
        if layer not in self.recurrent:
            return super().attention(checkpoint, layer, store)
        g = GraphBuilder(f"recurrent_{layer}", store)
        g.input("hidden", ("T", self.hidden))
        for i, shape in enumerate(self.states(layer)):
            g.input(f"state_{i}", shape)
        prefix = f"model.layers.{layer}."
        normed = self.norm(g, checkpoint, "hidden", prefix + self.ATTENTION_NORM, self.hidden)
        g.node("Add", ["hidden", self.mixed(g, checkpoint, prefix, normed)], "hidden_out")
        g.output("hidden_out", ("T", self.hidden))
        for i, shape in enumerate(self.states(layer)):
            g.output(f"next_{i}", shape)
        return g.model()

    @abstractmethod
    def mixed(self, g: GraphBuilder, checkpoint: Checkpoint, prefix: str, normed: str) -> str:
        """The value that the layer adds to its input [T, H]; also creates the values next_0, .."""


def causal_convolution(g: GraphBuilder, rows: str, kernel: np.ndarray, bias: np.ndarray | None = None) -> str:
    """Convolve each channel of `rows` [T, C] with its past by `kernel` [C, L]; state_0 and next_0 [L - 1, C] are the last rows.

    It is a sum of shifted products, so that a row's result does not depend on how many rows run at once.
    """
    length = kernel.shape[1]
    window = g.node("Concat", ["state_0", rows], axis=0)
    g.node("Slice", [window, g.ints(1 - length), g.ints(END), g.ints(0)], "next_0")
    total = ""
    for i in range(length):
        end = i + 1 - length or END
        shifted = g.node("Slice", [window, g.ints(i), g.ints(end), g.ints(0)])
        product = g.node("Mul", [shifted, g.weight(f"conv_{i}", kernel[:, i])])
        total = g.node("Add", [total, product]) if total else product
    return total if bias is None else g.node("Add", [total, g.weight("conv_bias", bias)])


def silu(g: GraphBuilder, value: str) -> str:
    """x * sigmoid(x)."""
    return g.node("Mul", [value, g.node("Sigmoid", [value])])
