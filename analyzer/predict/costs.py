"""What the parts of a step cost: fitted to a recording of this machine, or from a model's roofline on a device profile."""

from collections.abc import Callable
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
LAYER_KINDS = ("attention", "router", "dispatch", "mlp", "combine")
OTHER_FORM = {"expert": "resident", "resident": "expert"}

Tables = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Line:
    """Seconds = fixed + per_row·rows + per_pair·rows·context."""

    fixed: float = 0.0
    per_row: float = 0.0
    per_pair: float = 0.0

    def at(self, rows: float, context: float = 0.0) -> float:
        """Seconds."""
        return self.fixed + self.per_row * rows + self.per_pair * rows * context

    def times(self, factor: float) -> "Line":
        """The same, so many times longer."""
        return Line(self.fixed * factor, self.per_row * factor, self.per_pair * factor)


@dataclass(frozen=True)
class Costs:
    """Seconds of each kind of work, by (kind, unit) or (kind, unit, phase); bytes of an expert by unit.

    Kinds: attention (of a chunk at a context), router, mlp (shared expert), expert (rows of a batch, in a limited cache),
    resident (the same where everything stays), combine, dispatch, and `outside`, once a step. load, behind: of bytes, on the
    thread that needs the expert and on the loader's (None: alike). fresh: what an expert's first run after its load takes
    longer, by phase; woken: one that waited for the loader, from the load's end on. slowed: factor on the CPU's work while the
    loader works. gaps: between two pieces of work, by (phase, prefetching). loaders: threads of the loader. loads_at_once: more
    than these wait for each other.
    """

    work: dict[tuple[str, ...], Line]
    load: Line
    expert_bytes: dict[str, int]
    source: str
    warnings: tuple[str, ...] = ()
    behind: Line | None = None
    fresh: dict[str, float] = field(default_factory=dict)
    woken: dict[str, float] = field(default_factory=dict)
    slowed: float = 1.0
    gaps: dict[tuple[str, bool], float] = field(default_factory=dict)
    loaders: int = 1
    loads_at_once: int = 1

    def knows(self, kind: str, unit: str) -> bool:
        """Was such work seen in any phase?"""
        kinds = {kind, OTHER_FORM.get(kind, kind)}
        return any(key[0] in kinds and key[1] == unit for key in self.work)

    def of(self, kind: str, unit: str, rows: float, context: float = 0.0, phase: str = "") -> float:
        """Seconds of one piece of work; where its phase, form or unit was not seen, of the nearest that was."""
        for one in (kind, OTHER_FORM.get(kind, kind)):
            for key in ((one, unit, phase), (one, unit), (one, "cpu", phase), (one, "cpu")):
                if key in self.work:
                    return self.work[key].at(rows, context)
        seen = next((line for key, line in self.work.items() if key[:2] == (kind, unit)), None)
        return seen.at(rows, context) if seen else 0.0

    def between(self, phase: str, prefetching: bool) -> float:
        """Seconds between two pieces of work."""
        return self.gaps.get((phase, prefetching), self.gaps.get((phase, not prefetching), 0.0))

    def scaled(self, work: dict[str, float], load: float = 1.0, behind: float = 1.0) -> "Costs":
        """Work and gaps times a factor by phase, loads times theirs: from a traced run to an untraced one."""
        lines = {key: line.times(work.get(key[2], 1.0) if len(key) > 2 else 1.0) for key, line in self.work.items()}
        return replace(
            self,
            work=lines,
            load=self.load.times(load),
            behind=self.behind.times(behind) if self.behind else None,
            fresh={phase: seconds * work.get(phase, 1.0) for phase, seconds in self.fresh.items()},
            woken={phase: seconds * work.get(phase, 1.0) for phase, seconds in self.woken.items()},
            gaps={key: seconds * work.get(key[0], 1.0) for key, seconds in self.gaps.items()},
        )


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


def from_tables(*recordings: Tables) -> Costs:
    """Costs of the engine and machine that recordings show; what they hold together is pooled.

    Settings differ in what they show: a cache that misses shows loads, one that holds everything shows resident experts, a run
    that prefetches shows the loader and how much it slows the rest.
    """
    seen = [Seen.of(tables) for tables in recordings]
    behind = _pooled(seen, lambda one: one.loads[one.loads["behind"]])
    inline = _pooled(seen, lambda one: one.loads[~one.loads["behind"]])
    if len(behind) + len(inline) == 0:
        raise PredictError("the recordings hold no expert loads: record with an expert cache smaller than the model")
    runs = _pooled(seen, lambda one: one.runs)
    if len(runs) == 0:
        raise PredictError("the recordings hold no expert runs: record the runtime at levels operator,expert")
    work, slowed = _lines(_pooled(seen, lambda one: one.work))
    fresh: dict[str, float] = {}
    woken: dict[str, float] = {}
    for (kind, backend, phase), part in runs.groupby(["kind", "backend", "phase"]):
        work[kind, BACKENDS.get(backend, "cpu"), phase], first, after = _expert_runs(part)
        fresh[phase], woken[phase] = max(fresh.get(phase, 0.0), first), max(woken.get(phase, 0.0), after)
    loaders = max(1, *(one.loads.loc[one.loads["behind"], "tid"].nunique() for one in seen))
    return Costs(
        work,
        _load_line(inline if len(inline) else behind),
        _sizes(seen),
        f"fitted to the operators, expert runs and loads of {len(seen)} recording{'s' if len(seen) > 1 else ''}",
        behind=_load_line(behind) if len(behind) else None,
        fresh=fresh,
        woken=woken,
        slowed=slowed,
        gaps=_gaps(seen),
        loaders=loaders,
        loads_at_once=loaders + 1,
    )


def from_device(model: Model, device: Device, context: int = 512) -> Costs:
    """Costs from the roofline, each kind by its time at 1 and at 64 rows."""
    if not model.mixture:
        raise PredictError(f"{model.name} has no experts: a trace of routes cannot run on it")
    if not device.storage:
        raise PredictError(f"{device.name}: its profile has no [storage]: add gigabytes_per_s")
    units = {"cpu": "cpu" if "cpu" in device.units else next(iter(device.units)), "npu": "npu"}
    work: dict[tuple[str, ...], Line] = {}
    for unit, name in units.items():
        if name in device.units:
            work |= _unit_lines(model, device, name, unit, context)
    size = round(3 * model.hidden * model.mixture.width * model.storage.expert / 8)
    load = Line(fixed=1e-4, per_row=1 / device.storage)
    source = f"roofline of {model.name} on {device.name}, weights {model.storage.text}; loads at the storage's rate plus 0.1 ms"
    warnings = (f"{device.name}: estimated, not published: {', '.join(device.estimates)}",) if device.estimates else ()
    return Costs(work, load, {unit: size for unit in UNITS}, source, warnings)


def _unit_lines(model: Model, device: Device, name: str, unit: str, context: int) -> dict[tuple[str, ...], Line]:
    """Lines of one unit: through its roofline at 1 and 64 rows (attention), and of one expert at 1 and 64 rows."""
    assert model.mixture
    one_expert = replace(model, mixture=replace(model.mixture, experts=1, top_k=1))
    kinds = {"attention": "attention", "router": "router", "outside": "head"}
    lines: dict[tuple[str, ...], Line] = {}
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


@dataclass(frozen=True)
class Seen:
    """What one recording shows. Times in seconds.

    work: kind, phase, rows, context, seconds, beside (the loader worked meanwhile). runs: kind, backend, phase, rows, seconds
    without the load on its thread, missed, waited (for the loader; then from the load's end). loads: backend, bytes, seconds,
    behind (on a thread of the loader), tid. evicted: bytes that experts took in the cache. gaps: phase, seconds (mean between
    two pieces of work of a step). prefetching: were loads made ahead?
    """

    work: pd.DataFrame
    runs: pd.DataFrame
    loads: pd.DataFrame
    evicted: pd.Series
    gaps: pd.DataFrame
    prefetching: bool

    @classmethod
    def of(cls, tables: Tables) -> "Seen":
        """Read a recording's tables."""
        loads, tokens = tables["loads"], tables["tokens"].set_index("token_id")
        made = loads[(loads["action"] == "load") & (loads["duration_ns"] > 0)]
        limited = bool((made["reason"] != "startup").any())
        main = tokens["tid"].iloc[0] if len(tokens) else -1
        behind = made[(made["tid"] != main) & (made["reason"] != "startup")]
        counted = made[made["reason"] != "startup"] if limited else made
        told = pd.DataFrame(
            {
                "backend": counted["backend"],
                "bytes": counted["bytes"].astype(float),
                "seconds": counted["duration_ns"] / 1e9,
                "behind": counted.index.isin(behind.index),
                "tid": counted["tid"],
            }
        )
        operators = tables["operators"][tables["operators"]["token_id"].isin(tokens.index)]
        work = _work(operators, tokens, behind, set(tables["routes"]["layer"]))
        runs = _runs(tables["experts"], tokens, made, behind, "expert" if limited else "resident")
        evicted = loads.loc[(loads["action"] == "evict") & (loads["bytes"] > 0), "bytes"]
        return cls(
            work,
            runs,
            told,
            evicted,
            _step_gaps(operators, tables["experts"], tokens),
            bool((made["reason"] == "prefetch").any()),
        )


def _work(operators: pd.DataFrame, tokens: pd.DataFrame, behind: pd.DataFrame, routed: set[int]) -> pd.DataFrame:
    """Operators but for experts; what is neither in a layer with experts nor of their kinds is `outside`, summed by step."""
    part = operators[operators["type"] != "expert"]
    step = tokens.reindex(part["token_id"])
    rows = part["n_tokens"].to_numpy(float)
    inside = part["type"].isin(LAYER_KINDS) & (part["layer"].isin(routed) if routed else True)
    found = pd.DataFrame(
        {
            "token_id": part["token_id"].to_numpy(),
            "kind": np.where(inside, part["type"], "outside"),
            "phase": step["phase"].to_numpy(),
            "rows": rows,
            "context": step["position"].to_numpy(float) + rows,
            "seconds": part["duration_ns"].to_numpy(float) / 1e9,
            "beside": _overlap(part, behind),
        }
    )
    chunked = found["kind"].eq("attention") & (found["phase"] == "prefill")
    layer = part["layer"].to_numpy()[chunked]
    found.loc[chunked, "context"] = found[chunked].groupby([found.loc[chunked, "token_id"], layer])["rows"].cumsum()
    outside = found[found["kind"] == "outside"]
    whole = outside.groupby("token_id", as_index=False).agg(
        {"kind": "first", "phase": "first", "rows": "max", "context": "max", "seconds": "sum", "beside": "any"}
    )
    return pd.concat([found[found["kind"] != "outside"], whole], ignore_index=True)


def _runs(experts: pd.DataFrame, tokens: pd.DataFrame, made: pd.DataFrame, behind: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Expert runs; of those that waited for the loader's load of their own expert, only what came after it counts."""
    part = experts[experts["token_id"].isin(tokens.index)]
    own = behind[["layer", "expert", "begin_ns", "end_ns"]].merge(
        part[["run_id", "layer", "expert", "begin_ns", "end_ns"]], on=["layer", "expert"], suffixes=("", "_run")
    )
    own = own[(own["end_ns"] > own["begin_ns_run"]) & (own["begin_ns"] < own["end_ns_run"])]
    landed = own.groupby("run_id")["end_ns"].max().reindex(part["run_id"]).to_numpy()
    waited = ~np.isnan(landed)
    rest = np.maximum(part["end_ns"].to_numpy(float) - landed, 1.0) / 1e9
    return pd.DataFrame(
        {
            "kind": kind,
            "backend": part["backend"].to_numpy(),
            "phase": tokens.reindex(part["token_id"])["phase"].to_numpy(),
            "rows": np.where(part["tier"] > 0, part["tier"], part["n_tokens"]).astype(float),
            "seconds": np.where(waited, rest, _without_loads(part, made[~made.index.isin(behind.index)])),
            "missed": (part["cache"] == "miss").to_numpy() & ~waited,
            "waited": waited,
        }
    )


def _step_gaps(operators: pd.DataFrame, experts: pd.DataFrame, tokens: pd.DataFrame) -> pd.DataFrame:
    """Mean seconds between two pieces of work, for each step."""
    other = operators[operators["type"] != "expert"].groupby("token_id")["duration_ns"].agg(["sum", "size"])
    runs = experts[experts["token_id"].isin(tokens.index)].groupby("token_id")["duration_ns"].agg(["sum", "size"])
    told = other.add(runs, fill_value=0).reindex(tokens.index).dropna()
    steps = tokens.loc[told.index]
    return pd.DataFrame(
        {"phase": steps["phase"], "seconds": ((steps["duration_ns"] - told["sum"]).clip(lower=0) / told["size"]) / 1e9}
    )


def _gaps(seen: list[Seen]) -> dict[tuple[str, bool], float]:
    found = pd.concat([one.gaps.assign(prefetching=one.prefetching) for one in seen])
    means = found.groupby(["phase", "prefetching"])["seconds"].mean()
    return {(str(phase), bool(flag)): float(value) for (phase, flag), value in means.items()}


def _sizes(seen: list[Seen]) -> dict[str, int]:
    """Bytes that an expert takes in the cache by unit: an expert may take more than was read for it, which evictions tell."""
    read = _pooled(seen, lambda one: one.loads).groupby("backend")["bytes"].median()
    left = pd.concat([one.evicted for one in seen])
    if len(read) == 1 and len(left):
        read[:] = float(left.median())
    return {BACKENDS.get(str(backend), "cpu"): int(size) for backend, size in read.items()}


def _pooled(seen: list[Seen], part: Callable[[Seen], pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([part(one) for one in seen], ignore_index=True)


def _lines(work: pd.DataFrame) -> tuple[dict[tuple[str, ...], Line], float]:
    """(line of each kind and phase, factor on what ran beside the loader): lines are of what did not, where that is enough."""
    lines: dict[tuple[str, ...], Line] = {}
    beside = expected = 0.0
    for (kind, phase), part in work.groupby(["kind", "phase"]):
        alone = part[~part["beside"]]
        both = min(len(alone), len(part) - len(alone)) >= FEW_RUNS
        rows = alone if len(alone) >= FEW_RUNS or len(alone) == len(part) else part
        context = rows["context"].to_numpy() if kind == "attention" else None
        line = lines[kind, "cpu", phase] = fit(rows["seconds"].to_numpy(), rows["rows"].to_numpy(), context)
        if both:
            slow = part[part["beside"]]
            beside += float(slow["seconds"].sum())
            expected += sum(line.at(r, c) for r, c in zip(slow["rows"], slow["context"], strict=True))
    return lines, max(beside / expected, 1.0) if expected else 1.0


def _overlap(part: pd.DataFrame, behind: pd.DataFrame) -> np.ndarray:
    """Which operators had begun while a load on another thread was under way."""
    held = behind.sort_values("begin_ns")
    begin = held["begin_ns"].to_numpy()
    at = np.searchsorted(begin, part["begin_ns"].to_numpy(), "right") - 1
    ends = np.maximum.accumulate(held["end_ns"].to_numpy()) if len(held) else np.zeros(1)
    return (at >= 0) & (ends[at] > part["begin_ns"].to_numpy())


def _expert_runs(part: pd.DataFrame) -> tuple[Line, float, float]:
    """(line of a run over rows, seconds that the first run after a load takes longer, the same after waiting for the loader).

    A first run touches its weights and makes its buffers, so that runs of misses are not runs of hits.
    """
    rows, seconds, missed, waited = (part[name].to_numpy() for name in ("rows", "seconds", "missed", "waited"))
    usual = ~(missed | waited)
    apart = usual.sum() >= FEW_RUNS
    line = fit(seconds[usual], rows[usual]) if apart else fit(seconds, rows)

    def longer(which: np.ndarray) -> float:
        if not apart or which.sum() < FEW_RUNS:
            return 0.0
        return max(float(np.mean(seconds[which] - np.array([line.at(r) for r in rows[which]]))), 0.0)

    return line, longer(missed), longer(waited)


def _without_loads(part: pd.DataFrame, loads: pd.DataFrame) -> np.ndarray:
    """Seconds of expert runs without the loads that lie within them on their thread."""
    held = loads.sort_values("begin_ns")
    times = held["begin_ns"].to_numpy()
    summed = np.concatenate([[0], held["duration_ns"].cumsum().to_numpy()])
    first = np.searchsorted(times, part["begin_ns"].to_numpy())
    last = np.searchsorted(times, part["end_ns"].to_numpy())
    return np.maximum(part["duration_ns"].to_numpy(float) - (summed[last] - summed[first]), 1.0) / 1e9


def _load_line(loads: pd.DataFrame) -> Line:
    """Seconds of a load over its bytes."""
    seconds = loads["seconds"].to_numpy()
    if loads["bytes"].nunique() == 1:
        return Line(fixed=float(seconds.mean()))
    return fit(seconds, loads["bytes"].to_numpy())
