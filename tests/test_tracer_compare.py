"""`moescope compare`: two commands recorded alternately, compared, and when it stops; and the model that a recording tells."""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analyzer.compare.results import Result, save_result
from tests.conftest import ROOT, trace
from tests.test_compare import result
from tracer.commands.compare import cooling_of, has_enough_pairs
from tracer.commands.cooling import Cooling
from tracer.errors import TracerError
from tracer.recording.paths import invoking_user
from tracer.traced_program import models
from workloads.compiling import WITH_SITES, compile_c


def begun(folder: Path) -> int:
    return int(json.loads((folder / "manifest.json").read_text())["clocks"][0]["monotonic_ns"])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A program that decodes a few steps, and two model files of the same size that its command line names."""
    folder = tmp_path_factory.mktemp("compared")
    files = [folder / "a.gguf", folder / "b.gguf"]
    for number, file in enumerate(files):
        file.write_bytes(bytes(3 << 20) + bytes([number]))
    return compile_c(folder / "planted", "planted.c", flags=WITH_SITES), files


@pytest.fixture(scope="module")
def compared(program: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of two pairs behind one that warms up, and what was printed."""
    folder = tmp_path_factory.mktemp("pairs") / "cmp"
    sides = [[str(program[0]), "1", "5", str(model)] for model in program[1]]
    words = [
        "compare",
        "--runs",
        "2",
        "--trace",
        "--levels token,operator",
        "-o",
        str(folder),
        "--",
        *sides[0],
        "::",
        *sides[1],
    ]
    done = trace(*words, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.needs("probes")
def test_the_order_is_a_b_b_a_behind_a_pair_that_is_not_compared(compared: tuple[Path, str]) -> None:
    folder = compared[0]
    recorded = sorted((path.parent for path in folder.rglob("manifest.json")), key=begun)
    order = [path.relative_to(folder).as_posix() for path in recorded]
    assert order[:2] == ["warmup/base/run-000", "warmup/cand/run-000"]
    assert order[2:] == ["base/run-000", "cand/run-000", "cand/run-001", "base/run-001"]
    told = json.loads((folder / "comparison.json").read_text())
    assert told["runs"] == {"base": ["run-000", "run-001"], "cand": ["run-000", "run-001"]}


@pytest.mark.needs("probes")
def test_the_report_says_that_two_runs_tell_nothing_and_that_the_models_differ(compared: tuple[Path, str]) -> None:
    folder, printed = compared
    told = json.loads((folder / "comparison.json").read_text())
    speed = [m for m in told["metrics"] if m["family"] == "speed"]
    assert {m["metric"] for m in speed} >= {"TTFT", "TPOT, median"}
    assert not {m["verdict"] for m in speed} & {"slower", "faster"} and all(m["more_runs"] >= 1 for m in speed if m["more_runs"])
    assert (folder / "regression.html").stat().st_size > 10_000 and "regression.html" in printed
    unlike = {one["what"]: one["unfair"] for one in told["environment"]}
    assert unlike["model"] and not unlike["model file"] and not unlike["command"]
    assert "conditions: model" in printed


@pytest.mark.needs("probes")
@pytest.mark.parametrize(
    ("limit", "made"), [pytest.param((), 5, marks=pytest.mark.long), (("--budget", "1ms"), 1)], ids=["unlimited", "limited"]
)
def test_it_makes_as_many_runs_as_were_asked_for_or_says_what_ended_it(
    program: tuple[Path, list[Path]], tmp_path: Path, limit: tuple[str, ...], made: int
) -> None:
    command = [str(program[0]), "1", "3", "base"]
    options = ["--runs", "5", *limit, "--warmup", "0", "--trace", "--levels token", "-o", str(tmp_path / "cmp")]
    done = trace("compare", *options, "--", *command, "::", *command)
    assert done.returncode == 0, done.stderr
    assert [len(list((tmp_path / "cmp" / side).iterdir())) for side in ("base", "cand")] == [made, made]
    assert ("--budget 0.001 s" in done.stderr) == bool(limit)


def runs(folder: Path, side: str, number: int, noise: float, factor: float = 1.0) -> None:
    """Stored results whose speed varies by `noise` from run to run."""
    (folder / side).mkdir(parents=True)
    metrics = result("", 0).metrics.query("family == 'speed'")
    for i in range(number):
        one = metrics.copy()
        one["value"] *= factor * np.exp(np.random.default_rng([i, side == "cand"]).normal(0, noise))
        save_result(Result(f"run-{i}", one, began=2.0 * i + (side == "cand")), folder / side / f"{i}.parquet")


@pytest.mark.parametrize(
    "pairs, noise, factor, stops",
    [(5, 0.002, 1.0, True), (8, 0.1, 1.0, False), (8, 0.1, 2.5, True), (4, 0.002, 1.0, False)],
    ids=["narrow", "wide", "wide but beyond doubt", "too few"],
)
def test_it_stops_where_intervals_are_narrow_or_the_verdict_is_beyond_doubt(
    tmp_path: Path, pairs: int, noise: float, factor: float, stops: bool
) -> None:
    runs(tmp_path, "base", pairs, noise)
    runs(tmp_path, "cand", pairs, noise, factor)
    assert has_enough_pairs(argparse.Namespace(runs=0, width=0.03), tmp_path, pairs, invoking_user()) is stops


HEAT = {
    "class/thermal/thermal_zone0/temp": 40_000,
    "class/thermal/cooling_device0/cur_state": 0,
    "devices/system/cpu/cpufreq/policy0/scaling_max_freq": 2_800_000,
}
HOTTER = {0: 60_000, 1: 2, 2: 1_400_000}
"""What each of these files shows of a machine that has been at work."""


def show_heat(root: Path, values: list[int]) -> None:
    for name, value in zip(HEAT, values, strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n")


@pytest.mark.parametrize("hotter", HOTTER)
def test_a_run_waits_until_the_machine_is_as_cool_as_before_the_first(hotter: int, tmp_path: Path) -> None:
    cool = list(HEAT.values())
    hot = [HOTTER[hotter] if number == hotter else value for number, value in enumerate(cool)]
    show_heat(tmp_path, cool)
    cooling, told = Cooling.begun(tmp_path, invoking_user(), 30.0), list[str]()
    assert cooling.wait(told.append) < 0.5 and not told
    show_heat(tmp_path, hot)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(cooling.wait, told.append)
        time.sleep(1.2)
        assert not waiting.done() and len(told) == 1
        show_heat(tmp_path, cool)
        assert 1 < waiting.result(timeout=10) < 10 and len(told) == 1
    show_heat(tmp_path, hot)
    assert replace(cooling, longest_s=0.2).wait(told.append) >= 0.2 and len(told) == 3


def test_cooling_is_refused_where_no_heat_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(TracerError):
        Cooling.begun(tmp_path, invoking_user(), 30.0)
    for options in (f"--sysfs {tmp_path}", "--on adb"):
        with pytest.raises(TracerError):
            cooling_of(argparse.Namespace(trace=options, cool=60.0), invoking_user())


@pytest.mark.needs("probes")
def test_each_run_of_a_comparison_begins_cool_or_says_that_it_does_not(program: tuple[Path, list[Path]], tmp_path: Path) -> None:
    root, command = tmp_path / "sys", [str(program[0]), "1", "3", "base"]
    show_heat(root, list(HEAT.values()))
    heat_up = f"echo 70000 > {root}/class/thermal/thermal_zone0/temp; exec {' '.join(command)}"
    options = ["--runs", "1", "--warmup", "0", "--cool", "0.02", "--trace", f"--levels token --sysfs {root}"]
    done = trace("compare", *options, "-o", str(tmp_path / "cmp"), "--", "sh", "-c", heat_up, "::", *command)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("70.0 °C (40.0 at first)") == 2  # before the second run: the wait, and that it was in vain


@pytest.mark.parametrize("words", [["--", "a"], ["--", "a", "::"], ["--", "::", "b"], ["--", "a", "::", "b", "::", "c"]])
def test_wrong_use_is_one_line_and_two(words: list[str]) -> None:
    done = trace("compare", *words)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


def test_a_model_is_known_by_its_contents_wherever_it_lies(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    content = np.random.default_rng(0).bytes(2 << 20)
    for path in (folder / "one.safetensors", tmp_path / "copy.gguf", folder / "notes.txt"):
        path.write_bytes(content)
    found = models.model_rows(models.models_named(["engine", "--dir=model", "-m", "copy.gguf", "x" * 5000, "a\0b"], tmp_path))
    assert [Path(row["path"]).name for row in found] == ["one.safetensors", "copy.gguf"]
    assert found[0]["fingerprint"] == found[1]["fingerprint"] and found[0]["bytes"] == len(content)
    for at in (0, len(content) - 1):
        (folder / "one.safetensors").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert models.model_rows([folder / "one.safetensors"])[0]["fingerprint"] != found[0]["fingerprint"]


def test_a_command_that_does_not_name_its_model_is_asked_what_it_has_open(tmp_path: Path) -> None:
    for name, size in (("small.gguf", 10), ("large.gguf", 1000)):
        (tmp_path / name).write_bytes(bytes(size))
    script = "import sys; files = [open(path) for path in sys.argv[1:]]; print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", script, *(str(path) for path in sorted(tmp_path.iterdir()))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout and child.stdout.readline()
        assert models.largest_in_use(child.pid) == [tmp_path / "large.gguf"]
        child.communicate()
    assert models.largest_in_use(child.pid) == []
