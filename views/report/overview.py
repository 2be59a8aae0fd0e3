"""The report's first section: where a step's time goes, figures of the run and its main costs."""

from typing import Any

from analyzer.questions.longest_span import RuleSpans, longest_span
from analyzer.records.manifest import command_of
from moescope.terminal import counted
from views.report.sections import Block, Run, Section, cards, note, pairs
from views.report.time_bars import step_bars

HIGH_SHARE = 0.1
SAVINGS = (
    "The bar is a cause's share of all steps' time; of other findings it is what the remedy would save, and these overlap. "
    'Run a query with: moescope query RUN "…". Links into the timeline need `moescope open RUN` to be running.'
)


def number_text(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A figure as text, or a dash if it was not measured."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"  # noqa: RUF001


def duration_text(ms: float | None, digits: int = 1) -> str:
    """A time as text in ms, or in seconds if it is long."""
    return number_text(ms, digits, " ms") if ms is None or ms < 10_000 else number_text(ms / 1e3, 2, " s")


def figure_cards(summary: dict[str, Any]) -> Block:
    """Speed, cache and completeness."""
    tokens, experts, npu = summary.get("tokens") or {}, summary.get("experts") or {}, summary.get("npu") or {}
    records, items = summary.get("records") or {}, []
    if tokens:
        tpot = tokens["tpot_ms"]
        items += [
            ("decode", number_text(tokens["decode_tokens_per_s"], 1, " tok/s"), counted(tokens["decode_steps"], "step")),
            ("TPOT, median", duration_text(tpot["median"], 2), f"p90 {duration_text(tpot['p90'], 2)}, n {tpot['n']}"),
            (
                "TTFT",
                duration_text(tokens["ttft_ms"]),
                f"{counted(tokens['prefill_tokens'], 'token')} fed in prefill" if tokens["prefill_tokens"] else "prefill",
            ),
            (
                "prefill",
                number_text(tokens["prefill_tokens_per_s"] or None, 1, " tok/s"),
                counted(tokens["generations"], "prompt"),
            ),
        ]
    if experts.get("hit_rate") is not None:
        items.append(("expert cache hits", number_text(100 * experts["hit_rate"], 1, " %"), f"{experts['misses']:,} misses"))
    if npu:
        items.append((str(npu["backend"] or "NPU"), duration_text(npu["ms"]), f"{npu['executes']:,} executions"))
    items += energy_cards(summary.get("energy") or {})
    lost = sum((records.get("lost") or {}).values())
    items.append(("records lost", f"{lost:,}", f"{sum((records.get('kept') or {}).values()):,} kept"))
    return cards(items)


def energy_cards(energy: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Energy per token by the rail that covers most."""
    rail: dict[str, Any] = next(iter(energy.get("rails") or []), {})
    return [
        (
            f"{phase}, energy per token",
            f"{1e3 * e['j_per_token']:,.4g} mJ",
            f"{rail['rail']}, {1e3 * e['low']:,.4g} to {1e3 * e['high']:,.4g}",
        )
        for phase, e in (rail.get("phases") or {}).items()
        if e["j_per_token"] is not None
    ]


def cost_findings(run: Run) -> Block | None:
    """The analyzer's findings with their shares, queries and longest moments, and failed executions."""
    items: list[Block] = []
    summary, spans = run.summary, RuleSpans(run.tables)
    failed = (summary.get("npu") or {}).get("failed")
    if failed:
        query = "select * from qnn_executes where complete and status <> 0"
        items.append({"level": "bad", "text": f"{counted(failed, 'execution')} failed on the NPU.", "query": query})
    for finding in summary.get("findings") or []:
        level = "warn" if finding["share"] >= HIGH_SHARE else "info"
        text = f"{finding['text']} ({duration_text(finding['ms'])})"
        moments = run.moments(longest_span(spans, finding["rule"], finding["evidence"]))
        item = {"level": level, "text": text, "share": min(finding["share"], 1.0), "query": finding["query"]}
        items.append(item | {"cause": finding["evidence"].get("cause")} | ({"at": moments[0]} if moments else {}))
    return {"kind": "findings", "title": "Main costs", "items": items} if items else None


def overview_section(run: Run) -> Section:
    """The picture of a step, summary and findings."""
    about = run.summary.get("recording") or {}
    about_pairs = [
        ("command", " ".join(command_of(run.manifest))),
        ("recorded", about.get("started_utc")),
        ("engines", ", ".join(about.get("engines") or [])),
    ]
    findings = cost_findings(run)
    blocks = [*step_bars(run), figure_cards(run.summary), *([findings, note(SAVINGS)] if findings else []), pairs(about_pairs)]
    return Section("summary", "Summary", blocks)
