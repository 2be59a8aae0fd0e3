"""The table `clocks`: CPU frequencies, their limits, temperatures and cooling, read by the tracer or reported by the kernel."""

from typing import Any

import numpy as np

from analyzer.records.manifest import listed_items, section
from analyzer.records.reading import Source
from analyzer.records.rows import Rows, decode_texts
from analyzer.records.schema import Columns, text_array
from analyzer.records.spans import NONE, number_rows

WHAT = np.array(["frequency", "least frequency", "greatest frequency", "temperature", "cooling", ""], object)
"""By enum heat_of of bpf/records.h."""
OF_CPUS, ZONE, COOLING = 3, 3, 4
UNNUMBERED = 2**16 - 1
UNNAMED = ("CPU", "CPU", "CPU", "zone", "device")
SCALE = np.array([1e-3, 1e-3, 1e-3, 1e-3, 1.0, 1.0])


def range_text(numbers: list[int]) -> str:
    """Numbers as text with ranges: 0-3, 7."""
    numbers = sorted(numbers)
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def cpus_text(numbers: list[int]) -> str:
    """CPUs as text: CPU 6; CPUs 0-3."""
    return f"CPU{'s' * (len(numbers) > 1)} {range_text(numbers)}"


def rows_of(manifest: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The manifest's rows of `policies`, `zones` or `cooling`; damaged rows omitted."""
    return [row for row in listed_items(section(manifest, "heat").get(name), dict) if isinstance(row.get("number"), int)]


def scaled_number(value: Any, scale: float = 1.0) -> float:
    """value * scale; NaN if the value is not a number."""
    return value * scale if isinstance(value, int | float) else np.nan


class Gauges:
    """The manifest's CPU policies, thermal zones and cooling devices: names and maximum values by (what, number)."""

    def __init__(self, manifest: dict[str, Any]):
        self.names: dict[tuple[int, int], str] = {}
        self.most: dict[tuple[int, int], float] = {}
        self.policies: dict[int, int] = {}
        """CPU → number of its policy."""
        for row in rows_of(manifest, "policies"):
            self._policy(row["number"], listed_items(row.get("cpus"), int), scaled_number(row.get("most"), 1e-3))
        for row in rows_of(manifest, "zones"):
            self.names[ZONE, row["number"]] = str(row.get("type"))
            self.most[ZONE, row["number"]] = first_trip(row.get("trips"))
        devices = rows_of(manifest, "cooling")
        for row in devices:
            self.names[COOLING, row["number"]] = str(row.get("type"))
            self.most[COOLING, row["number"]] = scaled_number(row.get("most"))
        types = [row.get("type") for row in devices]
        self.devices = {str(row["type"]): row["number"] for row in devices if types.count(row.get("type")) == 1}
        """Type → number, of types that one device alone has."""

    def _policy(self, number: int, cpus: list[int], most: float) -> None:
        self.policies |= dict.fromkeys(cpus, number)
        for what in range(OF_CPUS):
            self.names[what, number] = cpus_text(cpus) if len(cpus) > 1 else f"CPU {number}"
            self.most[what, number] = most

    def numbers(self, rows: Rows) -> np.ndarray:
        """The number of each record's policy, zone or device; -1 if its device is unknown."""
        number = rows["number"].copy()
        of_cpu = np.flatnonzero(rows["what"] < OF_CPUS)
        cpus, inverse = np.unique(number[of_cpu], return_inverse=True)
        number[of_cpu] = np.array([self.policies.get(cpu, cpu) for cpu in cpus.tolist()], np.int64)[inverse]
        nameless = np.flatnonzero(number == UNNUMBERED)
        number[nameless] = [self.devices.get(name, NONE) for name in decode_texts(rows["name"][nameless]).tolist()]
        return number


def first_trip(trips: Any) -> float:
    """The lowest trip temperature of a zone that triggers cooling, in °C; NaN if none is known."""
    pairs = [trip for trip in listed_items(trips, list) if len(trip) == 2]
    return min((t * 1e-3 for _, t in pairs if isinstance(t, int) and t > 0), default=np.nan)


def build_clocks(source: Source) -> Columns:
    """The columns of `clocks`: a row for each value that differs from the previous one."""
    gauges, rows = Gauges(source.manifest), source.rows("heat")
    what, number, value = np.minimum(rows["what"], len(WHAT) - 1), gauges.numbers(rows), rows["value"]
    known = np.flatnonzero((number != NONE) & (what < len(WHAT) - 1))
    order = known[np.lexsort((number[known], what[known]))]
    follows = (what[order][1:] == what[order][:-1]) & (number[order][1:] == number[order][:-1])
    news = np.append(True, ~(follows & (value[order][1:] == value[order][:-1])))[: len(order)]
    kept = np.sort(order[news])
    code, first = number_rows(what[kept], number[kept])
    kinds = list(zip(what[kept][first].tolist(), number[kept][first].tolist(), strict=True))
    return {
        "ts_ns": rows["ts"][kept],
        "what": text_array(what[kept], WHAT),
        "number": number[kept],
        "name": text_array(code, [gauges.names.get(kind, f"{UNNAMED[kind[0]]} {kind[1]}") for kind in kinds]),
        "value": value[kept] * SCALE[what[kept]],
        "most": np.array([gauges.most.get(kind, np.nan) for kind in kinds], np.float64)[code],
    }


def build_cpus(source: Source) -> Columns:
    """The columns of `cpus`; CPUs are of one kind whose highest clock and capacity are equal."""
    every = {
        cpu: (row["number"], scaled_number(row.get("most"), 1e-3), scaled_number(row.get("capacity")))
        for row in rows_of(source.manifest, "policies")
        for cpu in listed_items(row.get("cpus"), int)
        if 0 <= cpu < UNNUMBERED
    }
    kinds: dict[str, list[int]] = {}
    for cpu, (_, *speed) in every.items():
        kinds.setdefault(str(speed), []).append(cpu)
    names = [cpus_text(kinds[str(speed)]) for _, *speed in every.values()]
    rows = [(cpu, *about) for cpu, about in every.items()]
    columns = np.array(rows, np.float64).reshape(len(rows), 4).T
    return {
        "cpu": columns[0],
        "policy": columns[1],
        "kind": np.array(names, object),
        "most_mhz": columns[2],
        "capacity": columns[3],
    }
