"""One recording's metrics as a flat table, the unit of every comparison: one row per metric, one value per run.

A metric's `value` is used in tests: robust within the run (a median or trimmed mean over executions or steps).
Its `mean` is used in sums: per phase, the means of operators, loads, first executions and residual add up to the step's mean.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analyzer.compare.functions import function_metrics
from analyzer.questions import clocks, energy, figures, heat, step_time
from analyzer.questions.experts import activations
from analyzer.records.schema import COMPARED, Tables

Row = dict[str, Any]

METRICS = COMPARED["metrics"]
DIMS = ("family", "metric", "phase", "graph", "layer", "type", "shape", "backend", "expert")
DEFAULTS: Row = {
    **{c.name: {"object": "", "int64": -1, "float64": np.nan}[c.dtype] for c in METRICS},
    **{"better": "lower", "offset": 0.0},
}
MS = 1e6
CLOCKS, AT_CLOCK = "clocks", "at a clock"
"""Families: clocks and temperature; times of steps at one clock."""
FREQUENCY, PACE, TEMPERATURE = "frequency", "clock of the program", "temperature"
"""Metrics: the mean of a policy; of the CPUs that the program computed on; of the hottest zone, °C."""
SAME_CLOCK = 0.05
"""Frequencies with logarithms that differ by less count as equal."""
NAMES_SHOWN = 3
FEWEST_AT_CLOCK = 10
"""Steps at a clock whose time is a metric."""
MIN_RUNNING_SHARE = 0.05
NEGLIGIBLE_WAIT = 0.05
NEGLIGIBLE_TIME = 0.01
UNDISTURBED = 0.8
"""Share of an operator's executions, the fastest, that determine its time: the others mostly waited for something."""

UNDECLARED, STEP = ("found", "user"), "step"
"""The engines of steps that no engine declares, and what their phase is called."""


class RunTables:
    """A recording's tables, and intermediate results that several metrics share; `hz`: of its samples of stacks, if any."""

    def __init__(self, tables: Tables, hz: int = 0):
        self.tables, self.hz = tables, hz
        every, fed = figures.complete_steps(tables).sort_index(), figures.fed_sequences(tables)
        self.complete_steps = figures.undisturbed_steps(every)
        named = self.complete_steps["phase"].mask(self.complete_steps["engine"].isin(UNDECLARED), STEP)
        self.steps = self.complete_steps.assign(phase=named)[named != ""].set_index("token_id")
        self.time = step_time.step_time(tables)
        self.itl, self.ttfts = figures.itls_ms(fed), figures.ttft_ms(fed)


def extract_metrics(facts: RunTables) -> pd.DataFrame:
    """The metrics of a recording, indexed by `key`, columns METRICS. Metrics that were not recorded have no row."""
    makers = (
        speed_metrics,
        tail_metrics,
        phase_metrics,
        expert_metrics,
        npu_metrics,
        memory_metrics,
        scheduling_metrics,
        clock_metrics,
        steps_by_clock,
        energy_metrics,
    )
    rows = [row for make in makers for row in make(facts)]
    parts = [pd.DataFrame(rows), operator_metrics(facts), expert_time_metrics(facts)]
    parts.append(function_metrics(facts.tables, facts.steps, facts.hz))
    frame = pd.concat([pd.DataFrame([DEFAULTS]).iloc[:0], *(part for part in parts if len(part))], ignore_index=True)
    frame = frame.reindex(columns=[c.name for c in METRICS])
    for column in METRICS:
        frame[column.name] = frame[column.name].astype(object).where(frame[column.name].notna(), DEFAULTS[column.name])
        frame[column.name] = frame[column.name].astype(column.dtype)
    frame = frame[np.isfinite(frame["value"])]
    frame.index = pd.Index(metric_keys(frame), name="key")
    return frame[~frame.index.duplicated()]


def metric_keys(frame: pd.DataFrame) -> np.ndarray:
    """The identity of each row: its dimensions, joined."""
    joined = frame[DIMS[0]].astype(str)
    for name in DIMS[1:]:
        joined = joined + "|" + frame[name].astype(str)
    return joined.to_numpy(object)


def metric_row(family: str, metric: str, unit: str, value: float | None, n: int, **more: Any) -> Row:
    """A metric, omitted if its value is unknown; `more`: its other columns that differ from DEFAULTS."""
    return {"family": family, "metric": metric, "unit": unit, "value": value, "n": n, **more}


def speed_metrics(facts: RunTables) -> Iterator[Row]:
    """TTFT, TPOT, prefill and decode speed, as defined in questions/figures.py; medians as the robust values."""
    steps, itl, waited = facts.complete_steps, facts.itl, facts.ttfts
    decode, n_prefill = steps[steps["phase"] == "decode"], int((steps["phase"] == "prefill").sum())
    undeclared = facts.steps[facts.steps["phase"] == STEP]
    yield metric_row("speed", "TTFT", "ms", waited.median(), len(waited))
    yield metric_row("speed", "TPOT, median", "ms", itl.median(), len(itl))
    yield metric_row("speed", "decode step", "ms", decode["duration_ns"].median() / MS, len(decode))
    yield metric_row("speed", "decode speed", "tok/s", figures.decode_tokens_per_s(itl), len(itl), better="higher")
    yield metric_row("speed", "step time", "ms", undeclared["duration_ns"].median() / MS, len(undeclared))
    yield metric_row("speed", "prefill speed", "tok/s", figures.prefill_tokens_per_s(steps), n_prefill, better="higher")


def tail_metrics(facts: RunTables) -> Iterator[Row]:
    """Metrics that medians do not show: first executions and slow steps."""
    itl, waited = facts.itl, facts.ttfts
    if len(waited) > 1:
        yield metric_row("tail", "TTFT, first generation", "ms", waited.iloc[0], 1)
    if len(itl) > 1:
        yield metric_row("tail", "TPOT, first step", "ms", itl.iloc[0], 1)
    if len(itl) > 10:
        yield metric_row("tail", "TPOT, p90", "ms", itl.quantile(0.9), len(itl))


def phase_metrics(facts: RunTables) -> Iterator[Row]:
    """ms per step of every part (median) and of every cause (mean, as on all screens: few steps have some), by phase."""
    steps = facts.steps
    if len(steps) == 0 or (len(facts.tables["operators"]) == 0 and not (steps["phase"] == STEP).any()):
        return
    for by in ("part", "cause"):
        spent = step_time.per_step(facts.tables, facts.time, by).reindex(steps.index, fill_value=0.0) / MS
        for phase, every in spent.groupby(steps["phase"]):
            rows, means = every.iloc[1:] if len(every) > 1 else every, every.mean()
            total = float(steps.loc[rows.index, "duration_ns"].median()) / MS
            for name, value in (rows.median() if by == "part" else means).items():
                if value > 0:
                    share, offset = (value / total if total else np.nan), NEGLIGIBLE_TIME * total * (by == "cause")
                    more = {"phase": phase, "type": name, "share": share, "mean": means[name], "offset": offset}
                    yield metric_row("phase", f"time by {by}", "ms", value, len(rows), **more)


def described_operators(facts: RunTables, charged: np.ndarray) -> pd.DataFrame:
    """Operators with phase, kind and backend of their graph, and `charged`, their ns of their step's time."""
    runs = facts.tables["graphs"].set_index("graph_id")
    frame = facts.tables["operators"]
    backend = frame["graph_id"].map(runs["backend"]).fillna("") if len(runs) else ""
    kind = frame["graph_id"].map(runs["kind"]).fillna("") if len(runs) else ""
    frame = frame.assign(graph=kind, backend=backend, charged=charged)
    inner = facts.tables["experts"].drop_duplicates("op_id").set_index("op_id")["backend"]
    if len(inner):
        frame["backend"] = frame["backend"].where(frame["backend"] != "", frame["op_id"].map(inner).fillna(""))
    return frame.assign(phase=frame["token_id"].map(facts.steps["phase"]).fillna(""))


OPERATOR = ["phase", "graph", "layer", "type", "shape", "backend", "expert"]


def operator_metrics(facts: RunTables) -> pd.DataFrame:
    """Families `operator` and `closure`: ms per step of each (graph, layer, type, shape, backend), by phase.

    The first execution of each is separate: compiling, page faults and empty caches make it incomparable.
    """
    steps = facts.steps
    frame = described_operators(facts, step_time.charged_ns(facts.tables, facts.time, "operators", "op_id"))
    frame = frame[frame["phase"] != ""]
    if len(frame) == 0:
        return pd.DataFrame()
    frame = frame.sort_values("begin_ns", kind="stable")
    number = frame.groupby(OPERATOR, sort=False).ngroup()
    frame = frame.assign(number=number, first=~frame.duplicated([*OPERATOR, "name"]))
    counted = steps.groupby("phase")["duration_ns"].agg(["size", "sum"])
    later = frame[~frame["first"]]
    steady = later.groupby("number")["charged"].agg(["sum", "size"]).assign(usual=_undisturbed_ns(later))
    rows = frame.drop_duplicates("number").set_index("number")[OPERATOR].join(steady, how="inner")
    rows["label"] = _engine_names(frame).reindex(rows.index)
    size, total = (rows["phase"].map(counted[name]).astype(float) for name in ("size", "sum"))  # float also without rows
    rows = rows.assign(
        family="operator",
        metric="time",
        unit="ms",
        value=rows["usual"] / size / MS,
        mean=rows["sum"] / size / MS,
        n=rows["size"],
        share=rows["sum"] / total,
    )
    rows = rows[rows["value"] + rows["mean"] > 0]
    return pd.concat([rows, pd.DataFrame(list(closure_metrics(facts, frame)))], ignore_index=True)


def _undisturbed_ns(frame: pd.DataFrame) -> pd.Series:
    """Undisturbed ns of all executions of each `number`: the mean without the slowest fifth, separately for each
    name in the engine (their times differ; the median of a mixture would jump between them)."""
    ordered = frame.sort_values(["number", "name", "charged"])
    charges = ordered.groupby(["number", "name"], sort=False)["charged"]
    undisturbed = ordered[charges.cumcount() < np.ceil(UNDISTURBED * charges.transform("size"))]
    by_name = undisturbed.groupby(["number", "name"])["charged"].mean() * charges.size()
    return by_name.groupby(level="number").sum()


def _engine_names(frame: pd.DataFrame) -> pd.Series:
    """The engine's names of each operator, the first few."""
    names = frame[["number", "name"]].drop_duplicates()
    names = names[names.groupby("number").cumcount() <= NAMES_SHOWN]
    return names.groupby("number")["name"].agg(lambda n: ", ".join(n[:NAMES_SHOWN]) + (" …" if len(n) > NAMES_SHOWN else ""))


def closure_metrics(facts: RunTables, frame: pd.DataFrame) -> Iterator[Row]:
    """Per phase: the mean step and its parts first executions, loads and residual."""
    steps = facts.steps
    loaded = facts.tables["loads"].assign(charged=step_time.charged_ns(facts.tables, facts.time, "loads", "load_id"))
    loaded["phase"] = loaded["token_id"].map(steps["phase"]).fillna("")
    for phase, rows in steps.groupby("phase"):
        size, total = len(rows), float(rows["duration_ns"].sum())
        operators = frame[frame["phase"] == phase]
        first = float(operators.loc[operators["first"], "charged"].sum())
        loads = float(loaded.loc[loaded["phase"] == phase, "charged"].sum())
        residual = total - float(operators["charged"].sum()) - loads
        parts = {"step": total, "first executions": first, "expert loads": loads, "residual": residual}
        for name, ns in parts.items():
            if ns or name == "step":
                mean, more = ns / size / MS, {"share": ns / total, "offset": 0.05 * total / size / MS}
                yield metric_row("closure", name, "ms", mean, size, phase=phase, mean=mean, **more)


def expert_metrics(facts: RunTables) -> Iterator[Row]:
    """Hit rate of the expert cache, by phase."""
    steps = facts.steps
    if len(steps) == 0:
        return
    for phase in ("prefill", "decode"):
        counted = figures.cache_hits(facts.tables, phase)
        hits, misses = int(counted["hits"].sum()), int(counted["misses"].sum())
        more = {"phase": phase, "better": "higher", "offset": 0.01}
        yield metric_row("expert", "hit rate", "share", figures.hit_rate(hits, misses), hits + misses, **more)


def expert_time_metrics(facts: RunTables) -> pd.DataFrame:
    """For every expert: ms per step in its loads, and ms of its runs without the first, by phase and backend."""
    steps = facts.steps
    if len(steps) == 0:
        return pd.DataFrame()
    loads = facts.tables["loads"][
        (facts.tables["loads"]["action"] == "load") & facts.tables["loads"]["token_id"].isin(steps.index)
    ]
    loaded = loads.groupby(["layer", "expert"])["duration_ns"].agg(["sum", "size"]).reset_index()
    loaded = loaded.assign(value=loaded["sum"] / len(steps) / MS, n=loaded["size"], metric="load time per step")
    loaded["offset"] = 0.01 * steps["duration_ns"].median() / MS
    runs = facts.tables["experts"][facts.tables["experts"]["complete"]].sort_values("begin_ns", kind="stable")
    runs = runs.assign(phase=runs["token_id"].map(steps["phase"]).fillna(""))
    runs = runs[(runs["phase"] != "") & runs.duplicated(["phase", "layer", "expert", "backend"])]
    spent = runs.groupby(["phase", "layer", "expert", "backend"])["duration_ns"].agg(["mean", "sum", "size"]).reset_index()
    total = spent["phase"].map(steps.groupby("phase")["duration_ns"].sum()).astype(np.float64)  # float also without rows
    spent = spent.assign(value=spent["mean"] / MS, n=spent["size"], share=spent["sum"] / total, metric="run time")
    fields = [*DIMS[2:], "metric", "value", "n", "share", "offset"]
    parts = [part.reindex(columns=[c for c in fields if c in part]) for part in (loaded, spent) if len(part)]
    return pd.concat(parts, ignore_index=True).assign(family="expert", unit="ms") if parts else pd.DataFrame()


def npu_metrics(facts: RunTables) -> Iterator[Row]:
    """Per execute, by subgraph kind and tier, without the first one: duration, RPC, accelerator time and cycles (medians)."""
    executes = facts.tables["qnn_executes"].sort_values("begin_ns")
    executes = executes.assign(duration_us=executes["duration_ns"] / 1e3)
    units = {"duration_us": "us", "host_rpc_us": "us", "htp_rpc_us": "us", "accel_us": "us", "accel_cycles": "cycles"}
    for (kind, tier), rows in executes[executes["complete"]].groupby(["kind", "tier"]):
        rows = rows[rows.groupby(["pid", "graph"]).cumcount() > 0]
        for name, unit in units.items():
            more = {"graph": kind, "shape": f"tier {tier}" if tier > 0 else ""}
            yield metric_row("npu", name.rsplit("_", 1)[0], unit, rows[name].median(), int(rows[name].count()), **more)


def memory_metrics(facts: RunTables) -> Iterator[Row]:
    """Faults and bytes read per step, and the maximum of every counter of bytes."""
    steps = facts.steps
    for name, title in (("maj_flt", "major faults per step"), ("min_flt", "minor faults per step")):
        if len(steps) and (steps[name] >= 0).all():
            yield metric_row("memory", title, "count", steps[name].mean(), len(steps), offset=1.0)
    reads = facts.tables["reads"]
    if len(reads) and len(steps):
        size = reads.loc[reads["token_id"].isin(steps.index), "bytes"].sum() / len(steps)
        yield metric_row("memory", "bytes read per step", "bytes", size, len(steps), offset=4096.0)
    counters = facts.tables["counters"]
    for name, rows in counters[counters["name"].str.contains("bytes")].groupby("name"):
        yield metric_row("memory", f"peak {name}", "bytes", rows["value"].max(), len(rows))


def scheduling_metrics(facts: RunTables) -> Iterator[Row]:
    """For each busy thread of the target: ms per step in which it was ready and waited for a cpu, between first and last step."""
    steps, states = facts.steps, facts.tables["thread_states"]
    if len(steps) == 0 or len(states) == 0:
        return
    first, last, owner = steps["begin_ns"].min(), steps["end_ns"].max(), steps["tid"].iloc[0]
    spent = (states["end_ns"].clip(upper=last) - states["begin_ns"].clip(lower=first)).clip(lower=0)
    by_state = spent.groupby([states["tid"], states["state"]]).sum().unstack(fill_value=0)
    by_state = by_state.reindex(columns=["running", "runnable"], fill_value=0)
    busy = by_state[by_state["running"] + by_state["runnable"] > MIN_RUNNING_SHARE * (last - first)].sort_index()
    names = facts.tables["threads"].drop_duplicates("tid").set_index("tid")["name"].reindex(busy.index, fill_value="")
    number = names.groupby(names).cumcount() + 1
    step = (last - first) / len(steps) / MS
    for tid, runnable in busy["runnable"].items():
        role = f"{names[tid]} (main)" if tid == owner else f"{names[tid]} {number[tid]}"
        ready = runnable / len(steps) / MS
        yield metric_row("scheduling", "ready, without a cpu", "ms", ready, len(steps), type=role, offset=NEGLIGIBLE_WAIT * step)


def clock_metrics(facts: RunTables) -> Iterator[Row]:
    """The mean frequency of each policy's CPUs in decode, the program's clock by phase, and the hottest zone's temperature."""
    for name, mhz in clocks.mean_frequencies(facts.tables).items():
        yield metric_row(CLOCKS, FREQUENCY, "MHz", mhz, len(facts.steps), type=name, phase="decode", better="higher")
    for phase, steps in facts.steps.groupby("phase"):
        begin, end, weight = (steps[name].to_numpy() for name in ("begin_ns", "end_ns", "duration_ns"))
        for metric, unit, better, of in (
            (PACE, "MHz", "higher", heat.pace_mhz),
            (TEMPERATURE, "°C", "lower", heat.hottest_celsius),
        ):
            values = of(facts.tables, begin, end)
            known = np.isfinite(values)
            mean = float(np.average(values[known], weights=weight[known])) if known.any() else None
            if mean is not None and (metric == PACE or phase == "decode"):
                yield metric_row(CLOCKS, metric, unit, mean, int(known.sum()), phase=phase, better=better)


def steps_by_clock(facts: RunTables) -> Iterator[Row]:
    """The median decode step at each clock of the program (in classes of SAME_CLOCK), if it was at several."""
    steps = facts.steps[facts.steps["phase"] == "decode"]
    mhz = heat.pace_mhz(facts.tables, steps["begin_ns"].to_numpy(), steps["end_ns"].to_numpy())
    known = np.isfinite(mhz) & (np.nan_to_num(mhz) > 0)
    classes = np.round(np.log(mhz[known]) / SAME_CLOCK).astype(np.int64)
    for number, rows in steps[known].groupby(classes):
        if len(rows) >= FEWEST_AT_CLOCK:
            ghz = np.exp(number * SAME_CLOCK) / 1e3
            yield metric_row(
                AT_CLOCK, "decode step", "ms", rows["duration_ns"].median() / MS, len(rows), type=f"{ghz:.2f} GHz", phase="decode"
            )


def energy_metrics(facts: RunTables) -> Iterator[Row]:
    """Family `energy`: joules per token of each phase, also above the idle floor. Family `power`: mean watts, and the floor."""
    fits = energy.fitted_rails(facts.tables)
    method = {each.row["rail_id"]: f"{each.row['source']}, {1 / each.readings.period_s:.3g} readings/s" for each in fits}
    for row in energy.phase_energy(facts.tables, fits).to_dict("records"):
        tokens, where = row["tokens"], {"type": row["rail"], "phase": row["phase"], "label": method[row["rail_id"]]}
        above = (row["joules"] - row["floor_joules"]) / tokens if tokens else None
        yield metric_row("energy", "energy per token", "J", row["j_per_token"], tokens, **where)
        yield metric_row("energy", "energy per token above the floor", "J", above, tokens, **where)
        yield metric_row("power", "mean power", "W", row["joules"] / row["seconds"], tokens, **where)
    for each in fits:
        if each.floor:
            yield metric_row("power", "idle floor", "W", *each.floor, type=each.row["rail"], label=method[each.row["rail_id"]])


def routed_rows(tables: Tables) -> pd.DataFrame:
    """Rows routed to every (layer, expert): columns layer, expert, n_tokens."""
    return activations(tables).groupby(["layer", "expert"], as_index=False)["n_tokens"].sum()
