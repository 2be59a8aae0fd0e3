"""The work of our runtime's subgraphs, in closed form from the model's config, counted as in complexity.py.

The runtime records rows, layers and experts; the recording's manifest has the config of the model and the precisions of its
package. Rows are those in use: the padding of static shapes is not counted. Attention of a prompt's chunk covers the context up
to that chunk, without later chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.errors import PredictError
from analyzer.model import Attention, DeltaNet, Mamba2, Mixture, Model, model_of
from analyzer.records.manifest import section
from analyzer.records.schema import Columns, equals_any

ENGINE = "moescope"
ACTIVATION_BYTES, INDEX_BYTES, SCALE_BITS, PLAIN_BITS = 4, 8, 16, 16
Work = tuple[np.ndarray, np.ndarray, np.ndarray]
"""flops, bytes read and bytes written of each operator."""


@dataclass(frozen=True)
class WorkQuery:
    """Operators of one type: rows in use, tokens in the context (NaN: unknown), layer."""

    rows: np.ndarray
    context: np.ndarray
    layer: np.ndarray


def stored_bytes(precision: dict[str, Any]) -> float:
    """Bytes of one weight, including its share of the block's scale."""
    bits, block = float(precision.get("bits") or 32), float(precision.get("block") or 0)
    return (bits + (SCALE_BITS / block if block and bits < PLAIN_BITS else 0.0)) / 8


class SubgraphFormulas:
    """The formulas of one model."""

    def __init__(self, model: Model, precisions: dict[str, Any]):
        self.model = model
        self.bytes = {part: stored_bytes(section(precisions, part)) for part in ("attention", "experts", "head")}
        named = ("attention", "router", "expert", "mlp", "combine", "norm", "head", "sample")
        self.formulas: dict[str, Callable[[WorkQuery], Work]] = {"embed": self.moved, "dispatch": self.moved}
        self.formulas |= {kind: getattr(self, kind) for kind in named}

    def moved(self, asked: WorkQuery) -> Work:
        """Rows that are copied."""
        size = asked.rows * self.model.hidden * ACTIVATION_BYTES
        return 0.0 * size, size, size

    def product(self, asked: WorkQuery, inner: float, outer: float, weight_bytes: float) -> Work:
        """rows x inner by inner x outer."""
        rows = asked.rows
        read = inner * outer * weight_bytes + rows * inner * ACTIVATION_BYTES
        return 2.0 * rows * inner * outer, read, rows * outer * ACTIVATION_BYTES

    def attention(self, asked: WorkQuery) -> Work:
        """Attention of either kind, the delta net in layers that have one, or nothing. NaN for latent attention."""
        model, unknown = self.model, (np.full(len(asked.rows), np.nan),) * 3
        usual = unknown if model.attention.mla else self.over_context(asked, model.attention)
        if model.bare:
            usual = _config_places(np.isin(asked.layer, list(model.bare)), usual, self.moved(asked))
        if model.delta:
            return _config_places(np.isin(asked.layer, list(model.delta_at)), self.delta_net(asked, model.delta), usual)
        if model.mamba:
            return _config_places(np.isin(asked.layer, list(model.delta_at)), self.state_space(asked, model.mamba), usual)
        if model.wide:
            at = [layer for layer, window in enumerate(model.windows) if window is None]
            return _config_places(np.isin(asked.layer, at), self.over_context(asked, model.wide), usual)
        return usual

    def delta_net(self, asked: WorkQuery, delta: DeltaNet) -> Work:
        """Norm, projections, convolution, gated delta rule, norm and gate of its output, output projection, residual.

        The rule takes 7 operations for each number of a head's state: decay (1), value prediction (2), update (2), readout (2).
        """
        hidden, rows, values = self.model.hidden, asked.rows, delta.value_heads * delta.value_dim
        weights, gates, decays = hidden * (delta.channels + 2 * values), hidden * 2 * delta.value_heads, 0
        if rank := delta.gate_rank:  # decays and steps from weights in float32
            weights += rank * (hidden + values) - hidden * values
            gates, decays = rank * (hidden + values) + hidden * delta.value_heads, values
        kernel, state = delta.kernel * delta.channels, values * delta.key_dim
        each = 2.0 * (weights + gates + kernel) + delta.channels + 7.0 * state + 6.0 * values + 4.0 * decays + 5.0 * hidden
        size = rows * hidden * ACTIVATION_BYTES
        kept = (state + (delta.kernel - 1) * delta.channels) * ACTIVATION_BYTES
        read = weights * self.bytes["attention"] + (gates + kernel) * ACTIVATION_BYTES + kept
        return rows * each, read + size, size + kept

    def state_space(self, asked: WorkQuery, layer: Mamba2) -> Work:
        """Norm, projections, convolution, states of Mamba-2, norm and gate of their output, output projection, residual.

        A number of a head's state takes 5 operations: decay (1), outer product and addition (2), readout (2).
        """
        hidden, rows = self.model.hidden, asked.rows
        weights, kernel = hidden * (2 * layer.inner + layer.channels + layer.heads), layer.kernel * layer.channels
        state = layer.inner * layer.state
        each = 2.0 * (weights + kernel) + layer.channels + 5.0 * state + 9.0 * layer.inner + 5.0 * hidden
        size = rows * hidden * ACTIVATION_BYTES
        kept = (state + (layer.kernel - 1) * layer.channels) * ACTIVATION_BYTES
        read = weights * self.bytes["attention"] + kernel * ACTIVATION_BYTES + kept
        return rows * each, read + size, size + kept

    def over_context(self, asked: WorkQuery, shape: Attention) -> Work:
        """Norm, projections, scores and values over the context, output gate if there is one, output projection, residual."""
        hidden, rows = self.model.hidden, asked.rows
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        weights = hidden * (queries * (1 + shape.gated) + (2 - shape.tied_values) * keys) + queries * hidden
        scores = shape.heads * rows * asked.context * (4.0 * shape.head_dim + 5.0)
        flops = 2.0 * rows * weights + scores + rows * (5.0 * hidden + 2.0 * shape.gated * queries)
        cache = 2.0 * keys * ACTIVATION_BYTES
        read = weights * self.bytes["attention"] + rows * hidden * ACTIVATION_BYTES + (asked.context - rows) * cache
        return flops, read, rows * (hidden * ACTIVATION_BYTES + cache)

    def router(self, asked: WorkQuery) -> Work:
        """Norm, a score for each expert, softmax, top k."""
        rows, hidden, mixture = asked.rows, self.model.hidden, self.model.mixture or Mixture(0, 0, 0)
        flops, read, _ = self.product(asked, hidden, mixture.experts, ACTIVATION_BYTES)
        chosen = mixture.top_k * (ACTIVATION_BYTES + INDEX_BYTES)
        return flops + rows * (4.0 * hidden + 5.0 * mixture.experts), read, rows * (hidden * ACTIVATION_BYTES + chosen)

    def gated(self, asked: WorkQuery, width: np.ndarray | float, weight_bytes: float) -> Work:
        """Gate and up projection, or up alone; activation and product, down projection."""
        rows, hidden, matrices = asked.rows, self.model.hidden, self.model.ups + 1
        size = rows * hidden * ACTIVATION_BYTES
        flops = 2.0 * matrices * rows * hidden * width + 2.0 * rows * width
        return flops, matrices * hidden * width * weight_bytes + size, size

    def expert(self, asked: WorkQuery) -> Work:
        """One expert."""
        return self.gated(asked, self.model.mixture.width if self.model.mixture else 0.0, self.bytes["experts"])

    def mlp(self, asked: WorkQuery) -> Work:
        """A dense layer's feed-forward part, or the shared expert of a routed one."""
        shared = self.model.mixture.shared_width if self.model.mixture else 0
        routed = np.array([*self.model.routed, False])
        layer = np.where((asked.layer >= 0) & (asked.layer < self.model.layers), asked.layer, self.model.layers)
        width = np.where(routed[layer], float(shared), float(self.model.dense_width))
        width[np.isin(layer, list(self.model.bare))] = 0
        return self.gated(asked, width, self.bytes["attention"])

    def combine(self, asked: WorkQuery) -> Work:
        """The residual plus the weighted sum of k outputs."""
        k, size = self.model.mixture.top_k if self.model.mixture else 0, asked.rows * self.model.hidden
        return (2.0 * k + 1.0) * size, (k + 1.0) * size * ACTIVATION_BYTES, 1.0 * size * ACTIVATION_BYTES

    def norm(self, asked: WorkQuery) -> Work:
        """After the experts: norm of their sum, addition of the shared expert, norm of both, residual, the layer's factor."""
        size = 1.0 * asked.rows * self.model.hidden
        return 11.0 * size, 3.0 * size * ACTIVATION_BYTES, size * ACTIVATION_BYTES

    def head(self, asked: WorkQuery) -> Work:
        """A score for each vocabulary entry."""
        return self.product(asked, self.model.hidden, self.model.vocabulary, self.bytes["head"])

    def sample(self, asked: WorkQuery) -> Work:
        """One operation for each score."""
        size = 1.0 * asked.rows * self.model.vocabulary
        return size, size * ACTIVATION_BYTES, 1.0 * asked.rows * INDEX_BYTES

    def fill(self, operators: Columns, context: np.ndarray, figures: Columns) -> None:
        """Write the work of our runtime's operators into `figures`; `context` has the context length of each operator's step."""
        names, by_runtime = list(figures), equals_any(operators["engine"], ENGINE)
        for kind, formula in self.formulas.items():
            rows = np.flatnonzero(equals_any(operators["type"], kind) & by_runtime)
            if len(rows):
                later = later_rows(operators, rows) if kind == "attention" else 0
                asked = WorkQuery(operators["n_tokens"][rows], context[rows] - later, operators["layer"][rows])
                for name, values in zip(names, formula(asked), strict=True):
                    figures[name][rows] = values


def _config_places(at: np.ndarray, one: Work, other: Work) -> Work:
    flops, read, written = (np.where(at, mine, theirs) for mine, theirs in zip(one, other, strict=True))
    return flops, read, written


def later_rows(operators: Columns, rows: np.ndarray) -> np.ndarray:
    """Number of rows in later operators of the same step and layer, for each of `rows`: prompts are processed in chunks."""
    columns = {name: operators[name][rows] for name in ("token_id", "layer", "begin_ns", "n_tokens")}
    behind = pd.DataFrame(columns).sort_values("begin_ns", ascending=False)
    counted = behind.groupby(["token_id", "layer"])["n_tokens"].cumsum() - behind["n_tokens"]
    return counted.where(behind["token_id"] >= 0, 0).sort_index().to_numpy()


def model_subgraphs(manifest: dict[str, Any]) -> SubgraphFormulas | None:
    """The formulas for the model in the manifest; None without a model or if its shapes are not supported."""
    model = section(manifest, "model")
    try:
        shapes = model_of(section(model, "config"), Path(str(model.get("path", "config.json"))))
    except (PredictError, TypeError, ValueError, AttributeError):
        return None
    return SubgraphFormulas(shapes, section(section(model, "package"), "precisions"))
