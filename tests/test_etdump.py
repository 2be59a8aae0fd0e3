"""ExecuTorch's ETDump is a recording: dumps of ExecuTorch, drawn ones, those of delegates like QNN's, and damaged ones."""

import json
from pathlib import Path
from typing import Any

import flatbuffers
import pandas as pd
import pytest
from flatbuffers import number_types
from hypothesis import given
from hypothesis import strategies as st

from analyzer.imports.etdump import read_dump
from analyzer.imports.run_folder import Run
from analyzer.tables import store
from moescope.__main__ import main
from tests.conftest import ROOT
from tests.golden import Golden
from tracer.recording.format import RecordingError

DATA = ROOT / "tests/data/etdump"
RUNS, LAYERS = 4, 2
Event = dict[str, Any]


def profiled(
    name: str | None, begin: int, end: int, instruction: int = 0, delegate: str | int | None = None, chain: int = 0
) -> Event:
    return {"name": name, "begin": begin, "end": end, "instruction": instruction, "delegate": delegate, "chain": chain}


def step(begin: int, end: int) -> Event:
    return profiled("Method::execute", begin, end, chain=-1)


def dump_of(runs: list[list[Event]], prefixed: bool = True) -> bytes:
    """An ETDump of these events, by the schema of executorch/devtools/etdump; "bytes" is an allocation, {} a debug event."""
    builder = flatbuffers.Builder(1024)
    runs_at = vector(builder, [run_at(builder, events) for events in runs])
    builder.StartObject(2)
    builder.PrependUOffsetTRelativeSlot(1, runs_at, 0)
    root = builder.EndObject()
    (builder.FinishSizePrefixed if prefixed else builder.Finish)(root, file_identifier=b"ED00")
    return bytes(builder.Output())


def vector(builder: flatbuffers.Builder, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()


def run_at(builder: flatbuffers.Builder, events: list[Event]) -> int:
    name, at = builder.CreateString("Execute"), vector(builder, [event_at(builder, event) for event in events])
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(0, name, 0)
    builder.PrependUOffsetTRelativeSlot(3, at, 0)
    return builder.EndObject()


def event_at(builder: flatbuffers.Builder, event: Event) -> int:
    if "bytes" in event:
        builder.StartObject(2)
        builder.PrependSlot(number_types.Uint64Flags, 1, event["bytes"], 0)
        slot, at = 1, builder.EndObject()
    elif not event:
        builder.StartObject(6)
        slot, at = 2, builder.EndObject()
    else:
        slot, at = 0, profile_at(builder, event)
    builder.StartObject(3)
    builder.PrependUOffsetTRelativeSlot(slot, at, 0)
    return builder.EndObject()


def profile_at(builder: flatbuffers.Builder, event: Event) -> int:
    delegate = event["delegate"]
    name = builder.CreateString(event["name"]) if event["name"] is not None else 0
    text = builder.CreateString(delegate) if isinstance(delegate, str) else 0
    builder.StartObject(8)
    builder.PrependUOffsetTRelativeSlot(0, name, 0)
    builder.PrependInt32Slot(1, event["chain"], 0)
    builder.PrependInt32Slot(2, event["instruction"], -1)
    builder.PrependInt32Slot(3, delegate if isinstance(delegate, int) else -1, -1)
    builder.PrependUOffsetTRelativeSlot(4, text, 0)
    builder.PrependSlot(number_types.Uint64Flags, 6, event["begin"], 0)
    builder.PrependSlot(number_types.Uint64Flags, 7, event["end"], 0)
    return builder.EndObject()


def imported(folder: Path, dump: Path) -> store.LazyTables:
    assert main(["import", str(dump), "--out", str(folder / "run")]) == 0
    return store.load_tables(folder / "run")


def read(runs: list[list[Event]], prefixed: bool = True) -> Run:
    return read_dump(Path("x.etdp"), dump_of(runs, prefixed))


@pytest.mark.parametrize("backend", ["cpu", "xnnpack"])
def test_what_executorch_wrote_is_what_its_own_reader_tells(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = imported(tmp_path, DATA / f"{backend}.etdp")
    events = [event for run in json.loads((DATA / f"{backend}.json").read_text()) for event in run]
    spans = {name: [(begin, end) for event, _, _, begin, end in events if event == name] for name in {e[0] for e in events}}
    assert list(zip(tables["tokens"]["begin_ns"], tables["tokens"]["end_ns"], strict=True)) == spans["Method::execute"]
    parts = [(begin, end) for _, _, delegate, begin, end in events if delegate]
    operators = tables["operators"]
    assert sorted(zip(operators["begin_ns"], operators["end_ns"], strict=True)) == sorted([*spans["OPERATOR_CALL"], *parts])
    own = [name.removeprefix("native_call_") for name, *_ in events if name and name.startswith("native_call_")]
    assert sorted(operators["type"]) == sorted([*own, *(delegate for _, _, delegate, *_ in events if delegate)])
    assert operators.groupby("token_id").size().tolist() == [len(operators) // RUNS] * RUNS
    graphs = tables["graphs"]
    delegates = graphs[graphs["kind"] == "delegate"]
    assert list(zip(delegates["begin_ns"], delegates["end_ns"], strict=True)) == spans.get("DELEGATE_CALL", [])
    assert set(graphs["kind"]) - {"delegate"} == {"run", "init", "load_method"} and len(tables["qnn_executes"]) == 0
    held = operators.merge(graphs[["graph_id", "begin_ns", "end_ns", "token_id"]], on="graph_id", suffixes=("", "_graph"))
    assert len(held) == len(operators) and (held["token_id"] == held["token_id_graph"]).all()
    assert (held["begin_ns_graph"] <= held["begin_ns"]).all() and (held["end_ns"] <= held["end_ns_graph"]).all()
    capsys.readouterr()
    assert main(["time", str(tmp_path / "run"), "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)["run"]
    assert spent["cause_ms"]["computing"] == pytest.approx(operators["duration_ns"].sum() / 1e6)
    assert spent["ms"] == pytest.approx(sum(end - begin for begin, end in spans["Method::execute"]) / 1e6)
    assert main(["write", str(tmp_path / "run"), "--out", str(tmp_path / "report.html"), "--only", "report"]) == 0
    assert main(["write", str(tmp_path / "run"), "--out", str(tmp_path / "trace.pftrace"), "--only", "trace"]) == 0


def test_a_delegate_that_writes_lengths_as_qnn_does_is_the_accelerators(tmp_path: Path, capsys) -> None:
    nodes = [
        profiled(None, 0, cycles, delegate=name) for name, cycles in (("conv:OpId_3 (cycles)", 812), ("add:OpId_7 (cycles)", 99))
    ]
    run = [*nodes, profiled("DELEGATE_CALL", 1_000, 9_000), profiled("native_call_add.out", 9_200, 9_800, 1)]
    run += [profiled("OPERATOR_CALL", 9_100, 9_900, 1), step(900, 10_000)]
    (tmp_path / "qnn.etdp").write_bytes(dump_of([run]))
    tables = imported(tmp_path, tmp_path / "qnn.etdp")
    executes, events = tables["qnn_executes"], tables["qnn_events"]
    assert executes["duration_ns"].tolist() == [8_000] and executes["accel_us"].isna().all()
    assert executes["graph_name"].tolist() == ["DELEGATE_CALL#0"] and executes["token_id"].tolist() == [0]
    assert events["name"].tolist() == ["conv:OpId_3 (cycles)", "add:OpId_7 (cycles)"] and events["value"].tolist() == [812, 99]
    assert events["execute_id"].tolist() == [0, 0] and set(events["unit"]) == {""} and set(events["type_name"]) == {"NODE"}
    capsys.readouterr()
    assert main(["time", str(tmp_path / "run"), "--json"]) == 0
    spent = json.loads(capsys.readouterr().out)["run"]["cause_ms"]
    assert (spent["accelerator"], spent["computing"]) == (pytest.approx(0.008), pytest.approx(0.0008))


def test_what_no_table_holds_is_named(golden: Golden) -> None:
    run: list[Event] = [
        {"bytes": 4096},
        {"bytes": 512},
        {},
        profiled("own", 5, 6),
        profiled("DELEGATE_CALL", 10, 20),
        step(1, 30),
    ]
    read_run = read([run])
    golden("import", "\n".join(read_run.warnings))
    assert read_run.tables["operators"]["type"].tolist() == ["DELEGATE_CALL"] and len(read_run.tables["qnn_executes"]) == 0


Times = st.lists(st.integers(0, 1 << 40), min_size=4, max_size=4, unique=True).map(sorted)
Calls = st.lists(st.tuples(st.sampled_from(["operator", "placed", "qnn", "bare"]), st.text(max_size=12), Times), max_size=8)


@given(st.lists(Calls, min_size=1, max_size=4), st.booleans())
def test_drawn_dumps_are_read_as_they_were_written(runs: list[Any], prefixed: bool) -> None:
    written: list[list[Event]] = []
    types: list[str] = []
    base, executes, nodes, delegates = 1, 0, 0, 0
    for calls in runs:
        events, first = [], base
        for instruction, (kind, name, times) in enumerate(calls):
            a, b, c, d = (base + time for time in times)
            base = d + 1
            if kind == "operator":
                events += [profiled(f"native_call_{name}", b, c, instruction), profiled("OPERATOR_CALL", a, d, instruction)]
                types.append(name)
                continue
            number = len(name)
            inner = {
                "placed": [profiled(None, b, c, instruction, number)],
                "qnn": [profiled(None, 0, c - b, instruction, name + "x")],
            }
            events += [*inner.get(kind, []), profiled("DELEGATE_CALL", a, d, instruction)]
            types.append(str(number) if kind == "placed" else "DELEGATE_CALL")
            executes, nodes, delegates = executes + (kind == "qnn"), nodes + (kind == "qnn"), delegates + (kind == "placed")
        written.append([*events, step(first, base)])
        base += 1
    run = read(written, prefixed)
    tables = run.tables
    assert tables["tokens"]["duration_ns"].tolist() == [each[-1]["end"] - each[-1]["begin"] for each in written]
    assert tables["operators"]["type"].tolist() == types
    assert len(tables["qnn_executes"]) == executes == nodes and tables["qnn_events"]["execute_id"].tolist() == [*range(nodes)]
    assert (tables["graphs"]["kind"] == "delegate").sum() == delegates
    assert tables["operators"].groupby("token_id").size().reindex(range(len(runs)), fill_value=0).tolist() == [*map(len, runs)]


@given(st.data())
def test_a_damaged_dump_is_refused_or_read(data: st.DataObject) -> None:
    raw = bytearray((DATA / "xnnpack.etdp").read_bytes())
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    keep = data.draw(st.integers(len(raw) // 2, len(raw)))
    raw[4:12] = (DATA / "xnnpack.etdp").read_bytes()[4:12]
    try:
        tables = read_dump(Path("x.etdp"), bytes(raw[:keep])).tables
    except RecordingError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert keep == len(raw) and isinstance(tables["tokens"], pd.DataFrame)


def test_a_dump_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (DATA / "cpu.etdp").read_bytes()
    files = {
        "cut.etdp": whole[:3000],
        "head.etdp": whole[:12],
        "early.etdp": dump_of([[profiled("Method::init", 1, 2, chain=-1)]]),
    }
    files |= {"late.etdp": dump_of([[step(1, 1 << 63)]]), "back.etdp": dump_of([[step(9, 3)]])}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
        assert main(["import", str(tmp_path / name), "--out", str(tmp_path / "run")]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1 and name in said[0]
    assert not (tmp_path / "run").exists()


def test_lists_that_share_their_parts_end() -> None:
    builder = flatbuffers.Builder(1024)
    event = event_at(builder, step(1, 2))
    events = vector(builder, [event] * 200)
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(3, events, 0)
    runs = vector(builder, [builder.EndObject()] * 200)
    builder.StartObject(2)
    builder.PrependUOffsetTRelativeSlot(1, runs, 0)
    builder.FinishSizePrefixed(builder.EndObject(), file_identifier=b"ED00")
    with pytest.raises(RecordingError, match="damaged"):
        read_dump(Path("x.etdp"), bytes(builder.Output()))
