"""`report.html`: one self-contained file about one recording. Sections decide what to show, static/report.js how."""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from analyzer.questions import ceilings
from views.report import (
    cache_sections,
    moe_sections,
    npu_section,
    operator_sections,
    overview,
    recording_sections,
    thread_sections,
    time_sections,
)
from views.report.page import write_page
from views.report.sections import Run, SectionMaker, Tables

SECTIONS: tuple[SectionMaker, ...] = (
    overview.overview_section,
    time_sections.phase_section,
    time_sections.step_section,
    operator_sections.operator_section,
    moe_sections.expert_section,
    cache_sections.cache_section,
    npu_section.npu_section,
    thread_sections.thread_section,
    recording_sections.recording_section,
    recording_sections.machine_section,
)


@cache
def plotly() -> bytes:
    """Plotly's own script, as its Python package ships it."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).encode()


def document(run: Run) -> dict[str, Any]:
    """Everything the page shows; sections with nothing to show are absent."""
    made = [section for make in SECTIONS if (section := make(run)) is not None]
    command = run.manifest.get("command") or []
    return {"title": " ".join(map(str, command)) or "recording", "sections": [asdict(section) for section in made]}


def write_report(manifest: dict[str, Any], tables: Tables, summary: dict[str, Any], path: Path) -> int:
    """Write the report; returns its size in bytes."""
    shown = document(Run(manifest, tables, summary, ceilings.load(manifest.get("machine") or {})))
    return write_page(path, "report", f"MoEScope: {shown['title']}", shown, {"plotly": plotly()})
