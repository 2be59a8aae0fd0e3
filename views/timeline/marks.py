"""Counters and marks that the timeline adds to the recorded ones: decode speed, work in flight, slow tokens, what is missing."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.records.observed import known_changes
from views.timeline.slices import Slices, Tables, Text, says

SLOW_DEVIATIONS, SLOW_TIMES = 5.0, 1.2
Series = tuple[str, np.ndarray, np.ndarray]


def in_flight(name: str, frame: pd.DataFrame, which: np.ndarray) -> Series:
    """How many of some spans of a table are open, at every moment at which that changes."""
    ts = np.concatenate([frame[column].to_numpy(np.int64)[which] for column in ("begin_ns", "end_ns")])
    step = np.repeat([1, -1], len(ts) // 2)
    order = np.lexsort((step, ts))
    last = np.append(ts[order][1:] != ts[order][:-1], True)[: len(order)]
    return name, ts[order][last], np.cumsum(step[order])[last].astype(np.float64)


def speed(tables: Tables) -> Series:
    """Decode tokens per second: one over the time since the end of the step before on its thread, from that end on."""
    tokens = tables["tokens"]
    done = tokens[tokens["complete"]]
    tid, end = (done[column].to_numpy(np.int64) for column in ("tid", "end_ns"))
    order = np.lexsort((end, tid))
    tid, end = tid[order], end[order]
    mine = (tid[1:] == tid[:-1]) & says(done["phase"], "decode")[order][1:]
    before, pitch = end[:-1][mine], np.maximum(np.diff(end)[mine], 1)
    order = np.argsort(before, kind="stable")
    return "decode tokens/s", before[order], 1e9 / pitch[order]


def counters(tables: Tables) -> list[Series]:
    """Every counter, recorded or derived: name, times, values."""
    recorded = []
    frame, names = tables["counters"], Text.of(tables["counters"]["name"])
    ts, values = frame["ts_ns"].to_numpy(np.int64), frame["value"].to_numpy(np.float64)
    for name, code in sorted((name, code) for code, name in enumerate(names.labels)):
        rows = np.flatnonzero(names.codes == code)
        rows = rows[np.argsort(ts[rows], kind="stable")]
        recorded.append((name, ts[rows], values[rows]))
    loads, executes = tables["loads"], tables["qnn_executes"]
    loaded, executed = says(loads["action"], "load") & loads["complete"].to_numpy(bool), executes["complete"].to_numpy(bool)
    derived = [
        speed(tables),
        in_flight("expert loads in flight", loads, loaded),
        in_flight("NPU executions in flight", executes, executed),
    ]
    return [*recorded, *(series for series in derived if len(series[1]))]


def instants(at: np.ndarray, texts: list[str], args: dict[str, Any] | None = None) -> Slices:
    """Marks on a track of their own."""
    return Slices("moescope", Text.of(texts), at, at, at, np.ones(len(at), bool), args or {}, instant=True)


def slow_tokens(tables: Tables) -> Slices | None:
    """Decode steps that lasted SLOW_DEVIATIONS times the usual deviation beyond the median, and SLOW_TIMES the median."""
    tokens = tables["tokens"]
    decode = tokens[tokens["complete"] & (tokens["phase"] == "decode")].sort_values("begin_ns")
    if not len(decode):
        return None
    length = decode["duration_ns"]
    middle = float(length.median())
    usual = 1.4826 * float((length - middle).abs().median())
    slow = decode[(length > middle + SLOW_DEVIATIONS * usual) & (length > SLOW_TIMES * middle)]
    if not len(slow):
        return None
    texts = [
        f"slow token {t}: {ns / middle:.1f} times the median" for t, ns in slow[["token_id", "duration_ns"]].to_numpy().tolist()
    ]
    args = {"duration_ns": slow["duration_ns"].to_numpy(np.int64), "token_id": slow["token_id"].to_numpy(np.int64)}
    return instants(slow["begin_ns"].to_numpy(np.int64), texts, args)


def lacking(manifest: dict[str, Any], end: int) -> Slices | None:
    """Where the recording lacks something: levels switched off and on, and at the end losses, which have no time."""
    lost = {str(kind): int(n) for kind, n in (manifest.get("lost") or {}).items() if n}
    rows = [
        (row["ts_ns"], f"{row.get('level')} level {'on' if row.get('on') else 'off'}: {row.get('why')}")
        for row in known_changes(manifest.get("level_changes"))
    ]
    if lost:
        rows.append((end, f"{sum(lost.values())} records lost"))
    if manifest.get("state") == "recording":
        rows.append((end, "the recording was not finished"))
    if not rows:
        return None
    texts = [text for _, text in rows]
    args = {kind: np.where(np.char.endswith(texts, "lost"), count, -1) for kind, count in lost.items()}
    return instants(np.array([ts for ts, _ in rows], np.int64), texts, args)
