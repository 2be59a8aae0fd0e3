"""Costs of the parts of a step: fitted to a recording of this machine, or from a model's roofline on a device profile."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from analyzer.errors import PredictError
from analyzer.model import Model
from analyzer.predict import roofline
from analyzer.predict.devices import Device
from analyzer.predict.setup import Setup
from analyzer.questions import expert_loads
from analyzer.questions.roofline import operator_backends
from analyzer.records.schema import Tables

UNITS = ("cpu", "npu")
RESIDENT, DEMAND, AHEAD = "resident", "demand", "ahead"
"""Modes: everything stays; what is missing is loaded by the layer that needs it; a loader works beside the layers."""
LOADED, AWAITED, FOUND = "loaded", "awaited", "found"
"""How an expert came before its first run: on the thread that ran it, by the loader while that waited, by the loader before."""
CONTEXT = 512
FEW_RUNS = 8
"""Runs of a kind that are needed to distinguish its costs from those of others."""
UNIT_OF = {"cpu": "cpu", "htp": "npu"}
"""Backend names in recordings → units of this package."""
ROUNDS = 8
"""Of fits of a line and of the loader's factor on it."""
LAYER_KINDS = ("attention", "router", "dispatch", "mlp", "combine")
SAME_EVERYWHERE = ("attention", "router", "combine")
"""Decode work that no setting changes; its times normalize recordings to one machine speed."""


@dataclass(frozen=True)
class Line:
    """Seconds = fixed + per_row·rows + per_pair·rows·context, multiplied by `beside` while the loader works.

    per_load: added for each load requested during the work: selection, eviction, notification of the loader.
    """

    fixed: float = 0.0
    per_row: float = 0.0
    per_pair: float = 0.0
    beside: float = 1.0
    per_load: float = 0.0

    def seconds(self, rows: float, context: float = 0.0) -> float:
        """Seconds."""
        return self.fixed + self.per_row * rows + self.per_pair * rows * context


@dataclass(frozen=True)
class Costs:
    """Seconds of each kind of work, by (kind, unit) or (kind, unit, phase, mode); bytes of an expert by unit.

    Kinds: attention (a chunk at a context), router, mlp (shared expert), expert (rows of a batch), combine, dispatch (a
    chunk), flush (buffered rows at a layer's end), and `outside`, once per step. Work lasts from the end of the previous
    work. load, behind: lines over bytes, on the thread that needs the expert and on the loader's (None: equal); loads: `load` by
    (unit, whether it is the first of its form); behind_first: `behind` for the first of a form, whose memory is new (None:
    equal). by_layer: bytes of an expert on the first unit by layer, () if all are equal. first: additional time of an expert's
    first run, by (how it was loaded, phase, mode). loaders: number of loader threads. loads_at_once: most concurrent loads.
    """

    work: dict[tuple[str, ...], Line]
    load: Line
    expert_bytes: dict[str, int]
    source: str
    warnings: tuple[str, ...] = ()
    behind: Line | None = None
    behind_first: Line | None = None
    first: dict[tuple[str, str, str], float] = field(default_factory=dict)
    loaders: int = 1
    loads_at_once: int = 1
    loads: dict[tuple[str, bool], Line] = field(default_factory=dict)
    by_layer: tuple[int, ...] = ()

    def bytes_of(self, unit: str, layer: int) -> int:
        """Bytes of an expert of a layer (by index) in a unit's form."""
        usual = self.expert_bytes[unit]
        return self.by_layer[layer] * usual // next(iter(self.expert_bytes.values())) if self.by_layer else usual

    def all_experts(self, layers: int, experts: int) -> int:
        """Bytes of all experts, on the unit where they are largest."""
        unit = max(self.expert_bytes, key=self.expert_bytes.__getitem__)
        return experts * sum(self.bytes_of(unit, layer) for layer in range(layers))

    def loading(self, unit: str, first: bool) -> Line:
        """The line of a load on the thread that needs the expert: for the first of its form, or for a later one."""
        return self.loads.get((unit, first)) or self.loads.get((unit, not first)) or self.load

    def knows(self, kind: str, unit: str) -> bool:
        """Whether such work was seen in any phase."""
        return any(key[:2] == (kind, unit) for key in self.work)

    def line(self, kind: str, unit: str, phase: str = "", mode: str = "") -> Line | None:
        """The line of one kind of work, in the nearest unit, phase and mode that were seen; None if the kind was not seen."""

        def nearness(key: tuple[str, ...]) -> tuple[bool, ...]:
            _, its_unit, its_phase, its_mode = (*key, "", "")[:4]
            return its_unit == unit, its_phase == phase, not its_phase, its_mode == mode, its_mode != RESIDENT

        candidates = [key for key in self.work if key[0] == kind and key[1] in (unit, "cpu")]
        if not candidates and kind == "flush":
            return self.line("dispatch", unit, phase, mode)
        return self.work[max(candidates, key=nearness)] if candidates else None


def fit_line(seconds: np.ndarray, rows: np.ndarray, context: np.ndarray) -> Line:
    """A line with the sum of the measured times, and a shape fitted by non-negative least squares of relative errors.

    Relative errors keep prefill from dominating decode's short runs; the sum is kept since predictions are means over many runs.
    """
    from scipy.optimize import nnls  # a quarter of a second, which only fits need

    columns = np.stack([np.ones(len(rows)), rows, rows * context], 1)
    weights = 1 / np.maximum(seconds, 1e-9)
    coefficients, _ = nnls(columns * weights[:, None], seconds * weights)
    scale = seconds.sum() / max(float((columns @ coefficients).sum()), 1e-12)
    return Line(*(float(value * scale) for value in coefficients))


def from_tables(*recordings: Tables) -> Costs:
    """Costs of the recorded engine and machine, at the pace of the first recording; recordings of one mode are pooled.

    Modes differ in the costs that they show: a cache with misses shows loads, a complete one shows resident experts, a run
    with prefetching shows the loader and its slowdown of other work. Chunks of several sizes show the fixed cost of one.
    """
    observed = at_one_pace([RecordedCosts.of(tables) for tables in recordings])
    behind = _pooled_lines(observed, lambda run: run.loads[run.loads["behind"]])
    inline = _pooled_lines(observed, lambda run: run.loads[~run.loads["behind"]])
    if len(behind) + len(inline) == 0:
        raise PredictError("the recordings hold no expert loads: record with an expert cache smaller than the model")
    runs = _pooled_lines(observed, lambda run: run.runs)
    if len(runs) == 0:
        raise PredictError("the recordings hold no expert runs: record the runtime at levels operator,expert")
    by_kind = _pooled_lines(observed, lambda run: run.work).groupby(["kind", "unit", "phase", "mode"])
    work: dict[tuple[str, ...], Line] = {key: line_of_work(part) for key, part in by_kind}
    first: dict[tuple[str, str, str], float] = {}
    for (backend, phase, mode), part in runs.groupby(["backend", "phase", "mode"]):
        line, longer = _expert_runs(part)
        work["expert", UNIT_OF.get(backend, "cpu"), phase, mode] = line
        first |= {(how, phase, mode): seconds for how, seconds in longer.items()}
    loaders = max(1, *(run.loads.loc[run.loads["behind"] & (run.loads["tid"] > 0), "tid"].nunique() for run in observed))
    return Costs(
        work,
        _load_line(inline if len(inline) else behind),
        _cached_sizes(observed),
        f"fitted to the operators, expert runs and loads of {len(observed)} recording{'s' if len(observed) > 1 else ''}",
        behind=_load_line(_has_enough(behind[behind["again"]], behind)) if len(behind) else None,
        behind_first=_load_line(_has_enough(behind[~behind["again"]], behind)) if len(behind) else None,
        first=first,
        loaders=loaders,
        loads_at_once=loaders + 1,
        loads={
            (UNIT_OF.get(str(key[0]), "cpu"), not key[1]): _load_line(part) for key, part in inline.groupby(["backend", "again"])
        },
    )


def from_device(model: Model, device: Device) -> Costs:
    """Costs from the roofline, each kind from its times at 1 and 64 rows with CONTEXT tokens."""
    if not model.mixture:
        raise PredictError(f"{model.name} has no experts: a trace of routes cannot run on it")
    if not device.storage:
        raise PredictError(f"{device.name}: its profile has no [storage]: add gigabytes_per_s")
    units = {"cpu": "cpu" if "cpu" in device.units else next(iter(device.units)), "npu": "npu"}
    work: dict[tuple[str, ...], Line] = {}
    for unit, name in units.items():
        if name in device.units:
            work |= _unit_lines(model, device, name, unit)
    size = round((model.ups + 1) * model.hidden * model.mixture.width * model.storage.expert / 8)
    load = Line(fixed=1e-4, per_row=1 / device.storage)
    source = f"roofline of {model.name} on {device.name}, weights {model.storage.text}; loads at the storage's rate plus 0.1 ms"
    warnings = (f"{device.name}: estimated, not published: {', '.join(device.estimates)}",) if device.estimates else ()
    return Costs(work, load, {unit: size for unit in UNITS}, source, warnings)


def with_recorded_sizes(costs: Costs, sizes: tuple[int, ...]) -> Costs:
    """The costs with the recorded bytes of an expert by layer, if known; a warning if the config's differ."""
    if not sizes:
        return costs
    usual, said = int(np.median(sizes)), max(costs.expert_bytes.values())
    texts = costs.warnings
    if not 0.8 <= said / usual <= 1.25:
        texts += (f"an expert takes {usual:,} bytes in the recording, {said:,} by the config: --weights names the stored type",)
    by_layer = tuple(sizes) if len(set(sizes)) > 1 else ()
    return replace(costs, expert_bytes=dict.fromkeys(costs.expert_bytes, usual), by_layer=by_layer, warnings=texts)


def _unit_lines(model: Model, device: Device, name: str, unit: str) -> dict[tuple[str, ...], Line]:
    """Lines of one unit, through its roofline at 1 and 64 rows; for experts, of one expert."""
    assert model.mixture
    one_expert = replace(model, mixture=replace(model.mixture, experts=1, top_k=1))
    kinds = {"attention": "attention", "router": "router", "outside": "head"}
    lines: dict[tuple[str, ...], Line] = {}
    few, many = (_roofline_seconds(model, device, name, rows) for rows in (1, 64))
    for kind, part in kinds.items():
        lines[kind, unit] = _line_through(few[part], many[part])
    few, many = (_roofline_seconds(one_expert, device, name, rows) for rows in (1, 64))
    lines["expert", unit] = _line_through(few["experts"], many["experts"])
    return lines


def _roofline_seconds(model: Model, device: Device, unit: str, rows: int) -> dict[str, float]:
    """Seconds of attention, router, experts in one layer, and of the head, for `rows` decoding rows."""
    setup = Setup("decode", rows, CONTEXT, unit=unit)
    seconds = dict.fromkeys(("attention", "router", "experts", "head"), 0.0)
    for part in roofline.work_items(model, roofline.unit_peak(device, model, setup), setup):
        seconds[part.name.split()[0]] = seconds.get(part.name.split()[0], 0.0) + part.seconds
    return seconds


def _line_through(seconds_of_one_row: float, seconds_of_64_rows: float) -> Line:
    slope = max(seconds_of_64_rows - seconds_of_one_row, 0.0) / 63
    return Line(fixed=max(seconds_of_one_row - slope, 0.0), per_row=slope)


@dataclass(frozen=True)
class RecordedCosts:
    """Costs in one recording. Times are in seconds; work lasts from the end of the previous work.

    work: kind, unit, phase, mode, rows, context (0 except for attention), seconds, bare (without the time before it), beside (the
    loader was working), asked (loads requested from the loader: ahead before attention, for the layer's choice in a dispatch).
    runs: the same for expert runs, with backend for unit, and layer, token_id, how (its expert was loaded; empty if it had run
    before); seconds are without the load on its thread, and from the load's end after a wait for the loader. loads: backend,
    bytes, seconds, behind (not by the run that needs it), tid (0: a step's thread), again (not the first of its form). evicted:
    bytes of experts in the cache.
    """

    work: pd.DataFrame
    runs: pd.DataFrame
    loads: pd.DataFrame
    evicted: pd.Series

    @classmethod
    def of(cls, tables: Tables) -> "RecordedCosts":
        """The costs in a recording's tables."""
        loads, tokens = expert_loads.with_forms(tables), tables["tokens"].set_index("token_id")
        timed_loads = loads[loads["duration_ns"] > 0]
        limited = bool((timed_loads["reason"] != "startup").any())
        runners = {*tokens["tid"].head(1), *tables["experts"]["tid"]}
        by_runner = timed_loads["tid"].isin(runners)
        apart = ~by_runner | ~_within_own_run(timed_loads, tables["experts"])
        behind = timed_loads[apart & (timed_loads["reason"] != "startup")]
        counted = timed_loads[timed_loads["reason"] != "startup"] if limited else timed_loads
        load_rows = counted[["backend", "bytes", "tid", "again"]].assign(
            seconds=counted["duration_ns"] / 1e9, behind=counted.index.isin(behind.index), tid=counted["tid"].mask(by_runner, 0)
        )
        # A prompt's experts are always read on the loader's thread, a single token's only ahead or if they are large.
        decoding = behind["token_id"].isin(tokens.index[tokens["phase"] == "decode"])
        mode = (AHEAD if decoding.any() else DEMAND) if limited else RESIDENT
        pieces, after = _timed_pieces(tables, tokens)
        other = pieces[pieces["type"] != "expert"]
        work = _operator_work(other, after, tokens, behind, set(tables["routes"]["layer"]))
        runs = _run_times(pieces[pieces["type"] == "expert"], tokens, timed_loads, behind)
        evicted = tables["loads"].loc[(tables["loads"]["action"] == "evict") & (tables["loads"]["bytes"] > 0), "bytes"]
        return cls(work.assign(mode=mode), runs.assign(mode=mode), load_rows, evicted)

    def paced(self, factor: float) -> "RecordedCosts":
        """The costs multiplied by `factor`."""

        def slower(frame: pd.DataFrame) -> pd.DataFrame:
            return frame.assign(**{name: frame[name] * factor for name in ("seconds", "bare") if name in frame})

        return replace(self, work=slower(self.work), runs=slower(self.runs), loads=slower(self.loads))


def at_one_pace(observed: list[RecordedCosts]) -> list[RecordedCosts]:
    """All recordings scaled to the pace of the first, by work that no setting affects: a machine's clock drifts between runs."""
    if len(observed) < 2:
        return observed
    usual = [
        run.work[run.work["kind"].isin(SAME_EVERYWHERE) & (run.work["phase"] == "decode") & ~run.work["beside"]]
        for run in observed
    ]
    middles = [part.groupby("kind")["bare"].median() for part in usual]
    ratios = [np.log(middles[0] / middle).dropna() for middle in middles]
    return [run.paced(float(np.exp(ratio.mean())) if len(ratio) else 1.0) for run, ratio in zip(observed, ratios, strict=True)]


def _within_own_run(loads: pd.DataFrame, runs: pd.DataFrame) -> np.ndarray:
    """Whether each load lies within a run of its expert, which then reads for itself; others are read beside the layer's work."""
    runs = runs.sort_values("begin_ns")
    begun = loads.assign(row=np.arange(len(loads))).sort_values("begin_ns")
    columns = ["layer", "expert", "begin_ns", "end_ns"]
    met = pd.merge_asof(
        begun[["row", *columns]], runs[columns].rename(columns={"end_ns": "run_end"}), on="begin_ns", by=["layer", "expert"]
    )
    within = np.zeros(len(loads), bool)
    within[met["row"]] = met["end_ns"] <= met["run_end"]
    return within


def _timed_pieces(tables: Tables, tokens: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    """(operators and expert runs of all steps with `lead_ns`, ns after the last one in each step).

    lead_ns: time since the end of everything that began earlier in the step.
    """
    units = pd.Series(operator_backends(tables)).map(UNIT_OF).fillna("cpu")
    placed = {"operators": tables["operators"].assign(unit=units.to_numpy()), "experts": tables["experts"]}
    operators, experts = (table[table["token_id"].isin(tokens.index)] for table in placed.values())
    joined = pd.concat([operators[operators["type"] != "expert"], experts.assign(type="expert")], ignore_index=True)
    pieces = joined.sort_values(["token_id", "begin_ns"], ignore_index=True)
    ended = pieces.groupby("token_id")["end_ns"].cummax()
    before = ended.groupby(pieces["token_id"]).shift().fillna(pieces["token_id"].map(tokens["begin_ns"]))
    pieces["lead_ns"] = (pieces["begin_ns"] - before).clip(lower=0)
    return pieces, (tokens["end_ns"] - ended.groupby(pieces["token_id"]).max()).clip(lower=0)


def _operator_work(
    part: pd.DataFrame, after: pd.Series, tokens: pd.DataFrame, behind: pd.DataFrame, routed: set[int]
) -> pd.DataFrame:
    """Operators except experts; those neither in a layer with experts nor of its kinds are `outside`, summed by step."""
    step = tokens.reindex(part["token_id"])
    rows = part["n_tokens"].to_numpy(float)
    inside = part["type"].isin(LAYER_KINDS) & (part["layer"].isin(routed) if routed else True)
    work = pd.DataFrame(
        {
            "token_id": part["token_id"].to_numpy(),
            "kind": np.where(inside, np.where(_is_last_dispatch(part, step["phase"]), "flush", part["type"]), "outside"),
            "unit": np.where(inside & (part["type"] == "attention"), part["unit"], "cpu"),
            "phase": step["phase"].to_numpy(),
            "rows": rows,
            "context": np.where(part["type"] == "attention", step["position"].to_numpy(float) + rows, 0.0),
            "seconds": (part["duration_ns"] + part["lead_ns"]).to_numpy(float) / 1e9,
            "bare": part["duration_ns"].to_numpy(float) / 1e9,
            "beside": _during_loads(part, behind),
            "asked": _loads_ahead(part, behind),
        }
    )
    chunked = work["kind"].eq("attention") & (work["phase"] == "prefill")
    layer = part["layer"].to_numpy()[chunked]
    work.loc[chunked, "context"] = work[chunked].groupby([work.loc[chunked, "token_id"], layer])["rows"].cumsum()
    outside = work[work["kind"] == "outside"]
    summed = {**dict.fromkeys(("kind", "unit", "phase"), "first"), **dict.fromkeys(("rows", "context"), "max"), "beside": "any"}
    summed |= dict.fromkeys(("seconds", "bare", "asked"), "sum")
    outside_by_step = outside.groupby("token_id", as_index=False).agg(summed)[list(work.columns)]
    outside_by_step["seconds"] += outside_by_step["token_id"].map(after).fillna(0) / 1e9
    return pd.concat([work[work["kind"] != "outside"], outside_by_step], ignore_index=True)


def _is_last_dispatch(part: pd.DataFrame, phase: pd.Series) -> np.ndarray:
    """Which dispatches run the remaining rows of a layer in prefill: the last one."""
    dispatched = (part["type"] == "dispatch").to_numpy() & (phase == "prefill").to_numpy()
    last = ~part[dispatched].duplicated(["token_id", "layer"], keep="last")
    flushes = np.zeros(len(part), bool)
    flushes[dispatched] = last
    return flushes


def _loads_ahead(part: pd.DataFrame, behind: pd.DataFrame) -> np.ndarray:
    """Number of loads that began on a loader thread during a layer: those ahead count for its attention, others for dispatch."""
    counts = np.zeros(len(part))
    begin = part["begin_ns"].to_numpy()
    for kind, ahead in (("attention", True), ("dispatch", False)):
        pieces = np.flatnonzero((part["type"] == kind).to_numpy())
        loads = behind.loc[(behind["reason"] == "prefetch") == ahead, "begin_ns"].to_numpy()
        if len(pieces) and len(loads):
            early = begin[pieces] - (part["lead_ns"].to_numpy()[pieces] if ahead else 0)
            order = np.argsort(early)
            owner = np.searchsorted(early[order], loads, "right") - 1
            np.add.at(counts, pieces[order[owner[owner >= 0]]], 1)
    return counts


def _run_times(part: pd.DataFrame, tokens: pd.DataFrame, timed_loads: pd.DataFrame, behind: pd.DataFrame) -> pd.DataFrame:
    """Expert runs; for those that waited for the loader's load of their expert, only the time after it counts."""
    own_loads = behind[["layer", "expert", "begin_ns", "end_ns"]].merge(
        part[["run_id", "layer", "expert", "begin_ns", "end_ns"]], on=["layer", "expert"], suffixes=("", "_run")
    )
    own_loads = own_loads[(own_loads["end_ns"] > own_loads["begin_ns_run"]) & (own_loads["begin_ns"] < own_loads["end_ns_run"])]
    landed = own_loads.groupby("run_id")["end_ns"].max().reindex(part["run_id"]).to_numpy()
    waited = ~np.isnan(landed)
    after_load = np.maximum(part["end_ns"].to_numpy(float) - landed, 1.0) / 1e9
    inline = _loads_within(part, timed_loads[~timed_loads.index.isin(behind.index)])
    seconds = np.maximum((part["duration_ns"] + part["lead_ns"]).to_numpy(float) - inline, 1.0) / 1e9
    new = part["cache"].isin(("miss", "prefetched")).to_numpy()
    runs = pd.DataFrame(
        {
            "backend": part["backend"].to_numpy(),
            "phase": tokens.reindex(part["token_id"])["phase"].to_numpy(),
            "token_id": part["token_id"].to_numpy(),
            "layer": part["layer"].to_numpy(),
            "rows": np.where(part["tier"] > 0, part["tier"], part["n_tokens"]).astype(float),
            "context": 0.0,
            "seconds": np.where(waited, after_load, seconds),
            "beside": _during_loads(part, behind),
            "asked": 0,
            "how": np.select([waited, inline > 0, new], [AWAITED, LOADED, FOUND], ""),
        }
    )
    return runs.assign(bare=runs["seconds"])


def _cached_sizes(observed: list[RecordedCosts]) -> dict[str, int]:
    """Bytes of an expert in the cache by unit: possibly more than the bytes read, as evictions show.

    A unit that ran experts but loaded none gets the largest size.
    """
    read = _pooled_lines(observed, lambda run: run.loads).groupby("backend")["bytes"].median()
    evicted = pd.concat([run.evicted for run in observed])
    if len(read) == 1 and len(evicted):
        read[:] = float(evicted.median())
    sizes = {UNIT_OF.get(str(backend), "cpu"): int(size) for backend, size in read.items()}
    ran = _pooled_lines(observed, lambda run: run.runs)["backend"].map(UNIT_OF).dropna().unique()
    return dict.fromkeys(ran.tolist(), max(sizes.values())) | sizes


def _pooled_lines(observed: list[RecordedCosts], part: Callable[[RecordedCosts], pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([part(run) for run in observed], ignore_index=True)


def line_of_work(part: pd.DataFrame) -> Line:
    """The line of work without concurrent loader or requested loads, with the others' extra time; of all work if too little.

    In a prompt, the loader works beside nearly all work but a layer's first chunk, which is not like the others: there the line
    and the loader's factor are fitted to all chunks together.
    """
    asked = part["asked"]
    unasked = part[asked == 0]
    usual, slow = unasked[~unasked["beside"]], unasked[unasked["beside"]]
    if len(usual) < FEW_RUNS:
        return _fitted_lines(part)
    line = _line_beside(unasked if len(slow) > len(usual) else usual, slow)
    if asked.sum() >= FEW_RUNS:
        excess = part["seconds"] - _expected_seconds(line, part) * np.where(part["beside"], line.beside, 1.0)
        line = replace(line, per_load=max(float(excess.sum() / asked.sum()), 0.0))
    return line


def _line_beside(fitted: pd.DataFrame, slow: pd.DataFrame) -> Line:
    """The line of `fitted` with the factor by which the loader slows `slow` down; fitted alternately until they agree."""
    beside = 1.0
    for _ in range(ROUNDS if len(slow) >= FEW_RUNS else 0):
        factor = np.where(fitted["beside"], beside, 1.0)
        bare = _fitted_lines(fitted.assign(bare=fitted["bare"] / factor), "bare")
        beside = max(float(slow["bare"].sum()) / _expected_seconds(bare, slow).sum(), 1.0)
    line = _fitted_lines(fitted.assign(seconds=fitted["seconds"] / np.where(fitted["beside"], beside, 1.0)))
    return replace(line, beside=beside)


def _fitted_lines(part: pd.DataFrame, column: str = "seconds") -> Line:
    return fit_line(*(part[name].to_numpy() for name in (column, "rows", "context")))


def _expected_seconds(line: Line, part: pd.DataFrame) -> np.ndarray:
    rows, context = part["rows"].to_numpy(), part["context"].to_numpy()
    return np.asarray(line.fixed + line.per_row * rows + line.per_pair * rows * context)


def _during_loads(part: pd.DataFrame, behind: pd.DataFrame) -> np.ndarray:
    """Which work began during a load on another thread."""
    ordered = behind.sort_values("begin_ns")
    begin = ordered["begin_ns"].to_numpy()
    latest = np.searchsorted(begin, part["begin_ns"].to_numpy(), "right") - 1
    ends = np.maximum.accumulate(ordered["end_ns"].to_numpy()) if len(ordered) else np.zeros(1)
    return (latest >= 0) & (ends[latest] > part["begin_ns"].to_numpy())


def _expert_runs(part: pd.DataFrame) -> tuple[Line, dict[str, float]]:
    """(line of a run over rows, additional seconds of an expert's first run, by how it was loaded).

    A first run binds its weights and touches them. Runs of one layer that need no load are called together, so that the delay of
    one may appear before another: it is computed from sums over layers.
    """
    usual = next((how for how in ("", FOUND, LOADED) if (part["how"] == how).sum() >= FEW_RUNS), None)
    if usual is None:
        return line_of_work(part), {}
    together = part[part["how"].isin(("", FOUND))]
    mixed = together.groupby(["token_id", "layer"])["how"].transform("nunique").to_numpy() > 1
    clean = together[~mixed & (together["how"] == usual).to_numpy()]
    line = line_of_work(clean if len(clean) >= FEW_RUNS else part[part["how"] == usual])
    longer = {}
    for how in {FOUND, LOADED, AWAITED} - {usual}:
        compared = together if how == FOUND else part[part["how"] == how]
        if how == FOUND:
            compared = compared[compared.groupby(["token_id", "layer"])["how"].transform("max") == FOUND]
        count = int((compared["how"] == how).sum())
        if count >= FEW_RUNS:
            expected = _expected_seconds(line, compared) * np.where(compared["beside"], line.beside, 1.0)
            longer[how] = float((compared["seconds"] - expected).sum()) / count
    return line, longer


def _loads_within(part: pd.DataFrame, loads: pd.DataFrame) -> np.ndarray:
    """ns of the loads within each expert run on its thread."""
    ordered = loads.sort_values("begin_ns")
    times = ordered["begin_ns"].to_numpy()
    summed = np.concatenate([[0], ordered["duration_ns"].cumsum().to_numpy()])
    first = np.searchsorted(times, part["begin_ns"].to_numpy())
    last = np.searchsorted(times, part["end_ns"].to_numpy())
    return np.asarray(summed[last] - summed[first])


def _has_enough(some: pd.DataFrame, every: pd.DataFrame) -> pd.DataFrame:
    return some if len(some) >= FEW_RUNS else every


def _load_line(loads: pd.DataFrame) -> Line:
    """Seconds of a load over its bytes."""
    seconds = loads["seconds"].to_numpy()
    if loads["bytes"].nunique() == 1:
        return Line(fixed=float(seconds.mean()))
    return fit_line(seconds, loads["bytes"].to_numpy(), np.zeros(len(loads)))
