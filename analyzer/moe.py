"""What a Mixture-of-Experts model adds: routes, expert runs, loads and evictions of the expert cache, and counters."""

import numpy as np
import pandas as pd

from analyzer.operators import definitions, layer_of
from analyzer.reading import BACKEND, CACHE, REASON, UNKNOWN_U32, Rows, Source, Spans, chosen
from analyzer.schema import conform
from analyzer.spans import NONE, codes
from analyzer.steps import Steps, faults

HIT, MISS = 1, 2
WIDE = 2  # ROUTE_WIDE of bpf/records.h


def routes(source: Source, tokens: Steps, known: pd.DataFrame) -> pd.DataFrame:
    """The table `routes`: one row per choice of the router; `known` is the table `tensors`."""
    rows = source.rows("route")
    names = rows.dtype.names or ()
    if len(rows) == 0 or "experts" not in names:
        return conform("routes", dict.fromkeys(("token_id", "layer", "row", "rank", "expert", "weight", "ts_ns"), np.empty(0)))
    weights, k = np.ascontiguousarray(rows.records["weights"]), np.maximum(rows["k"], 1)
    wide = (rows["has_weights"] == WIDE)[:, None]
    experts = np.where(wide, weights.view("<u4"), rows.records["experts"])
    slot = np.arange(experts.shape[1])
    used = slot < rows["count"][:, None]
    entry = (rows["first"][:, None] + slot)[used]
    record = np.repeat(np.arange(len(rows)), used.sum(axis=1))
    token_id, layer = tokens.of(rows), route_layers(rows, known)
    return conform(
        "routes",
        {
            "token_id": token_id[record],
            "layer": layer[record],
            "row": entry // k[record] + rows_before(rows, layer, token_id)[record],
            "rank": entry % k[record],
            "expert": experts[used],
            "weight": np.where(rows["has_weights"][record] == 1, weights[used].astype(np.float64), np.nan),
            "ts_ns": rows["ts"][record],
        },
    )


def route_layers(rows: Rows, known: pd.DataFrame) -> np.ndarray:
    """The layer of each choice: told by the engine, or by the name of the operator that is given it."""
    described = definitions(known, rows["pid"], rows["tensor"], rows["ts"])
    by_name = np.append([layer_of(name) for name in known["name"]], NONE).astype(np.int64)
    return np.where(rows["tensor"] == 0, rows["layer"], by_name[described])


def rows_before(rows: Rows, layer: np.ndarray, token_id: np.ndarray) -> np.ndarray:
    """Rows that earlier calls of a layer's router took in the same step: a prompt comes in chunks."""
    called = np.where(rows["first"] == 0, rows["n_tokens"], 0)
    total = pd.Series(called).groupby(codes(token_id, layer)).cumsum().to_numpy()
    return np.maximum(total - rows["n_tokens"], 0)


def experts(source: Source, tokens: Steps, spans: Spans, op_id: np.ndarray) -> pd.DataFrame:
    """The table `experts`: one row per run."""
    begin, end = source.rows("expert_begin"), source.rows("expert_end")
    return conform(
        "experts",
        {
            "run_id": np.arange(len(begin)),
            "token_id": tokens.of(begin),
            "op_id": op_id,
            **source.thread(begin),
            "layer": begin["layer"],
            "expert": begin["expert"],
            "n_tokens": begin["n_tokens"],
            "cache": chosen(CACHE, begin["cache"]),
            "backend": chosen(BACKEND, begin["backend"]),
            "tier": begin["tier"],
            "maj_flt": faults(begin, end, spans.end, "maj_flt"),
            "min_flt": faults(begin, end, spans.end, "min_flt"),
            **spans.columns(),
        },
    )


def loads(source: Source, tokens: Steps) -> pd.DataFrame:
    """The table `loads`: loads as spans, evictions as instants, in order of time."""
    spans = source.spans("load", ("layer", "expert"))
    begin, end, evict = source.rows("load_begin"), source.rows("load_end"), source.rows("evict")
    resident = np.where(spans.end >= 0, end["resident"][spans.end], NONE) if len(end) else np.full(len(begin), NONE)
    loaded = {
        **_moved(source, tokens, begin, "load"),
        "reason": chosen(REASON, begin["reason"]),
        "backend": chosen(BACKEND, begin["backend"]),
        "resident_bytes": resident,
        **spans.columns(),
    }
    nothing = np.full(len(evict), "", object)
    evicted = {
        **_moved(source, tokens, evict, "evict"),
        "reason": nothing,
        "backend": nothing,
        "resident_bytes": evict["resident"],
        "begin_ns": evict["ts"],
        "end_ns": evict["ts"],
        "duration_ns": np.zeros(len(evict), np.int64),
        "complete": np.ones(len(evict), bool),
    }
    order = np.argsort(np.concatenate((loaded["begin_ns"], evicted["begin_ns"])), kind="stable")
    both = {name: np.concatenate((loaded[name], evicted[name]))[order] for name in loaded}
    return conform("loads", {"load_id": np.arange(len(order)), **both})


def _moved(source: Source, tokens: Steps, rows: Rows, action: str) -> dict[str, np.ndarray]:
    """What a load and an eviction have in common."""
    return {
        "token_id": tokens.of(rows),
        **source.thread(rows),
        "action": np.full(len(rows), action, object),
        "layer": rows["layer"],
        "expert": rows["expert"],
        "bytes": rows["bytes"],
    }


def counters(source: Source, runs: pd.DataFrame, moves: pd.DataFrame) -> pd.DataFrame:
    """The table `counters`: cache contents, cumulative hits and misses, cumulative page faults of the threads that decode."""
    known = moves[(moves["resident_bytes"] >= 0) & moves["complete"]]
    parts = [(known["end_ns"].to_numpy(), "expert cache bytes", known["resident_bytes"].to_numpy())]
    at = runs["begin_ns"].to_numpy()
    for name, states in (("expert cache hits", ("hit", "prefetched")), ("expert cache misses", ("miss",))):
        hit = runs["cache"].isin(states).to_numpy()
        parts.append((at[hit], name, np.arange(1, hit.sum() + 1)))
    parts += [
        part
        for field, name in (("maj_flt", "major faults"), ("min_flt", "minor faults"))
        for part in _faults(source, field, name)
    ]
    ts, value = np.concatenate([p[0] for p in parts]), np.concatenate([p[2] for p in parts])
    names = np.repeat(np.array([p[1] for p in parts], object), [len(p[0]) for p in parts])
    order = np.argsort(ts, kind="stable")
    return conform("counters", {"ts_ns": ts[order], "name": names[order], "value": value[order]})


def _faults(source: Source, field: str, name: str) -> list[tuple[np.ndarray, str, np.ndarray]]:
    """A cumulative fault counter per thread that runs tokens, from 0 at its first reading; only readings that changed it."""
    kinds = [source.rows(kind) for kind in ("token_begin", "token_end", "op_begin", "op_end")]
    main = np.unique(np.concatenate([kinds[0]["tid"], kinds[1]["tid"]]))
    tid, ts, reading = (np.concatenate([rows[f] for rows in kinds]) for f in ("tid", "ts", field))
    parts = []
    for thread in main.tolist():
        mine = np.flatnonzero(tid == thread)
        mine = mine[np.argsort(ts[mine], kind="stable")]
        value = (reading[mine] - reading[mine[0]]) & UNKNOWN_U32
        changed = np.append(True, value[1:] != value[:-1])
        label = name if len(main) == 1 else f"{name} (thread {thread})"
        parts.append((ts[mine][changed], label, value[changed]))
    return parts
