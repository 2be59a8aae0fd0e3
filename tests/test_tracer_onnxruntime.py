"""ONNX Runtime and Genie are traced as the program itself counts: by tables it is handed, exported symbols, and found code."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pytest
from onnx import TensorProto, helper, numpy_helper

from analyzer.tables import store as tables_module
from tests.conftest import ROOT, made_once, old_package, trace
from tracer.engines import choose_engines
from tracer.probes.planner import Planner

RUNS = 12


def package_file(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    return next(iter(sorted(folder.glob(pattern))), None) if folder else None


RUNTIME, GENIE = package_file("onnxruntime", "capi/libonnxruntime.so.*"), package_file("onnxruntime_qnn", "libGenie.so")
needs_runtime = pytest.mark.skipif(RUNTIME is None, reason="onnxruntime has no libonnxruntime.so")
needs_genie = pytest.mark.skipif(GENIE is None, reason="onnxruntime-qnn has no libGenie.so")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return identity(tmp_path_factory.mktemp("ort") / "identity.onnx")


def identity(path: Path) -> Path:
    """A model of one product with the identity."""
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def run(folder: Path, model: Path, *options: str) -> tuple[list[dict], dict[str, pd.DataFrame]]:
    program = str(ROOT / "workloads" / "programs" / "ort_c.py")
    command = [sys.executable, program, str(RUNTIME), str(model), str(RUNS), *options]
    done = trace("run", "--no-views", "--levels", "graph", "-o", str(folder / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], tables_module.load_tables(folder / "run")


def rows_of(tables: dict[str, pd.DataFrame], told: dict) -> pd.DataFrame:
    graphs = tables["graphs"]
    return graphs[(graphs["engine"] == "onnxruntime") & (graphs["pid"] == told["pid"])]


@needs_runtime
@pytest.mark.needs("probes")
def test_every_call_of_the_c_api_is_recorded_in_order_with_its_session(tmp_path: Path, model: Path) -> None:
    (told,), tables = run(tmp_path, model)
    seen = rows_of(tables, told)
    assert seen[["kind", "handle", "status"]].values.tolist() == told["done"]
    assert seen["complete"].all() and (seen["duration_ns"] > 0).all()
    first, second = (row[1] for row in told["done"][:2])
    assert (seen.loc[seen["handle"] == first, "name"] == str(model)).all()
    assert (seen.loc[seen["handle"] == second, "name"] == "").all()
    sessions = tables["sessions"][["handle", "name", "bytes", "n_inputs", "n_outputs"]]
    assert sessions.values.tolist() == [[first, str(model), -1, 1, 1], [second, "", told["bytes"], 1, 1]]


@needs_runtime
@pytest.mark.needs("probes")
def test_a_runtime_loaded_late_and_in_a_child_is_recorded_whole(tmp_path: Path, model: Path) -> None:
    both, tables = run(tmp_path, model, "--late", "--child")
    assert len(both) == 2
    for told in both:
        assert rows_of(tables, told)[["kind", "handle", "status"]].values.tolist() == told["done"]


@needs_runtime
@pytest.mark.needs("probes")
def test_slots_that_the_programs_version_lacks_are_left_alone(tmp_path: Path, model: Path) -> None:
    program = (ROOT / "workloads" / "programs" / "ort_c.py").read_text()
    old = tmp_path / "old.py"
    old.write_text(program.replace("= 16, 1, 1, 0", "= 4, 1, 1, 0"))
    command = [sys.executable, str(old), str(RUNTIME), str(model), "1"]
    done = trace("run", "--no-views", "--levels", "graph", "-o", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    slots = {row["symbol"] for row in manifest["probes"] if row["symbol"].startswith("OrtApi[")}
    assert slots == {"OrtApi[7]", "OrtApi[8]", "OrtApi[9]", "OrtApi[95]"}


NESTING = """
#include <stddef.h>
static void *(*api[300])(size_t);
static void *run(size_t session) { volatile size_t inner = session - 1; if (inner) api[9](inner); return inner ? 0 : NULL; }
static void *get_api(void) { api[9] = run; return api; }
static void *base[] = {get_api, get_api};
void *OrtGetApiBase(void) { return base; }
"""
NESTED = "import sys; from workloads.programs.ort_c import Api; api = Api(sys.argv[1]); [api.call('Run', 3) for _ in range(5)]"


@pytest.mark.needs("probes")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_run_within_a_run_of_its_thread_leaves_both_complete(tmp_path: Path) -> None:
    library = tmp_path / "libonnxruntime.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)], input=NESTING, text=True, check=True)
    command, env = [sys.executable, "-c", NESTED, str(library)], {"PYTHONPATH": str(ROOT)}
    done = trace("run", "--no-views", "--levels", "graph", "-o", str(tmp_path / "run"), "--", *command, env=env)
    assert done.returncode == 0, done.stderr
    graphs = tables_module.load_tables(tmp_path / "run")["graphs"].sort_values("begin_ns")
    assert graphs["handle"].tolist() == [3, 2, 1] * 5 and graphs["complete"].all()
    assert (np.diff(graphs["end_ns"].to_numpy().reshape(5, 3)) < 0).all()


HOLDING = (
    "import sys; from workloads.programs.ort_c import Api; Api(sys.argv[1]); print('ready', flush=True); sys.stdin.readline()"
)


@needs_runtime
@pytest.mark.needs("probes")
def test_a_program_that_had_its_table_before_it_was_followed_is_named(tmp_path: Path) -> None:
    command, pipe = [sys.executable, "-c", HOLDING, str(RUNTIME)], subprocess.PIPE
    target = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    assert target.stdout is not None and target.stdout.readline() == "ready\n"
    options = ("--no-views", "--levels", "graph", "--pid", str(target.pid), "--duration", "0.2")
    done = trace("attach", *options, "-o", str(tmp_path / "run"))
    target.communicate("go\n", timeout=60)
    warnings = json.loads((tmp_path / "run" / "manifest.json").read_text())["warnings"]
    assert done.returncode == 0 and [line.startswith(f"onnxruntime: process {target.pid} ") for line in warnings] == [True]


MODULE = package_file("onnxruntime", "capi/onnxruntime_pybind11_state*.so")
PYTHON_RELEASES = ("onnxruntime==1.20.1", "onnxruntime==1.24.4", "onnxruntime==1.28.0", "onnxruntime==1.31.1")


def runs_from_python_hold(folder: Path, model: Path, packages: list[Path]) -> None:
    """Every run that a program made through the Python package is a row within the caller's times, of its thread and status."""
    program = str(ROOT / "workloads" / "programs" / "ort_python.py")
    path = [f"PYTHONPATH={packages[0]}"] if packages else []
    command = ["env", *path, sys.executable, program, str(model), str(RUNS)]
    done = trace("run", "--no-views", "--levels", "graph", "-o", str(folder / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])["ran"]
    graphs = tables_module.load_tables(folder / "run")["graphs"]
    assert len(told) == 6 * RUNS == len(graphs) and set(graphs["engine"]) == {"onnxruntime"}
    assert set(graphs["kind"]) == {"run"} and graphs["complete"].all()
    own = [row for row in told if row["way"] != "async"]
    pools = ~graphs["tid"].isin({row["tid"] for row in own})
    assert pools.sum() == RUNS and not graphs.loc[pools, "status"].any()
    for tid in {row["tid"] for row in own}:
        called = pd.DataFrame([row for row in own if row["tid"] == tid])
        seen = graphs[graphs["tid"] == tid].sort_values("begin_ns", ignore_index=True)
        assert seen["status"].tolist() == called["status"].tolist()
        assert (seen["begin_ns"] >= called["begin"]).all() and (seen["end_ns"] <= called["end"]).all()


@pytest.mark.skipif(MODULE is None, reason="onnxruntime has no module for Python")
@pytest.mark.needs("probes")
def test_every_run_from_python_is_recorded_with_its_status_on_its_thread(tmp_path: Path, model: Path) -> None:
    runs_from_python_hold(tmp_path, model, [])


@pytest.mark.long
@pytest.mark.needs("probes")
@pytest.mark.parametrize("release", PYTHON_RELEASES)
def test_other_releases_for_python_are_recorded_as_exactly(tmp_path: Path, model: Path, release: str) -> None:
    package = made_once(release, old_package(release))
    if not (package / "onnxruntime").exists():
        pytest.skip(f"pip finds no {release}")
    runs_from_python_hold(tmp_path, model, [package])


@pytest.mark.skipif(MODULE is None, reason="onnxruntime has no module for Python")
def test_runs_from_python_are_left_to_the_probes_of_our_own_runtime() -> None:
    own = next((ROOT / "runtime" / "telemetry").glob("_probes*.so"))
    planner = Planner(choose_engines(["auto"]), {"graph"}, fast_nop=lambda: True)
    planner.rows += planner.file(str(MODULE)).rows
    assert [row.program for row in planner.rows] == ["ort_session_run_begin", "ort_session_run_end"]
    assert planner.displaced() == []
    planner.rows += planner.file(str(own)).rows
    assert {row.program for row in planner.displaced()} == {"ort_session_run_begin", "ort_session_run_end"}
    assert planner.displaced() == [] and planner.file(str(MODULE)).rows == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_module_for_python_of_an_unknown_build_is_named(tmp_path: Path) -> None:
    path = tmp_path / "onnxruntime_pybind11_state.cpython.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=b"int f(int x) { return x; }", check=True)
    planner = Planner(choose_engines(["onnxruntime"]), {"graph"}, fast_nop=lambda: True)
    assert planner.file(str(path)).rows == [] and len(planner.warnings) == 1
    assert planner.warnings[0].startswith(f"{path} is stripped") and "no ort_session_run_begin" in planner.warnings[0]


CALLS = """
import ctypes, json, sys
genie = ctypes.CDLL(sys.argv[1])
none, out = ctypes.c_void_p(), ctypes.c_void_p()
done = [
    ["create", genie.GenieDialog_create(none, ctypes.byref(out))],
    ["query", genie.GenieDialog_query(none, b"hello", 0, none, none)],
    ["query", genie.GenieDialog_tokenQuery(none, (ctypes.c_uint32 * 3)(1, 2, 3), 3, 0, none, none)],
    ["reset", genie.GenieDialog_reset(none)],
    ["free", genie.GenieDialog_free(none)],
]
sys.path.insert(0, sys.argv[2])
from genie_dialog import dialog_config
genie.GenieDialogConfig_createFromJson(dialog_config("junk.bin", "tokenizer.json"), ctypes.byref(none))
done.append(["create", genie.GenieDialog_create(none, ctypes.byref(out))])
print(json.dumps(done))
"""
MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": [], "fuse_unk": False, "byte_fallback": False}
MODEL |= dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": MODEL}
TOKENIZER |= dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))


def genie_calls(folder: Path) -> list[str]:
    """The command that makes Genie's calls, inside `folder`."""
    (folder / "libnative_tls.conf").touch()
    (folder / "genie.py").write_text(CALLS)
    (folder / "junk.bin").write_bytes(bytes(4096))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    command = [sys.executable, "genie.py", str(GENIE), str(ROOT / "workloads" / "programs")]
    return ["env", "-C", str(folder), f"LD_LIBRARY_PATH={Path(str(GENIE)).parent}", *command]


@needs_genie
@pytest.mark.needs("probes")
def test_genies_calls_are_recorded_with_their_error(tmp_path: Path) -> None:
    done = trace("run", "--no-views", "--levels", "token,graph,qnn", "-o", str(tmp_path / "run"), "--", *genie_calls(tmp_path))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert all(status != 0 for _, status in told)
    tables = tables_module.load_tables(tmp_path / "run")
    tokens, graphs = tables["tokens"], tables["graphs"]
    assert set(tokens["engine"]) == set(graphs["engine"]) == {"genie"}
    assert tokens["result"].tolist() == [status for kind, status in told if kind == "query"]
    assert tokens["n_tokens"].tolist() == [0, 3] and tokens["complete"].all()
    assert graphs[["kind", "status"]].values.tolist() == [row for row in told if row[0] != "query"]
    probes = json.loads((tmp_path / "run" / "manifest.json").read_text())["probes"]
    rows = [row for row in probes if row["engine"] == "genie"]
    assert rows and all("not inspected" in row["why"] for row in rows)
    reached = {row["symbol"] for row in probes if row["engine"] == "qnn" and row["library"].endswith("libQnnHtp.so")}
    assert "table[21] of backend 6" in reached, "the dialog got as far as the NPU's function table"


@needs_runtime
@pytest.mark.needs("probes")
def test_the_dry_run_lists_slots_as_found_at_run_time() -> None:
    done = trace("probes", "--json", "--engine", "onnxruntime", str(RUNTIME))
    rows = json.loads(done.stdout)["probes"]
    now, later = [r for r in rows if r["offset"] >= 0], [r for r in rows if r["offset"] < 0]
    assert [row["symbol"] for row in now] == ["OrtGetApiBase"] and now[0]["ns_per_hit_cold"] > 0
    assert {"OrtApi[9]", "OrtApiBase[0]"} <= {row["symbol"] for row in later}
    assert all("at run time" in row["why"] for row in later)
    printed = trace("probes", "--engine", "onnxruntime", str(RUNTIME), env={"COLUMNS": "250"})
    assert printed.returncode == 0 and "OrtApi[9]" in printed.stdout
