"""What the recorder finds on this machine: the kernel's features, the programs that it refuses, and what a probe's hit costs."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracer.errors import RequirementError
from tracer.probes.denials import certain_denials
from tracer.recording.paths import RECORDER
from tracer.sensors import power_sources


def recorder_path() -> Path:
    """The recorder for this machine. Raises RequirementError if it was not built."""
    if not RECORDER.exists():
        raise RequirementError(f"{RECORDER.name} has not been built: run `make build`, or install a wheel, which contains it")
    return RECORDER


def features() -> dict[str, Any]:
    """Feature → whether this kernel has it, and the machine's architecture. Raises RequirementError if it cannot be tried."""
    return recorder_output("--probe-features")


@dataclass(frozen=True)
class Trial:
    """All programs given to the kernel; costs in ns per hit by kind of instruction, `cold_KIND` with cold caches."""

    programs: int
    refused: dict[str, str]
    costs: dict[str, float]


def try_programs(btf: Path | None = None) -> Trial:
    """Load all programs and measure. Raises RequirementError with the reason if nothing can be loaded."""
    if reasons := list(certain_denials()):
        raise RequirementError("; ".join(reasons))
    return Trial(**recorder_output(*(("--btf", str(btf)) if btf else ()), "--try-programs"))


def try_power(below: str = "") -> dict[str, Any]:
    """The power sensors that this machine has, read for a second; `below`: instead of /sys."""
    return recorder_output(*(("--sysfs", below) if below else ()), "--try-power", given=json.dumps(power_sources()))


def recorder_output(*options: str, given: str = "") -> dict[str, Any]:
    """What the recorder prints; `given`: its standard input."""
    done = subprocess.run([str(recorder_path()), *options], capture_output=True, text=True, input=given, check=False)
    if done.returncode:
        last = (done.stderr.splitlines() or [f"status {done.returncode}"])[-1]
        raise RequirementError(last.removeprefix("moescope: "))
    return dict(json.loads(done.stdout))
