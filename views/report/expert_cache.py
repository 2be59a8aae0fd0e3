"""The report's section on the expert cache: hits, loads, prefetches, and simulated hit rates of caches of other sizes."""

from typing import Any

import numpy as np

from analyzer.questions import cache_curves
from analyzer.questions import experts as activation
from analyzer.questions.findings import at_least
from views.report.sections import (
    Block,
    Run,
    Section,
    axis,
    binned,
    bytes_text,
    chart,
    label,
    pairs,
    per_bin,
    table_of,
)

POLICIES = {"lru": "LRU", "lfu": "LFU", "belady": "Belady's optimum"}
STEP_HITS_QUERY = "select token_id, sum(hits) hits, sum(misses) misses from cache_hits group by token_id order by token_id"
LAYER_HITS_QUERY = "select layer, 100.0 * sum(hits)/sum(hits + misses) rate from cache_hits group by layer order by layer"
CURVES_QUERY = "select slots, share, lru, lfu, belady from cache_curves order by slots"
LOADS = (
    "Loads",
    "select reason, backend, count(*) loads, sum(greatest(bytes, 0))/1048576 mib, sum(duration_ns)/1e6 ms, "
    "avg(duration_ns)/1e6 mean_ms, max(duration_ns)/1e6 max_ms, sum(greatest(bytes, 0))/nullif(sum(duration_ns), 0) gb_per_s, "
    "arg_max(begin_ns, duration_ns) begin_ns, max(duration_ns) duration_ns "
    "from loads where action = 'load' and complete group by all order by reason, backend",
    "text reason, text backend, number loads, number MiB, bar total ms, number mean ms, number max ms, number GB/s, "
    "moment the slowest in the timeline",
)


def hit_rate_charts(run: Run) -> list[Block]:
    """Hit rate over steps, and per layer."""
    steps, layers = run.ask(STEP_HITS_QUERY), run.ask(LAYER_HITS_QUERY)
    if not len(steps):
        return []
    summed = steps[["hits", "misses"]].groupby(binned(len(steps))).sum()
    rate = summed["hits"] / summed.sum(axis=1) * 100
    x = steps["token_id"].to_numpy()[:: -(-len(steps) // len(rate))]
    over = {"type": "scatter", "mode": "lines", "x": x, "y": rate.round(2).to_numpy(), "slot": 0}
    each = {"type": "bar", "x": layers["layer"].to_numpy(), "y": layers["rate"].round(2).to_numpy(), "slot": 1}
    percent = {"yaxis": axis("hit rate %", range=[0, 103]), "showlegend": False}
    note_of = per_bin(len(steps))
    return [
        chart("Cache hits over steps", [over], note_of, 240, STEP_HITS_QUERY, xaxis=axis("step"), **percent),
        chart("Cache hits by layer", [each], "", 240, LAYER_HITS_QUERY, xaxis=axis("layer", type="category"), **percent),
    ]


def cache_curve_chart(run: Run) -> list[Block]:
    """Simulated hit rates of caches of other sizes and policies from the routing, with this run's own hit rate."""
    rows = run.ask(CURVES_QUERY)
    if not len(rows):
        return []
    size = cache_curves.expert_bytes(run.tables)
    sizes = [
        at_least(n * size) if np.isfinite(size) else f"{share:.0%} of those seen"
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
    remark = "One cache for all layers; a layer requests its experts at once."
    if slots is not None:
        remark += (
            f" LRU with {slots} experts" + (f" ({at_least(slots * size)})" if np.isfinite(size) else "") + " hits 90 % in decode."
        )
    axes = {"xaxis": axis("experts that fit", rangemode="tozero"), "yaxis": axis("hit rate %", range=[0, 103])}
    return [chart("Hit rates of other cache sizes", traces, remark, 320, CURVES_QUERY, **axes)]


def load_blocks(run: Run) -> list[Block]:
    """Loads by reason, evictions, and the outcome of prefetches."""
    frame, blocks = run.tables["loads"], table_of(run, *LOADS)
    evicted, late = frame[frame["action"] == "evict"], activation.prefetch_counts(run.tables)
    items: list[tuple[str, Any]] = []
    if len(evicted):
        items += [("evictions", f"{len(evicted):,}"), ("evicted", bytes_text(float(evicted["bytes"].clip(lower=0).sum())))]
    if late:
        items.append(("prefetches", f"{late['prefetches']:,}, of which {late['used']:,} were used before they were evicted"))
        items.append(("too late", f"{late['late']:,}: steps waited {late['late_ms']:,.2f} ms for them"))
    return [*blocks, pairs(items)] if items else blocks


def counter_charts(run: Run) -> list[Block]:
    """Every counter over time; counters that stayed at zero share one line."""
    frame, blocks = run.tables["counters"], list[Block]()
    idle = [str(name) for name, values in frame.groupby("name")["value"] if not values.any()]
    origin = frame["ts_ns"].min() if len(frame) else 0
    span = float(frame["ts_ns"].max() - origin) / 1e9 if len(frame) else 0.0
    for number, name in enumerate(sorted(set(frame["name"]) - set(idle))):
        literal = str(name).replace("'", "''")
        query = f"select ts_ns, value from counters where name = '{literal}' order by ts_ns"
        rows = run.ask(query)
        last = rows.groupby(binned(len(rows))).last()
        x, y = np.append((last["ts_ns"] - origin) / 1e9, span), np.append(last["value"], last["value"].iloc[-1])
        mebibytes = str(name).endswith("bytes")
        trace: dict[str, Any] = {"type": "scatter", "mode": "lines", "x": np.round(x, 6), "slot": number}
        trace |= {"y": y / 2**20 if mebibytes else y, "line": {"shape": "hv"}}
        axes = {
            "xaxis": axis("s", range=[0, span]),
            "yaxis": axis("MiB" if mebibytes else "", rangemode="tozero"),
            "showlegend": False,
        }
        blocks.append(chart(label(str(name).capitalize()), [trace], "", 220, query, **axes))
    return [*blocks, pairs([(label(name.capitalize()), "0 throughout") for name in idle])] if idle else blocks


def cache_section(run: Run) -> Section | None:
    """Hits, loads, evictions, curves and the counters."""
    blocks = [*hit_rate_charts(run), *cache_curve_chart(run), *load_blocks(run), *counter_charts(run)]
    return Section("cache", "Cache and prefetch", blocks) if blocks else None
