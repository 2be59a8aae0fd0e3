"""Costs from the times per step that another engine wrote beside its routes: BigMoeOnEdge's `.metrics`, `bmoe_metrics v1`.

The engine divides a decode step's wall time into computing, waiting for reads of experts (stall) and managing the cache. What is
not computing is fitted to the bytes that the step read: a fixed part, and seconds per byte. So other caches follow from the bytes
that they would read; computing is the mean of all steps, whatever they computed.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.errors import PredictError
from analyzer.predict.costs import Costs, Line, with_recorded_sizes
from analyzer.predict.simulator import Outcome
from analyzer.predict.trace import Trace
from analyzer.questions.figures import cache_hits, hit_rate
from analyzer.records.schema import Tables

COLUMNS = ("wall_ms", "compute_ms", "stall_ms", "mgmt_ms", "read_bytes")
FEWEST = 8
"""Steps that a fit needs."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Decode steps (columns COLUMNS) and the file's own sums, such as `prefill_s`."""

    steps: pd.DataFrame
    sums: dict[str, float]

    def costs(self, trace: Trace, prompt_bytes: int) -> Costs:
        """Costs of the engine that wrote the file; the prompt's computing is what its reads, at the decode steps' rate, leave."""
        if not trace.expert_bytes:
            raise PredictError("the routes have no bytes of an expert: give a route_trace whose head has expert_bytes")
        overhead, per_byte = self.reading()
        compute = float(self.steps["compute_ms"].mean()) / 1e3
        decode = Line(fixed=compute + overhead)
        prompt = self.sums.get("prefill_s")
        left = max(prompt - prompt_bytes * per_byte, 0.0) if prompt is not None else compute + overhead
        rows = sum(step.rows for step in trace.steps if step.phase == "prefill")
        work: dict[tuple[str, ...], Line] = {
            ("outside", "cpu", "decode"): decode,
            ("outside", "cpu", "prefill"): Line(per_row=left / max(rows, 1)),
            ("expert", "cpu"): Line(),
        }
        source = (
            f"of {len(self.steps)} measured steps: computing {compute * 1e3:.1f} ms, reads {overhead * 1e3:.1f} ms "
            f"and {1 / per_byte / 1e9:.2f} GB/s of expert bytes"
        )
        unknown = () if prompt is not None else ("no prefill_s in the file: a prompt row costs as much as a decode step",)
        costs = Costs(work, Line(per_row=per_byte), {"cpu": trace.expert_bytes[0]}, source, unknown)
        return with_recorded_sizes(costs, trace.expert_bytes)

    def reading(self) -> tuple[float, float]:
        """(fixed seconds of a step, seconds per byte) of its stall and cache management."""
        from scipy.optimize import nnls

        seconds = ((self.steps["stall_ms"] + self.steps["mgmt_ms"]) / 1e3).to_numpy()
        columns = np.stack([np.ones(len(seconds)), self.steps["read_bytes"].to_numpy(float) / 1e9], 1)
        (fixed, per_gigabyte), _ = nnls(columns, seconds)
        if per_gigabyte <= 0:
            raise PredictError("the file's steps do not take longer when they read more: they have no read rate")
        return float(fixed), float(per_gigabyte) / 1e9

    def against(self, outcome: Outcome, tables: Tables) -> dict[str, Any]:
        """The simulation beside the measured steps: means, their relative errors, and the median error of single steps."""
        ours, wall = outcome.durations("decode") * 1e3, self.steps["wall_ms"].to_numpy(float)
        found = outcome.summary()
        counted = cache_hits(tables, "decode")[["hits", "misses"]].sum()
        rate = hit_rate(int(counted["hits"]), int(counted["misses"]))
        row: dict[str, Any] = {"recorded_hit_rate": rate, "simulated_hit_rate": found["decode_hit_rate"]}
        prompt = self.sums.get("prefill_s")
        figures = {
            "ttft_ms": (None if prompt is None else prompt * 1e3, found["ttft_ms"]),
            "tpot_ms": (float(wall.mean()), found["tpot_ms"]),
            "decode_bytes": (float(self.steps["read_bytes"].sum()), found["decode_loaded_bytes"]),
        }
        for name, (real, simulated) in figures.items():
            error = simulated / real - 1 if real and simulated is not None else None
            row |= {f"recorded_{name}": real, f"simulated_{name}": simulated, f"error_{name}": error}
        single = float(np.median(np.abs(ours / wall - 1))) if len(ours) == len(wall) else None
        return row | {"median_error_of_a_step": single}


def read_steps(path: Path) -> MeasuredSteps:
    """The steps of a file. Raises PredictError if it is of another kind, or damaged."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PredictError(f"{path} cannot be read ({error}): give the engine's .metrics file") from None
    body = [line for line in lines if line.strip() and not line.startswith("#")]
    if not body or not set(COLUMNS) <= set(body[0].split(",")):
        raise PredictError(f"{path} holds no measured steps: its first line must name the columns {', '.join(COLUMNS)}")
    try:
        rows = [[float(row[name]) for name in COLUMNS] for row in csv.DictReader(body)]
    except (ValueError, TypeError):
        raise PredictError(f"{path}: a row is damaged or truncated") from None
    steps = pd.DataFrame(rows, columns=list(COLUMNS))
    if len(steps) < FEWEST or not (np.isfinite(steps) & (steps >= 0)).all(axis=None) or not (steps["wall_ms"] > 0).all():
        raise PredictError(f"{path}: {FEWEST} or more steps with times and bytes of 0 or more are needed; it has {len(steps)}")
    summary = next((line for line in lines if line.startswith("# summary")), "")
    sums = {name: float(value) for name, value in re.findall(r"(\S+)=(\d+(?:\.\d+)?)(?=\s|$)", summary)}
    return MeasuredSteps(steps, sums)
