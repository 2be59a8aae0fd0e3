"""Tables of Mixture-of-Experts models: routes, expert runs, loads and evictions of the expert cache, and counters."""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pyarrow

from analyzer.records.reading import BACKEND, CACHE, REASON, Source, pick_names
from analyzer.records.rows import UNKNOWN_U32, RecordSpans, Rows
from analyzer.records.schema import Columns, arrow_table, equals_any, fill_missing, text_array
from analyzer.records.spans import NONE, row_codes
from analyzer.tables.nodes import OperatorRecords
from analyzer.tables.operators import Definitions, FirstNumbers
from analyzer.tables.steps import Steps, fault_counts

HITS = {"expert cache hits": ("hit", "prefetched"), "expert cache misses": ("miss",)}
FAULTS = {"maj_flt": "major faults", "min_flt": "minor faults"}
WIDE = 2  # ROUTE_WIDE of bpf/records.h


def route_columns(source: Source, steps: Steps, definitions: Definitions) -> Columns:
    """The columns of `route_columns`: one row for each choice of the router."""
    rows = source.rows("route")
    names = rows.dtype.names or ()
    if len(rows) == 0 or "experts" not in names:
        return {name: np.empty(0, np.int64) for name in ("token_id", "layer", "row", "rank", "expert", "weight", "ts_ns")}
    weights, k = np.ascontiguousarray(rows.records["weights"]), np.maximum(rows["k"], 1)
    wide = (rows["has_weights"] == WIDE)[:, None]
    experts = np.where(wide, weights.view("<u4"), rows.records["experts"])
    slot = np.arange(experts.shape[1])
    used = slot < rows["count"][:, None]
    entry = (rows["first"][:, None] + slot)[used]
    record = np.repeat(np.arange(len(rows)), used.sum(axis=1))
    token_id, layer = steps.of(rows), route_layers(rows, definitions)
    steps_begun = np.searchsorted(source.step_begins, rows["ts"], "right")
    before = rows_before(rows, layer, np.where(token_id < 0, NONE - steps_begun, token_id))
    return {
        "token_id": token_id[record],
        "layer": layer[record],
        "row": entry // k[record] + before[record],
        "rank": entry % k[record],
        "expert": experts[used].astype(np.int64),
        "weight": np.where(rows["has_weights"][record] == 1, weights[used].astype(np.float64), np.nan),
        "ts_ns": rows["ts"][record],
    }


def route_layers(rows: Rows, definitions: Definitions) -> np.ndarray:
    """The layer of each choice: from the engine, else from the name of the operator that makes it."""
    described = definitions.described.rows(rows["pid"], rows["tensor"], rows["ts"])
    return np.where(rows["tensor"] == 0, rows["layer"], np.append(definitions.layers, NONE)[described])


def rows_before(rows: Rows, layer: np.ndarray, token_id: np.ndarray) -> np.ndarray:
    """Number of rows in earlier calls of the layer's router in the same step: prompts are processed in chunks."""
    called = np.where(rows["first"] == 0, rows["n_tokens"], 0)
    total = pd.Series(called).groupby(row_codes(token_id, layer)).cumsum().to_numpy()
    return np.maximum(total - rows["n_tokens"], 0)


def expert_columns(source: Source, steps: Steps, spans: RecordSpans, operator: np.ndarray, first: FirstNumbers) -> Columns:
    """The columns of `experts`: one row for each run; `operator` is the number of its operator, -1 for none."""
    begin, end = source.rows("expert_begin"), source.rows("expert_end")
    return {
        "run_id": first.run + np.arange(len(begin)),
        "token_id": steps.of(begin),
        "op_id": np.where(operator >= 0, first.operator + operator, NONE),
        **source.thread(begin),
        "layer": begin["layer"],
        "expert": begin["expert"],
        "n_tokens": begin["n_tokens"],
        "cache": pick_names(CACHE, begin["cache"]),
        "backend": pick_names(BACKEND, begin["backend"]),
        "tier": begin["tier"],
        "maj_flt": fault_counts(begin, end, spans.end, "maj_flt"),
        "min_flt": fault_counts(begin, end, spans.end, "min_flt"),
        **spans.columns(),
    }


def load_columns(source: Source, steps: Steps) -> Columns:
    """The columns of `loads`: loads as spans, evictions and hits as instants, in time order."""
    spans = source.spans("load", ("layer", "expert"))
    begin, end, evict = source.rows("load_begin"), source.rows("load_end"), source.rows("evict")
    loaded = {
        **_transfer_columns(source, steps, begin, "load"),
        "reason": np.asarray(pick_names(REASON, begin["reason"])),
        "backend": np.asarray(pick_names(BACKEND, begin["backend"])),
        "bytes": begin["bytes"],
        "matrix": begin["matrix"] - 1,
        "resident_bytes": spans.of_end(end, "resident"),
        **spans.columns(),
    }
    evicted = _instants(source, steps, evict, "evict") | {"bytes": evict["bytes"], "resident_bytes": evict["resident"]}
    parts = [loaded, evicted | _evicted_experts(evict, begin), _instants(source, steps, source.rows("cache_hit"), "hit")]
    rows = pd.concat([fill_missing("loads", pd.DataFrame(part)) for part in parts]).sort_values("begin_ns", kind="stable")
    return {str(name): rows[name].to_numpy() for name in rows} | {"load_id": np.arange(len(rows))}


def _transfer_columns(source: Source, steps: Steps, rows: Rows, action: str) -> dict[str, np.ndarray]:
    """The columns that loads, evictions and hits share."""
    return {
        "token_id": steps.of(rows),
        **source.thread(rows),
        "engine": np.asarray(source.engines(rows["engine"])),
        "action": np.full(len(rows), action, object),
        "layer": rows["layer"],
        "expert": rows["expert"],
    }


def _instants(source: Source, steps: Steps, rows: Rows, action: str) -> dict[str, np.ndarray]:
    nothing = {"begin_ns": rows["ts"], "end_ns": rows["ts"], "duration_ns": np.zeros(len(rows), np.int64)}
    return _transfer_columns(source, steps, rows, action) | nothing


def _evicted_experts(evict: Rows, begin: Rows) -> dict[str, np.ndarray]:
    """layer, expert and bytes of evictions; of those that have only an address within a matrix, by the reads to that place.

    Every matrix has its own place throughout the run.
    """
    columns = {name: evict[name].copy() for name in ("layer", "expert", "bytes")}
    read = pd.DataFrame({name: begin[name] for name in ("pid", "address", *columns)})
    places = read[read["address"] > 0].drop_duplicates(["pid", "address"]).sort_values("address")
    whole = places.groupby(["pid", "layer", "expert"])["bytes"].transform("sum")
    for pid, its in places.assign(whole=whole).groupby("pid"):
        rows = np.flatnonzero((evict["pid"] == pid) & (evict["address"] > 0))
        at = np.searchsorted(its["address"], evict["address"][rows], "right") - 1
        inside = (at >= 0) & (evict["address"][rows] < (its["address"] + its["bytes"]).to_numpy()[at])
        for name, column in zip(columns, ("layer", "expert", "whole"), strict=True):
            columns[name][rows[inside]] = its[column].to_numpy()[at[inside]]
    return columns


@dataclass
class CounterTable:
    """The table `counters`: cache contents, cumulative hits and misses, and cumulative page faults of threads that run steps."""

    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HITS, 0))
    readings: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """(field, thread) → its first reading and its last value."""

    def of(self, source: Source, announced: OperatorRecords, runs: Columns, moves: Columns) -> pyarrow.Table:
        """The rows of one time range, which must follow the previous one; `moves` are the loads of the whole recording."""
        end, resident = moves["end_ns"], moves["resident_bytes"]
        finished = (resident >= 0) & moves["complete"] & (end >= source.begin_ns) & (end < source.end_ns)
        parts = [(end[finished], "expert cache bytes", resident[finished])]
        for name, states in HITS.items():
            hit = equals_any(runs["cache"], *states)
            count = int(hit.sum())
            parts.append((runs["begin_ns"][hit], name, self.hits[name] + np.arange(1, count + 1)))
            self.hits[name] += count
        parts += self._faults(source, announced)
        ts, value = np.concatenate([p[0] for p in parts]), np.concatenate([p[2] for p in parts])
        number = np.repeat(np.arange(len(parts)), [len(p[0]) for p in parts])
        order = np.argsort(ts, kind="stable")
        names = text_array(number[order], [p[1] for p in parts])
        return arrow_table("counters", {"ts_ns": ts[order], "name": names, "value": value[order]})

    def _faults(self, source: Source, announced: OperatorRecords) -> list[tuple[np.ndarray, str, np.ndarray]]:
        """Fault counters of each thread that runs steps, from 0 at its first reading; only readings with a change."""
        steps = [source.rows(kind) for kind in ("token_begin", "token_end")]
        main = np.unique(np.concatenate([rows["tid"] for rows in steps]))
        begins = announced.begin.where(announced.begin["done_ns"] == 0)
        kinds = [*(rows.where((rows["ts"] >= source.begin_ns) & (rows["ts"] < source.end_ns)) for rows in steps)]
        kinds += [begins, source.rows("op_end")]
        parts: dict[str, list[tuple[np.ndarray, str, np.ndarray]]] = {name: [] for name in FAULTS}
        for thread in main.tolist():
            rows_of = [np.flatnonzero(rows["tid"] == thread) for rows in kinds]
            if not any(map(len, rows_of)):
                continue
            ts = np.concatenate([rows["ts"][part] for rows, part in zip(kinds, rows_of, strict=True)])
            order = np.argsort(ts, kind="stable")
            for name, title in FAULTS.items():
                reading = np.concatenate([rows[name][part] for rows, part in zip(kinds, rows_of, strict=True)])[order]
                first, last = self.readings.get((name, thread), (int(reading[0]), NONE))
                value = (reading - first) & UNKNOWN_U32
                changed = np.append(last, value[:-1]) != value
                self.readings[name, thread] = first, int(value[-1])
                label = title if len(main) == 1 else f"{title} (thread {thread})"
                parts[name].append((ts[order][changed], label, value[changed]))
        return [part for of_field in parts.values() for part in of_field]
