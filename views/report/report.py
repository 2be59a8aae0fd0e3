"""`report.html`: one self-contained file about one recording. Sections select the content, static/report.js draws it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from analyzer.questions import ceilings
from analyzer.records.manifest import command_of
from analyzer.records.schema import Tables
from analyzer.records.stamps import recording_stamp
from views.report import energy, expert_cache, heat, moe, npu, npu_queues, operators, overview, recording, stacks, threads, timing
from views.report.sections import Run, Section, write_sections

SECTIONS: tuple[Callable[[Run], Section | None], ...] = (
    overview.overview_section,
    timing.time_section,
    timing.step_section,
    heat.heat_section,
    operators.operator_section,
    moe.expert_section,
    expert_cache.cache_section,
    npu.npu_section,
    npu_queues.queue_section,
    energy.energy_section,
    threads.thread_section,
    stacks.stack_section,
    recording.recording_section,
    recording.machine_section,
)


def page_title(manifest: dict[str, Any]) -> str:
    """The title: the model's name, else the program's."""
    known = [manifest.get("model") or {}, *(manifest.get("models") or [])]
    paths = [*(str(each["path"]) for each in known if each.get("path")), *command_of(manifest)[:1]]
    return f"Recording of {Path(paths[0]).name}" if paths else "Recording"


def write_report(manifest: dict[str, Any], tables: Tables, summary: dict[str, Any], path: Path) -> int:
    """Write the report; returns its size in bytes."""
    run = Run(manifest, tables, summary, ceilings.ceilings_for(manifest))
    command, document = " ".join(command_of(manifest)), {"title": page_title(manifest)}
    return write_sections(path, command or "recording", document, [make(run) for make in SECTIONS], recording_stamp(manifest))
