"""The NPU by moescope-collect alone: QNN's function table, events and serialized logs, as the Python tracer has them."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from analyzer.tables import store
from tests.conftest import COLLECTOR, ROOT, trace
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes", "htp", "collector")
PROGRAM = str(ROOT / "workloads" / "programs" / "plain_qnn.py")
EVENT = ["type", "unit", "name", "depth"]


def command(folder: Path) -> list[str]:
    """Two sessions of five runs each on the NPU, or its emulator."""
    (folder / "libnative_tls.conf").touch()
    return [sys.executable, PROGRAM, str(folder)]


def facts(folder: Path) -> dict[str, Any]:
    """What does not depend on when something happened, and to which address."""
    run = RawRecording(folder)
    tables = store.build(run)
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


def test_the_collector_sees_the_npu_as_the_tracer_does(tmp_path: Path) -> None:
    onnxruntime_qnn = pytest.importorskip("onnxruntime_qnn")
    libraries, plan = str(Path(onnxruntime_qnn.__file__).parent), str(tmp_path / "plan.json")
    for name in ("collector", "tracer"):
        (tmp_path / name).mkdir()
    words = ["plan", "-o", plan, "--libraries", libraries, "--levels", "qnn", "--", sys.executable]
    subprocess.run([sys.executable, "-m", "tracer", *words], cwd=ROOT, capture_output=True, check=True)
    words = [str(COLLECTOR), "--plan", plan, "-o", str(tmp_path / "collected"), "--", *command(tmp_path / "collector")]
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
