"""What the parts of a step cost: fitted to a recording of this machine, or from a model's roofline on a device profile."""

from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from analyzer.predict import roofline
from analyzer.predict.devices import Device
from analyzer.predict.errors import PredictError
from analyzer.predict.model import Model
from analyzer.predict.setup import Setup

UNITS = ("cpu", "npu")
FEW_RUNS = 8
"""Runs of hits and of misses that are needed to tell their costs apart."""
BACKENDS = {"cpu": "cpu", "htp": "npu"}
"""Backend names of recordings → units here."""


@dataclass(frozen=True)
class Line:
    """Seconds = fixed + per_row·rows + per_pair·rows·context."""

    fixed: float = 0.0
    per_row: float = 0.0
    per_pair: float = 0.0

    def at(self, rows: float, context: float = 0.0) -> float:
        """Seconds."""
        return self.fixed + self.per_row * rows + self.per_pair * rows * context


@dataclass(frozen=True)
class Costs:
    """Seconds of each kind of work, by (kind, unit); bytes of an expert by unit. `load`: of bytes.

    Kinds: attention (of a chunk at a context), router, expert (rows of a batch), combine, dispatch, and `outside`, once a step.
    """

    work: dict[tuple[str, str], Line]
    load: Line
    expert_bytes: dict[str, int]
    source: str
    warnings: tuple[str, ...] = field(default=())

    def of(self, kind: str, unit: str, rows: float, context: float = 0.0) -> float:
        """Seconds of one piece of work."""
        line = self.work.get((kind, unit)) or self.work.get((kind, "cpu"))
        return line.at(rows, context) if line else 0.0


def fit(seconds: np.ndarray, rows: np.ndarray, context: np.ndarray | None = None) -> Line:
    """A line whose sum is that of the measured times, and whose shape is fitted by non-negative least squares of relative errors.

    Relative, so that decode's short runs are not drowned by prefill's; the sum, because means over many runs are what is asked.
    """
    pairs = rows * context if context is not None else np.zeros(len(rows))
    columns = np.stack([np.ones(len(rows)), rows, pairs], 1)
    weights = 1 / np.maximum(seconds, 1e-9)
    found, _ = nnls(columns * weights[:, None], seconds * weights)
    scale = seconds.sum() / max(float((columns @ found).sum()), 1e-12)
    return Line(*(float(value * scale) for value in found))


def from_tables(tables: dict[str, pd.DataFrame]) -> Costs:
    """Costs of the engine and machine that a recording shows; loads within an expert's run are its load's, not the run's."""
    operators, experts = tables["operators"], tables["experts"]
    tokens = tables["tokens"].set_index("token_id")
    work: dict[tuple[str, str], Line] = {}
    for kind in ("attention", "router", "combine", "dispatch"):
        part = operators[(operators["type"] == kind) & operators["token_id"].isin(tokens.index)]
        if len(part):
            rows, seconds = part["n_tokens"].to_numpy(float), part["duration_ns"].to_numpy(float) / 1e9
            context = tokens.loc[part["token_id"], "position"].to_numpy(float) + rows
            work[kind, "cpu"] = fit(seconds, rows, context if kind == "attention" else None)
    colder = 0.0
    for backend, part in experts.groupby("backend"):
        unit = BACKENDS.get(str(backend), "cpu")
        work["expert", unit], extra = _expert_runs(part, tables["loads"])
        colder = max(colder, extra)
    if ("expert", "cpu") not in work and ("expert", "npu") not in work:
        raise PredictError("the recording holds no expert runs: record the runtime at levels operator,expert")
    outside = operators[operators["type"].isin(("embed", "head", "sample"))].groupby("token_id")["duration_ns"].sum()
    work["outside", "cpu"] = Line(fixed=float(outside.mean()) / 1e9 if len(outside) else 0.0)
    gap = _unexplained(tables)
    if gap:
        work["step", "cpu"] = Line(fixed=gap)
    load, sizes = _loads(tables["loads"])
    load = replace(load, fixed=load.fixed + colder)
    return Costs(work, load, sizes, "fitted to the recording's operators, expert runs and loads")


def from_device(model: Model, device: Device, context: int = 512) -> Costs:
    """Costs from the roofline, each kind by its time at 1 and at 64 rows."""
    if not model.mixture:
        raise PredictError(f"{model.name} has no experts: a trace of routes cannot run on it")
    if not device.storage:
        raise PredictError(f"{device.name}: its profile has no [storage]: add gigabytes_per_s")
    units = {"cpu": "cpu" if "cpu" in device.units else next(iter(device.units)), "npu": "npu"}
    work: dict[tuple[str, str], Line] = {}
    for unit, name in units.items():
        if name in device.units:
            work |= _unit_lines(model, device, name, unit, context)
    size = round(3 * model.hidden * model.mixture.width * model.storage.expert / 8)
    load = Line(fixed=1e-4, per_row=1 / device.storage)
    source = f"roofline of {model.name} on {device.name}, weights {model.storage.text}; loads at the storage's rate plus 0.1 ms"
    warnings = (f"{device.name}: estimated, not published: {', '.join(device.estimates)}",) if device.estimates else ()
    return Costs(work, load, {unit: size for unit in UNITS}, source, warnings)


def _unit_lines(model: Model, device: Device, name: str, unit: str, context: int) -> dict[tuple[str, str], Line]:
    """Lines of one unit: through its roofline at 1 and 64 rows (attention), and of one expert at 1 and 64 rows."""
    assert model.mixture
    one_expert = replace(model, mixture=replace(model.mixture, experts=1, top_k=1))
    kinds = {"attention": "attention", "router": "router", "outside": "head"}
    lines = {}
    few, many = (_seconds(model, device, name, rows, context) for rows in (1, 64))
    for kind, part in kinds.items():
        lines[kind, unit] = _through(few[part], many[part])
    few, many = (_seconds(one_expert, device, name, rows, context) for rows in (1, 64))
    lines["expert", unit] = _through(few["experts"], many["experts"])
    return lines


def _seconds(model: Model, device: Device, unit: str, rows: int, context: int) -> dict[str, float]:
    """Seconds of attention, router, experts in one layer, and of the head, for `rows` decoding rows."""
    setup = Setup("decode", rows, context, unit=unit)
    found = dict.fromkeys(("attention", "router", "experts", "head"), 0.0)
    for part in roofline.parts(model, roofline.target(device, model, setup), setup):
        found[part.name.split()[0]] = found.get(part.name.split()[0], 0.0) + part.seconds
    return found


def _through(one: float, many: float) -> Line:
    slope = max(many - one, 0.0) / 63
    return Line(fixed=max(one - slope, 0.0), per_row=slope)


def _expert_runs(part: pd.DataFrame, loads: pd.DataFrame) -> tuple[Line, float]:
    """(line of a run over rows, seconds that a session's first run takes longer): the latter counts to the load.

    A new session touches its weights and makes its buffers when it first runs, so that runs of misses are not runs of hits.
    """
    rows = np.where(part["tier"] > 0, part["tier"], part["n_tokens"]).astype(float)
    seconds, missed = _without_loads(part, loads), (part["cache"] == "miss").to_numpy()
    if min(missed.sum(), (~missed).sum()) < FEW_RUNS:
        return fit(seconds, rows), 0.0
    line = fit(seconds[~missed], rows[~missed])
    return line, max(float(np.mean(seconds[missed] - np.array([line.at(r) for r in rows[missed]]))), 0.0)


def _without_loads(part: pd.DataFrame, loads: pd.DataFrame) -> np.ndarray:
    """Seconds of expert runs without the loads that lie within them on their thread."""
    held = loads[(loads["action"] == "load") & (loads["duration_ns"] > 0)].sort_values("begin_ns")
    times = held["begin_ns"].to_numpy()
    summed = np.concatenate([[0], held["duration_ns"].cumsum().to_numpy()])
    first = np.searchsorted(times, part["begin_ns"].to_numpy())
    last = np.searchsorted(times, part["end_ns"].to_numpy())
    return np.maximum(part["duration_ns"].to_numpy(float) - (summed[last] - summed[first]), 1.0) / 1e9


def _unexplained(tables: dict[str, pd.DataFrame]) -> float:
    """Mean seconds of a decode step that lie outside its operators."""
    tokens, operators = tables["tokens"], tables["operators"]
    steps = tokens[tokens["phase"] == "decode"].set_index("token_id")["duration_ns"]
    top = operators[operators["type"].isin(("embed", "attention", "router", "dispatch", "expert", "combine", "head", "sample"))]
    told = top.groupby("token_id")["duration_ns"].sum()
    gaps = (steps - told.reindex(steps.index)).dropna()
    return max(float(gaps.mean()) / 1e9, 0.0) if len(gaps) else 0.0


def _loads(loads: pd.DataFrame) -> tuple[Line, dict[str, int]]:
    """(line of a load over bytes, bytes of an expert by unit)."""
    made = loads[loads["action"] == "load"]
    if len(made) == 0:
        raise PredictError("the recording holds no expert loads: record with an expert cache smaller than the model")
    sizes = {BACKENDS.get(str(backend), "cpu"): int(part["bytes"].median()) for backend, part in made.groupby("backend")}
    seconds = made["duration_ns"].to_numpy(float) / 1e9
    if made["bytes"].nunique() == 1:
        return Line(fixed=float(seconds.mean())), sizes
    return fit(seconds, made["bytes"].to_numpy(float)), sizes
