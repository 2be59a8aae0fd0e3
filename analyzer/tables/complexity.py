"""The work of an operator in closed form: floating-point operations and bytes, from the shapes of its tensors.

Shapes are ggml's, innermost dimension first. A multiplication and an addition are two operations; a transcendental function
counts as one. Bytes are the minimum that must move: each source read whole and the result written once, except for operators
that touch part of a tensor (an embedding's rows, the chosen experts). If a shape or element type is unknown, the figures are
NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import nan, prod

import numpy as np
import pandas as pd

from analyzer.records.contents import address_numbers
from analyzer.records.schema import Columns, equals_any
from analyzer.records.spans import EVER, NONE, latest_or_following, number_rows, shared_codes
from analyzer.tables.nodes import NEVER_RUN
from moescope.packaged import toml_beside

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    int(number): tuple(facts) for number, facts in toml_beside(__file__, "ggml_types.toml").items()
}
"""ggml's number of an element type → (name, elements per block, bytes per block)."""
VIEWS_DEEP = 3
BLOCKS = {name: (elements, size) for name, elements, size in GGML_TYPES.values()}


@dataclass(frozen=True)
class Tensor:
    """A tensor's dimensions, innermost first, and element type."""

    dims: tuple[int, ...]
    dtype: str = "F32"

    @property
    def elements(self) -> int:
        """Product of the dimensions."""
        return prod(self.dims)

    def dim(self, i: int) -> int:
        """Dimension i; 1 beyond the recorded dimensions."""
        return self.dims[i] if i < len(self.dims) else 1

    def bytes(self, elements: int | None = None) -> float:
        """Bytes of `elements` elements, by default of all; NaN for an unknown element type."""
        count, size = BLOCKS.get(self.dtype, (1, nan))
        return (self.elements if elements is None else elements) / count * size


@dataclass(frozen=True)
class Work:
    """Floating-point operations, bytes read and bytes written."""

    flops: float
    read: float
    written: float


@dataclass(frozen=True)
class OpContext:
    """Inputs beyond shapes: number of distinct experts that the rows chose, and tokens in the context; NaN: unknown."""

    distinct: float = nan
    context: float = nan


Formula = Callable[[Tensor, list[Tensor], OpContext], Work]
UNKNOWN = Work(nan, nan, nan)


def full_traffic(flops: float, out: Tensor, sources: list[Tensor]) -> Work:
    """Each source is read and the result written once."""
    return Work(flops, sum(source.bytes() for source in sources), out.bytes())


def elementwise(per_element: float) -> Formula:
    """A fixed number of operations for each element of the result."""
    return lambda out, sources, _: full_traffic(per_element * out.elements, out, sources)


def mul_mat(out: Tensor, sources: list[Tensor], _: OpContext) -> Work:
    """[K, M] x [K, N] → [M, N] for each outer index: 2 K M N."""
    return full_traffic(2.0 * sources[0].dim(0) * out.elements, out, sources)


def mul_mat_id(out: Tensor, sources: list[Tensor], facts: OpContext) -> Work:
    """Experts [K, M, E], rows, ids [k, N] → [M, k, N]: 2 K M k N; only the chosen experts are read."""
    experts, rows, ids = sources[:3]
    expert_bytes = experts.bytes() / max(experts.dim(2), 1)
    expected = expected_distinct(experts.dim(2), ids.dim(0), ids.dim(1))
    used = expected if np.isnan(facts.distinct) else facts.distinct
    return Work(2.0 * experts.dim(0) * out.elements, used * expert_bytes + rows.bytes() + ids.bytes(), out.bytes())


def expected_distinct(experts: int, k: int, tokens: float) -> float:
    """Expected number of distinct experts of B = `tokens` tokens that each choose k uniformly: E (1 - ((E - k) / E)^B)."""
    return experts * (1 - ((experts - k) / experts) ** tokens) if experts else 0.0


def flash_attention(out: Tensor, sources: list[Tensor], facts: OpContext) -> Work:
    """q [D, N, H], k [D, S, .], v [Dv, S, .]: 2 N H S (D + Dv) for both products, 5 N H S for the softmax.

    An engine may read a longer part of its cache without a new tensor definition; S is at least the context.
    """
    q, k, v = sources[:3]
    length = max(k.dim(1), 0 if np.isnan(facts.context) else facts.context)
    longer = length / k.dim(1) if k.dim(1) else 1.0
    flops = q.dim(1) * q.dim(2) * q.dim(3) * length * (2.0 * (k.dim(0) + v.dim(0)) + 5.0)
    return Work(flops, q.bytes() + longer * sum(source.bytes() for source in sources[1:]), out.bytes())


def get_rows(out: Tensor, sources: list[Tensor], _: OpContext) -> Work:
    """Only the requested rows are read."""
    return Work(0.0, sources[0].bytes(out.elements) + sum(s.bytes() for s in sources[1:]), out.bytes())


def set_rows(out: Tensor, sources: list[Tensor], _: OpContext) -> Work:
    """Only the given rows are written, and their indices are read; the rest of the destination is untouched."""
    rows, ids = sources[:2]
    count = rows.elements // max(rows.dim(0), 1)
    return Work(0.0, rows.bytes() + ids.bytes(count), out.bytes(rows.elements))


def reduction(out: Tensor, sources: list[Tensor], _: OpContext) -> Work:
    """One operation for each element of the source."""
    return full_traffic(float(sources[0].elements), out, sources)


FORMULAS: dict[str, tuple[int, Formula]] = {
    "MUL_MAT": (2, mul_mat),
    "OUT_PROD": (2, mul_mat),
    "MUL_MAT_ID": (3, mul_mat_id),
    "FLASH_ATTN_EXT": (3, flash_attention),
    "GET_ROWS": (2, get_rows),
    "SET_ROWS": (2, set_rows),
    "SUM_ROWS": (1, reduction),
    "SUM": (1, reduction),
    "MEAN": (1, reduction),
    "SOFT_MAX": (1, elementwise(5)),  # maximum, difference, exponential, sum, quotient
    "RMS_NORM": (1, elementwise(3)),  # square, sum, product
    "NORM": (1, elementwise(5)),  # mean, difference, square, sum, product
    "RMS_NORM+MUL": (1, elementwise(4)),
    "NORM+MUL": (1, elementwise(6)),
    "ROPE": (1, elementwise(3)),  # four products and two sums for each pair
    "GLU": (1, elementwise(2)),
    "UNARY": (1, elementwise(1)),
    **{name: (1, elementwise(1)) for name in ("ADD", "ADD_ID", "ADD1", "SUB", "MUL", "DIV", "SCALE", "SQR", "SQRT", "CLAMP")},
    **{name: (1, elementwise(0)) for name in ("CPY", "DUP", "CONT", "CONCAT", "REPEAT", "ARGSORT", "TOP_K", "PAD", "SET")},
}
"""Operator type → (how many sources must be known, its formula)."""


def work_of(kind: str, out: Tensor, sources: list[Tensor], facts: OpContext | None = None) -> Work:
    """The work of one operator."""
    needed, formula = FORMULAS.get(kind, (0, None))
    if formula is None or len(sources) < needed or not out.dims:
        return UNKNOWN
    return formula(out, sources, facts or OpContext())


def parse_tensor(shape: str, dtype: str) -> Tensor:
    """A tensor from the text of its shape, "2048x1"."""
    return Tensor(tuple(int(dim) for dim in shape.split("x")) if shape else (), dtype)


class TensorLookup:
    """The definitions of tensors, looked up by (process, tensor, time)."""

    def __init__(self, tensors: pd.DataFrame):
        self.since = tensors["since_ns"].to_numpy()
        self.key, keys = pd.factorize(address_numbers(tensors["pid"].to_numpy(), tensors["tensor"].to_numpy()))
        self.index = pd.Index(keys)
        self.count = np.bincount(self.key, minlength=len(keys))
        self.only = np.full(len(keys), NONE, np.int64)
        self.only[self.key] = np.arange(len(self.key))

    def rows(self, pid: np.ndarray, tensor: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """Row of each definition: the latest at that time, else the first after it; -1 if there is none."""
        if len(self.key) == 0 or len(tensor) == 0:
            return np.full(len(tensor), NONE, np.int64)
        number, values = pd.factorize(address_numbers(pid, tensor))
        return self.rows_of(number, values, ts)

    def rows_of(self, number: np.ndarray, values: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """The same as `rows` for the results values[number], which are numbers from `identities`."""
        if len(self.key) == 0 or len(number) == 0:
            return np.full(len(number), NONE, np.int64)
        asked = self.index.get_indexer(pd.Index(values))[number]
        row = np.where(asked >= 0, self.only[asked], NONE)
        redescribed = np.flatnonzero((asked >= 0) & (self.count[asked] > 1))
        if len(redescribed):
            row[redescribed] = latest_or_following(self.key, self.since, asked[redescribed], ts[redescribed])
        return row


class OperatorWork:
    """The work of operators; computed once for each combination of type, shapes and facts."""

    def __init__(self, tensors: pd.DataFrame, described: TensorLookup):
        self.described = described
        texts = (tensors["shape"] + "/" + tensors["dtype"]).to_numpy()
        number, values = pd.factorize(texts)
        self.shape, self.parsed = np.append(number, NONE), [parse_tensor(*text.split("/")) for text in values]
        self.computed = np.append((tensors["shape"] != "").to_numpy() & ~tensors["type"].isin(NEVER_RUN).to_numpy(), False)
        self.changes = np.unique(described.since)
        self.sources = declared_sources(tensors)
        self.part = np.append((tensors["type"] == "VIEW").to_numpy(), False)
        self.renames = np.append(tensors["type"].isin(("RESHAPE", "PERMUTE", "TRANSPOSE")).to_numpy(), False)
        self.size = np.append([min(self.parsed[n].elements, EVER) for n in number], 0).astype(np.int64)

    def columns(self, operators: Columns, routes: Columns, lengths: pd.DataFrame) -> dict[str, np.ndarray]:
        """The columns flops, read_bytes and written_bytes of the table `operators`.

        `operators` has token_id, layer, pid, type and `described`, the row of each result's definition at the time
        `described_ns`; `lengths` the position and number of tokens of each step.
        """
        figures = {name: np.full(len(operators["described"]), nan) for name in ("flops", "read_bytes", "written_bytes")}
        types = operators["type"]
        rows = np.flatnonzero(self.computed[operators["described"]] & equals_any(types, *FORMULAS))
        if len(rows):
            out, step, kind = operators["described"][rows], operators["token_id"][rows], types.indices.to_numpy()[rows]
            shapes, inverse = self._shapes(kind, out, operators["pid"][rows], operators["described_ns"][rows])
            distinct = np.full(len(rows), nan)
            routed = np.flatnonzero(equals_any(types, "MUL_MAT_ID")[rows])
            distinct[routed] = distinct_experts(step[routed], operators["layer"][rows[routed]], routes)
            context = np.full(len(rows), nan)
            attention = np.flatnonzero(equals_any(types, "FLASH_ATTN_EXT")[rows])
            context[attention] = context_lengths(step[attention], lengths)
            answer, key = self._figures(types.dictionary.to_pylist(), shapes, inverse, distinct, context)
            for column, values in zip(figures.values(), answer.T, strict=True):
                column[rows] = values[key]
        return figures

    def _shapes(self, kind: np.ndarray, out: np.ndarray, pid: np.ndarray, ts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(kind, shape of the result, shapes of its sources) of each distinct operator, and its index for each row."""
        settled = ts.min() >= self.changes[-1]
        epoch = np.zeros(len(out), np.int64) if settled else np.searchsorted(self.changes, ts, "right")
        key, first = number_rows(kind, out, epoch, pid)
        sources = self._source_rows(out[first], pid[first], ts[first])
        shapes = np.column_stack((kind[first], self.shape[out[first]], *self.shape[sources].T))
        return shapes, key

    def _source_rows(self, out: np.ndarray, pid: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """Definition rows of each result's first sources, [results, widest]; -1 for none."""
        asked = self.sources[out]
        answer = np.full(asked.shape, NONE, np.int64)
        for i in range(asked.shape[1]):
            real = np.flatnonzero(asked[:, i] != 0)
            row = self.described.rows(pid[real], asked[real, i], ts[real])
            answer[real, i] = self._renewed(row, pid[real], ts[real])
        return answer

    def _renewed(self, row: np.ndarray, pid: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """Definition rows with views replaced by their source if its size has changed since: engines do not redefine every view.

        A partial view has fewer elements; all other operators that rename memory keep the number.
        """
        size = self.size
        for _ in range(VIEWS_DEEP):
            base = self.described.rows(pid, self.sources[row, 0], ts)
            stale = self.part[row] & (size[row] > size[base]) | self.renames[row] & (size[row] != size[base])
            row = np.where((base >= 0) & stale, base, row)
        return row

    def _figures(
        self, names: list[str], shapes: np.ndarray, inverse: np.ndarray, distinct: np.ndarray, context: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """((flops, read, written) of each combination of types, shapes and facts, [n, 3]; the combination of each row)."""
        same = np.unique(shapes, axis=0, return_inverse=True)[1].reshape(-1)
        key, first = number_rows(
            same[inverse], *(np.nan_to_num(facts, nan=NONE).astype(np.int64) for facts in (distinct, context))
        )
        answer = []
        for row in first.tolist():
            kind, out, *sources = shapes[inverse[row]].tolist()
            known_sources = [self.parsed[s] for s in sources if s >= 0]
            work = work_of(names[kind], self.parsed[out], known_sources, OpContext(distinct[row], context[row]))
            answer.append((work.flops, work.read, work.written))
        return np.array(answer).reshape(-1, 3), key


def declared_sources(tensors: pd.DataFrame) -> np.ndarray:
    """The first sources of each definition, [definitions + 1, widest]; 0 for none."""
    lists = tensors["sources"].to_numpy()
    width = max(1, min(max((len(sources) for sources in lists), default=0), 5))
    declared = np.zeros((len(lists) + 1, width), np.uint64)
    for row, sources in enumerate(lists):
        declared[row, : min(len(sources), width)] = sources[:width]
    return declared


def context_lengths(step: np.ndarray, lengths: pd.DataFrame) -> np.ndarray:
    """Tokens in the context of each step, including its own; NaN if unknown."""
    length = (lengths["position"] + lengths["n_tokens"]).where(lengths["position"] >= 0).astype(np.float64)
    return length.set_axis(lengths["token_id"]).reindex(step).to_numpy(np.float64)


def distinct_experts(step: np.ndarray, layer: np.ndarray, routes: Columns) -> np.ndarray:
    """The number of distinct experts that the rows of a step chose in a layer; NaN if not recorded."""
    if len(routes["token_id"]) == 0 or len(step) == 0:
        return np.full(len(step), nan)
    routed, asked = shared_codes((routes["token_id"], routes["layer"]), (step, layer))
    choices = number_rows(routed, routes["expert"])[1]
    counted = np.bincount(routed[choices], minlength=int(asked.max()) + 1)[asked]
    return np.where(counted > 0, counted.astype(np.float64), nan)
