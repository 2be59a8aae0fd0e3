"""QAIRT's C API by a library that stands in for it: every execution with name, status and times; nothing here saw a device."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzer.questions.npu_figures import npu_statistics
from analyzer.tables.store import load_tables
from tests.conftest import ROOT, begin_trace, manifest_when, trace

pytestmark = pytest.mark.needs("probes")
PROGRAMS = ROOT / "workloads" / "programs"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qairt") / "libQairtHtp.so"
    source = str(PROGRAMS / "fake_qairt.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(path), source, "-lpthread"], check=True)
    return str(path)


def traced(folder: Path, library: str, *words: str, env: dict[str, str] | None = None, options: tuple[str, ...] = ()) -> Any:
    """(what the program said, manifest, tables) of a run."""
    command = (sys.executable, str(PROGRAMS / "qairt_c.py"), library, *words)
    done = trace("run", "--no-views", "--levels", "qnn", *options, "-o", str(folder / "run"), "--", *command, env=env)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return said, json.loads((folder / "run" / "manifest.json").read_text()), load_tables(folder / "run")


def test_every_execution_has_its_name_status_and_times_and_every_call_a_row(library: str, tmp_path: Path) -> None:
    said, manifest, tables = traced(tmp_path, library, "executes=50", "later=4")
    executes, calls = tables["qnn_executes"], tables["qnn_calls"]
    mine = executes[~executes["asynchronous"]].sort_values("begin_ns")
    assert len(mine) == len(said["runs"]) == 50 and mine["complete"].all()
    assert mine["graph_name"].tolist() == [run["graph"] for run in said["runs"]]
    assert mine["status"].tolist() == [run["status"] for run in said["runs"]] and set(mine["status"]) == {0, 6031}
    assert (mine["begin_ns"] >= [run["begin"] for run in said["runs"]]).all()
    assert (mine["end_ns"] <= [run["end"] for run in said["runs"]]).all()
    late = executes[executes["asynchronous"]]
    assert len(late) == 4 and late["complete"].all() and (late["duration_ns"] > 2_900_000).all()
    counts = calls["call"].value_counts()
    named = {"contextCreate": "contextCreate", "contextCreateFromBinary": "createFromBinary", "contextGetBinary": "getBinary"}
    named |= {"graphCreate": "createGraph", "graphRetrieve": "retrieveGraph", "graphFinalize": "finalize"}
    named |= {"contextFree": "contextFree", "contextApplyBinarySection": "applyBinarySection", "profileCreate": "createProfile"}
    assert {ours: counts[ours] for ours in named} == {ours: said["calls"][theirs] for ours, theirs in named.items()}
    assert calls.set_index("call").loc["contextGetBinary", "bytes"] == said["written"]
    assert set(tables["qnn_objects"].query("kind == 'graph'")["name"]) == {"first", "second"}
    assert manifest["warnings"] == [] and manifest["qnn"]["emulator"] == (os.uname().machine == "x86_64")


def test_a_program_that_asks_for_its_tables_often_waits_for_their_probes_once(library: str, tmp_path: Path) -> None:
    _, manifest, tables = traced(tmp_path, library, "asks=100")
    assert len(tables["qnn_executes"]) == 10 and 4 <= manifest["cost"]["held_stops"] < 20


def test_executions_in_flight_together_have_a_depth_and_time_behind_others_and_rejected_ones_are_not_work(
    library: str, tmp_path: Path
) -> None:
    told, _, tables = traced(tmp_path, library, "executes=0", "later=100")
    accepted = [run for run in told["late"] if run["status"] == 0]
    depths = [sum(run["begin"] <= other["begin"] < run["end"] for run in accepted) for other in accepted]
    ends = [0, *(max(run["end"] for run in accepted[:i]) for i in range(1, len(accepted)))]
    behind = [max(min(before, run["end"]) - run["begin"], 0) for before, run in zip(ends, accepted, strict=True)]
    window = max(run["end"] for run in accepted) - accepted[0]["begin"]
    facts = npu_statistics(tables)
    queue, (graph,) = facts["queue"], facts["graphs"]
    assert queue["executes"] == len(accepted) and queue["rejected"] == 100 - len(accepted) == facts["failed"] > 0
    assert abs(queue["most_in_flight"] - max(depths)) <= 1 and abs(queue["mean_in_flight"] - np.mean(depths)) < 1
    assert queue["behind_ms"] == pytest.approx(sum(behind) / 1e6, rel=0.02)
    assert queue["own_ms"] == pytest.approx(window / 1e6, rel=0.02) == pytest.approx(graph["host_us"] / 1e3, rel=0.02)
    assert queue["behind_ms"] > 10 * queue["own_ms"] and len(accepted) > 60
    rejected = tables["qnn_executes"].query("status == 6025")
    assert len(rejected) == queue["rejected"] and len(tables["qnn_gaps"]) == 0, "the queue was never empty"


@pytest.mark.parametrize(
    ("gives", "graph", "count", "said"),
    [
        ("short", 6000, 0, "interface graph has 80 bytes, whose order"),
        ("long", 6000, 10, "interface graph has 96 bytes (slots"),
        ("v2", 6001, 0, "interface 6001 of component graph"),
    ],
)
def test_a_table_of_another_size_or_number_is_said(
    library: str, tmp_path: Path, gives: str, graph: int, count: int, said: str
) -> None:
    told, manifest, tables = traced(tmp_path, library, f"graph={graph}", env={"FAKE_QAIRT": gives})
    assert told["calls"]["execute"] == 10 and len(tables["qnn_executes"]) == count
    assert any(said in line for line in manifest["warnings"])


def test_an_order_that_the_user_gives_replaces_ours(library: str, tmp_path: Path) -> None:
    text = (ROOT / "tracer" / "engines" / "qairt.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("graph = [6000, 88, 6002]", "graph = [6001, 88]"))
    options = ("--probes", str(tmp_path / "mine.toml"))
    _, manifest, tables = traced(tmp_path, library, "graph=6001", env={"FAKE_QAIRT": "v2"}, options=options)
    assert len(tables["qnn_executes"]) == 10 and manifest["warnings"] == []


def test_a_program_that_has_its_tables_loses_no_execution_after_they_were_found(library: str, tmp_path: Path) -> None:
    command, pipe = [sys.executable, str(PROGRAMS / "qairt_c.py"), library, "loop=1"], subprocess.PIPE
    target = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert target.stdout is not None and target.stdout.readline() == "ready\n"
    tracer = begin_trace("attach", "--no-views", "--levels", "qnn", "--pid", str(target.pid), "-o", str(tmp_path / "run"))
    manifest_when(
        lambda manifest: any(row["program"] == "qnn_execute_end" for row in manifest["probes"]), tmp_path / "run", tracer
    )
    time.sleep(0.3)
    said = json.loads(target.communicate("enough\n", timeout=60)[0].splitlines()[-1])
    assert tracer.wait(timeout=60) == 0
    executes = load_tables(tmp_path / "run")["qnn_executes"]
    assert_all_after_the_first(executes, said["runs"])
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert all(re.match(rf"\w+: process {target.pid} ran [\d.]+ s ", line) for line in manifest["warnings"])


def assert_all_after_the_first(executes: Any, runs: list[dict[str, Any]]) -> None:
    """The last executions of the program are those recorded, each within its own times."""
    complete = executes[executes["complete"]].sort_values("begin_ns")
    last = runs[-len(complete) :]
    assert 100 < len(complete) <= len(runs) and complete["status"].tolist() == [run["status"] for run in last]
    assert (complete["begin_ns"] >= [run["begin"] for run in last]).all()
    assert (complete["end_ns"] <= [run["end"] for run in last]).all()
