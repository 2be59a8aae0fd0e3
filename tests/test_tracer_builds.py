"""llama.cpp is found in every kind of build: shared or static, with symbols, local names, clones, or none at all."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from analyzer.records.reading import BACKEND
from analyzer.tables import store as tables_module
from tests.conftest import ROOT, begin_trace, manifest_when, rest_long, trace
from tracer.engines import all_engines, choose_engines
from tracer.kernel.definitions import enum_values
from tracer.probes import anchors, name_tables
from tracer.probes.elf import read_binary
from tracer.probes.planner import Planner

STEPS, GRAPHS = 7, 3
ENGINE = all_engines()["llamacpp"]
ANCHORS = {probe.symbols[0]: probe.anchor for probe in ENGINE.probes if probe.anchor}
SOURCE = ROOT / "workloads" / "programs" / "fake_ggml.c"


def build(folder: Path, *flags: str) -> Path:
    path = folder / "fake"
    subprocess.run(["cc", "-O2", "-Wno-unknown-pragmas", "-o", str(path), str(SOURCE), *flags], check=True)
    return path


def traced(
    folder: Path, program: Path, levels: str = "token,graph,operator", arguments: tuple[int, ...] = (STEPS, GRAPHS)
) -> tuple[dict, dict[str, pd.DataFrame]]:
    options = ("--no-views", "--levels", levels, "-o", str(folder / "run"))
    done = trace("run", *options, "--", str(program), *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "run" / "manifest.json").read_text()), tables_module.load_tables(folder / "run")


@pytest.mark.needs("probes")
def test_a_graph_that_passes_several_probed_functions_is_one_row_with_its_backend(tmp_path: Path) -> None:
    manifest, tables = traced(tmp_path, build(tmp_path, "-fopenmp"))
    assert tables["graphs"]["backend"].tolist() == ["cpu", "cuda", ""] * GRAPHS * STEPS
    assert tables["graphs"]["status"].tolist() == [0, 3, 3] * GRAPHS * STEPS
    assert tables["graphs"]["complete"].all() and len(tables["unpaired"]) == 0
    sites = {row["symbol"] for row in manifest["probes"] if row["program"] == "ggml_graph_begin"}
    assert sites == {"ggml_backend_graph_compute_async"}  # what all others are called by, or call
    assert manifest["engines"]["llamacpp"]["operators"] == ["NONE", "DUP", "ADD", "MUL_MAT", "GLU"]


@pytest.mark.needs("probes")
def test_without_operators_nothing_is_recorded_to_learn_where_they_end(tmp_path: Path) -> None:
    manifest, tables = traced(tmp_path, build(tmp_path, "-fopenmp"), "token,graph")
    assert len(tables["tokens"]) == STEPS and len(tables["graphs"]) == 3 * GRAPHS * STEPS
    assert {"token_begin", "token_end", "graph_begin", "graph_end"} <= manifest["records"].keys()
    assert "site" not in manifest["records"]


MANY, REST_US = 30, 100_000


@pytest.mark.needs("probes")
def test_a_function_that_is_there_and_never_called_gives_way_to_the_next_and_the_summary_says_so(tmp_path: Path) -> None:
    program = build(tmp_path, "-fopenmp", "-DINLINED")
    manifest, tables = traced(tmp_path, program, "token,graph", (MANY, 1, REST_US))
    rows = [row for row in manifest["probes"] if row["program"] == "ggml_graph_begin"]
    assert [row["symbol"] for row in rows if row["retired_ns"]] == ["ggml_backend_graph_compute_async"]
    assert "ggml_backend_cpu_graph_compute" in rows[-1]["symbol"] and not rows[-1]["retired_ns"]
    assert MANY // 2 < len(tables["graphs"]) < MANY and set(tables["graphs"]["backend"]) == {"cpu"}
    said = "probed at ggml_backend_graph_compute_async: moved to _ZL30ggml_backend_cpu_graph_compute"
    summary = subprocess.run([sys.executable, "-m", "moescope", "summary", "--json", str(tmp_path / "run")], capture_output=True)
    assert [said in line for line in json.loads(summary.stdout)["warnings"]] == [True]


@pytest.mark.needs("probes")
def test_what_no_alternative_sees_either_is_said_once(tmp_path: Path) -> None:
    manifest, tables = traced(tmp_path, build(tmp_path, "-fopenmp"), "token,graph", (MANY, 0, REST_US))
    assert len(tables["tokens"]) == MANY and len(tables["graphs"]) == 0
    assert ["another function" in line for line in manifest["warnings"]] == [False] * 3 + [True]


@pytest.mark.needs("probes")
@pytest.mark.parametrize("flags", [("-fopenmp", "-pie", "-fPIE"), ("-fopenmp", "-no-pie", "-fno-pie")], ids=["PIE", "fixed"])
def test_a_static_stripped_program_is_traced_by_anchors(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = build(tmp_path, *flags)
    truth = {name: read_binary(str(program)).symbol(name) for name in ANCHORS}
    subprocess.run(["strip", str(program)], check=True)
    manifest, tables = traced(tmp_path, program)
    assert tables["tokens"]["n_tokens"].tolist() == [5] + [1] * (STEPS - 1)
    assert tables["tokens"]["complete"].all()
    assert tables["graphs"]["backend"].tolist() == ["cpu", "cpu"] * GRAPHS * STEPS
    assert manifest["records"]["op_wait"] == 2 * 2 * GRAPHS * STEPS
    rows = [row for row in manifest["probes"] if row["engine"] == "llamacpp"]
    assert all("stripped: " in row["why"] for row in rows)
    found = {row["symbol"]: row["offset"] for row in rows}
    assert all(truth[name] <= found[name] < truth[name] + 16 for name in ANCHORS)
    assert manifest["engines"]["llamacpp"]["operators"] == ["NONE", "DUP", "ADD", "MUL_MAT", "GLU"]


@pytest.mark.needs("probes")
def test_a_shared_library_that_was_stripped_is_found_by_what_it_exports(tmp_path: Path) -> None:
    library = tmp_path / "libllama.so"
    flags = ["-O2", "-shared", "-fPIC", "-Dmain=fake_main", "-fno-semantic-interposition"]
    subprocess.run(["cc", "-Wno-unknown-pragmas", *flags, "-o", str(library), str(SOURCE)], check=True)
    subprocess.run(["strip", str(library)], check=True)
    (tmp_path / "main.c").write_text("int fake_main(int, char **);\nint main(int n, char **v) { return fake_main(n, v); }\n")
    program = tmp_path / "main"
    link = ["-L", str(tmp_path), "-lllama", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run(["cc", "-o", str(program), str(tmp_path / "main.c"), *link], check=True)
    manifest, tables = traced(tmp_path, program)
    assert len(tables["tokens"]) == STEPS
    assert tables["graphs"]["backend"].tolist() == ["cpu", "cuda", ""] * GRAPHS * STEPS
    assert not any("stripped" in row["why"] for row in manifest["probes"])


@pytest.mark.needs("probes")
def test_libraries_opened_together_are_probed_in_one_stop_and_one_that_is_not_opened_is_not_told(tmp_path: Path) -> None:
    flags = ["-O2", "-shared", "-fPIC", "-Dmain=fake_main", "-Wno-unknown-pragmas"]
    for name in ("libllama.so", "libggml-second.so", "libggml-third.so"):
        subprocess.run(["cc", *flags, "-o", str(tmp_path / name), str(SOURCE), f"-Wl,-soname,{name}"], check=True)
    script = "import ctypes, sys\nfor path in sys.argv[1:]:\n    lib = ctypes.CDLL(path)\n"
    script += '    lib.fake_main(3, (ctypes.c_char_p * 4)(b"fake", b"7", b"3"))\n'
    opened = [str(tmp_path / name) for name in ("libllama.so", "libggml-third.so")]
    options = ("--no-views", "--levels", "token", "-o", str(tmp_path / "run"))
    done = trace("run", *options, "--", sys.executable, "-c", script, *opened)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert len(tables_module.load_tables(tmp_path / "run")["tokens"]) == 2 * STEPS
    assert {row["path"] for row in manifest["engines"]["llamacpp"]["libraries"]} == set(opened)
    assert {row["library"] for row in manifest["probes"] if row["engine"] == "llamacpp"} == set(opened)
    cost = manifest["cost"]
    assert cost["held_stops"] == 3  # the program, and two libraries
    assert 0 < cost["held_waking_ns"] < cost["held_ns"]


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
def test_anchors_find_in_a_real_llamacpp_what_its_symbols_name() -> None:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.submodule_search_locations
    path = str(next(Path(spec.submodule_search_locations[0]).glob("*.so")))
    binary = read_binary(path)
    assert {name: anchors.find_offset(path, anchor) for name, anchor in ANCHORS.items()} == {n: binary.symbol(n) for n in ANCHORS}
    assert "MUL_MAT_ID" in name_tables.read_name_table(path, ENGINE.operator_table)


CLONES = """
int a(int x) __asm__("plain.lto_priv.0");
int b(int x) __asm__("local.isra.0");
int c(int x) __asm__("_ZL4workP3fooi");
int d(int x) __asm__("_ZL4moreP3fooi.constprop.0");
int e(int x) __asm__("gone.cold");
int f(int x) __asm__("both");
int g(int x) __asm__("both.isra.0");
int a(int x) { return x; } int b(int x) { return x; } int c(int x) { return x; } int d(int x) { return x; }
int e(int x) { return x; } int f(int x) { return x; } int g(int x) { return x; }
"""


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clones") / "libclones.so"
    (path.parent / "clones.c").write_text(CLONES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(path.parent / "clones.c")], check=True)
    return path


@pytest.mark.parametrize(
    ("name", "found", "changed"),
    [
        ("plain", "plain.lto_priv.0", False),
        ("local", "local.isra.0", True),
        ("work", "_ZL4workP3fooi", False),
        ("more", "_ZL4moreP3fooi.constprop.0", True),
        ("both", "both", False),
    ],
)
def test_a_declared_name_finds_local_functions_and_clones(clones: Path, name: str, found: str, changed: bool) -> None:
    symbol = read_binary(str(clones)).find(name)
    assert symbol is not None and (symbol.name, symbol.changed) == (found, changed)


@pytest.mark.parametrize("name", ["gone", "wor", "loca", "absent"])
def test_a_declared_name_finds_no_part_and_no_other_function(clones: Path, name: str) -> None:
    assert read_binary(str(clones)).find(name) is None


@pytest.mark.needs("probes")
def test_a_clone_that_may_have_lost_arguments_is_not_probed_where_they_are_read(tmp_path: Path, clones: Path) -> None:
    engine = 'name = "c"\nid = 2\nlibraries = ["libclones"]\nprobes = [\n'
    engine += '{ program = "llama_decode_begin", returns = "llama_decode_end", level = "token", symbols = ["local"] },\n]\n'
    (tmp_path / "c.toml").write_text(engine)
    done = trace("probes", "--json", "--probes", str(tmp_path / "c.toml"), str(clones))
    assert [row["program"] for row in json.loads(done.stdout)["probes"]] == ["llama_decode_end"]
    assert "local.isra.0 " in done.stderr and "llama_decode_begin" in done.stderr


def test_backends_are_numbered_alike_in_kernel_and_analyzer() -> None:
    numbers = {name.removeprefix("BACKEND_").lower(): number for name, number in enum_values("backend_id").items()}
    assert numbers | {"": numbers.pop("unknown")} == {name: i for i, name in enumerate(BACKEND.tolist())}
    assert ENGINE.backends.keys() <= numbers.keys()


OPENERS = """
import ctypes, os, shutil, sys
library, way = sys.argv[1], sys.argv[2]
name = os.path.basename(library)
if way == "relative":
    os.chdir(os.path.dirname(library)); path = "./" + name
elif way == "dots":
    folder = os.path.dirname(library)
    os.chdir("/"); path = f"{folder[1:]}/../{os.path.basename(folder)}/{name}"
elif way == "descriptor":
    path = f"/proc/self/fd/{os.open(library, os.O_RDONLY)}"
elif way == "memory":
    fd = os.memfd_create("libllama.so"); os.write(fd, open(library, "rb").read()); path = f"/proc/self/fd/{fd}"
elif way == "deleted":
    path = library + ".gone"; shutil.copy(library, path)
lib = ctypes.CDLL(path)
if way == "deleted":
    os.unlink(path)
print(way, os.getpid(), flush=True)
argv = (ctypes.c_char_p * 4)(b"fake", b"7", b"3")
sys.exit(lib.fake_main(3, argv))
"""


SEEN = {"relative": 7, "dots": 7, "deleted": 7, "descriptor": 7, "memory": 7}


@pytest.mark.needs("probes")
def test_a_library_opened_by_any_path_does_no_harm(tmp_path: Path) -> None:
    library = tmp_path / "libllama.so"
    flags = ["-O2", "-shared", "-fPIC", "-Dmain=fake_main", "-Wno-unknown-pragmas"]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE)], check=True)
    (tmp_path / "open.py").write_text(OPENERS)
    commands = [shlex.join([sys.executable, str(tmp_path / "open.py"), str(library), way]) for way in SEEN]
    command = ["sh", "-c", "set -e; " + "; ".join(commands)]
    done = trace("run", "--no-views", "--levels", "token", "-o", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    counted = tables_module.load_tables(tmp_path / "run")["tokens"].groupby("pid").size()
    told = dict(line.split() for line in done.stdout.splitlines() if line.split()[0] in SEEN)
    assert {way: counted.get(int(pid), 0) for way, pid in told.items()} == SEEN


CALLER = """
import ctypes, sys
load = lambda: ctypes.CDLL(sys.argv[1])
lib = load() if sys.argv[2] == "early" else None
print("ready", flush=True)
sys.stdin.readline()
(lib or load()).fake_main(3, (ctypes.c_char_p * 4)(b"fake", b"7", b"3"))
"""
ELSEWHERE = {
    "deleted": 'cp $1 $2/libllama.so && exec $3 -c "$4" $2/libllama.so $5',
    "replaced": 'cp $1 $2/libllama.so && exec $3 -c "$4" $2/libllama.so $5',
    "namespace": "mount -t tmpfs none $2 && cp $1 $2/libllama.so.0 && ln -s $2/libllama.so.0 $2/libllama.so && "
    'exec $3 -c "$4" $2/libllama.so $5',
}
AFTERWARDS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "replaced": lambda path: (path.unlink(), path.write_text("another")),
    "namespace": lambda path: None,
}


@pytest.mark.needs("probes")
@pytest.mark.parametrize(
    ("where", "when"), [("deleted", "early"), ("replaced", "early"), ("namespace", "early"), ("namespace", "late")]
)
def test_a_followed_programs_library_is_found_where_its_path_does_not_lead_to_it(tmp_path: Path, where: str, when: str) -> None:
    (library, folder), pipe = (tmp_path / "built.so", tmp_path / "there"), subprocess.PIPE
    folder.mkdir()
    flags = ["-O2", "-shared", "-fPIC", "-Dmain=fake_main", "-Wno-unknown-pragmas"]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE)], check=True)
    arguments = [str(library), str(folder), sys.executable, CALLER, when]
    command = ["unshare", "-m", "sh", "-ec", ELSEWHERE[where], "sh", *arguments]
    target = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert target.stdout is not None and target.stdout.readline() == "ready\n"
    AFTERWARDS[where](folder / "libllama.so")
    tracer = begin_trace("attach", "--no-views", "--levels", "token", "--pid", str(target.pid), "-o", str(tmp_path / "run"))
    manifest_when(lambda manifest: manifest["state"] == "recording", tmp_path / "run", tracer)
    target.communicate("go\n", timeout=120)
    assert tracer.wait(timeout=120) == 0, tracer.stderr and tracer.stderr.read()
    assert target.returncode == 0 and len(tables_module.load_tables(tmp_path / "run")["tokens"]) == STEPS
    libraries = json.loads((tmp_path / "run" / "manifest.json").read_text())["engines"]["llamacpp"]["libraries"]
    marks = {"deleted": " (deleted)", "replaced": " (deleted)", "namespace": f"/proc/{target.pid}/root"}
    assert len(libraries) == 1 and marks[where] in libraries[0]["path"]


@pytest.mark.needs("probes")
def test_a_running_program_with_a_deleted_and_an_anonymous_library_is_followed(tmp_path: Path) -> None:
    library = tmp_path / "libllama.so"
    flags = ["-O2", "-shared", "-fPIC", "-Dmain=fake_main", "-Wno-unknown-pragmas"]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE)], check=True)
    script = 'import ctypes, os, sys, time\nfd = os.memfd_create("libllama.so"); os.write(fd, open(sys.argv[1], "rb").read())\n'
    script += 'a, b = ctypes.CDLL(f"/proc/self/fd/{fd}"), ctypes.CDLL(sys.argv[1]); os.unlink(sys.argv[1])\n'
    script += 'print("ready", flush=True); sys.stdin.read()\n'
    command, pipe = [sys.executable, "-c", script, str(library)], subprocess.PIPE
    target = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert target.stdout is not None and target.stdout.readline() == "ready\n"
    done = trace(
        "attach", "--no-views", "--levels", "token", "--pid", str(target.pid), "--duration", "0.5", "-o", str(tmp_path / "run")
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    target.communicate(timeout=120)
    assert target.returncode == 0
    libraries = json.loads((tmp_path / "run" / "manifest.json").read_text())["engines"]["llamacpp"]["libraries"]
    assert sorted(Path(each["path"]).name for each in libraries) == ["libllama.so", "libllama.so (deleted)"]


CALLING = " ".join(f"int im{i}(int); int f{i}(int x) {{ return im{i}(x) + 1; }}" for i in range(6))
"""Functions that call imported ones."""


@pytest.mark.parametrize("tools", ["", "aarch64-linux-gnu-"])
@pytest.mark.parametrize("flags", [("-Wl,-z,lazy",), ("-Wl,-z,now", "-fcf-protection=full")])
def test_the_stub_of_an_imported_function_is_that_which_the_disassembler_names(
    tmp_path: Path, tools: str, flags: tuple[str, ...]
) -> None:
    if not shutil.which(f"{tools}gcc"):
        pytest.skip(f"{tools}gcc is not installed")
    path, source = tmp_path / "libcalling.so", tmp_path / "calling.c"
    source.write_text(CALLING)
    branches = flags if not tools else (flags[0], "-mbranch-protection=bti") if len(flags) > 1 else flags
    subprocess.run([f"{tools}gcc", "-O2", "-shared", "-fPIC", *branches, "-o", str(path), str(source)], check=True)
    listing = subprocess.run([f"{tools}objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    named = {name: int(place, 16) for place, name in re.findall(r"^([0-9a-f]+) <(im\d)@plt>:", listing, re.MULTILINE)}
    binary = read_binary(str(path))
    found = {f"im{i}": symbol.offset for i in range(6) if (symbol := binary.find(f"im{i}@plt"))}
    assert found == {name: binary.file_offset(place) for name, place in named.items()} and len(found) == 6
    assert binary.find("absent@plt") is None


@pytest.mark.parametrize("flags", [[], ["-fno-plt"]] if os.uname().machine == "x86_64" else [[]])
def test_anchors_tell_a_call_of_an_imported_function_from_a_jump_to_it(tmp_path: Path, flags: list[str]) -> None:
    source, library = tmp_path / "two.c", tmp_path / "libtwo.so"
    source.write_text("int im(int); int calling(int x) { return im(x) + 1; } int jumping(int x) { return im(x); }")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *flags, "-o", str(library), str(source)], check=True)
    for key, function in (("calls", "calling"), ("jumps", "jumping")):
        assert anchors.find_offset(str(library), {key: "im"}) == read_binary(str(library)).find(function).offset


@pytest.mark.needs("probes")
@pytest.mark.parametrize("flags", [[], ["-fno-plt"]])
def test_a_product_that_is_called_without_a_stub_is_named_as_not_probed(tmp_path: Path, flags: list[str]) -> None:
    source, library = tmp_path / "blas.c", tmp_path / "libggml-blas.so"
    source.write_text("void cblas_sgemm(int); int ggml_backend_blas_graph_compute(int x) { cblas_sgemm(x); return x; }")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *flags, "-o", str(library), str(source)], check=True)
    done = trace("probes", "--json", "--engine", "llamacpp", str(library))
    placed = "ggml_product_begin" in {row["program"] for row in json.loads(done.stdout)["probes"]}
    said = "calls cblas_sgemm without a stub (built with -fno-plt): no ggml_product_begin" in done.stderr
    assert placed is not said and said == bool(flags)


DEVICES = {
    "_ZL25ggml_cuda_compute_forwardR25ggml_backend_cuda_contextP11ggml_tensor": "cuda",
    "_ZL25ggml_cann_compute_forwardR25ggml_backend_cann_contextP11ggml_tensor": "cann",
    "_ZL25ggml_sycl_compute_forwardR25ggml_backend_sycl_contextP11ggml_tensor": "sycl",
    "_Z23ggml_cl_compute_forwardP12ggml_backendP11ggml_tensor": "opencl",
    "ggml_rk_compute_forward": "",  # a fork for Rockchip's NPU, of an identity that is nobody's
}
"""Functions as compilers name them that take a graph's operators one by one, and whose they are."""


@pytest.mark.needs("probes")
@pytest.mark.parametrize("symbol", rest_long(DEVICES, *[*DEVICES][:2]))
def test_every_devices_operators_are_told_by_the_function_that_takes_them(tmp_path: Path, symbol: str) -> None:
    program, backend = tmp_path / "fake", DEVICES[symbol]
    identity = ENGINE.backends.get(backend, "01" * 16)
    given = ",".join(str(byte) for byte in bytes.fromhex(identity))
    source = str(SOURCE.with_name("fake_devices.c"))
    subprocess.run(["cc", "-O2", f'-DSYMBOL="{symbol}"', f"-DIDENTITY={given}", "-o", str(program), source], check=True)
    _, tables = traced(tmp_path, program)
    truth = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    operators, graphs = tables["operators"], tables["graphs"]
    assert operators.groupby("token_id").size().tolist() == [len(truth)] * STEPS
    for _, rows in operators.groupby("token_id"):
        assert [" ".join(row) for row in zip(rows["type"], rows["name"], rows["shape"], strict=True)] == truth
    assert operators["complete"].all() and (operators["duration_ns"] >= 100_000).all()
    assert graphs["backend"].tolist() == [backend] * 2 * STEPS and graphs["kind"].tolist() == ["ggml", "wait"] * STEPS
    assert operators["graph_id"].isin(graphs.loc[graphs["kind"] == "ggml", "graph_id"]).all()


@pytest.mark.parametrize("marked", [True, False])
def test_an_executable_is_an_engines_if_it_holds_its_marker(tmp_path: Path, marked: bool) -> None:
    source, program = tmp_path / "program.c", tmp_path / "program"
    text = "llama_decode" if marked else "whisper_full"
    source.write_text(f'int ggml_backend_graph_compute(void) {{ return 1; }} const char *name = "{text}"; int main(void) {{}}')
    subprocess.run(["cc", "-o", str(program), str(source)], check=True)
    plan = Planner(choose_engines(["auto"]), {"token", "graph"}).file(str(program), is_executable=True)
    assert bool(plan.rows) == marked
