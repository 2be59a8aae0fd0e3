"""The probes of a session: attaches what a plan lists, and sheds and restores levels."""

import itertools
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from tracer.engines import Engine, Probe
from tracer.errors import ProbeError, RequirementError
from tracer.probes import reach, uprobes
from tracer.probes.disturbances import STEPPED, Disturbances, span
from tracer.probes.driver_events import driver_layouts
from tracer.probes.elf import contains
from tracer.probes.fast_nop import has_fast_nop
from tracer.probes.functions import Function
from tracer.probes.kernel_probes import FAULT_ENDS, IN_INTERRUPTS, KERNEL_PROBES, SOFTWARE, STAND_INS, kernel_probes, lacking
from tracer.probes.perf_events import attach_software, attach_tracepoint
from tracer.probes.plan import KERNEL, FilePlan, Row
from tracer.probes.planner import Places, Planner, stem
from tracer.probes.raw_tracepoints import attach_raw
from tracer.probes.tracefs import tracefs, why_absent

FINDERS = ("qnn_providers_begin", "qnn_providers_end")  # these locate the other probes' sites: hit once, never shed


class Loader(Protocol):
    """What both loaders offer."""

    def attachable(self, name: str, cookie: int) -> tuple[int, int]:
        """(descriptor of a loaded program, cookie to attach it with)."""
        ...

    def update(self, name: str, key: bytes, value: bytes) -> None:
        """Set one element of a map."""
        ...

    @property
    def refused(self) -> dict[str, str]:
        """Programs that the kernel refused → why."""
        ...

    def bring(self, wanted: set[str]) -> None:
        """Load further programs."""
        ...


@dataclass
class EngineState:
    """What is known of an engine in this run."""

    libraries: dict[str, str] = field(default_factory=dict)
    operators: list[str] = field(default_factory=list)
    untold: str = ""  # the reason why its operators and experts are not recorded


class Attachments:
    """All probes of a session; attaching the same program twice to one place is a no-op."""

    def __init__(self, engines: list[Engine], levels: set[str], functions: list[Function] | None = None):
        self.engines, self.levels = engines, levels
        self.planner = planner = Planner(engines, levels, functions)
        self.rows, self.warnings, self.named = planner.rows, planner.warnings, planner.named
        self.state = {engine.name: EngineState(operators=planner.operators[engine.name]) for engine in engines}
        self._fds: dict[int, list[int]] = {}  # row index → the descriptors that hold its probe, some one per CPU
        self._known: set[tuple[int, int, int, str, int]] = set()
        self._opened: set[str] = set()  # files that the program has opened or executed
        self._folders: set[str] = set()  # whose libraries have all been examined
        self.attaching_ns = 0  # time that the kernel took to place probes
        self.disturbances = Disturbances()
        self.teaching_ns = 0  # when the first learning probe was attached
        self._visits: set[tuple[int, int, int, str, bool]] = set()
        self.shed_levels: set[str] = set()
        self.spared: list[tuple[Probe, Row]] = []  # probes that attach_spared would place
        self._changing = threading.Lock()  # levels are shed and restored concurrently with the drain
        self.loader: Loader | None = None
        self.remove: Callable[[Iterable[int]], None] = uprobes.detach  # removes probes, given their descriptors
        self._late, self._waiting = planner.programs(late=True), list[Row]()  # programs that are not loaded yet; their rows
        self.refused: set[str] = set()  # programs that this kernel refused, and those that are useless without them
        self.costs: dict[str, float] = {}

    def programs(self) -> set[str]:
        """Names of the BPF programs to load first: those that the chosen levels may need, except late ones."""
        return {name for name, _, _ in kernel_probes(self.levels)} | self.planner.programs()

    def drop(self, refused: dict[str, str]) -> None:
        """Continue without programs that the kernel refused (program → reason), nor their begin or end counterparts."""
        for program, why in sorted(refused.items()):
            self.warnings.append(f"the kernel refused {program}: {why}; {self._goes_without(program)}")
        stems = {stem(program) for program in refused}
        known = self.programs() | self.planner.programs(late=True)
        self.refused |= set(refused) | {program for program in known if stem(program) in stems}

    def _goes_without(self, program: str) -> str:
        kernel = {level for name, level, _ in (*KERNEL_PROBES, *STAND_INS) if name == program}
        levels = kernel | {probe.level for engine in self.engines for probe in engine.probes if probe.program == program}
        what = "the costs of probes are unknown" if program == "empty" else "named functions are not recorded"
        return f"level {', '.join(sorted(levels))} is recorded without it" if levels else what

    def attach_kernel(self) -> None:
        """Attach probes on kernel events: of the process level, which is always required, and of the chosen levels."""
        assert self.loader is not None
        offered = kernel_probes(self.levels)
        for number, layout in driver_layouts([name for name, _, _ in offered]).items():
            self.loader.update("driver_layouts", struct.pack("<I", number), layout)
        for name, level, category in offered:
            instruction = SOFTWARE if category == SOFTWARE else "tracepoint"
            with self.planner.reported():
                self._stand(Row(name, KERNEL, level, "", f"{category}:{name}", 0, instruction, "", "tracepoint", ""))
        if not any(level == "process" for _, level, _ in offered):
            why = why_absent()[0] or f"it lacks the files that {tracefs()} should hold"
            raise RequirementError(f"none of the kernel's tracepoints can be read: tracefs: {why}; see `python -m tracer doctor`")
        self.warnings += lacking(self.levels, offered)

    def attach_file(self, path: str, is_executable: bool = False) -> int:
        """Attach all engines' probes that apply to a file; returns how many were added."""
        self._opened.add(reach.real(path))
        return self._attach_file(path, is_executable)

    def attach_beside(self, path: str) -> int:
        """Attach to the libraries in the same folder as this one, if its engine opens them together; returns how many were added.

        The first probe after a pause waits for a grace period of the kernel, 10 ms or more; those right after it do not.
        """
        folder = os.path.dirname(reach.real(path))
        beside = [] if folder in self._folders else self.planner.beside(path)
        if beside:
            self._folders.add(folder)
        return sum(map(self._attach_file, beside))

    def look_ahead(self, command: list[str]) -> None:
        """Do ahead of time what would delay a command's start: search the programs it names, test for fast nops."""
        has_fast_nop()
        programs = [path for word in command if (path := shutil.which(word)) and contains(path, b"\x7fELF")]
        for path, engine in itertools.product(programs, self.engines):
            if engine.marker:
                contains(reach.real(path), engine.marker.encode())

    def _attach_file(self, path: str, is_executable: bool = False) -> int:
        before = len(self.rows)
        real = reach.real(path)
        if self._was_attached(path, real, is_executable):
            return 0
        self._carry_out(self.planner.file(path, is_executable))
        if not all(self._is_spared(probe) for probe, _ in self.spared):
            self.attach_spared()
        return len(self.rows) - before

    def _was_attached(self, path: str, real: str, is_executable: bool) -> bool:
        """Whether this file was already examined, unchanged and under this name: its probes are active in every process."""
        try:
            status = os.stat(reach.way_to(real))
        except OSError:
            return False
        visit = status.st_dev, status.st_ino, status.st_mtime_ns, os.path.basename(path), is_executable
        if visit in self._visits:
            return True
        self._visits.add(visit)
        return False

    def _carry_out(self, plan: FilePlan) -> None:
        """Attach what is planned in a file."""
        assert self.loader is not None
        for cookie, spec in plan.specs.items():
            self.loader.update("call_specs", struct.pack("<I", cookie), spec)
        if any(engine.late and engine.name in plan.engines for engine in self.engines):
            self._end_waiting()
        self._waiting += [row for row in plan.rows if row.program in self._late]
        self._attach_all([row for row in plan.rows if row.program not in self._late])
        for name in plan.engines:
            self.state[name].libraries[plan.path] = plan.build_id
        for name, operators in plan.operators.items():
            self.state[name].operators = operators

    def _bring(self, programs: set[str]) -> None:
        """Load those of these late programs that are not loaded yet."""
        assert self.loader is not None
        needed = programs & self._late
        self._late -= needed
        if needed:
            self.loader.bring(needed)
            self.drop({program: why for program, why in self.loader.refused.items() if program in needed})

    def _end_waiting(self) -> None:
        """Attach the probes that waited for a late engine's library, which is now open."""
        self._bring({probe.program for engine in self.engines for probe in engine.probes if not probe.learnt})
        rows = {(row.program, os.path.dirname(row.library)): row for row in reversed(self._waiting)}  # each of them is `once`
        self._waiting.clear()
        self._attach_all(list(rows.values()))

    def _attach_all(self, rows: list[Row]) -> int:
        """Attach each row; returns how many were added."""
        before = len(self.rows)
        for row in rows:
            with self.planner.reported():
                self._attach(row)
        return len(self.rows) - before

    def attach_api(self, table: str, slots: Places, version: int) -> int:
        """Attach probes at the slots of a function table that `version` has; returns how many were added."""
        return self._attach_all(self.planner.api(table, slots, version))

    def at_run_time(self) -> list[Row]:
        """Rows, with offset -1, of probes whose addresses are known only at run time (slots of function tables)."""
        rows = []
        for engine in self.engines:
            for probe in engine.probes:
                if probe.slot >= 0 and probe.level in self.levels and self.state[engine.name].libraries:
                    symbol = f"{probe.table or 'function table'}[{probe.slot}]"
                    why = "at run time: the program gets the table from the library"
                    rows.append(Row(probe.program, engine.name, probe.level, "", symbol, -1, probe.at, "", "", why))
        return rows

    def attach_table(self, engine: Engine, slots: Places, api: tuple[int, ...], backend: int) -> int:
        """Attach probes at the slots of a backend's function table; returns how many were added."""
        planned = self.planner.table(engine, slots, api, backend)
        self.spared += [(probe, row) for probe, row in planned if self._is_spared(probe)]
        return self._attach_all([row for probe, row in planned if not self._is_spared(probe)])

    def _is_spared(self, probe: Probe) -> bool:
        """Whether other probes record everything that this one would, as far as is known."""
        standing = [row for row in self.rows if not row.retired_ns]
        files = [{row.library for row in standing if row.program == program} for program in probe.spared_by]
        return bool(files) and all(each and each == files[0] for each in files)

    def stands_for_spared(self, path: str) -> bool:
        """Whether the probes in this file record everything that the spared ones would."""
        here = {row.program for row in self.rows if row.library == path and not row.retired_ns}
        return all(here.issuperset(probe.spared_by) for probe, _ in self.spared)

    def attach_spared(self) -> None:
        """Attach the spared probes: there is a caller that the probes meant to replace them do not see."""
        spared, self.spared = self.spared, []
        self._attach_all([row for _, row in spared])

    def attach_callback(self, engine: Engine, name: str, path: str, offset: int) -> None:
        """Attach the probes declared as learnt under `name`, at a function that the program passed."""
        self._attach_all(self.planner.callback(engine, name, path, offset))

    def attach_learnt(self, engine: Engine, sites: dict[str, tuple[str, int]], why: str) -> bool:
        """Attach the probes whose sites were learnt, given as name → (file, offset after a call).

        Returns False, and changes nothing, if one of the calls is not cheap to probe.
        """
        rows = self.planner.learnt(engine, sites, why)
        self._bring({row.program for row in rows})
        for row in rows:
            self._attach(row)
        return bool(rows)

    def move(self, engine: Engine, level: str) -> list[str]:
        """Move the probes of a level to alternative sites that were not tried yet; returns the names of the functions there."""
        moved = []
        probes = {probe.program: probe for probe in engine.probes if probe.otherwise and probe.level == level}
        standing = [i for i, row in enumerate(self.rows) if row.program in probes and not row.retired_ns]
        for index in reversed(standing):  # ends before begins, as in `restore`
            row = self.rows[index]
            with self.planner.reported():
                other = self.planner.elsewhere(engine, probes[row.program], row.library)
                if other:
                    self._retire([index])
                    self._attach(other)
                    moved.append(other.symbol)
        return list(dict.fromkeys(moved))

    def _teaching(self) -> set[str]:
        return {probe.program for engine in self.engines for probe in engine.probes if probe.teaches}

    def teachers(self) -> set[str]:
        """The attached programs that learn the sites of others."""
        return {row.program for row in self.rows if not row.retired_ns} & self._teaching()

    def stepped_teachers(self, now_ns: int) -> list[dict[str, Any]]:
        """The times in which learning probes that the kernel single-steps were hit and not replaced, as `disturbances`."""
        programs = self._teaching()
        rows = [row for row in self.rows if row.program in programs and row.cost == "stepped" and row.hits]
        return [span(self.teaching_ns, max(row.retired_ns or now_ns for row in rows), STEPPED)] if rows else []

    def is_blind(self) -> bool:
        """Whether the barrier is the only learning probe attached, as in a stripped program."""
        return self.teachers() == {"ggml_op_wait"}

    def retire_teachers(self, engine: Engine) -> None:
        """Remove the learning probes in the files in which the probes at the learnt sites are attached."""
        learnt = {probe.program for probe in engine.probes if probe.learnt}
        files = {row.library for row in self.rows if row.program in learnt}
        teachers = self._teaching()
        self._retire([index for index, row in enumerate(self.rows) if row.library in files and row.program in teachers])

    def give_up(self, engine: Engine, why: str) -> None:
        """Permanently remove the probes for operators and experts of an engine, whose records are unreliable."""
        programs = {probe.program for probe in engine.probes if probe.level in ("operator", "expert")}
        standing = [i for i, row in enumerate(self.rows) if row.program in programs and not row.retired_ns]
        if standing:
            self._retire(standing)
            self.refused |= programs
            self.state[engine.name].untold = why
            self.warnings.append(f"{engine.name}: levels operator and expert are switched off: {why}")

    def _retire(self, indices: list[int]) -> None:
        """Permanently remove probes, given their rows' indices."""
        with self._changing, self.disturbances.placing():
            for index in indices:
                self.rows[index].retired_ns = time.monotonic_ns()
            self.remove([fd for index in indices for fd in self._fds.pop(index, [])])

    def _attach(self, row: Row) -> None:
        """Attach a probe in a file, unless it is already there."""
        try:
            status = os.stat(reach.way_to(row.library))
        except OSError as error:
            raise ProbeError(f"cannot probe {row.symbol} in {row.library}: {error.strerror}") from None
        key = (status.st_dev, status.st_ino, row.offset, row.program, row.cookie)
        if key not in self._known:
            self._stand(row)
            self._known.add(key)

    def _stand(self, row: Row) -> None:
        """Attach a new row's probe, unless its level is shed, and keep the row; does nothing if its program was refused."""
        if row.program in self.refused:
            return
        with self._changing:
            if not self._is_shed(row):
                self._fds[len(self.rows)] = self._open(row)
            self.rows.append(row)
        if not self.teaching_ns and row.program in self._teaching():
            self.teaching_ns = time.monotonic_ns()

    def _is_shed(self, row: Row) -> bool:
        return row.level in self.shed_levels and row.program not in FINDERS

    def shed(self, levels: Iterable[str]) -> None:
        """Remove the probes of levels; those of libraries opened later wait for `restore`."""
        with self._changing:
            self.shed_levels.update(levels)
            gone = [fd for index in list(self._fds) if self._is_shed(self.rows[index]) for fd in self._fds.pop(index)]
        with self.disturbances.placing():
            self.remove(gone)

    def restore(self, levels: Iterable[str]) -> None:
        """Attach shed levels' probes again, ends before begins: a begin without its end would be an open span."""
        with self._changing:
            self.shed_levels.difference_update(levels)
            standing = [index for index, row in enumerate(self.rows) if not row.retired_ns and not self._is_shed(row)]
            missing = [index for index in standing if index not in self._fds]
        for index in reversed(missing):
            with self.planner.reported():
                self._fds[index] = self._open(self.rows[index])

    def _open(self, row: Row) -> list[int]:
        """Attach a row's probe; returns the descriptors that hold it."""
        began = time.monotonic_ns()
        try:
            return self._open_now(row)
        finally:
            ended = time.monotonic_ns()
            self.attaching_ns += ended - began
            if row.library:
                self.disturbances.add(began, ended)

    def _open_now(self, row: Row) -> list[int]:
        assert self.loader is not None
        program, cookie = self.loader.attachable(row.program, row.cookie)
        if row.at == "tracepoint":
            attach = attach_raw if row.program in IN_INTERRUPTS else attach_tracepoint
            return [attach(program, *row.symbol.split(":"))]
        if row.at == SOFTWARE:
            return attach_software(program, FAULT_ENDS[row.program], row.program)
        return [uprobes.attach_uprobe(program, reach.way_to(row.library), row.offset, row.at == "return", cookie)]

    def detach(self) -> None:
        """Remove every probe."""
        self.remove([fd for fds in self._fds.values() for fd in fds])
        self._fds.clear()

    def libraries(self, engine: Engine) -> dict[str, str]:
        """Path → build id of the engine's files that the program has opened."""
        return {path: build for path, build in self.state[engine.name].libraries.items() if path in self._opened}

    def to_json(self) -> list[dict[str, Any]]:
        """Rows for the manifest, without probes in files that the program never opened."""
        return [asdict(row) for row in self.rows if not row.library or row.library in self._opened]
