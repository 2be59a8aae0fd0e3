"""One option, four kinds of profile, which agree with each other and with the runtime's own account."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from moescope.__main__ import main
from runtime import MoE
from runtime.backends import htp
from runtime.cache_rules.forms import HTP
from runtime.package.demo_model import DemoSizes, write_demo_model
from runtime.telemetry.profile import read_executions
from tests.runtime_models import PROMPT

htp_only = pytest.mark.skipif(bool(htp.why_unavailable()), reason=htp.why_unavailable() or "HTP at hand")
SIZES = DemoSizes(hidden=64, layers=2, experts=4, intermediate=64, vocabulary=400, context=256)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_demo_model(tmp_path / "model", sizes=SIZES)


@htp_only
def test_host_stages_qnn_events_its_log_and_the_merged_trace_agree(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    engine = MoE.load(model, prefill_backend="htp", chunk=16, tiers=(8,), profile=folder)
    list(engine.generate(PROMPT, 3))
    engine.close()
    with (folder / "host.csv").open(newline="") as file:
        stages = list(csv.DictReader(file))
    counted = Counter(row["stage"] for row in stages)
    for kind, runs in engine.log.operators.items():
        assert counted[kind.name.lower()] == runs
    executes = sum(count for (_, backend), count in engine.log.graphs.items() if backend == HTP)
    assert counted["npu run"] == executes > 0
    files = sorted((folder / "qnn").glob("*.csv"))
    assert sum(len(read_executions(path)) for path in files) == executes
    assert {path.with_suffix("").name + "_qnn.log" for path in files} == {p.name for p in (folder / "qnn").glob("*_qnn.log")}
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    slices = [e for e in trace if e["ph"] == "X"]
    by_thread = Counter(names[e["pid"], e["tid"]] for e in slices)
    assert by_thread["QNN Execute"] == by_thread["QNN Device"] == executes < by_thread["QNN Node"]
    took = Counter()
    for event in slices:
        took[names[event["pid"], event["tid"]]] += event["dur"]
    assert abs(took["QNN Node"] - took["QNN Device"]) < 0.01 * executes, "nodes fill the device's time"
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["name"] == "npu run")
    for event in slices:
        if names[event["pid"], event["tid"]].startswith("QNN"):
            assert any(begin - 0.01 <= event["ts"] and event["ts"] + event["dur"] <= end + 0.01 for begin, end in spans)
    assert {e["args"]["name"] for e in trace if e["name"] == "process_name"} == {"Host", htp.LABEL}


def test_without_an_npu_the_host_stages_remain(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile"
    arguments = ["generate", str(model), "--prompt", PROMPT, "--max-new-tokens", "2", "--expert-cache", "300kB"]
    assert main([*arguments, "--profile", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"host.csv", "trace.json"}
    stages = {e["name"] for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"}
    assert {"attention", "router", "expert", "load", "head", "sample"} <= stages
    folder.joinpath("trace.json").unlink()
    folder.joinpath("host.csv").unlink()
    folder.rmdir()
    folder.write_text("in the way")
    assert main([*arguments, "--profile", str(folder)]) == 2
    assert "--profile" in capsys.readouterr().err


@htp_only
def test_basic_events_have_no_nodes(model: Path, tmp_path: Path) -> None:
    engine = MoE.load(model, prefill_backend="htp", chunk=32, tiers=(8,), profile=tmp_path, qnn_profile="basic")
    list(engine.generate(PROMPT, 1))
    engine.close()
    found = [one for path in (tmp_path / "qnn").glob("*.csv") for one in read_executions(path)]
    assert found and not any(one.nodes for one in found)
