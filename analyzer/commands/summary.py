"""Show a recording on one screen: speed, where the time goes, experts, NPU, scheduling, losses and the cost of tracing.

examples:
  moescope summary recordings/run-1
  moescope summary recordings/run-1 --json | jq .tokens.tpot_ms
  moescope summary recordings/run-1 --markdown > summary.md
"""

import argparse
import signal
from collections.abc import Callable
from typing import Any

import pandas as pd

from analyzer.commands._show import number
from analyzer.commands.requests import request_lines, speculative_lines
from analyzer.questions.cached import cached_summary
from analyzer.questions.steady import MOVING, SHORT
from analyzer.records.manifest import command_of
from analyzer.records.stamps import outdated_views
from moescope.answers import print_if_json
from moescope.arguments import add_run_and_json
from moescope.terminal import Line, as_markdown, console, counted, grid, words
from tracer.recording.format import Recording

PARTS_SHOWN, CAUSES_SHOWN, FINDINGS = 6, 4, 3
OTHERS, LEAST = "others", 0.005
THREADS, FILES, EPISODES = 6, 4, 3
FILE_NOUNS = {"read": "read", "fault": "page fault"}
APART = 0.02
"""Smallest share of TPOT outside of steps that is shown."""
NOUNS = {"warm-up": "warm-up step", "refused": "refused call"}
NOUNS |= {"blocks": "block request", "loads": "expert load", "qnn_executes": "NPU execution", "qnn_calls": "QNN call"}
"""One row of a table or step of a phase whose name does not say it."""
DISTURBED = {
    "gap": "others missing:",
    "charging": "a charger:",
    "stopped": "a stopped sensor:",
    "reset": "a counter reset:",
}
"""State of an interval between power readings, as text before its count."""
GROWTH = {1: "", 2: " squared", 3: " cubed"}
LINES_OF_GRAPHS, TYPES_OF_GRAPHS = 6, 5
"""At most so many kinds of graphs, and types of operators of each, are shown."""
Section = dict[str, Any]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_and_json(parser)
    parser.add_argument("--markdown", action="store_true", help="print the screen as Markdown, for a pull request or an issue")


def run(args: argparse.Namespace) -> int:
    """Summarise the recording and print the result."""
    answer = cached_summary(args.run_dir)
    answer["outdated_views"] = outdated_views(args.run_dir, Recording(args.run_dir).manifest)
    if print_if_json(args, answer):
        return 0
    screen, answer["run_dir"] = console(), str(args.run_dir)
    shown = (part(answer[name] if name else answer) for name, part in PARTS if not name or answer[name])
    command, *lines = (line for part in shown for line in part)
    if args.markdown:
        print(as_markdown([command, *lines]), end="")
        return 0
    screen.print(command, no_wrap=True, overflow="ellipsis")
    for line in lines:
        screen.print(line)
    return 0


def heading_lines(answer: Section) -> list[Line]:
    """The engines, the recorded command and the machine."""
    about, machine = answer["recording"], answer["machine"]
    where = f"{machine.get('cpu_model', '?')}, {machine.get('cpus', '?')} CPUs, Linux {machine.get('kernel', '?')}"
    lines: list[Line] = [words((", ".join(about["engines"]) or "no known engine", "bold"), f": {' '.join(command_of(about))}")]
    if machine.get("cpu_model") or not about["imported"]:
        lines.append(where)
    if machine["npu"]:
        lines.append(f"NPU: {machine['npu']}")
    lines += [words((line, "yellow")) for line in (*answer["missing"], *answer["warnings"])]
    if answer.get("outdated_views"):
        names = ", ".join(answer["outdated_views"])
        remedy = "moescope write updates them"
        lines.append(words((f"{names}: made from an earlier version of this recording; {remedy}", "yellow")))
    if about.get("exit_code"):
        lines.append(words((f"the program {exit_text(about['exit_code'])}", "yellow")))
    if about["state"] != "complete":
        lines.append(words((f"state: {about['state']}: the writer did not finish", "yellow")))
    return lines


def exit_text(code: int) -> str:
    """A program's exit as text, from its exit code or, if negative, its signal."""
    named = {int(one): one.name for one in signal.Signals}
    return f"was ended by {named.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"


def speed_lines(answer: Section) -> list[Line]:
    """Tokens per second and latencies."""
    t = answer["tokens"]
    if not t and answer["program"]:
        return []
    if not t:
        return [line for row in answer["graphs"][:LINES_OF_GRAPHS] for line in graph_lines(row)] or ["no steps recorded"]
    tpot, other = t["tpot_ms"], t["other_step_ms"]
    if other["n"] and not t["generations"]:
        spread = f"median {number(other['median'], '.2f')} ms, p90 {number(other['p90'], '.2f')} ms"
        return [f"{counted(t['steps'], 'step')}, {spread}, {counted(t['major_faults'], 'major fault')}"]
    prefill = f"prefill {number(t['prefill_tokens_per_s'])} tok/s over {counted(t['prefill_tokens'], 'token')}"
    ttft = f"median {number(t['ttft_ms'])}, p90 {number(t['ttft_p90_ms'])}" if t["generations"] > 1 else number(t["ttft_ms"])
    first = f"TTFT {ttft} ms, {prefill}" if t["prefill_tokens"] else "no prefill recorded"
    spread = f"median {number(tpot['median'], '.2f')}, p90 {number(tpot['p90'], '.2f')}, n {tpot['n']}"
    second = f"TPOT {number(tpot['mean'], '.2f')} ms ({spread})"
    rest = f", decode {number(t['decode_tokens_per_s'])} tok/s, {counted(t['major_faults'], 'major fault')}"
    apart = ", ".join(counted(n, NOUNS[phase]) for phase, n in t["apart"].items())
    notes = [f"{apart}: not in these figures"] if apart else []
    notes += [f"{counted(t['unread_rows'], 'row')} of large batches not recorded"] if t["unread_rows"] else []
    return [first, second + rest, *(words((note, "yellow")) for note in notes)]


def graph_lines(row: Section) -> list[Line]:
    """Graphs or runs of one kind outside of steps, and the operators in them with most time."""
    failed = f", {row['failed']:,} failed" if row["failed"] else ""
    spread = f"median {row['median_ms']:,.2f} ms, p90 {row['p90_ms']:,.2f} ms, together {row['ms']:,.1f} ms"
    most = list(row["operator_ms"].items())[:TYPES_OF_GRAPHS]
    inside = [f"  {row['operators']:,} operators, ms: {', '.join(f'{name} {ms:,.1f}' for name, ms in most)}"] if most else []
    what = f"{row['engine']} {row['kind']} {row['name']}".rstrip()
    return [words((what, "bold"), f": {row['count']:,} times, {spread}{failed}"), *inside]


def served_lines(r: Section) -> list[Line]:
    """Requests served at once, their percentiles, and accepted drafts."""
    several = r["concurrency"]["most"] > 1
    return [*(request_lines(r) if several else []), *speculative_lines(r["speculative"])]


def time_lines(answer: Section) -> list[Line]:
    """A mean step of the phase with the most time, by part and cause; other phases by cause; time between steps."""
    if not answer["time"]:
        return []
    phases = sorted(answer["time"]["phases"].items(), key=lambda item: -item[1]["ms"] * item[1]["steps"])
    first, *others = ((phase or "step", part) for phase, part in phases)
    spent, tpot = answer["between_tokens_ms"], (answer["tokens"] or {}).get("tpot_ms", {}).get("mean") or 0.0
    named = ", ".join(f"{what} {ms:,.2f}" for what, ms in spent.items() if ms > LEAST * tpot)
    between = sum(spent.values())
    apart = [f"TPOT includes {between:,.2f} ms outside the token's step: {named}"] if between > APART * tpot else []
    return [time_matrix(*first), *(words((f"{phase} step ", "bold"), by_cause(part)) for phase, part in others), *apart]


def time_matrix(phase: str, part: Section) -> Line:
    """Parts as rows and causes as columns, the smallest summed; all rows and all columns add up."""
    rows, columns = (
        merge_small(part[f"{by}_ms"], part["ms"], most) for by, most in (("part", PARTS_SHOWN), ("cause", CAUSES_SHOWN))
    )
    cells = pd.DataFrame(part["cells"]).replace({"part": rows, "cause": columns})
    cells = cells.pivot_table(index="part", columns="cause", values="ms", aggfunc="sum", sort=False)
    cells = cells.reindex(index=list(dict.fromkeys(rows.values())), columns=list(dict.fromkeys(columns.values())))
    cells.loc["all"] = cells.sum()
    table = grid(f"{phase}, ms", *cells.columns, "all", "")
    for name, row in cells.iterrows():
        table.add_row(str(name), *(number(ms, ",.2f") if ms > 0 else "" for ms in row), *with_share(row.sum(), part["ms"]))
    table.add_row("share", *(with_share(ms, part["ms"])[1] for ms in cells.loc["all"]), "", "")
    return table


def merge_small(spent: dict[str, float], total: float, most: int) -> dict[str, str]:
    """Each name → itself, or OTHERS for those that are small or beyond the `most` largest; a single small one keeps its name."""
    small = [name for i, (name, ms) in enumerate(spent.items()) if i >= most or ms < LEAST * total]
    return {name: OTHERS if name in small and len(small) > 1 else name for name in spent}


def with_share(ms: float, total: float) -> tuple[str, str]:
    """A time and its share, as cells."""
    return number(ms, ",.2f"), number(ms / total if total else None, ".0%")


def by_cause(part: Section) -> str:
    """A mean step's time and its causes in a line."""
    causes = ", ".join(f"{cause} {ms / part['ms']:.0%}" for cause, ms in part["cause_ms"].items() if ms >= LEAST * part["ms"])
    return f"{part['ms']:,.2f} ms: {causes}"


def top_findings(findings: list[Section], of: str = "of step time") -> list[Line]:
    """The first findings."""
    rows = [(f"{f['share']:.0%}", f["text"]) for f in findings[:FINDINGS]]
    what = "main costs (all: moescope findings)"
    return [grid(of, what, left=(what,), rows=rows)]


def cost_lines(answer: Section) -> list[Line]:
    """The first findings, of steps or of the run of a program without steps."""
    of = "of step time" if answer["tokens"] or not answer["program"] else "of the run"
    return top_findings(answer["findings"], of) if answer["findings"] else []


def program_lines(p: Section) -> list[Line]:
    """Threads by cause, disks, and files by thread, of a program that no engine declares."""
    lives = pd.DataFrame([row["cause_ms"] for row in p["threads"]]).fillna(0.0)
    named = [str(cause) for cause, ms in lives.sum().sort_values(ascending=False).items() if ms >= LEAST * lives.sum().sum()]
    table = grid("thread, ms", *named, "lived", left=("thread, ms",))
    for row in p["threads"][:THREADS]:
        spent = (row["cause_ms"].get(cause, 0.0) for cause in named)
        table.add_row(
            f"{row['name']} {row['tid']}", *(number(ms, ",.1f") if ms else "" for ms in spent), number(row["ms"], ",.1f")
        )
    disks = [
        f"disk {d['device']}: busy {d['busy_share']:.0%} of the time, then with {d['mean_depth']:.1f} requests at once "
        f"(at most {d['most_depth']}); read {size_text(d['read_bytes'])}, wrote {size_text(d['write_bytes'])}"
        for d in p["disks"]
    ]
    files = [
        f"{f['thread']} {f['tid']} spent {number(f['ms'])} ms in {counted(f['count'], FILE_NOUNS[f['how']])} of "
        f"{f['file'] or 'anonymous memory'} ({size_text(f['bytes'])})"
        for f in p["files"][:FILES]
        if f["ms"] >= LEAST * p["ms"]
    ]
    return [table, *disks, *files]


def size_text(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:,.1f} MiB"


def expert_lines(e: Section) -> list[Line]:
    """Figures of the experts."""
    seen = [f"{name} {v['seen']:.1f} ({v['per_step']:.1f} per step)" for name, v in e["distinct_per_layer"].items() if v]
    lines: list[Line] = [words(("experts", "bold"), f" used per layer: {', '.join(seen)}")] if seen else []
    if e["hit_rate"] is not None:
        figures = [f"{number(e['hit_rate'], '.1%')} hits", counted(e["misses"], "miss"), counted(e["evictions"], "eviction")]
        reuse = e["reuse_distance_median_steps"]
        lines.append(", ".join([*figures, *([f"reuse after {counted(round(reuse), 'step')} (median)"] if reuse else [])]))
    loads = [
        f"{counted(v['loads'], f'{name} load')} {v['bytes'] / 2**20:,.0f} MiB {v['ms']:,.1f} ms" for name, v in e["loads"].items()
    ]
    return [*lines, f"{', '.join(loads)}{load_reason_lines(e['step_loads'])}"] if loads else lines


def load_reason_lines(s: Section) -> str:
    """The reasons for expert loads in steps."""
    if not s["first"] + s["again"]:
        return ""
    compiled = f" ({s['compiled']:,} compiled in {s['compile_ms']:,.1f} ms)" if s["compiled"] else ""
    twice = f" ({s['repeated']:,} of them twice in one layer)" if s["repeated"] else ""
    return f": {counted(s['first'], 'first load')}{compiled}, {counted(s['again'], 'reload')}{twice}"


def npu_lines(n: Section) -> list[Line]:
    """Figures of QNN."""
    failed = (f", {n['failed']} failed" if n["failed"] else "", "red")
    named = {"host_rpc_us": "RPC host", "htp_rpc_us": "RPC HTP", "accel_us": "accelerator"}
    known = "".join(f", {name} {number(n[key] / 1e3)}" for key, name in named.items() if n[key] is not None)
    loose = f", {n['unjoined_events']:,} profile events without an execution" if n["unjoined_events"] else ""
    return [words((n["backend"] or "QNN", "bold"), f" {n['executes']} executions, {n['ms']:,.1f} ms{known}", failed, loose)]


def npu_queues(q: Section) -> list[Line]:
    """Work submitted to the NPU without QNN."""
    took = "" if q["npu_ms"] is None else f"; {number(q['npu_ms'])} ms by the NPU's own profile"
    unanswered = (f", {q['unanswered']:,} unanswered" if q["unanswered"] else "", "red")
    unknown = q["operators"] - q["joined"]
    steps = f" in {counted(q['steps'], 'step')}" if q["steps"] else ""
    operators = "unknown operators" if q["unread"] == q["batches"] else counted(q["operators"], "operator")
    counts = f" {q['batches']:,} batches of {operators}{steps}"
    lines: list[Line] = [words(("Hexagon", "bold"), counts, unanswered, took)]
    if q["in_flight"] < 0:  # the NPU's own profile, without times of the host
        return lines
    return [
        *lines,
        f"{number(q['submit_ms'])} ms submitting, {number(q['wait_ms'])} ms waiting for answers, at most {q['in_flight']} in "
        + (f"flight; {unknown:,} operators are not attributed to a node" if unknown else "flight"),
    ]


def clock_lines(c: Section) -> list[Line]:
    """The limits on the CPUs' frequencies."""
    cooling = ", ".join(f"{name} {share:.0%}" for name, share in c["cooling"].items())
    lines = [*(cap["text"] for cap in c["caps"]), *([f"cooling active, share of decode: {cooling}"] if cooling else [])]
    return [words(("clocks ", "bold"), (line, "yellow")) for line in lines]


def heat_lines(h: Section) -> list[Line]:
    """When clocks were limited and what it cost, and whether the machine had settled."""
    lines: list[Line] = []
    for each in h["episodes"][:EPISODES]:
        zone = f", {each['zone']} at up to {number(each['celsius'])} °C" if each["celsius"] is not None else ""
        span = f"from second {each['begin_s']:,.1f} to {each['end_s']:,.1f}: {', '.join(each['sources'])}{zone}"
        lines.append(words(("limited ", "bold"), (span, "yellow")))
    if cost := h["cost"]:
        speeds = [number(cost[f"{name}_tokens_per_s"], ".2f") for name in ("limited", "free")]
        lost = f"{number(cost['lost_ns'] / 1e9)} s lost in {counted(cost['limited_steps'], 'step')}"
        lines.append(f"{speeds[0]} instead of {speeds[1]} tok/s while limited, {lost}")
    return [*lines, *([words(("heat ", "bold"), steady_text(h["steady"]))] if h["steady"] else [])]


def steady_text(s: Section) -> str:
    """Whether power, clocks and temperatures had settled."""
    minutes = f"{s['recorded_s'] / 60:,.1f} min"
    if s["state"] == SHORT:
        return f"{minutes} are too short to see whether power, clocks and temperatures settle ({s['for_s']:g} s)"
    if s["state"] == MOVING:
        moving = [
            f"{each['name']} ({number(each['value'])} {each['unit']})" for each in s["signals"] if each["settled_s"] is None
        ]
        return f"not steady after {minutes}: {', '.join(moving)}"
    before = f", before {number(s['tokens_per_s_before'], '.2f')}" if s["tokens_per_s_before"] else ""
    values = ", ".join(f"{each['name']} {number(each['value'])} {each['unit']}" for each in s["signals"])
    speed = f"decode {number(s['tokens_per_s_since'], '.2f')} tok/s{before}"
    return f"steady from second {s['since_s']:,.1f} on: {speed}; {values}"


def energy_lines(e: Section) -> list[Line]:
    """Energy per token by power rail, what disturbed its readings, and rails of which nothing is known."""
    lines: list[Line] = []
    for rail in e["rails"]:
        phases = [f"{name} {energy_text(figures)}" for name, figures in rail["phases"].items()]
        floor = f"; idle floor {rail['floor_watts']:.2f} W" if rail["floor_watts"] is not None else ""
        lines.append(words(("energy ", "bold"), f"{rail['rail']} ({rail['source']}): {', '.join(phases)}{floor}"))
        lines += model_lines(rail)
        odd = ", ".join(f"{DISTURBED[name]} {n}" for name, n in rail["disturbances"].items())
        lines += [words((f"{rail['rail']}, intervals between readings with {odd}", "yellow"))] if odd else []
    lines += [words((f"energy {row['rail']} ({row['source']}): {row['why']}", "yellow")) for row in e["untold"]]
    return lines


def model_lines(rail: Section) -> list[Line]:
    """What a rail's power depends on, if the readings show it, and a model of the energy of operators in the longest phase."""
    model, lines = rail["model"], list[Line]()
    kinds: dict[str, list[str]] = {}
    for term in model["terms"]:
        kinds.setdefault(term["where"] or "CPUs", []).append(f"{term['watts']:.2g} W in {term['phase']}")
    grows = [f"power grows with the clock{GROWTH[model['clock_power']]}"] if model["clock_power"] else []
    if grows or len(kinds) > 1:
        busy = [f"{where} {', '.join(watts)}" for where, watts in kinds.items()]
        lines.append(f"  a busy CPU adds: {'; '.join([*busy, *grows])}")
    for phase, rows in rail["operators"].items():
        if rail["phases"][phase]["seconds"] == max(one["seconds"] for one in rail["phases"].values()):
            named = ", ".join(f"{row['operator'] or row['part']} {row['share']:.0%}" for row in rows if row["share"] >= LEAST)
            lines.append(f"  {phase} by operator, a model that leaves {rail['residual']:.1%} of a reading: {named}")
    return lines


def energy_text(figures: Section) -> str:
    """A phase's energy per token with its interval."""
    if figures["j_per_token"] is None:
        return "not known"
    above = figures["above_floor_j_per_token"]
    rest = f", {above:.3g} above the floor" if above is not None else ""
    return f"{figures['j_per_token']:.3g} J/token ({figures['low']:.3g} to {figures['high']:.3g}{rest})"


def io_lines(i: Section) -> list[Line]:
    """Bytes by what moved them, and time waiting for I/O."""
    mib = {name: f"{i[name] / 2**20:,.1f} MiB" for name in ("read_bytes", "fault_bytes", "device_read_bytes")}
    calls = f"{counted(i['reads'], 'read call')} returned {mib['read_bytes']}"
    faults = f"{counted(i['major_faults'], 'major fault')} cached {mib['fault_bytes']}"
    device = f"devices read {mib['device_read_bytes']} in {counted(i['device_reads'], 'request')}"
    within = ", ".join(f"{share:.0%} in {name}" for name, share in i["shares"].items() if share and name != "tokens")
    waited = f"waited {i['waited_ms']:,.0f} ms" + (f" ({within})" if within else "")
    return [words(("I/O", "bold"), f": {calls}, {faults}"), f"{device}; {waited}"]


def loss_lines(answer: Section) -> list[Line]:
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
    fast = f"; {dropped_records:,} dropped with {dropped.get('tokens', 0):,} faster steps" if dropped else ""
    lines: list[Line] = [words(kept_text, (f"{lost:,} lost", "red" if lost else ""), fast)]
    first, *more = [*c["lines"], *pause] or [""]
    lines += [words(("tracing", "bold"), f": {first}"), *more] if first else []
    if c.get("advice"):
        lines.append(words((c["advice"], "yellow")))
    if s := r["sampling"]:
        slowdown = f"steps took {number(s['slowdown_while_on'], '.1%')} longer meanwhile; " if "slowdown_while_on" in s else ""
        on = f"costly levels were on for {number(s['share_on'], '.0%')} of the time"
        lines.append(f"{on}: {slowdown}limit {s['allowed']:.0%}")
    return [*lines, "incomplete: " + ", ".join(odd)] if odd else lines


def next_steps(answer: Section) -> list[Line]:
    """Where to look next."""
    return [words((f"moescope open {answer['run_dir']}", "bold"), " shows the timeline")]


PARTS: tuple[tuple[str, Callable[[Any], list[Line]]], ...] = (
    ("", heading_lines),
    ("", speed_lines),
    ("", time_lines),
    ("requests", served_lines),
    ("program", program_lines),
    ("", cost_lines),
    ("experts", expert_lines),
    ("npu", npu_lines),
    ("npu_queues", npu_queues),
    ("clocks", clock_lines),
    ("heat", heat_lines),
    ("energy", energy_lines),
    ("io", io_lines),
    ("", loss_lines),
    ("", next_steps),
)
"""(section that a part of the screen shows, omitted if that is empty; "" for several sections), in order."""
