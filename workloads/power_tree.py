"""A folder that poses as sysfs with power sensors, served by power_sensors.c while a program runs and is recorded."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workloads import PROGRAMS, ROOT
from workloads.compiling import compile_c

IDLE_W, CPU_W, RANGE_UJ = 2.0, 6.0, 15_000_000
POWERCAP, HWMON, BATTERY = "class/powercap/intel-rapl:0", "class/hwmon/hwmon2", "class/power_supply/battery"
STATIC = {
    f"{POWERCAP}/name": "package-0",
    f"{POWERCAP}/max_energy_range_uj": RANGE_UJ,
    f"{HWMON}/name": "ina226",
    f"{BATTERY}/type": "Battery",
    f"{BATTERY}/status": "Discharging",
    f"{BATTERY}/voltage_now": 4_000_000,
}
COUNTER = f"{POWERCAP}/energy_uj,energy,1000,1e-6,{RANGE_UJ},0,0"
POWER = f"{HWMON}/power1_input,power,70,1e-6,0,0,0.1"
CURRENT = f"{BATTERY}/current_now,power,4,4e-6,0,0.1,0.02"
PHASES = {1: "prefill", 2: "decode"}
POLICY, ZONE, COOLING = "devices/system/cpu/cpufreq/policy0", "class/thermal/thermal_zone0", "class/thermal/cooling_device0"
MOST_KHZ = 2_800_000
WARM_FILES = {
    f"{POLICY}/related_cpus": "0 1",
    f"{POLICY}/scaling_governor": "schedutil",
    f"{POLICY}/cpuinfo_min_freq": 300_000,
    f"{POLICY}/cpuinfo_max_freq": MOST_KHZ,
    f"{POLICY}/scaling_min_freq": 300_000,
    f"{POLICY}/scaling_max_freq": MOST_KHZ,
    f"{POLICY}/scaling_cur_freq": MOST_KHZ,
    f"{ZONE}/type": "cpu-0",
    f"{ZONE}/temp": 30_000,
    f"{ZONE}/trip_point_0_type": "passive",
    f"{COOLING}/type": "cpufreq-cpu0",
    f"{COOLING}/max_state": 2,
    f"{COOLING}/cur_state": 0,
}


@dataclass(frozen=True)
class Warmth:
    """A thermal mass: its time constant, what a watt warms it by in the end, and where it limits the clock."""

    tau_s: float = 2.0
    degrees_per_w: float = 8.0
    limit: float = 75.0
    hidden: bool = False
    """The clock falls, and no limit of the policy or cooling device says why."""

    def words(self, folder: Path) -> list[str]:
        """The argument of power_sensors."""
        law = f"{self.tau_s},{self.degrees_per_w},{self.limit},{int(self.hidden)}"
        return [f"heat:{folder}/sys,{folder}/clock_log,{law}"]


@dataclass
class PowerTree:
    """Sensors below `folder`/sys; with `warmth` also clocks and heat, which slow the program down."""

    folder: Path
    sensors: tuple[str, ...] = (COUNTER, POWER, CURRENT)
    static: dict[str, object] = field(default_factory=dict)
    warmth: Warmth | None = None

    def record(self, *options: str, steps: tuple[object, ...] = (3, 0.7, 60, 0.011, 0.006)) -> Path:
        """Record powered_steps.py with these arguments; returns the recording's folder."""
        root, recording = self.folder / "sys", self.folder / "recording"
        warm = {**WARM_FILES, f"{ZONE}/trip_point_0_temp": int(self.warmth.limit * 1000)} if self.warmth else {}
        for name, value in {**STATIC, **warm, **self.static}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{value}\n")
        program = compile_c(self.folder / "power_sensors", "power_sensors.c", flags=("-lm",))
        pid_file, log, end = (self.folder / name for name in ("pid", "log", "end"))
        words = [str(program), str(IDLE_W), str(CPU_W), str(pid_file), str(end)]
        words += [*(self.warmth.words(self.folder) if self.warmth else []), *(f"{root}/{each}" for each in self.sensors)]
        served = subprocess.Popen(words)
        target = [sys.executable, str(PROGRAMS / "powered_steps.py"), str(pid_file), str(log), *map(str, steps)]
        target += [str(root / POLICY / "scaling_cur_freq")] * bool(self.warmth)
        run = [sys.executable, "-m", "tracer", "run", "--sysfs", str(root), "--levels", "token,sched", "--no-views", *options]
        try:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run(
                [*run, "-o", str(recording), "--", *target], cwd=ROOT, env=environment, check=True, capture_output=True
            )
        finally:
            end.touch()
            served.wait()
        return recording

    def clock_changes(self) -> list[tuple[int, int, float]]:
        """(monotonic ns, kHz, °C) of each change of the clock, the first at its begin."""
        rows = (line.split() for line in (self.folder / "clock_log").read_text().splitlines())
        return [(int(ns), int(khz), int(milli) / 1e3) for ns, khz, milli in rows]

    def step_log(self) -> list[dict[str, Any]]:
        """The program's own times of its steps."""
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]

    def joules_per_token(self) -> dict[str, float]:
        """The truth, from the program's own CPU times."""
        rows, answer = self.step_log(), {}
        for number, phase in PHASES.items():
            mine = [row for row in rows if row["phase"] == number]
            wall, cpu = (sum(row["end"][i] - row["begin"][i] for row in mine) * 1e-9 for i in (0, 1))
            answer[phase] = (IDLE_W * wall + CPU_W * cpu) / sum(row["tokens"] for row in mine)
        return answer
