"""Sampled stacks and those of waits are what the program knows of itself."""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analyzer.questions.causes import COMPUTING, EXPERT_LOAD, NOT_COMPUTING
from analyzer.questions.parts import LOAD
from analyzer.questions.stack_summary import python_without_frames, stack_summary
from analyzer.questions.stacks import frame_names, function_shares, joined, stack_lists, waiting_places
from analyzer.questions.step_time import step_time
from analyzer.records.reading import Source
from analyzer.records.schema import Tables
from analyzer.stacks.unwinding import PROGRAM, unwind
from analyzer.tables.store import load_tables
from moescope.__main__ import main as moescope
from moescope.errors import UserError
from tests.conftest import ROOT, rest_long, trace
from tests.test_compare_planted import WITH_SITES
from tracer.recording.format import Recording
from workloads.compiling import compile_c
from workloads.gguf_model import SHAPES, write_model

pytestmark = pytest.mark.needs("probes")
BRANCHES = ("branch_long", "branch_deep", "branch_short")
LEVELS, SIGMAS = 40, 4.0
IS_EMULATED = "EMULATED" in os.environ  # an emulated recorder is late now and then, which loses samples, and counts them
HZ = 499 if IS_EMULATED else 997
WAITS = "select dur, extract_arg(arg_set_id, 'debug.stack') as stack from slice where category = 'off-cpu'"
LINUX = tuple(map(int, platform.release().split(".")[:2]))
FLAGS = {
    "frame pointers": ["-fno-omit-frame-pointer"],
    "none": ["-fomit-frame-pointer"],
    "static": ["-static"],
    "frame pointers alone": ["-fno-omit-frame-pointer", "-mno-omit-leaf-frame-pointer", "-fno-asynchronous-unwind-tables"],
}
COMPILERS = {"frame pointers alone": "clang"}  # gcc's functions that call nothing have no frame pointer, whatever is asked


@dataclass
class Run:
    """A recording of the program, its tables, and what it printed."""

    flags: str
    folder: Path
    tables: Tables
    said: dict[str, Any]


@pytest.fixture(scope="module", params=rest_long(FLAGS, "none", "frame pointers alone"))
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("stacks")
    source, program = ROOT / "workloads" / "programs" / "stack_tree.c", place / "tree"
    compiler = COMPILERS.get(request.param, "cc")
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    subprocess.run([compiler, "-O2", *FLAGS[request.param], "-o", program, source, "-lpthread"], check=True)
    shell = f"{program} 700 > {place}/said.json"
    done = trace("run", "--no-views", "--stacks", str(HZ), "-o", str(place / "run"), "--", "sh", "-c", shell)
    assert done.returncode == 0, done.stderr
    return Run(request.param, place / "run", load_tables(place / "run"), json.loads((place / "said.json").read_text()))


def samples_in(run: Run, function: str) -> float:
    """The samples that have the function in their stack."""
    samples = run.tables["samples"]
    shares = function_shares(run.tables, samples, np.ones(len(samples))).set_index("function")["total"]
    return float(shares.get(function, 0.0))


def has_function(run: Run, function: str) -> np.ndarray:
    """Whether each stack, by its number, has the function; False at the end."""
    names = frame_names(run.tables)
    return np.array([*(function in names[stack].tolist() for stack in stack_lists(run.tables)), False])


def test_samples_of_each_branch_are_its_share_of_the_cpu_time(ran: Run) -> None:
    found = np.array([samples_in(ran, name) for name in BRANCHES])
    done = ran.said["turned" if IS_EMULATED else "spent"]  # while a guest stands still its clocks go on, and nothing samples
    truth = np.array(done) / sum(done)
    assert found.sum() > 500
    error = np.sqrt(truth * (1 - truth) * found.sum())
    assert (np.abs(found - truth * found.sum()) < SIGMAS * error).all(), (found, truth)


def test_a_recursion_has_each_of_its_frames(ran: Run) -> None:
    names, frames = frame_names(ran.tables), stack_lists(ran.tables)
    deep = [stack for stack in frames if "branch_deep" in names[stack].tolist() and "burn" in names[stack].tolist()]
    assert deep and {int((names[stack] == "deeper").sum()) for stack in deep} == {LEVELS + 1}


def test_samples_have_whole_stacks(ran: Run) -> None:
    samples = ran.tables["samples"]
    own = samples[has_function(ran, "burn")[samples["stack_id"].to_numpy()]]
    assert (own["end"] == "whole").mean() > 0.95
    # Counted, where other programs keep the recorder from a CPU for longer than the buffers hold.
    assert Recording(ran.folder).manifest["stacks"]["lost"] < 0.05 * len(samples) or IS_EMULATED


def test_waits_have_the_stack_of_who_waits_and_of_who_wakes(ran: Run) -> None:
    waits, manifest = ran.tables["waits"], Recording(ran.folder).manifest
    if LINUX < (5, 15):
        assert not len(waits) and not manifest["stacks"]["long_wait_us"]
        assert any("stacks of waits" in warning for warning in manifest["warnings"])
        return
    mine = waits[has_function(ran, "wait_for_lock")[waits["stack_id"].to_numpy()]]
    truth = np.array(ran.said["waits"])
    long = np.flatnonzero(truth[1:, 1] - truth[1:, 0] >= 2_000_000) + 1  # the first one has the dynamic linker's work in it
    at = np.searchsorted(truth[:, 0], mine["begin_ns"]) - 1
    assert len(long) > 10 and set(long.tolist()) <= set(at.tolist()), "each wait of the program"
    assert (mine["begin_ns"] >= truth[at, 0]).all() and (mine["end_ns"] <= truth[at, 1]).all()
    assert has_function(ran, "release_lock")[mine["waker_stack_id"].to_numpy()].mean() > 0.9
    if "-static" not in FLAGS[ran.flags]:
        assert {place.rpartition(" in ")[2].split()[0] for place in waiting_places(ran.tables)[mine["stack_id"]]} == {
            "wait_for_lock"
        }


def test_the_screen_and_the_page_show_them(ran: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert moescope(["time", "stacks", str(ran.folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["functions"][0]["function"] == "burn" and answer["summary"]["samples"] == len(ran.tables["samples"])
    assert moescope(["write", str(ran.folder), "--only", "flame"]) == 0
    assert (ran.folder / "flame.html").stat().st_size > 5000


def test_a_program_that_was_replaced_has_no_names_of_the_other_one(tmp_path: Path) -> None:
    source, program = ROOT / "workloads" / "programs" / "stack_tree.c", tmp_path / "tree"
    subprocess.run(["cc", "-O2", "-o", program, source, "-lpthread"], check=True)
    shutil.copy("/bin/sh", tmp_path / "other")
    shell = f"{program} 100 > /dev/null; mv {tmp_path}/other {program}"
    done = trace("run", "--no-views", "--stacks", str(HZ), "-o", str(tmp_path / "run"), "--", "sh", "-c", shell)
    assert done.returncode == 0, done.stderr
    tables = load_tables(tmp_path / "run")
    frames = tables["frames"]
    assert set(frames["function"][frames["file"] == str(program)]) == {""}
    assert (tables["samples"]["end"] == "unknown").mean() > 0.8
    stop = stack_summary(tables, Recording(tmp_path / "run").manifest)["stops"][0]
    assert (stop["file"], stop["function"], stop["end"]) == (str(program), "", "unknown") and stop["share"] > 0.8


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("generated")
    program = place / "generated"
    subprocess.run(["cc", "-O2", "-o", program, ROOT / "workloads" / "programs" / "stack_generated.c"], check=True)
    shell = f"{program} 900 > {place}/said.json"
    done = trace("run", "--no-views", "--stacks", str(HZ), "-o", str(place / "run"), "--", "sh", "-c", shell)
    assert done.returncode == 0, done.stderr
    said = json.loads((place / "said.json").read_text())
    Path(f"/tmp/perf-{said['pid']}.map").unlink()
    return Run("generated", place / "run", load_tables(place / "run"), said)


def test_generated_code_has_the_names_of_its_map_and_its_callers(generated: Run) -> None:
    names, frames = frame_names(generated.tables), generated.tables["frames"]
    samples = generated.tables["samples"]
    stacks = [stack[::-1] for stack in stack_lists(generated.tables)]
    under = [next((stack[at + 1] for at in range(len(stack) - 1) if names[stack[at]] == "burn"), -1) for stack in stacks]
    callers = np.array(under)[samples["stack_id"]]
    functions = np.array([*frames["function"], ""], object)[callers]
    in_memory = np.array([*frames["file"].str.startswith("//anon"), False])[callers]
    found = np.array([(functions == "generated_function").sum(), (functions == "Model.decode").sum(), 0])
    found[2] = (in_memory & (functions == "")).sum()
    truth = np.array(generated.said["spent"]) / sum(generated.said["spent"])
    assert found.sum() > 300
    assert (np.abs(found - truth * found.sum()) < SIGMAS * np.sqrt(truth * (1 - truth) * found.sum())).all(), (found, truth)
    assert set(frames["file"][frames["function"] == "Model.decode"]) == {"/somewhere/model.py"}  # a frame for each address
    assert (samples["end"] == "whole").mean() > 0.95
    assert set(frames["found_by"][names == "main"]) == {"", "frame pointer"}, "of the three, one way is CPython's own"


def test_perfetto_counts_the_same_samples_by_thread_and_by_function(ran: Run, tmp_path: Path) -> None:
    from views.timeline.perfetto import write_trace  # whose package is not in the guests of tests/vm

    manifest = Recording(ran.folder).manifest
    write_trace(manifest, ran.tables, tmp_path / "trace.pftrace")
    engine = pytest.importorskip("workloads.trace_processor").TraceProcessorWasm(trace=str(tmp_path / "trace.pftrace"))
    samples, names = ran.tables["samples"], frame_names(ran.tables)
    innermost = [names[stack[-1]] if len(stack) else None for stack in stack_lists(ran.tables)]
    told = engine.query("select tid, count(*) as n from perf_sample join thread using (utid) group by tid")
    assert {row.tid: row.n for row in told} == samples["tid"].value_counts().to_dict()
    sites = "perf_sample s join stack_profile_callsite c on s.callsite_id = c.id join stack_profile_frame f on c.frame_id = f.id"
    told = engine.query(f"select f.name, count(*) as n from {sites} group by f.name")
    assert {row.name: row.n for row in told} == Counter(name for name in map(innermost.__getitem__, samples["stack_id"]) if name)
    whole = engine.query("select count(*) as n from perf_sample where unwind_error is null")
    assert next(iter(whole)).n == (samples["end"] == "whole").sum()
    assert [row.name for row in engine.query("select name from stats where severity != 'info' and value > 0")] == []
    waits = [(row.dur, row.stack.split(" ← ")) for row in engine.query(WAITS)]
    assert len(waits) == len(ran.tables["waits"])
    assert sum("wait_for_lock" in stack for _, stack in waits) == int(
        has_function(ran, "wait_for_lock")[ran.tables["waits"]["stack_id"]].sum()
    )


KERNEL = """
.globl KERNEL
.type KERNEL, @function
KERNEL:
	push %rbp
	push %rbx
	sub $40, %rsp
	mov %r12, 8(%rsp)
	xor %ebp, %ebp
	cmp $0, %rdi
	jge 3f
	vfmadd231ps 64(%rsi,%r10,2), %zmm1, %zmm5
	vpermq $0x4e, %ymm1, %ymm2
	vzeroupper
	movw $1, 16(%rsp)
3:	jmp 2f
1:	lea 1(%rbp), %ebp
	mov $1000, %ebx
4:	imul $3, %rax, %rax
	dec %ebx
	jne 4b
2:	cmp %rdi, %rbp
	jl 1b
	mov 8(%rsp), %r12
	add $40, %rsp
	pop %rbx
	pop %rbp
	ret
.section .note.GNU-stack,"",@progbits
"""
CALLERS = """
#include <time.h>
void kernel(long rounds), other_kernel(long rounds);
volatile long calls;
__attribute__((noinline)) void calls_it_often(void) { kernel(6000); calls++; }
__attribute__((noinline)) void calls_it_rarely(void) { kernel(2000); calls++; }
__attribute__((noinline)) void calls_another(void) { other_kernel(4000); calls++; }
int main(void)
{
	while (clock() < 12 * CLOCKS_PER_SEC / 10)
		calls_it_often(), calls_it_rarely(), calls_another();
	return 0;
}
"""


def build_kernels(folder: Path) -> Path:
    """A program whose two libraries have a function in assembly, and nothing else; returns its path."""
    for library, name in (("libonnxruntime_kernel.so", "kernel"), ("libother.so", "other_kernel")):
        words = ["cc", "-shared", "-o", folder / library, "-x", "assembler", "-"]
        subprocess.run(words, input=KERNEL.replace("KERNEL", name), text=True, check=True)
    words = ["cc", "-O2", "-fomit-frame-pointer", "-o", folder / "callers", "-x", "c", "-", "-x", "none"]
    words += [folder / "libonnxruntime_kernel.so", folder / "libother.so", f"-Wl,-rpath,{folder}"]
    subprocess.run(words, input=CALLERS, text=True, check=True)
    return folder / "callers"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="code is followed on x86-64")
def test_functions_in_assembly_have_their_callers_where_code_may_be_read(tmp_path: Path) -> None:
    program = build_kernels(tmp_path)
    done = trace("run", "--no-views", "--stacks", str(HZ), "-o", str(tmp_path / "run"), "--", str(program))
    assert done.returncode == 0, done.stderr
    tables = load_tables(tmp_path / "run")
    names, samples = frame_names(tables), tables["samples"]
    paths = [names[stack].tolist() for stack in stack_lists(tables)]
    inner = [path[next((at for at, name in enumerate(path) if "kernel" in name), 0) - 1 :][:2] for path in paths]
    of_samples = [tuple(inner[number]) for number in samples["stack_id"]]
    often, rarely = (of_samples.count((caller, "kernel")) for caller in ("calls_it_often", "calls_it_rarely"))
    assert often + rarely > 300 and abs(often / (often + rarely) - 0.75) < SIGMAS * np.sqrt(0.19 / (often + rarely))
    known = np.array(["kernel" in path for path in paths])[samples["stack_id"]]
    assert (samples["end"][known] == "whole").mean() > 0.99
    unknown = np.array(["other_kernel" in path for path in paths])[samples["stack_id"]]
    assert unknown.sum() > 100 and (samples["end"][unknown] == "unknown").mean() > 0.99


IN_PYTHON = """
import json, time
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
def branch_of_calls(): return fib(22)
def branch_of_a_loop(): return sum(i * i for i in range(150000))
spent = [0, 0]
for _ in range(90):
    for number, branch in enumerate((branch_of_calls, branch_of_a_loop)):
        begin = time.thread_time_ns()
        branch()
        spent[number] += time.thread_time_ns() - begin
print(json.dumps(spent))
"""


def installed_python(version: str) -> str:
    """A Python that runs, in PATH or of pyenv; skips without one."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}*/bin")
    path = os.pathsep.join([os.environ["PATH"], *map(str, of_pyenv)])
    for found in (shutil.which(f"python{version}", path=place) for place in path.split(os.pathsep)):
        if found and not subprocess.run([found, "-V"], capture_output=True).returncode:
            return found
    pytest.skip(f"Python {version} is not installed")


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_functions_of_a_new_python_are_frames(version: str, tmp_path: Path) -> None:
    python = installed_python(version)
    (tmp_path / "program.py").write_text(IN_PYTHON)
    shell = f"{python} -X perf {tmp_path}/program.py > {tmp_path}/said.json"
    done = trace("run", "--no-views", "--stacks", str(HZ), "-o", str(tmp_path / "run"), "--", "sh", "-c", shell)
    assert done.returncode == 0, done.stderr
    for kept in (tmp_path / "run").glob("perf-*.map"):
        Path("/tmp", kept.name).unlink()
    run = Run("python", tmp_path / "run", load_tables(tmp_path / "run"), {})
    spent = np.array(json.loads((tmp_path / "said.json").read_text()))
    found, truth = np.array([samples_in(run, name) for name in ("branch_of_calls", "branch_of_a_loop")]), spent / sum(spent)
    assert found.sum() > 300
    assert (np.abs(found - truth * found.sum()) < SIGMAS * np.sqrt(truth * (1 - truth) * found.sum())).all(), (found, truth)
    assert (run.tables["samples"]["end"] == "whole").mean() > 0.95
    assert not python_without_frames(run.tables, run.tables["samples"])


def test_a_damaged_file_of_stacks_is_read_as_far_as_it_is_whole(ran: Run, tmp_path: Path) -> None:
    whole, recorded = (ran.folder / "stacks.bin").read_bytes(), Recording(ran.folder).manifest["stacks"]
    ids, layout = ",".join(map(str, recorded["clock_ids"])), [str(recorded[name]) for name in ("format", "head_bytes")]
    random = np.random.default_rng(0)
    for case in range(12):
        data = bytearray(whole[: 1 << 20])
        for at in random.integers(0, len(data), 1 << (case % 12)):
            data[at] = random.integers(0, 256)
        (tmp_path / "stacks.bin").write_bytes(data[: random.integers(0, len(data)) if case % 4 == 0 else len(data)])
        words: list[str | Path] = [PROGRAM, tmp_path / "stacks.bin", *layout, "x86_64", ids, ran.folder, tmp_path / "out"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        assert done.returncode == 0, (case, done.returncode, done.stderr)


@pytest.mark.parametrize("changed", [{"format": 1}, {"format": None}, {"head_bytes": 432}, {"head_bytes": None}], ids=str)
def test_stacks_of_another_format_are_refused(ran: Run, changed: dict[str, Any]) -> None:
    manifest = Recording(ran.folder).manifest
    other = {name: value for name, value in (manifest["stacks"] | changed).items() if value is not None}
    with pytest.raises(UserError, match="format"):
        unwind(ran.folder, manifest | {"stacks": other})


def test_damage_of_stacks_is_named(ran: Run, tmp_path: Path) -> None:
    shutil.copytree(ran.folder, tmp_path / "run", ignore=shutil.ignore_patterns("tables"))
    data = bytearray((ran.folder / "stacks.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "run" / "stacks.bin").write_bytes(data)
    assert [line.split(" between")[0] for line in Source(Recording(tmp_path / "run")).damage] == ["stacks.bin is damaged"]


@dataclass
class Joined:
    """Samples of steps' deciding threads, and the pieces of `time`."""

    samples: pd.DataFrame
    time: pd.DataFrame
    hz: int

    def errors(self, by: str, causes: tuple[str, ...]) -> pd.Series:
        """Of each value of a column, how many standard deviations its samples are from its share of the time of `causes`."""
        spent = self.time[self.time["cause"].isin(causes)].groupby(by, observed=True)["duration_ns"].sum()
        found = self.samples[self.samples["cause"].isin(causes)].groupby(by).size().reindex(spent.index, fill_value=0)
        share, count = spent / spent.sum(), found.sum()
        return ((found - share * count) / np.sqrt(share * (1 - share) * count)).fillna(0.0)


def record_joined(folder: Path, *command: str, env: dict[str, str] | None = None) -> Joined:
    """A program recorded with samples of stacks."""
    done = trace("run", "--no-views", "--stacks", str(HZ), "-o", str(folder / "run"), "--", *command, env=env)
    assert done.returncode == 0, done.stderr
    tables = load_tables(folder / "run")
    samples = joined(tables, "samples")
    return Joined(samples[samples["decides"]], step_time(tables), HZ)


def test_samples_of_each_part_and_cause_are_its_share_of_a_planted_steps_time(tmp_path: Path) -> None:
    program = compile_c(tmp_path / "planted", "planted.c", flags=WITH_SITES)
    run = record_joined(tmp_path, str(program), "1", "9000", "cold")
    errors = [run.errors(by, (COMPUTING, EXPERT_LOAD)) for by in ("cause", "part")]
    assert set(errors[0].index) == {COMPUTING, EXPERT_LOAD} and len(run.samples) > 500
    assert {"attention", "routing", "experts", LOAD} <= set(errors[1].index)
    assert all((each.abs() < SIGMAS).all() for each in errors), errors
    experts = run.samples[run.samples["part"] == LOAD]["expert"].value_counts()
    assert experts.index[0] == 5, "the one that is loaded whenever it runs"


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
def test_samples_of_each_part_are_its_share_of_the_time_of_llama_cpp(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", SHAPES["tiny-moe"], quantized=True)
    words = [str(ROOT / "workloads" / "programs" / "llama_steps.py"), str(tmp_path / "model.gguf"), "200,200", "400", "0.001"]
    run = record_joined(tmp_path, sys.executable, *words, env={"LLAMA_THREADS": "1"})
    errors = run.errors("part", (COMPUTING,))
    assert len(errors) >= 7 and (errors.abs() < SIGMAS).all(), errors
    computing, ms = (run.samples["cause"] == COMPUTING).sum(), run.time[run.time["cause"] == COMPUTING]["duration_ns"].sum() / 1e6
    assert abs(computing - ms * HZ / 1e3) < SIGMAS * np.sqrt(ms * HZ / 1e3), "and as often as asked for"
    assert (run.samples["cause"].isin(NOT_COMPUTING)).mean() < 0.03, "who has no CPU takes no sample"
