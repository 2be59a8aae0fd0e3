"""The plan as a file: all that a recorder on another machine needs, so that it makes no decisions (docs/devices.md)."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracer.engines import Engine, Probe
from tracer.errors import EngineError
from tracer.kernel.definitions import constant, enum_values, program_numbers, record_layouts
from tracer.kernel.features import ARCHITECTURES
from tracer.probes import reach
from tracer.probes.driver_events import DRIVER_EVENTS
from tracer.probes.elf import read_binary
from tracer.probes.kernel_probes import ALWAYS, FAULT_ENDS, KERNEL_PROBES, STAND_INS
from tracer.probes.learning import LearntLoop
from tracer.probes.plan import FilePlan, stored_row
from tracer.probes.planner import Planner
from tracer.recorder.pack import number_of
from tracer.recording.checksums import digest
from tracer.recording.paths import BPF_SOURCE
from tracer.recording.user_files import open_regular, read_bytes
from tracer.sensors import power_sources

PLAN_VERSION = 1
"""The kernel's name of a machine → its name in ELF headers."""


@dataclass(frozen=True)
class FileRoot:
    """Where files are looked up: below `sysroot`, a copy of the device's root; "" for this machine."""

    sysroot: str
    arch: str

    def shown(self, path: str) -> str:
        """A file's path as seen on the device."""
        return "/" + os.path.relpath(path, self.sysroot) if self.sysroot else path

    def is_of(self, path: str) -> bool:
        """Whether a file is a program or library for the device."""
        return contains_elf(path) and read_binary(path).machine == ARCHITECTURES[self.arch]


def contains_elf(path: str) -> bool:
    """Whether a file starts with ELF's magic bytes."""
    try:
        with open_regular(reach.opening_path(path)) as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


MOST_HASHED = 1 << 30
"""Bytes of a file without a build id, here and in the recorder."""


def file_identity(path: str, build_id: str) -> str:
    """What identifies a file wherever it is stored: its build id, or the XXH3 of its content if it has none."""
    return build_id or f"xxh3:{digest(read_bytes(reach.opening_path(path), MOST_HASHED))}"


def find_libraries(planner: Planner, folders: list[Path]) -> Iterator[str]:
    """The given files, and those in given folders, whose names are those of an engine's libraries or of a user's functions."""
    for folder in folders:
        names = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
        for path in filter(Path.is_file, names):
            if any(e.owns(path.name) for e in planner.engines) or planner.named.wants(str(path), path.name, False):
                yield str(path)


def compose_plan(
    planner: Planner, place: FileRoot, programs: list[str], folders: list[Path], loops: list[LearntLoop]
) -> dict[str, Any]:
    """The whole plan, for programs (executables) and the libraries in folders; without rows if they contain no engine."""
    seen: dict[str, dict[str, Any]] = {}
    planner.named.below = place.sysroot
    candidates = [*((path, True) for path in programs), *((path, False) for path in find_libraries(planner, folders))]
    for path, is_executable in candidates:
        if place.is_of(path) and (real := reach.resolved_path(path)) not in seen:
            plan = planner.file(path, is_executable)
            planner.rows += plan.rows
            seen[real] = file_entry(planner, place, plan, loops)
    files = list(seen.values())
    gone = {(row.program, place.shown(row.library)) for row in planner.displaced()}
    for file in files:
        file["rows"] = [row for row in file["rows"] if (row["program"], file["path"]) not in gone]
    leave_unneeded(planner, files)
    return {**common_entries(planner, place, files, {name for file in files for name in file["engines"]}), "files": files}


def leave_unneeded(planner: Planner, files: list[dict[str, Any]]) -> None:
    """Remove the probes that serve only late engines if no file belongs to one."""
    if {engine.name for engine in planner.engines if engine.late} & {name for file in files for name in file["engines"]}:
        return
    late = {probe.program for engine in planner.engines for probe in engine.probes if probe.late}
    for file in files:
        file["rows"] = [row for row in file["rows"] if row["program"] not in late]


def shortest_prefixes(prefixes: set[str]) -> list[str]:
    """Those of which none begins with another; raises EngineError for more than the recorder watches for."""
    shortest = sorted(p for p in prefixes if not any(p != other and p.startswith(other) for other in prefixes))
    if len(shortest) > (most := constant("MAX_PATTERNS")):
        raise EngineError(
            f"{len(shortest)} names of libraries are declared, at most {most} can be watched: give fewer with --probes"
        )
    return shortest


def file_entry(planner: Planner, place: FileRoot, plan: FilePlan, loops: list[LearntLoop]) -> dict[str, Any]:
    """The plan's entry for one file."""
    build = plan.build_id or read_binary(plan.path).build_id
    one = {"path": place.shown(plan.path), "id": file_identity(plan.path, build), "build_id": build, "engines": plan.engines}
    loop = next((each for each in loops if each.id == one["id"]), None)
    settings = loop_settings(planner, plan, loop)
    operators = max(plan.operators.values(), key=len, default=[])
    if "MUL_MAT_ID" in operators:
        settings["mul_mat_id"] = operators.index("MUL_MAT_ID")
    specs = {str(cookie): spec.hex() for cookie, spec in plan.specs.items()}
    rows = [stored_row(row) for row in plan.rows]
    return {**one, "operators": plan.operators, "settings": settings, "specs": specs, "rows": rows}


def loop_settings(planner: Planner, plan: FilePlan, loop: LearntLoop | None) -> dict[str, int]:
    """Settings for a file's graph loop; where the loop is known, its probes replace the ones that learn it."""
    mine = [(engine, probe) for engine in planner.engines for probe in engine.probes if engine.name in plan.engines]
    teachers = {probe.program for _, probe in mine if probe.teaches} & plan.programs()
    if not teachers:
        return {}
    if not loop:
        return {"learn": constant("LEARN_PLACES"), "blind": int(teachers == {"ggml_op_wait"})}
    engine = next(engine for engine, probe in mine if probe.teaches)
    rows = planner.learnt(engine, {name: (plan.path, offset) for name, offset in loop.sites.items()}, loop.why)
    plan.rows = [row for row in plan.rows if row.program not in teachers] + rows
    return {"learn": constant("LEARN_NOTHING"), **loop.settings()}


def common_entries(planner: Planner, place: FileRoot, files: list[dict[str, Any]], present: set[str]) -> dict[str, Any]:
    """The plan's entries other than files, for the engines `present`; its programs: those in the files and on kernel events."""
    levels, numbers = planner.levels, program_numbers()
    kernel = [row for row in (*KERNEL_PROBES, *STAND_INS) if row[1] in (*levels, *ALWAYS)]
    later = found_at_run_time(planner, present)
    rows = [row for file in files for row in file["rows"]]
    programs = {name for name, _, _ in kernel} | {row["program"] for row in (*rows, *later)}
    by_level = {"operators": "operator", "experts": "expert", "files": "io", "steps": "token"}
    chosen = {name: int(level in levels) for name, level in by_level.items()}
    backends = enum_values("backend_id")
    identities = {i[:16]: backends[f"BACKEND_{n.upper()}"] for engine in planner.engines for n, i in engine.backends.items()}
    of_engines = {name: numbers_of(value) for engine in planner.engines for name, value in engine.settings.items()}
    prefixes = {prefix for engine in planner.engines for prefix in engine.libraries} | planner.named.prefixes()
    return {
        "plan_version": PLAN_VERSION,
        "arch": place.arch,
        "sources": number_of(BPF_SOURCE.parent),
        "levels": sorted(levels),
        "programs": {name: numbers.get(name, -1) for name in sorted(programs)},
        "kernel": kernel,
        "software": FAULT_ENDS,
        "driver": [[name, *fields] for name, fields in DRIVER_EVENTS.items()],
        "patterns": shortest_prefixes(prefixes),
        "backends": identities,
        "settings": {"mul_mat_id": constant("UNKNOWN_OPERATOR"), "stop": 1, **chosen, **of_engines},
        "engines": {engine.name: described_engine(engine, planner) for engine in planner.engines},
        "at_run_time": later,
        "functions": planner.named.found,
        "layouts": record_layouts(),
        "power": power_sources(),
    }


def numbers_of(value: Any) -> int | list[int]:
    """A setting as the recorder takes it: rows of numbers one after the other."""
    return [number for row in value for number in row.values()] if isinstance(value, list) else int(value)


def described_engine(engine: Engine, planner: Planner) -> dict[str, Any]:
    """An engine's entry for the manifest, with the newest function table that its slots were checked against."""
    names = {"operators": planner.operators[engine.name], "graphs": list(engine.graphs)}
    return {
        "id": engine.id,
        **names,
        "api": [engine.api_major, engine.api_minor],
        "inspectable": engine.inspectable,
        "not_language": engine.not_language,
        "same_since": engine.same_since,
        "older_lack": engine.older_lack,
        **({"interfaces": engine.interfaces} if engine.interfaces else {}),
    }


def found_at_run_time(planner: Planner, engines: set[str]) -> list[dict[str, Any]]:
    """The entries of these engines' probes whose addresses are known only at run time."""
    wanted = [(e, p) for e in planner.engines for p in e.probes if e.name in engines and p.wanted(planner.levels)]
    return [at_run_time(engine, probe) for engine, probe in wanted if probe.slot >= 0 or probe.learnt == "notify"]


def at_run_time(engine: Engine, probe: Probe) -> dict[str, Any]:
    """The entry of a probe whose address is known only at run time: a function table's slot, or a function the program passes."""
    keys = ("program", "level", "slot", "table", "since", "at", "learnt", "spared_by")
    return {"engine": engine.name, **{key: getattr(probe, key) for key in keys}}


def write_plan(path: Path, plan: dict[str, Any]) -> None:
    """Write a plan."""
    path.write_text(json.dumps(plan) + "\n")
