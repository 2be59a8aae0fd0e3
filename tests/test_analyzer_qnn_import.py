"""Profiles that others wrote: what a good file says, and what is said of a damaged, foreign or cut one."""

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analyzer.imports.csv import match_executions, read_csv
from analyzer.imports.opmap import read_op_map
from analyzer.imports.optrace import critical_path, read_optrace, utilization
from moescope.__main__ import main
from tests.conftest import drawn
from tracer.recording.format import RecordingError

DATA = Path(__file__).parent / "data" / "qnn"


def test_onnxruntimes_csv_gives_executes_types_and_values() -> None:
    events = read_csv(DATA / "onnxruntime.csv").events
    assert events["execute"].tolist() == [-1] * 4 + [0] * 6 + [1] * 6
    assert events[events["execute"] == 1]["type"].tolist() == [8001, 3003, 404, 404, 3004, 400]
    assert events["value"].tolist()[-1] == 55 and events["name"].tolist()[7] == "a,b:OpId_17 (cycles)"
    assert set(events["unit"]) == {"us", "cycles", "count"}


def test_the_profile_viewers_csv_is_read_behind_its_preamble() -> None:
    imported = read_csv(DATA / "viewer.csv")
    events = imported.events
    assert imported.complaints == [] and events["source"].tolist()[:2] == ["NETRUN", "NETRUN"]
    assert events[events["execute"] == 0]["type"].tolist() == [400, 8001, 3001, 3002, 3003, 404, 3012]
    assert events["timestamp"].iloc[0] == 1767225600000001


def test_executions_are_found_in_a_recording_by_all_that_they_say() -> None:
    events = read_csv(DATA / "onnxruntime.csv").events
    recorded = events[events["execute"] >= 0].assign(execute_id=lambda frame: 7 - frame["execute"])
    assert match_executions(events, recorded)[4:].tolist() == [7] * 6 + [6] * 6
    other = recorded.assign(value=recorded["value"] + (recorded["execute_id"] == 6).astype("uint64"))
    assert match_executions(events, other)[4:].tolist() == [7] * 6 + [-1] * 6


def test_an_optrace_counts_each_event_once_on_its_unit_and_thread() -> None:
    trace = read_optrace(DATA / "optrace.json")
    assert trace.complaints == [] and trace.duplicates == 6
    facts = utilization(trace.events)
    assert (facts["window_cycles"], facts["idle_cycles"]) == (1000, 0)
    assert {name: row["cycles"] for name, row in facts["units"].items()} == {"HVX": 500, "HMX": 390, "DMA": 210}
    threads = {"Type: HMX Tid: 256": 600, "Type: HVX Tid: 512": 500, "Type: HVX Tid: 513": 400}
    assert {name: row["cycles"] for name, row in facts["threads"].items()} == threads
    assert critical_path(trace.events)["name"].tolist() == ["load", "mark", "conv", "pool"]
    assert trace.events["qnn_op"].tolist() == ["Input", "Input", "Conv_0", "Conv_0", "Pool_0", "Pool_0"]


def test_a_linting_profile_keeps_what_each_node_waited_for_and_used() -> None:
    imported = read_csv(DATA / "linting.csv")
    events = imported.events
    assert imported.complaints == [] and events["execute"].tolist() == [-1, -1, *[0] * 10, 1, -1, -1]
    parts = events[events["depth"] > 1]
    assert parts["type"].tolist()[:3] == [5001, 5002, 404] and parts["depth"].tolist() == [2, 2, 3, 2, 2, 2]
    assert parts[parts["type"] == 5004]["value"].tolist() == [1 | 4, 2 | 4]


def test_the_viewers_text_gives_the_same_rows_as_its_csv() -> None:
    imported = read_csv(DATA / "viewer.txt")
    events = imported.events
    assert imported.complaints == [] and set(events["execute"]) == {-1, 0, 1}
    first = events[events["execute"] == 0]
    assert first["type"].tolist() == [8001, 3001, 3002, 3003, 404, 5001, 5002, -1, 5004, 404, 5004]
    assert first["value"].tolist() == [4, 3161, 2900, 59578, 39578, 32, 85, 26, 5, 20000, 0]
    assert first["depth"].tolist() == [0, 0, 0, 0, 1, 2, 2, 3, 2, 1, 2]
    assert events[events["execute"] == -1]["name"].tolist() == ["NetRun", "NetRun", "QNN (deinit) time"]


def test_rows_of_real_devices_are_not_damage(tmp_path: Path) -> None:
    """A rate, an event that the viewer does not know, the names of overlapped nodes, and commas in names."""
    lines = (DATA / "linting.csv").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "SUB-SUB-SUB-EVENT" in line)
    stamp = lines[at].split(",")[0]
    more = [
        f"{stamp},UNKNOWN,,OBJECT,BACKEND,SUB-SUB-SUB-EVENT,pool:OpId_58",
        f"{stamp},EXECUTE IPS,316.5,INF/SEC,BACKEND,ROOT,IPS (includes misc. time)",
        f"{stamp},Unknown event type : object,,,BACKEND,SUB-SUB-EVENT,",
        f"{stamp},NODE,12,CYCLES,BACKEND,SUB-EVENT,add,mul,relu:OpId_60 (cycles)",
    ]
    usual = read_csv(DATA / "linting.csv").events
    path = tmp_path / "device.csv"
    path.write_text("\n".join([*lines[: at + 1], *more, *lines[at + 1 :]]) + "\n")
    imported = read_csv(path)
    assert imported.complaints == []
    added = imported.events[~imported.events["name"].isin(usual["name"])]
    assert added["name"].tolist() == ["pool:OpId_58", "add,mul,relu:OpId_60 (cycles)"]
    assert added["value"].tolist() == [0, 12] and added["depth"].tolist() == [3, 1]
    assert imported.events["execute"].max() == usual["execute"].max()
    text = tmp_path / "viewer.txt"
    printed = (DATA / "viewer.txt").read_text().replace("    Softmax_1", "        Unknown event type : object\n    Softmax_1", 1)
    text.write_text(printed)
    assert read_csv(text).complaints == []


def test_two_graphs_in_one_file_are_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (DATA / "onnxruntime.csv").read_text().splitlines()
    other = [line.replace("OpId_17", "OpId_99").replace("330", "900") for line in lines[11:17]]
    path = tmp_path / "two.csv"
    path.write_text("\n".join([*lines, *other, *lines[5:11], *other]) + "\n")
    assert main(["import", str(path), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["files"]
    assert [graph["executes"] for graph in answer["graphs"]] == [3, 2] and answer["executes"] == 5
    cycles = [next(m["value"] for m in g["medians"] if m["unit"] == "cycles") for g in answer["graphs"]]
    assert cycles == [300, 900]
    assert main(["import", str(path)]) == 0
    assert "graph 1: 2 executes" in capsys.readouterr().out


def test_graphs_with_nodes_of_the_same_names_are_told_by_their_titles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (DATA / "viewer.csv").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if "Graph 0: model" in line)
    end = next((i for i in range(begin + 1, len(lines)) if "Graph 0: model" in lines[i]), len(lines))
    other = [line.replace("Graph 0: model", "Graph 1: other").replace("454266", "900000") for line in lines[begin:end]]
    path = tmp_path / "two.csv"
    path.write_text("\n".join([*lines[:end], *other]) + "\n")
    assert main(["import", str(path), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["files"]
    cycles = [next(m["value"] for m in graph["medians"] if m["unit"] == "cycles") for graph in answer["graphs"]]
    assert cycles == [454266, 900000] and sum(graph["executes"] for graph in answer["graphs"]) == answer["executes"]
    titles = [[m["name"] for m in graph["medians"] if m["name"].startswith("Graph")] for graph in answer["graphs"]]
    assert titles == [["Graph 0: model"], ["Graph 1: other"]]
    assert main(["trends", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_ms"]["n"] == max(graph["executes"] for graph in answer["graphs"])


def test_compressed_files_are_read_and_damaged_ones_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "optrace.json.gz"
    path.write_bytes(gzip.compress((DATA / "optrace.json").read_bytes()))
    assert main(["import", str(path), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["files"]
    assert answer["units"]["HVX"]["cycles"] == 500
    path.write_bytes(path.read_bytes()[:-40])
    assert main(["import", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_summary_of_an_optrace_gives_units_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(DATA / "qhas.json"), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["files"]
    assert {name: (row["cycles"], row["share"]) for name, row in answer["units"].items()} == {
        "HMX 256": (390, 0.39),
        "HVX 512": (500, 0.5),
        "DMA 258": (210, 0.21),
    }
    assert answer["bytes"]["total_dram_read"] == answer["bytes"]["DMA 258 dram_read"] == 4096
    assert answer["nodes"] == {"Conv_0": 490, "Pool_0": 400} and answer["window_cycles"] == 1000


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_mark_of_the_encoding_is_no_part_of_the_text(tmp_path: Path, encoding: str) -> None:
    for name in ("onnxruntime.csv", "viewer.txt"):
        marked = tmp_path / name
        marked.write_text((DATA / name).read_text(), encoding=encoding)
        pd.testing.assert_frame_equal(read_csv(marked).events, read_csv(DATA / name).events)


def test_numbers_that_no_counter_holds_cost_their_own_line_alone(tmp_path: Path) -> None:
    long = tmp_path / "long.csv"
    long.write_text((DATA / "onnxruntime.csv").read_text().replace("747", "9" * 60))
    assert len(read_csv(long).complaints) == 1


def test_an_optrace_without_processes_and_with_impossible_times_is_read_in_parts(tmp_path: Path) -> None:
    events = [
        {"name": "a", "ph": "X", "ts": 20, "dur": 200, "args": {"Flags": ["dma"]}},
        {"name": "b", "ph": "X", "ts": 9, "dur": 1e300},
    ]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_optrace(path)
    assert utilization(trace.events)["units"]["DMA"]["cycles"] == 200 and trace.complaints[0].endswith(": 1")


@pytest.mark.parametrize("kind", ["RUN_TRACE", "QHAS"])
def test_the_viewers_other_files_are_told_from_an_optrace(tmp_path: Path, kind: str) -> None:
    """A run trace has events of the same form, but its times are ticks."""
    other = tmp_path / "chrometrace_runtrace.json"
    other.write_text((DATA / "optrace.json").read_text().replace("OP_TRACE", kind))
    with pytest.raises(RecordingError, match=kind):
        read_optrace(other)


def test_a_cut_optrace_gives_what_is_whole_and_says_so(tmp_path: Path) -> None:
    text = (DATA / "optrace.json").read_text()
    cut = tmp_path / "cut.json"
    cut.write_text(text[: len(text) * 2 // 3])
    trace = read_optrace(cut)
    assert "truncated" in trace.complaints[0] and 0 < len(trace.events) < 6


def test_an_optrace_without_an_event_that_can_be_read_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "optrace.json"
    path.write_text((DATA / "optrace.json").read_text().replace('"ph": "X"', '"ph": "?"'))
    trace = read_optrace(path)
    assert len(trace.events) == 0


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = (DATA / "onnxruntime.csv").read_text().splitlines(keepends=True)
    lines[4] = "0,BACKEND,many,CYCLES,BACKEND,ROOT,x\n"
    bad = tmp_path / "bad.csv"
    bad.write_text("".join(lines)[:-2])
    imported = read_csv(bad)
    assert len(imported.events) == 14
    assert "damaged" in imported.complaints[0] and "line 5" in imported.complaints[0]
    assert "truncated" in imported.complaints[-1]


def test_a_quote_left_open_costs_its_own_line_alone(tmp_path: Path) -> None:
    lines = (DATA / "onnxruntime.csv").read_text().splitlines(keepends=True)
    lines[5] = lines[5].rstrip("\n").rsplit(",", 1)[0] + ',"left open\n'
    bad = tmp_path / "bad.csv"
    bad.write_text("".join(lines))
    imported = read_csv(bad)
    assert len(imported.events) == len(lines) - 2 and len(imported.complaints) == 1


@pytest.mark.parametrize("size", [10, 4096])
def test_a_serialized_log_whole_or_cut_is_sent_to_the_viewer(tmp_path: Path, size: int) -> None:
    log = tmp_path / "profile_qnn.log"
    log.write_bytes(bytes(range(256))[:size] * (size // 256 + 1))
    with pytest.raises(RecordingError, match="qnn-profile-viewer"):
        read_csv(log)


@settings(max_examples=drawn(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=200))
def test_foreign_text_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(text.encode(errors="replace"))
    for reader in (read_csv, read_optrace, read_op_map):
        with pytest.raises(RecordingError):
            reader(path)


def test_one_bad_file_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign.csv"
    foreign.write_text("a,b\n1,2\n")
    files = [str(foreign), str(tmp_path / "missing.csv"), str(DATA / "onnxruntime.csv"), str(DATA / "optrace.json")]
    assert main(["import", *files, "--json", "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr()
    answers = json.loads(shown.out)["files"]
    assert [answer.get("events") for answer in answers] == [None, None, 16, 6]
    assert "foreign.csv" in shown.err and "missing.csv" in shown.err
    assert len(pd.read_parquet(tmp_path / "out" / "optrace.parquet")) == 6


def test_cycles_become_time_only_at_a_frequency_that_the_user_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(DATA / "optrace.json")]) == 0
    assert "µs" not in capsys.readouterr().out
    assert main(["import", str(DATA / "optrace.json"), "--mhz", "100"]) == 0
    assert "10.0 µs" in capsys.readouterr().out


def test_tables_of_profiles_are_not_a_recording_and_do_not_replace_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = tmp_path / "onnxruntime.csv"
    twin.write_text("".join((DATA / "onnxruntime.csv").read_text().splitlines(keepends=True)[:4]))
    assert main(["import", str(DATA / "onnxruntime.csv"), str(twin), "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr()
    assert str(twin) in shown.err and "not a recording" in shown.out
    assert len(pd.read_parquet(tmp_path / "out" / "onnxruntime.parquet")) == 16
    assert main(["summary", str(tmp_path / "out")]) == 2 and "--onto" in capsys.readouterr().err
