"""The report's first and last sections: what to read first, and on what it was measured."""

from typing import Any

from views.sections import Block, Run, Section, axis, bytes_text, cards, chart, heads, label, note, pairs, table

PROBE_KEYS = ("program", "library", "symbol", "level", "at", "instruction", "why", "ns_per_hit", "hits")
PROBE_COLUMNS = heads(
    "text program, text library, text symbol, text level, text at, text instruction, text why, number ns per hit, bar hits"
)
LOW_HIT_RATE, HIGH_WAIT, HIGH_COST = 0.5, 0.2, 0.05


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A figure, or a dash where it was not measured."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"  # noqa: RUF001


def figures(summary: dict[str, Any]) -> Block:
    """Speed, cache and completeness."""
    tokens, experts, npu = summary.get("tokens") or {}, summary.get("experts") or {}, summary.get("npu") or {}
    records, items = summary.get("records") or {}, []
    if tokens:
        tpot = tokens["tpot_ms"]
        items += [
            ("decode", number(tokens["decode_tokens_per_s"], 1, " tok/s"), f"{tokens['decode_steps']} steps"),
            ("TPOT, median", number(tpot["median"], 2, " ms"), f"p90 {number(tpot['p90'], 2, ' ms')}, n {tpot['n']}"),
            (
                "TTFT",
                number(tokens["ttft_ms"], 1, " ms"),
                f"{tokens['prefill_tokens']} tokens fed in prefill" if tokens["prefill_tokens"] else "prefill",
            ),
            ("prefill", number(tokens["prefill_tokens_per_s"] or None, 1, " tok/s"), f"{tokens['generations']} generation(s)"),
        ]
    if experts.get("hit_rate") is not None:
        items.append(("expert cache hits", number(100 * experts["hit_rate"], 1, " %"), f"{experts['misses']:,} misses"))
    if npu:
        items.append((str(npu["backend"] or "NPU"), number(npu["ms"], 1, " ms"), f"{npu['executes']:,} executions"))
    lost = sum((records.get("lost") or {}).values())
    items.append(("records lost", f"{lost:,}", f"{sum((records.get('kept') or {}).values()):,} kept"))
    return cards(items)


def completeness(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Findings about the recording itself."""
    records, about, found = summary.get("records") or {}, summary.get("recording") or {}, []
    lost = records.get("lost") or {}
    if lost:
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in lost.items())
        found.append(("bad", f"{sum(lost.values()):,} records were lost ({kinds}): sums are too low."))
    dropped = records.get("dropped") or {}
    if dropped:
        limit, fast = number((dropped.get("slower_than_ns") or 0) / 1e6, 1, " ms"), dropped.get("tokens") or 0
        found.append(("warn", f"Only tokens slower than {limit} were kept: {fast:,} faster ones are missing from every figure."))
    if records.get("level_changes"):
        found.append(("warn", "Levels were switched off while decode was slow: their figures do not cover the whole time."))
    if about.get("state") == "recording":
        found.append(("warn", "The recording was not finished: it shows what had reached the disk."))
    loose = records.get("ends_without_begin") or {}
    if loose:
        found.append(("warn", "Ends without a begin: " + ", ".join(f"{k} {n:,}" for k, n in loose.items()) + "."))
    opened = records.get("begins_without_end") or {}
    if opened:
        found.append(("warn", "Begins without an end: " + ", ".join(f"{k} {n:,}" for k, n in opened.items()) + "."))
    share = (summary.get("cost") or {}).get("share_of_target_cpu")
    if share is not None:
        found.append(("warn" if share > HIGH_COST else "good", f"Tracing took {100 * share:.2f} % of the program's CPU time."))
    emulated = (summary.get("machine") or {}).get("emulated") or []
    if emulated:
        found.append(("warn", f"{', '.join(emulated)}: results are exact, its times and cycles are not a device's."))
    return found


def performance(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Findings about the program."""
    tokens, experts, npu = summary.get("tokens") or {}, summary.get("experts") or {}, summary.get("npu") or {}
    found = []
    top = (summary.get("operators") or {}).get("top") or []
    if top:
        found.append(("info", f"{top[0]['type']} takes {100 * top[0]['share']:.0f} % of all operator time."))
    waiting = [row for row in top if row["wait_share"] > HIGH_WAIT and row["share"] > 0.05]
    text = "In {} the threads wait for each other {:.0f} % of their time."
    found += [("warn", text.format(row["type"], 100 * row["wait_share"])) for row in waiting[:3]]
    rate = experts.get("hit_rate")
    if rate is not None:
        level = "warn" if rate < LOW_HIT_RATE else "info"
        demand = (experts.get("loads") or {}).get("demand") or {"loads": 0, "ms": 0.0}
        found.append(
            (level, f"The expert cache hits {100 * rate:.1f} %; {demand['loads']:,} loads on demand took {demand['ms']:,.1f} ms.")
        )
    if tokens.get("major_faults"):
        found.append(("warn", f"Major page faults: {tokens['major_faults']:,}. Memory was read from disk during steps."))
    if npu.get("failed"):
        found.append(("bad", f"{npu['failed']:,} executions on the NPU failed."))
    return found


def overview(run: Run) -> Section:
    """Summary and findings."""
    about = run.summary.get("recording") or {}
    command = run.manifest.get("command") or []
    blocks = [
        pairs(
            [
                ("command", " ".join(map(str, command))),
                ("recorded", about.get("started_utc")),
                ("engines", ", ".join(about.get("engines") or [])),
            ]
        ),
        figures(run.summary),
        {
            "kind": "findings",
            "items": [{"level": level, "text": text} for level, text in (*performance(run.summary), *completeness(run.summary))],
        },
    ]
    shares = {phase: groups for phase, groups in (run.summary.get("phases") or {}).items() if groups}
    if shares:
        blocks.append(phase_chart(shares))
    return Section("summary", "Summary", blocks)


def phase_chart(shares: dict[str, dict[str, float]]) -> Block:
    """Milliseconds per step by operator group, one bar per phase."""
    names = list(dict.fromkeys(key for groups in shares.values() for key in groups if key != "total"))
    ranked = sorted(names, key=lambda key: -max(float(groups.get(key) or 0) for groups in shares.values()))
    traces = []
    for slot, name in enumerate(ranked):
        parts = [100 * float(groups.get(name) or 0) / max(float(groups.get("total") or 0), 1e-12) for groups in shares.values()]
        told = [f"{float(groups.get(name) or 0):.3f} ms" for groups in shares.values()]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label(name),
                "x": parts,
                "y": [label(p or "unknown") for p in shares],
                "slot": slot,
                "text": told,
                "textposition": "none",
                "hovertemplate": "%{fullData.name}: %{x:.1f} %, %{text}<extra></extra>",
            }
        )
    remark = "Shares of a mean step. Residual is time in no recorded operator."
    return chart(
        "Where a step's time goes, by phase", traces, remark, 130 + 50 * len(shares), barmode="stack", xaxis=axis("% of a step")
    )


def machine(run: Run) -> Section:
    """Machine, probes, records and what tracing cost."""
    manifest = run.manifest
    described, npu = manifest.get("machine") or {}, (run.summary.get("machine") or {}).get("npu")
    memory = described.get("memory_bytes")
    libraries = [
        f"{lib.get('path')} {lib.get('build_id') or ''}"
        for e in (manifest.get("engines") or {}).values()
        for lib in e.get("libraries") or []
    ]
    blocks = [
        pairs(
            [
                ("CPU", described.get("cpu_model")),
                ("architecture", described.get("arch")),
                ("CPUs", described.get("cpus")),
                ("memory", bytes_text(memory) if memory else None),
                ("kernel", described.get("kernel")),
                ("system", described.get("os")),
                ("NPU", npu),
                ("written by", manifest.get("program")),
                ("loader", manifest.get("loader")),
                ("levels", ", ".join(manifest.get("levels") or [])),
                ("libraries", ", ".join(libraries)),
            ]
        ),
    ]
    times = {name: value for name, value in (manifest.get("cost") or {}).items() if name.endswith("_ns")}
    cost = [(name.replace("_ns", " ms").replace("_", " "), value) for name, value in times.items()]
    if cost:
        blocks.append(pairs([(name, number(value / 1e6, 2)) for name, value in cost if isinstance(value, int | float)]))
    probes = [[probe.get(key) for key in PROBE_KEYS] for probe in manifest.get("probes") or []]
    if probes:
        blocks.append(table(PROBE_COLUMNS, probes, "Probes"))
    kept, lost = manifest.get("records") or {}, manifest.get("lost") or {}
    rows = [[kind, kept.get(kind, 0), lost.get(kind, 0)] for kind in sorted({*kept, *lost})]
    if rows:
        blocks.append(table(heads("text record, number kept, number lost"), rows, "Records"))
    blocks.append(note("Losses are counted in the kernel, exactly."))
    return Section("machine", "Machine, probes, losses", blocks)
