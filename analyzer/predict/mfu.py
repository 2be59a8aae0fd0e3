"""Measured kernel efficiency from InferSim's benchmark tables, as a share of the roofline or as MFU.

A row's latency is a launch (what every row of the table leaves above its roofline) and the longer of computing and moving its
bytes, divided by an efficiency, the share of the roofline. So a product below the ridge gives an effective bandwidth, and
weights of another type take their own bytes at that bandwidth; above it, the row gives an MFU. For kernels without a count of
bytes here (indexed attention, delta rule, prefill attention) the efficiency is the MFU (operations per second over the peak).

The MFU in the tables is not used: it is rounded to three digits, and to zero for kernels bound by memory. A row with an MFU that
contradicts its latency is omitted. Peaks are those of the tables: fp16 for attention, fp8 for matrix products.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from analyzer.predict.curves import Curves, CurveValue, Point
from analyzer.tables.complexity import expected_distinct

ROOT = Path(__file__).parent / "infersim" / "bench_data"
PEAK = {"h20": {"fp16": 148e12, "fp8": 296e12}, "h800": {"fp16": 989e12, "fp8": 1979e12}}
"""Peaks in operations per second by which the tables' authors divide."""
BANDWIDTH = {"h20": 4096e9, "h800": 3430e9}
"""Bytes per second of the memory, by their hardware table."""

ATTENTION_DECODE = ("dtype", "kv_dtype", "batch_size", "kv_len", "latency_us", "mfu")
ATTENTION_PREFILL = ("dtype", "seq_len", "latency_us", "mfu")
CONTRADICTION = 0.25
"""A row is omitted where its MFU and the one of its latency differ by more than this share (and by more than rounding)."""
DSA_NAMES = {"decode": ("batch", "context"), "prefill": ("queries", "context")}
"""Names of the key and of x in the tables of sparse attention, by phase."""
KV_BYTES = {"bf16": 2, "fp8": 1}
Measured = tuple[tuple[float, ...], float, float, float, float]
"""A row's key, x, operations, bytes moved (0: not counted) and latency in µs."""


@dataclass(frozen=True)
class TableRow:
    """One line of a table; `where` is file:line."""

    values: dict[str, str]
    where: str

    def __getitem__(self, name: str) -> float:
        return float(self.values[name])


def table_rows(file: Path, names: tuple[str, ...] | None = None) -> Iterator[TableRow]:
    """The lines of a table; `names` for the file without a header."""
    short = file.relative_to(ROOT)
    with file.open(newline="") as lines:
        for line, cells in enumerate(csv.reader(lines), 1):
            if names is None:
                names = tuple(cells)
            elif cells and cells[0] != names[0]:
                yield TableRow(dict(zip(names, cells, strict=True)), f"{short}:{line}")


def efficiency_at(curves: Curves | None, key: tuple[float, ...], x: float) -> CurveValue | None:
    """The efficiency that a table gives for a shape; None without a table."""
    return replace(curves.at(key, x), launch_s=curves.launch_s, of_roofline=curves.of_roofline) if curves else None


@cache
def gemm_curves(device: str) -> Curves | None:
    """Matrix products [m, k] x [k, n] in fp8, results in 16 bit: key (k, n), x = m."""

    def measured(row: TableRow) -> Measured:
        m, k, n = row["m"], row["k"], row["n"]
        return (k, n), m, 2 * m * k * n, k * n + m * k + 2 * m * n, row["latency_us"]

    return _curves_from(("k", "n", "m"), f"gemm/{device}/data.csv", (device, "fp8"), measured)


@cache
def grouped_gemm_curves(device: str, phase: str, projection: str) -> Curves | None:
    """Grouped matrix products in fp8: key (experts on the device, hidden, width), x = rows per expert.

    projection: up (gate and up at once) | down.
    """
    size = "batch_size_per_gpu" if phase == "decode" else "seq_len_per_gpu"

    def measured(row: TableRow) -> Measured:
        pairs = row[size] * row["topk"]
        width = row["intermediate_size"] * (2 if projection == "up" else 1)
        key = (row["num_local_experts"], row["hidden_size"], row["intermediate_size"])
        used = expected_distinct(int(row["num_experts"]), int(row["topk"]), row[size] * row["num_gpus"]) / row["num_gpus"]
        moved = used * key[1] * width + pairs * (key[1] + 2 * width)
        return key, pairs / key[0], 2 * pairs * key[1] * width, moved, row[f"{projection}_proj_us"]

    names = ("experts on the device", "hidden", "expert width", "rows per expert")
    return _curves_from(names, f"grouped_gemm/{phase}/{device}/data.csv", (device, "fp8"), measured)


@cache
def decode_attention(device: str, shape: str, kv_type: str, per_token: float, cached: float) -> Curves | None:
    """Decode attention in 16 bit: key (batch,), x = length of the KV cache.

    shape: the table's name; per_token: operations per cached token; cached: its numbers.
    """

    def measured(row: TableRow) -> Measured | None:
        if row.values["kv_dtype"] != kv_type:
            return None
        tokens = row["batch_size"] * row["kv_len"]
        return (row["batch_size"],), row["kv_len"], per_token * tokens, cached * KV_BYTES[kv_type] * tokens, row["latency_us"]

    kind, name = shape.split("/")
    return _curves_from(("batch", "context"), f"{kind}/decode/{device}/{name}.csv", (device, "fp16"), measured, ATTENTION_DECODE)


@cache
def prefill_attention(device: str, shape: str, per_pair: float) -> Curves | None:
    """Causal prefill attention relative to the fp16 peak: key (1,), x = length of the prompt.

    shape: the table's name; per_pair: operations for each of the length² / 2 pairs.
    """

    def measured(row: TableRow) -> Measured:
        return (1.0,), row["seq_len"], per_pair * row["seq_len"] ** 2 / 2, 0.0, row["latency_us"]

    kind, name = shape.split("/")
    names = ("sequences", "prompt length")
    return _curves_from(names, f"{kind}/prefill/{device}/{name}.csv", (device, "fp16"), measured, ATTENTION_PREFILL)


@cache
def index_scores(device: str, phase: str, shape: tuple[int, int], per_pair: float) -> Curves | None:
    """An indexer's scores relative to the fp8 peak: key (sequences in decode, queries in prefill), x = context.

    shape: (heads, dim); per_pair: operations per query and prior token. Rows with several queries of a sequence per step
    (`next_n`) are omitted: decode here has one.
    """

    def decode(row: TableRow) -> Measured | None:
        pairs = row["batchsize"] * row["s_kv"]
        return ((row["batchsize"],), row["s_kv"], per_pair * pairs, 0.0, row["latency_us"]) if row["next_n"] == 1 else None

    def prefill(row: TableRow) -> Measured:
        pairs = row["s_q"] * (row["s_kv"] - row["s_q"] / 2)
        return (row["s_q"],), row["s_kv"], per_pair * pairs, 0.0, row["latency_us"]

    file = f"dsa/{phase}/{device}/logits-{shape[0]}-{shape[1]}.csv"
    return _curves_from(DSA_NAMES[phase], file, (device, "fp8"), decode if phase == "decode" else prefill)


@cache
def chosen_attention(device: str, phase: str, shape: tuple[int, int, int], per_pair: float) -> Curves | None:
    """Attention to chosen tokens relative to the fp16 peak: key (sequences in decode, queries in prefill), x = context.

    shape: (heads, numbers per key, tokens chosen); per_pair: operations per query and chosen token.
    """
    size, context = ("batch_size", "kv_len") if phase == "decode" else ("s_q", "s_kv")

    def measured(row: TableRow) -> Measured:
        return (row[size],), row[context], per_pair * row[size] * shape[2], 0.0, row["latency_us"]

    file = f"dsa/{phase}/{device}/attn-{shape[0]}-{shape[1]}-{shape[2]}.csv"
    return _curves_from(DSA_NAMES[phase], file, (device, "fp16"), measured)


@cache
def delta_rule(device: str, phase: str, shape: tuple[int, ...], per_token: float) -> Curves | None:
    """Convolution and gated delta rule relative to the fp16 peak: key (1,), x = sequences in decode, tokens in prefill.

    shape: (kernel, key heads, key dim, value heads, value dim); per_token: operations.
    """
    size = "batchsize" if phase == "decode" else "seq_len"

    def measured(row: TableRow) -> Measured:
        latency_us = sum(float(value) for name, value in row.values.items() if name != size)
        return (1.0,), row[size], per_token * row[size], 0.0, latency_us

    names = ("sequences", "batch" if phase == "decode" else "prompt length")
    return _curves_from(names, f"gdn/{phase}/{device}/{'-'.join(map(str, shape))}.csv", (device, "fp16"), measured)


def _curves_from(
    names: tuple[str, ...],
    file: str,
    peak: tuple[str, str],
    measured: Callable[[TableRow], Measured | None],
    header: tuple[str, ...] | None = None,
) -> Curves | None:
    """The curves of a table; None if there is none.

    peak: device and type in PEAK; header: the columns of a file without a header, whose MFU may contradict the latency.
    """
    if not (ROOT / file).exists():
        return None
    found = [(row, of_row) for row in table_rows(ROOT / file, header) if (of_row := measured(row))]
    device, dtype = peak
    counted = any(moved for _, (_, _, _, moved, _) in found)
    bounds = [max(ops / PEAK[device][dtype], moved / BANDWIDTH[device]) for _, (_, _, ops, moved, _) in found]
    points, launch = [], 0.0
    if counted:
        # The least kernel of a group is not small: its launch is that of a plain product.
        plain = gemm_curves(device) if file.startswith("grouped_gemm") else None
        left = (of_row[-1] * 1e-6 - bound for (_, of_row), bound in zip(found, bounds, strict=True))
        launch = plain.launch_s if plain else max(min(left), 0.0)
    for (row, (key, x, operations, _, latency_us)), bound in zip(found, bounds, strict=True):
        seconds = latency_us * 1e-6
        if header is None or _mfu_agrees(row, operations / PEAK[device][dtype] / seconds):
            points.append(Point(key, x, bound / (seconds - launch), row.where))
    products = file.startswith(("gemm", "grouped_gemm"))
    return Curves(names, _mean_of_repeats(points), launch, counted, products) if points else None


def _mfu_agrees(row: TableRow, mfu: float) -> bool:
    """Whether the MFU in a row is that of its latency."""
    rounding = 0.5 * 10 ** -len(row.values["mfu"].partition(".")[2])
    return abs(mfu - row["mfu"]) <= max(CONTRADICTION * mfu, 1.2 * rounding)


def _mean_of_repeats(points: list[Point]) -> list[Point]:
    """One point for each (key, x), the mean of repeated measurements."""
    repeats: dict[tuple[tuple[float, ...], float], list[Point]] = {}
    for point in points:
        repeats.setdefault((point.key, point.x), []).append(point)
    return [Point(p[0].key, p[0].x, sum(q.y for q in p) / len(p), p[0].where) for p in repeats.values()]
