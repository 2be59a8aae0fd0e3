"""Tables of a synthetic recording in the analyzer's schema: every number follows from the arguments.

`make(...)` returns (manifest, tables): a model of `layers` layers decoded for `tokens` steps on two threads, each layer an
attention operator and a router-and-experts operator, experts alternately on CPU and NPU, with scheduling and counters.
"""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.records.schema import TABLES, conform, empty_table

PID, MAIN, WORKER, STRANGER = 4000, 4000, 4001, 77
START = 5_000_000_000_000
BOOT_OFFSET = 123_456_789_012
EXPERTS = 8
OPERATORS = ("attention", "rms_norm", "router", "experts")
COLUMN = list | np.ndarray | pd.Series
Tables = dict[str, pd.DataFrame]


def frame(table: str, **columns: Any) -> pd.DataFrame:
    """A table with the given columns; others are unknown (-1, NaN, ""); all rows are complete and undisturbed."""
    n = next(len(value) for value in columns.values() if isinstance(value, COLUMN))
    rows = {}
    for column in TABLES[table]:
        unknown = {"object": "", "float64": np.nan, "bool": False, "uint64": 0}.get(column.dtype, -1)
        value = columns.get(column.name, column.name == "complete" or unknown)
        rows[column.name] = list(value) if isinstance(value, COLUMN) else [value] * n
    out = pd.DataFrame(rows)
    if "duration_ns" in out and "duration_ns" not in columns:
        out["duration_ns"] = out["end_ns"] - out["begin_ns"]
    return conform(table, out)


def manifest_of(tables: Tables) -> dict[str, Any]:
    """The manifest that the tracer would have written."""
    clock = {"monotonic_ns": START, "boottime_ns": START + BOOT_OFFSET, "realtime_ns": 1_760_000_000_000_000_000}
    return {
        "schema_version": 1,
        "program": "moescope 0.1.0",
        "state": "complete",
        "started_utc": "2025-10-09T08:53:20Z",
        "duration_ns": 10**9,
        "machine": {
            "arch": "x86_64",
            "kernel": "6.18.0",
            "os": "Debian GNU/Linux 12",
            "cpu_model": "Some CPU",
            "cpus": 2,
            "memory_bytes": 8 << 30,
        },
        "command": ["./generate", "--tokens", "8"],
        "target": {"pid": PID, "uid": 0, "exit_code": 0},
        "loader": "libbpf",
        "levels": ["token", "graph", "operator", "expert", "qnn", "sched"],
        "engines": {
            "moescope": {
                "id": 1,
                "operators": list(OPERATORS),
                "graphs": [],
                "libraries": [{"path": "librt.so", "build_id": "ab12"}],
            }
        },
        "qnn": {"backend": 6, "api": "2.40", "emulator": True} if len(tables["qnn_executes"]) else None,
        "probes": [
            {
                "program": "op_begin",
                "engine": "moescope",
                "level": "operator",
                "library": "librt.so",
                "symbol": "ms_op",
                "offset": 4,
                "at": "entry",
                "instruction": "push %rbp",
                "why": "emulated",
                "ns_per_hit": 640.0,
                "hits": len(tables["op_threads"]),
            }
        ],
        "clocks": [clock, {key: value + 10**9 for key, value in clock.items()}],
        "threads": [{"tid": MAIN, "pid": PID, "name": "generate"}, {"tid": WORKER, "pid": PID, "name": "worker"}],
        "records": {"op_begin": len(tables["op_threads"])},
        "lost": {},
        "cost": {"trap_ns": 640 * len(tables["op_threads"]), "bpf_ns": 10**6, "tracer_cpu_ns": 10**7, "target_cpu_ns": 9 * 10**8},
        "layouts": {},
    }


def spans(begin: np.ndarray, duration: np.ndarray) -> dict[str, Any]:
    return {"engine": "moescope", "pid": PID, "tid": MAIN, "begin_ns": begin, "end_ns": begin + duration}


def make_steps(tokens: int, layers: int, op_ns: int) -> Tables:
    """tokens and operators; an operator lasts `op_ns` on both threads, with gaps of op_ns/10."""
    pitch, ops, wait = op_ns + op_ns // 10, layers * len(OPERATORS), op_ns // 8
    token, op = np.arange(tokens), np.arange(tokens * ops)
    begin = START + token * (ops + 2) * pitch
    op_token, order = op // ops, op % ops
    op_begin = begin[op_token] + pitch + order * pitch
    kind = order % len(OPERATORS)
    name = np.array([f"{kind}.{layer}" for layer in range(layers) for kind in OPERATORS], object)
    n_tokens = np.where(token == 0, 12, 1)
    phase = list(np.where(token == 0, "prefill", "decode"))
    step = {
        "token_id": token,
        "seq": token,
        "phase": phase,
        "n_tokens": n_tokens,
        "result": token * 3,
        "maj_flt": 0,
        "min_flt": token % 3,
    }
    run: dict[str, Any] = {"op_id": op, "token_id": op_token, "layer": order // len(OPERATORS), "order": order}
    run |= {"n_tokens": n_tokens[op_token], "shape": "2048x1"}
    run |= {"type": [OPERATORS[i] for i in kind], "name": name[order], "tensor": order + 1}
    measured = {"n_threads": 2, "busy_ns": 2 * op_ns - wait, "wait_ns": wait, "maj_flt": 0, "min_flt": 0}
    graph = np.cumsum(kind == len(OPERATORS) - 1) - 1
    run["graph_id"] = np.where(kind == len(OPERATORS) - 1, graph, -1)
    end = np.repeat(op_begin + op_ns, 2)
    described = {
        "tensor": np.arange(ops) + 1,
        "name": list(name),
        "type": [OPERATORS[i % 4] for i in range(ops)],
        "shape": "2048x1",
    }
    described["sources"] = [[i] if i else [] for i in range(ops)]
    position = np.where(token == 0, 0, 11 + token)
    return {
        "tokens": frame("tokens", position=position, **step, **spans(begin, np.full(tokens, (ops + 1) * pitch))),
        "operators": frame("operators", **run, **measured, **spans(op_begin, np.full(len(op), op_ns))),
        "op_threads": frame(
            "op_threads",
            op_id=np.repeat(op, 2),
            tid=np.tile([MAIN, WORKER], len(op)),
            begin_ns=np.repeat(op_begin, 2),
            wait_ns=end - np.tile([0, wait], len(op)),
            end_ns=end,
        ),
        "tensors": frame("tensors", engine="moescope", pid=PID, since_ns=START, **described),
    }


def add_mixture(tables: Tables) -> Tables:
    """Within each layer's last operator: one expert run, and in it the graph that computes it, alternately on CPU and NPU."""
    ops = tables["operators"][tables["operators"].graph_id >= 0]
    n, begin, length = len(ops), ops.begin_ns.to_numpy(), ops.duration_ns.to_numpy() * 3 // 4
    which = np.arange(n)
    backend = list(np.where(which % 2 == 1, "htp", "cpu"))
    expert = (ops.op_id.to_numpy() * 7 + ops.token_id.to_numpy()) % EXPERTS
    common = {"token_id": ops.token_id, "layer": ops.layer, "expert": expert}
    run = {**common, "n_tokens": ops.n_tokens, "backend": backend, "tier": 0}
    state = list(np.where(which % 3 == 0, "miss", "hit"))
    faults = {"maj_flt": 0, "min_flt": 0}
    return {
        "graphs": frame("graphs", graph_id=which, kind="expert", handle=which + 1, status=0, **run, **spans(begin + 10, length)),
        "experts": frame("experts", run_id=which, op_id=ops.op_id, cache=state, **run, **faults, **spans(begin + 5, length + 10)),
        "routes": frame("routes", row=0, rank=0, weight=1.0, ts_ns=begin, **common),
    }


def add_caches(tables: Tables) -> Tables:
    """A load for every miss, an eviction after it, and the cache's counters."""
    miss = tables["experts"][tables["experts"].cache == "miss"]
    begin, n, size = miss.begin_ns.to_numpy() - 4, len(miss), 5 << 20
    load = frame(
        "loads",
        load_id=np.arange(n),
        token_id=miss.token_id,
        action="load",
        reason="demand",
        layer=miss.layer,
        expert=miss.expert,
        backend="cpu",
        bytes=size,
        resident_bytes=4 * size,
        **spans(begin, np.full(n, 3)),
    )
    evict = load.assign(action="evict", reason="", end_ns=load.begin_ns, duration_ns=0)
    both = pd.concat([load, evict], ignore_index=True).assign(load_id=np.arange(2 * n))
    counter = frame("counters", ts_ns=begin, name="expert cache bytes", value=np.arange(n) % 4 * float(size))
    return {"loads": conform("loads", both), "counters": counter}


def add_qnn(tables: Tables, nodes: int = 3) -> Tables:
    """One execute per graph on the NPU, with its profile events."""
    g = tables["graphs"][tables["graphs"].backend == "htp"]
    n, begin = len(g), g.begin_ns.to_numpy() + 10
    duration = g.duration_ns.to_numpy() - 30
    us = duration / 1e3
    executes = frame(
        "qnn_executes",
        execute_id=np.arange(n),
        token_id=g.token_id,
        graph_id=g.graph_id,
        graph=7,
        graph_name="expert_t1",
        profile=1,
        n_inputs=1,
        n_outputs=1,
        status=0,
        kind=g.kind,
        layer=g.layer,
        expert=g.expert,
        tier=1,
        host_rpc_us=us * 0.9,
        htp_rpc_us=us * 0.8,
        accel_us=us * 0.6,
        accel_cycles=us * 600,
        **spans(begin, duration),
    )
    one = [(400, "execute", "us"), (3004, "accelerator execute", "us"), *[(404, "node", "cycles")] * nodes]
    k = n * len(one)
    events = frame(
        "qnn_events",
        event_id=np.arange(k),
        execute_id=np.repeat(np.arange(n), len(one)),
        depth=[0, 1, *[2] * nodes] * n,
        type=[row[0] for row in one] * n,
        type_name=[row[1] for row in one] * n,
        unit=[row[2] for row in one] * n,
        value=np.tile([100, 90, *range(10, 10 + nodes)], n),
        name=["", "", *[f"node_{i}" for i in range(nodes)]] * n,
        pid=PID,
        tid=MAIN,
        ts_ns=np.repeat(begin + duration, len(one)),
    )
    calls = frame(
        "qnn_calls",
        call_id=[0],
        call="contextCreateFromBinary",
        handle=3,
        name="expert_t1",
        bytes=1 << 20,
        status=0,
        engine="qnn",
        pid=PID,
        tid=MAIN,
        begin_ns=[START - 10**6],
        end_ns=[START - 10**5],
    )
    return {"qnn_executes": executes, "qnn_events": events, "qnn_calls": calls}


def add_scheduling(tables: Tables, every: int = 4) -> Tables:
    """Both threads run (main on cpu 0, worker on cpu 1) and are switched out for the gap after each `every`-th operator."""
    ops = tables["operators"].iloc[every - 1 :: every]
    out, back = ops.end_ns.to_numpy() + 1, ops.end_ns.to_numpy() + 9
    first = np.array([START - 2 * 10**6])
    rows, states = [], []
    for cpu, tid, other in ((0, MAIN, STRANGER), (1, WORKER, 0)):
        away = {"prev_tid": tid, "next_tid": other, "prev_state": 1}
        woken = {
            "ts": back - 4,
            "event": "waking",
            "prev_tid": MAIN if tid == WORKER else STRANGER,
            "next_tid": tid,
            "prev_state": -1,
        }
        last = 0 if other else 5
        parts = [
            {"ts": first, "event": "switch", "prev_tid": 0, "next_tid": tid, "prev_state": 0},
            {"ts": out, "event": "switch", **away},
            woken,
            {"ts": back, "event": "switch", "prev_tid": last, "next_tid": tid, "prev_state": 0},
        ]
        rows += [pd.DataFrame({"cpu": cpu, "target_cpu": cpu if p["event"] == "waking" else -1, **p}) for p in parts]
        begins = np.concatenate([first, back])
        kinds = (("running", begins[:-1], out), ("sleeping", out, back - 4), ("runnable", back - 4, back))
        for state, begin, end in kinds:
            on = cpu if state == "running" else -1
            states.append(pd.DataFrame({"tid": tid, "pid": PID, "state": state, "cpu": on, "begin_ns": begin, "end_ns": end}))
    sched = pd.concat(rows).sort_values("ts", kind="stable")
    state = pd.concat(states).sort_values(["tid", "begin_ns"])
    prio = np.where(sched.event == "switch", 120, -1)
    threads = {"tid": [MAIN, WORKER, STRANGER], "pid": [PID, PID, STRANGER], "name": ["generate", "worker", "kworker"]}
    return {
        "sched": frame("sched", ts_ns=sched.ts, next_prio=120, prev_prio=prio, **sched.drop(columns="ts").to_dict("series")),
        "thread_states": frame("thread_states", **state.to_dict("series")),
        "threads": frame("threads", target=[True, True, False], **threads),
    }


def make_tables(tokens: int = 6, layers: int = 3, op_ns: int = 100_000, npu: bool = True) -> tuple[dict[str, Any], Tables]:
    """(manifest, all tables)."""
    tables: Tables = {name: empty_table(name) for name in TABLES}
    tables |= make_steps(tokens, layers, op_ns)
    tables |= add_mixture(tables)
    tables |= add_caches(tables)
    if npu:
        tables |= add_qnn(tables)
    tables |= add_scheduling(tables)
    return manifest_of(tables), tables


def empty_tables() -> tuple[dict[str, Any], Tables]:
    """An empty recording with the minimum that a crashed writer leaves."""
    tables: Tables = {name: empty_table(name) for name in TABLES}
    manifest = manifest_of(tables) | {"state": "recording", "probes": [], "clocks": [], "threads": [], "engines": {}, "cost": {}}
    return manifest, tables
