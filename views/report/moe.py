"""The report's section on experts: activity over steps, balance, and reuse distance."""

import numpy as np

from analyzer.questions import experts as activation
from analyzer.records.schema import Tables
from views.report.page import plotly_array
from views.report.sections import Block, Run, Section, axis, chart, note, pairs, table

MAX_COLUMNS = 300
MOST_POINTS = 3000
MOST_NAMED = 8
HEAT_QUERY = (
    "select a.layer, a.token_id, a.expert, a.n_tokens, count(e.expert) misses from activations a left join "
    "(select distinct token_id, layer, expert from experts where cache = 'miss') e using (token_id, layer, expert) "
    "where a.expert >= 0 and a.layer >= 0 group by all order by all"
)
RUNS_QUERY = (
    "select backend, cache, count(*) runs, sum(duration_ns)/1e6 ms, avg(duration_ns)/1e3 mean_us, "
    "arg_max(begin_ns, duration_ns) begin_ns, max(duration_ns) duration_ns "
    "from experts where complete group by all order by backend, cache"
)
REUSE_QUERY = (
    "select token_id, layer, distance, new, expert_ns/1e3 us from time_by_distance "
    "where distance is not null and expert_ns is not null order by token_id, layer"
)


def heat_maps(run: Run) -> Block | None:
    """Rows routed and cache misses, iteration by expert, one matrix per layer, with each expert's share of the steps."""
    rows = run.ask(HEAT_QUERY)
    if not len(rows):
        return None
    ids = np.sort(rows["token_id"].unique())
    width = -(-len(ids) // MAX_COLUMNS)
    shape = (int(rows["expert"].max()) + 1, (len(ids) - 1) // width + 1)
    rows["cell"] = rows["expert"] * shape[1] + np.searchsorted(ids, rows["token_id"]) // width
    columns = {"rows routed": "n_tokens"} | ({"cache misses": "misses"} if rows["misses"].any() else {})
    layers, matrices, density = [], [], []
    for layer, part in rows.groupby("layer"):
        layers.append(layer)
        sums = {name: np.bincount(part["cell"], part[values], shape[0] * shape[1]) for name, values in columns.items()}
        matrices.append({name: plotly_array(np.minimum(z, 65535).astype(np.uint16).reshape(shape)) for name, z in sums.items()})
        active = np.bincount(part["expert"], minlength=shape[0])
        density.append((100 * active / part["token_id"].nunique()).round(2))
    return {
        "kind": "heat",
        "title": "Experts over time",
        "query": HEAT_QUERY,
        "layers": layers,
        "matrices": matrices,
        "density": density,
        "columns": ids[::width],
        "steps_per_column": width,
        "steps": len(ids),
    }


def balance_table(tables: Tables) -> list[Block]:
    """Per layer: number of experts that ran, balance, and the most active experts."""
    used, entropy = activation.activation_shares(tables), activation.routing_entropy(tables)
    if not len(used):
        return []
    distinct = activation.distinct_experts(tables).merge(entropy, on="layer")
    ranked = used.sort_values("share", ascending=False)
    most = {
        layer: ", ".join(f"{e} ({100 * s:.0f} %)" for e, s in part[["expert", "share"]].head(MOST_NAMED).itertuples(index=False))
        for layer, part in ranked.groupby("layer")
    }
    rows = distinct.assign(layer=distinct["layer"].astype(str), most=distinct["layer"].map(most), even=100 * distinct["balance"])
    columns = (
        "text layer, number experts seen, number distinct per step, number steps, number entropy bits, bar evenness %, "
        "text most often (share of steps)"
    )
    fields = ["layer", "experts", "per_step", "steps", "bits", "even", "most"]
    return [table(columns, rows[fields], "Evenness of expert use", command="experts RUN")]


def reuse_chart(run: Run) -> list[Block]:
    """Time of a decode step's experts by the number of steps since they last ran."""
    rows = run.ask(REUSE_QUERY)
    if not len(rows):
        return []
    rows = rows.iloc[:: -(-len(rows) // MOST_POINTS)]
    traces = []
    for slot, (name, part) in enumerate(
        (("seen before", rows[rows["new"] == 0]), ("some for the first time", rows[rows["new"] > 0]))
    ):
        points = {"type": "scatter", "mode": "markers", "name": name, "x": part["distance"].round(3), "slot": slot * 3}
        texts = [f"step {t}, layer {layer}" for t, layer in part[["token_id", "layer"]].itertuples(index=False)]
        traces.append({**points, "y": part["us"].round(2), "text": texts})
    effect = activation.distance_effect(run.tables)
    remark = "Each point is one layer of one decode step: its experts' operators and loads."
    if effect.get("time") is not None:
        remark += f" Rank correlation of distance and time: {effect['time']:+.2f} over {effect['steps']} points."
    if effect.get("major_faults") is not None:
        remark += f" Correlation of distance and major faults: {effect['major_faults']:+.2f}."
    axes = {"xaxis": axis("mean steps since these experts last ran"), "yaxis": axis("µs", type="log")}
    return [chart("Reuse distance against time", traces, remark, 320, REUSE_QUERY, **axes)]


def runs_table(run: Run) -> list[Block]:
    """Expert runs by backend and by cache state."""
    rows = run.ask(RUNS_QUERY)
    if not len(rows):
        return []
    body = rows[["backend", "cache"]].replace("", "unknown").join(rows[["runs", "ms", "mean_us"]])
    columns = "text backend, text cache, number runs, bar total ms, number mean µs, moment the slowest in the timeline"
    return [table(columns, body.assign(slowest=run.moments(rows)), "Expert runs", RUNS_QUERY)]


def expert_section(run: Run) -> Section | None:
    """The section on experts."""
    heat_map = heat_maps(run)
    blocks: list[Block] = [heat_map] if heat_map else []
    blocks += [*balance_table(run.tables), *runs_table(run), *reuse_chart(run)]
    if heat_map and not len(run.tables["routes"]):
        blocks.append(note("Routing was not recorded: activations are inferred from the experts' runs."))
    reuse_steps = (run.summary.get("experts") or {}).get("reuse_distance_median_steps")
    if reuse_steps is not None:
        blocks.append(pairs([("median reuse distance", f"{reuse_steps:.0f} steps of the layer")]))
    return Section("experts", "Experts", blocks) if blocks else None
