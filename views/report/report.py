"""`report.html`: one self-contained file about one recording. Sections select the content, static/report.js draws it."""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from analyzer.questions import ceilings
from analyzer.records.manifest import command_of
from analyzer.records.stamps import stamp
from views.report import expert_cache, ledger, moe, npu, npu_queues, operators, overview, recording, threads, timing
from views.report.page import write_page
from views.report.sections import Run, SectionMaker, Tables

SECTIONS: tuple[SectionMaker, ...] = (
    overview.overview_section,
    ledger.ledger_section,
    timing.phase_section,
    timing.step_section,
    operators.operator_section,
    moe.expert_section,
    expert_cache.cache_section,
    npu.npu_section,
    npu_queues.queue_section,
    threads.thread_section,
    recording.recording_section,
    recording.machine_section,
)


@cache
def plotly() -> bytes:
    """Plotly's script from its Python package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).encode()


def title(manifest: dict[str, Any]) -> str:
    """The title: the model's name, else the program's."""
    known = [manifest.get("model") or {}, *(manifest.get("models") or [])]
    paths = [*(str(each["path"]) for each in known if each.get("path")), *command_of(manifest)[:1]]
    return f"Recording of {Path(paths[0]).name}" if paths else "Recording"


def document(run: Run) -> dict[str, Any]:
    """The page's data; sections without content are absent."""
    sections = [section for make in SECTIONS if (section := make(run)) is not None]
    return {
        "title": title(run.manifest),
        "command": " ".join(command_of(run.manifest)),
        "sections": [asdict(section) for section in sections],
    }


def write_report(manifest: dict[str, Any], tables: Tables, summary: dict[str, Any], path: Path) -> int:
    """Write the report; returns its size in bytes."""
    content = document(Run(manifest, tables, summary, ceilings.load(manifest)))
    title = f"MoEScope: {content['command'] or 'recording'}"
    return write_page(path, "report", title, content, {"plotly": plotly()}, stamp(manifest))
