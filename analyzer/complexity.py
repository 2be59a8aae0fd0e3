"""What an operator has to do, in closed form: floating-point operations and bytes, from the shapes of its tensors.

Shapes are ggml's, innermost dimension first. A multiplication and an addition are two operations; a transcendental function
counts as one. Bytes are those that have to move at least once: each source read whole and the result written, but for operators
that touch a part of a tensor (an embedding's rows, the chosen experts). Where a shape or element type is not known, so are the
figures (NaN).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import nan, prod
from typing import Any

import numpy as np
import pandas as pd

from analyzer.spans import NONE, codes, following, latest

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""ggml's number of an element type → (name, elements per block, bytes per block), as ggml.h and gguf declare them."""
ASKED = ("type", "shape", "pid", "tensor", "end_ns", "token_id", "layer")
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
        """Dimension i; 1 beyond those given."""
        return self.dims[i] if i < len(self.dims) else 1

    def bytes(self, elements: int | None = None) -> float:
        """Bytes of that many elements, of all by default; NaN for an unknown element type."""
        count, size = BLOCKS.get(self.dtype, (1, nan))
        return (self.elements if elements is None else elements) / count * size


@dataclass(frozen=True)
class Work:
    """Floating-point operations, bytes read and bytes written."""

    flops: float
    read: float
    written: float


@dataclass(frozen=True)
class Facts:
    """What shapes alone do not tell: experts that the rows chose between them, and tokens in the context; NaN: not known."""

    distinct: float = nan
    context: float = nan


Formula = Callable[[Tensor, list[Tensor], Facts], Work]
UNKNOWN = Work(nan, nan, nan)


def whole(flops: float, out: Tensor, sources: list[Tensor]) -> Work:
    """Every source read and the result written once."""
    return Work(flops, sum(source.bytes() for source in sources), out.bytes())


def elementwise(per_element: float) -> Formula:
    """A fixed number of operations for each element of the result."""
    return lambda out, sources, _: whole(per_element * out.elements, out, sources)


def mul_mat(out: Tensor, sources: list[Tensor], _: Facts) -> Work:
    """[K, M] x [K, N] → [M, N] for each outer index: 2 K M N."""
    return whole(2.0 * sources[0].dim(0) * out.elements, out, sources)


def mul_mat_id(out: Tensor, sources: list[Tensor], facts: Facts) -> Work:
    """Experts [K, M, E], rows, ids [k, N] → [M, k, N]: 2 K M k N; of the experts, only the chosen ones are read."""
    experts, rows, ids = sources[:3]
    one = experts.bytes() / max(experts.dim(2), 1)
    expected = expected_distinct(experts.dim(2), ids.dim(0), ids.dim(1))
    used = expected if np.isnan(facts.distinct) else facts.distinct
    return Work(2.0 * experts.dim(0) * out.elements, used * one + rows.bytes() + ids.bytes(), out.bytes())


def expected_distinct(experts: int, k: int, tokens: int) -> float:
    """Experts that `tokens` tokens choose between them when each takes k of them uniformly: E (1 - ((E - k) / E)^B)."""
    return experts * (1 - ((experts - k) / experts) ** tokens) if experts else 0.0


def flash_attention(out: Tensor, sources: list[Tensor], facts: Facts) -> Work:
    """q [D, N, H], k [D, S, .], v [Dv, S, .]: 2 N H S (D + Dv) for both products, 5 N H S for the softmax.

    An engine may take a longer part of its cache without telling it anew; S is at least the context.
    """
    q, k, v = sources[:3]
    length = max(k.dim(1), 0 if np.isnan(facts.context) else facts.context)
    longer = length / k.dim(1) if k.dim(1) else 1.0
    flops = q.dim(1) * q.dim(2) * q.dim(3) * length * (2.0 * (k.dim(0) + v.dim(0)) + 5.0)
    return Work(flops, q.bytes() + longer * sum(source.bytes() for source in sources[1:]), out.bytes())


def get_rows(out: Tensor, sources: list[Tensor], _: Facts) -> Work:
    """Only the rows that are asked for are read."""
    return Work(0.0, sources[0].bytes(out.elements) + sum(s.bytes() for s in sources[1:]), out.bytes())


def set_rows(out: Tensor, sources: list[Tensor], _: Facts) -> Work:
    """Only the rows that are given are written, each with its index; the rest of the destination is left alone."""
    rows, ids = sources[:2]
    count = rows.elements // max(rows.dim(0), 1)
    return Work(0.0, rows.bytes() + ids.bytes(count), out.bytes(rows.elements))


def reduction(out: Tensor, sources: list[Tensor], _: Facts) -> Work:
    """One operation for each element of the source."""
    return whole(float(sources[0].elements), out, sources)


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


def work_of(kind: str, out: Tensor, sources: list[Tensor], facts: Facts | None = None) -> Work:
    """The work of one operator."""
    needed, formula = FORMULAS.get(kind, (0, None))
    if formula is None or len(sources) < needed or not out.dims:
        return UNKNOWN
    return formula(out, sources, facts or Facts())


def parse(shape: str, dtype: str) -> Tensor:
    """A tensor from the text of its shape, "2048x1"."""
    return Tensor(tuple(int(dim) for dim in shape.split("x")) if shape else (), dtype)


class Described:
    """The definitions of tensors, to be found by (process, tensor, time)."""

    def __init__(self, tensors: pd.DataFrame):
        self.pid, self.tensor = tensors["pid"].to_numpy(), tensors["tensor"].to_numpy()
        self.since = tensors["since_ns"].to_numpy()

    def rows(self, pid: np.ndarray, tensor: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """Row of each definition: the latest at that time, else the first after it; -1 where there is none."""
        n = len(self.pid)
        if n == 0:
            return np.full(len(tensor), NONE, np.int64)
        key = codes(np.concatenate((self.pid, pid)), np.concatenate((self.tensor, tensor)))
        row = latest(key[:n], self.since, key[n:], ts)
        late = np.flatnonzero(row < 0)
        row[late] = following(key[:n], self.since, key[n:][late], ts[late])
        return row


def work_columns(
    columns: dict[str, Any], tensors: pd.DataFrame, routes: pd.DataFrame, tokens: pd.DataFrame
) -> dict[str, np.ndarray]:
    """The columns flops, read_bytes and written_bytes of the table `operators`. Equal operators are computed once."""
    operators = pd.DataFrame({name: columns[name] for name in ASKED}, copy=False)
    known = operators["type"].isin(list(FORMULAS)).to_numpy() & (operators["shape"] != "").to_numpy()
    rows = np.flatnonzero(known)
    figures = np.full((len(operators), 3), nan)
    if len(rows) and len(tensors):
        kinds, pid, tensor, ts = (operators[name].to_numpy()[rows] for name in ("type", "pid", "tensor", "end_ns"))
        described = Described(tensors)
        out = described.rows(pid, tensor, ts)
        facts = (distinct_experts(operators.iloc[rows], routes), contexts(operators.iloc[rows], tokens))
        table = source_rows(described, tensors, out, pid, ts)
        figures[rows] = figures_of(kinds, tensors, out, table, facts)
    return {name: figures[:, i].copy() for i, name in enumerate(("flops", "read_bytes", "written_bytes"))}


def source_rows(described: Described, tensors: pd.DataFrame, out: np.ndarray, pid: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """Rows in `tensors` of each operator's first sources, [operators, widest]; -1 where there is none."""
    lists = tensors["sources"].to_numpy()
    width = min(max((len(one) for one in lists), default=0), 5)
    declared = np.zeros((len(lists) + 1, width), np.uint64)
    for at, sources in enumerate(lists):
        declared[at, : len(sources)] = sources[:width]
    asked = declared[out]
    answer = np.full(asked.shape, NONE, np.int64)
    for i in range(width):
        real = np.flatnonzero(asked[:, i] != 0)
        row = described.rows(pid[real], asked[real, i], ts[real])
        answer[real, i] = renewed(described, tensors, declared, row, pid[real], ts[real])
    return answer


def renewed(
    described: Described, tensors: pd.DataFrame, declared: np.ndarray, row: np.ndarray, pid: np.ndarray, ts: np.ndarray
) -> np.ndarray:
    """Definitions of views, replaced by what they rename where that has another size by now: views are not always told anew.

    A view of a part has fewer elements; every other way to rename memory keeps their number.
    """
    if declared.shape[1] == 0:
        return row
    part = np.append((tensors["type"] == "VIEW").to_numpy(), False)
    renames = np.append(tensors["type"].isin(("RESHAPE", "PERMUTE", "TRANSPOSE")).to_numpy(), False)
    size = np.append([parse(shape, "").elements for shape in tensors["shape"]], 0)
    for _ in range(VIEWS_DEEP):
        base = described.rows(pid, declared[row, 0], ts)
        stale = (base >= 0) & (part[row] & (size[row] > size[base]) | renames[row] & (size[row] != size[base]))
        row = np.where(stale, base, row)
    return row


def figures_of(
    kinds: np.ndarray, tensors: pd.DataFrame, out: np.ndarray, sources: np.ndarray, facts: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """(flops, read, written) of each operator: one computation for each combination of type, shapes and facts."""
    what = pd.factorize(pd.Series(tensors["shape"] + "/" + tensors["dtype"]))
    shape = np.append(what[0], NONE)
    distinct, context = facts
    columns = [pd.factorize(kinds)[0], shape[out], *(shape[sources[:, i]] for i in range(sources.shape[1]))]
    key = codes(*columns, pd.factorize(distinct)[0], pd.factorize(context)[0])
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    made = [parse(*text.split("/")) for text in what[1]]
    answer = []
    for row in first.tolist():
        given = [made[shape[s]] for s in sources[row] if s >= 0]
        known = Facts(distinct[row], context[row])
        work = work_of(kinds[row], made[shape[out[row]]], given, known) if out[row] >= 0 else UNKNOWN
        answer.append((work.flops, work.read, work.written))
    return np.array(answer).reshape(-1, 3)[inverse]


def contexts(operators: pd.DataFrame, tokens: pd.DataFrame) -> np.ndarray:
    """Tokens in the context of each attention over a cache, those of its own step included; NaN where not told."""
    length = (tokens["position"] + tokens["n_tokens"]).where(tokens["position"] >= 0).astype(np.float64)
    found = length.set_axis(tokens["token_id"]).reindex(operators["token_id"]).to_numpy(np.float64)
    return np.where(operators["type"] == "FLASH_ATTN_EXT", found, nan)


def distinct_experts(operators: pd.DataFrame, routes: pd.DataFrame) -> np.ndarray:
    """How many experts the rows of each operator's token chose in its layer; NaN where that was not recorded."""
    if len(routes) == 0:
        return np.full(len(operators), nan)
    counted = routes.groupby(["token_id", "layer"])["expert"].nunique()
    place = pd.MultiIndex.from_arrays([operators["token_id"], operators["layer"]])
    found = counted.reindex(place).to_numpy(np.float64)
    return np.where(operators["type"] == "MUL_MAT_ID", found, nan)
