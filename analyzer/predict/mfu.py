"""Measured kernel efficiency (MFU: operations per second over the unit's peak) from InferSim's benchmark tables.

MFU is computed from the measured latency: the MFU in the tables is rounded to three digits, and to zero for kernels bound
by memory. A row with an MFU that contradicts its latency is omitted. Peaks are those of the tables: fp16 for
attention, fp8 for matrix products.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from analyzer.predict.curves import Answer, Curves, Point

ROOT = Path(__file__).parent / "infersim" / "bench_data"
PEAK = {"h20": {"fp16": 148e12, "fp8": 296e12}, "h800": {"fp16": 989e12, "fp8": 1979e12}}
"""Peaks in operations per second by which the tables' authors divide."""

ATTENTION_DECODE = ("dtype", "kv_dtype", "batch_size", "kv_len", "latency_us", "mfu")
ATTENTION_PREFILL = ("dtype", "seq_len", "latency_us", "mfu")
CONTRADICTION = 0.25
"""A row is omitted where its MFU and the one of its latency differ by more than this share (and by more than rounding)."""


@dataclass(frozen=True)
class Row:
    """One line of a table; `where` is file:line."""

    values: dict[str, str]
    where: str

    def __getitem__(self, name: str) -> float:
        return float(self.values[name])


def rows(file: Path, names: tuple[str, ...] | None = None) -> Iterator[Row]:
    """The lines of a table; `names` for the file without a header."""
    short = file.relative_to(ROOT)
    with file.open(newline="") as lines:
        for line, cells in enumerate(csv.reader(lines), 1):
            if names is None:
                names = tuple(cells)
            elif cells and cells[0] != names[0]:
                yield Row(dict(zip(names, cells, strict=True)), f"{short}:{line}")


def at(curves: Curves | None, key: tuple[float, ...], x: float) -> Answer | None:
    """The MFU that a table gives for a shape; None without a table."""
    return curves.at(key, x) if curves else None


@cache
def gemm(device: str) -> Curves | None:
    """Matrix products [m, k] x [k, n] relative to the fp8 peak: key (k, n), x = m."""

    def point(row: Row) -> Point:
        return Point(
            (row["k"], row["n"]), row["m"], _mfu(2 * row["m"] * row["k"] * row["n"], row["latency_us"], device, "fp8"), row.where
        )

    return _curves(("k", "n", "m"), f"gemm/{device}/data.csv", point)


@cache
def grouped(device: str, phase: str, projection: str) -> Curves | None:
    """Grouped matrix products relative to the fp8 peak: key (experts on the device, hidden, width), x = rows per expert.

    projection: up (gate and up at once) | down.
    """
    size = "batch_size_per_gpu" if phase == "decode" else "seq_len_per_gpu"

    def point(row: Row) -> Point:
        pairs = row[size] * row["topk"]
        width = row["intermediate_size"] * (2 if projection == "up" else 1)
        key = (row["num_local_experts"], row["hidden_size"], row["intermediate_size"])
        return Point(
            key, pairs / key[0], _mfu(2 * pairs * key[1] * width, row[f"{projection}_proj_us"], device, "fp8"), row.where
        )

    names = ("experts on the device", "hidden", "expert width", "rows per expert")
    return _curves(names, f"grouped_gemm/{phase}/{device}/data.csv", point)


@cache
def decode_attention(device: str, shape: str, kv_type: str, per_token: float) -> Curves | None:
    """Decode attention relative to the fp16 peak: key (batch,), x = length of the KV cache.

    shape: the table's name; per_token: operations per cached token.
    """

    def point(row: Row) -> Point | None:
        if row.values["kv_dtype"] != kv_type:
            return None
        operations = per_token * row["batch_size"] * row["kv_len"]
        return _agreeing(row, (row["batch_size"],), row["kv_len"], operations, device)

    kind, name = shape.split("/")
    return _curves(("batch", "context"), f"{kind}/decode/{device}/{name}.csv", point, ATTENTION_DECODE)


@cache
def prefill_attention(device: str, shape: str, per_pair: float) -> Curves | None:
    """Causal prefill attention relative to the fp16 peak: key (1,), x = length of the prompt.

    shape: the table's name; per_pair: operations for each of the length² / 2 pairs.
    """

    def point(row: Row) -> Point | None:
        return _agreeing(row, (1.0,), row["seq_len"], per_pair * row["seq_len"] ** 2 / 2, device)

    kind, name = shape.split("/")
    return _curves(("sequences", "prompt length"), f"{kind}/prefill/{device}/{name}.csv", point, ATTENTION_PREFILL)


@cache
def index_scores(device: str, phase: str, shape: tuple[int, int], per_pair: float) -> Curves | None:
    """An indexer's scores relative to the fp8 peak: key (sequences in decode, queries in prefill), x = context.

    shape: (heads, dim); per_pair: operations per query and prior token. Rows with several queries of a sequence per step
    (`next_n`) are omitted: decode here has one.
    """

    def point(row: Row) -> Point | None:
        if phase == "decode":
            key, pairs = row["batchsize"], row["batchsize"] * row["s_kv"]
            if row["next_n"] != 1:
                return None
        else:
            key, pairs = row["s_q"], row["s_q"] * (row["s_kv"] - row["s_q"] / 2)
        return Point((key,), row["s_kv"], _mfu(per_pair * pairs, row["latency_us"], device, "fp8"), row.where)

    file = f"dsa/{phase}/{device}/logits-{shape[0]}-{shape[1]}.csv"
    return _curves(("batch" if phase == "decode" else "queries", "context"), file, point)


@cache
def chosen_attention(device: str, phase: str, shape: tuple[int, int, int], per_pair: float) -> Curves | None:
    """Attention to chosen tokens relative to the fp16 peak: key (sequences in decode, queries in prefill), x = context.

    shape: (heads, numbers per key, tokens chosen); per_pair: operations per query and chosen token.
    """
    size, context = ("batch_size", "kv_len") if phase == "decode" else ("s_q", "s_kv")

    def point(row: Row) -> Point:
        return Point(
            (row[size],), row[context], _mfu(per_pair * row[size] * shape[2], row["latency_us"], device, "fp16"), row.where
        )

    file = f"dsa/{phase}/{device}/attn-{shape[0]}-{shape[1]}-{shape[2]}.csv"
    return _curves(("batch" if phase == "decode" else "queries", "context"), file, point)


@cache
def delta_rule(device: str, phase: str, shape: tuple[int, ...], per_token: float) -> Curves | None:
    """Convolution and gated delta rule relative to the fp16 peak: key (1,), x = sequences in decode, tokens in prefill.

    shape: (kernel, key heads, key dim, value heads, value dim); per_token: operations.
    """
    size = "batchsize" if phase == "decode" else "seq_len"

    def point(row: Row) -> Point:
        latency_us = sum(float(value) for name, value in row.values.items() if name != size)
        return Point((1.0,), row[size], _mfu(per_token * row[size], latency_us, device, "fp16"), row.where)

    file = f"gdn/{phase}/{device}/{'-'.join(map(str, shape))}.csv"
    return _curves(("sequences", "batch" if phase == "decode" else "prompt length"), file, point)


def _mean_of_repeats(points: list[Point]) -> list[Point]:
    """One point for each (key, x), the mean of repeated measurements."""
    repeats: dict[tuple[tuple[float, ...], float], list[Point]] = {}
    for point in points:
        repeats.setdefault((point.key, point.x), []).append(point)
    return [Point(p[0].key, p[0].x, sum(q.y for q in p) / len(p), p[0].where) for p in repeats.values()]


def _curves(
    names: tuple[str, ...], file: str, point: Callable[[Row], Point | None], header: tuple[str, ...] | None = None
) -> Curves | None:
    """The curves of a table; None if there is none. `header`: the columns of a file without a header."""
    if not (ROOT / file).exists():
        return None
    points = [measured for row in rows(ROOT / file, header) if (measured := point(row)) is not None]
    return Curves(names, _mean_of_repeats(points)) if points else None


def _mfu(operations: float, latency_us: float, device: str, dtype: str) -> float:
    return operations / (latency_us * 1e-6 * PEAK[device][dtype])


def _agreeing(row: Row, key: tuple[float, ...], x: float, operations: float, device: str) -> Point | None:
    """The point of a row; None if its MFU contradicts its latency."""
    measured = _mfu(operations, row["latency_us"], device, "fp16")
    rounding = 0.5 * 10 ** -len(row.values["mfu"].partition(".")[2])
    if abs(measured - row["mfu"]) > max(CONTRADICTION * measured, 1.2 * rounding):
        return None
    return Point(key, x, measured, row.where)
