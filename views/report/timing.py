"""The report's sections on time: steps by part and cause, and all steps in order."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import accelerators, causes, trends
from views.report.sections import Block, Run, Section, axis, binned, chart, finished, label, note, pairs, per_bin, table, table_of

SLOWEST = 15
TYPES = 7
"""Operator types that are drawn apart."""
STEPS_QUERY = "select token_id, phase, position, duration_ns/1e6 ms from tokens where complete order by begin_ns"
PHASES = (
    "Steps by phase",
    "select if(phase = '', 'unknown', phase) as phase, count(*) steps, sum(greatest(n_tokens, 0)) fed, "
    "sum(duration_ns)/1e6 total_ms, avg(duration_ns)/1e6 mean_ms, quantile_cont(duration_ns, 0.5)/1e6 median_ms, "
    "quantile_cont(duration_ns, 0.95)/1e6 p95_ms, quantile_cont(duration_ns, 0.99)/1e6 p99_ms, "
    "max(duration_ns)/1e6 max_ms, sum(greatest(maj_flt, 0)) major_faults "
    "from tokens where complete group by all order by phase",
    "text phase, number steps, number tokens fed, bar total ms, number mean ms, "
    "number median ms, number p95 ms, number p99 ms, number max ms, number major faults",
)
BETWEEN = (
    "Between operators",
    "select part, cause, after, before, count(*) pieces, sum(duration_ns)/1e6 ms, max(duration_ns)/1e3 longest_us, "
    "arg_max(begin_ns, duration_ns) begin_ns, max(duration_ns) duration_ns "
    "from gaps join counted using (token_id) group by all order by ms desc, part, cause, after, before",
    "text part, cause cause, text after, text before, number pieces, bar total ms, number longest µs, "
    "moment the longest in the timeline",
)
CELLS = (
    "Time by part and cause",
    "select phase, part, cause, sum(duration_ns)/1e6 ms from time join counted using (token_id) group by all "
    "order by ms desc, phase, part, cause",
    "text phase, text part, cause cause, bar total ms",
)
STEPS_BY_CAUSE = (
    "select token_id, cause, sum(duration_ns)/1e6 ms from time join counted using (token_id) "
    "where true{} group by all order by token_id, cause"
)
CELLS_OF_STEPS = "select token_id, part || ', ' || cause as cell, sum(duration_ns) ns from time group by all"
DECODE = " and phase = 'decode'"
UNSEEN = (
    "transport: to the accelerator and back, waiting in its queue where no profile reports it, and late answers. "
    "These cannot be distinguished from outside."
)
COMPOSITION_QUERY = (
    "select token_id, type, sum(duration_ns)/1e6 ms from operators where complete and token_id >= 0 "
    "group by all order by token_id, type"
)
GROWTH = (
    "Growth with the context",
    "select type, base_us, ns_per_token, error_ns, 100 * share as share, r2 from growth "
    "where ns_per_token > 2 * error_ns order by ns_per_token desc",
    "text type, number µs at no context, bar ns per token, number standard error, number share of growth %, number r²",
)


def mean_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of steps, those of a bin as their mean, with their index `token_id` as a column."""
    return rows.rename_axis("token_id").reset_index().groupby(binned(len(rows))).mean().round(4)


def over_steps(run: Run, name: str, query: str) -> Block:
    """Every step in the result of `query`, with its causes stacked."""
    rows = run.ask(query).pivot(index="token_id", columns="cause", values="ms").fillna(0.0)
    drawn, bar = mean_rows(rows), {"type": "bar", "marker": {"line": {"width": 0}}}
    x = drawn["token_id"].to_numpy()
    kinds = [cause for cause in causes.CAUSES if cause in rows]
    traces = [{**bar, "name": label(cause), "cause": cause, "x": x, "y": drawn[cause].to_numpy()} for cause in kinds]
    axes = {"xaxis": axis("step"), "yaxis": axis("ms"), "barmode": "stack", "bargap": 0}
    return chart(f"Every {name} by cause", traces, per_bin(len(rows)), 320, query, **axes)


def time_section(run: Run) -> Section | None:
    """The section on the time of steps by part and cause, and the saving of a faster accelerator."""
    tokens = finished(run.tables["tokens"])
    if not len(tokens):
        return None
    name, only = ("decode step", DECODE) if "decode" in set(tokens["phase"]) else ("step", "")
    blocks = [over_steps(run, name, STEPS_BY_CAUSE.format(only))]
    blocks += [block for shown in (CELLS, PHASES, BETWEEN) for block in table_of(run, *shown)]
    if left_out := len(run.tables["tokens"]) - len(tokens):
        blocks.append(note(f"Steps omitted, as their end was not recorded: {left_out}."))
    if causes.TRANSPORT in (run.summary.get("time") or {}).get("run", {}).get("cause_ms", {}):
        blocks.append(note(UNSEEN))
    if gained := run.summary.get("accelerator"):
        blocks.append(note(accelerators.saving_text(gained).capitalize() + "."))
    return Section("time", "Time", blocks)


def composition_chart(run: Run, tokens: pd.DataFrame, step_name: str) -> Block | None:
    """Operator time per step, stacked by type."""
    rows = run.ask(COMPOSITION_QUERY).pivot(index="token_id", columns="type", values="ms")
    rows = rows.reindex(tokens["token_id"]).dropna(axis=1, how="all").fillna(0.0)
    if rows.empty:
        return None
    order = rows.sum().sort_values(ascending=False).index
    shown = rows[order[:TYPES]].copy()
    if len(order) > TYPES:
        shown["other types"] = rows[order[TYPES:]].sum(axis=1)
    drawn, line = mean_rows(shown), {"type": "scatter", "mode": "lines", "stackgroup": "one", "line": {"width": 0}}
    x = drawn["token_id"].to_numpy()
    traces = [{**line, "name": label(name), "x": x, "y": drawn[name].to_numpy(), "slot": i} for i, name in enumerate(shown)]
    axes = {"xaxis": axis("step"), "yaxis": axis("ms by operator type")}
    return chart(f"What a {step_name} computes", traces, per_bin(len(tokens)), 340, COMPOSITION_QUERY, **axes)


def curve(name: str, slot: int, step: pd.Series, ms: pd.Series) -> dict[str, Any]:
    """Step times of one phase, binned if there are many."""
    drawn = mean_rows(pd.DataFrame({"ms": ms.to_numpy()}, step.to_numpy()))
    x, y = (drawn[column].to_numpy() for column in ("token_id", "ms"))
    mode = "lines+markers" if len(x) < 200 else "lines"
    return {"type": "scatter", "mode": mode, "name": label(name), "x": x, "y": y, "slot": slot}


def duration_chart(run: Run, across: dict[str, Any]) -> Block:
    """Every step's time, with the model line over context and the steps at which the level changes."""
    tokens = run.ask(STEPS_QUERY)
    traces: list[dict[str, Any]] = []
    for slot, phase in enumerate(sorted(set(tokens["phase"]), key=lambda phase: (phase != "decode", phase))):
        of_phase = tokens[tokens["phase"] == phase]
        traces.append(curve(phase or "unknown", slot, of_phase["token_id"], of_phase["ms"]))
    scale = {"type": "log"} if len(traces) > 1 else {"rangemode": "tozero"}
    model, decode = across.get("model") or {}, tokens[tokens["phase"] == "decode"]
    if trends.fits_context(model) and len(decode):
        context = decode["position"].where(decode["position"] >= 0, np.arange(len(decode)))
        line = curve("fitted to the context", 7, decode["token_id"], model["base_ms"] + model["us_per_token"] / 1e3 * context)
        traces.append({**line, "mode": "lines", "line": {"dash": "dash"}})
    jumps = [jump["token_id"] for jump in across.get("change_points") or []]
    level = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 0, "x1": 0, "line": {"dash": "dot", "width": 2}}
    bars = [{**level, "x0": place, "x1": place} for place in jumps]
    remark = per_bin(len(tokens)) + (" Dotted: the level changes." if jumps else "")
    axes = {"xaxis": axis("step"), "yaxis": axis("ms", **scale)}
    return chart("Duration of every step", traces, remark.strip(), 320, STEPS_QUERY, **axes, shapes=bars)


def trend_pairs(run: Run, across: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Trends as text; change points with their position in the timeline."""
    items: list[tuple[Any, ...]] = []
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("decode step", "step_ms")):
        spread = across.get(key) or {}
        if spread.get("n"):
            text = f"median {spread['p50']:,.2f} ms, p05 {spread['p05']:,.2f}, p95 {spread['p95']:,.2f}, p99 {spread['p99']:,.2f}"
            items.append((name, f"{text}, n {spread['n']}"))
    tokens = run.tables["tokens"]
    for name, text, token in trends.trend_sentences(across):
        items.append((name, text, *run.moments(tokens[tokens["token_id"] == token])[:1]))
    model = across.get("model") or {}
    if model:
        slope = model["us_per_token"]
        law = f"{model['base_ms']:,.2f} ms {'-' if slope < 0 else '+'} {abs(slope):,.2f} µs per token of context"
        error = f"error {100 * model['mape']:.0f} % on unseen steps, of a constant {100 * model['mape_constant']:.0f} %"
        told = f"{law}; {error}" if trends.fits_context(model) else f"a straight line does not predict the step time ({error})"
        items.append(("step against context", told))
    return items


def slowest_steps(run: Run, tokens: pd.DataFrame) -> Block:
    """The slowest decode steps: the parts with more time than in the median step, and their positions in the timeline."""
    rows = run.ask(CELLS_OF_STEPS).pivot(index="token_id", columns="cell", values="ns").reindex(tokens["token_id"]).fillna(0.0)
    excess = rows - rows.median()
    middle = tokens["duration_ns"].median()
    top = tokens[tokens["duration_ns"] >= middle].sort_values("duration_ns", ascending=False).head(SLOWEST)
    most = excess.loc[top["token_id"]]
    cells = top[["token_id"]].assign(
        position=top["position"].where(top["position"] >= 0),
        ms=top["duration_ns"] / 1e6,
        more=(top["duration_ns"] - middle) / 1e6,
        mostly=[f"{name} {ns / 1e6:+.2f} ms" for name, ns in zip(most.idxmax(axis=1), most.max(axis=1), strict=True)],
        at=run.moments(top),
    )
    columns = "text step, number position, bar ms, number above the median ms, text mostly in, moment in the timeline"
    return table(columns, cells.astype({"token_id": str}), "Slowest steps", command="time RUN")


def step_section(run: Run) -> Section | None:
    """The section on all steps in order."""
    tokens = finished(run.tables["tokens"]).sort_values("begin_ns")
    if not len(tokens):
        return None
    across, decode = trends.trend_summary(run.tables), tokens[tokens["phase"] == "decode"]
    steps, step_name = (decode, "decode step") if len(decode) else (tokens, "step")
    trend, stacked = trend_pairs(run, across), composition_chart(run, steps, step_name)
    blocks = [duration_chart(run, across), *([pairs(trend)] if trend else []), *([stacked] if stacked else [])]
    return Section("series", "Steps over time", [*blocks, slowest_steps(run, steps), *table_of(run, *GROWTH)])
