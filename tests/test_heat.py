"""Heat: steady states, limits with their time, source and cost, speed over time, and verdicts on sides at other clocks."""

import bisect
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyzer.compare.document import compare_runs
from analyzer.compare.metrics import RunTables, extract_metrics
from analyzer.compare.results import Result, of_recording
from analyzer.questions import heat, speed_curve, steady
from analyzer.questions.findings import findings
from analyzer.questions.summary import summarize
from analyzer.records.schema import Tables
from analyzer.tables.store import build_tables
from tests.conftest import ROOT, made_once
from tests.test_clocks import COOLING, KHZ, MANIFEST, MOST_KHZ, ZONE, write
from tracer.recording.format import Recording
from workloads.power_tree import MOST_KHZ as FULL_KHZ
from workloads.power_tree import PowerTree, Warmth
from workloads.raw_records import RawRecording
from workloads.recordings import Writer
from workloads.slow_files import slow_folder

S, MS = 1_000_000_000, 1_000_000
STEPS = (1, 0.1, 160, 0.016, 0.002)
WARM = Warmth(tau_s=1.5, degrees_per_w=12.0)
"""It reaches its limit after a second of computing."""


def stepped(seconds: float, celsius: "np.ufunc | object", step_ms: int = 100, **manifest: object) -> Writer:
    """Decode steps one after the other; a zone is read every second, the clock once."""
    w, count = Writer(), int(seconds * 1000 / step_ms)
    begin = S + np.arange(count) * step_ms * MS
    w.add("heat", ts=S, engine=0, what=KHZ, number=4, value=FULL_KHZ)
    ts = np.arange(int(seconds))
    w.add("heat", n=len(ts), ts=S + ts * S, engine=0, what=ZONE, number=0, value=np.round(1000 * celsius(ts)).astype(int))  # type: ignore[operator]
    w.add("token_begin", n=count, ts=begin, seq=np.arange(count), phase=2, n_tokens=1, position=np.arange(count))
    w.add("token_end", n=count, ts=begin + (step_ms - 1) * MS, seq=np.arange(count))
    return w


def state_of(w: Writer, folder: Path, **manifest: object) -> dict:
    recording = Recording(w.write(folder, **MANIFEST, **manifest))
    return steady.steady_state(build_tables(recording), recording.manifest)


def test_a_device_that_warms_up_is_steady_once_its_temperature_stays(tmp_path: Path) -> None:
    def warming(ts: np.ndarray) -> np.ndarray:
        return 30 + 50 * (1 - np.exp(-ts / 60))

    told = state_of(stepped(600, warming), tmp_path / "long")
    # the last moment at which 50 exp(-t / 60) is further than 1 °C from the mean of all that follows
    assert told["state"] == "steady" and 60 * np.log(50 / 2) < told["since_s"] < 60 * np.log(50 / 0.9)
    assert told["tokens_per_s_since"] == pytest.approx(10, rel=0.01) and told["steps_since"] > 3000
    short = state_of(stepped(150, warming), tmp_path / "moving")
    assert short["state"] == "not steady" and short["since_s"] is None
    assert [each["name"] for each in short["signals"] if each["settled_s"] is None] == ["cpu-0"]
    assert state_of(stepped(30, warming), tmp_path / "short")["state"] == "too short"


def test_figures_of_a_run_until_steady_are_those_of_its_steady_part(tmp_path: Path) -> None:
    w = stepped(200, lambda ts: np.where(ts < 100, 40.0, 60.0))
    manifest = {"steady": {"for_s": 60, "reached_ns": 201 * S, "limit_s": 900, "commands": 3}}
    recording = Recording(w.write(tmp_path / "r", **MANIFEST, **manifest))
    tables = build_tables(recording)
    told = steady.steady_state(tables, recording.manifest)
    assert told["state"] == "steady" and told["since_s"] == pytest.approx(140)
    metrics = extract_metrics(RunTables(steady.steady_part(tables, recording.manifest)))
    assert metrics.loc[metrics["metric"] == "decode step", "n"].max() == pytest.approx(600, abs=2)
    heat_rows = metrics[metrics["metric"] == "temperature"]
    assert heat_rows["value"].to_list() == pytest.approx([60.0])


def limited_run(folder: Path, capped: bool) -> Tables:
    """200 decode steps of 10 ms, those from the 100th on of 15 ms; then the clock is lower by half and the zone at its limit."""
    w, at = Writer(), S
    for what, number, value in ((KHZ, 4, 2800000), (MOST_KHZ, 4, 2800000), (ZONE, 0, 60000), (COOLING, 3, 0)):
        w.add("heat", ts=S - 1, engine=0, what=what, number=number, value=value)
    for step in range(200):
        if step == 100:
            w.add("heat", ts=at, engine=0, what=KHZ, number=4, value=1400000)
            w.add("heat", ts=at, engine=0, what=ZONE, number=0, value=85500)
            if capped:
                w.add("heat", ts=at, engine=0, what=MOST_KHZ, number=4, value=1400000)
                w.add("heat", ts=at, engine=0, what=COOLING, number=3, value=4)
        w.add("token_begin", ts=at, seq=step, phase=2, n_tokens=1, position=step)
        at += (15 if step >= 100 else 10) * MS
        w.add("token_end", ts=at - 1000, seq=step)
    return build_tables(Recording(w.write(folder, **MANIFEST)))


@pytest.mark.parametrize("capped", [True, False])
def test_limits_are_told_with_their_time_source_and_cost(capped: bool, tmp_path: Path) -> None:
    tables = limited_run(tmp_path / "r", capped)
    found = next(f for f in findings(tables) if f.rule == "throttled")
    (episode,) = found.evidence["episodes"]
    assert episode["begin_s"] == pytest.approx(1.0) and episode["end_s"] == pytest.approx(2.5, abs=0.01)
    assert len(episode["sources"]) == (2 if capped else 1) and all(
        any(word in text for text in episode["sources"]) for word in (("capped", "cpufreq-cpu4") if capped else ("fell",))
    )
    assert episode["celsius"] == 85.5 and episode["zone"] == "cpu-0"
    assert found.evidence["limited_tokens_per_s"] == pytest.approx(1e3 / 15, rel=0.01)
    assert found.evidence["free_tokens_per_s"] == pytest.approx(100, rel=0.01) and found.saving_ms == pytest.approx(500, rel=0.02)


def test_speed_over_time_adds_up_and_names_what_fell(tmp_path: Path) -> None:
    windows = speed_curve.speed_over_time(limited_run(tmp_path / "r", True))
    assert windows[list(speed_curve.LOSSES)].sum(axis=1).to_numpy() == pytest.approx(windows["slower_ms"].to_numpy(), abs=1e-6)
    slow = windows[windows["limited"] > 0.99]
    assert len(slow) > 5 and set(slow["cause"]) == {"clock"} and slow["slower_ms"].to_numpy() == pytest.approx(5, abs=0.1)
    assert set(windows.loc[windows["limited"] == 0, "cause"]) == {""} and windows["steps"].sum() == 199


def run_at(name: str, mhz: float, factor: float, seed: int) -> Result:
    """A run at a clock whose steps take `factor` as long as 10 ms."""
    steps = 10 * factor * np.random.default_rng(seed).normal(1, 0.003, 40)
    rows = [("speed", "TPOT, median", "ms", "", "lower", float(np.median(steps)))]
    rows += [("speed", "decode speed", "tok/s", "", "higher", 1e3 / float(np.mean(steps)))]
    rows += [("energy", "energy per token", "J", "decode", "lower", 0.1 * factor)]
    rows += [
        ("clocks", "frequency", "MHz", "decode", "higher", mhz),
        ("clocks", "clock of the program", "MHz", "decode", "higher", mhz),
    ]
    template = extract_metrics(RunTables(build_tables_of_nothing()))
    frame = pd.DataFrame(rows, columns=["family", "metric", "unit", "phase", "better", "value"])
    frame = frame.reindex(columns=template.columns).assign(
        type="", label="", graph="", shape="", backend="", layer=-1, expert=-1, offset=0.0, n=40, mean=np.nan, share=np.nan
    )
    frame.loc[frame["metric"] == "frequency", "type"] = "CPUs 0-1"
    frame.index = pd.Index(frame["family"] + "|" + frame["metric"], name="key")
    return Result(name, frame, began=float(seed))


def build_tables_of_nothing() -> Tables:
    from workloads.tables_fixture import make_tables

    return make_tables(tokens=4, layers=1)[1]


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.45, "other clocks"),
        pytest.param(1.1, "other clocks", marks=pytest.mark.long),
        pytest.param(1.9, "slower", marks=pytest.mark.long),
        pytest.param(0.8, "faster", marks=pytest.mark.long),
    ],
)
def test_a_hot_run_against_a_cold_one_is_judged_by_what_clocks_cannot_explain(factor: float, verdict: str) -> None:
    base = [run_at(f"b{i}", 2800.0, 1.0, 2 * i) for i in range(6)]
    cand = [run_at(f"c{i}", 1900.0, factor, 2 * i + 1) for i in range(6)]
    made = compare_runs(base, cand)
    judged = made.judged.set_index("metric")["verdict"]
    assert judged["TPOT, median"] == judged["decode speed"] == verdict and judged["energy per token"] == "other clocks"
    back = compare_runs(cand, base).judged.set_index("metric")["verdict"]
    assert back["TPOT, median"] == {"slower": "faster", "faster": "slower"}.get(verdict, verdict)
    equal = compare_runs(base, [run_at(f"c{i}", 2800.0, factor, 2 * i + 1) for i in range(6)]).judged.set_index("metric")[
        "verdict"
    ]
    assert equal["TPOT, median"] == ("faster" if factor < 1 else "slower")


@pytest.fixture(scope="module")
def throttled() -> tuple[PowerTree, Recording, Tables]:
    """A program that warms up a stand-in until that lowers the clock, which slows the program down."""
    folder = made_once("planted heat", lambda folder: PowerTree(folder, warmth=WARM).record(steps=STEPS))
    recording = Recording(folder / "recording")
    return PowerTree(folder, warmth=WARM), recording, build_tables(recording)


def itls_by_clock(tree: PowerTree) -> dict[bool, list[float]]:
    """Whether the clock was lowered → ms from one step's end to the next one's, by the logs of program and stand-in."""
    changes, rows = tree.clock_changes(), [row["end"][0] for row in tree.step_log()]
    at, answer = [ns for ns, _, _ in changes], {True: [], False: []}
    for begin, end in pairwise(rows):
        first, last = bisect.bisect_right(at, begin) - 1, bisect.bisect_right(at, end) - 1
        if first == last and first >= 0:
            answer[changes[first][1] < FULL_KHZ].append((end - begin) / MS)
    return answer


@pytest.mark.needs("probes", "recorder")
def test_planted_throttling_is_found_with_its_time_cause_and_cost(throttled: tuple[PowerTree, Recording, Tables]) -> None:
    tree, recording, tables = throttled
    truth, itls = next(ns for ns, khz, _ in tree.clock_changes() if khz < FULL_KHZ), itls_by_clock(tree)
    found = next(f for f in findings(tables) if f.rule == "throttled")
    first = found.evidence["episodes"][0]
    origin = int(tables["tokens"]["begin_ns"].min())
    assert first["begin_s"] == pytest.approx((truth - origin) / S, abs=0.8) and len(first["sources"]) == 2
    assert first["celsius"] == pytest.approx(WARM.limit, abs=6)
    assert found.evidence["limited_tokens_per_s"] == pytest.approx(1e3 / np.median(itls[True]), rel=0.1)
    assert found.evidence["free_tokens_per_s"] == pytest.approx(1e3 / np.median(itls[False]), rel=0.1)
    told = summarize(recording, tables)["heat"]
    assert told["episodes"] and told["cost"]["limited_steps"] > 20 and told["steady"]["state"] == "too short"


@pytest.mark.needs("probes", "recorder")
def test_the_curve_of_a_throttled_run_falls_by_its_clock(throttled: tuple[PowerTree, Recording, Tables]) -> None:
    _, _, tables = throttled
    windows = speed_curve.speed_over_time(tables)
    assert speed_curve.speed_over_time(tables, 2)["watts"].notna().all(), "windows long enough for its readings"
    short, rails = speed_curve.rails_without(tables, windows), set(tables["rails"]["rail"])
    assert ({row["rail"] for row in short} == rails) == windows["watts"].isna().all() and all(row["why"] for row in short)
    slow, fastest = windows[windows["limited"] > 0.99], windows.loc[windows["tokens_per_s"].idxmax()]
    assert len(slow) > 5 and slow["mhz"].max() < FULL_KHZ / 1e3
    assert windows[list(speed_curve.LOSSES)].sum(axis=1).to_numpy() == pytest.approx(windows["slower_ms"].to_numpy(), abs=1e-6)
    if fastest["limited"] == 0:  # on a busy machine, the clock is not what decides
        expected = 1e3 * STEPS[3] * (fastest["mhz"] / slow["mhz"] - 1)
        assert slow["clock_ms"].median() == pytest.approx(expected.median(), rel=0.3)


@pytest.mark.long
@pytest.mark.needs("probes", "recorder")
def test_a_clock_that_falls_without_a_limit_is_found_by_the_zone_at_its_limit(tmp_path: Path) -> None:
    tree = PowerTree(tmp_path, warmth=Warmth(tau_s=1.5, degrees_per_w=12.0, hidden=True))
    tables = build_tables(Recording(tree.record(steps=STEPS)))
    first = heat.episodes(tables, heat.limits_of(tables))[0]
    assert len(first.sources) == 1 and "fell" in first.sources[0]


@pytest.mark.long
@pytest.mark.needs("probes", "recorder")
def test_recorded_hot_runs_are_no_slower_build_than_cold_ones(tmp_path: Path) -> None:
    cold, hot = Warmth(limit=1000.0), Warmth(tau_s=0.2, degrees_per_w=40.0)
    steps = (1, 0.3, 120, 0.016, 0.002)
    sides: dict[str, list[Result]] = {"cold": [], "hot": []}
    for number in range(8):
        name = ("cold", "hot")[number % 2]
        tree = PowerTree(tmp_path / f"{number}", warmth=cold if name == "cold" else hot)
        tree.folder.mkdir()
        sides[name].append(of_recording(tree.record(steps=steps)))
    made = compare_runs(sides["cold"], sides["hot"])
    speed = made.judged[made.judged["family"] == "speed"]
    decode = speed[speed["metric"].isin(("TPOT, median", "decode speed"))]
    assert (decode["cand"] / decode["base"]).max() > 1.2 and not speed["verdict"].isin(("slower", "faster")).any()


@pytest.mark.needs("probes", "recorder")
def test_a_command_is_repeated_until_the_limit_if_nothing_settles(tmp_path: Path) -> None:
    tree = PowerTree(tmp_path, warmth=WARM)
    recording = Recording(tree.record("--until-steady", "0.05", steps=(1, 0.02, 10, 0.005, 0.002)))
    told = recording.manifest["steady"]
    assert told["reached_ns"] == 0 and told["limit_s"] == pytest.approx(3) and told["commands"] >= 2
    rows = tree.step_log()
    assert len(rows) >= 11 * told["commands"]
    assert len(build_tables(recording)["tokens"]) > 11


@pytest.mark.long
@pytest.mark.needs("probes", "recorder")
def test_a_recording_until_steady_ends_once_nothing_moves(tmp_path: Path) -> None:
    tree = PowerTree(tmp_path, (), warmth=Warmth(tau_s=3.0, degrees_per_w=4.0))
    recording = Recording(tree.record("--until-steady", "2", "--steady-for", "12s", steps=(1, 0.02, 100, 0.01, 0)))
    told, tables = recording.manifest["steady"], build_tables(recording)
    assert told["reached_ns"] > 0 and told["commands"] > 3
    begun = int(tables["tokens"]["begin_ns"].min())
    assert 12 < (told["reached_ns"] - begun) / S < 60  # the mass is within 1 °C of its last temperature after 4 time constants
    settled = steady.steady_state(tables, recording.manifest)
    assert settled["state"] == "steady" and {each["name"] for each in settled["signals"]} == {"clocks", "cpu-0"}


def can_mount() -> bool:
    return os.geteuid() == 0 and Path("/dev/fuse").exists()


@pytest.mark.long
@pytest.mark.needs("probes", "recorder")
@pytest.mark.skipif(not can_mount(), reason="no file systems in user space")
def test_slow_sensors_delay_no_records(tmp_path: Path) -> None:
    """Reading all zones takes a second, in which the target fills a ring twice."""
    files, folder, zones, count = tmp_path / "files", tmp_path / "run", 200, 5000
    for number in range(zones):
        place = f"class/thermal/thermal_zone{number}"
        write(files, {f"{place}/type": f"zone-{number}", f"{place}/temp": 40000 + number})
    write(files, {f"class/hwmon/hwmon{number}/power1_input": 2_000_000 + number for number in range(10)})
    steps = [sys.executable, str(ROOT / "workloads" / "programs" / "steps.py"), str(count), "0.0005", "--operators", "20"]
    words = [
        sys.executable,
        "-m",
        "tracer",
        "run",
        "--levels",
        "token,operator",
        "--ring-mib",
        "2",
        "--no-views",
        "-o",
        str(folder),
    ]
    with slow_folder(files, tmp_path / "sys", 0.005) as sysfs:
        done = subprocess.run(
            [*words, "--sysfs", str(sysfs), "--", *steps], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    run = RawRecording(folder)
    assert run.manifest["lost"] == {} and len(run.records("token_begin")) == len(run.records("token_end")) == count
    assert len(run.records("op_end")) == 20 * count
    heat_rows, power = run.records("heat"), run.records("power")
    assert set(heat_rows["number"][heat_rows["what"] == ZONE].tolist()) == set(range(zones))
    assert len(power) >= 10 and np.median(power["after"].astype(np.int64) - power["ts"].astype(np.int64)) > 4 * MS
