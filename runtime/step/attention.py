"""Keys and values of the running sequence, and the attention graphs that read and extend them."""

from functools import cached_property
from itertools import chain

import numpy as np
import onnxruntime as ort

from runtime.backends.graph import Backend, Binding, Graph, to_ort
from runtime.backends.kv_cache import Scales, narrow, widen
from runtime.models import Family
from runtime.models.rope import Rope
from runtime.package.layout import attention_name
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind

MASKED = -1e4
SMALLEST_PAST = 128


def past_tier(tokens: int) -> int:
    """Rows of past keys in a static attention shape that serves sequences of `tokens`: a power of two."""
    return max(SMALLEST_PAST, 1 << (tokens - 1).bit_length())


class Angles:
    """A rotary table for `capacity` positions: cosines and sines [capacity, R / 2]."""

    def __init__(self, rope: Rope, capacity: int):
        self.half_cos, self.half_sin = rope.table(capacity)

    @cached_property
    def cos(self) -> np.ndarray:
        """Cosines [capacity, 1, R] for plain operators."""
        return np.concatenate([self.half_cos] * 2, axis=1)[:, None, :]

    @cached_property
    def sin(self) -> np.ndarray:
        """Sines [capacity, 1, R]; the first half has the rotation's negative sign."""
        return np.concatenate([-self.half_sin, self.half_sin], axis=1)[:, None, :]


class Sequence:
    """Kept keys and values [KV, capacity, D] of every layer (`dtype`; int8 with its `scales`), and the rotary tables.

    Layers without attention have no rows; those with a state have it in `states`.

    `end`: number of rows after the current step; `ids`: the tokens whose rows are kept.
    """

    def __init__(self, family: Family, tokens: int, dtype: type = np.float32, scales: Scales | None = None):
        self.capacity, self.family, self.dtype, self.scales = past_tier(tokens), family, dtype, scales
        kinds = [family.at(layer) for layer in range(family.layers)]
        rows = [self.capacity if family.attends(layer) else 0 for layer in range(family.layers)]
        sizes = [*zip(rows, kinds, strict=True)]
        self.keys: list[np.ndarray] = [np.zeros((kind.kv_heads, room, kind.key_dim), dtype) for room, kind in sizes]
        self.values: list[np.ndarray] = [np.zeros((kind.kv_heads, room, kind.value_dim), dtype) for room, kind in sizes]
        self.states = [[np.zeros(shape, np.float32) for shape in family.states(layer)] for layer in range(family.layers)]
        self.length = 0
        self.end = 0
        self.ids: list[int] = []
        self.rope = family.rope
        self._angles: dict[int, Angles] = {}

    @property
    def bytes(self) -> int:
        """Memory of keys, values and states."""
        return sum(array.nbytes for array in (*self.keys, *self.values, *chain(*self.states)))

    def restart(self) -> None:
        """Forget every token."""
        self.length, self.ids = 0, []
        for state in chain(*self.states):
            state.fill(0)

    def shorten(self, tokens: int) -> None:
        """Drop everything after the first `tokens`; all rows if layers keep a state, which cannot be rewound."""
        if tokens < self.length and any(self.states):
            self.restart()
        self.length = min(self.length, tokens)
        del self.ids[self.length :]

    def take(self, other: "Sequence") -> None:
        """Become a copy of another sequence of the same model, whose rows must fit here."""
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values, strict=True):
            mine[:, : other.length] = theirs[:, : other.length]
        for mine, theirs in zip(chain(*self.states), chain(*other.states), strict=True):
            mine[...] = theirs
        self.length, self.ids = other.length, list(other.ids)
        self._turn(other.rope)

    def turn_to(self, tokens: int) -> bool:
        """Select the rotary table for a total of `tokens`; True if it changed, which makes kept keys invalid."""
        return self._turn(self.family.rope.for_length(tokens))

    def _turn(self, rope: Rope) -> bool:
        if rope is self.rope:
            return False
        self.rope = rope
        self._angles.clear()
        return True

    def angles(self, layer: int) -> Angles:
        """The current rotary table of this layer, valid until `turn_to` selects another."""
        rope = self.family.at(layer).rope
        rope = self.rope if rope is self.family.rope else rope
        if id(rope) not in self._angles:
            self._angles[id(rope)] = Angles(rope, self.capacity)
        return self._angles[id(rope)]

    def past(self, layer: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The first rows of keys and values [KV, rows, D] in float32; the kept memory itself if it is float32."""
        steps = self._steps(layer)
        keys, values = (widen(cache[layer][:, :rows], step) for cache, step in zip((self.keys, self.values), steps, strict=True))
        return keys, values

    def keep(self, layer: int, position: int, keys: np.ndarray, values: np.ndarray | None = None) -> None:
        """Store new float rows [KV, n, D] at `position`."""
        for cache, rows, step in zip((self.keys, self.values), (keys, values), self._steps(layer), strict=True):
            if rows is not None:
                cache[layer][:, position : position + rows.shape[1]] = narrow(rows, self.dtype, step)

    def _steps(self, layer: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        return (self.scales.keys[layer], self.scales.values[layer]) if self.scales else (None, None)


class PortableAttention:
    """Attention in static shapes of plain operators, on an NPU; `rows` is the rows of one run."""

    def __init__(self, family: Family, backend: Backend, log: RunLog, rows: int):
        self.family, self.backend, self.log, self.rows = family, backend, log, rows
        self._graphs: dict[tuple[int, int], Graph] = {}

    def prepare(self, sequence: Sequence) -> None:
        """Make every layer's graph for sequences of this capacity."""
        for layer in range(self.family.layers):
            self._graph(layer, sequence.capacity)

    def release(self, sequence: Sequence) -> None:
        """Does nothing: no memory of the sequence is held."""

    def run(self, layer: int, hidden: np.ndarray, sequence: Sequence, position: int) -> np.ndarray:
        """Hidden [n, H] after attention and residual; stores the new keys and values in the sequence at `position`."""
        n, rows, past, family, angles = len(hidden), self.rows, sequence.capacity, self.family, sequence.angles(layer)
        feeds = {
            "hidden": _pad_rows(hidden, rows),
            "cos": _pad_rows(angles.cos[position : position + n], rows),
            "sin": _pad_rows(angles.sin[position : position + n], rows),
            "mask": attention_mask(rows, past, position, family.window(layer)),
        }
        feeds["past_k"], past_values = sequence.past(layer, past)
        if family.value_dim:
            feeds["past_v"] = past_values
        out, keys, *values = self._graph(layer, sequence.capacity).run(feeds, n)
        sequence.keep(layer, position, keys[:, :n], values[0][:, :n] if values else None)
        return np.asarray(out[:n])

    def _graph(self, layer: int, past: int) -> Graph:
        if (layer, past) not in self._graphs:
            dims = {"T": self.rows, "P": past, "S": past + self.rows}
            session = self.backend.session(attention_name(layer, portable=True), dims)
            self._graphs[layer, past] = Graph(session, self.log, Kind.ATTENTION, layer, -1, self.backend.id, self.rows)
        return self._graphs[layer, past]


class FusedAttention:
    """Attention on the CPU as one operator that reads and extends the sequence's keys and values in place."""

    def __init__(self, family: Family, backend: Backend, log: RunLog):
        self.family, self.backend = family, backend
        self.graphs = [
            Graph(backend.session(attention_name(i), {}), log, Kind.ATTENTION, i, -1, backend.id, 0) for i in range(family.layers)
        ]
        self._lengths, self._total = np.zeros(1, np.int32), np.zeros((), np.int32)
        self._shared = {"seqlens": to_ort(self._lengths), "total": to_ort(self._total)}
        self._tables: dict[int, dict[str, ort.OrtValue]] = {}
        self._bindings: list[Binding] = []
        self._bound_to: tuple[Sequence, Rope] | None = None

    def prepare(self, sequence: Sequence) -> None:
        """Bind every layer to the sequence's memory."""
        if self._bound_to == (sequence, sequence.rope):
            return
        self._bound_to = (sequence, sequence.rope)
        self._tables = {}
        self._bindings = [self.bind(layer, sequence) for layer in range(self.family.layers)]

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's memory."""
        if self._bound_to and self._bound_to[0] is sequence:
            self._bound_to, self._tables, self._bindings = None, {}, []

    def run(self, layer: int, hidden: np.ndarray, sequence: Sequence, position: int) -> np.ndarray:
        """Hidden [n, H] after attention and residual; stores the new keys and values in the sequence at `position`."""
        out = np.empty_like(hidden)
        self.move_to(sequence, position + len(hidden))
        self.run_into(layer, to_ort(np.ascontiguousarray(hidden)), to_ort(out), len(hidden))
        return out

    def move_to(self, sequence: Sequence, end: int) -> None:
        """Have the next runs extend the sequence to `end` rows."""
        self.prepare(sequence)
        self._lengths[0], self._total[...] = end - 1, end

    def run_into(self, layer: int, hidden: ort.OrtValue, out: ort.OrtValue, n: int) -> None:
        """Like `run` over values of ONNX Runtime, after `move_to`."""
        binding = self._bindings[layer]
        binding.input("hidden", hidden)
        binding.output("hidden_out", out)
        self.graphs[layer].run_bound(binding, n)

    def bind(self, layer: int, sequence: Sequence) -> Binding:
        """A binding to the sequence's memory; the caller binds input `hidden` and output `hidden_out`."""
        if not self.family.attends(layer):
            return bind_states(self.graphs[layer].session, sequence.states[layer])
        keys, values = to_ort(sequence.keys[layer][None]), to_ort(sequence.values[layer][None])
        inputs = {**self._shared, **self._turning(layer, sequence), "past_k": keys, "past_v": values}
        if sequence.scales:
            inputs["k_scale"], inputs["v_scale"] = (
                to_ort(s[layer][None]) for s in (sequence.scales.keys, sequence.scales.values)
            )
        return Binding(self.graphs[layer].session, inputs, {"present_k": keys, "present_v": values})

    def _turning(self, layer: int, sequence: Sequence) -> dict[str, ort.OrtValue]:
        """The layer's rotary table in the operator's format, one copy for all layers that share it."""
        angles = sequence.angles(layer)
        if id(angles) not in self._tables:
            dtype = np.float16 if sequence.dtype == np.float16 else np.float32
            halves = {"cos": angles.half_cos, "sin": angles.half_sin}
            self._tables[id(angles)] = {name: to_ort(half.astype(dtype)) for name, half in halves.items()}
        return self._tables[id(angles)]


class LatentAttention:
    """Latent attention (MLA) on the CPU: cache input and output share their memory, so that only new rows are written.

    Runs cover the power of two that holds the whole step, not just the chunk, so that sums do not depend on the chunk's size.
    """

    def __init__(self, family: Family, backend: Backend, log: RunLog):
        self.family, self.backend = family, backend
        self.graphs = [
            Graph(backend.session(attention_name(i), {}), log, Kind.ATTENTION, i, -1, backend.id, 0) for i in range(family.layers)
        ]
        self._sequence: Sequence | None = None

    def prepare(self, sequence: Sequence) -> None:
        """Does nothing: nothing is bound in advance."""

    def release(self, sequence: Sequence) -> None:
        """Release the sequence."""
        if self._sequence is sequence:
            self._sequence = None

    def move_to(self, sequence: Sequence, end: int) -> None:
        """Have the next runs extend the sequence to `end` rows."""
        sequence.end = end
        self._sequence = sequence

    def run(self, layer: int, hidden: np.ndarray, sequence: Sequence, position: int) -> np.ndarray:
        """Hidden [n, H] after attention and residual; stores the new keys in the sequence at `position`."""
        out = np.empty_like(hidden)
        self._run(layer, to_ort(np.ascontiguousarray(hidden)), to_ort(out), sequence, position, len(hidden))
        return out

    def run_into(self, layer: int, hidden: ort.OrtValue, out: ort.OrtValue, n: int) -> None:
        """Like `run` over values of ONNX Runtime, after `move_to`."""
        assert self._sequence
        self._run(layer, hidden, out, self._sequence, self._sequence.end - n, n)

    def _run(self, layer: int, hidden: ort.OrtValue, out: ort.OrtValue, sequence: Sequence, position: int, n: int) -> None:
        graph = self.graphs[layer]
        if not self.family.attends(layer):
            binding = bind_states(graph.session, sequence.states[layer])
            binding.input("hidden", hidden)
            binding.output("hidden_out", out)
            graph.run_bound(binding, n)
            return
        size = past_tier(max(sequence.end, position + n))
        past, _ = sequence.past(layer, size)
        keys, angles = to_ort(past[0]), sequence.angles(layer)
        feeds = {
            "cos": angles.cos[position : position + n],
            "sin": angles.sin[position : position + n],
            "mask": attention_mask(n, size, position, self.family.window(layer), appended=False),
            "rows": np.arange(position, position + n, dtype=np.int64)[:, None],
        }
        if sequence.scales:
            feeds["k_scale"] = sequence.scales.keys[layer][0, 0]
        inputs = {name: to_ort(np.ascontiguousarray(value)) for name, value in feeds.items()} | {"hidden": hidden, "past_k": keys}
        graph.run_bound(Binding(graph.session, inputs, {"hidden_out": out, "present_k": keys}), n)
        if sequence.dtype != np.float32:
            sequence.keep(layer, position, past[:, position : position + n])


def bind_states(session: ort.InferenceSession, states: list[np.ndarray]) -> Binding:
    """A binding of a layer without attention to its states, which a run replaces; hidden and hidden_out remain to be bound."""
    memory = [to_ort(state) for state in states]
    before, after = ({f"{name}_{i}": state for i, state in enumerate(memory)} for name in ("state", "next"))
    return Binding(session, before, after)


Attention = PortableAttention | FusedAttention | LatentAttention


def make_attention(family: Family, backend: Backend, log: RunLog, rows: int) -> Attention:
    """The attention that the backend runs for this family."""
    if backend.tiers:
        return PortableAttention(family, backend, log, rows)
    return (FusedAttention if family.FUSED_ATTENTION else LatentAttention)(family, backend, log)


def attention_mask(rows: int, past: int, position: int, window: int = 0, appended: bool = True) -> np.ndarray:
    """Additive mask of `rows` new rows at `position`: each sees itself and earlier ones, the last `window` of them.

    Columns are the `past` rows of the cache, then the new rows if they are `appended`.
    """
    own = np.arange(position, position + rows)[:, None]
    columns = np.arange(past)
    if appended:
        # Rows of the cache from `position` on are empty.
        columns = np.concatenate([np.where(columns < position, columns, np.iinfo(np.int64).max), own[:, 0]])
    seen = columns <= own
    if window:
        seen &= columns > own - window
    return np.where(seen, np.float32(0), np.float32(MASKED))


def _pad_rows(values: np.ndarray, rows: int) -> np.ndarray:
    """The values padded with zero rows to `rows`."""
    if len(values) == rows:
        return np.ascontiguousarray(values)
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded
