"""Functions and engines that the user declares in a TOML file are probed, and what is recorded is what the program did."""

import json
import re
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.tables import store as tables_module
from tests.conftest import ROOT, trace
from tests.golden import Golden
from tracer.engines import all_engines, choose_engines
from tracer.errors import FAILED, EngineError
from tracer.probes.functions import SIZES, SPEC, parse_argument, read_probe_files
from tracer.recording.format import Recording
from workloads.trace_processor import TraceProcessorWasm

COUNT, DEPTH, KERNELS_RETURN_LIMIT = 200, 80, 64
DECLARED = """
[[function]]
library = "{library}"
symbol = "work"
level = "expert"
[function.args]
n = "s32 @1"
name = "str @2"
rows = "u64 *(@3 + 16)"
weight = "f32 *(*(@3 + 24) + 4)"
small = "u8 @4"
e = "s64 @5"
address = "ptr @6"
gone = "u32 *@6"
result = "s32 return"

[[function]]
library = "{library}"
symbols = ["dee?"]
args = {{ n = "s32 @1", result = "s32 return" }}

[[function]]
library = "{library}"
symbol = "work_other"
at = "entry"
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("named") / "named"
    source = ROOT / "workloads" / "programs" / "named.c"
    subprocess.run(["cc", "-O2", "-fno-ipa-ra", "-o", str(path), str(source)], check=True)
    return path


def declare(folder: Path, text: str) -> str:
    path = folder / "my.toml"
    path.write_text(text)
    return str(path)


def traced(folder: Path, program: Path, text: str) -> tuple[Path, str]:
    run = folder / "run"
    command = ["run", "--no-views", "--levels", "token,operator,expert", "--probes", declare(folder, text), "-o", str(run)]
    done = trace(*command, "--", str(program), str(COUNT), str(DEPTH))
    assert done.returncode == 0, done.stderr
    assert f"{DEPTH + 1}" in done.stdout
    return run, done.stderr


@pytest.fixture(scope="module")
def recorded(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the program's declared functions."""
    return traced(tmp_path_factory.mktemp("recorded"), program, DECLARED.format(library=str(program)))[0]


@pytest.mark.needs("probes")
def test_every_call_is_a_row_with_its_arguments_and_result(recorded: Path, program: Path) -> None:
    calls = tables_module.load_tables(recorded)["calls"]
    work = calls[calls["function"] == "work"]
    names = ["gate", "up", "down"]
    expected = [
        {
            "n": i - 3,
            "rows": i,
            "weight": i / 2,
            "small": 7,
            "e": -1,
            "address": "0x0",
            "gone": None,
            "name": names[i % 3],
            "result": (i - 3) * 2 + 6,
        }
        for i in range(COUNT)
    ]
    assert [json.loads(text) for text in work["args"]] == expected
    assert work["complete"].all() and (work["duration_ns"] > 0).all() and (work["depth"] == 0).all()
    assert set(work["library"]) == {str(program)}
    other = calls[calls["function"] == "work_other"]
    assert other[["at", "args", "duration_ns"]].values.tolist() == [["entry", "", 0]]
    assert Recording(recorded).manifest["lost"] == {}


@pytest.mark.needs("probes")
def test_recursion_pairs_each_return_with_its_own_call(recorded: Path) -> None:
    tables = tables_module.load_tables(recorded)
    calls = tables["calls"]
    deep = calls[calls["function"] == "deep"].reset_index(drop=True)
    args = [json.loads(text) for text in deep["args"]]
    assert [row["n"] for row in args] == list(range(DEPTH, -1, -1))
    kept = deep["complete"].to_numpy()
    assert kept[:KERNELS_RETURN_LIMIT].all() and not kept[KERNELS_RETURN_LIMIT:].any()  # the kernel follows no more returns
    assert all(row["result"] == row["n"] + 1 for row in args[:KERNELS_RETURN_LIMIT])
    whole = deep[deep["complete"]]
    assert whole["depth"].tolist() == list(range(KERNELS_RETURN_LIMIT))
    assert whole["end_ns"].is_monotonic_decreasing
    assert (tables["unpaired"]["kind"] != "call").all()


@pytest.mark.needs("probes")
def test_calls_are_slices_of_their_thread(recorded: Path) -> None:
    from views.timeline.perfetto import write_trace

    manifest = Recording(recorded).manifest
    write_trace(manifest, tables_module.load_tables(recorded), recorded / "trace.pftrace")
    with TraceProcessorWasm(trace=str(recorded / "trace.pftrace")) as processor:
        rows = processor.query("SELECT slice.name AS name, count(*) AS n FROM slice WHERE category = 'call' GROUP BY 1")
    assert {row.name: row.n for row in rows} == {"work": COUNT, "deep": DEPTH + 1, "work_other": 1}


@pytest.mark.needs("probes")
def test_a_function_that_is_not_there_is_said_with_names_like_it(tmp_path: Path, program: Path) -> None:
    text = '[[function]]\nlibrary = "executable"\nsymbol = "work_othr"\n[[function]]\nlibrary = "libnowhere."\nsymbol = "f"\n'
    _, said = traced(tmp_path, program, text)
    assert "work_othr" in said and "work_other" in said
    assert "f of libnowhere. " in said


@pytest.mark.needs("probes")
def test_a_pattern_that_matches_too_much_is_refused(tmp_path: Path, program: Path) -> None:
    text = '[[function]]\nlibrary = "executable"\nsymbols = ["*"]\nmost = 3\n'
    folder, said = traced(tmp_path, program, text)
    assert "at most 3 " in said
    assert len(tables_module.load_tables(folder)["calls"]) == 0


@pytest.mark.needs("probes")
def test_the_dry_run_prints_where_a_users_probes_would_stand(tmp_path: Path, program: Path) -> None:
    done = trace("probes", "--json", "--probes", declare(tmp_path, DECLARED.format(library="executable")), str(program))
    rows = [row for row in json.loads(done.stdout)["probes"] if row["engine"] == "user"]
    assert {(row["symbol"], row["at"]) for row in rows} == {
        ("work", "entry"),
        ("work", "return"),
        ("deep", "entry"),
        ("deep", "return"),
        ("work_other", "entry"),
    }
    assert all(row["ns_per_hit"] > 0 and row["why"] for row in rows)


GROUPS = """
name = "mine"
id = 2
libraries = ["libmine"]
probes = [
    { program = "llama_decode_begin", level = "token", symbols = ["my_decode"] },
    { program = "llama_decode_end", level = "token", symbols = ["my_decode"], at = "return" },
]
"""
FORK = """
struct batch { int n_tokens; void *token, *embd; int *pos; void *rest[3]; };
int my_decode(void *context, struct batch batch) { return batch.n_tokens + 100; }
"""


@pytest.mark.needs("probes")
def test_an_engine_of_the_users_own_reuses_our_programs(tmp_path: Path) -> None:
    (tmp_path / "fork.c").write_text(FORK)
    main = "struct batch { int n_tokens; void *token, *embd; int *pos; void *rest[3]; };\nint my_decode(void *, struct batch);\n"
    main += "int main(void) { for (int i = 1; i < 9; i++) { struct batch b = {i, 0, 0, &i}; my_decode(0, b); } return 0; }\n"
    (tmp_path / "main.c").write_text(main)
    build = ["cc", "-O2", "-shared", "-fPIC", "-o", str(tmp_path / "libmine.so"), str(tmp_path / "fork.c")]
    subprocess.run(build, check=True)
    link = ["cc", "-o", str(tmp_path / "main"), str(tmp_path / "main.c"), f"-L{tmp_path}", "-lmine", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run(link, check=True)
    options = ["--no-views", "--levels", "token", "--probes", declare(tmp_path, GROUPS), "-o", str(tmp_path / "run")]
    done = trace("run", *options, "--", str(tmp_path / "main"))
    assert done.returncode == 0, done.stderr
    tokens = tables_module.load_tables(tmp_path / "run")["tokens"]
    assert tokens["n_tokens"].tolist() == tokens["position"].tolist() == list(range(1, 9))
    assert tokens["result"].tolist() == [n + 100 for n in range(1, 9)]
    assert set(tokens["engine"]) == {"mine"}


FUNCTION = '[[function]]\nlibrary = "libfoo.so"\nsymbol = "foo"\n'


ENGINE = 'name = "x"\nid = 2\n'
BAD = [
    *("[[function", "", "[other]\n", "function = 3\n", '[[function]]\nsymbol = "foo"\n', '[[function]]\nlibrary = "libfoo.so"\n'),
    *(FUNCTION + more for more in ('libary = "x"\n', 'level = "atom"\n', 'at = "exit"\n', "most = true\n")),
    *(FUNCTION + f'args = {{ n = "{what}" }}\n' for what in ("s32", "int @1", "s32 @7", "f32 @1", "s32 *(*(*@1))")),
    FUNCTION + 'at = "entry"\nargs = { n = "s32 return" }\n',
    FUNCTION + "args = { " + ", ".join(f's{i} = "str @1"' for i in range(5)) + " }\n",
    *(ENGINE + more for more in ("probes = []\n", 'libraries = "libx"\nprobes = []\n')),
    ENGINE + 'libraries = ["libx"]\nprobes = [{ program = "p", level = "token", symbol = ["a"] }]\n',
    ENGINE + 'libraries = ["libx"]\nprobes = []\nbackends = { cpu = "12" }\n',
    ENGINE + 'libraries = ["libx"]\nprobes = [{ program = "p", level = "token", anchor = { text = "x" } }]\n',
]


def test_a_bad_file_is_answered_with_its_name_the_key_and_the_remedy(tmp_path: Path, golden: Golden) -> None:
    told = []
    for text in BAD:
        path = Path(declare(tmp_path, text))
        with pytest.raises(EngineError) as error:
            read_probe_files([path])
        told.append(str(error.value))
        assert str(path) in told[-1] and "\n" not in told[-1]
    golden("probes", "\n".join(told))


@pytest.mark.needs("probes")
def test_a_bad_file_ends_the_command_in_one_line(tmp_path: Path) -> None:
    path = declare(tmp_path, FUNCTION + 'args = { n = "f64 return" }\n')
    done = trace("run", "--probes", path, "-o", str(tmp_path / "run"), "--", "true")
    assert done.returncode == FAILED and "Traceback" not in done.stderr
    assert f"tracer: {path}: function foo: key args.n: " in done.stderr
    assert not (tmp_path / "run").exists()


def test_one_file_may_hold_engines_and_functions(tmp_path: Path) -> None:
    text = '[[engine]]\nname = "x"\nid = 2\nlibraries = ["libx"]\nprobes = []\n[[engine]]\nname = "y"\nid = 2\n'
    path = Path(declare(tmp_path, text + 'libraries = ["liby"]\nprobes = []\n' + FUNCTION))
    engines, functions = read_probe_files([path])
    assert [engine.name for engine in engines] == ["x", "y"] and [f.symbols for f in functions] == [("foo",)]


def test_an_engine_of_a_known_name_replaces_ours() -> None:
    ours = all_engines()["llamacpp"]
    names = [engine.name for engine in choose_engines(["auto"], [ours])]
    assert sorted(names) == sorted(all_engines())


MEMORY = bytes(range(256)) * 2


def interpreted(spec: bytes, registers: list[int]) -> int:
    """What bpf/custom.bpf.c does with a specification, over a memory that begins at address 0."""
    source, *rest = SPEC.unpack(spec)
    value = registers[source]
    for width, offset in zip(rest[:2], rest[2:], strict=True):
        read = MEMORY[(value + offset) % 256 :][:width].ljust(8, b"\0")
        value = struct.unpack("<Q", read)[0] if width else value
    return value


@given(
    st.sampled_from([kind for kind in SIZES if kind != "str"]),
    st.integers(1, 6),
    st.lists(st.integers(-64, 64), max_size=2),
    st.lists(st.integers(64, 128), min_size=7, max_size=7),
)
def test_an_argument_reads_what_its_text_says(kind: str, register: int, offsets: list[int], registers: list[int]) -> None:
    text, value = f"@{register}", registers[register - 1]
    for i, offset in enumerate(offsets):
        text = f"*({text} {'+' if offset >= 0 else '-'} {abs(offset):#x})"
        width = SIZES[kind] if i + 1 == len(offsets) else 8
        value = int.from_bytes(MEMORY[(value + offset) % 256 :][:width], "little")
    if kind.startswith("f") and not offsets:
        return
    assert interpreted(parse_argument("x", f"{kind} {text}").spec(), registers) == value


def blocks(kind: str) -> list[str]:
    text = (ROOT / "docs" / "engines.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", text, re.S)


def test_the_examples_of_the_documentation_are_valid(tmp_path: Path) -> None:
    (function,), engines = read_probe_files([Path(declare(tmp_path, blocks("toml")[0]))])[::-1]
    assert not engines and [a.name for a in function.arguments] == ["n", "name", "rows", "scale", "result"]
    (engine,), _ = read_probe_files([Path(declare(tmp_path, blocks("toml")[1]))])
    assert [(probe.program, probe.at) for probe in engine.probes] == [
        ("llama_decode_begin", "entry"),
        ("llama_decode_end", "return"),
    ]


DOCUMENTED = """
#include <stdint.h>
struct row { uint64_t pad[2]; uint64_t rows; float *scales; };
int foo_run(int n, const char *name, struct row *row) { return n + (int)row->rows + (name != 0); }
"""


@pytest.mark.needs("probes")
def test_the_example_of_the_documentation_records_a_librarys_calls(tmp_path: Path) -> None:
    (tmp_path / "foo.c").write_text(DOCUMENTED)
    main = DOCUMENTED.split("int foo_run")[0] + "int foo_run(int, const char *, struct row *);\n"
    main += 'int main(void) { float f[2] = {1, 0.5f}; struct row r = {{0, 0}, 40, f}; return foo_run(1, "expert", &r) != 42; }\n'
    (tmp_path / "main.c").write_text(main)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(tmp_path / "libfoo.so"), str(tmp_path / "foo.c")], check=True)
    link = [f"-L{tmp_path}", "-lfoo", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run(["cc", "-o", str(tmp_path / "main"), str(tmp_path / "main.c"), *link], check=True)
    path = declare(tmp_path, blocks("toml")[0])
    options = ["--no-views", "--levels", "operator", "--probes", path, "-o", str(tmp_path / "run")]
    done = trace("run", *options, "--", str(tmp_path / "main"))
    assert done.returncode == 0, done.stderr
    (args,) = tables_module.load_tables(tmp_path / "run")["calls"]["args"]
    assert json.loads(args) == {"n": 1, "rows": 40, "scale": 0.5, "name": "expert", "result": 42}


@pytest.mark.needs("probes")
def test_a_function_is_recorded_at_whatever_levels_as_the_user_named_it(program: Path, tmp_path: Path) -> None:
    path = declare(tmp_path, DECLARED.format(library="executable"))
    options = ["--no-views", "--levels", "token", "--probes", path, "-o", str(tmp_path / "run")]
    done = trace("run", *options, "--", str(program), "5", "3")
    assert done.returncode == 0, done.stderr
    assert Recording(tmp_path / "run").manifest["records"]["call_begin"] >= 5


@pytest.mark.needs("probes", "recorder")
@pytest.mark.parametrize("library", ["executable", "{path}"])
def test_a_function_of_the_executable_is_recorded_elsewhere_as_here(program: Path, tmp_path: Path, library: str) -> None:
    path, counts = declare(tmp_path, DECLARED.format(library=library.format(path=program))), []
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nexec sh -c "$1"\n')
    shell.chmod(0o755)
    for place, where in (("here", ()), ("there", ("--on", f"exec:{shell}"))):
        options = ["--no-views", "--levels", "token", "--probes", path, "-o", str(tmp_path / place), *where]
        done = trace("run", *options, "--", str(program), "5", "3")
        assert done.returncode == 0, done.stderr
        counts.append({k: n for k, n in Recording(tmp_path / place).manifest["records"].items() if k.startswith("call")})
    assert counts[0] == counts[1] and counts[0]["call_begin"] >= 5


THROWING = r"""
#include <cstdio>
#include <string>
#define KEPT extern "C" __attribute__((noinline)) int
KEPT throws(int n) { if (n % 3 == 0) throw n; return n + 1; }
KEPT cleans(int n) { std::string s(n + 40, 'x'); return throws(n) + (int)s.size(); }
KEPT jumps(int n) { return throws(n + 1); }
KEPT leaf(int n) { asm volatile("" : "+r"(n)); return n * 2; }
int main() {
    int caught = 0;
    for (int i = 0; i < 9; i++) {
        try { cleans(i); } catch (int) { caught++; }
        try { jumps(i); } catch (int) { caught++; }
        leaf(i);
    }
    printf("caught %d\n", caught);
}
"""


def build_throwing(folder: Path) -> Path:
    (folder / "throwing.cpp").write_text(THROWING)
    subprocess.run(["c++", "-O2", "-o", str(folder / "throwing"), str(folder / "throwing.cpp")], check=True)
    return folder / "throwing"


@pytest.mark.needs("probes")
def test_an_exception_passes_the_functions_of_a_users_engine(tmp_path: Path) -> None:
    probe = '{ program = "llama_decode_begin", returns = "llama_decode_end", symbols = ["cleans"], level = "token" }'
    text = 'name = "my-llama"\nid = 2\nlibraries = ["libmyllama"]\nmarker = "caught"\n'
    engine = declare(tmp_path, f"{text}probes = [{probe}]\n")
    options = ["--no-views", "--levels", "token", "--probes", engine, "-o", str(tmp_path / "run")]
    done = trace("run", *options, "--", str(build_throwing(tmp_path)))
    assert done.returncode == 0 and "caught 6" in done.stdout, done.stderr
    tokens = tables_module.load_tables(tmp_path / "run")["tokens"]
    assert tokens["complete"].tolist() == [n % 3 != 0 for n in range(9)]
    jumping = Path(engine)
    jumping.write_text(jumping.read_text().replace("cleans", "jumps"))
    done = trace("probes", "--levels", "token", "--probes", engine, str(tmp_path / "throwing"))
    assert "jumps: exceptions may pass it" in done.stdout + done.stderr


@pytest.mark.needs("probes")
def test_an_exception_passes_the_functions_that_a_user_names(tmp_path: Path) -> None:
    program = build_throwing(tmp_path)
    names = '["throws", "cleans", "jumps", "leaf"]'
    text = f'[[function]]\nlibrary = "executable"\nsymbols = {names}\nargs = {{ n = "s32 @1", result = "s32 return" }}\n'
    options = ["--no-views", "--probes", declare(tmp_path, text), "-o", str(tmp_path / "run")]
    done = trace("run", *options, "--", str(program))
    assert done.returncode == 0 and "caught 6" in done.stdout, done.stderr
    assert "jumps is not recorded at its return" in done.stderr
    probes = {
        (row["symbol"], row["program"]) for row in Recording(tmp_path / "run").manifest["probes"] if row["engine"] == "user"
    }
    assert {row for row in probes if row[1] != "custom_begin"} == {
        ("throws", "custom_exit"),
        ("cleans", "custom_exit"),
        ("leaf", "custom_end"),
    }
    calls = tables_module.load_tables(tmp_path / "run")["calls"]
    rows = {name: calls[calls["function"] == name] for name in ("throws", "cleans", "jumps", "leaf")}
    expected = [i for pair in ((i, i + 1) for i in range(9)) for i in pair]
    read = [json.loads(text) for text in rows["throws"]["args"]]
    assert read == [{"n": n} | ({"result": n + 1} if n % 3 else {}) for n in expected]
    assert rows["throws"]["complete"].tolist() == [n % 3 != 0 for n in expected]
    assert [json.loads(text).get("result") for text in rows["cleans"]["args"]] == [
        2 * n + 41 if n % 3 else None for n in range(9)
    ]
    assert set(rows["jumps"]["at"]) == {"entry"} and len(rows["jumps"]) == 9
    assert [json.loads(text)["result"] for text in rows["leaf"]["args"]] == [2 * n for n in range(9)]
