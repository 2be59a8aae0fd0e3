"""Show a recording on one screen: speed, where the time goes, experts, NPU, scheduling, losses and the cost of tracing.

examples:
  python -m analyzer summary recordings/run-1
  python -m analyzer summary recordings/run-1 --json | jq .tokens.tpot_ms
"""

import argparse
import signal
from collections.abc import Callable
from typing import Any

from analyzer.commands._show import number, printed, short
from analyzer.questions.cached import summary
from analyzer.questions.ledger import shares
from analyzer.records.manifest import command_of
from analyzer.records.stamps import outdated
from moescope.arguments import add_run_and_json
from moescope.calling import as_called
from moescope.terminal import Line, console, counted, grid, words
from tracer.recording.format import Recording

prepare_parser = add_run_and_json

OPERATORS, GROUPS, GRAPHS, THREADS, FINDINGS = 5, 9, 2, 2, 3
APART = 0.02
"""Smallest share of TPOT between steps that is shown."""
NOUNS = {"blocks": "block request", "loads": "expert load", "qnn_executes": "NPU execution", "qnn_calls": "QNN call"}
"""One row of a table whose name does not say it."""
Section = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Summarise the recording and print the result."""
    answer = summary(args.run_dir)
    answer["outdated_views"] = outdated(args.run_dir, Recording(args.run_dir).manifest)
    if printed(args, answer):
        return 0
    screen = console()
    shown = (part(answer[name] if name else answer) for name, part in PARTS if not name or answer[name])
    command, *lines = (line for part in shown for line in part)
    screen.print(command, no_wrap=True, overflow="ellipsis")
    for line in lines:
        screen.print(line)
    return 0


def heading(answer: Section) -> list[Line]:
    """The engines, the recorded command and the machine."""
    about, machine = answer["recording"], answer["machine"]
    where = f"{machine.get('cpu_model', '?')}, {machine.get('cpus', '?')} CPUs, Linux {machine.get('kernel', '?')}"
    lines: list[Line] = [words((", ".join(about["engines"]) or "no engine", "bold"), f": {' '.join(command_of(about))}")]
    if machine.get("cpu_model") or not about["imported"]:
        lines.append(where)
    if machine["npu"]:
        lines.append(
            f"NPU: {machine['npu']}" + (" (exact results; times of the host, not of a device)" if machine["emulated"] else "")
        )
    lines += [words((line, "yellow")) for line in (*answer["missing"], *answer["warnings"])]
    if answer.get("outdated_views"):
        names = ", ".join(answer["outdated_views"])
        remedy = as_called("python -m views write updates them")
        lines.append(words((f"{names}: made from an earlier version of this recording; {remedy}", "yellow")))
    if about.get("exit_code"):
        lines.append(words((f"the program {ending(about['exit_code'])}", "yellow")))
    if about["state"] != "complete":
        lines.append(words((f"state: {about['state']}: the writer did not finish", "yellow")))
    return lines


def ending(code: int) -> str:
    """A program's exit as text, from its exit code or, if negative, its signal."""
    named = {int(one): one.name for one in signal.Signals}
    return f"was ended by {named.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"


def speed(answer: Section) -> list[Line]:
    """Tokens per second and latencies."""
    t = answer["tokens"]
    if not t:
        return ["no tokens recorded"]
    tpot = t["tpot_ms"]
    prefill = f"prefill {number(t['prefill_tokens_per_s'])} tok/s over {t['prefill_tokens']} tokens"
    first = f"TTFT {number(t['ttft_ms'])} ms, {prefill}" if t["prefill_tokens"] else "no prefill recorded"
    spread = f"median {number(tpot['median'], '.2f')}, p90 {number(tpot['p90'], '.2f')}, n {tpot['n']}"
    second = f"TPOT {number(tpot['mean'], '.2f')} ms ({spread})"
    rest = f", decode {number(t['decode_tokens_per_s'])} tok/s, {counted(t['major_faults'], 'major fault')}"
    return [first, second + rest]


def phases(answer: Section) -> list[Line]:
    """The parts of a step's time."""
    if not answer["phases"]:
        return []
    names, groups = list(answer["phases"]), grouped_times(answer["phases"])
    table = grid("ms per step", *(column for name in names for column in (name, "")))
    for key in groups[names[0]]:
        cells = []
        for name in names:
            value, total = groups[name][key], groups[name]["total"]
            cells += [number(value, ",.3f"), number(value / total if value is not None and total else None, ".0%")]
        table.add_row(key, *cells)
    between = between_ms(answer)
    if between:
        table.add_row(
            "between steps", *(cell for name in names for cell in (number(between, ",.3f") if name == "decode" else "", ""))
        )
    return [table]


def grouped_times(by_phase: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Times by phase and group: the largest groups and the sum of the others, so that all rows add up to the total."""
    keys = list(dict.fromkeys(key for phase in by_phase.values() for key in phase if key not in ("residual", "total")))
    share = {key: max(phase.get(key, 0.0) / (phase["total"] or 1.0) for phase in by_phase.values()) for key in keys}
    few = sorted(keys, key=share.__getitem__)[: max(len(keys) - GROUPS, 0)]
    few = few + sorted(set(keys) - set(few), key=share.__getitem__)[:1] if few else []  # their sum also takes a row
    rest = {f"{len(few)} others": few} if few else {}
    return {
        name: {key: phase.get(key) for key in keys if key not in few}
        | {label: sum(phase.get(key, 0.0) for key in of) for label, of in rest.items()}
        | {key: phase[key] for key in ("residual", "total")}
        for name, phase in by_phase.items()
    }


def between_ms(answer: Section) -> float | None:
    """Mean time between decode steps, which TPOT includes; None below APART of it."""
    tpot, decode = (answer["tokens"] or {}).get("tpot_ms", {}).get("mean"), answer["phases"].get("decode")
    between = tpot - decode["total"] if tpot and decode else 0.0
    return between if tpot and between > APART * tpot else None


def ledger_line(ledger: Section) -> list[Line]:
    """The time of steps by cause."""
    return [words(("ledger", "bold"), f": {shares(ledger)}")]


def top_findings(findings: list[Section]) -> list[Line]:
    """The findings with the largest estimated savings."""
    rows = [(f"{f['saving_share']:.0%}", f["text"].rpartition(":")[0]) for f in findings[:FINDINGS]]
    what = as_called("main costs (all: python -m analyzer findings)")
    return [grid("of step time", what, left=(what,), rows=rows)]


def operators(totals: Section) -> list[Line]:
    """The costliest operator types."""
    rows = [
        (o["type"], f"{o['count']:,}", f"{o['ms']:,.1f}", f"{o['mean_us']:,.1f}", f"{o['share']:.0%}", f"{o['wait_share']:.0%}")
        for o in totals["top"][:OPERATORS]
    ]
    return [grid("operator", "count", "total ms", "mean µs", "share", "waiting", rows=rows)]


def experts(e: Section) -> list[Line]:
    """Figures of the experts, in two lines."""
    seen = [f"{name} {v['seen']:.1f} ({v['per_step']:.1f} per step)" for name, v in e["distinct_per_layer"].items() if v]
    rate, reuse = number(e["hit_rate"], ".1%"), number(e["reuse_distance_median_steps"], ".0f")
    loads = [f"{v['loads']} {name} {v['bytes'] / 2**20:,.0f} MiB {v['ms']:,.1f} ms" for name, v in e["loads"].items()]
    lines: list[Line] = [words(("experts", "bold"), f" used per layer: {', '.join(seen)}")] if seen else []
    if e["hit_rate"] is not None:
        counts = f": {e['hits']:,} hits, {e['misses']:,} misses"
        lines.append(f"hit rate {rate}{counts}, {e['evictions']:,} evictions, reuse after {reuse} steps (median)")
    return [*lines, f"loads: {', '.join(loads)}", *reasons(e["step_loads"])] if loads else lines


def reasons(s: Section) -> list[Line]:
    """The reasons for expert loads in steps."""
    if not s["first"] + s["again"]:
        return []
    compiled = f" ({s['compiled']:,} compiled for the NPU in {s['compile_ms']:,.1f} ms)" if s["compiled"] else ""
    more = f"; {s['repeated']:,} repeated within their layer" if s["repeated"] else ""
    return [f"within steps {s['first']:,} for the first time{compiled}, {s['again']:,} again{more}"]


def npu(n: Section) -> list[Line]:
    """Figures of QNN, in a few lines."""
    failed = (f", {n['failed']} failed" if n["failed"] else "", "red")
    counts = f" {n['executes']} executions, {n['ms']:,.1f} ms"
    named = {"host_rpc_us": "RPC host", "htp_rpc_us": "RPC HTP", "accel_us": "accelerator"}
    known = [f"{name} {number(n[key] / 1e3)} ms" for key, name in named.items() if n[key] is not None]
    known += [f"{n['accel_cycles']:,.0f} cycles"] if n["accel_cycles"] is not None else []
    known.append(f"{n['events']:,} profile events ({n['unjoined_events']:,} not attributed to an execution)")
    lines: list[Line] = [words((n["backend"] or "QNN", "bold"), counts, failed), ", ".join(known)]
    if n["graphs"]:
        rows = ((short(row["name"]), f"{row['executes']:,}", f"{row['ms']:,.1f}") for row in n["graphs"][:GRAPHS])
        lines.append(grid("NPU graphs", "executions", "total ms", rows=rows))
    return lines


def npu_queues(q: Section) -> list[Line]:
    """Work submitted to the NPU without QNN."""
    took = "" if q["npu_ms"] is None else f"; {number(q['npu_ms'])} ms by the NPU's own profile"
    unanswered = (f", {q['unanswered']:,} unanswered" if q["unanswered"] else "", "red")
    unknown = q["operators"] - q["joined"]
    steps = f" in {q['steps']:,} steps" if q["steps"] else ""
    counts = f" {q['batches']:,} batches of {q['operators']:,} operators{steps}"
    lines: list[Line] = [words(("Hexagon", "bold"), counts, unanswered, took)]
    if q["in_flight"] < 0:  # the NPU's own profile, without times of the host
        return lines
    return [
        *lines,
        f"{number(q['submit_ms'])} ms submitting, {number(q['wait_ms'])} ms waiting for answers, at most {q['in_flight']} in "
        + (f"flight; {unknown:,} operators are not attributed to a node" if unknown else "flight"),
    ]


def scheduling(s: Section) -> list[Line]:
    """The threads' time by state."""
    states = ("running", "runnable", "sleeping", "waiting", "stopped")
    named = [("all", s), *((f"{row['name']} {row['tid']}", row) for row in s["top"][:THREADS])]
    rows = ((name, *(f"{row[f'{state}_ms']:,.1f}" for state in states)) for name, row in named)
    return [grid(f"ms in state ({s['threads']} threads)", *states, rows=rows)]


def clocks(c: Section) -> list[Line]:
    """The limits on the CPUs' frequencies."""
    cooling = ", ".join(f"{name} {share:.0%}" for name, share in c["cooling"].items())
    lines = [*(cap["text"] for cap in c["caps"]), *([f"cooling active, share of decode: {cooling}"] if cooling else [])]
    return [words(("clocks ", "bold"), (line, "yellow")) for line in lines]


def io(i: Section) -> list[Line]:
    """Bytes by what moved them, and time waiting for I/O."""
    mib = {name: f"{i[name] / 2**20:,.1f} MiB" for name in ("read_bytes", "fault_bytes", "device_read_bytes")}
    calls = f"{counted(i['reads'], 'read call')} returned {mib['read_bytes']}"
    faults = f"{counted(i['major_faults'], 'major fault')} brought {mib['fault_bytes']} into the page cache"
    device = (
        f"{mib['device_read_bytes']} in {counted(i['device_reads'], 'block request')} (cache misses, read-ahead, direct reads)"
    )
    shares = ", ".join(f"{share:.0%} within {name}" for name, share in i["shares"].items() if share)
    waited = f"waited {i['waited_ms']:,.1f} ms" + (f": {shares}" if shares else "")
    return [words(("I/O", "bold"), f": {calls}; {faults}"), f"read from devices: {device}", waited]


def losses(answer: Section) -> list[Line]:
    """Lost and incomplete records, and the cost of tracing; nothing for imported recordings."""
    r, c = answer["records"], answer["cost"]
    if answer["recording"]["imported"]:
        return []
    lost = sum(r["lost"].values())
    odd = [f"{counted(n, f'{kind} end')} without begin" for kind, n in r["ends_without_begin"].items()]
    why = {name: f" ({', '.join(f'{n} {reason}' for reason, n in reasons.items())})" for name, reasons in r["reasons"].items()}
    ends = r["begins_without_end"].items()
    odd += [f"{counted(n, NOUNS.get(name, name.removesuffix('s')))} without end{why.get(name, '')}" for name, n in ends]
    odd += [f"{counted(n, 'event')} of {program} skipped by the kernel" for program, n in r["skipped"].items()]
    kept_text = f"{sum(r['kept'].values()):,} records kept, "
    stops = f" in {counted(c['held_stops'], 'stop')}" if c.get("held_stops") else ""
    pause = [f"the program was stopped {c['held_ns'] / 1e6:,.0f} ms{stops} to place probes"] if c.get("held_ns") else []
    dropped = r["dropped"]
    dropped_records = sum((dropped.get("records") or {}).values())
    fast = f"; {dropped_records:,} dropped with {dropped.get('tokens', 0):,} faster tokens" if dropped else ""
    lines: list[Line] = [words(kept_text, (f"{lost:,} lost", "red" if lost else ""), fast)]
    first, *more = [*c["lines"], *pause] or [""]
    lines += [words(("tracing", "bold"), f": {first}"), *more] if first else []
    if c.get("advice"):
        lines.append(words((c["advice"], "yellow")))
    if s := r["sampling"]:
        slowdown = f"tokens took {number(s['slowdown_while_on'], '.1%')} longer meanwhile; " if "slowdown_while_on" in s else ""
        on = f"costly levels were on for {number(s['share_on'], '.0%')} of the time"
        lines.append(f"{on}: {slowdown}limit {s['allowed']:.0%}")
    return [*lines, "incomplete: " + ", ".join(odd)] if odd else lines


PARTS: tuple[tuple[str, Callable[[Any], list[Line]]], ...] = (
    ("", heading),
    ("", speed),
    ("findings", top_findings),
    ("", phases),
    ("ledger", ledger_line),
    ("operators", operators),
    ("experts", experts),
    ("npu", npu),
    ("npu_queues", npu_queues),
    ("scheduling", scheduling),
    ("clocks", clocks),
    ("io", io),
    ("", losses),
)
"""(section that a part of the screen shows, omitted if that is empty; "" for several sections), in order."""
