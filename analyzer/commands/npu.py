"""Show what the NPU did: graphs, experts, node cycles, stages, idle time, and consistency checks of QNN's numbers.

examples:
  moescope npu recordings/run-1
  moescope npu recordings/run-1 --op-map trace/op_trace.json --json | jq .types

Exit code 1: a relation that QNN's numbers must keep is broken, or events joined no execution.
"""

import argparse
from pathlib import Path
from typing import Any

from analyzer.commands._show import number, shorten_name
from analyzer.imports.opmap import read_op_map
from analyzer.questions.npu_figures import npu_statistics
from analyzer.questions.summary import machine_summary
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_run
from moescope.terminal import Line, console, counted, grid, words
from tracer.recording.format import Recording

Facts = dict[str, Any]
MOST = 12


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "--op-map",
        metavar="FILE",
        type=Path,
        help="ONNX Runtime's framework op trace, which maps QNN ops to the model's operators",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compute and print."""
    recording = Recording(args.run_dir)
    facts = npu_statistics(load_tables(args.run_dir), read_op_map(args.op_map) if args.op_map else {})
    facts = {"backend": machine_summary(recording.manifest)["npu"], **facts}
    broken = bool(facts["findings"]) or facts["unjoined_events"] > 0
    if print_if_json(args, facts):
        return int(broken)
    screen = console()
    for part in (
        heading_line,
        print_graphs,
        print_experts,
        types_of_nodes,
        genie_table,
        contexts_and_stages,
        idle_line,
        check_lines,
    ):
        for line in part(facts):
            screen.print(line)
    return int(broken)


def heading_line(facts: Facts) -> list[Line]:
    """The backend, and the numbers of executions and events."""
    levels = ", ".join(f"{count} {name}" for name, count in facts["levels"].items())
    loose = f"{facts['events']:,} events, {facts['unjoined_events']} unjoined"
    failed = f", {facts['failed']:,} failed" if facts["failed"] else ""
    counts = f" {facts['executes']:,} executes{failed} (profile: {levels or 'none'}); {loose}"
    return [words((facts["backend"] or "QNN", "bold"), counts), *queue_line(facts["queue"])]


def queue_line(queue: Facts) -> list[Line]:
    """Asynchronous executions."""
    if not queue:
        return []
    flight = f"{queue['executes']:,} executes, in flight at most {queue['most_in_flight']}"
    mean = f" (mean {queue['mean_in_flight']:.1f})" if queue["executes"] else ""
    times = f"behind others {queue['behind_ms']:,.1f} ms, apart from that {queue['own_ms']:,.1f} ms"
    return [f"asynchronous: {flight}{mean}; {times}" + (f"; {queue['rejected']} rejected" if queue["rejected"] else "")]


def figure_cells(row: Facts) -> tuple[str, ...]:
    """The cells of a group of executions."""
    ms = (number(value / 1e3 if value is not None else None, ",.2f") for value in (row["host_us"], row["accel_us"]))
    us = (number(row[name], ",.0f") for name in ("median_us", "first_us", "cycles"))
    return (f"{row['executes']:,}", *ms, *us, number(row["rpc_share"], ".1%"))


HEADS = ("executes", "host ms", "accel ms", "median µs", "first µs", "cycles", "outside accel")


def print_graphs(facts: Facts) -> list[Line]:
    """Figures by graph."""
    rows = [(shorten_name(row["graph"], 32), *figure_cells(row)) for row in facts["graphs"][:MOST]]
    return [grid("graph", *HEADS, rows=rows)] if rows else []


def print_experts(facts: Facts) -> list[Line]:
    """Figures by expert."""
    rows = [(f"layer {row['layer']} expert {row['expert']}", *figure_cells(row)) for row in facts["experts"][:MOST]]
    return [grid("expert", *HEADS, rows=rows)] if rows else []


def types_of_nodes(facts: Facts) -> list[Line]:
    """Figures by type of node."""
    types = facts["types"][:MOST]
    rows = [(shorten_name(t["type"], 32), f"{t['runs']:,}", f"{t['cycles']:,.0f}", f"{t['share']:.1%}") for t in types]
    return [grid("node type", "runs", "cycles", "share", rows=rows)] if rows else []


def stage_counts(row: Facts) -> str:
    """How often a host stage ran, and how many have no known end."""
    return f"{row['count']}, {row['unended']} without an end" if row["unended"] else f"{row['count']}"


def contexts_and_stages(facts: Facts) -> list[Line]:
    """Contexts and host stages."""
    c = facts["contexts"]
    lines: list[Line] = []
    if c["loads"]:
        lines.append(f"contexts: {c['loads']} loaded from {c['load_bytes'] / 2**20:,.2f} MiB in {c['load_ms']:,.1f} ms")
    if c["finalizes"]:
        lines.append(f"finalized: {counted(c['finalizes'], 'graph')} in {c['finalize_ms']:,.1f} ms")
    stages = [f"{name} {row['ms']:,.1f} ({stage_counts(row)})" for name, row in facts["stages"].items()]
    return [*lines, f"host stages, ms: {', '.join(stages)}"] if stages else lines


def genie_table(facts: Facts) -> list[Line]:
    """What Genie's own profile says of its calls."""
    names = ("prompt_tokens", "prompt_tokens_s", "generated_tokens", "generated_tokens_s")
    rows = []
    for row in facts["genie"][:MOST]:
        figures = (number(row[name], ",.1f" if name.endswith("_s") else ",.0f") for name in names)
        rows.append((f"{row['component']} {row['type']}", f"{row['calls']:,}", number(row["ttft_us"], ",.0f"), *figures))
    heads = ("calls", "median TTFT µs", "prompt tokens", "tokens/s", "generated", "tokens/s")
    return [grid("Genie's own figures", *heads, rows=rows)] if rows else []


def idle_line(facts: Facts) -> list[Line]:
    """The NPU's idle time, and the CPU's work at the same time."""
    i, o = facts["idle"], facts["overlap"]
    lines: list[Line] = []
    if i["gaps"]:
        states = ", ".join(f"{name} {i[f'{name}_ms']:,.1f}" for name in ("running", "runnable", "sleeping", "waiting"))
        lines.append(f"NPU idle {i['ms']:,.1f} ms in {i['gaps']} gaps; state of the submitting thread, ms: {states}")
        lines.append("idle during, ms: " + ", ".join(f"{name} {ms:,.1f}" for name, ms in i["doing_ms"].items()))
    if o:
        parts = (("both", "both"), ("NPU only", "npu_only"), ("CPU only", "cpu_only"), ("none", "none"))
        shares = ", ".join(f"{name} {o[f'{key}_ms']:,.1f}" for name, key in parts)
        lines.append(f"busy from first to last execute ({o['window_ms']:,.1f} ms): {shares}")
    return lines


def check_lines(facts: Facts) -> list[Line]:
    """Results of the consistency checks."""
    rows = [
        (row["check"], f"{row['looked_at']:,}", f"{row['broken']:,}", f"{row['residual']:,.0f} {row['unit']}")
        for row in facts["closure"]
    ]
    table = [grid("must hold", "looked at", "broken", "residual", rows=rows)] if rows else []
    return [*table, *(words((text, "yellow")) for text in facts["findings"][:MOST])]
