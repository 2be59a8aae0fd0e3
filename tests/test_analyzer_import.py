"""Profiles that programs wrote of themselves, as recordings: onnxruntime's, of real runs on the CPU and on QNN."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyzer.tables import store
from moescope.__main__ import main
from tests.conftest import ROOT
from tests.golden import Golden
from tests.test_views_pages import data_of
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
