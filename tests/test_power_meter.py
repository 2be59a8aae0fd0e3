"""An external power meter: its file is joined with a recording by the pattern of load that was played."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from analyzer.commands.import_files import prepare_parser, run
from analyzer.tables.meter import join_meter, read_meter
from analyzer.tables.store import load_tables
from tests.conftest import ROOT
from tracer.recording.format import Recording, RecordingError
from workloads.recordings import Writer

CHIP_S, ZERO_S, S = 0.08, 1000.0, 1_000_000_000
CHIPS = "100000100001100010100111101000111001001011011101100110101011111"
PATTERN = {"pattern": {"begin_ns": int(ZERO_S * S), "chip_ns": int(CHIP_S * S), "chips": CHIPS}, "sources": [], "rails": []}


def samples(seed: int, hz: float = 100.0, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray, float]:
    """(times by the meter's clock, watts, its offset): 3 W at rest, 6 W in the pattern's load, and 5 W of a program later."""
    rng = np.random.default_rng(seed)
    offset = float(rng.uniform(-5000, 5000))
    ends = np.arange(ZERO_S - 4, ZERO_S + 30, 1 / hz) + rng.uniform(0, 1 / hz)
    edges = np.append(np.arange(len(CHIPS) + 1) * CHIP_S + ZERO_S, [ZERO_S + 8, ZERO_S + 25, ZERO_S + 40])
    watts = np.append([6.0 if chip == "1" else 3.0 for chip in CHIPS], [3.0, 5.0, 3.0])
    total = np.append(0, np.cumsum(watts * np.diff(edges)))
    used = np.interp(ends, edges, total) + 3.0 * np.minimum(ends - ZERO_S, 0)
    seen = np.diff(used) * hz + rng.normal(size=len(ends) - 1) * noise
    return ends[1:] + offset, seen, offset


def written(folder: Path, times: np.ndarray, watts: np.ndarray, head: str = "time (s),power (W)", scale: float = 1.0) -> Path:
    path = folder / "meter.csv"
    path.write_text(head + "\n" + "\n".join(f"{t:.6f},{w * scale:.4f}" for t, w in zip(times, watts, strict=True)))
    return path


@pytest.mark.parametrize("seed", range(5))
def test_the_offset_of_a_meters_clock_is_found_within_five_milliseconds(seed: int, tmp_path: Path) -> None:
    times, watts, offset = samples(seed)
    path = written(
        tmp_path, times, watts, "Timestamp,Power(mW)" if seed % 2 else "time (s),power (W)", 1000.0 if seed % 2 else 1.0
    )
    joined = join_meter(read_meter(path, path.read_text()), {"power": PATTERN}, path)
    assert joined.zero_ns == pytest.approx(-offset * S, abs=5e6) and joined.on_watts - joined.off_watts == pytest.approx(
        3.0, rel=0.05
    )


def test_a_meters_file_of_another_run_is_refused(tmp_path: Path) -> None:
    rng, (times, watts, _) = np.random.default_rng(7), samples(1)
    wrong = {
        "noise": (times, rng.normal(5, 1, len(times))),
        "square wave": (times, 3 + 3 * (np.floor(times / CHIP_S) % 2)),
        "after the pattern": (times[times > times[0] + 12], watts[times > times[0] + 12]),
        "too slow": (times[::10], watts[::10]),
        "backwards": (times[::-1], watts[::-1]),
        "short": (times[:100], watts[:100]),
    }
    for name, (t, w) in wrong.items():
        path = written(tmp_path, t, w)
        with pytest.raises(RecordingError):
            join_meter(read_meter(path, path.read_text()), {"power": PATTERN}, path)
            pytest.fail(name)
    path = written(tmp_path, times, watts)
    with pytest.raises(RecordingError):
        join_meter(read_meter(path, path.read_text()), {"power": None}, path)


def test_an_imported_meter_is_a_rail_of_the_recording(tmp_path: Path) -> None:
    import argparse

    times, watts, _ = samples(3, noise=0.05)
    folder, w = tmp_path / "run", Writer()
    for number in range(100):
        begin = int((ZERO_S + 8 + number * 0.17) * S)
        w.add("token_begin", ts=begin, seq=number, phase=2, n_tokens=1, position=number)
        w.add("token_end", ts=begin + 160_000_000, seq=number)
    w.write(folder, power=PATTERN)
    assert len(load_tables(folder)["rails"]) == 0
    parser = argparse.ArgumentParser()
    prepare_parser(parser)
    parser.set_defaults(form="import")
    assert run(parser.parse_args([str(written(tmp_path, times, watts)), "--onto", str(folder), "--json"])) == 0
    tables = load_tables(folder)
    power = tables["power"]
    inside = power[(power["begin_ns"] > (ZERO_S + 9) * S) & (power["end_ns"] < (ZERO_S + 24) * S)]
    assert tables["rails"]["scope"].to_list() == ["device"] and inside["watts"].mean() == pytest.approx(5.0, rel=0.01)
    resting = power[(power["begin_ns"] > (ZERO_S + 26) * S)]
    assert resting["watts"].mean() == pytest.approx(3.0, rel=0.01)


def meter_of_recorder(folder: Path, path: Path, offset: float, ended: threading.Event) -> None:
    """Write 100 samples a second of a power that follows the recorder's CPU time."""
    lines = ["time (s),power (W)"]
    while not (folder / "manifest.json").exists():
        time.sleep(0.005)
    clock = (~json.loads((folder / "manifest.json").read_text())["tracer_pid"] << 3) | 2
    last, used = time.monotonic(), time.clock_gettime(clock)
    while not ended.is_set():
        time.sleep(0.01)
        try:
            now, cpu = time.monotonic(), time.clock_gettime(clock)
        except OSError:
            break
        lines.append(f"{now + offset:.6f},{2 + 4 * (cpu - used) / (now - last):.5f}")
        last, used = now, cpu
    path.write_text("\n".join(lines))


@pytest.mark.needs("probes", "recorder")
def test_the_recorder_plays_the_pattern_that_a_meter_sees(tmp_path: Path) -> None:
    folder, path, ended, offset = tmp_path / "run", tmp_path / "seen.csv", threading.Event(), 4321.0
    meter = threading.Thread(target=meter_of_recorder, args=(folder, path, offset, ended))
    meter.start()
    steps = [sys.executable, str(ROOT / "workloads" / "programs" / "steps.py"), "10", "0.05"]
    words = [sys.executable, "-m", "tracer", "run", "--meter", "--levels", "token", "--no-views", "-o", str(folder), "--", *steps]
    try:
        subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    finally:
        ended.set()
        meter.join()
    recording = Recording(folder)
    assert recording.manifest["power"]["pattern"]["chips"] == CHIPS
    joined = join_meter(read_meter(path, path.read_text()), recording.manifest, path)
    assert joined.zero_ns == pytest.approx(-offset * S, abs=5e6) and joined.on_watts > joined.off_watts
