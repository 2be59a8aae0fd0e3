"""The cost of each subgraph kind on each backend, as measured by `tune` on this machine, and the resulting choices.

The table is kept in the package as `costs.json`, outside of its hashes, since another machine measures its own. Without a table
from this machine, the runtime uses DEFAULT.
"""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from runtime.cache_rules.batches import smallest_tier
from runtime.cache_rules.forms import BACKENDS, CPU, HTP
from runtime.package.layout import Package
from runtime.placement.options import Options

COSTS = "costs.json"
FORMAT = 1
DEFAULT = "the NPU, if present, for prefill, the CPU for decode; partial buffers in the smallest tier that fits"
RUN, LOAD = "run", "load"
RESIDENT = ""
Names = dict[str, str]


@dataclass(frozen=True)
class Cost:
    """A measured cell: a run over `rows` rows in a static shape of `tier` rows (0: dynamic), or the load of an expert.

    kind: attention, expert, router, shared, mlp, head. backend: cpu, htp. form: how the CPU loads an expert (mapped, read) or
    the NPU does (context: its binary); empty for resident subgraphs. Times in ns: median, minimum and maximum of `count`.
    """

    kind: str
    backend: str
    form: str
    what: str
    tier: int
    rows: int
    median_ns: int = 0
    least_ns: int = 0
    most_ns: int = 0
    count: int = 0


@dataclass(frozen=True)
class CostTable:
    """All cells; `machine`: where they were measured; `chunk` and `top_k`: the composition of a prefill step."""

    package: str
    machine: dict[str, Any]
    chunk: int
    top_k: int
    cells: tuple[Cost, ...]

    @classmethod
    def of(cls, package: Package, options: Options) -> "tuple[CostTable | None, str]":
        """(the package's table, ""), or (None, reason): there is none, or it was measured elsewhere or for other shapes."""
        table = cls.stored(package)
        if table is None:
            return None, "not tuned"
        if table.package != package.manifest["fingerprint"]:
            return None, "tuned before the package was converted again"
        this_machine = machine_key(options.threads, npu=True)
        changed = [name for name, value in this_machine.items() if table.machine.get(name) != value]
        if table.chunk != options.chunk or not all(table.measured("expert", HTP, tier) for tier in options.tiers):
            changed.append("chunk or other tiers")
        return (None, f"tuned with another {changed[0]}") if changed else (table, "")

    @classmethod
    def stored(cls, package: Package) -> "CostTable | None":
        """The table in the package, wherever it was measured; None if there is no readable one."""
        try:
            stored = json.loads((package.folder / COSTS).read_text(encoding="utf-8"))
            if stored.pop("format") != FORMAT:
                return None
            cells = tuple(Cost(**cell) for cell in stored.pop("cells"))
            return cls(**stored, cells=cells)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, package: Package) -> Path:
        """Write the table into the package, replacing an older one."""
        return package.write(COSTS, (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode())

    def measured(self, kind: str, backend: int, tier: int = 0) -> bool:
        """Whether this kind was measured on this backend, in a static shape of `tier` rows if one is given."""
        return any((c.kind, c.backend) == (kind, BACKENDS[backend]) and tier in (0, c.tier) for c in self.cells)

    def run_ns(self, kind: str, backend: int, rows: int, tier: int = 0) -> float:
        """Time of a run over `rows` rows: a static shape costs the same for any number of rows, a dynamic one is interpolated."""
        runs = [c for c in self.cells if (c.kind, c.backend, c.what, c.tier) == (kind, BACKENDS[backend], RUN, tier)]
        if not runs:
            return float("inf")
        if tier:
            return float(runs[0].median_ns)
        best: dict[int, int] = {}
        for cell in runs:
            best[cell.rows] = min(cell.median_ns, best.get(cell.rows, cell.median_ns))
        measured_rows = sorted(best)
        ns = float(np.interp(rows, measured_rows, [best[n] for n in measured_rows]))
        return ns * max(rows / measured_rows[-1], 1)

    def load_ns(self, backend: int, tier: int = 0) -> float:
        """Time to load one expert from disk in the form that a limited cache uses."""
        loads = [
            c.median_ns
            for c in self.cells
            if (c.kind, c.backend, c.what, c.tier) == ("expert", BACKENDS[backend], LOAD, tier) and c.form != "mapped"
        ]
        return float(min(loads)) if loads else float("inf")

    def prefill(self, tiers: tuple[int, ...]) -> Names:
        """The backends of attention and of experts that process a chunk fastest: two backends overlap, one runs both in turn."""
        tier = max(tiers)
        return self._quickest(self.chunk, self.chunk * self.top_k / tier, tier, tier, overlap=True)

    def decode(self, tiers: tuple[int, ...]) -> Names:
        """The fastest backends for one row: nothing overlaps; the router waits for attention and the next layer for experts."""
        return self._quickest(1, self.top_k, 1, min(tiers), overlap=False)

    def _quickest(self, rows: int, runs: float, expert_rows: int, tier: int, overlap: bool) -> Names:
        """The fastest for attention over `rows` rows and `runs` runs of an expert over `expert_rows`, in this tier on the NPU."""
        attention = {CPU: self.run_ns("attention", CPU, rows), HTP: self.run_ns("attention", HTP, rows, rows)}
        experts = {CPU: runs * self.run_ns("expert", CPU, expert_rows), HTP: runs * self.run_ns("expert", HTP, expert_rows, tier)}

        def ns(pair: tuple[int, int]) -> float:
            a, e = attention[pair[0]], experts[pair[1]]
            return max(a, e) if overlap and pair[0] != pair[1] else a + e

        first, second = min(((a, e) for a in attention for e in experts), key=ns)
        return {"attention": BACKENDS[first], "expert": BACKENDS[second]}


class Flush:
    """Decides where a partial buffer runs: in the smallest tier that holds its rows; `limited`: of those that have just run, if
    one does, as another would have to be loaded.
    """

    def __init__(self, tiers: tuple[int, ...], limited: bool):
        self.tiers, self.limited = tiers, limited

    @property
    def uses_cpu(self) -> bool:
        """May a buffer go to the CPU?"""
        return False

    def place(self, rows: int, loaded: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Backend and tier (0: dynamic) for `rows` rows of an expert whose forms (backend, tier) in `loaded` have just run."""
        ran = [tier for backend, tier in loaded if backend == HTP] if self.limited else []
        return HTP, smallest_tier(self.tiers, rows, ran)


class FlushByCost(Flush):
    """Decides by the table where it ends soonest; `limited`: a form that has not just run must be loaded first.

    The cache's current content is not considered, so that the same prompt always runs in the same places.
    """

    def __init__(self, table: CostTable, tiers: tuple[int, ...], limited: bool):
        super().__init__(tiers, limited)
        self.table = table
        self._places: dict[tuple[int, frozenset[tuple[int, int]]], tuple[int, int]] = {}

    @property
    def uses_cpu(self) -> bool:
        """May a buffer go to the CPU?"""
        return any(self.place(rows, ())[0] == CPU for rows in range(1, max(self.tiers)))

    def place(self, rows: int, loaded: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Backend and tier with the least cost; a full tier stays on the NPU."""
        if rows >= max(self.tiers):
            return super().place(rows, loaded)
        key = rows, frozenset(loaded)
        if key not in self._places:
            choices = [(CPU, 0), *((HTP, tier) for tier in self.tiers if tier >= rows)]
            self._places[key] = min(choices, key=lambda choice: self._ns(rows, choice, key[1]))
        return self._places[key]

    def _ns(self, rows: int, choice: tuple[int, int], loaded: frozenset[tuple[int, int]]) -> float:
        backend, tier = choice
        load = self.table.load_ns(backend, tier) if self.limited and choice not in loaded else 0.0
        return load + self.table.run_ns("expert", backend, rows, tier)


def machine_key(threads: int, npu: bool) -> dict[str, Any]:
    """The properties of this machine that determine run times, with the NPU or emulator if `npu`."""
    facts = {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": threads, "onnxruntime": version("onnxruntime")}
    if npu:
        from runtime.backends import htp

        try:
            facts |= {"npu": htp.LABEL, "emulated": htp.EMULATED, "onnxruntime_qnn": version("onnxruntime-qnn")}
        except PackageNotFoundError:
            facts |= {"npu": "", "emulated": False}
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
