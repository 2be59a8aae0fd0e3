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
DSA_NAMES = {"decode": ("batch", "context"), "prefill": ("queries", "context")}
"""Names of the key and of x in the tables of sparse attention, by phase."""
Measured = tuple[tuple[float, ...], float, float, float]
"""A row's key, x, operations and latency in µs."""


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

    def measured(row: Row) -> Measured:
        return (row["k"], row["n"]), row["m"], 2 * row["m"] * row["k"] * row["n"], row["latency_us"]

    return _curves(("k", "n", "m"), f"gemm/{device}/data.csv", (device, "fp8"), measured)


@cache
def grouped(device: str, phase: str, projection: str) -> Curves | None:
    """Grouped matrix products relative to the fp8 peak: key (experts on the device, hidden, width), x = rows per expert.

    projection: up (gate and up at once) | down.
    """
    size = "batch_size_per_gpu" if phase == "decode" else "seq_len_per_gpu"

    def measured(row: Row) -> Measured:
        pairs = row[size] * row["topk"]
        width = row["intermediate_size"] * (2 if projection == "up" else 1)
        key = (row["num_local_experts"], row["hidden_size"], row["intermediate_size"])
        return key, pairs / key[0], 2 * pairs * key[1] * width, row[f"{projection}_proj_us"]

    names = ("experts on the device", "hidden", "expert width", "rows per expert")
    return _curves(names, f"grouped_gemm/{phase}/{device}/data.csv", (device, "fp8"), measured)


@cache
def decode_attention(device: str, shape: str, kv_type: str, per_token: float) -> Curves | None:
    """Decode attention relative to the fp16 peak: key (batch,), x = length of the KV cache.

    shape: the table's name; per_token: operations per cached token.
    """

    def measured(row: Row) -> Measured | None:
        if row.values["kv_dtype"] != kv_type:
            return None
        return (row["batch_size"],), row["kv_len"], per_token * row["batch_size"] * row["kv_len"], row["latency_us"]

    kind, name = shape.split("/")
    return _curves(("batch", "context"), f"{kind}/decode/{device}/{name}.csv", (device, "fp16"), measured, ATTENTION_DECODE)


@cache
def prefill_attention(device: str, shape: str, per_pair: float) -> Curves | None:
    """Causal prefill attention relative to the fp16 peak: key (1,), x = length of the prompt.

    shape: the table's name; per_pair: operations for each of the length² / 2 pairs.
    """

    def measured(row: Row) -> Measured:
        return (1.0,), row["seq_len"], per_pair * row["seq_len"] ** 2 / 2, row["latency_us"]

    kind, name = shape.split("/")
    names = ("sequences", "prompt length")
    return _curves(names, f"{kind}/prefill/{device}/{name}.csv", (device, "fp16"), measured, ATTENTION_PREFILL)


@cache
def index_scores(device: str, phase: str, shape: tuple[int, int], per_pair: float) -> Curves | None:
    """An indexer's scores relative to the fp8 peak: key (sequences in decode, queries in prefill), x = context.

    shape: (heads, dim); per_pair: operations per query and prior token. Rows with several queries of a sequence per step
    (`next_n`) are omitted: decode here has one.
    """

    def decode(row: Row) -> Measured | None:
        pairs = row["batchsize"] * row["s_kv"]
        return ((row["batchsize"],), row["s_kv"], per_pair * pairs, row["latency_us"]) if row["next_n"] == 1 else None

    def prefill(row: Row) -> Measured:
        pairs = row["s_q"] * (row["s_kv"] - row["s_q"] / 2)
        return (row["s_q"],), row["s_kv"], per_pair * pairs, row["latency_us"]

    file = f"dsa/{phase}/{device}/logits-{shape[0]}-{shape[1]}.csv"
    return _curves(DSA_NAMES[phase], file, (device, "fp8"), decode if phase == "decode" else prefill)


@cache
def chosen_attention(device: str, phase: str, shape: tuple[int, int, int], per_pair: float) -> Curves | None:
    """Attention to chosen tokens relative to the fp16 peak: key (sequences in decode, queries in prefill), x = context.

    shape: (heads, numbers per key, tokens chosen); per_pair: operations per query and chosen token.
    """
    size, context = ("batch_size", "kv_len") if phase == "decode" else ("s_q", "s_kv")

    def measured(row: Row) -> Measured:
        return (row[size],), row[context], per_pair * row[size] * shape[2], row["latency_us"]

    file = f"dsa/{phase}/{device}/attn-{shape[0]}-{shape[1]}-{shape[2]}.csv"
    return _curves(DSA_NAMES[phase], file, (device, "fp16"), measured)


@cache
def delta_rule(device: str, phase: str, shape: tuple[int, ...], per_token: float) -> Curves | None:
    """Convolution and gated delta rule relative to the fp16 peak: key (1,), x = sequences in decode, tokens in prefill.

    shape: (kernel, key heads, key dim, value heads, value dim); per_token: operations.
    """
    size = "batchsize" if phase == "decode" else "seq_len"

    def measured(row: Row) -> Measured:
        latency_us = sum(float(value) for name, value in row.values.items() if name != size)
        return (1.0,), row[size], per_token * row[size], latency_us

    names = ("sequences", "batch" if phase == "decode" else "prompt length")
    return _curves(names, f"gdn/{phase}/{device}/{'-'.join(map(str, shape))}.csv", (device, "fp16"), measured)


def _curves(
    names: tuple[str, ...],
    file: str,
    peak: tuple[str, str],
    measured: Callable[[Row], Measured | None],
    header: tuple[str, ...] | None = None,
) -> Curves | None:
    """The curves of a table; None if there is none.

    peak: device and type in PEAK; header: the columns of a file without a header, whose MFU may contradict the latency.
    """
    if not (ROOT / file).exists():
        return None
    points = []
    for row in rows(ROOT / file, header):
        if found := measured(row):
            key, x, operations, latency_us = found
            mfu = operations / (latency_us * 1e-6 * PEAK[peak[0]][peak[1]])
            if header is None or _agrees(row, mfu):
                points.append(Point(key, x, mfu, row.where))
    return Curves(names, _mean_of_repeats(points)) if points else None


def _agrees(row: Row, mfu: float) -> bool:
    """Whether the MFU in a row is that of its latency."""
    rounding = 0.5 * 10 ** -len(row.values["mfu"].partition(".")[2])
    return abs(mfu - row["mfu"]) <= max(CONTRADICTION * mfu, 1.2 * rounding)


def _mean_of_repeats(points: list[Point]) -> list[Point]:
    """One point for each (key, x), the mean of repeated measurements."""
    repeats: dict[tuple[tuple[float, ...], float], list[Point]] = {}
    for point in points:
        repeats.setdefault((point.key, point.x), []).append(point)
    return [Point(p[0].key, p[0].x, sum(q.y for q in p) / len(p), p[0].where) for p in repeats.values()]
