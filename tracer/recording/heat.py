"""Clocks and heat from sysfs: reads frequency policies, thermal zones and cooling devices every second into `heat` records.

If the kernel has events for them (bpf/heat.bpf.c), these add the same records between the readings.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracer.recording.format import RING_HEADER_BYTES, STREAMS, dtype_from_json

SYSFS = Path("/sys")
KHZ, LEAST_KHZ, MOST_KHZ, ZONE, COOLING = range(5)
"""enum heat_of of bpf/records.h."""
SHARE = 100
"""The minimum interval between readings, as a multiple of a reading's duration: some sensors are slow."""
POLICY = {"scaling_cur_freq": KHZ, "scaling_min_freq": LEAST_KHZ, "scaling_max_freq": MOST_KHZ}
POLICIES, ZONES, DEVICES = "devices/system/cpu/cpufreq/policy", "class/thermal/thermal_zone", "class/thermal/cooling_device"


@dataclass
class Gauge:
    """A number that is read repeatedly: its source, and its last value (None: not read yet)."""

    what: int
    number: int
    path: Path
    last: int | None = None


def numbered(prefix: str, root: Path) -> list[tuple[int, Path]]:
    """(number, folder) of everything below sysfs named `prefix` and a number, in order."""
    parent, name = (root / prefix).parent, (root / prefix).name
    matches = [(re.fullmatch(rf"{name}(\d+)", folder.name), folder) for folder in parent.glob(f"{name}*")]
    return sorted((int(match[1]), folder) for match, folder in matches if match)


def text(path: Path) -> str:
    """A file's first line; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").split("\n", 1)[0].strip()
    except OSError:
        return ""


def whole(path: Path) -> int | None:
    """The number in a file; None if there is none now, or one of more than 32 bits."""
    try:
        number = int(text(path))
    except ValueError:
        return None
    return number if abs(number) < 1 << 31 else None


def policy(number: int, folder: Path) -> dict[str, Any]:
    """A frequency policy: its CPUs, their governor, and the hardware's limits, kHz."""
    cpus = [int(word) for word in text(folder / "related_cpus").split() if word.isdecimal()]
    hardware = {name: whole(folder / f"cpuinfo_{short}_freq") for name, short in (("least", "min"), ("most", "max"))}
    return {"number": number, "cpus": cpus, "governor": text(folder / "scaling_governor"), **hardware}


def zone(number: int, folder: Path) -> dict[str, Any]:
    """A thermal zone: its type, and the trip points [type, 1/1000 °C] at which its heat is acted on."""
    trips: list[list[Any]] = []
    while kind := text(folder / f"trip_point_{len(trips)}_type"):
        trips.append([kind, whole(folder / f"trip_point_{len(trips)}_temp")])
    return {"number": number, "type": text(folder / "type"), "trips": trips}


def governors(root: Path = SYSFS) -> str:
    """The governor of all policies, or each policy's in order if they differ; "" if there is none."""
    names = [text(folder / "scaling_governor") for _, folder in numbered(POLICIES, root)]
    return ", ".join(names if len(set(names)) > 1 else names[:1])


def describe(root: Path = SYSFS) -> dict[str, Any] | None:
    """What can be read, for the manifest: `policies`, `zones` and `cooling`; None if there is nothing."""
    parts = {
        "policies": [policy(number, folder) for number, folder in numbered(POLICIES, root)],
        "zones": [zone(number, folder) for number, folder in numbered(ZONES, root)],
        "cooling": [
            {"number": number, "type": text(folder / "type"), "most": whole(folder / "max_state")}
            for number, folder in numbered(DEVICES, root)
        ],
    }
    return parts if any(parts.values()) else None


def gauges(root: Path = SYSFS) -> Iterator[Gauge]:
    """The numbers that are read every second."""
    for number, folder in numbered(POLICIES, root):
        yield from (Gauge(what, number, folder / name) for name, what in POLICY.items())
    yield from (Gauge(ZONE, number, folder / "temp") for number, folder in numbered(ZONES, root))
    yield from (Gauge(COOLING, number, folder / "cur_state") for number, folder in numbered(DEVICES, root))


class Heat:
    """The readings of a recording. `add` appends slots to the events; `found`: what can be read, for the manifest."""

    def __init__(self, layout: dict[str, Any], add: Callable[[np.ndarray], None], root: Path = SYSFS):
        self.found, self.gauges, self.add = describe(root), list(gauges(root)), add
        self.kind, self.dtype = layout["kind"], dtype_from_json(layout["fields"], layout["bytes"])
        self._due_ns = 0

    def turn(self, last: bool = False) -> None:
        """Read everything, if due, and write the changes."""
        began = time.monotonic_ns()
        if not self.gauges or (began < self._due_ns and not last):
            return
        readings = [(gauge, whole(gauge.path)) for gauge in self.gauges]
        changed = [(gauge, value) for gauge, value in readings if value is not None and value != gauge.last]
        now = time.monotonic_ns()
        self._due_ns = now + SHARE * (now - began)
        for gauge, value in changed:
            gauge.last = value
        if changed:
            self.add(self.slots(began, changed))

    def slots(self, ts: int, readings: list[tuple[Gauge, int]]) -> np.ndarray:
        """Records of these readings, in the ring's format."""
        records = np.zeros(len(readings), self.dtype)
        records["ts"], records["kind"] = ts, self.kind
        records["what"] = [gauge.what for gauge, _ in readings]
        records["number"] = [gauge.number for gauge, _ in readings]
        records["value"] = [value for _, value in readings]
        slots = np.zeros((len(readings), STREAMS["events"]), np.uint8)
        slots[:, 0] = self.dtype.itemsize
        slots[:, RING_HEADER_BYTES:] = records.view(np.uint8).reshape(len(readings), -1)
        return slots
