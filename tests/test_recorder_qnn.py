"""The NPU by moescope-recorder alone: QNN's function table, events and serialized logs, as the Python tracer has them."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from analyzer.tables import store
from tests.conftest import RECORDER, ROOT, DemoRun, trace
from tests.test_recorder import SITES
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes", "htp", "recorder")
PROGRAM = str(ROOT / "workloads" / "programs" / "plain_qnn.py")
EVENT = ["type", "unit", "name", "depth"]
SAME = {
    "tokens": ["n_tokens", "phase", "position", "result", "complete"],
    "graphs": ["token_id", "kind", "layer", "expert", "backend", "tier", "n_tokens", "status"],
    "operators": ["token_id", "type", "name", "layer", "expert", "n_tokens"],
    "routes": ["token_id", "layer", "row", "rank", "expert", "weight"],
    "experts": ["token_id", "layer", "expert", "n_tokens", "cache", "backend", "tier"],
    "loads": ["token_id", "action", "reason", "layer", "expert", "backend", "bytes", "resident_bytes"],
    "tensors": ["type", "name", "shape"],
    "qnn_calls": ["call", "name", "bytes", "status"],
    "qnn_objects": ["kind", "generation", "name", "bytes", "level"],
    "qnn_executes": ["token_id", "graph_name", "kind", "layer", "expert", "tier", "n_inputs", "n_outputs", "status", "first"],
    "qnn_events": EVENT,
}
"""Table → what in it does not depend on when something happened, in which order, and to which address."""


def command(folder: Path) -> list[str]:
    """Two sessions of five runs each on the NPU, or its emulator."""
    (folder / "libnative_tls.conf").touch()
    return [sys.executable, PROGRAM, str(folder)]


def facts(folder: Path) -> dict[str, Any]:
    """What does not depend on when something happened, and to which address."""
    run = RawRecording(folder)
    tables = store.build_tables(run)
    events = tables["qnn_events"]
    hits = {(row["program"], row["symbol"]): row["hits"] for row in run.manifest["probes"] if row["engine"] == "qnn"}
    return {
        "records": run.manifest["records"],
        "qnn": run.manifest["qnn"],
        "hits": hits,
        "events": Counter(map(tuple, events[[name for name in EVENT if name in events]].astype(str).values.tolist())),
        "executes": len(tables["qnn_executes"]),
        "logs": [(row["file"][-16:], row["bytes"] > 0, row["whole"]) for row in run.manifest["qnn_logs"]],
        "lost": run.manifest["lost"],
    }


def test_the_recorder_sees_the_npu_as_the_tracer_does(tmp_path: Path) -> None:
    onnxruntime_qnn = pytest.importorskip("onnxruntime_qnn")
    plan, packages = str(tmp_path / "plan.json"), (onnxruntime_qnn, pytest.importorskip("onnxruntime"))
    libraries = [word for package in packages for word in ("--libraries", str(Path(package.__file__).parent))]
    for name in ("recorder", "tracer"):
        (tmp_path / name).mkdir()
    words = ["plan", "-o", plan, *libraries, "--levels", "qnn", "--", sys.executable]
    subprocess.run([sys.executable, "-m", "tracer", *words], cwd=ROOT, capture_output=True, check=True)
    words = [str(RECORDER), "--plan", plan, "-o", str(tmp_path / "collected"), "--", *command(tmp_path / "recorder")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    words = ["--no-views", "--levels", "qnn", "-o", str(tmp_path / "traced"), "--", *command(tmp_path / "tracer")]
    done = trace("run", *words)
    assert done.returncode == 0, done.stderr
    mine, theirs = facts(tmp_path / "collected"), facts(tmp_path / "traced")
    assert mine["executes"] == 10 and sum(mine["events"].values()) > 100 and mine["lost"] == {}
    assert json.loads((tmp_path / "collected" / "manifest.json").read_text())["warnings"] == []
    for what, told in theirs.items():
        assert mine[what] == told, what


def rows_of(run: RawRecording) -> dict[str, Counter[tuple[str, ...]]]:
    """Table → how often each of its rows is there."""
    tables = store.build_tables(run)
    return {name: Counter(map(tuple, tables[name][columns].astype(str).values.tolist())) for name, columns in SAME.items()}


@pytest.mark.long
def test_the_demo_by_the_recorder_alone_has_the_tables_of_the_tracer(demo: DemoRun, tmp_path: Path) -> None:
    onnxruntime_qnn = pytest.importorskip("onnxruntime_qnn")
    output, libraries = tmp_path / "run", (str(SITES), str(Path(onnxruntime_qnn.__file__).parent))
    words = [word.replace(str(demo.folder), str(output)) for word in demo.manifest["command"]]
    options = [word for library in libraries for word in ("--libraries", library)]
    done = trace("run", "--no-views", "--on", "exec:sh -c", *options, "-o", str(output), "--", *words)
    assert done.returncode == 0, done.stderr
    mine, theirs = rows_of(RawRecording(output)), rows_of(RawRecording(demo.folder))
    ordered = store.build_tables(RawRecording(output))["operators"].groupby("token_id")["order"]
    assert all(sorted(orders) == list(range(len(orders))) for _, orders in ordered)
    assert all(theirs.values()) and RawRecording(output).manifest["lost"] == demo.manifest["lost"] == {}
    for name, rows in theirs.items():
        assert mine[name] == rows, name
