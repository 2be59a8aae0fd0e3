"""The report's first section: where a step's time goes, figures of the run and its main costs."""

from typing import Any

from analyzer.questions.longest_span import Spans, longest_span
from analyzer.records.manifest import command_of
from views.report.sections import Block, Run, Section, cards, note, pairs
from views.report.time_bars import step_bars

HIGH_SAVING = 0.1
SAVINGS = (
    "The bar is the estimated saving: the time that the remedy would save, as a share of all steps' time; savings overlap. "
    'Run a query with: python -m analyzer query RUN "…". Links into the timeline need `python -m views open RUN` to be running.'
)


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A figure as text, or a dash if it was not measured."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"  # noqa: RUF001


def lasting(ms: float | None, digits: int = 1) -> str:
    """A time as text in ms, or in seconds if it is long."""
    return number(ms, digits, " ms") if ms is None or ms < 10_000 else number(ms / 1e3, 2, " s")


def figures(summary: dict[str, Any]) -> Block:
    """Speed, cache and completeness."""
    tokens, experts, npu = summary.get("tokens") or {}, summary.get("experts") or {}, summary.get("npu") or {}
    records, items = summary.get("records") or {}, []
    if tokens:
        tpot = tokens["tpot_ms"]
        items += [
            ("decode", number(tokens["decode_tokens_per_s"], 1, " tok/s"), f"{tokens['decode_steps']} steps"),
            ("TPOT, median", lasting(tpot["median"], 2), f"p90 {lasting(tpot['p90'], 2)}, n {tpot['n']}"),
            (
                "TTFT",
                lasting(tokens["ttft_ms"]),
                f"{tokens['prefill_tokens']} tokens fed in prefill" if tokens["prefill_tokens"] else "prefill",
            ),
            (
                "prefill",
                number(tokens["prefill_tokens_per_s"] or None, 1, " tok/s"),
                f"{tokens['generations']} prompt{'s' * (tokens['generations'] != 1)}",
            ),
        ]
    if experts.get("hit_rate") is not None:
        items.append(("expert cache hits", number(100 * experts["hit_rate"], 1, " %"), f"{experts['misses']:,} misses"))
    if npu:
        items.append((str(npu["backend"] or "NPU"), lasting(npu["ms"]), f"{npu['executes']:,} executions"))
    lost = sum((records.get("lost") or {}).values())
    items.append(("records lost", f"{lost:,}", f"{sum((records.get('kept') or {}).values()):,} kept"))
    return cards(items)


def cost_findings(run: Run) -> Block | None:
    """The analyzer's findings with their estimated savings, queries and longest moments, and failed executions."""
    items: list[Block] = []
    summary, spans = run.summary, Spans(run.tables)
    failed = (summary.get("npu") or {}).get("failed")
    if failed:
        query = "select * from qnn_executes where complete and status <> 0"
        items.append({"level": "bad", "text": f"{failed:,} executions on the NPU failed.", "query": query})
    for finding in summary.get("findings") or []:
        level = "warn" if finding["saving_share"] >= HIGH_SAVING else "info"
        text = f"{finding['text']} ({lasting(finding['saving_ms'])})"
        moments = run.moments(longest_span(spans, finding["rule"], finding["evidence"]))
        item = {"level": level, "text": text, "saving": min(finding["saving_share"], 1.0), "query": finding["query"]}
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
    blocks = [*step_bars(run), figures(run.summary), *([findings, note(SAVINGS)] if findings else []), pairs(about_pairs)]
    return Section("summary", "Summary", blocks)
