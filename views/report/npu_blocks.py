"""The report's other blocks on the NPU: failed consistency checks, experts, idle time, host stages."""

from typing import Any

from analyzer.questions.npu_figures import npu_statistics
from analyzer.records.schema import Tables
from views.report.sections import Block, bytes_text, note, pairs, table

Facts = dict[str, Any]
FIGURES = "number executions, bar host ms, number accelerator ms, number median µs, number first µs, number cycles"
MOST_FINDINGS = 20
UNITS = {"us": "µs"}


def check_tables(facts: Facts) -> list[Block]:
    """The consistency checks of QNN's numbers, and their violations."""
    broken = [{"level": "bad", "text": text} for text in facts["findings"][:MOST_FINDINGS]]
    if facts["unjoined_events"]:
        broken.append({"level": "warn", "text": f"{facts['unjoined_events']:,} profile events are not attributed to a call"})
    rows = [[r["check"], r["looked_at"], r["broken"], r["residual"], UNITS.get(r["unit"], r["unit"])] for r in facts["closure"]]
    columns = "text must hold, number looked at, number broken, number residual, text unit"
    blocks: list[Block] = [{"kind": "findings", "items": broken}] if broken else []
    return [*blocks, table(columns, rows, "Consistency checks")] if rows else blocks


def by_expert(facts: Facts) -> list[Block]:
    """Executions and cycles of each expert."""
    figures = ("executes", "host_ms", "accel_ms", "median_us", "first_us", "cycles")
    timed = [r | {"host_ms": r["host_us"] / 1e3, "accel_ms": (r["accel_us"] or 0) / 1e3} for r in facts["experts"]]
    rows = [[r["layer"], r["expert"], *(r[name] for name in figures)] for r in timed]
    return [table(f"number layer, number expert, {FIGURES}", rows, "By expert")] if rows else []


def idle_tables(facts: Facts) -> list[Block]:
    """The NPU's idle time and the CPU's work at the same time."""
    idle, overlap, contexts = facts["idle"], facts["overlap"], facts["contexts"]
    items: list[tuple[str, Any]] = []
    if overlap:
        both = {"both busy": "both", "NPU only": "npu_only", "CPU only": "cpu_only", "none": "none"}
        items += [(f"CPU and NPU: {name}", f"{overlap[f'{key}_ms']:,.1f} ms") for name, key in both.items()]
    if idle["gaps"]:
        items.append(("NPU idle between executions", f"{idle['ms']:,.1f} ms in {idle['gaps']:,} gaps"))
        items += [(f"idle, its thread {name}", f"{idle[f'{name}_ms']:,.1f} ms") for name in ("running", "runnable", "sleeping")]
    if contexts["loads"]:
        items.append(("contexts loaded", f"{bytes_text(contexts['load_bytes'])} in {contexts['load_ms']:,.1f} ms"))
    return [pairs(items)] if items else []


def stage_table(facts: Facts) -> list[Block]:
    """Host stages."""
    rows = [
        [name, row["count"], row["unended"], row["ms"], 1e3 * row["ms"] / max(row["count"] - row["unended"], 1)]
        for name, row in facts["stages"].items()
    ]
    columns = "text stage, number times, number without an end, bar total ms, number mean µs"
    return [table(columns, rows, "Host's stages in ONNX Runtime's QNN provider")] if rows else []


def npu_blocks(tables: Tables) -> list[Block]:
    """All blocks of this module."""
    facts = npu_statistics(tables)
    parts = [*check_tables(facts), *idle_tables(facts), *by_expert(facts), *stage_table(facts)]
    if not facts["closure"] and facts["executes"]:
        parts.append(note("No profile was made at detailed level: QNN's own times are unknown."))
    return parts
