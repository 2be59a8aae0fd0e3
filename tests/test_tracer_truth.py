"""What the tracer records equals what the traced program knows about itself."""

import collections
import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analyzer.tables import store as tables_module
from tests.conftest import ROOT, DemoRun, trace
from tests.truth import skip_where_stolen
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes")
STEPS = str(ROOT / "workloads" / "programs" / "steps.py")
PLAIN = str(ROOT / "workloads" / "programs" / "plain_qnn.py")


def steps(folder: Path, *arguments: str, levels: str = "token") -> RawRecording:
    options = ("--no-views", "--levels", levels, "-o", str(folder))
    done = trace("run", *options, "--", sys.executable, STEPS, *arguments, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return RawRecording(folder)


def test_every_call_is_recorded_with_its_arguments(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "5000", "0")
    begin, end = run.records("token_begin"), run.records("token_end")
    np.testing.assert_array_equal(begin["seq"], np.arange(5000))
    np.testing.assert_array_equal(begin["position"], np.arange(5000))
    np.testing.assert_array_equal(end["result"], np.arange(5000) + 7)
    assert (end["ts"] >= begin["ts"]).all()
    assert run.manifest["lost"] == {}
    hits = {row["program"]: row["hits"] for row in run.manifest["probes"]}
    assert hits["moescope_token_begin"] == hits["moescope_token_end"] == 5000


def test_durations_are_those_that_the_program_sleeps(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "40", "0.005")
    durations = run.records("token_end")["ts"] - run.records("token_begin")["ts"]
    assert durations.min() >= 5_000_000
    assert durations.sum() < run.manifest["duration_ns"]  # a busy machine wakes late: test_truth_runtime has its own clock


def test_a_library_loaded_late_and_a_child_lose_no_call(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "300", "0", "--late", "0.5", "--child", levels="all")
    counts = collections.Counter(run.records("token_begin")["pid"].tolist())
    assert sorted(counts.values()) == [300, 300]


def test_levels_that_were_not_asked_for_are_not_attached(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "10", "0", levels="graph")
    assert {row["level"] for row in run.manifest["probes"]} == {"graph", "process"}
    assert len(run.records("token_begin")) == 0
    assert len(run.records("sched_switch")) == 0


def test_a_ring_too_small_counts_every_lost_record(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = (sys.executable, STEPS, "200000", "0")
    done = trace(
        "run",
        "--no-views",
        "--ring-mib",
        "1",
        "--levels",
        "token",
        "-o",
        str(folder),
        "--",
        *command,
        env={"PYTHONPATH": str(ROOT)},
    )
    run = RawRecording(folder)
    for kind in ("token_begin", "token_end"):
        assert len(run.records(kind)) + run.manifest["lost"].get(kind, 0) == 200_000
    assert done.returncode == 0


@pytest.mark.needs("htp")
def test_the_demo_is_recorded_as_its_own_log_tells(demo: DemoRun) -> None:
    tables = tables_module.load_tables(demo.folder)
    log = demo.log
    assert len(tables["tokens"]) == len(log["steps"]) == 32
    assert tables["tokens"]["phase"].tolist() == [step["phase"] for step in log["steps"]]
    assert tables["tokens"]["result"].tolist() == [step["sampled"] for step in log["steps"]]
    runs = {(row["layer"], row["expert"]): row["runs"] for row in log["expert_runs"]}
    assert tables["experts"].groupby(["layer", "expert"]).size().to_dict() == runs
    graphs = tables["graphs"].groupby(["kind", "backend"]).size().to_dict()
    assert graphs == {(k, b): n for k, row in log["statistics"]["graph_runs"].items() for b, n in row.items()}
    htp_runs = sum(row.get("htp", 0) for row in log["statistics"]["graph_runs"].values())
    assert len(tables["qnn_executes"]) == htp_runs > 0


@pytest.mark.long
@pytest.mark.needs("htp")
def test_the_demo_takes_as_long_as_its_own_clock_says(demo: DemoRun) -> None:
    skip_where_stolen(demo.stolen)
    tables = tables_module.load_tables(demo.folder)
    own = np.array([step["duration_ns"] for step in demo.log["steps"]])
    seen = tables["tokens"]["duration_ns"].to_numpy()
    assert (np.abs(own - seen) < 300_000).mean() > 0.75
    assert np.median(np.abs(own - seen) / own) < 0.02


@pytest.mark.needs("htp")
def test_every_routing_choice_is_the_one_the_runtime_made(demo: DemoRun) -> None:
    routes = tables_module.load_tables(demo.folder)["routes"].sort_values(["token_id", "layer", "row", "rank"])
    made: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for choice in demo.log["routing"]:
        made[choice["seq"], choice["layer"]] += [expert for row in choice["experts"] for expert in row]
    seen = routes.groupby(["token_id", "layer"])["expert"].agg(list).to_dict()
    assert seen == made


Events = collections.Counter[tuple[str, str, str, int]]


def csv_events(folder: Path) -> Events:
    """(type, name, unit, value) of every event in onnxruntime's own CSV files."""
    found: Events = collections.Counter()
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                found[row["Message"], row["Event Identifier"], row["Unit of Measurement"], int(row["Time"])] += 1
    return found


UNITS = {1: "US", 2: "BYTES", 3: "CYCLES", 4: "COUNT", 5: "OBJECT", 1000: "BACKEND"}
TYPES = {0: "UNKNOWN", 100: "INIT", 300: "FINALIZE", 400: "EXECUTE", 404: "NODE", 500: "DEINIT"}


def probe_events(run: RawRecording) -> Events:
    """The same of every event that the probes saw, in onnxruntime's words: types from 1000 on are the backend's own."""
    found: Events = collections.Counter()
    for row in run.records("qnn_event"):
        kind = "BACKEND" if row["type"] >= 1000 else TYPES[int(row["type"])]
        found[kind, row["name"].decode(), UNITS[int(row["unit"])], int(row["value"])] += 1
    return found


@pytest.mark.needs("htp")
def test_every_qnn_event_of_onnxruntimes_csv_is_captured(demo: DemoRun) -> None:
    expected = csv_events(demo.folder / "qnn")
    assert sum(expected.values()) > 500
    assert probe_events(RawRecording(demo.folder)) == expected


@pytest.mark.needs("htp")
def test_no_qnn_event_of_the_demo_is_unjoined(demo: DemoRun) -> None:
    tables = tables_module.load_tables(demo.folder)
    events, executes = tables["qnn_events"], tables["qnn_executes"]
    assert ((events["execute_id"] >= 0) | (events["call_id"] >= 0)).all()
    assert (executes["token_id"] >= 0).all()
    assert set(executes["kind"]) == {"attention", "expert"}
    assert (executes.loc[executes["kind"] == "expert", "expert"] >= 0).all()
    assert (executes["accel_cycles"] > 0).all()


@pytest.mark.needs("htp")
def test_a_plain_onnxruntime_program_with_two_sessions_is_traced_unchanged(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    done = trace("run", "--no-views", "-o", str(tmp_path / "run"), "--", sys.executable, PLAIN, str(tmp_path / "csv"))
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert len(run.records("qnn_execute_end")) == 10
    assert probe_events(run) == csv_events(tmp_path / "csv")
    tables = tables_module.build_tables(run)
    events = tables["qnn_events"]
    assert ((events["execute_id"] >= 0) | (events["call_id"] >= 0)).all()
    assert tables["qnn_executes"]["graph_name"].nunique() == 2


@pytest.mark.needs("bpftrace")
def test_bpftrace_lists_the_runtimes_probes() -> None:
    library = next((ROOT / "runtime").glob("**/_probes*.so"))
    done = subprocess.run(["bpftrace", "-l", f"usdt:{library}:*"], capture_output=True, text=True, check=True)
    listed = {line.rsplit(":", 1)[1] for line in done.stdout.split()}
    assert {"token__begin", "token__end", "graph__begin", "route", "expert__begin", "load__begin", "evict"} <= listed
