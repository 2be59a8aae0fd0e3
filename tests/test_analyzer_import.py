"""Profiles that programs wrote of themselves, as recordings: onnxruntime's, of real runs on the CPU and on QNN."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analyzer.imports.onnxruntime import read_profile
from analyzer.records.schema import fill_missing
from analyzer.tables import store
from moescope.__main__ import main
from tests.conftest import ROOT, drawn
from tests.golden import Golden
from tests.test_views_pages import data_of
from workloads.drawn_series import onnxruntime_profile
from workloads.programs.profiled_ort import LAYERS, ROWS, WIDTH

RUNS = 4


def profiled(folder: Path, provider: str) -> tuple[Path, list[int]]:
    """(profile, ns of each run as the program measured them)."""
    command = [sys.executable, ROOT / "workloads/programs/profiled_ort.py", provider, folder / provider, str(RUNS)]
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    return folder / said["profile"], said["took"]


def imported(folder: Path, profile: Path) -> store.LazyTables:
    assert main(["import", str(profile), "--out", str(folder / "run")]) == 0
    return store.load_tables(folder / "run")


def steps_hold(tokens: pd.DataFrame, took: list[int]) -> None:
    """Each run is a step, which lasted no longer than its caller waited."""
    assert tokens["token_id"].tolist() == list(range(RUNS)) and set(tokens["phase"]) == {""}
    assert all(0 < within <= outside + 1000 for within, outside in zip(tokens["duration_ns"], took, strict=True))


def test_onnxruntimes_profile_is_a_recording_of_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, took = profiled(tmp_path, "cpu")
    tables = imported(tmp_path, profile)
    steps_hold(tables["tokens"], took)
    operators = tables["operators"]
    names = [f"/model/layers.{layer}/mlp/{kind}" for layer in range(LAYERS) for kind in ("MatMul", "Relu")]
    assert operators["name"].tolist() == names * RUNS
    assert operators["type"].tolist() == ["MatMul", "Relu"] * LAYERS * RUNS
    assert operators["layer"].tolist() == [layer for layer in range(LAYERS) for _ in range(2)] * RUNS
    assert set(operators["shape"]) == {f"{WIDTH}x{ROWS}"} and (operators["graph_id"] == operators["token_id"]).all()
    assert tables["graphs"]["kind"].tolist() == ["run"] * RUNS + ["create_session"] * 2
    assert len(tables["thread_states"]) == len(tables["routes"]) == 0
    capsys.readouterr()
    assert main(["summary", str(tmp_path / "run")]) == 0
    assert "probes took" not in capsys.readouterr().out
    assert main(["time", str(tmp_path / "run"), "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)["run"]
    assert spent["ms"] == pytest.approx(tables["tokens"]["duration_ns"].sum() / 1e6)
    computed = operators["duration_ns"].sum() / 1e6
    assert spent["cause_ms"] == {"computing": pytest.approx(computed), "residual": pytest.approx(spent["ms"] - computed)}
    assert spent["part_ms"]["host code"] == pytest.approx(spent["ms"] - computed)
    assert main(["write", str(tmp_path / "run"), "--out", str(tmp_path / "report.html"), "--only", "report"]) == 0
    assert (tmp_path / "report.html").stat().st_size > 100_000


@pytest.mark.needs("htp")
def test_what_qnn_ran_is_the_accelerators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, took = profiled(tmp_path, "qnn")
    tables = imported(tmp_path, profile)
    capsys.readouterr()
    steps_hold(tables["tokens"], took)
    executes = tables["qnn_executes"]
    assert executes["token_id"].tolist() == list(range(RUNS)) and executes["accel_us"].isna().all()
    assert main(["time", str(tmp_path / "run"), "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)["run"]["cause_ms"]
    assert spent["accelerator"] == pytest.approx(executes["duration_ns"].sum() / 1e6) and "computing" not in spent


def test_a_profile_that_was_cut_off_is_read_as_far_as_it_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, _ = profiled(tmp_path, "cpu")
    events = len(json.loads(profile.read_text()))
    text = profile.read_text()
    profile.write_text(text[: text.rindex("model_run") - 5])
    tables = imported(tmp_path, profile)
    assert len(tables["tokens"]) == RUNS - 1 and len(tables["operators"]) == 2 * LAYERS * RUNS
    assert tables["operators"]["token_id"].tolist()[-1] == -1
    assert f" {events - 1} events" in capsys.readouterr().out


HEXAGON = ROOT / "tests/data/hexagon/profile.log"


def test_the_log_of_llama_cpps_hexagon_backend_is_a_recording(tmp_path: Path, capsys, golden: Golden) -> None:
    tables = imported(tmp_path, HEXAGON)
    batches, operators = tables["npu_batches"], tables["npu_operators"]
    assert batches["npu_us"].tolist() == [176, 172] and batches["n_ops"].tolist() == [16, 16]
    cycles = np.array([[0, 88142], [9324913376884 - 9324913279619, 9324913376884 - 9324913279619 + 86454]])
    spans = cycles / (88142 + 86454) * (176 + 172) * 1e3  # the counter's cycles at the mean rate
    assert np.allclose(batches[["begin_ns", "end_ns"]], spans, atol=1)
    assert operators["position"].tolist() == [*range(16)] * 2 and set(operators["batch_id"]) == {0, 1}
    first, second = operators.iloc[0], operators.iloc[1]
    assert (first["type"], first["name"], first["layer"], first["shape"]) == ("RMS_NORM+MUL", "attn_norm-0", 0, "256x5x1x1")
    assert (first["us"], first["cycles"], first["start_cycles"], first["pmu7"]) == (10, 5007, 539280048, 7)
    assert (second["type"], second["n_nodes"], second["shape"]) == ("MUL_MAT+MUL_MAT+MUL_MAT", 3, "")
    unknown = ("token_id", "in_flight", "submit_ns", "wait_ns", "status", "bytes")
    assert (batches[[*unknown]] == -1).all(axis=None) and (operators["opcode"] == -1).all()
    capsys.readouterr()
    assert main(["summary", str(tmp_path / "run")]) == 0
    golden("summary", capsys.readouterr().out)
    assert main(["write", str(tmp_path / "run"), "--out", str(tmp_path / "report.html"), "--only", "report"]) == 0
    text = json.dumps(data_of(tmp_path / "report.html"))
    assert "RMS_NORM+MUL" in text and "Batches by size" in text and "Batches in flight at" not in text


def test_what_is_missing_of_a_hexagon_log_is_counted(tmp_path: Path, capsys, golden: Golden) -> None:
    lines = HEXAGON.read_text().splitlines()
    (tmp_path / "part.log").write_text("\n".join([*lines[5:-3], lines[-3][:-40]]))
    assert len(imported(tmp_path, tmp_path / "part.log")["npu_operators"]) == 13
    (tmp_path / "old.log").write_text("\n".join(line for line in lines if "OPBATCH" not in line))
    assert main(["import", str(tmp_path / "old.log"), "--out", str(tmp_path / "old")]) == 2
    assert not (tmp_path / "old").exists()
    golden("import", "".join(capsys.readouterr()))


def test_what_is_no_profile_is_refused_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    making = {"cat": "Session", "name": "session_initialization", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
    (tmp_path / "x.json").write_text(json.dumps([making]))
    (tmp_path / "y.json").write_text('{"traceEvents": []}')
    for name, code in (("x.json", 2), ("y.json", 1), ("missing.json", 1)):
        assert main(["import", str(tmp_path / name), "--out", str(tmp_path / "run")]) == code
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_tables_that_no_records_can_give_again_are_never_made_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(tmp_path, profiled(tmp_path, "cpu")[0])
    monkeypatch.setattr(store, "TABLES_VERSION", store.TABLES_VERSION + 1)
    assert main(["time", str(tmp_path / "run")]) == 2
    assert len(pd.read_parquet(tmp_path / "run" / "tables" / "tokens.parquet")) == RUNS


EVENTS = (  # of one extraction in the file's order: level, type, identifier, unit, value
    ("ROOT", "EXECUTE", "QNN (execute) time", "US", 410),
    ("SUB-EVENT", "BACKEND", "Accelerator (execute) time (cycles)", "CYCLES", 40_000),
    ("SUB-EVENT", "NODE", "MatMul_0:OpId_7 (cycles)", "CYCLES", 30_000),
    ("ROOT", "BACKEND", "RPC (execute) time", "US", 300),
    ("ROOT", "BACKEND", "Accelerator (execute) time", "US", 220),
)


def qnn_events(operation: str, graph: str, node: str, ts: int, rows: tuple[tuple[str, str, str, str, int], ...]) -> list[dict]:
    """QNN's events of one operation, as ONNX Runtime prints them: every argument is a text."""
    events = []
    for level, kind, name, unit, value in rows:
        args = {"qnn_event_type": kind, "qnn_event_identifier": name, "qnn_timing_source": "BACKEND", "qnn_graph_name": graph}
        args |= {} if unit == "US" else {"value": str(value)}
        args |= {"unit": unit, "level": level, "qnn_operation": operation, "parent_ort_node": node}
        times = {"dur": value if unit == "US" else 0, "ts": ts, "ph": "X"}
        events.append({"cat": "Kernel", "pid": 5, "tid": -77, **times, "name": name, "args": args})
    return events


def profile_with_qnn(runs: int) -> list[dict]:
    """A profile of two nodes on QNN: its creation, and runs of both nodes, whose events stand at the end of the file."""

    def span(cat: str, name: str, ts: int, dur: int, **args: object) -> dict:
        return {"cat": cat, "pid": 5, "tid": 9, "dur": dur, "ts": ts, "ph": "X", "name": name, "args": args}

    own, qnn = [span("Session", "session_initialization", 10, 5000)], []
    qnn += qnn_events("finalize", "A", "session_initialization", 100, (("ROOT", "FINALIZE", "QNN (finalize) time", "US", 900),))
    qnn += qnn_events("finalize", "B", "session_initialization", 1100, (("ROOT", "FINALIZE", "QNN (finalize) time", "US", 700),))
    for run in range(runs):
        begin = 10_000 + 2000 * run
        for place, name in enumerate(("part_A", "part_B")):
            at = begin + 100 + 800 * place
            own.append(span("Node", f"{name}_kernel_time", at, 500, op_name="QNN", provider="QNNExecutionProvider"))
            scaled = tuple((*row[:4], row[4] + run + 7 * place) for row in EVENTS)
            qnn += qnn_events("execute", name[-1], f"{name}_kernel_time", at + 20, scaled)
        own.append(span("Session", "model_run", begin, 1800))
    return own + qnn


@pytest.mark.parametrize("compressed", [False, True])
def test_qnns_events_in_onnxruntimes_profile_are_their_executions(tmp_path: Path, compressed: bool) -> None:
    events = profile_with_qnn(3)
    path = tmp_path / ("p.json.gz" if compressed else "p.json")
    path.write_bytes(gzip.compress(json.dumps(events).encode()) if compressed else json.dumps(events).encode())
    tables = imported(tmp_path, path)
    executes, told, calls = tables["qnn_executes"], tables["qnn_events"], tables["qnn_calls"]
    assert executes["graph_name"].tolist() == ["part_A", "part_B"] * 3 and executes["token_id"].tolist() == [0, 0, 1, 1, 2, 2]
    more = [run + 7 * place for run in range(3) for place in range(2)]
    for column, first in (("execute_us", 410), ("host_rpc_us", 300), ("accel_us", 220), ("accel_cycles", 40_000)):
        assert executes[column].tolist() == [first + each for each in more]
    of_file = [event for event in events if "qnn_event_type" in event["args"]]
    values = [int(event["args"].get("value", event["dur"])) for event in of_file]
    assert told["value"].tolist() == values and told["name"].tolist() == [event["name"] for event in of_file]
    assert (told["ts_ns"] == [1000 * event["ts"] for event in of_file]).all()
    assert told["execute_id"].tolist() == [-1, -1, *np.repeat(range(6), len(EVENTS)).tolist()]
    assert told["call_id"].tolist() == [0, 1, *[-1] * (6 * len(EVENTS))]
    assert told["parent_id"].tolist() == [-1, -1, *(parent for i in range(6) for parent in (-1, 2 + 5 * i, 2 + 5 * i, -1, -1))]
    assert calls[["call", "name", "duration_ns"]].values.tolist() == [
        ["graphFinalize", "A", 900_000],
        ["graphFinalize", "B", 700_000],
    ]
    assert main(["npu", str(tmp_path / "run"), "--json"]) == 0


def test_damaged_events_of_qnn_are_counted_and_foreign_ones_belong_to_no_execution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = profile_with_qnn(1)
    at = [i for i, event in enumerate(events) if event["args"].get("qnn_operation") == "execute"]
    events[at[0]]["args"]["level"], events[at[1]]["args"]["value"] = "?", "many"
    del events[at[2]]["args"]["unit"]
    events[at[3]]["ts"], events[at[4]]["args"]["parent_ort_node"] = 1, "another"
    (tmp_path / "p.json").write_text(json.dumps(events))
    tables = imported(tmp_path, tmp_path / "p.json")
    assert re.search(r"\bp\.json: 3 ", capsys.readouterr().out)
    told, executes = tables["qnn_events"], tables["qnn_executes"]
    assert told["execute_id"].tolist() == [-1, -1, -1, -1, *[1] * len(EVENTS)]
    assert executes["accel_us"].tolist()[1] == 227 and np.isnan(executes["accel_us"].iloc[0])


@settings(max_examples=drawn(40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_altered_events_of_qnn_are_read_or_omitted(tmp_path: Path, data: st.DataObject) -> None:
    events = profile_with_qnn(1)
    event = data.draw(st.sampled_from([event for event in events if event["cat"] == "Kernel"]))
    holder = data.draw(st.sampled_from([event, event["args"]]))
    junk = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2), st.just({}))
    holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(junk)
    run = read_profile(tmp_path / "p.json", json.dumps(events))
    rows = len(fill_missing("qnn_events", run.tables["qnn_events"]))
    assert rows == sum(each["cat"] == "Kernel" for each in profile_with_qnn(1)) or rows == 11


def test_spans_that_no_clock_can_have_are_counted_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = json.loads(onnxruntime_profile(np.full(3, 20.0)))
    events[0]["dur"], events[2]["ts"] = -1, 1e30
    (tmp_path / "p.json").write_text(json.dumps(events))
    tables = imported(tmp_path, tmp_path / "p.json")
    assert (len(tables["operators"]), len(tables["tokens"])) == (1, 3)
    assert re.search(r"\bp\.json: 2 damaged", capsys.readouterr().out)
    (tmp_path / "damaged.log").write_text(HEXAGON.read_text().replace("cycles 88142", "cycles 999999999999999999"))
    assert main(["import", str(tmp_path / "damaged.log"), "--out", str(tmp_path / "other")]) == 2
    assert "MHz" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_another_report_of_qairt_is_refused_by_type_and_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = {"header_version": {"major": 1}, "version": {"major": 2, "minor": 1, "patch": 0}, "artifact_type": "SOME_METRICS"}
    for name in ("report.json", "report.json.gz", "report.gz"):
        text = json.dumps({"header": header, "data": {}}).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
        assert main(["import", str(tmp_path / name)]) == 1
        assert re.search(r"SOME_METRICS .*2\.1\.0.* OP_TRACE", capsys.readouterr().err)
