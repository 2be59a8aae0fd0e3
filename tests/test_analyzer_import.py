"""Profiles that programs wrote of themselves, as recordings: onnxruntime's, of real runs on the CPU and on QNN."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analyzer.__main__ import main
from analyzer.tables import store
from tests.conftest import ROOT
from views.__main__ import main as views
from workloads.programs.profiled_ort import LAYERS, ROWS, WIDTH

RUNS = 4


def profiled(folder: Path, provider: str) -> tuple[Path, list[int]]:
    """(profile, ns of each run as the program measured them)."""
    command = [sys.executable, ROOT / "workloads/programs/profiled_ort.py", provider, folder / provider, str(RUNS)]
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    return folder / said["profile"], said["took"]


def imported(folder: Path, profile: Path) -> store.Tables:
    assert main(["import-profile", str(profile), "--out", str(folder / "run")]) == 0
    return store.load(folder / "run")


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
    said = " ".join(capsys.readouterr().out.split())
    assert "whether it was prefill or decode, and of how many tokens, the profile does not say" in said and "0 lost" in said
    assert main(["ledger", str(tmp_path / "run"), "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)["run_ms"]
    assert spent["total"] == pytest.approx(tables["tokens"]["duration_ns"].sum() / 1e6)
    assert spent["cpu_operators"] == pytest.approx(operators["duration_ns"].sum() / 1e6)
    assert spent["residual"] == pytest.approx(spent["total"] - spent["cpu_operators"])
    assert views(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size > 100_000


@pytest.mark.needs("htp")
def test_what_qnn_ran_is_the_accelerators_in_the_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, took = profiled(tmp_path, "qnn")
    tables = imported(tmp_path, profile)
    steps_hold(tables["tokens"], took)
    executes = tables["qnn_executes"]
    assert executes["token_id"].tolist() == list(range(RUNS)) and executes["accel_us"].isna().all()
    assert "which of QNN's backends ran (HTP, its emulator, GPU)" in capsys.readouterr().out
    assert main(["ledger", str(tmp_path / "run"), "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)["run_ms"]
    assert spent["accelerator"] == pytest.approx(executes["duration_ns"].sum() / 1e6) and spent["cpu_operators"] == 0


def test_a_profile_that_was_cut_off_is_read_as_far_as_it_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, _ = profiled(tmp_path, "cpu")
    events = len(json.loads(profile.read_text()))
    text = profile.read_text()
    profile.write_text(text[: text.rindex("model_run") - 5])
    tables = imported(tmp_path, profile)
    assert len(tables["tokens"]) == RUNS - 1 and len(tables["operators"]) == 2 * LAYERS * RUNS
    assert tables["operators"]["token_id"].tolist()[-1] == -1
    assert f"is cut off: its first {events - 1} events were read" in capsys.readouterr().out


def test_what_is_no_profile_is_refused_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    making = {"cat": "Session", "name": "session_initialization", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
    (tmp_path / "x.json").write_text(json.dumps([making]))
    (tmp_path / "y.json").write_text('{"traceEvents": []}')
    for name in ("x.json", "y.json", "missing.json"):
        assert main(["import-profile", str(tmp_path / name), "--out", str(tmp_path / "run")]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_tables_that_no_records_can_give_again_are_never_made_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(tmp_path, profiled(tmp_path, "cpu")[0])
    monkeypatch.setattr(store, "TABLES_VERSION", store.TABLES_VERSION + 1)
    assert main(["ledger", str(tmp_path / "run")]) == 2
    assert "import or simulate it again" in capsys.readouterr().err
    assert len(pd.read_parquet(tmp_path / "run" / "tables" / "tokens.parquet")) == RUNS
