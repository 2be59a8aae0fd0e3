"""Sampled stacks and those of waits are what the program knows of itself."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzer.questions.stacks import frame_names, function_shares, stack_lists, waiting_places
from analyzer.records.schema import Tables
from analyzer.stacks.unwinding import PROGRAM
from analyzer.tables.store import load_tables
from moescope.__main__ import main as moescope
from tests.conftest import ROOT, trace
from tracer.recording.format import Recording

pytestmark = pytest.mark.needs("probes")
BRANCHES = ("branch_long", "branch_deep", "branch_short")
LEVELS, SIGMAS, HZ = 40, 4.0, 997
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


@pytest.fixture(scope="module", params=FLAGS)
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
    truth = np.array(ran.said["spent"]) / sum(ran.said["spent"])
    assert found.sum() > 500
    error = np.sqrt(truth * (1 - truth) * found.sum())
    assert (np.abs(found - truth * found.sum()) < SIGMAS * error).all(), (found, truth)


def test_a_recursion_has_each_of_its_frames(ran: Run) -> None:
    names, frames = frame_names(ran.tables), stack_lists(ran.tables)
    deep = [stack for stack in frames if "branch_deep" in names[stack].tolist() and "burn" in names[stack].tolist()]
    assert deep and {int((names[stack] == "deeper").sum()) for stack in deep} == {LEVELS + 1}


def test_samples_have_whole_stacks(ran: Run) -> None:
    ends = ran.tables["samples"]["end"].value_counts(normalize=True)
    assert ends["whole"] > 0.95 and Recording(ran.folder).manifest["stacks"]["lost"] == 0


def test_waits_have_the_stack_of_who_waits_and_of_who_wakes(ran: Run) -> None:
    waits = ran.tables["waits"]
    mine = waits[has_function(ran, "wait_for_lock")[waits["stack_id"].to_numpy()]]
    truth = np.array(ran.said["waits"])
    long = np.flatnonzero(truth[:, 1] - truth[:, 0] >= 2_000_000)
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
    assert frames["file"][frames["function"] == "Model.decode"].tolist() == ["/somewhere/model.py"]
    assert (samples["end"] == "whole").mean() > 0.95
    assert set(frames["found_by"][names == "main"]) == {"", "frame pointer"}, "of the three, one way is CPython's own"


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


def new_python() -> str | None:
    """A Python of 3.12 or newer that runs, if there is one in PATH or of pyenv."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.1[2-9]*/bin")
    path = os.pathsep.join([os.environ["PATH"], *map(str, of_pyenv)])
    found = (shutil.which(f"python3.{minor}", path=place) for minor in range(12, 20) for place in path.split(os.pathsep))
    return next((name for name in found if name and not subprocess.run([name, "-V"], capture_output=True).returncode), None)


@pytest.mark.long
def test_functions_of_a_new_python_are_frames(tmp_path: Path) -> None:
    python = new_python()
    if python is None:
        pytest.skip("Python 3.12 or newer is not installed")
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


def test_a_damaged_file_of_stacks_is_read_as_far_as_it_is_whole(ran: Run, tmp_path: Path) -> None:
    whole = (ran.folder / "stacks.bin").read_bytes()
    ids = ",".join(map(str, Recording(ran.folder).manifest["stacks"]["clock_ids"]))
    random = np.random.default_rng(0)
    for case in range(12):
        data = bytearray(whole[: 1 << 20])
        for at in random.integers(0, len(data), 1 << (case % 12)):
            data[at] = random.integers(0, 256)
        (tmp_path / "stacks.bin").write_bytes(data[: random.integers(0, len(data)) if case % 4 == 0 else len(data)])
        words: list[str | Path] = [PROGRAM, tmp_path / "stacks.bin", "x86_64", ids, ran.folder, tmp_path / "out"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        assert done.returncode == 0, (case, done.returncode, done.stderr)
