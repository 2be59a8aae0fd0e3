"""Programs that lose time to a known cause, recorded by the real tracer: that cause is the first finding, with its true share."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analyzer.questions import step_time
from analyzer.tables.store import load_tables
from moescope.__main__ import main
from tests.conftest import ROOT, trace
from tests.truth import read_log, skip_where_stolen
from workloads.compiling import compile_c
from workloads.hexagon import backend
from workloads.host_time import HostTime

STEPS, PROMPT, PAUSE_US = 40, 8, 10_000
CLOSE = 0.1
Spans = list[tuple[int, int]]
pytestmark = [
    pytest.mark.needs("probes"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]


@dataclass(frozen=True)
class Plant:
    """What a thread loses time to (workloads/programs/plants.h), the cause to be told, and names of which one stands below it."""

    text: str
    cause: str
    below: tuple[str, ...] = ("experts",)
    neighbours: int = 0

    @property
    def kind(self) -> str:
        return self.text.split(":")[0]

    @property
    def own(self) -> bool:
        """Whether it is the thread that takes the steps; else the other one, for which that waits."""
        return self.text.endswith("@0")


def on_a_quiet_machine(test: Callable[..., None]) -> Callable[..., None]:
    """Of findings' order and shares, which other programs change, too."""
    return pytest.mark.long(pytest.mark.alone(pytest.mark.flaky(reruns=2, only_rerun="AssertionError")(test)))


two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each of the program's two threads needs a CPU")
CROWD = ("neighbour", "other")
"""On a busy machine three other programs may have displaced the thread for longer."""
PLANTS = [
    Plant("sleep:1500@0", "asleep"),
    Plant("sleep:1500@1", "asleep"),
    Plant("lock:2000@0", "lock or other thread", ("thread",)),
    Plant("lock:2000@1", "lock or other thread", ("thread",)),
    Plant("rest:2000@0", "lock or other thread", ("thread",)),
    Plant("rest:2000@1", "lock or other thread", ("thread",)),
    pytest.param(Plant("cold:1500@0", "disk and faults"), marks=pytest.mark.needs("dropping pages")),
    pytest.param(Plant("cold:1500@1", "disk and faults"), marks=pytest.mark.needs("dropping pages")),
    Plant("slow:4@1", "lock or other thread", ("thread",)),
    Plant("beside:2000@0", "run queue", CROWD, neighbours=2),
    Plant("beside:2000@1", "run queue", CROWD, neighbours=2),
    Plant("timer:1500@0", "asleep"),
    Plant("timer:1500@1", "asleep"),
    Plant("stop:1500@0", "stopped"),
    Plant("stop:1500@1", "stopped"),
    Plant("open:0@0", "tracing itself"),
    Plant("open:0@1", "tracing itself"),
]
OF_ALL = ("stop", "open")
"""Plants that stop the whole program, whichever thread does it."""
URGENT = ("chrt", "--fifo", "1")
"""Neighbours on the machine are no part of an experiment, except where they are planted."""
NEIGHBOUR = """
open("/proc/self/comm", "w").write("neighbour")
print(flush=True)
while True:
    pass
"""


def spans(rows: pd.DataFrame, begin: str, end: str) -> Spans:
    return list(zip(rows[begin].tolist(), rows[end].tolist(), strict=True))


def length(some: Spans) -> int:
    return sum(end - begin for begin, end in some)


def common(some: Spans, others: Spans) -> Spans:
    """What lies in one of each; neither has overlaps of its own."""
    met = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return [(begin, end) for begin, end in met if begin < end]


def counted_decode_steps(run: Path, log: Path) -> pd.Series:
    """Numbers in the program's log of the decode steps that findings count: placing and learning probes did not disturb them."""
    tables, numbers = load_tables(run), read_log(log, "token")["id"]
    steps = step_time.counted_steps(tables).query("phase == 'decode'")
    assert len(numbers) == len(tables["tokens"]) and len(steps)
    return numbers.iloc[steps["token_id"]]


def lost_ns(plant: Plant, log: Path, steps: pd.Series) -> int:
    """How long these steps were held up, by the program's own log and the kernel's count of its time without a CPU."""
    rows = {what: read_log(log, what) for what in ("token", "op", "plant", "delay", "gap")}
    rows = {what: mine if what == "gap" else mine[mine["id"].isin(steps)] for what, mine in rows.items()}
    mine = rows["op"]["tid"] == rows["token"]["tid"].iloc[0]
    waits = spans(rows["op"][mine], "before_end", "after_end")
    if plant.kind == "slow":
        return length(waits)
    if plant.kind == "beside":
        others = rows["gap"][rows["gap"]["tid"] != rows["token"]["tid"].iloc[0]]
        return (
            int(rows["delay"]["detail"].sum()) if plant.own else length(common(spans(others, "before_begin", "after_end"), waits))
        )
    planted = spans(rows["plant"], "after_begin", "before_end")
    own = plant.own or plant.kind in OF_ALL
    return length(planted) - int(rows["plant"]["detail"].sum()) if own else length(common(planted, waits))


def true_share(plant: Plant, run: Path, log: Path) -> float:
    steps, tokens = counted_decode_steps(run, log), read_log(log, "token")
    return lost_ns(plant, log, steps) / length(spans(tokens[tokens["id"].isin(steps)], "before_begin", "after_end"))


def findings_of(run: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["findings", str(run), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return found


def first_finding(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return findings_of(run, capsys)[0]


@contextlib.contextmanager
def neighbours(wanted: int) -> Iterator[None]:
    """Other processes that always compute, on the first CPU: with two, the larger part of it is theirs."""
    with contextlib.ExitStack() as running:
        for _ in range(wanted):
            process = running.enter_context(subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE))
            running.callback(process.kill)
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
            assert process.stdout is not None and process.stdout.readline()
        yield


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("program") / "program", "truth_llama.c", "truth_llama_main.c")


def record(plant: Plant, program: Path, folder: Path, any_host: bool = False) -> tuple[Path, Path]:
    """The recording of the planted program in `folder`, and its log."""
    run, log, host = folder / "run", folder / "log.csv", HostTime()
    command = [str(program), str(log), str(STEPS), str(PROMPT), str(PAUSE_US), plant.text]
    with neighbours(plant.neighbours):
        done = trace("run", "--no-views", "--levels", "token,graph,operator,sched,io", "-o", str(run), "--", *command, timeout=60)
    assert done.returncode == 0, done.stderr
    if not any_host:
        skip_where_stolen(host.share())
    return run, log


@on_a_quiet_machine
@two_cpus
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.text)
def test_a_planted_cause_is_the_first_finding_with_its_share_of_the_steps(
    plant: Plant, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, log = record(plant, program, tmp_path)
    found = first_finding(run, capsys)
    assert found["evidence"]["cause"] == plant.cause
    assert found["evidence"]["phases"]["decode"] == pytest.approx(true_share(plant, run, log), rel=CLOSE)
    assert any(name.startswith(plant.below) for name in found["evidence"]["below_ms"])


@two_cpus
@pytest.mark.parametrize("text", ["sleep:1500@0", "lock:2000@1", "stop:1500@0"])
def test_a_planted_cause_has_its_share_however_busy_the_machine_is(
    text: str, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (plant,) = (plant for plant in PLANTS if isinstance(plant, Plant) and plant.text == text)
    run, log = record(plant, program, tmp_path, any_host=True)
    found = next(each["evidence"] for each in findings_of(run, capsys) if each["evidence"].get("cause") == plant.cause)
    assert found["phases"]["decode"] == pytest.approx(true_share(plant, run, log), rel=CLOSE)
    assert any(name.startswith(plant.below) for name in found["below_ms"])


@on_a_quiet_machine
@two_cpus
@pytest.mark.parametrize("thread", [0, 1])
def test_a_slow_thread_is_named_with_the_share_of_the_steps_that_it_computes_longer(
    thread: int, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, log = record(Plant(f"slow:4@{thread}", ""), program, tmp_path)
    operators, steps = (read_log(log, what).query("id != 0") for what in ("op", "token"))
    computed = operators.assign(ns=operators["before_end"] - operators["after_begin"])
    by_thread = computed.pivot(index=["id", "detail"], columns="tid", values="ns")
    own, decode = int(steps["tid"].iloc[0]), length(spans(steps, "before_begin", "after_end"))
    slow = next(tid for tid in by_thread.columns if (tid == own) == (thread == 0))
    first, *others = findings_of(run, capsys)
    if thread == 0:
        last = operators.groupby(["id", "detail"])["before_end"].transform("max")  # it waits for another until all are done
        waits = spans(operators.assign(last=last)[operators["tid"] == own], "before_end", "last")
        assert first["evidence"]["cause"] == "computing"
        assert first["evidence"]["phases"]["decode"] == pytest.approx(1 - length(waits) / decode, rel=CLOSE)
    else:
        assert any(name.startswith(f"thread {slow} ") for name in first["evidence"]["below_ms"])
    (found,) = (each for each in others if each["rule"] == "imbalance")
    longest = {int(name.split()[1]): share for name, share in found["evidence"]["longest"].items()}
    assert next(iter(longest)) == slow and f"thread {slow} " in found["text"]
    assert longest[slow] == pytest.approx((by_thread[slow] - by_thread.mean(axis=1)).sum() / decode, rel=CLOSE)


@on_a_quiet_machine
@two_cpus
@pytest.mark.parametrize("thread", [0, 1])
def test_one_neighbour_takes_its_share_wherever_that_ranks(
    thread: int, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant = Plant(f"beside:2000@{thread}", "run queue", CROWD, neighbours=1)
    run, log = record(plant, program, tmp_path)
    (found,) = (each for each in findings_of(run, capsys) if each["rule"] == "run queue")
    assert found["evidence"]["phases"]["decode"] == pytest.approx(true_share(plant, run, log), rel=CLOSE)
    assert any(name.startswith(plant.below) for name in found["evidence"]["below_ms"])


@on_a_quiet_machine
@pytest.mark.needs("dropping pages")
def test_a_small_expert_cache_is_the_first_finding_with_the_share_that_the_runtime_waited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, log = tmp_path / "demo", tmp_path / "log.json"
    subprocess.run([sys.executable, "-m", "moescope", "convert", "demo", str(model)], cwd=ROOT, check=True, capture_output=True)
    words = [
        "generate",
        str(model),
        "--prompt",
        "The router looks at",
        "--ignore-end",
        "--prefetch",
        "off",
        "--expert-cache",
        "1.2MiB",
    ]
    command = [sys.executable, "-m", "moescope", *words, "--log", str(log), "--max-new-tokens"]
    subprocess.run([*command, "1"], cwd=ROOT, check=True, capture_output=True)  # converts the model
    for file in model.rglob("experts_*.bin"):
        with file.open("rb") as content:
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    host = HostTime()
    done = trace("run", "--no-views", "-o", str(tmp_path / "run"), "--", *URGENT, *command, "24")
    assert done.returncode == 0, done.stderr
    skip_where_stolen(host.share())
    found, own = first_finding(tmp_path / "run", capsys)["evidence"], json.loads(log.read_text())["statistics"]
    assert found["cause"] == "expert load"
    assert found["share"] == pytest.approx(own["stall_ns"] / own["total_ns"], rel=CLOSE)


def record_slow_accelerator(folder: Path) -> tuple[Path, Path]:
    """The recording of a program whose NPU takes long for each operator, and the NPU's log."""
    log, host = folder / "log.txt", HostTime()
    options = ("--no-views", "--levels", "token,graph,operator,sched", "-o", str(folder / "run"))
    slow = {"STANDIN_LOG": str(log), "STANDIN_OP_US": "300"}
    done = trace("run", *options, "--", *URGENT, str(backend.build_fake_backend(folder)), "12", "3", env=slow)
    assert done.returncode == 0, done.stderr
    skip_where_stolen(host.share())
    return folder / "run", log


@on_a_quiet_machine
def test_a_slow_accelerator_is_the_first_finding_with_the_share_that_it_worked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, log = record_slow_accelerator(tmp_path)
    batches = [[int(word) for word in line.split()[1:]] for line in log.read_text().splitlines() if line.startswith("batch")]
    worked = sum(ended - begun for _, _, _, begun, ended, _ in batches)
    found = first_finding(run, capsys)["evidence"]
    assert found["cause"] == "accelerator"
    assert found["ms"] == pytest.approx(worked / 1e6, rel=CLOSE)
