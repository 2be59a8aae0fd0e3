"""Plants changes in a recording's tables: one change of the recorded times, with everything after it shifted.

Columns derived from threads' spans (an operator's busy_ns and wait_ns) keep their old values: no metric reads them.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analyzer.compare.metrics import RunTables, extract_metrics
from analyzer.compare.results import Result

Tables = Mapping[str, pd.DataFrame]
TIMES = ("begin_ns", "end_ns", "ts_ns", "since_ns", "until_ns", "returned_ns", "host_ns")


def stretch_ranges(tables: Tables, begin: np.ndarray, end: np.ndarray, factor: np.ndarray | float) -> Tables:
    """The tables as if each time range [begin, end) had lasted `factor` times as long."""
    if not len(begin):
        return tables
    more = np.broadcast_to(np.asarray(factor, np.float64), begin.shape) - 1
    edges, rate = np.concatenate((begin, end)), np.concatenate((more, -more))
    order = np.argsort(edges, kind="stable")
    edges, rate = edges[order], np.cumsum(rate[order])
    late = np.concatenate(([0.0], np.cumsum(rate[:-1] * np.diff(edges))))
    origin = int(edges[0])

    def moved(times: pd.Series) -> np.ndarray:
        ts = times.to_numpy(np.int64)
        return ts + np.round(np.interp((ts - origin).astype(np.float64), edges - origin, late)).astype(np.int64)

    out = {}
    for name, table in tables.items():
        times = [c for c in table if c in TIMES or (name == "op_threads" and c == "wait_ns")]
        new = table.assign(**{c: moved(table[c]) for c in times})
        out[name] = new.assign(duration_ns=new["end_ns"] - new["begin_ns"]) if "duration_ns" in new else new
    return out


def slow_operator(tables: Tables, type_: str, layer: int, share: float) -> Tables:
    """Every operator of a type in a layer takes longer by `share`."""
    mine = tables["operators"].query("type == @type_ and layer == @layer")
    return stretch_ranges(tables, mine["begin_ns"].to_numpy(), mine["end_ns"].to_numpy(), 1 + share)


def displace_thread(tables: Tables, tid: int, share: float) -> Tables:
    """In every step the thread loses its CPU once, for `share` of the step; dependent threads wait."""
    states, steps = tables["thread_states"], tables["tokens"]
    running = states[(states["tid"] == tid) & (states["state"] == "running")]
    first, last = running["begin_ns"].to_numpy(), running["end_ns"].to_numpy()
    moments, lost = [], []
    for step in steps[steps["complete"]].itertuples():
        inside = np.minimum(last, step.end_ns) - np.maximum(first, step.begin_ns)
        if len(inside) and inside.max() > 2:
            row = int(inside.argmax())
            moments.append((max(first[row], step.begin_ns) + min(last[row], step.end_ns)) // 2)
            lost.append(share * step.duration_ns)
    begin, length = np.array(moments, np.int64), np.array(lost)
    out = stretch_ranges(tables, begin, begin + 1, 1 + length)
    late = np.concatenate(([0.0], np.cumsum(length)[:-1]))
    return {
        **out,
        "thread_states": switched_out(out["thread_states"], tid, begin + late.astype(np.int64), length.astype(np.int64)),
    }


def switched_out(states: pd.DataFrame, tid: int, begin: np.ndarray, length: np.ndarray) -> pd.DataFrame:
    """Thread states with the given ranges of `running`, in order, changed to `runnable`; each is within one state."""
    chosen = (states["tid"] == tid) & (states["state"] == "running")
    mine, end = states[chosen].sort_values("begin_ns"), begin + length
    row = np.searchsorted(mine["begin_ns"].to_numpy(), begin, "right") - 1
    hit = np.isin(np.arange(len(mine)), row)
    away = mine.iloc[row].assign(state="runnable", cpu=-1, begin_ns=begin, end_ns=end)
    # The rest of a state: up to the first loss within it, and from each loss to the next one or its end.
    head = mine[hit].assign(end_ns=begin[np.unique(row, return_index=True)[1]])
    following = np.append(begin[1:], np.iinfo(np.int64).max)
    tail = mine.iloc[row].assign(begin_ns=end, end_ns=np.minimum(following, mine["end_ns"].to_numpy()[row]))
    whole = pd.concat([states[~chosen], mine[~hit], head, away, tail], ignore_index=True)
    return whole.assign(duration_ns=whole["end_ns"] - whole["begin_ns"]) if "duration_ns" in whole else whole


def make_cold(tables: Tables, layer: int, expert: int, load_ns: int) -> Tables:
    """The expert is never in the cache: each of its runs first waits for a load of `load_ns`."""
    runs = tables["experts"].query("layer == @layer and expert == @expert").sort_values("begin_ns")
    before = runs["begin_ns"].to_numpy() - 1
    out = stretch_ranges(tables, before, before + 1, float(1 + load_ns))
    begin = before + load_ns * np.arange(len(before))
    known = {name: runs[name].to_numpy() for name in ("engine", "pid", "tid", "token_id", "layer", "expert", "backend")}
    load = {**known, "action": "load", "reason": "demand", "bytes": 4096, "resident_bytes": 4096, "complete": True}
    load |= {"begin_ns": begin, "end_ns": begin + load_ns, "duration_ns": load_ns}
    loads = pd.concat([out["loads"], pd.DataFrame(load)], ignore_index=True)
    missed = out["experts"]["layer"].eq(layer) & out["experts"]["expert"].eq(expert)
    experts = out["experts"].assign(cache=out["experts"]["cache"].astype(object).mask(missed, "miss"))
    return {**out, "loads": loads.assign(load_id=np.arange(len(loads))), "experts": experts}


def split_operator(tables: Tables, type_: str, into: tuple[str, str]) -> Tables:
    """Every operator of a type becomes two, each half as long."""
    operators, threads = tables["operators"], tables["op_threads"]
    mine = operators[operators["type"] == type_]
    number = pd.Series(np.arange(len(mine)) + len(operators), mine["op_id"].to_numpy())
    chosen = threads["op_id"].isin(mine["op_id"]).to_numpy()
    middle = (threads["begin_ns"] + threads["wait_ns"]) // 2
    first = threads.assign(wait_ns=middle.where(chosen, threads["wait_ns"]), end_ns=middle.where(chosen, threads["end_ns"]))
    second = threads[chosen].assign(op_id=threads.loc[chosen, "op_id"].map(number), begin_ns=middle[chosen])
    both = pd.concat([first, second], ignore_index=True)
    kinds = operators["type"].astype(object)
    behind = mine.assign(op_id=number.to_numpy(), type=into[1], tensor=mine["tensor"] + 1)
    whole = pd.concat([operators.assign(type=kinds.mask(kinds == type_, into[0])), behind], ignore_index=True)
    spans = both.groupby("op_id").agg(begin_ns=("begin_ns", "min"), end_ns=("end_ns", "max")).reindex(whole["op_id"])
    known = spans["begin_ns"].notna().to_numpy()
    for name in ("begin_ns", "end_ns"):
        whole[name] = np.where(known, spans[name].to_numpy(), whole[name]).astype(np.int64)
    whole["duration_ns"] = whole["end_ns"] - whole["begin_ns"]
    order = whole.sort_values("begin_ns", kind="stable").groupby("token_id").cumcount()
    return {**tables, "op_threads": both, "operators": whole.assign(order=order)}


def of_process(tables: Tables, pid: int) -> Tables:
    """The tables as if only this process had been recorded."""
    mine = {name: t[t["pid"] == pid].reset_index(drop=True) if "pid" in t else t for name, t in tables.items()}
    number = pd.Series(np.arange(len(mine["operators"])), mine["operators"]["op_id"])
    threads = tables["op_threads"][tables["op_threads"]["op_id"].isin(number.index)]
    mine["op_threads"] = threads.assign(op_id=threads["op_id"].map(number)).reset_index(drop=True)
    mine["operators"] = mine["operators"].assign(op_id=number.to_numpy())
    mine["experts"] = mine["experts"].assign(op_id=mine["experts"]["op_id"].map(number).fillna(-1).astype(np.int64))
    return mine | {name: t.iloc[:0] for name, t in tables.items() if name in ("counters", "routes")}


def by_variant(tables: Tables, printed: str) -> dict[str, list[Result]]:
    """Results of every run of workloads/programs/planted.c, by variant, from what it printed: "pid variant" per run."""
    results: dict[str, list[Result]] = {}
    for line in printed.splitlines():
        pid, _, variant = line.partition(" ")
        if pid.isdigit() and variant:
            mine = of_process(tables, int(pid))
            run = Result(pid, extract_metrics(RunTables(mine)), began=float(mine["tokens"]["begin_ns"].min()) / 1e9)
            results.setdefault(variant, []).append(run)
    return results
