"""The report's section on experts: which ran when, how evenly, and how long ago each had run before."""

import numpy as np
import pandas as pd

from analyzer.questions import experts as activation
from views.report.page import typed
from views.report.sections import MS, US, Block, Run, Section, Tables, axis, chart, finished, heads, note, pairs, table

MAX_COLUMNS = 300
MOST_POINTS = 3000
MOST_NAMED = 8
HEAT_QUERY = {
    True: "select layer, token_id, expert, count(*) n_rows from routes group by all order by all",
    False: "select layer, token_id, expert, sum(n_tokens) n_rows from experts group by all order by all",
}
"""By whether the routing was recorded."""
RUNS_QUERY = (
    "select backend, cache, count(*) runs, sum(duration_ns)/1e6 ms, avg(duration_ns)/1e3 mean_us "
    "from experts where complete group by all order by ms desc"
)
REUSE_QUERY = (
    "select r.token_id, r.layer, avg(r.distance) distance, (select sum(x.duration_ns)/1e3 from experts x "
    "where x.token_id = r.token_id and x.layer = r.layer) experts_us from reuse r group by all order by 1, 2"
)
DENSITY_QUERY = "select layer, expert, share, rows from density order by share desc"


def cells(frame: pd.DataFrame, layer: int, column: dict[int, int], shape: tuple[int, int], values: str) -> np.ndarray:
    """Sums by expert and column of one layer."""
    mine = frame[frame["layer"] == layer]
    flat = mine["expert"].to_numpy() * shape[1] + np.array([column[token] for token in mine["token_id"].tolist()], np.int64)
    weights = mine[values].to_numpy(np.float64)
    return np.bincount(flat, weights, shape[0] * shape[1]).reshape(shape)


def heat(tables: Tables) -> Block | None:
    """Rows routed and cache misses, iteration by expert, one matrix per layer; beside it each expert's share of the steps."""
    rows = activation.activations(tables)
    rows = rows[(rows["expert"] >= 0) & (rows["layer"] >= 0)]
    if not len(rows):
        return None
    ids = np.sort(rows["token_id"].unique())
    width = -(-len(ids) // MAX_COLUMNS)
    column = {int(token): i // width for i, token in enumerate(ids)}
    shape = (int(rows["expert"].max()) + 1, (len(ids) - 1) // width + 1)
    runs = tables["experts"]
    missed = runs[(runs["cache"] == "miss") & runs["token_id"].isin(ids) & (runs["expert"] < shape[0]) & (runs["expert"] >= 0)]
    missed = missed.drop_duplicates(["token_id", "layer", "expert"]).assign(misses=1)
    layers = sorted(rows["layer"].unique().tolist())
    matrices, density = [], []
    for layer in layers:
        views = {"rows routed": cells(rows, layer, column, shape, "n_tokens")}
        if len(missed):
            views["cache misses"] = cells(missed, layer, column, shape, "misses")
        matrices.append({name: typed(np.minimum(z, 65535).astype(np.uint16)) for name, z in views.items()})
        mine = rows[rows["layer"] == layer]
        active = np.bincount(mine["expert"], minlength=shape[0])
        density.append((100 * active / mine["token_id"].nunique()).round(2))
    return {
        "kind": "heat",
        "title": "Which expert ran when",
        "query": HEAT_QUERY[len(tables["routes"]) > 0],
        "layers": layers,
        "matrices": matrices,
        "density": density,
        "steps_per_column": width,
        "steps": len(ids),
    }


def balance(tables: Tables) -> list[Block]:
    """Per layer: how many experts ran, how evenly, and which most."""
    used, entropy = activation.density(tables), activation.entropy(tables)
    if not len(used):
        return []
    distinct = activation.distinct(tables).merge(entropy, on="layer")
    ranked = used.sort_values("share", ascending=False)
    most = {
        layer: ", ".join(f"{e} ({100 * s:.0f} %)" for e, s in part[["expert", "share"]].head(MOST_NAMED).itertuples(index=False))
        for layer, part in ranked.groupby("layer")
    }
    shown = distinct.assign(layer=distinct["layer"].astype(str), most=distinct["layer"].map(most), even=100 * distinct["balance"])
    columns = heads(
        "text layer, number experts seen, number distinct per step, number steps, number entropy bits, bar evenness %, "
        "text most often (share of steps)"
    )
    fields = ["layer", "experts", "per_step", "steps", "bits", "even", "most"]
    return [table(columns, shown[fields], "How evenly experts are used", DENSITY_QUERY)]


def reuse(tables: Tables) -> list[Block]:
    """Time of a decode step's experts against the steps since they last ran."""
    rows = activation.time_by_distance(tables).dropna(subset=["distance"])
    rows = rows[rows["expert_ns"].notna()]
    if not len(rows):
        return []
    rows = rows.iloc[:: -(-len(rows) // MOST_POINTS)]
    traces = []
    for slot, (name, mine) in enumerate(
        (("seen before", rows[rows["new"] == 0]), ("some for the first time", rows[rows["new"] > 0]))
    ):
        points = {"type": "scatter", "mode": "markers", "name": name, "x": mine["distance"].round(3), "slot": slot * 3}
        told = [f"token {t}, layer {layer}" for t, layer in mine[["token_id", "layer"]].itertuples(index=False)]
        traces.append({**points, "y": (mine["expert_ns"] / US).round(2), "text": told})
    effect = activation.distance_effect(tables)
    remark = "Each point is one layer of one decode step: its experts' operators and loads."
    if effect.get("time") is not None:
        remark += f" Rank correlation of distance and time: {effect['time']:+.2f} over {effect['steps']} points."
    if effect.get("major_faults") is not None:
        remark += f" Of distance and major faults: {effect['major_faults']:+.2f}."
    axes = {"xaxis": axis("mean steps since these experts last ran"), "yaxis": axis("µs", type="log")}
    return [chart("Reuse distance against time", traces, remark, 320, REUSE_QUERY, **axes)]


def runs_table(run: Run) -> list[Block]:
    """Expert runs by backend and by what the cache held."""
    runs = finished(run.tables["experts"])
    if not len(runs):
        return []
    grouped = runs.groupby(["backend", "cache"])["duration_ns"].agg(["size", "sum", "mean", "idxmax"]).reset_index()
    slowest = run.moments(runs.loc[grouped["idxmax"]])
    body = [
        [b or "unknown", c or "unknown", int(n), total / MS, mean / US, at]
        for (b, c, n, total, mean), at in zip(
            grouped[["backend", "cache", "size", "sum", "mean"]].itertuples(index=False), slowest, strict=True
        )
    ]
    columns = heads("text backend, text cache, number runs, bar total ms, number mean µs, moment the slowest in the timeline")
    return [table(columns, body, "Expert runs", RUNS_QUERY)]


def experts(run: Run) -> Section | None:
    """Which experts ran."""
    map_of = heat(run.tables)
    blocks: list[Block] = [map_of] if map_of else []
    blocks += [*balance(run.tables), *runs_table(run), *reuse(run.tables)]
    if map_of and not len(run.tables["routes"]):
        blocks.append(note("Routing was not recorded: activations are those of the experts' runs."))
    told = (run.summary.get("experts") or {}).get("reuse_distance_median_steps")
    if told is not None:
        blocks.append(pairs([("median reuse distance", f"{told:.0f} steps of the layer")]))
    return Section("experts", "Experts", blocks) if blocks else None
