"""The report's section on the expert cache: hits, loads and prefetches, and what caches of other sizes would have hit."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import cache_curves
from analyzer.questions import experts as activation
from analyzer.questions.figures import cache_hits
from views.report.sections import (
    MS,
    Block,
    Run,
    Section,
    Tables,
    axis,
    binned,
    bytes_text,
    chart,
    finished,
    heads,
    label,
    pairs,
    per_bin,
    table,
)

POLICIES = {"lru": "LRU", "lfu": "LFU", "belady": "Belady's optimum"}
HITS_QUERY = (
    "select token_id, layer, count(*) filter (cache <> 'miss') hits, count(*) filter (cache = 'miss') misses "
    "from (select distinct token_id, layer, expert, first(cache order by begin_ns) cache from experts "
    "where cache <> '' group by all) group by all order by all"
)
CURVES_QUERY = "select slots, share, lru, lfu, belady from cache_curves"
LOADS_QUERY = (
    "select reason, backend, count(*) loads, sum(bytes) bytes, sum(duration_ns)/1e6 ms from loads "
    "where action = 'load' and complete group by all order by ms desc"
)


def hits(tables: Tables) -> list[Block]:
    """Hit rate over steps, and per layer."""
    rates = cache_hits(tables)
    if not len(rates):
        return []
    by_step = rates.groupby("token_id")[["hits", "misses"]].sum()
    summed = by_step.groupby(binned(len(by_step))).sum()
    step = summed["hits"] / summed.sum(axis=1) * 100
    by_layer = rates.groupby("layer")[["hits", "misses"]].sum()
    layer = by_layer["hits"] / by_layer.sum(axis=1) * 100
    x = by_step.index.to_numpy()[:: -(-len(by_step) // len(step))]
    over = {"type": "scatter", "mode": "lines", "x": x, "y": step.round(2).to_numpy(), "slot": 0}
    each = {"type": "bar", "x": layer.index.to_numpy(), "y": layer.round(2).to_numpy(), "slot": 1}
    percent = {"yaxis": axis("hit rate %", range=[0, 103]), "showlegend": False}
    return [
        chart("Cache hits over steps", [over], per_bin(len(by_step)), 240, HITS_QUERY, xaxis=axis("token id"), **percent),
        chart("Cache hits by layer", [each], "", 240, HITS_QUERY, xaxis=axis("layer", type="category"), **percent),
    ]


def curves(run: Run) -> list[Block]:
    """Hit rates of caches of other sizes and policies, from the routing alone, with what this run reached."""
    rows = cache_curves.curves(run.tables)
    if not len(rows):
        return []
    one = cache_curves.expert_bytes(run.tables)
    sizes = [
        bytes_text(n * one) if np.isfinite(one) else f"{share:.0%} of those seen"
        for n, share in rows[["slots", "share"]].to_numpy()
    ]
    line = {"type": "scatter", "mode": "lines+markers", "x": rows["slots"], "text": sizes}
    hover = {"hovertemplate": "%{fullData.name}, %{x} experts (%{text}): %{y:.1f} %<extra></extra>"}
    traces = [
        {**line, **hover, "name": name, "y": (100 * rows[key]).round(2), "slot": slot}
        for slot, (key, name) in enumerate(POLICIES.items())
    ]
    reached = (run.summary.get("experts") or {}).get("hit_rate")
    if reached is not None:
        flat = {"type": "scatter", "mode": "lines", "x": rows["slots"].iloc[[0, -1]], "y": [100 * reached] * 2, "slot": 7}
        traces.append({**flat, "name": "this run", "line": {"dash": "dash"}})
    slots = cache_curves.slots_for(run.tables, 0.9, "decode")
    remark = "One cache for all layers; a layer's experts are asked for at once."
    if slots is not None:
        remark += (
            f" LRU with {slots} experts" + (f" ({bytes_text(slots * one)})" if np.isfinite(one) else "") + " hits 90 % in decode."
        )
    axes = {"xaxis": axis("experts that fit", rangemode="tozero"), "yaxis": axis("hit rate %", range=[0, 103])}
    return [chart("What other caches would hit", traces, remark, 320, CURVES_QUERY, **axes)]


def loads(run: Run) -> list[Block]:
    """Loads by reason, evictions, and how prefetches fared."""
    frame = run.tables["loads"]
    loaded, blocks = finished(frame[frame["action"] == "load"]), list[Block]()
    if len(loaded):
        rows = []
        for (reason, backend), part in loaded.groupby(["reason", "backend"]):
            seconds, size = part["duration_ns"].sum() / 1e9, float(part["bytes"].clip(lower=0).sum())
            speed, times = size / seconds / 1e9 if seconds else None, part["duration_ns"] / MS
            slowest = run.moments(part.loc[[part["duration_ns"].idxmax()]])[0]
            spent = [seconds * 1e3, times.mean(), times.max(), speed]
            rows.append([reason, backend, len(part), size / 2**20, *spent, slowest])
        columns = heads(
            "text reason, text backend, number loads, number MiB, bar total ms, number mean ms, number max ms, number GB/s, "
            "moment the slowest in the timeline"
        )
        blocks.append(table(columns, rows, "Loads", LOADS_QUERY))
    evicted, late = frame[frame["action"] == "evict"], activation.lateness(run.tables)
    items: list[tuple[str, Any]] = []
    if len(evicted):
        items += [("evictions", f"{len(evicted):,}"), ("evicted", bytes_text(float(evicted["bytes"].clip(lower=0).sum())))]
    if late:
        items.append(("prefetches", f"{late['prefetches']:,}, of which {late['used']:,} were used before they were evicted"))
        items.append(("too late", f"{late['late']:,}: steps waited {late['late_ms']:,.2f} ms for them"))
    return [*blocks, pairs(items)] if items else blocks


def counters(frame: pd.DataFrame) -> list[Block]:
    """Every counter over time; those that never left zero in one line."""
    blocks: list[Block] = []
    idle = [str(name) for name, values in frame.groupby("name")["value"] if not values.any()]
    origin = frame["ts_ns"].min() if len(frame) else 0
    span = float(frame["ts_ns"].max() - origin) / 1e9 if len(frame) else 0.0
    for number, (name, rows) in enumerate(frame[~frame["name"].isin(idle)].groupby("name")):
        rows = rows.sort_values("ts_ns")
        bins = binned(len(rows))
        x, y = ((rows[c].groupby(bins).last()).to_numpy() for c in ("ts_ns", "value"))
        mebibytes = str(name).endswith("bytes")
        x, y = np.append((x - origin) / 1e9, span), np.append(y, y[-1])
        trace: dict[str, Any] = {"type": "scatter", "mode": "lines", "x": np.round(x, 6), "slot": number}
        trace |= {"y": y / 2**20 if mebibytes else y, "line": {"shape": "hv"}}
        axes = {
            "xaxis": axis("s", range=[0, span]),
            "yaxis": axis("MiB" if mebibytes else "", rangemode="tozero"),
            "showlegend": False,
        }
        literal = str(name).replace("'", "''")
        query = f"select ts_ns, value from counters where name = '{literal}' order by ts_ns"
        blocks.append(chart(label(str(name).capitalize()), [trace], "", 220, query, **axes))
    return [*blocks, pairs([(label(name.capitalize()), "0 throughout") for name in idle])] if idle else blocks


def cache(run: Run) -> Section | None:
    """Hits, loads, evictions, curves and the counters."""
    blocks = [*hits(run.tables), *curves(run), *loads(run), *counters(run.tables["counters"])]
    return Section("cache", "Cache and prefetch", blocks) if blocks else None
