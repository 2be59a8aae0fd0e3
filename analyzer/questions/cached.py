"""The summary of a recording, cached beside its tables, so that it is read without loading a table."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from analyzer.records.stamps import INPUTS, stat_of
from tracer.recording.format import Recording, is_whole, sealed

PACKAGE = Path(__file__).resolve().parents[1]


def stamp(folder: Path, roof: Path) -> dict[str, Any]:
    """The inputs of a summary: the recording, the ceilings of this machine, and this program."""
    code = [stat_of(path) or [0, 0] for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml")])]
    return {
        "files": [stat_of(folder / name) for name in INPUTS],
        "ceilings": stat_of(roof),
        "code": [len(code), sum(size for size, _ in code), max(time for _, time in code)],
    }


def summary(run_dir: Path) -> dict[str, Any]:
    """summary.summarize of a recording, from RUN/tables/summary.json if that is up to date."""
    from analyzer.questions.ceilings import cache_file

    path, now = run_dir / "tables" / "summary.json", stamp(run_dir, cache_file())
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        cached = json.loads(path.read_text())
        if cached["stamp"] == now and now["files"][0] and is_whole(cached):
            return dict(cached["summary"])
    figures = fresh(run_dir)
    with contextlib.suppress(OSError):  # a read-only recording is summarised every time
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(sealed({"stamp": now, "summary": figures})))
        os.replace(temporary, path)
    return figures


def fresh(run_dir: Path) -> dict[str, Any]:
    """The summary computed from the tables."""
    from analyzer.jsonable import plain
    from analyzer.questions.summary import NEEDED, summarize
    from analyzer.records.reading import Source
    from analyzer.tables.store import load

    source = Source(Recording(run_dir))
    return dict(plain(summarize(source.recording, load(run_dir, NEEDED, source), source)))
