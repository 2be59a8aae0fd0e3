"""Programs that call QNN's C API, traced without change and held against what they know: on HTP, and on a backend of ours."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzer.questions.npu_figures import npu_statistics
from analyzer.tables.store import load_tables
from tests.conftest import ROOT, begin_trace, manifest_when, rest_long, trace
from tests.truth import skip_where_stolen
from workloads.host_time import HostTime
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes")
PROGRAMS = ROOT / "workloads" / "programs"
EXECUTES = 5
COLUMNS = ["type", "unit_number", "value", "name", "depth"]
UNITS = {"us": 1, "bytes": 2, "cycles": 3, "count": 4}


@dataclass
class Traced:
    """One traced run: what the program said, the manifest and the tables."""

    said: dict[str, Any]
    manifest: dict[str, Any]
    tables: dict[str, Any]
    stolen: float  # of the CPUs' time, by the host
    folder: Path


def traced(folder: Path, *arguments: str, env: dict[str, str] | None = None, program: str = "qnn_c.py") -> Traced:
    (folder / "libnative_tls.conf").touch()
    run = folder / "run"
    command = (sys.executable, str(PROGRAMS / program), *arguments)
    host = HostTime()
    done = trace("run", "--no-views", "--levels", "qnn", "-o", str(run), "--", *command, env=env)
    assert done.returncode == 0, done.stderr
    stolen = host.share()
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return Traced(said, json.loads((run / "manifest.json").read_text()), load_tables(run), stolen, run)


def htp() -> str:
    """The backend."""
    return str(Path(pytest.importorskip("onnxruntime_qnn").__file__).parent / "libQnnHtp.so")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("fake") / "libQnnFake.so"
    source = str(ROOT / "workloads" / "programs" / "fake_qnn.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), source, "-lpthread"], check=True)
    return library


WAITING = """
import sys, numpy as np, onnxruntime as ort, onnxruntime_qnn
from workloads.programs.plain_qnn import model_bytes
ort.register_execution_provider_library("QNNExecutionProvider", onnxruntime_qnn.get_library_path())
devices = [device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"][:1]
options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
options.add_provider_for_devices(devices, {"backend_type": "htp", "soc_model": "57"})
session, x = ort.InferenceSession(model_bytes(2, np.random.default_rng(0)), options), np.ones((8, 64), np.float32)
session.run(None, {"x": x})
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    session.run(None, {"x": x})
"""


def growing(run: Path, device: Path, on: tuple[str, ...], tracer: subprocess.Popen[str]) -> Path:
    """The folder in which a recording grows: with --on, first on the device."""
    while on and not (places := list(device.with_name("device").glob("*/recording"))):
        assert tracer.poll() is None, tracer.stderr and tracer.stderr.read()
        time.sleep(0.05)
    return places[0] if on else run


@pytest.mark.needs("htp")
def test_executes_of_a_program_that_had_its_table_before_it_was_followed_are_all_seen(
    tmp_path: Path, device: Path, on: tuple[str, ...]
) -> None:
    (tmp_path / "libnative_tls.conf").touch()
    environment, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    command = [sys.executable, "-c", WAITING]
    target = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=tmp_path, env=environment, text=True)
    assert target.stdout is not None and any(line == "ready\n" for line in target.stdout)
    options = ("--no-views", "--levels", "qnn", "--pid", str(target.pid), "-o", str(tmp_path / "run"))
    tracer = begin_trace("attach", *options, *(("--on", f"exec:{device}") if on else ()))
    manifest_when(lambda manifest: manifest["probes"], growing(tmp_path / "run", device, on, tracer), tracer)
    target.communicate("go\n", timeout=120)
    assert tracer.wait(timeout=120) == 0
    executes, manifest = (
        load_tables(tmp_path / "run")["qnn_executes"],
        json.loads((tmp_path / "run" / "manifest.json").read_text()),
    )
    assert len(executes) == 20 and executes["complete"].all() and (executes["status"] == 0).all()
    assert manifest["qnn"] == {"backend": 6, "api": [2, 40, 0], "emulator": True}
    assert [bool(re.match(rf"qnn: process {target.pid} ran [\d.]+ s ", line)) for line in manifest["warnings"]] == [True]


LOOPING = (
    WAITING[: WAITING.index("sys.stdin")]
    + """
import json, threading, time
asked, log = threading.Event(), []
threading.Thread(target=lambda: (sys.stdin.readline(), asked.set())).start()
while not asked.is_set():
    log.append([time.monotonic_ns()])
    session.run(None, {"x": x})
    log[-1].append(time.monotonic_ns())
print(json.dumps(log))
"""
)


@pytest.mark.long
@pytest.mark.needs("htp")
@pytest.mark.parametrize("attempt", range(5))
def test_no_execution_of_a_busy_program_is_lost_after_its_table_was_found(tmp_path: Path, attempt: int) -> None:
    (tmp_path / "libnative_tls.conf").touch()
    environment, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    target = subprocess.Popen([sys.executable, "-c", LOOPING], stdin=pipe, stdout=pipe, cwd=tmp_path, env=environment, text=True)
    assert target.stdout is not None and any(line == "ready\n" for line in target.stdout)
    options = ("--no-views", "--levels", "qnn", "--pid", str(target.pid), "--duration", "4", "-o", str(tmp_path / "run"))
    done = trace("attach", *options)
    begin, end = np.array(json.loads(target.communicate("enough\n", timeout=120)[0].splitlines()[-1])).T
    executes = load_tables(tmp_path / "run")["qnn_executes"].query("complete").sort_values("begin_ns")
    run = np.searchsorted(begin, executes["begin_ns"]) - 1
    assert len(run) > 100 and run.tolist() == list(range(run[0], run[-1] + 1)), (
        "each run of the program from the first recorded on"
    )
    assert (executes["end_ns"].to_numpy() <= end[run]).all() and re.search(r"qnn: .* \([\d.]+ s of CPU", done.stderr)


def test_a_mapped_backend_without_a_table_in_memory_is_said(tmp_path: Path, on: tuple[str, ...]) -> None:
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('ready', flush=True); sys.stdin.readline()"
    plain = tmp_path / "libQnnEmpty.so"
    (tmp_path / "empty.c").write_text("int QnnInterface_getProviders(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(plain), str(tmp_path / "empty.c")], check=True)
    command, pipe = [sys.executable, "-c", script, str(plain)], subprocess.PIPE
    target = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert target.stdout is not None and target.stdout.readline() == "ready\n"
    run = str(tmp_path / "run")
    done = trace("attach", "--no-views", "--levels", "qnn", "--pid", str(target.pid), "--duration", "0.2", "-o", run, *on)
    target.communicate("go\n", timeout=120)
    assert re.search(rf"process {target.pid} .*[\d.]+ MB", done.stderr)


ENDING = """
import ctypes as c, os, sys, time
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))  # before the search, which is urgent too
library, libc = c.CDLL(sys.argv[1]), c.CDLL(None)
libc.sbrk.restype, libc.sbrk.argtypes = c.c_void_p, [c.c_ssize_t]
c.memset(libc.sbrk(200 << 20), 1, 200 << 20)
first = c.c_uint8.from_address(c.cast(library.QnnInterface_getProviders, c.c_void_p).value)
before = first.value
print("ready", flush=True)
until = time.monotonic() + 120
while first.value == before and time.monotonic() < until:
    time.sleep(0.001)
os._exit(first.value == before)
"""


def test_a_program_that_ends_while_its_table_is_searched_is_said_to_have_ended(tmp_path: Path) -> None:
    plain = tmp_path / "libQnnEmpty.so"
    (tmp_path / "empty.c").write_text("int QnnInterface_getProviders(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(plain), str(tmp_path / "empty.c")], check=True)
    target = subprocess.Popen([sys.executable, "-c", ENDING, str(plain)], stdout=subprocess.PIPE, text=True)
    assert target.stdout is not None and target.stdout.readline() == "ready\n"
    done = trace("attach", "--no-views", "--levels", "qnn", "--pid", str(target.pid), "-o", str(tmp_path / "run"))
    assert target.wait(timeout=60) == 0 and re.search(rf"process {target.pid} ended .*[\d.]+ s", done.stderr)


@pytest.fixture(scope="module")
def on_htp(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory.mktemp("htp"), htp(), "threads=2", "rounds=3", f"executes={EXECUTES}")


@pytest.fixture(scope="module")
def on_fake(fake: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory.mktemp("traced"), str(fake), "every=1", f"executes={EXECUTES}")


def events_of(run: Traced, execute_id: int) -> list[list[Any]]:
    """[type, unit, value, name, depth] of an execution's events in the order they were read."""
    events = run.tables["qnn_events"]
    mine = events[events["execute_id"] == execute_id]
    return mine.assign(unit_number=mine["unit"].map(UNITS))[COLUMNS].values.tolist()


@pytest.mark.needs("htp")
def test_executes_names_and_events_are_those_the_program_knows(on_htp: Traced) -> None:
    executes = on_htp.tables["qnn_executes"]
    assert len(on_htp.said["sessions"]) == 6
    for session in on_htp.said["sessions"]:
        mine = executes[executes["graph_name"] == session["graph"]].sort_values("begin_ns")
        assert mine["tid"].tolist() == [session["tid"]] * EXECUTES
        assert mine["graph"].tolist() == [run["handle"] for run in session["runs"]]
        assert mine["status"].tolist() == [run["status"] for run in session["runs"]]
        assert [events_of(on_htp, row) for row in mine["execute_id"]] == [run["events"] for run in session["runs"]]
        assert mine["first"].tolist() == [True] + [False] * (EXECUTES - 1)
    assert on_htp.manifest["lost"] == {} and len(executes) == 6 * EXECUTES


@pytest.mark.needs("htp")
def test_calls_are_as_many_as_the_program_made_and_binaries_as_large(on_htp: Traced) -> None:
    calls, said = on_htp.tables["qnn_calls"], on_htp.said["calls"]
    spans = ("backendCreate", "deviceCreate", "contextCreate", "contextGetBinary", "contextCreateFromBinary", "contextFree")
    spans += ("graphCreate", "graphFinalize", "graphRetrieve", "profileCreate")
    counted = calls["call"].value_counts()
    assert {name: int(counted[name]) for name in spans} == {name: said[name] for name in spans}
    sizes = sorted(session["bytes"] for session in on_htp.said["sessions"])
    for name in ("contextCreateFromBinary", "contextGetBinary"):
        assert sorted(calls[calls["call"] == name]["bytes"]) == sizes


@pytest.mark.needs("htp")
def test_handles_used_again_are_other_objects_and_everything_freed_has_an_end(on_htp: Traced) -> None:
    objects = on_htp.tables["qnn_objects"]
    graphs = objects[objects["kind"] == "graph"]
    assert len(graphs) == 12 and graphs["generation"].max() >= 3 and graphs["handle"].nunique() <= 4
    assert (objects["until_ns"] > objects["since_ns"]).all()
    owners = objects.set_index("object_id").loc[graphs["owner_id"], "kind"]
    assert set(owners) == {"context"}
    executes = on_htp.tables["qnn_executes"]
    named = executes.merge(graphs, on="object_id")
    assert len(named) == len(executes) and (named["graph_name"] == named["name"]).all()


@pytest.mark.needs("htp")
def test_finalize_events_belong_to_their_graphs_own_call(on_htp: Traced) -> None:
    calls, events = on_htp.tables["qnn_calls"], on_htp.tables["qnn_events"]
    finalizes = calls[calls["call"] == "graphFinalize"].set_index("name")["call_id"]
    for session in on_htp.said["sessions"]:
        mine = events[events["call_id"] == finalizes[session["graph"]]]
        assert mine["value"].tolist() == [event[2] for event in session["finalize_events"]]
    assert ((events["execute_id"] >= 0) | (events["call_id"] >= 0)).all()


LINTING = 7001


@pytest.mark.needs("htp")
def test_linting_events_of_a_program_that_asks_for_them_are_recorded(tmp_path: Path) -> None:
    run = traced(tmp_path, htp(), f"level={LINTING}", "executes=2")
    (session,) = run.said["sessions"]
    executes, events = run.tables["qnn_executes"], run.tables["qnn_events"]
    assert [events_of(run, row) for row in executes["execute_id"]] == [each["events"] for each in session["runs"]]
    assert set(executes["profile_level"]) == {LINTING}
    assert events["type_name"].str.contains("NODE_WAIT|CRITICAL").any()


@pytest.mark.needs("htp")
def test_events_are_seen_once_whether_onnx_runtime_reads_them_or_the_program_itself(tmp_path: Path) -> None:
    run = traced(tmp_path, str(tmp_path), htp(), program="mixed_qnn.py")
    executes, events, calls = (run.tables[f"qnn_{name}"] for name in ("executes", "events", "calls"))
    (own,) = run.said["sessions"]
    mine, made = (rows.set_index("name").loc[[own["graph"]]] for rows in (executes.rename(columns={"graph_name": "name"}), calls))
    assert [events_of(run, row) for row in mine["execute_id"]] == [each["events"] for each in own["runs"]]
    theirs = events[~events["execute_id"].isin(mine["execute_id"]) & ~events["call_id"].isin(made["call_id"])]
    told = []
    for path in sorted(tmp_path.glob("profile*.csv")):
        with path.open(newline="") as file:
            told += [(int(row["Time"]), row["Event Identifier"], row["Event Level"] != "ROOT") for row in csv.DictReader(file)]
    assert [*zip(theirs["value"], theirs["name"], theirs["depth"] > 0, strict=True)] == told
    assert len(executes) == len(mine) + 6 == 9 and run.manifest["lost"] == {}


@pytest.mark.needs("htp")
def test_the_probes_on_each_event_are_spared_where_onnx_runtime_reads_them(tmp_path: Path) -> None:
    """They would be hit four times for each event; the function that the provider hands it to is hit once."""
    program = [sys.executable, str(PROGRAMS / "plain_qnn.py"), str(tmp_path)]
    done = trace("run", "--no-views", "--levels", "qnn", "-o", str(tmp_path / "run"), "--", *program)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    hits = {row["program"]: row["hits"] for row in manifest["probes"]}
    assert not {program for program in hits if "event_data" in program or "sub_events" in program}
    assert hits["qnn_process_extended_event"] == manifest["records"]["qnn_event"] > 100
    logs = {row["from"]: row["bytes"] for row in manifest["qnn_logs"]}
    assert logs == {str(path): path.stat().st_size for path in tmp_path.glob("*_qnn.log")}
    assert manifest["records"]["qnn_log"] == len(logs) == 2, "it is opened for every harvest, and told once"


@pytest.mark.needs("htp")
def test_the_emulators_times_nest_and_its_cycles_add_up(on_htp: Traced) -> None:
    assert on_htp.tables["qnn_findings"]["text"].tolist() == []


def test_asynchronous_executions_end_when_the_program_is_told(on_fake: Traced) -> None:
    executes = on_fake.tables["qnn_executes"]
    late = executes[executes["asynchronous"]]
    assert len(late) == 2 and late["complete"].all() and (late["status"] == 0).all()
    assert (late["returned_ns"] < late["end_ns"]).all() and (late["duration_ns"] > 1_500_000).all()
    assert len(executes) == EXECUTES + 2


def test_memory_sizes_signals_lists_and_profile_options_are_read_from_the_arguments(on_fake: Traced) -> None:
    calls, (session,) = on_fake.tables["qnn_calls"], on_fake.said["sessions"]
    size = calls.set_index("call")["bytes"]
    assert size["contextCreateFromBinaryWithSignal"] == 555 and size["contextCreateFromBinaryListAsync"] == 2 * 777
    assert size["contextCreateFromBinaryWithCallback"] == 666
    made = calls.set_index("call")["object_id"]
    assert made["contextApplyBinarySection"] == made["contextCreateFromBinaryWithCallback"] >= 0
    memory = on_fake.tables["qnn_objects"].query("kind == 'memory'")
    assert memory["handle"].tolist() == session["memories"] and set(memory["bytes"]) == {session["memory_bytes"]}
    assert set(on_fake.tables["qnn_executes"]["profile_level"]) == {2}


def test_events_keep_the_type_of_their_value(on_fake: Traced) -> None:
    events = RawRecording(on_fake.folder).records("qnn_event")
    assert len(events) and set(events["dtype"][events["extended"] == 1].tolist()) == {0x164}


@pytest.mark.long
def test_time_stamps_of_the_device_lie_within_their_executions_on_the_hosts_clock(on_fake: Traced) -> None:
    skip_where_stolen(on_fake.stolen)
    executes, events = on_fake.tables["qnn_executes"], on_fake.tables["qnn_events"]
    both = events[events["host_ns"] >= 0].merge(executes, on="execute_id", suffixes=("", "_run"))
    assert len(both) == EXECUTES * 12
    assert (both["host_ns"] > both["begin_ns"]).all() and (both["host_ns"] < both["end_ns"]).all()
    truth = both["end_ns"] - 1_000_000  # what the backend stamps: a millisecond before it has finished, if it keeps its CPU
    assert (both["host_ns"] - truth).abs().median() < 800_000


def test_a_provider_without_a_table_is_told_and_the_program_goes_on(fake: Path, tmp_path: Path) -> None:
    run = traced(tmp_path, str(fake), env={"FAKE_QNN": "none"})
    assert run.said == {"no table": True}
    assert [line.split(":")[0] for line in run.manifest["warnings"]] == ["qnn"]


REPLACING = """
import _ctypes, os, shutil, sys
import ctypes as c
from workloads.programs.qnn_c import Qnn
path, other = sys.argv[1:]
for source in (None, other):
    if source:
        _ctypes.dlclose(qnn.library._handle)
        shutil.copyfile(source, path + ".new")
        os.replace(path + ".new", path)
    qnn = Qnn(path)
    for _ in range(7):
        qnn("graphExecute", 3)
    notify = c.cast(qnn.library.fake_notify, c.c_void_p)
    for done in range(3):
        qnn("graphExecuteAsync", 3, None, 0, None, 0, None, None, notify, None)
        while qnn.library.fake_done() <= done:
            pass
"""


@pytest.mark.needs("probes")
def test_a_library_that_is_replaced_on_disk_is_probed_again_and_asynchronous_calls_need_no_parameter(
    fake: Path, tmp_path: Path
) -> None:
    mine, other = shutil.copyfile(fake, tmp_path / "libQnnMine.so"), tmp_path / "other.so"
    source = str(ROOT / "workloads" / "programs" / "fake_qnn.c")
    subprocess.run(["cc", "-g3", "-shared", "-fPIC", "-o", str(other), source, "-lpthread"], check=True)
    command = [sys.executable, "-c", REPLACING, str(mine), str(other)]
    done = trace(
        "run", "--no-views", "--levels", "qnn", "-o", str(tmp_path / "run"), "--", *command, env={"PYTHONPATH": str(ROOT)}
    )
    executes = load_tables(tmp_path / "run")["qnn_executes"]
    assert done.returncode == 0 and executes["complete"].all(), done.stderr
    assert executes["asynchronous"].tolist() == 2 * ([False] * 7 + [True] * 3)
    late = executes[executes["asynchronous"]]
    assert (late["duration_ns"] > 20e6).all() and (late["returned_ns"] < late["end_ns"]).all()


FORKING = """
import os, sys
from workloads.programs.qnn_c import Qnn
def execute(graph, times):
    for _ in range(times):
        qnn("graphExecute", graph)
qnn = Qnn(sys.argv[1])
context = qnn.made("contextCreate", qnn.made("backendCreate", None, None), None, None)
graph = qnn.made("graphCreate", context, b"before", None)
execute(graph, 2)
if not os.fork():
    execute(graph, 3)
    own = qnn.made("graphCreate", context, b"child's", None)
    execute(own, 4)
    if not os.fork():
        execute(graph, 5)
        execute(own, 6)
        os._exit(0)
    os.wait()
    os._exit(0)
execute(qnn.made("graphCreate", context, b"after", None), 7)
os.wait()
"""


def test_executions_of_a_forked_process_have_the_names_of_graphs_from_before(fake: Path, tmp_path: Path) -> None:
    command, env = [sys.executable, "-c", FORKING, str(fake)], {"PYTHONPATH": str(ROOT)}
    done = trace("run", "--no-views", "--levels", "qnn", "-o", str(tmp_path / "run"), "--", *command, env=env)
    assert done.returncode == 0, done.stderr
    executes = load_tables(tmp_path / "run")["qnn_executes"]
    names = [list(rows["graph_name"]) for _, rows in executes.groupby("pid")]
    assert sorted(names, key=len) == [
        ["before"] * 3 + ["child's"] * 4,
        ["before"] * 2 + ["after"] * 7,
        ["before"] * 5 + ["child's"] * 6,
    ]


@pytest.mark.skipif(shutil.which("c++") is None or shutil.which("strip") is None, reason="no C++ compiler")
@pytest.mark.parametrize("without", rest_long([(), ("cold",), ("cold", "ends")], ("cold", "ends")))
def test_an_exception_passes_the_stages_of_the_provider_whose_ends_are_known_or_left_out(
    tmp_path: Path, without: tuple[str, ...]
) -> None:
    library = str(tmp_path / "libonnxruntime_providers_qnn.so")
    options = ["-O2", "-std=c++17", "-shared", "-fPIC", *["-DTAIL"] * ("ends" in without)]
    subprocess.run(["c++", *options, "-o", library, str(PROGRAMS / "qnn_provider.cpp")], check=True)
    if "cold" in without:
        subprocess.run(["strip", "-w", "--strip-symbol=*.cold*", library], check=True)
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).drive_stages(6)"
    command = [sys.executable, "-c", script, library]
    done = trace("run", "--no-views", "--levels", "qnn", "-o", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    stage, begin, end, threw = map(list, zip(*said, strict=True))
    tables, unknown = load_tables(tmp_path / "run"), ["compose"] * ("ends" in without)
    stages = tables["qnn_stages"]
    assert stages["stage"].tolist() == stage and sum(threw) == 16 == len(said) // 3
    assert stages["complete"].tolist() == [not (passed or name in unknown) for name, passed in zip(stage, threw, strict=True)]
    assert (stages["begin_ns"] >= begin).all() and (stages["end_ns"] <= end)[stages["complete"]].all()
    assert (stages["duration_ns"] > 500_000)[stages["complete"]].all()
    unended = {name: row["unended"] for name, row in npu_statistics(tables)["stages"].items()}
    assert unended == {name: 6 if name in unknown else 2 for name in stage}
    warnings = json.loads((tmp_path / "run" / "manifest.json").read_text())["warnings"]
    assert ["ComposeGraph" in line for line in warnings] == [True] * len(unknown)


def test_a_table_of_2_7_has_other_slots_and_every_call_is_seen(fake: Path, tmp_path: Path) -> None:
    run = traced(tmp_path, str(fake), "executes=25", "plain=1", env={"FAKE_QNN": "2.7"})
    calls = run.said["calls"]
    assert run.manifest["qnn"]["api"][:2] == [2, 7] and len(run.tables["qnn_executes"]) == calls["graphExecute"] == 25
    hits = {row["program"]: row["hits"] for row in run.manifest["probes"]}
    seen = {"qnn_graph_finalize_begin": "graphFinalize", "qnn_context_create_begin": "contextCreate"}
    seen |= {"qnn_profile_create_begin": "profileCreate", "qnn_get_events": "profileGetEvents"}
    assert {program: hits[program] for program in seen} == {program: calls[name] for program, name in seen.items()}


@pytest.mark.parametrize(
    ("api", "count"),
    [
        ("2.12", 0),
        ("2.18", 5),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("2.17", 5), ("2.41", 5), ("3.0", 0))),
    ],
)
def test_only_slots_whose_place_in_that_version_is_known_are_probed(fake: Path, tmp_path: Path, api: str, count: int) -> None:
    run = traced(tmp_path, str(fake), "executes=5", env={"FAKE_QNN": api})
    assert run.said["calls"]["graphExecute"] == 5 and len(run.tables["qnn_executes"]) == count
    assert any(f"API {api}." in line for line in run.manifest["warnings"]) == (api not in ("2.17", "2.18"))
    programs = {row["program"] for row in run.manifest["probes"]}
    assert ("qnn_apply_section_begin" in programs) == (api in ("2.18", "2.41"))
