"""The summary of a recording: one JSON-able dictionary; a section needs the records that it is made from."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import (
    accelerators,
    ceilings,
    clocks,
    disturbed,
    energy_split,
    experts,
    figures,
    heat,
    npu_queues,
    programs,
    requests,
    stacks,
    steady,
    step_time,
)
from analyzer.questions.findings import findings
from analyzer.questions.step_origin import NO_STEPS, USER, step_origin
from analyzer.questions.threads import STATES
from analyzer.records.manifest import listed_items, section
from analyzer.records.observed import known_changes
from analyzer.records.reading import Source
from analyzer.records.schema import Tables
from analyzer.records.spans import number_rows
from analyzer.tables.found_steps import KERNEL
from analyzer.tables.qnn.queue import own_ns
from analyzer.tables.sequences import APART
from analyzer.tables.store import UNRECORDED
from tracer.recording.cost import cost_lines, cost_of, interval
from tracer.recording.format import Recording

NEEDED = (
    *("tokens", "graphs", "operators", "op_threads", "routes", "experts", "loads", "qnn_executes", "qnn_events", "qnn_calls"),
    *("thread_states", "threads", "sched", "faults", "reads", "blocks", "unpaired", "npu_batches", "npu_operators", "clocks"),
    *("cpus", "sequences", "driver_events", "rails", "power", "recurrences", *stacks.TABLES),
)
"""The tables that a summary is made from."""
TOP, MS = 12, 1e6
COSTLY = 0.1  # share of the steps' time in probes above which durations are misleading
WITHIN = {"tokens": "token_id", "operators": "op_id", "expert loads": "load_id"}


def summarize(recording: Recording, tables: Tables, source: Source | None = None) -> dict[str, Any]:
    """Sections recording, machine, tokens, graphs, requests, time, between_tokens_ms, accelerator, findings, operators, experts,
    npu, npu_queues, scheduling, clocks, heat, energy, io, program, records and cost.

    Times are in ms unless named otherwise. `missing` lists levels that were not recorded and the figures that need them. `source`
    is the recording's Source, if already read.
    """
    source, time = source or Source(recording), step_time.step_time(tables)
    times, undeclared = step_time.operator_times(tables, time), undeclared_remarks(recording.manifest, tables)
    return {
        "recording": recording_summary(recording, tables),
        "machine": machine_summary(recording.manifest),
        "missing": [
            *incompleteness(source),
            *([] if is_imported(recording) else undeclared or missing_levels(recording, tables)),
            *disturbed.disturbance_remarks(tables),
            *npu_queues.unknown_layouts(tables),
        ],
        "warnings": tracer_warnings(recording.manifest),
        "tokens": token_summary(tables),
        "graphs": graph_summary(tables),
        "requests": requests.request_summary(tables),
        "time": step_time.time_summary(tables, time),
        "between_tokens_ms": requests.between_tokens_ms(tables),
        "accelerator": accelerators.accelerator_saving(tables, time),
        "findings": [vars(finding) for finding in findings(tables, ceilings.ceilings_for(recording.manifest), time)],
        "operators": operator_summary(tables, times),
        "experts": experts.expert_summary(tables),
        "npu": npu_summary(recording.manifest, tables),
        "npu_queues": npu_queues.queue_summary(tables),
        "scheduling": scheduling_summary(tables),
        "clocks": clocks.clock_summary(tables),
        "heat": heat_summary(recording.manifest, tables),
        "energy": energy_split.modelled_summary(tables),
        "io": io_summary(tables),
        "program": programs.program_summary(tables) if undeclared else {},
        "records": record_summary(source, tables),
        "cost": cost_summary(recording.manifest, tables),
    }


ABSENT = (
    ("tokens", "token", "no steps: no known engine ran, or its steps were not probed"),
    ("operators", "operator", "no operators: the breakdown of a step's time is unknown"),
    ("thread_states", "sched", "no scheduling: the causes of idle time are unknown"),
)
"""(table, level that fills it, what its absence means)."""
OF_NO_ENGINE = {KERNEL, USER}
"""What has probes in a program that no engine declares: the kernel's events, and functions that the user named."""
ONLY_GRAPHS = "no steps, only graphs: the program runs no language model, or its steps were not probed"


def is_imported(recording: Recording) -> bool:
    """Whether the recording was imported, not traced; its warnings then name what its source lacks."""
    return recording.manifest.get("loader") == UNRECORDED


def missing_levels(recording: Recording, tables: Tables) -> list[str]:
    """What this recording does not show, and the level that would show it, or that it was recorded and saw nothing."""
    levels = listed_items(recording.manifest.get("levels"), str)
    known = {"tokens": ONLY_GRAPHS} if len(tables["graphs"]) else {}
    where = {level: f"level {level} saw none" if level in levels else f"level {level}" for _, level, _ in ABSENT}
    return [f"{known.get(table, means)} ({where[level]})" for table, level, means in ABSENT if len(tables[table]) == 0]


def undeclared_remarks(manifest: dict[str, Any], tables: Tables) -> list[str]:
    """Where the steps of a program that no engine declares come from, and what shows more; nothing for others."""
    engines = {probe.get("engine") for probe in listed_items(manifest.get("probes"), dict)}
    if not engines or not engines <= OF_NO_ENGINE or not len(tables["thread_states"]):
        return []
    more = [] if manifest.get("stacks") else ["no stacks: --stacks shows in which functions threads compute and wait"]
    return [step_origin(tables) or NO_STEPS, *more]


def heat_summary(manifest: dict[str, Any], tables: Tables) -> dict[str, Any]:
    """`steady`, whether the machine had settled, and what limited clocks; {} if nothing is known of either."""
    limited, settled = heat.limit_summary(tables), steady.steady_state(tables, manifest)
    return {"steady": settled, "episodes": [], "cost": {}} | limited if limited or settled else {}


def tracer_warnings(manifest: dict[str, Any]) -> list[str]:
    """The tracer's warnings: what it could not do or had to change."""
    return listed_items(manifest.get("warnings"), str)


def incompleteness(source: Source) -> list[str]:
    """Differences between files and manifest: missing records, or records that the manifest does not describe."""
    expected, counts = section(source.manifest, "records"), source.count()
    described = {kind: n for kind, n in expected.items() if isinstance(n, int) and kind in source.recording.layouts}
    short = {kind: n - counts.get(kind, 0) for kind, n in described.items() if n > counts.get(kind, 0)}
    lines = list(source.damage)
    if short:
        lacking, most = f"{sum(short.values()):,} of {sum(described.values()):,}", max(short, key=short.__getitem__)
        lines.append(f"{lacking} records missing from the files (mostly {most}): they are truncated")
    odd = counts.get("unknown", 0)
    if odd:
        lines.append(f"records of kinds that the manifest does not describe, omitted: {odd:,}")
    if source.damaged:
        lines.append(f"records with impossible times, omitted: {source.damaged:,}; the files are damaged")
    return lines


def recording_summary(recording: Recording, tables: Tables) -> dict[str, Any]:
    """Facts of the recording; a state other than `complete` means that the writer did not finish."""
    manifest = recording.manifest
    keys = ("program", "state", "started_utc", "duration_ns", "command", "loader", "levels")
    declared = section(manifest, "engines")
    stepped = [name for name in declared if (tables["tokens"]["engine"] == name).any()]
    loaded = [name for name, engine in declared.items() if engine.get("libraries")]
    imported = list(declared) if is_imported(recording) else []
    ended = section(manifest, "target").get("exit_code")
    about = {key: manifest.get(key) for key in keys} | {"imported": is_imported(recording)}
    return {**about, "engines": stepped or loaded or imported, "exit_code": ended}


def machine_summary(manifest: dict[str, Any]) -> dict[str, Any]:
    """The machine, and which parts of it are emulated."""
    qnn = section(manifest, "qnn")
    npu = None
    if qnn:
        npu = (
            "HTP emulator" if qnn.get("emulator") else ("HTP" if qnn.get("backend") == 6 else f"QNN backend {qnn.get('backend')}")
        )
    return {**section(manifest, "machine"), "npu": npu, "emulated": [npu] if npu == "HTP emulator" else []}


def token_summary(tables: Tables) -> dict[str, Any]:
    """Steps and speed, as defined in figures.py; `tpot_ms` has the mean, which is TPOT, and quantiles of the ITLs."""
    table = tables["tokens"]
    if len(table) == 0:
        return {}
    steps, fed = figures.complete_steps(tables), figures.fed_sequences(tables)
    itl, decode, ttft = figures.itls_ms(fed), steps[steps["phase"] == "decode"], figures.ttft_ms(fed)
    decode_ms, other_ms = (figures.undisturbed_steps(some)["duration_ns"] / 1e6 for some in (decode, steps[steps["phase"] == ""]))
    return {
        "steps": len(table),
        "incomplete": int((~table["complete"]).sum()),
        "disturbed": disturbed.disturbed_counts(table),
        "unread_rows": unread_rows(tables),
        "apart": {phase: n for phase in APART if (n := int((table["phase"] == phase).sum()))},
        "generations": int(fed["request"].nunique()),
        "prefill_tokens": int(fed.loc[fed["phase"] == "prefill", "rows"].sum()),
        "decode_steps": len(decode),
        "ttft_ms": _median(ttft),
        "ttft_p90_ms": _quantile(ttft, 0.9),
        "tpot_ms": {"mean": _mean(itl), "median": _median(itl), "p90": _quantile(itl, 0.9), "n": len(itl)},
        "other_step_ms": {"median": _median(other_ms), "p90": _quantile(other_ms, 0.9), "n": len(other_ms)},
        "decode_step_ms": {"median": _median(decode_ms), "p90": _quantile(decode_ms, 0.9)},
        "decode_tokens_per_s": figures.decode_tokens_per_s(itl),
        "prefill_tokens_per_s": figures.prefill_tokens_per_s(steps),
        "major_faults": int(steps["maj_flt"].clip(lower=0).sum()),
    }


def graph_summary(tables: Tables) -> list[dict[str, Any]]:
    """Graphs and runs outside of steps by engine, kind and name, with the operators in them: the type with most time first."""
    graphs, operators = tables["graphs"], tables["operators"]
    outside, answer = graphs[(graphs["token_id"] < 0) & graphs["complete"]], []
    for (engine, kind, name), rows in outside.groupby(["engine", "kind", "name"], observed=True):
        ms, inside = rows["duration_ns"] / 1e6, operators[operators["graph_id"].isin(rows["graph_id"])]
        types = inside.groupby("type", observed=True)["duration_ns"].sum().sort_values(ascending=False) / 1e6
        figures_of = {"median_ms": _median(ms), "p90_ms": _quantile(ms, 0.9), "ms": float(ms.sum())}
        failed = int((rows["status"] != 0).sum())
        counts = {"count": len(rows), "failed": failed, **figures_of, "operators": len(inside)}
        answer.append({"engine": engine, "kind": kind, "name": name, **counts, "operator_ms": dict(types.head(TOP).items())})
    return sorted(answer, key=lambda row: -row["ms"])


def unread_rows(tables: Tables) -> int:
    """Rows of batches that were too large to be recorded whole."""
    known = tables["sequences"].groupby("token_id")["rows"].sum()
    steps = tables["tokens"].set_index("token_id")["n_tokens"].reindex(known.index)
    return int((steps - known).where(known > 0).clip(lower=0).sum())


def _mean(values: pd.Series) -> float | None:
    return float(values.mean()) if len(values) else None


def _median(values: pd.Series) -> float | None:
    return float(values.median()) if len(values) else None


def _quantile(values: pd.Series, q: float) -> float | None:
    return float(values.quantile(q)) if len(values) else None


def operator_summary(tables: Tables, times: pd.DataFrame, top: int = TOP) -> dict[str, Any]:
    """Operator types of the steps that count, by computing time, `ms` (`times`: step_time.operator_times); `wait_share` of the
    threads' time, `share` of all operators; `not_computing`: what was taken out of their durations."""
    table = tables["operators"]
    if len(table) == 0:
        return {}
    counts = table["op_id"].isin(step_time.of_counted(tables, table)["op_id"]).to_numpy()
    every, table, times = table, table[counts], times[counts]
    return {
        "count": len(every),
        "incomplete": int((~every["complete"]).sum()),
        "threads": int(every["n_threads"].max()),
        "ms": float(times["computing_ns"].sum()) / 1e6,
        "not_computing": step_time.lost_text(times),
        "top": ranked_operators(operator_totals(table, times), top),
    }


def operator_totals(table: pd.DataFrame, times: pd.DataFrame, *by: str) -> pd.DataFrame:
    """For each operator type and value of the columns `by`: `count`, and the sums `ns` (computing), `busy` and `wait`."""
    kinds = table.assign(ns=times["computing_ns"].to_numpy()).groupby([*by, "engine", "type"], as_index=False)
    return kinds.agg(count=("op_id", "size"), ns=("ns", "sum"), busy=("busy_ns", "sum"), wait=("wait_ns", "sum"))


def ranked_operators(totals: pd.DataFrame, top: int) -> list[dict[str, Any]]:
    """The costliest types of `operator_totals`, summed over its other columns."""
    kinds = totals.groupby(["engine", "type"], as_index=False)[["count", "ns", "busy", "wait"]].sum()
    everything = float(kinds["ns"].sum())
    return [
        {
            "engine": row["engine"],
            "type": row["type"],
            "count": int(row["count"]),
            "ms": row["ns"] / 1e6,
            "mean_us": row["ns"] / row["count"] / 1e3,
            "share": row["ns"] / everything if everything else 0.0,
            "wait_share": row["wait"] / (row["busy"] + row["wait"]) if row["busy"] + row["wait"] else 0.0,
        }
        for row in kinds.sort_values("ns", ascending=False).head(top).to_dict("records")
    ]


def npu_summary(manifest: dict[str, Any], tables: Tables) -> dict[str, Any]:
    """QNN: execution times from the host's view and from the backend's own events, and counts of unmatched events."""
    executes, events, calls = tables["qnn_executes"], tables["qnn_events"], tables["qnn_calls"]
    if len(executes) == 0 and len(events) == 0 and len(calls) == 0:
        return {}
    loose = (events["execute_id"] < 0) & (events["call_id"] < 0)
    measures = {name: executes[name].dropna() for name in ("host_rpc_us", "htp_rpc_us", "accel_us", "accel_cycles")}
    kinds = executes["kind"].where(executes["kind"] != "", executes["graph_name"])
    own = own_ns(executes)
    by_graph = own.groupby(kinds).agg(["size", "sum"]).sort_values("sum", ascending=False)
    return {
        "backend": machine_summary(manifest)["npu"],
        "executes": len(executes),
        "failed": int((executes["complete"] & (executes["status"] != 0)).sum()),
        "incomplete": int((~executes["complete"]).sum()),
        "ms": float(own.sum()) / 1e6,
        **{name: float(values.sum()) if len(values) else None for name, values in measures.items()},
        "profiled_executes": len(measures["host_rpc_us"]),
        "graphs": [
            {"name": name, "executes": int(row["size"]), "ms": row["sum"] / 1e6} for name, row in by_graph.head(TOP).iterrows()
        ],
        "calls": {
            str(name): {"count": len(rows), "ms": float(rows["duration_ns"].sum()) / 1e6} for name, rows in calls.groupby("call")
        },
        "events": len(events),
        "unjoined_events": int(loose.sum()),
    }


def scheduling_summary(tables: Tables) -> dict[str, Any]:
    """Time of the target's threads in each state: in all, and for the threads that ran longest."""
    states = tables["thread_states"]
    if len(states) == 0:
        return {}
    spent, (thread, first) = states["duration_ns"].to_numpy(), number_rows(states["tid"].to_numpy())
    tids = states["tid"].to_numpy()[first]
    ns = {name: np.bincount(thread, spent * (states["state"] == name).to_numpy(), len(tids)) for name in STATES}
    wide = pd.DataFrame(ns, index=tids).sort_index() / 1e6
    names = tables["threads"].set_index("tid")["name"]
    top = wide.sort_values("running", ascending=False).head(TOP)
    rows = [
        {"tid": int(str(tid)), "name": str(names.get(tid, "")), **{f"{k}_ms": float(v) for k, v in row.items()}}
        for tid, row in top.iterrows()
    ]
    sched = tables["sched"]
    of_target = np.isin(sched["prev_tid"].to_numpy(), tids) | np.isin(sched["next_tid"].to_numpy(), tids)
    switches = (sched["event"] == "switch").to_numpy() & of_target
    total = {f"{name}_ms": float(each.sum()) / 1e6 for name, each in ns.items()}
    return {"threads": len(wide), "switches": int(switches.sum()), **total, "top": rows}


def io_summary(tables: Tables) -> dict[str, Any]:
    """Bytes that the target's threads read, time in reads and major faults, and the shares of that time by enclosing span."""
    faults, reads, blocks = tables["faults"], tables["reads"], tables["blocks"]
    if len(faults) == 0 and len(reads) == 0 and len(blocks) == 0:
        return {}
    major = faults[faults["kind"] == "major"]
    waits = pd.concat([part[["token_id", "op_id", "load_id", "duration_ns"]] for part in (major, reads)], ignore_index=True)
    spent = waits["duration_ns"].clip(lower=0)
    total = float(spent.sum())
    spent_within = {name: float(spent[waits[column] >= 0].sum()) for name, column in WITHIN.items()}
    asked = blocks[blocks["operation"] == "read"]
    by_file = pd.concat([major[["file", "bytes"]], reads[["file", "bytes"]]]).groupby("file")["bytes"].sum()
    return {
        "major_faults": len(major),
        "minor_faults": len(faults) - len(major),
        "reads": len(reads),
        "read_bytes": int(reads["bytes"].sum()),
        "fault_bytes": int(major["bytes"].sum()),
        "device_reads": len(asked),
        "device_read_bytes": int(asked["bytes"].sum()),
        "fault_ms": float(major["duration_ns"].clip(lower=0).sum()) / 1e6,
        "read_ms": float(reads["duration_ns"].sum()) / 1e6,
        "waited_ms": total / 1e6,
        "shares": {name: ns / total if total else 0.0 for name, ns in spent_within.items()},
        "files": {str(name): int(size) for name, size in by_file.sort_values(ascending=False).head(TOP).items() if size},
    }


def record_summary(source: Source, tables: Tables) -> dict[str, Any]:
    """Records in the files, records lost in the kernel, and records without a partner."""
    lost = {kind: int(n) for kind, n in section(source.manifest, "lost").items() if isinstance(n, int) and n}
    ends = tables["unpaired"].groupby("kind").size()
    spans = ("tokens", "graphs", "operators", "experts", "loads", "qnn_executes", "qnn_calls", "reads", "blocks")
    begins = {name: int((~tables[name]["complete"]).sum()) for name in spans}
    return {
        "kept": source.count(),
        "lost": lost,
        "skipped": skipped_events(source.manifest),
        "discarded_slots": source.discarded(),
        "dropped": section(source.manifest, "dropped"),
        "sampling": {k: v for k, v in section(source.manifest, "sampling").items() if isinstance(v, int | float)},
        "level_changes": len(known_changes(source.manifest.get("level_changes"))),
        "damaged": source.damaged,
        "ends_without_begin": {str(kind): int(n) for kind, n in ends.items()},
        "begins_without_end": {name: n for name, n in begins.items() if n},
        "reasons": {"blocks": open_blocks(source, tables["blocks"])} if begins["blocks"] else {},
    }


def open_blocks(source: Source, blocks: pd.DataFrame) -> dict[str, int]:
    """Reason → number of block requests without an end; a request may have been in flight for as long as the longest took."""
    done = blocks["complete"].to_numpy()
    again = blocks.duplicated(["device", "sector"], keep="last").to_numpy()
    in_flight = blocks["begin_ns"].to_numpy() + blocks.loc[done, "duration_ns"].max() >= source.last_ns
    missing = section(source.manifest, "lost").get("block_done") or skipped_events(source.manifest).get("block_rq_complete")
    rest = "whose end was lost" if missing else "whose end was not seen"
    cases = [again, in_flight]
    reasons = np.select([case[~done] for case in cases], ["issued again later", "in flight at the end"], rest)
    return {str(reason): int(n) for reason, n in zip(*np.unique(reasons, return_counts=True), strict=True)}


def skipped_events(manifest: dict[str, Any]) -> dict[str, int]:
    """Events that the kernel skipped because another program was running on the CPU, by program."""
    counts = {str(row.get("program")): row.get("skipped") for row in listed_items(manifest.get("probes"), dict)}
    return {program: n for program, n in counts.items() if isinstance(n, int) and n > 0}


def probe_advice(warm: float, cold: float) -> str | None:
    """Advice on probes that take these shares of the steps' time, with warm and with cold caches; None if both are small."""
    if cold < COSTLY:
        return None
    return f"probes took {interval(100 * warm, 100 * cold, '%')} of the steps' time: record with --max-overhead 10%"


def cost_summary(manifest: dict[str, Any], tables: Tables) -> dict[str, Any]:
    """The cost of tracing by tracer/recording/cost.py: its parts and shares, and `lines`, the text of every screen."""
    told, probes = section(manifest, "cost"), listed_items(manifest.get("probes"), dict)
    hits = {p.get("program"): int(p.get("hits") or 0) for p in probes}  # equal within a program
    cost = cost_of(told, float(tables["tokens"]["duration_ns"].sum()))
    warm, cold = cost.of_steps if cost.of_steps and told else (None, None)
    return {
        **{name: value for name, value in told.items() if isinstance(value, int | float)},
        "probe_hits": sum(hits.values()),
        "advice": probe_advice(warm, cold)
        if warm is not None and cold is not None and not section(manifest, "sampling")
        else None,
        "slowdown": cost.slowdown,
        "share_of_token_time": warm,
        "cold_share_of_token_time": cold,
        "share_of_target_cpu": cost.share(cost.probes, cost.target),
        "tracer_share_of_target_cpu": cost.tracer_of_target,
        "notable": cost.is_notable,
        "lines": cost_lines(cost) if told else [],
    }
