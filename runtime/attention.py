"""Keys and values of the running sequence, and the attention graphs that read and extend them."""

import numpy as np

from runtime.graph import Backend, Graph
from runtime.log import RunLog
from runtime.models import Family
from runtime.package import attention_name
from runtime.probes import Kind

MASKED = -1e4
SMALLEST_PAST = 128


def past_tier(tokens: int) -> int:
    """Rows of past keys in a static attention shape that serves sequences of `tokens`: a power of two."""
    return max(SMALLEST_PAST, 1 << (tokens - 1).bit_length())


class Sequence:
    """Past keys and values [capacity, KV, D] of every layer, and the rotary table [capacity, 1, D]."""

    def __init__(self, family: Family, tokens: int):
        self.capacity = past_tier(tokens)
        shape = (self.capacity, family.kv_heads, family.head_dim)
        self.keys = [np.zeros(shape, np.float32) for _ in range(family.layers)]
        self.values = [np.zeros(shape, np.float32) for _ in range(family.layers)]
        self.length = 0
        rates = family.rope_theta ** -(np.arange(0, family.head_dim, 2, dtype=np.float32) / np.float32(family.head_dim))
        angles = np.arange(self.capacity, dtype=np.float32)[:, None] * rates.astype(np.float32)
        self.cos = np.concatenate([np.cos(angles)] * 2, axis=1, dtype=np.float32)[:, None, :]
        self.sin = np.concatenate([-np.sin(angles), np.sin(angles)], axis=1, dtype=np.float32)[:, None, :]


class Attention:
    """Attention graphs of one phase on one backend; `rows` is the most rows of one run."""

    def __init__(self, family: Family, backend: Backend, log: RunLog, rows: int):
        self.family, self.backend, self.log, self.rows = family, backend, log, rows
        self._graphs: dict[tuple[int, int], Graph] = {}

    @property
    def static(self) -> bool:
        """Does the backend want fixed shapes?"""
        return bool(self.backend.tiers)

    def prepare(self, capacity: int) -> None:
        """Make every layer's graph for sequences of this capacity."""
        for layer in range(self.family.layers):
            self._graph(layer, capacity)

    def run(self, layer: int, hidden: np.ndarray, sequence: Sequence, position: int) -> np.ndarray:
        """Hidden [n, H] after attention and residual; the new keys and values join the sequence at `position`."""
        n = len(hidden)
        rows = self.rows if self.static else n
        past = sequence.capacity if self.static else position
        feeds = {
            "hidden": _padded(hidden, rows),
            "cos": _padded(sequence.cos[position : position + n], rows),
            "sin": _padded(sequence.sin[position : position + n], rows),
            "mask": _mask(rows, past, position),
            "past_k": sequence.keys[layer][:past],
            "past_v": sequence.values[layer][:past],
        }
        out, keys, values = self._graph(layer, sequence.capacity).run(feeds, n)
        sequence.keys[layer][position : position + n] = keys[:n]
        sequence.values[layer][position : position + n] = values[:n]
        return out[:n]

    def _graph(self, layer: int, capacity: int) -> Graph:
        past = capacity if self.static else 0
        if (layer, past) not in self._graphs:
            dims = {"T": self.rows, "P": past, "S": past + self.rows} if self.static else {}
            session = self.backend.session(attention_name(layer), dims)
            tier = self.rows if self.static else 0
            self._graphs[layer, past] = Graph(session, self.log, Kind.ATTENTION, layer, -1, self.backend.id, tier)
        return self._graphs[layer, past]


def _mask(rows: int, past: int, position: int) -> np.ndarray:
    """Additive mask [rows, past + rows]: past rows beyond `position` are empty, new rows see themselves and earlier ones."""
    mask = np.zeros((rows, past + rows), np.float32)
    mask[:, position:past] = MASKED
    if rows > 1:
        mask[:, past:] = np.triu(np.full((rows, rows), MASKED, np.float32), 1)
    return mask


def _padded(values: np.ndarray, rows: int) -> np.ndarray:
    """The values with zero rows up to `rows`."""
    if len(values) == rows:
        return np.ascontiguousarray(values)
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded
