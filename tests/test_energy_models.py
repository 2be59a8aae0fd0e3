"""What power depends on, energy by operator, speed against energy, predicted energy, and its export: known laws are the truth."""

import contextlib
import json
import subprocess
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyzer.compare.history import add_runs
from analyzer.compare.metrics import DEFAULTS, METRICS, metric_keys
from analyzer.compare.results import Result
from analyzer.compare.settings import named_settings
from analyzer.errors import PredictError
from analyzer.predict import devices
from analyzer.predict.energy import StepWatts, predicted_energy
from analyzer.predict.machine import to_toml
from analyzer.predict.machine_power import measure_watts
from analyzer.predict.prediction import predict_step
from analyzer.predict.setup import Setup
from analyzer.predict.simulator import Settings, simulate_trace
from analyzer.questions import energy
from analyzer.questions.energy_split import operator_energy
from analyzer.questions.pareto import on_front
from analyzer.tables.store import load_tables
from moescope.__main__ import main
from tests.conftest import LONG
from tests.test_energy import of_source
from tests.test_predict_roofline import config
from tests.test_predict_simulator import EVEN, SIZE, random_trace
from tracer.kernel.definitions import enum_values
from workloads.compiling import compile_c
from workloads.drawn_power import drawn_run, fitted, fitted_joules, thinned
from workloads.power_tree import COUNTER, POWERCAP, RANGE_UJ
from workloads.recordings import MAIN, Writer

S, MS = 1_000_000_000, 1_000_000
IDLE_W, LITTLE_W, BIG_W, POWER = 1.5, 1.6, 6.0, 2
REQUESTS, DECODES, PROMPT = 12, 40, 32
POLICIES = [
    {"number": 0, "cpus": [0, 1, 2, 3], "governor": "schedutil", "least": 300_000, "most": 1_800_000, "capacity": 400},
    {"number": 4, "cpus": [4, 5, 6, 7], "governor": "schedutil", "least": 300_000, "most": 2_800_000, "capacity": 1024},
]
ATTENTION, EXPERTS = 0, 2
NAMES, KINDS = {1: "prefill", 2: "decode"}, {0: "CPUs 0-3", 4: "CPUs 4-7"}


class Phone:
    """Writes a phone's recording: steps on little or big CPUs whose clocks change, and a counter that follows a law."""

    def __init__(self) -> None:
        self.w, self.rng, self.at, self.seq = Writer(), np.random.default_rng(3), S, 0
        self.busy: list[tuple[int, int, float, str, str, str]] = []
        self.decodes: list[tuple[int, int]] = []
        self.clocks = {0: (np.empty(0), np.empty(0)), 4: (np.empty(0), np.empty(0))}

    def write(self, folder: Path) -> Path:
        for policy, most in ((0, 1_800_000), (4, 2_800_000)):
            khz = self.rng.uniform(0.4, 1, 60) * most // 1
            ts = np.arange(60) * 400 * MS
            self.clocks[policy] = ts, khz / most
            self.w.add(
                "heat", n=60, ts=ts, engine=0, what=enum_values("heat_of")["HEAT_KHZ"], number=policy, value=khz.astype(int)
            )
        for _ in range(REQUESTS):
            self.step(1, 0, PROMPT, 300 * MS, 0)
            for number in range(DECODES):
                self.step(2, PROMPT + number, 1, 9 * MS, 9 * MS)
            self.at += int(self.rng.uniform(50, 300)) * MS
        edges = np.arange(0, self.at + S // 2, 100 * MS)
        other = np.cumsum(self.rng.normal(0, 0.02, len(edges))) * 0.1
        value = ((self.joules(edges) + other) * 1e6).astype(int)
        self.w.add("power", n=len(edges), ts=edges, after=edges, engine=0, value=value)
        power = of_source("powercap") | {"floor_ns": [0, S]}
        levels = ["token", "operator", "sched"]
        return self.w.write(folder, power=power, heat={"policies": POLICIES}, levels=levels, duration_ns=self.at)

    def step(self, phase: int, position: int, tokens: int, busy_ns: int, sleep_ns: int) -> None:
        """Two thirds of the computing are attention, the rest experts."""
        w, begin, cpu = self.w, self.at, int(self.rng.choice([1, 5]))
        w.add("token_begin", ts=begin, seq=self.seq, phase=phase, n_tokens=tokens, position=position)
        w.add("sched_switch", ts=begin, tid=0, pid=0, cpu=cpu, prev_tid=0, next_tid=MAIN)
        for kind, since, until in ((ATTENTION, 0, 2), (EXPERTS, 2, 3)):
            w.add("op_begin", ts=begin + busy_ns * since // 3, tensor=kind + 1, type=kind, layer=0, n_tokens=tokens)
            w.add("op_end", ts=begin + busy_ns * until // 3, tensor=kind + 1)
        w.add("sched_switch", ts=begin + busy_ns, cpu=cpu, prev_tid=MAIN, next_tid=0, prev_state=1)
        self.at += busy_ns + sleep_ns
        w.add("token_end", ts=self.at, seq=self.seq)
        policy = cpu // 4 * 4
        ts, share = self.clocks[policy]
        watts = (BIG_W if policy else LITTLE_W) * share**POWER
        split = begin + busy_ns * 2 // 3
        cuts = np.unique(np.clip(np.append(ts, [begin, split, begin + busy_ns]), begin, begin + busy_ns))
        for low, high in pairwise(cuts.tolist()):
            drawn = float(watts[np.searchsorted(ts, low, "right") - 1])
            self.busy.append((low, high, drawn, NAMES[phase], KINDS[policy], "attention" if low < split else "experts"))
        self.decodes += [(begin, self.at)] if phase == 2 else []
        self.seq += 1
        self.at += 100_000

    def joules(self, ts: np.ndarray) -> np.ndarray:
        """The law: idle power, and that of the busy CPU."""
        spent = np.zeros(len(ts))
        for begin, end, watts, *_ in self.busy:
            spent += watts * np.clip(ts - begin, 0, end - begin) / S
        return IDLE_W * ts / S + spent

    def busy_joules(self, *names: str) -> tuple[float, float]:
        """(joules above idle power, seconds) of the busy CPU in a phase, on a kind of CPU or in an operator."""
        mine = [((end - begin) / S, watts) for begin, end, watts, *of in self.busy if set(names) <= set(of)]
        return sum(s * watts for s, watts in mine), sum(s for s, _ in mine)

    def truth(self, phase: str) -> float:
        """Joules of a phase's steps."""
        return IDLE_W * REQUESTS * (0.3 if phase == "prefill" else DECODES * 0.018) + self.busy_joules(phase)[0]


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Phone, Path]:
    made = Phone()
    return made, made.write(tmp_path_factory.mktemp("phone") / "run")


def test_kinds_of_cpus_and_their_clocks_are_found_where_power_depends_on_them(phone: tuple[Phone, Path], capsys) -> None:
    made, run = phone
    assert main(["summary", str(run), "--json"]) == 0
    rail = json.loads(capsys.readouterr().out)["energy"]["rails"][0]
    assert rail["model"]["clock_power"] == pytest.approx(POWER, abs=0.3)
    assert min(rail["model"]["clock_weight"], rail["model"]["kinds_weight"]) > 0.9
    for phase, figures in rail["phases"].items():
        assert figures["joules"] == pytest.approx(made.truth(phase), rel=0.02)
    watts = {(term["phase"], term["where"]): term["watts"] for term in rail["model"]["terms"]}
    assert set(watts) == {(phase, kind) for phase in ("prefill", "decode") for kind in ("CPUs 0-3", "CPUs 4-7")}
    for (phase, kind), found in watts.items():
        joules, seconds = made.busy_joules(phase, kind)
        assert found == pytest.approx(joules / seconds, rel=0.1)


def test_a_curve_says_which_rails_its_windows_are_too_short_for(phone: tuple[Phone, Path], capsys) -> None:
    run = phone[1]
    assert main(["time", str(run), "--over-time", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    longest = max(row["end_s"] - row["begin_s"] for row in answer["windows"])
    known = [row["watts"] is not None for row in answer["windows"]]
    assert any(known) == (longest >= 0.5) != bool(answer["rails_without"])  # five readings, ten times a second
    assert main(["time", str(run), "--over-time"]) == 0 and ("no watts of" in capsys.readouterr().out) == (not any(known))


def test_energy_by_operator_adds_up_and_follows_cpu_time(phone: tuple[Phone, Path], capsys) -> None:
    made, run = phone
    tables = load_tables(run)
    rows, phases = operator_energy(tables), energy.phase_energy(tables).set_index("phase")["joules"]
    for phase, some in rows.groupby("phase"):
        assert some["joules"].sum() == pytest.approx(phases[phase]) and some["share"].sum() == pytest.approx(1)
        mine = some[some["operator"] != ""].set_index("operator")
        for name, row in mine.iterrows():
            joules, seconds = made.busy_joules(str(phase), str(name))
            assert row["joules"] == pytest.approx(joules + IDLE_W * seconds, rel=0.03)
            assert row["cpu_seconds"] == pytest.approx(seconds, rel=1e-6)
        assert 0 < some["residual"].iloc[0] < 0.1
    asleep = rows[(rows["phase"] == "decode") & (rows["operator"] == "")]
    assert asleep["joules"].sum() == pytest.approx(IDLE_W * REQUESTS * DECODES * 0.009, rel=0.1)
    assert main(["query", str(run), "select * from operator_energy", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(rows)
    assert main(["summary", str(run)]) == 0 and "a model that leaves" in " ".join(capsys.readouterr().out.split())


def test_the_export_has_the_fields_that_others_ask_for_and_they_agree(phone: tuple[Phone, Path], tmp_path: Path) -> None:
    made, run = phone
    assert main(["write", str(run), "--only", "energy", "--out", str(tmp_path / "energy.json")]) == 0
    (rail,) = json.loads((tmp_path / "energy.json").read_text())["rails"]
    phases = rail["prefill_energy_joules"] + rail["generation_energy_joules"]
    assert phases <= rail["total_energy_joules"] * 1.01
    per_token = rail["energy_per_token_joules"]
    assert per_token["mean"] == pytest.approx(rail["generation_energy_joules"] / rail["output_token_count"])
    begin, end = np.array(made.decodes).reshape(REQUESTS, DECODES, 2)[:, [0, -1], [0, 1]].T
    spread = (made.joules(end) - made.joules(begin)) / DECODES
    assert per_token["std"] == pytest.approx(np.std(spread, ddof=1), rel=0.2) and rail["requests_of_std"] == REQUESTS
    assert rail["static_power_baseline_watts"] == pytest.approx(IDLE_W, rel=0.01)
    assert rail["measurement_method"] == "rapl" and rail["sampling_rate_hz"] == pytest.approx(10)
    assert (rail["input_sequence_length"], rail["batch_size"], rail["thermal_stabilization_seconds"]) == (PROMPT, 1, None)
    watts = rail["average_power_watts"]
    assert rail["output_tokens_per_second_per_watt"] == pytest.approx(rail["output_token_count"] / rail["total_energy_joules"])
    assert IDLE_W < watts < rail["inference_active_power_watts"]["peak"]


@pytest.mark.long
def test_intervals_hold_the_truth_of_laws_with_kinds_of_cpus_and_clocks() -> None:
    runs = [drawn_run(seed, 10.0, kinds=True) for seed in range(300 if LONG else 16)]
    figures = [(run.joules[phase], *fitted_joules(run)[phase]) for run in runs for phase in run.joules]
    told = [each for each in figures if np.isfinite(each[1])]
    assert len(told) > 0.8 * len(figures)
    assert np.quantile([abs(joules / truth - 1) for truth, joules, _, _ in told], 0.9) < 0.05
    assert np.mean([low <= truth <= high for truth, _, low, high in told]) >= (0.9 if LONG else 0.8)


@pytest.mark.long
def test_kinds_and_clocks_on_which_nothing_depends_are_not_believed() -> None:
    runs = [drawn_run(seed, 10.0, kinds=True, depends=False) for seed in range(100 if LONG else 8)]
    fits = [fitted(run.running, thinned(run.readings)) for run in runs]
    believed = [(fit.share(lambda one: one.by_kind) > 0.5, fit.share(lambda one: one.exponent > 0) > 0.5) for fit in fits if fit]
    assert np.mean(believed) <= 0.2
    figures = [(run.joules[phase], *fitted_joules(run)[phase]) for run in runs for phase in run.joules]
    assert np.mean([low <= truth <= high for truth, _, low, high in figures]) >= (0.9 if LONG else 0.75)


def measured_result(name: str, tokens_per_s: float, joules: float, command: str) -> Result:
    """A run's stored figures of speed and energy."""
    rows = [
        {"family": "speed", "metric": "decode speed", "unit": "tok/s", "value": tokens_per_s, "better": "higher"},
        {"family": "energy", "metric": "energy per token", "unit": "J", "value": joules, "phase": "decode", "type": "soc"},
    ]
    frame = pd.DataFrame([{**DEFAULTS, **row} for row in rows])[[column.name for column in METRICS]]
    frame.index = pd.Index(metric_keys(frame), name="key")
    return Result(name, frame, {"command": command})


def test_settings_that_none_beats_in_speed_and_energy_are_on_the_front(tmp_path: Path, capsys) -> None:
    url = str(tmp_path / "results")
    for setting, (speed, joules) in {"2 threads": (8, 0.5), "4 threads": (12, 0.6), "8 threads": (11, 0.9)}.items():
        runs = [measured_result(f"{setting}-{n}", speed * (1 + n / 100), joules + n / 100, "") for n in range(3)]
        add_runs(url, runs, setting, "board", recorded=1e9)
    assert main(["history", url, "--pareto", "--json", "--html", str(tmp_path / "pareto.html")]) == 0
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert {name: row["pareto"] for name, row in rows.items()} == {"2 threads": True, "4 threads": True, "8 threads": False}
    assert rows["4 threads"]["j_per_token"] == pytest.approx(0.61) and rows["4 threads"]["j_sd"] == pytest.approx(0.01)
    assert rows["2 threads"]["tokens_per_s"] == pytest.approx(8.08) and (tmp_path / "pareto.html").stat().st_size > 10_000
    assert main(["history", url, "--family", "energy", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)["builds"]
    assert {(row["build"], round(row["mean"], 6), round(row["sd"], 6)) for row in built} >= {("2 threads", 0.51, 0.01)}


def test_recordings_without_a_build_are_named_by_what_differs_in_their_commands() -> None:
    named = named_settings([measured_result("a", 1, 1, "bench -t 4 -m x"), measured_result("b", 1, 1, "bench -t 8 -m x")])
    assert [result.build for result in named] == ["4", "8"]


def test_no_choice_of_the_front_is_beaten() -> None:
    figures = [(1.0, 3.0), (2.0, 2.0), (2.0, 2.5), (3.0, 1.0), (3.0, 3.0), (1.0, 3.0)]
    assert on_front(figures) == [True, True, False, True, False, True]


def test_predicted_energy_is_time_at_the_profiles_watts() -> None:
    device, model = devices.load_device("rk3588"), config("qwen3-30B-A3B")
    setup = Setup("decode", 1, 512, unit="cpu")
    assert predicted_energy(predict_step(model, device, setup)) == {}

    def with_watts(compute: float, memory: float) -> devices.Device:
        cpu = replace(device.units["cpu"], watts={"compute": compute, "memory": memory})
        return replace(device, units={**device.units, "cpu": cpu}, idle_watts=2.0)

    step = predict_step(model, with_watts(5.0, 5.0), setup)
    busy = sum(part.seconds * part.times for part in step.parts)
    assert predicted_energy(step)["joules"] == pytest.approx(5 * busy + 2 * max(step.seconds - busy, 0), rel=1e-6)
    bound = {name: sum(p.seconds * p.times for p in step.parts if p.bound == name) for name in ("compute", "memory")}
    found = predicted_energy(predict_step(model, with_watts(9.0, 4.0), setup))
    assert found["joules"] == pytest.approx(
        9 * bound["compute"] + 4 * bound["memory"] + 2 * max(step.seconds - busy, 0), rel=1e-6
    )
    assert found["j_per_token"] == found["joules"]


def test_simulated_energy_is_idle_power_all_the_time_and_that_of_work_and_loads() -> None:
    outcome = simulate_trace(random_trace(5), EVEN, Settings(3 * SIZE))
    decode = outcome.durations("decode")
    plain = StepWatts(2.0, "", per_token={"decode": 0.5}).of_outcome(outcome)
    assert plain["decode"] == pytest.approx(2 * decode.mean() + 0.5) and plain["prefill"] is None
    steps = [number for number, step in enumerate(outcome.steps) if step[0] == "decode"]
    loads = sum(s.end - s.begin for s in outcome.spans if s.step in steps and s.kind in ("load", "prefetch"))
    work = sum(s.end - s.begin for s in outcome.spans if s.step in steps) - loads
    found = StepWatts(2.0, "", working={"decode": 3.0}, loading=1.0).of_outcome(outcome)
    assert loads > 0 and found["decode"] == pytest.approx((2 * decode.sum() + 3 * work + loads) / len(decode))


def test_measured_watts_make_a_profile_that_predicts_energy(tmp_path: Path) -> None:
    measured = {"fp32_per_s": 1e11, "memory_bytes_per_s": 1e10, "storage_bytes_per_s": 1e9, "memory_bytes": 8e9}
    watts: dict[str, float | str] = {"idle": 2.0, "compute": 9.0, "memory": 6.0, "storage": 3.0, "rail": 'a "rail" (powercap)'}
    (tmp_path / "here.toml").write_text(to_toml(measured, "here", watts))
    device = devices.load_device(str(tmp_path / "here.toml"))
    assert (
        device.units["cpu"].watts == {"compute": 9.0, "memory": 6.0} and device.idle_watts == 2.0 and device.storage_watts == 3.0
    )
    assert '"rail"' in device.power_source
    (tmp_path / "plain.toml").write_text(to_toml(measured, "here"))
    assert devices.load_device(str(tmp_path / "plain.toml")).idle_watts == 0


def name_the_loads(pid_file: Path) -> None:
    """Tell the stand-in's sensors which process computes, once it does."""
    for _ in range(600):
        time.sleep(0.05)
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = line.read_bytes().split(b"\0")
                if b"analyzer.predict.machine_power" in words and b"--" not in words:
                    pid_file.with_suffix(".new").write_text(line.parent.name)
                    pid_file.with_suffix(".new").rename(pid_file)
                    return


@pytest.mark.long
@pytest.mark.needs("probes", "recorder")
def test_a_machines_watts_are_measured_under_load(tmp_path: Path) -> None:
    counter = tmp_path / POWERCAP
    counter.mkdir(parents=True)
    (counter / "name").write_text("package-0\n")
    (counter / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    program = compile_c(tmp_path / "power_sensors", "power_sensors.c", flags=("-lm",))
    law = [str(IDLE_W), str(BIG_W), str(tmp_path / "pid"), str(tmp_path / "end"), f"{tmp_path}/{COUNTER}"]
    naming = threading.Thread(target=name_the_loads, args=(tmp_path / "pid",))
    naming.start()
    sensors = subprocess.Popen([str(program), *law])
    try:
        watts = measure_watts(sysfs=str(tmp_path))
    finally:
        (tmp_path / "end").touch()
        sensors.wait()
    naming.join()
    assert watts["idle"] == pytest.approx(IDLE_W, rel=0.1) and watts["storage"] > watts["idle"]
    assert min(watts["compute"], watts["memory"]) > watts["idle"] + 0.1 * BIG_W
    with pytest.raises(PredictError):
        measure_watts(sysfs=str(tmp_path / "nothing"))
