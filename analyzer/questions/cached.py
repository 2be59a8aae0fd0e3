"""The summary of a recording, cached beside its tables, so that it is read without loading a table."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzer.records.stamps import INPUTS, stat_of
from moescope.scratch import replaced_file
from tracer.recording.format import Recording, is_whole, with_checksum

if TYPE_CHECKING:
    from analyzer.records.reading import Source

PACKAGE = Path(__file__).resolve().parents[1]


def summary_stamp(folder: Path, roof: Path) -> dict[str, Any]:
    """The inputs of a summary: the recording, the ceilings of this machine, and this program."""
    code = [stat_of(path) or [0, 0] for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml")])]
    return {
        "files": [stat_of(folder / name) for name in INPUTS],
        "ceilings": stat_of(roof),
        "code": [len(code), sum(size for size, _ in code), max(time for _, time in code)],
    }


def cached_summary(run_dir: Path) -> dict[str, Any]:
    """summary.summarize of a recording, from RUN/tables/summary.json if that is up to date."""
    from analyzer.questions.ceilings import cache_file

    path, now = run_dir / "tables" / "summary.json", summary_stamp(run_dir, cache_file())
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        cached = json.loads(path.read_text())
        if cached["stamp"] == now and now["files"][0] and is_whole(cached):
            return dict(cached["summary"])
    from analyzer.questions.summary import NEEDED
    from analyzer.records.reading import Source
    from analyzer.tables.store import load_tables

    source = Source(Recording(run_dir))
    return store_summary(run_dir, source.recording, load_tables(run_dir, NEEDED, source), source)[1]


def store_summary(
    run_dir: Path, recording: Recording, tables: Mapping[str, Any], source: "Source | None" = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """summary.summarize of a recording's tables, and the same as JSON has it, which is written beside them."""
    from analyzer.questions.ceilings import cache_file
    from analyzer.questions.summary import summarize
    from moescope.answers import json_value

    now = summary_stamp(run_dir, cache_file())
    figures = summarize(recording, tables, source)
    written = dict(json_value(figures))
    with contextlib.suppress(OSError), replaced_file(run_dir / "tables" / "summary.json") as file:  # not in a read-only recording
        file.write_text(json.dumps(with_checksum({"stamp": now, "summary": written})))
    return figures, written
