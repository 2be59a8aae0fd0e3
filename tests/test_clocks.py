"""Clocks and heat: what the recorder reads of a sysfs that changes, and what is said of it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import ANY

import pytest

from analyzer.questions import clocks
from analyzer.questions.findings import findings
from analyzer.questions.summary import summarize
from analyzer.tables.store import build_tables
from tests.conftest import RECORDER, ROOT, rest_long
from tests.golden import Golden
from tracer.kernel.definitions import enum_values
from tracer.probes.kernel_probes import KERNEL_PROBES
from tracer.probes.tracefs import has_tracepoint
from tracer.recording.format import Recording
from workloads.raw_records import RawRecording
from workloads.recordings import Writer

KHZ, LEAST_KHZ, MOST_KHZ, ZONE, COOLING = (
    enum_values("heat_of")[f"HEAT_{name}"] for name in ("KHZ", "LEAST_KHZ", "MOST_KHZ", "ZONE", "COOLING")
)
POLICIES, ZONES, DEVICES = "devices/system/cpu/cpufreq/policy", "class/thermal/thermal_zone", "class/thermal/cooling_device"
MOUNTED = ("devices/system/cpu/cpufreq", "class/thermal")
IN_PLACE = " && ".join(f"mount --bind $FAKE/{place} /sys/{place}" for place in MOUNTED)


def write(root: Path, files: dict[str, object]) -> None:
    """Files below a folder that poses as sysfs; those that are there are changed in place."""
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n")


def policy(number: int, cpus: str, **more: object) -> dict[str, object]:
    files = {"related_cpus": cpus, "scaling_governor": "schedutil", "cpuinfo_min_freq": 300000, "cpuinfo_max_freq": 2800000}
    files |= {"scaling_min_freq": 300000, "scaling_max_freq": 2800000, "scaling_cur_freq": 2800000, **more}
    return {f"{POLICIES}{number}/{name}": value for name, value in files.items()}


def zone(number: int, kind: str, temperature: int) -> dict[str, object]:
    files = {"type": kind, "temp": temperature, "trip_point_0_type": "passive", "trip_point_0_temp": 85000}
    files |= {"trip_point_1_type": "critical", "trip_point_1_temp": 110000}
    return {f"{ZONES}{number}/{name}": value for name, value in files.items()}


def cooling(number: int, kind: str, state: int) -> dict[str, object]:
    return {f"{DEVICES}{number}/{name}": value for name, value in {"type": kind, "max_state": 9, "cur_state": state}.items()}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two clusters, a zone and a cooling device."""
    root = tmp_path / "sys"
    write(root, policy(0, "0 1 2 3", cpuinfo_max_freq=2000000, scaling_max_freq=2000000, scaling_cur_freq=1500000))
    write(root, policy(4, "4 5 6 7", scaling_governor="performance"))
    write(root, zone(0, "cpu-0", 41000) | cooling(3, "cpufreq-cpu4", 0))
    return root


MANIFEST = {
    "heat": {
        "policies": [
            {"number": 0, "cpus": [0, 1, 2, 3], "governor": "schedutil", "least": 300000, "most": 2000000},
            {"number": 4, "cpus": [4, 5, 6, 7], "governor": "schedutil", "least": 300000, "most": 2800000},
        ],
        "zones": [{"number": 0, "type": "cpu-0", "trips": [["critical", 110000], ["passive", 85000]]}],
        "cooling": [
            {"number": 3, "type": "cpufreq-cpu4", "most": 9},
            {"number": 5, "type": "gpu", "most": 4},
            {"number": 6, "type": "twin", "most": 4},
            {"number": 7, "type": "twin", "most": 4},
        ],
    }
}
STEP, STEPS, SLOW = 1_000_000, 20, 1_500_000
UNNUMBERED = 0xFFFF


def warmed(steps: int = STEPS) -> Writer:
    """Decode steps of 1 ms, from the half on of 1.5 ms: there CPUs 4-7 were capped to 1.9 GHz."""
    w, at = Writer(), 1_000_000_000
    for what, value in ((KHZ, 2800000), (LEAST_KHZ, 300000), (MOST_KHZ, 2800000)):
        w.add("heat", ts=at - STEP, pid=0, tid=0, engine=0, what=what, number=4, value=value)
    w.add("heat", ts=at - STEP, pid=0, tid=0, engine=0, what=ZONE, number=0, value=41500)
    for step in range(steps):
        late = step >= steps // 2
        if step == steps // 2:
            w.add("heat", ts=at, engine=0, what=MOST_KHZ, number=4, value=1900800)
            w.add("heat", ts=at, engine=0, what=KHZ, n=4, number=[4, 5, 6, 7], value=1900800)
            w.add("heat", ts=at, engine=0, what=COOLING, number=UNNUMBERED, value=2, name=b"gpu")
            w.add("heat", ts=at, engine=0, what=COOLING, number=UNNUMBERED, value=2, name=b"twin")
        w.add("token_begin", ts=at, seq=step, phase=2, n_tokens=1, position=step)
        at += SLOW if late else STEP
        w.add("token_end", ts=at - 1, seq=step)
    return w


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Recording(warmed().write(tmp_path_factory.mktemp("warm"), **MANIFEST))


def test_the_table_holds_each_value_from_when_it_changed(warm: Recording) -> None:
    table = build_tables(warm)["clocks"]
    late = table[table["ts_ns"] >= 1_000_000_000]
    assert late[["what", "number", "name", "value"]].to_numpy().tolist() == [
        ["greatest frequency", 4, "CPUs 4-7", 1900.8],
        ["frequency", 4, "CPUs 4-7", 1900.8],
        ["cooling", 5, "gpu", 2.0],
    ]
    assert table.set_index("what")["most"].to_dict() == {
        "frequency": 2800.0,
        "least frequency": 2800.0,
        "greatest frequency": 2800.0,
        "temperature": 85.0,
        "cooling": 4.0,
    }
    assert table.loc[table["what"] == "temperature", ["name", "value"]].to_numpy().tolist() == [["cpu-0", 41.5]]


def test_caps_are_told_with_their_share_of_decode_and_what_they_cost(warm: Recording, golden: Golden) -> None:
    tables = build_tables(warm)
    capped = next(f for f in findings(tables) if f.rule == "throttled")
    said = summarize(warm, tables)["clocks"]
    golden("summary", "\n".join([*(cap["text"] for cap in said["caps"]), capped.text]))
    assert said["cooling"] == {"gpu": pytest.approx(0.6, abs=0.01)}
    assert capped.saving_ms == pytest.approx(0.5 * STEPS / 2, rel=0.01)
    assert clocks.mean_frequencies(tables)["CPUs 4-7"] == pytest.approx(0.4 * 2800 + 0.6 * 1900.8, rel=0.01)


def test_nothing_is_said_where_nothing_was_capped(tmp_path: Path) -> None:
    w = Writer()
    w.add("heat", ts=500, engine=0, what=MOST_KHZ, number=4, value=2800000)
    for step in range(STEPS):
        w.add("token_begin", ts=1000 * step + 1000, seq=step, phase=2, n_tokens=1)
        w.add("token_end", ts=1000 * step + 1900, seq=step)
    recording = Recording(w.write(tmp_path / "r", **MANIFEST))
    tables = build_tables(recording)
    assert summarize(recording, tables)["clocks"] == {} and not any(f.rule == "throttled" for f in findings(tables))
    recording = Recording(Writer().write(tmp_path / "none"))
    assert len(build_tables(recording)["clocks"]) == 0 and summarize(recording, build_tables(recording))["clocks"] == {}


@pytest.mark.parametrize(
    "damaged",
    [{"policies": 3}, {"policies": [4, {"number": "x"}, {"number": 0, "cpus": 3}]}, {"zones": [{"number": 0, "trips": [5]}]}],
)
def test_a_damaged_description_costs_names_alone(damaged: dict, tmp_path: Path) -> None:
    table = build_tables(Recording(warmed().write(tmp_path, heat=damaged)))["clocks"]
    assert {"CPU 4", "CPU 7"} <= set(table["name"])


def test_cpus_of_one_kind_have_the_same_highest_clock_and_capacity(tmp_path: Path) -> None:
    policies = [
        {"number": number, "cpus": cpus, "most": most, "capacity": capacity}
        for number, cpus, most, capacity in (
            (0, [0, 1], 1800000, 400),
            (2, [2, 3], 2400000, 1024),
            (4, [4, 5], 2400000, 1024),
            (6, [6, "x", -1, 1 << 70], 2400000, 800),
        )
    ]
    table = build_tables(Recording(Writer().write(tmp_path / "r", heat={"policies": [*policies, policies[0]]})))["cpus"]
    kinds = dict(zip(table["cpu"], table["kind"], strict=True))
    assert kinds == {0: "CPUs 0-1", 1: "CPUs 0-1", **dict.fromkeys(range(2, 6), "CPUs 2-5"), 6: "CPU 6"}
    assert table["policy"].to_list() == [0, 0, 2, 2, 4, 4, 6] and table["capacity"].to_list()[-1] == 800


def change(sysfs: Path, until: Path) -> None:
    """The cluster is capped as soon as the recording's folder is there and its first reading must have been made."""
    while not (until / "manifest.json").exists():
        time.sleep(0.02)
    time.sleep(0.5)
    write(sysfs, {f"{POLICIES}4/scaling_max_freq": 1900800, f"{POLICIES}4/scaling_cur_freq": 1900800})
    write(sysfs, {f"{DEVICES}3/cur_state": 4})


def recorded(sysfs: Path, folder: Path, *recorder: str) -> RawRecording:
    """A recording of 60 steps in 3 s, with the folder as this machine's sysfs, which changes meanwhile."""
    changing = threading.Thread(target=change, args=(sysfs, folder))
    changing.start()
    words = ["unshare", "--mount", "sh", "-c", f'{IN_PLACE} && exec "$@"', "sh", *recorder]
    steps = [sys.executable, str(ROOT / "workloads" / "programs" / "steps.py"), "60", "0.05"]
    done = subprocess.run(
        [*words, "--", *steps],
        env={**os.environ, "FAKE": str(sysfs)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    changing.join()
    return RawRecording(folder)


DESCRIBED = {
    "policies": [
        {"number": 0, "cpus": [0, 1, 2, 3], "governor": "schedutil", "least": 300000, "most": 2000000, "capacity": ANY},
        {"number": 4, "cpus": [4, 5, 6, 7], "governor": "performance", "least": 300000, "most": 2800000, "capacity": ANY},
    ],
    "zones": [{"number": 0, "type": "cpu-0", "trips": [["passive", 85000], ["critical", 110000]]}],
    "cooling": [{"number": 3, "type": "cpufreq-cpu4", "most": 9}],
}


@pytest.mark.needs("probes", "recorder")
@pytest.mark.skipif(not all(Path("/sys", place).is_dir() for place in MOUNTED), reason="this kernel has no such folders")
@pytest.mark.parametrize("recorder", rest_long(["planned", "plan"], "plan"))
def test_readings_are_those_of_a_sysfs_that_changes(recorder: str, sysfs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if recorder == "planned":
        words = [sys.executable, "-m", "tracer", "run", "--levels", "token", "-o", str(folder)]
    else:
        plan = tmp_path / "plan.json"
        probes = ROOT / "runtime" / "telemetry" / "_probes.so"
        made = ["plan", "-o", str(plan), "--libraries", str(probes), "--levels", "token", "--", sys.executable]
        subprocess.run([sys.executable, "-m", "tracer", *made], cwd=ROOT, capture_output=True, check=True)
        words = [str(RECORDER), "--plan", str(plan), "-o", str(folder)]
    run = recorded(sysfs, folder, *words)
    assert run.manifest["heat"] == DESCRIBED and run.manifest["machine"]["governor"] == "schedutil, performance"
    rows = run.records("heat")
    values = [tuple(row) for row in rows[["what", "number", "value"]].tolist()]
    first, later = values[:8], sorted(values[8:])
    assert first == [
        *((KHZ, 0, 1500000), (LEAST_KHZ, 0, 300000), (MOST_KHZ, 0, 2000000)),
        *((KHZ, 4, 2800000), (LEAST_KHZ, 4, 300000), (MOST_KHZ, 4, 2800000)),
        *((ZONE, 0, 41000), (COOLING, 3, 0)),
    ]
    assert later == [(KHZ, 4, 1900800), (MOST_KHZ, 4, 1900800), (COOLING, 3, 4)]
    assert run.manifest["records"]["heat"] == len(rows) and len(run.records("token_begin")) == 60
    standing = {row["symbol"] for row in run.manifest["probes"] if row["level"] == "heat"}
    assert standing == {
        f"{category}:{name}" for name, level, category in KERNEL_PROBES if level == "heat" and has_tracepoint(category, name)
    }
    caps = summarize(Recording(folder), build_tables(Recording(folder)))["clocks"]["caps"]
    assert [(cap["name"], cap["mhz"]) for cap in caps] == [("CPUs 4-7", 1900.8)]
