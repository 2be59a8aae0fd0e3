"""A folder that poses as sysfs with power sensors, served by power_sensors.c while a program runs and is recorded."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass
class PowerTree:
    """Sensors below `folder`/sys."""

    folder: Path
    sensors: tuple[str, ...] = (COUNTER, POWER, CURRENT)
    static: dict[str, object] = field(default_factory=dict)

    def record(self, *options: str, steps: tuple[object, ...] = (3, 0.7, 60, 0.011, 0.006)) -> Path:
        """Record powered_steps.py with these arguments; returns the recording's folder."""
        root, recording = self.folder / "sys", self.folder / "recording"
        for name, value in {**STATIC, **self.static}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{value}\n")
        program = compile_c(self.folder / "power_sensors", "power_sensors.c", flags=("-lm",))
        pid_file, log, end = (self.folder / name for name in ("pid", "log", "end"))
        words = [str(program), str(IDLE_W), str(CPU_W), str(pid_file), str(end), *(f"{root}/{each}" for each in self.sensors)]
        served = subprocess.Popen(words)
        target = [sys.executable, str(PROGRAMS / "powered_steps.py"), str(pid_file), str(log), *map(str, steps)]
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

    def joules_per_token(self) -> dict[str, float]:
        """The truth, from the program's own CPU times."""
        rows = [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]
        answer = {}
        for number, phase in PHASES.items():
            mine = [row for row in rows if row["phase"] == number]
            wall, cpu = (sum(row["end"][i] - row["begin"][i] for row in mine) * 1e-9 for i in (0, 1))
            answer[phase] = (IDLE_W * wall + CPU_W * cpu) / sum(row["tokens"] for row in mine)
        return answer
