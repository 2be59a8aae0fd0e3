"""The report's last sections: completeness and cost of the recording; machine and probes."""

from typing import Any

from analyzer.records.observed import known_changes
from views.report.overview import number_text
from views.report.sections import Block, Run, Section, bytes_text, note, pairs, table

PROBE_KEYS = ("program", "library", "symbol", "level", "at", "instruction", "why", "ns_per_hit", "hits")
PROBE_COLUMNS = (
    "text program, text library, text symbol, text level, text at, text instruction, text why, number ns per hit, bar hits"
)
MISSING = (
    ("Ends without a begin", "ends_without_begin"),
    ("Begins without an end", "begins_without_end"),
    ("Events skipped by the kernel", "skipped"),
)


def missing_parts(run: Run) -> list[tuple[str, str]]:
    """Remarks on what is missing from the recording, as (level, text)."""
    summary = run.summary
    records, about = summary.get("records") or {}, summary.get("recording") or {}
    remarks = [("warn", text) for key in ("missing", "warnings") for text in summary.get(key) or []]
    lost = records.get("lost") or {}
    if lost:
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in lost.items())
        remarks.append(("bad", f"{sum(lost.values()):,} records were lost ({kinds}): sums are too low."))
    dropped = records.get("dropped") or {}
    if dropped:
        limit, fast = number_text((dropped.get("slower_than_ns") or 0) / 1e6, 1, " ms"), dropped.get("tokens") or 0
        remarks.append(("warn", f"Only steps slower than {limit} were kept: {fast:,} faster ones are missing from every figure."))
    if about.get("state") == "recording":
        remarks.append(("warn", "The recording was not finished: it contains what had been written to disk."))
    for title, key in MISSING:
        if records.get(key):
            remarks.append(("warn", f"{title}: " + ", ".join(f"{kind} {n:,}" for kind, n in records[key].items()) + "."))
    emulated = (summary.get("machine") or {}).get("emulated") or []
    if emulated:
        remarks.append(("warn", f"{', '.join(emulated)}: results are exact, its times and cycles are not those of a device."))
    return remarks


def sampling_notes(run: Run) -> list[tuple[str, str]]:
    """Remarks on costly levels that were recorded only part of the time, and on the cost of recording them."""
    sampling = run.manifest.get("sampling")
    if not isinstance(sampling, dict):
        if known_changes(run.manifest.get("level_changes")):
            return [("warn", "Levels were switched off while decode was slow: their figures do not cover the whole time.")]
        return []
    share, slowdown, allowed = (sampling.get(key) for key in ("share_on", "slowdown_while_on", "allowed"))
    covered = f"Operators and the levels below were recorded for {number_text(100 * (share or 0), 1)} % of the time only"
    limit = f"recording was allowed to slow decode down by {number_text(100 * (allowed or 0), 0)} %"
    text = f"{covered}: {limit}. Other steps have no operators, and sums over operators cover only that part."
    if slowdown is None:
        return [("warn", text), ("info", "The cost of recording is unknown: too few windows with and without it.")]
    cost = f"While they were recorded a decode step took {100 * slowdown:.1f} % longer than the steps before and after"
    overall = slowdown * (share or 0) / (1 + slowdown * (1 - (share or 0)))
    return [("warn", text), ("info", f"{cost}; over the whole run recording cost about {100 * overall:.1f} %.")]


def cost_text(run: Run) -> list[tuple[str, str]]:
    """What tracing cost, in the words of the summary."""
    told = run.summary.get("cost") or {}
    return [("warn" if told.get("notable") else "good", f"Tracing: {'; '.join(told['lines'])}.")] if told.get("lines") else []


def level_changes(run: Run) -> list[Block]:
    """Levels that were switched off and on again."""
    start = (run.manifest.get("clocks") or [{}])[0].get("monotonic_ns", 0)
    rows = []
    for row in known_changes(run.manifest.get("level_changes")):
        seconds = (row["ts_ns"] - start) / 1e9
        cells = [str(row.get("level")), "on" if row.get("on") else "off", row.get("tps")]
        rows.append([seconds, *cells, str(row.get("why") or ""), [row["ts_ns"] + run.boot_ns, 0]])
    columns = "number s, text level, text switched, number tok/s, text why, moment in the timeline"
    return [table(columns, rows, "Levels switched")] if rows else []


def recording_section(run: Run) -> Section:
    """Losses, sampling and cost."""
    manifest = run.manifest
    remarks = [*missing_parts(run), *sampling_notes(run), *cost_text(run)] or [("good", "The recording is complete.")]
    blocks: list[Block] = [{"kind": "findings", "items": [{"level": level, "text": text} for level, text in remarks]}]
    blocks += level_changes(run)
    kept, lost = manifest.get("records") or {}, manifest.get("lost") or {}
    rows = [[kind, kept.get(kind, 0), lost.get(kind, 0)] for kind in sorted({*kept, *lost})]
    if rows:
        blocks.append(table("text record, number kept, number lost", rows, "Records"))
    blocks.append(note("The kernel counts every loss."))
    return Section("recording", "Losses, sampling, cost", blocks)


def machine_section(run: Run) -> Section:
    """Machine, libraries and probes."""
    manifest: dict[str, Any] = run.manifest
    described, npu = manifest.get("machine") or {}, (run.summary.get("machine") or {}).get("npu")
    memory, roof = described.get("memory_bytes"), run.ceilings
    libraries = [
        f"{lib.get('path')} {lib.get('build_id') or ''}"
        for e in (manifest.get("engines") or {}).values()
        for lib in e.get("libraries") or []
    ]
    speed = roof and ", ".join(
        f"{n} thread(s) {roof.of(n)[0] / 1e9:,.1f} GB/s and {roof.of(n)[1] / 1e9:,.0f} GFLOP/s" for n in sorted({1, roof.cpus})
    )
    items = [
        ("CPU", described.get("cpu_model")),
        ("architecture", described.get("arch")),
        ("CPUs", described.get("cpus")),
        ("memory", bytes_text(memory) if memory else None),
        ("measured ceilings", speed),
        ("kernel", described.get("kernel")),
        ("system", described.get("os")),
        ("NPU", npu),
        ("written by", manifest.get("program")),
        ("loader", manifest.get("loader")),
        ("levels", ", ".join(manifest.get("levels") or [])),
        ("libraries", ", ".join(libraries)),
    ]
    blocks = [pairs(items)]
    placed = sorted(manifest.get("probes") or [], key=lambda probe: -(probe.get("hits") or 0))
    probes = [[probe.get(key) for key in PROBE_KEYS] for probe in placed]
    if probes:
        blocks.append(table(PROBE_COLUMNS, probes, "Probes"))
    return Section("machine", "Machine and probes", blocks)
