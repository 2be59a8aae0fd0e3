"""A program that no engine declares: steps found from outside, or begun at a named function, and what they wait for."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzer.compare.functions import FUNCTION, OF_SAMPLES, SELF
from analyzer.compare.metrics import RunTables, extract_metrics
from analyzer.questions.findings import findings
from analyzer.questions.programs import has_only_threads, program_summary
from analyzer.questions.step_origin import step_origin
from analyzer.questions.step_time import step_time
from analyzer.records.intervals import Intervals, merge_intervals
from analyzer.records.schema import Tables
from analyzer.tables.found_steps import Recurrence, Stretch, regular_stretch
from analyzer.tables.store import load_tables
from moescope.__main__ import main as moescope
from tests.conftest import ROOT, drawn, made_once, rest_long, trace
from tracer.recording.format import Recording

pytestmark = pytest.mark.needs("probes")
STEPS, STALL_EVERY = 120, 8
NEAR = 0.02
LAYER_BYTES, LAYERS = 256 << 10, 8
OPTIONS = {"talks": ["--stacks"], "quiet": [], "named": ["--step-at", "run_step"]}
PRIMES = """
n, until = 10**8 + 1, __import__("time").monotonic() + 1.5
while __import__("time").monotonic() < until:
    if all(n % d for d in range(3, int(n**0.5) + 1, 2)):
        print(n, flush=True)
    n += 2
"""
APERIODIC = {
    "search": ["find", "/usr/lib", "/usr/share"],
    "primes": [sys.executable, "-c", PRIMES],
    "compiler": ["cc", "-O2", "-c", str(ROOT / "workloads" / "programs" / "truth_llama.c"), "-o", "/dev/null"],
}


def build_engine(folder: Path) -> None:
    """The program and its weights."""
    source = ROOT / "workloads" / "programs" / "streaming.c"
    subprocess.run(["cc", "-O2", "-g", "-o", folder / "streaming", source, "-lpthread"], check=True)
    (folder / "weights").write_bytes(np.random.default_rng(0).bytes(LAYER_BYTES * LAYERS))


@dataclass
class Run:
    """A recording of the engine, and what it logged of itself: [begin, end] in ns by name."""

    folder: Path
    tables: Tables
    said: dict[str, np.ndarray]


def ran(how: str) -> Run:
    """The engine, recorded once for all workers."""
    engine = made_once("streaming engine", build_engine)

    def record(folder: Path) -> None:
        words = [engine / "streaming", engine / "weights", STEPS, 40, 10, STALL_EVERY, 1, how]
        done = trace("run", "--no-views", *OPTIONS[how], "-o", str(folder / "run"), "--", *map(str, words))
        assert done.returncode == 0, done.stderr
        (folder / "said.json").write_text(next(line for line in done.stdout.splitlines() if line.startswith("{")))

    folder = made_once(f"streaming {how}", record)
    said: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return Run(folder / "run", load_tables(folder / "run"), {name: np.array(rows) for name, rows in said.items()})


def common_ns(*spans: np.ndarray) -> int:
    """The time that is in all of these lists of [begin, end]."""
    first, *others = (Intervals.of(rows[:, 0], rows[:, 1]) for rows in spans)
    for other in others:
        merged = merge_intervals(other)
        begin = np.maximum(first.begin[:, None], merged.begin).ravel()
        end = np.minimum(first.end[:, None], merged.end).ravel()
        first = Intervals.of(begin, end).where(end > begin)
    return int(first.length.sum())


@pytest.mark.parametrize("how", ["talks", "quiet"])
def test_steps_of_an_undeclared_engine_are_found_from_outside(how: str) -> None:
    run = ran(how)
    tokens, truth = run.tables["tokens"], run.said["steps"]
    assert abs(len(tokens) - STEPS) <= NEAR * STEPS and set(tokens["engine"]) == {"found"} and tokens["complete"].all()
    assert step_origin(run.tables).startswith("steps found, not declared")
    chosen = run.tables["recurrences"].query("chosen").iloc[0]
    assert chosen["what"] == {"talks": "write", "quiet": "read"}[how] and chosen["steps"] == len(tokens)
    if how == "talks":
        begin, usual = tokens["begin_ns"].to_numpy(), np.median(truth[:, 1] - truth[:, 0])
        nearest = np.abs(truth[:, 0] - begin[:, None]).min(axis=1)
        assert np.median(nearest) < NEAR * usual  # others are preempted between their own clock and the write


def test_a_planted_stall_is_named_first_with_its_function_and_line() -> None:
    run = ran("talks")
    every = findings(run.tables)
    share = {finding.rule: finding.share for finding in reversed(every)}
    first = next(finding for finding in every if finding.rule.startswith("waits"))
    lacked = share.get("run queue", 0.0)
    assert every[0] == first or lacked > share["lock or other thread"], "the machine's other programs cost more"
    threads = run.tables["threads"].set_index("name")["tid"]
    assert first.rule == "waits: lock or other thread" and first.evidence["disk_idle"]
    assert (first.evidence["waiter"], first.evidence["tid"]) == (threads["streaming"], threads["loader"])
    assert first.evidence["does"].startswith("runs `dequantize`")
    assert "pthread_cond_wait" in first.evidence["place"] and "wait_for_layer (streaming.c:" in first.evidence["place"]
    within = np.array([[run.tables["tokens"]["begin_ns"].min(), run.tables["tokens"]["end_ns"].max()]])
    truth = common_ns(run.said["waits"], within, run.said["work"]) / (within[0, 1] - within[0, 0])
    assert first.share - 0.03 < truth < first.share + lacked + 0.08, (first.share, lacked, truth)


def test_a_step_begins_where_the_user_says_in_a_thread() -> None:
    run = ran("named")
    tokens, truth = run.tables["tokens"], run.said["steps"]
    assert len(tokens) == STEPS and set(tokens["engine"]) == {"user"} and set(tokens["phase"]) == {""}
    assert tokens["complete"].sum() == STEPS - 1 and len(Recording(run.folder).manifest["functions"]) == 1
    assert np.median(np.abs(tokens["begin_ns"].to_numpy() - truth[:, 0])) < 200_000
    spent = step_time(run.tables).groupby("token_id")["duration_ns"].sum()
    assert (spent == tokens.set_index("token_id")["duration_ns"]).all()


def test_the_screen_has_threads_disk_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    run = ran("talks")
    assert moescope(["summary", str(run.folder), "--json"]) == 0
    program = json.loads(capsys.readouterr().out)["program"]
    loader = next(row for row in program["threads"] if row["name"] == "loader")
    assert abs(sum(loader["cause_ms"].values()) - loader["ms"]) < 0.01
    top = program["files"][0]
    assert (top["file"].rpartition("/")[2], top["thread"], top["how"]) == ("weights", "loader", "read")
    assert top["bytes"] == STEPS * LAYERS * LAYER_BYTES and top["count"] == STEPS * LAYERS
    reads = (run.said["reads"][:, 1] - run.said["reads"][:, 0]).sum() / 1e6
    assert abs(top["ms"] - reads) < 0.2 * reads
    for disk in program["disks"]:
        assert 0 < disk["busy_share"] <= 1 and 1 <= disk["mean_depth"] <= disk["most_depth"]
    for verb in (["time"], ["trends"], ["time", "threads"], ["time", "stacks"], ["findings"], ["summary"]):
        assert moescope([*verb, str(run.folder)]) == 0
        assert "not declared" in " ".join(capsys.readouterr().out.split()), verb


NO_CLOCK = (np.empty(0), np.empty(0))


def stretch_of(intervals: np.ndarray) -> Stretch:
    """The regular stretch of an event with these intervals (ms), in a recording as long as they are."""
    ts = np.cumsum(np.append(0, intervals * 1e6)).astype(np.int64)
    return regular_stretch(Recurrence("write", 1, 1, 1, (-1, -1, -1), ts), NO_CLOCK, int(ts[-1]))


def test_random_intervals_are_no_steps_and_regular_ones_with_stalls_are() -> None:
    random, count = np.random.default_rng(0), 300
    for _ in range(drawn(60)):
        for irregular in (random.exponential(10, count), random.lognormal(2, 0.7, count), random.uniform(0.1, 20, count)):
            assert not stretch_of(irregular).is_step
        regular = 10 * random.normal(1, 0.05, count)
        stalls = np.where(np.arange(count) % random.integers(4, 12) == 0, random.uniform(2, 8), 1)
        found = stretch_of(regular * stalls)
        assert found.is_step and abs(found.last - found.first - count) <= NEAR * count
        drifting = stretch_of(regular * np.linspace(1, 3, count))
        assert drifting.is_step and drifting.last - drifting.first > 0.97 * count
        loads = stretch_of(np.concatenate([random.exponential(10, count // 4), regular]))
        assert loads.is_step and abs(loads.last - loads.first - count) < 0.05 * count


@pytest.mark.parametrize("name", rest_long(APERIODIC, "primes"))
def test_programs_without_a_period_have_no_steps(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = trace("run", "--no-views", "--stacks", "-o", str(tmp_path / "run"), "--", *APERIODIC[name])
    assert done.returncode == 0, done.stderr
    tables = load_tables(tmp_path / "run")
    assert len(tables["tokens"]) == 0 and not tables["recurrences"]["chosen"].any() and has_only_threads(tables)
    main, every = program_summary(tables)["threads"][0], findings(tables)
    of_causes = [finding for finding in every if "cause" in finding.evidence]
    assert of_causes and all(finding.share <= 1 for finding in of_causes)
    assert abs(sum(main["cause_ms"].values()) - main["ms"]) < 0.01
    lives = tables["thread_states"].groupby("tid")
    assert abs((lives["end_ns"].max() - lives["begin_ns"].min())[main["tid"]] / 1e6 - main["ms"]) < 0.01
    capsys.readouterr()
    assert moescope(["time", "stacks", str(tmp_path / "run"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert sum(row["self"] for row in answer["functions"]) == pytest.approx(1)
    of_python = {row["version"]: row["share"] for row in answer["summary"]["python"]}
    if name == "primes":
        assert of_python["{}.{}".format(*sys.version_info)] > 0.8 and answer["remarks"]
    metrics = extract_metrics(RunTables(tables, answer["summary"]["hz"]))
    shares = metrics[(metrics["family"] == FUNCTION) & (metrics["metric"] == SELF)]
    most = max(row["self"] for row in answer["functions"]) * len(tables["samples"])
    assert (shares["unit"] == OF_SAMPLES).all() and shares["value"].sum() < 100.1 and (len(shares) > 0 or most < 8)
