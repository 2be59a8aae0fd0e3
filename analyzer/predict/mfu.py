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


def gemm(device: str, m: float, k: float, n: float) -> Answer | None:
    """MFU of a matrix product [m, k] x [k, n] relative to the fp8 peak; None if the device has no table."""
    return _at(_gemm(device), (float(k), float(n)), m)


def grouped(device: str, phase: str, projection: str, key: tuple[float, float, float], rows_each: float) -> Answer | None:
    """MFU of grouped matrix products relative to the fp8 peak.

    projection: up (gate and up at once) | down; key: (experts on the device, hidden, width); rows_each: rows per expert.
    """
    return _at(_grouped(device, phase, projection), key, rows_each)


def decode_attention(device: str, shape: str, kv_type: str, batch: float, kv_len: float, per_token: float) -> Answer | None:
    """MFU of decode attention relative to the fp16 peak. `shape`: the table's name; `per_token`: operations per cached token."""
    return _at(_decode(device, shape, kv_type, per_token), (float(batch),), kv_len)


def prefill_attention(device: str, shape: str, length: float, per_pair: float) -> Answer | None:
    """MFU of causal prefill attention relative to the fp16 peak; `per_pair`: operations for each of the length² / 2 pairs."""
    return _at(_prefill(device, shape, per_pair), (1.0,), length)


def index_scores(
    device: str, phase: str, shape: tuple[int, int], sequences: float, context: float, per_pair: float
) -> Answer | None:
    """MFU of an indexer's scores relative to the fp8 peak. shape: (heads, dim); `per_pair`: operations per query and prior token.

    Rows with several queries of a sequence per step (`next_n`) are omitted: decode here has one.
    """
    return _at(_index_scores(device, phase, shape, per_pair), (sequences if phase == "decode" else context,), context)


def chosen_attention(
    device: str, phase: str, shape: tuple[int, int, int], sequences: float, context: float, per_pair: float
) -> Answer | None:
    """MFU of attention to chosen tokens relative to the fp16 peak. shape: (heads, numbers per key, tokens chosen)."""
    return _at(_chosen_attention(device, phase, shape, per_pair), (sequences if phase == "decode" else context,), context)


def delta_rule(device: str, phase: str, shape: tuple[int, ...], x: float, per_token: float) -> Answer | None:
    """MFU of convolution and gated delta rule relative to the fp16 peak.

    shape: (kernel, key heads, key dim, value heads, value dim); x: sequences in decode, tokens of a prompt in prefill.
    """
    return _at(_delta_rule(device, phase, shape, per_token), (1.0,), x)


def all_curves() -> dict[str, Curves]:
    """Every table for leave-one-out tests: name → curves."""
    by_name: dict[str, Curves | None] = {}
    for device in PEAK:
        by_name[f"gemm {device}"] = _gemm(device)
        for phase in ("prefill", "decode"):
            by_name |= {f"grouped gemm {phase} {p} {device}": _grouped(device, phase, p) for p in ("up", "down")}
        for file in sorted((ROOT / "mha" / "decode" / device).glob("*.csv")):
            heads, _, dim = (int(part) for part in file.stem.split("-"))
            by_name[f"decode attention {file.stem} {device}"] = _decode(device, f"mha/{file.stem}", "bf16", 4.0 * heads * dim)
        for file in sorted((ROOT / "mla" / "decode" / device).glob("*.csv")):
            heads, rank, rope = (int(part) for part in file.stem.split("-"))
            per_token = 2.0 * heads * (2 * rank + rope)
            by_name[f"decode attention mla {file.stem} {device}"] = _decode(device, f"mla/{file.stem}", "bf16", per_token)
    return {name: curves for name, curves in by_name.items() if curves}


def _at(curves: Curves | None, key: tuple[float, ...], x: float) -> Answer | None:
    return curves.at(key, x) if curves else None


def _mean_of_repeats(points: list[Point]) -> list[Point]:
    """One point for each (key, x), the mean of repeated measurements."""
    repeats: dict[tuple[tuple[float, ...], float], list[Point]] = {}
    for point in points:
        repeats.setdefault((point.key, point.x), []).append(point)
    return [Point(p[0].key, p[0].x, sum(q.y for q in p) / len(p), p[0].where) for p in repeats.values()]


def _curves(
    names: tuple[str, ...], file: Path, header: tuple[str, ...] | None, point: Callable[[Row], Point | None]
) -> Curves | None:
    if not file.exists():
        return None
    points = [measured for row in rows(file, header) if (measured := point(row)) is not None]
    return Curves(names, _mean_of_repeats(points)) if points else None


@cache
def _gemm(device: str) -> Curves | None:
    def point(row: Row) -> Point:
        operations = 2 * row["m"] * row["k"] * row["n"]
        return Point((row["k"], row["n"]), row["m"], operations / (row["latency_us"] * 1e-6 * PEAK[device]["fp8"]), row.where)

    return _curves(("k", "n", "m"), ROOT / "gemm" / device / "data.csv", None, point)


@cache
def _grouped(device: str, phase: str, projection: str) -> Curves | None:
    size = "batch_size_per_gpu" if phase == "decode" else "seq_len_per_gpu"

    def point(row: Row) -> Point:
        pairs = row[size] * row["topk"]
        width = row["intermediate_size"] * (2 if projection == "up" else 1)
        seconds = row[f"{projection}_proj_us"] * 1e-6
        key = (row["num_local_experts"], row["hidden_size"], row["intermediate_size"])
        return Point(key, pairs / key[0], 2 * pairs * key[1] * width / (seconds * PEAK[device]["fp8"]), row.where)

    names = ("experts on the device", "hidden", "expert width", "rows per expert")
    return _curves(names, ROOT / "grouped_gemm" / phase / device / "data.csv", None, point)


@cache
def _decode(device: str, shape: str, kv_type: str, per_token: float) -> Curves | None:
    def point(row: Row) -> Point | None:
        if row.values["kv_dtype"] != kv_type:
            return None
        operations = per_token * row["batch_size"] * row["kv_len"]
        return _agreeing(row, (row["batch_size"],), row["kv_len"], operations, device)

    kind, name = shape.split("/")
    return _curves(("batch", "context"), ROOT / kind / "decode" / device / f"{name}.csv", ATTENTION_DECODE, point)


@cache
def _prefill(device: str, shape: str, per_pair: float) -> Curves | None:
    def point(row: Row) -> Point | None:
        return _agreeing(row, (1.0,), row["seq_len"], per_pair * row["seq_len"] ** 2 / 2, device)

    kind, name = shape.split("/")
    return _curves(("sequences", "prompt length"), ROOT / kind / "prefill" / device / f"{name}.csv", ATTENTION_PREFILL, point)


@cache
def _index_scores(device: str, phase: str, shape: tuple[int, int], per_pair: float) -> Curves | None:
    def point(row: Row) -> Point | None:
        if phase == "decode":
            key, pairs = row["batchsize"], row["batchsize"] * row["s_kv"]
            if row["next_n"] != 1:
                return None
        else:
            key, pairs = row["s_q"], row["s_q"] * (row["s_kv"] - row["s_q"] / 2)
        return Point((key,), row["s_kv"], per_pair * pairs / (row["latency_us"] * 1e-6 * PEAK[device]["fp8"]), row.where)

    file = ROOT / "dsa" / phase / device / f"logits-{shape[0]}-{shape[1]}.csv"
    return _curves(("batch" if phase == "decode" else "queries", "context"), file, None, point)


@cache
def _chosen_attention(device: str, phase: str, shape: tuple[int, int, int], per_pair: float) -> Curves | None:
    size, context = ("batch_size", "kv_len") if phase == "decode" else ("s_q", "s_kv")

    def point(row: Row) -> Point:
        operations = per_pair * row[size] * shape[2]
        seconds = row["latency_us"] * 1e-6
        return Point((row[size],), row[context], operations / (seconds * PEAK[device]["fp16"]), row.where)

    file = ROOT / "dsa" / phase / device / f"attn-{shape[0]}-{shape[1]}-{shape[2]}.csv"
    return _curves(("batch" if phase == "decode" else "queries", "context"), file, None, point)


@cache
def _delta_rule(device: str, phase: str, shape: tuple[int, ...], per_token: float) -> Curves | None:
    size = "batchsize" if phase == "decode" else "seq_len"

    def point(row: Row) -> Point:
        seconds = sum(float(value) for name, value in row.values.items() if name != size) * 1e-6
        return Point((1.0,), row[size], per_token * row[size] / (seconds * PEAK[device]["fp16"]), row.where)

    file = ROOT / "gdn" / phase / device / f"{'-'.join(map(str, shape))}.csv"
    return _curves(("sequences", "batch" if phase == "decode" else "prompt length"), file, None, point)


def _agreeing(row: Row, key: tuple[float, ...], x: float, operations: float, device: str) -> Point | None:
    """The point of a row; None if its MFU contradicts its latency."""
    measured = operations / (row["latency_us"] * 1e-6 * PEAK[device]["fp16"])
    rounding = 0.5 * 10 ** -len(row.values["mfu"].partition(".")[2])
    if abs(measured - row["mfu"]) > max(CONTRADICTION * measured, 1.2 * rounding):
        return None
    return Point(key, x, measured, row.where)
