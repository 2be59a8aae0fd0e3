"""Waiting between runs until the machine is as cool as before the first one."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tracer.errors import TracerError
from tracer.recording.paths import Owner

BAND_C = 2.0
"""A zone that is at most so many °C above its first temperature has cooled down."""
PERIOD_S, TOLD_S = 0.5, 15.0
"""How often heat is read, and progress printed."""
ZONES, POLICIES = "class/thermal/thermal_zone*/temp", "devices/system/cpu/cpufreq/policy*/scaling_max_freq"
DEVICES = "class/thermal/cooling_device*/cur_state"


@dataclass(frozen=True)
class Heat:
    """A machine's heat by name: °C of each zone, the greatest kHz of each policy, and the state of each cooling device."""

    celsius: dict[str, float]
    most_khz: dict[str, float]
    cooling: dict[str, float]

    @classmethod
    def now(cls, root: Path, owner: Owner) -> "Heat":
        """What sysfs below `root` shows to the user."""
        with owner.acting():
            zones, policies, devices = (dict(numbers(root, pattern)) for pattern in (ZONES, POLICIES, DEVICES))
        return cls({name: value / 1e3 for name, value in zones.items()}, policies, devices)

    def above(self, first: "Heat") -> list[str]:
        """What is hotter or more limited than at first, in words."""
        hot = [
            f"{name} at {value:.1f} °C ({first.celsius[name]:.1f} at first)"
            for name, value in self.celsius.items()
            if value > first.celsius.get(name, value) + BAND_C
        ]
        capped = [
            f"{name} capped to {khz / 1e6:.1f} GHz" for name, khz in self.most_khz.items() if khz < first.most_khz.get(name, khz)
        ]
        active = [
            f"{name} in state {state:.0f}" for name, state in self.cooling.items() if state > first.cooling.get(name, state)
        ]
        return [*hot, *capped, *active]


def numbers(root: Path, pattern: str) -> Iterator[tuple[str, float]]:
    """(name of its folder, number) of each file that holds one; a zone of a part that sleeps cannot be read."""
    for path in sorted(root.glob(pattern)):
        try:
            yield path.parent.name, float(path.read_text())
        except (OSError, ValueError):
            continue


@dataclass(frozen=True)
class Cooling:
    """What the machine was before the first run, where that is read, and how long to wait for it again."""

    first: Heat
    root: Path
    owner: Owner
    longest_s: float

    @classmethod
    def begun(cls, root: Path, owner: Owner, longest_s: float) -> "Cooling":
        """From this moment on; raises TracerError if no thermal zone can be read."""
        first = Heat.now(root, owner)
        if not first.celsius:
            raise TracerError(f"--cool needs a thermal zone, and none can be read below {root}: leave it out")
        return cls(first, root, owner, longest_s)

    def wait(self, report: Callable[[str], None]) -> float:
        """Wait until it is so again, at most `longest_s`; returns the seconds."""
        began, told = time.monotonic(), -TOLD_S
        while (above := Heat.now(self.root, self.owner).above(self.first)) and time.monotonic() - began < self.longest_s:
            if time.monotonic() - began - told >= TOLD_S:
                told = time.monotonic() - began
                report(f"cooling down for {told:.0f} of at most {self.longest_s:.0f} s: {', '.join(above)}")
            time.sleep(min(PERIOD_S, self.longest_s))
        if above:
            report(f"recorded hotter than the first run: {', '.join(above)}")
        return time.monotonic() - began
