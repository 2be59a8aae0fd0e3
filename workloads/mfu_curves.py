"""All measured MFU curves and what leave-one-out tests of their interpolation need."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from analyzer.predict import mfu
from analyzer.predict.curves import Curves, Key


def all_curves() -> dict[str, Curves]:
    """Every table for leave-one-out tests: name → curves."""
    by_name: dict[str, Curves | None] = {}
    for device in mfu.PEAK:
        by_name[f"gemm {device}"] = mfu.gemm_curves(device)
        for phase in ("prefill", "decode"):
            by_name |= {f"grouped gemm {phase} {p} {device}": mfu.grouped_gemm_curves(device, phase, p) for p in ("up", "down")}
        for file in sorted((mfu.ROOT / "mha" / "decode" / device).glob("*.csv")):
            heads, kv_heads, dim = (int(part) for part in file.stem.split("-"))
            by_name[f"decode attention {file.stem} {device}"] = mfu.decode_attention(
                device, f"mha/{file.stem}", "bf16", 4.0 * heads * dim, 2.0 * kv_heads * dim
            )
        for file in sorted((mfu.ROOT / "mla" / "decode" / device).glob("*.csv")):
            heads, rank, rope = (int(part) for part in file.stem.split("-"))
            per_token = 2.0 * heads * (2 * rank + rope)
            by_name[f"decode attention mla {file.stem} {device}"] = mfu.decode_attention(
                device, f"mla/{file.stem}", "bf16", per_token, float(rank + rope)
            )
    return {name: curves for name, curves in by_name.items() if curves}


def nearest_row(curves: Curves, key: Key, x: float) -> float:
    """y of the nearest row in log space, as a baseline for interpolation."""
    rows = np.log(np.array([[*p.key, p.x] for p in curves.points]))
    return curves.points[int(np.argmin(((rows - np.log([*key, x])) ** 2).sum(1)))].y


def without_points(curves: Curves, drop: Iterable[int]) -> Curves:
    """The curves without some points, for leave-one-out tests."""
    dropped = set(drop)
    return replace(curves, points=[p for i, p in enumerate(curves.points) if i not in dropped], _curves={})
