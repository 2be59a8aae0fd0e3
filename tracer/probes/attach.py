"""Probes as they stand: which program is attached where, why there, and what a hit costs."""

import contextlib
import itertools
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from tracer.engines import Engine, Probe
from tracer.errors import ProbeError, RequirementError
from tracer.probes import anchors, name_tables, reach, uprobes
from tracer.probes.elf import Binary, Symbol, contains, read_binary
from tracer.probes.fast_nop import has_fast_nop
from tracer.probes.functions import Function
from tracer.probes.named import USER, NamedFunctions
from tracer.probes.perf_events import attach_software, attach_tracepoint
from tracer.probes.placement import CALL_BYTES, NOP5, Place, place_call, place_entry, place_fixed, place_tail, place_usdt
from tracer.probes.tracefs import has_tracepoint, tracefs, why_absent
from tracer.recording.paths import Owner

FINDERS = ("qnn_providers_begin", "qnn_providers_end")  # they find the other probes' places: hit once, and never shed
TABLE_SITE = place_fixed("", "emulated", "address from the function table; not inspected (licence), assumed cheap")
SYMBOL_SITE = place_fixed("", "emulated", "exported symbol; not inspected (licence), assumed cheap")

SOFTWARE = "software"  # the category of perf's software events; every other one is a category of tracepoints
FAULT_ENDS = {"major_faults": 6, "minor_faults": 5}  # program → PERF_COUNT_SW_PAGE_FAULTS_MAJ and _MIN
FAULT_BEGINS = "mm_filemap_fault"
READ_CALLS = ("read", "pread64", "readv", "preadv", "preadv2")
KERNEL_PROBES = (
    ("sched_process_fork", "process", "sched"),
    ("sched_process_exit", "process", "sched"),
    ("sched_process_free", "process", "sched"),
    ("sched_process_exec", "process", "sched"),
    ("sys_enter_openat", "process", "syscalls"),
    ("sched_switch", "sched", "sched"),
    ("sched_waking", "sched", "sched"),
    ("sched_wakeup", "sched", "sched"),
    *((f"sys_{edge}_{call}", "io", "syscalls") for call in READ_CALLS for edge in ("enter", "exit")),
    ("sys_enter_mmap", "io", "syscalls"),
    (FAULT_BEGINS, "io", "filemap"),
    ("mm_filemap_map_pages", "io", "filemap"),
    ("mm_filemap_add_to_page_cache", "io", "filemap"),
    ("block_io_start", "io", "block"),
    ("block_rq_issue", "io", "block"),
    ("block_rq_complete", "io", "block"),
    *((name, "io", SOFTWARE) for name in FAULT_ENDS),
)
SINGLE_CALLS, EVERY_CALL = "syscalls", "raw_syscalls"
# What stands in for tracepoints of single system calls in kernels without CONFIG_FTRACE_SYSCALLS: every call of every process
# passes these two, 0.16 µs and 0.28 µs for both where it was measured. They need no more than all other tracepoints do.
STAND_INS = (("sys_enter", "process", EVERY_CALL), ("sys_exit", "io", EVERY_CALL))

OP_NAMES = """
import ctypes, sys
name = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])
name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
for number in range(1024):
    text = (name(number) or b"").decode(errors="replace")
    if not text.replace("_", "").isalnum() or text != text.upper():
        break
    print(text, flush=True)
"""


class Loader(Protocol):
    """What both loaders offer."""

    def attachable(self, name: str, cookie: int) -> tuple[int, int]:
        """(descriptor of a loaded program, cookie to attach it with)."""
        ...

    def update(self, name: str, key: bytes, value: bytes) -> None:
        """Set one element of a map."""
        ...


@dataclass
class Row:
    """One probe in the manifest."""

    program: str
    engine: str
    level: str
    library: str
    symbol: str
    offset: int
    at: str
    instruction: str
    cost: str
    why: str
    ns_per_hit: float = 0.0
    ns_per_hit_cold: float = 0.0
    bpf_ns_per_hit: float = 0.0
    hits: int = 0
    retired_ns: int = 0  # when it was removed before the end, since others had taken its place
    cookie: int = 0
    skipped: int = 0


Site = tuple[int, str, Place]
"""File offset of a function, its name, the place in it."""


def cheapest(sites: list[Site]) -> list[Site]:
    """The first of several functions that would do, or the first that has a cheap instruction where it has none."""
    cheap = [site for site in sites if site[2].cost != "stepped"]
    if not cheap or cheap[0] == sites[0]:
        return sites[:1]
    offset, name, place = cheap[0]
    why = f"{place.why}; instead of {sites[0][1]}, which has no cheap instruction while its arguments are in place"
    return [(offset, name, replace(place, why=why))]


def needs_anchors(engine: Engine, binary: Binary) -> bool:
    """Whether a file holds an engine's code but not the name of one of its functions, not even as something it asks for."""
    names = tuple(name for probe in engine.probes for name in (*probe.symbols, *probe.otherwise))
    return bool(engine.marker) and not mentions_any(binary, names) and contains(binary.path, engine.marker.encode())


@lru_cache(maxsize=256)
def mentions_any(binary: Binary, names: tuple[str, ...]) -> bool:
    """Whether a file defines, or asks for, a symbol of one of these names."""
    return any(map(binary.mentions, names))


def unknown_slots(engine: Engine, api: tuple[int, ...], backend: int, wanted: list[Probe], known: list[Probe]) -> list[str]:
    """What to say of a function table whose version is not the one that the slots were held against."""
    version, checked = ".".join(map(str, api)), f"{engine.api_major}.{engine.api_minor}"
    left_out = ", ".join(dict.fromkeys(stem(probe.program) for probe in wanted if probe not in known))
    said = [f"{engine.name}: backend {backend} has API {version}: left out {left_out}"] if left_out else []
    if api[0] == engine.api_major and api[1] > engine.api_minor:
        newer = f"newer than {checked}: probes stand at the slots of {checked}"
        said.append(f"{engine.name}: backend {backend} has API {version}, {newer}")
    return said


def stem(program: str) -> str:
    """What a program's name tells without the end of a call that it stands at."""
    return program.removesuffix("_begin").removesuffix("_end")


@dataclass
class EngineState:
    """What was found of an engine in this run."""

    libraries: dict[str, str] = field(default_factory=dict)
    operators: list[str] = field(default_factory=list)
    untold: str = ""  # why its operators and experts are not recorded


class Attachments:
    """All probes of a session; attaching the same program twice to one place is a no-op."""

    def __init__(self, engines: list[Engine], levels: set[str], owner: Owner, functions: list[Function] | None = None):
        self.engines, self.levels, self.owner = engines, levels, owner
        self.named = NamedFunctions([f for f in functions or [] if f.level in levels])
        self.rows: list[Row] = []
        self.warnings: list[str] = []
        self.state = {engine.name: EngineState(operators=list(engine.operators)) for engine in engines}
        self._fds: dict[int, int] = {}  # index of the row → the descriptor that holds its probe
        self._more: list[int] = []  # descriptors of probes that need one per cpu
        self._known: set[tuple[int, int, int, str, int]] = set()
        self._opened: set[str] = set()  # files that the program was seen to open or to run
        self._folders: set[str] = set()  # in which all libraries were gone through
        self.attaching_ns = 0  # time in the kernel to place probes
        self._visits: set[tuple[int, int, int, str, bool]] = set()
        self.shed_levels: set[str] = set()
        self.spared: list[tuple[Engine, Probe, str, int, str]] = []  # what attach_spared would place: file, offset, symbol
        self._changing = threading.Lock()  # levels are shed and restored beside the drain
        self.loader: Loader | None = None
        self.refused: set[str] = set()  # programs that this kernel does not take, and what is of no use without them
        self.costs: dict[str, float] = {}

    def programs(self) -> set[str]:
        """Names of the BPF programs that may be needed at the chosen levels."""
        kernel = {name for name, _, _ in self.kernel_probes()}
        engines = {probe.program for engine in self.engines for probe in engine.probes if probe.wanted(self.levels)}
        return kernel | engines | self.named.programs()

    def drop(self, refused: dict[str, str]) -> None:
        """Go on without programs that the kernel refused (program → why), and without the other ends of their calls."""
        for program, why in sorted(refused.items()):
            self.warnings.append(f"the kernel refused {program}: {why}; {self._goes_without(program)}")
        stems = {stem(program) for program in refused}
        self.refused = set(refused) | {program for program in self.programs() if stem(program) in stems}

    def _goes_without(self, program: str) -> str:
        kernel = {level for name, level, _ in (*KERNEL_PROBES, *STAND_INS) if name == program}
        levels = kernel | {probe.level for engine in self.engines for probe in engine.probes if probe.program == program}
        what = "the costs of probes are unknown" if program == "empty" else "named functions are not recorded"
        return f"level {', '.join(sorted(levels))} goes without it" if levels else what

    def attach_kernel(self) -> None:
        """Attach the kernel's own probes: of the process level, without which nothing goes, and of the chosen levels."""
        offered = self.kernel_probes()
        for name, level, category in offered:
            at = SOFTWARE if category == SOFTWARE else "tracepoint"
            with self._reported():
                self._stand(Row(name, "kernel", level, "", f"{category}:{name}", 0, at, "", "tracepoint", ""))
        if not any(level == "process" for _, level, _ in offered):
            why = why_absent()[0] or f"it lacks those that {tracefs()} should hold"
            raise RequirementError(f"none of the kernel's tracepoints can be read: tracefs: {why}; see `python -m tracer doctor`")
        categories = {category for _, _, category in offered}
        for name, level, category in KERNEL_PROBES:
            missing = level in (*self.levels, "process") and (name, level, category) not in offered
            if missing and not (category == SINGLE_CALLS and EVERY_CALL in categories):
                self.warnings.append(f"this kernel has no tracepoint {category}:{name}; level {level} goes without it")

    def kernel_probes(self) -> list[tuple[str, str, str]]:
        """(program, level, category) of the kernel's own probes that the levels ask for and it offers."""
        single = any(has_tracepoint(category, name) for name, _, category in KERNEL_PROBES if category == SINGLE_CALLS)
        return [
            (name, level, category)
            for name, level, category in (*KERNEL_PROBES, *(() if single else STAND_INS))
            if level in (*self.levels, "process") and (category == SOFTWARE or has_tracepoint(category, name))
        ]

    def attach_file(self, path: str, is_executable: bool = False) -> int:
        """Attach every engine's probes that a file offers; returns how many were added."""
        self._opened.add(reach.real(path))
        return self._attach_file(path, is_executable)

    def attach_beside(self, path: str) -> int:
        """Attach to the libraries beside one of an engine whose libraries are opened together.

        The first probe after a while waits for a grace period of the kernel's, 10 ms and more; those right behind it do not.
        """
        folder, name = os.path.split(reach.real(path))
        together = [engine for engine in self.engines if engine.together and engine.owns(name)]
        if folder in self._folders or not together:
            return 0
        self._folders.add(folder)
        beside = [each for each in sorted(os.listdir(folder)) if any(engine.owns(each) for engine in together)]
        return sum(self._attach_file(os.path.join(folder, each)) for each in beside)

    def look_ahead(self, command: list[str]) -> None:
        """Do what a command's start would wait for: search the programs that it names, prepare what decides on places."""
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
        for engine in self.engines:
            wanted = engine.owns(os.path.basename(path)) or engine.owns(os.path.basename(real))
            if is_executable:
                wanted = bool(engine.marker) and contains(real, engine.marker.encode())
            if wanted and os.path.isfile(reach.way_to(real)):
                with self._reported():
                    self._attach_engine(engine, real)
        if self.named.wants(real, os.path.basename(path), is_executable):
            with self._reported():
                self._attach_named(real, os.path.basename(path), is_executable)
        if not all(self._is_spared(probe) for _, probe, *_ in self.spared):
            self.attach_spared()
        return len(self.rows) - before

    def _was_attached(self, path: str, real: str, is_executable: bool) -> bool:
        """Whether this file, unchanged, was gone through before under this name: its probes stand in every process."""
        try:
            status = os.stat(reach.way_to(real))
        except OSError:
            return False
        visit = status.st_dev, status.st_ino, status.st_mtime_ns, os.path.basename(path), is_executable
        if visit in self._visits:
            return True
        self._visits.add(visit)
        return False

    def _attach_named(self, path: str, file_name: str, is_executable: bool) -> None:
        """Attach the probes on a user's functions in one file."""
        assert self.loader is not None
        binary = read_binary(path)
        for site in self.named.sites(binary, file_name, is_executable, self.warnings):
            place = SYMBOL_SITE
            if site.inspect:
                place = self._entry(binary, site.offset, site.name)
            for cookie, spec in site.specs.items():
                self.loader.update("call_specs", struct.pack("<I", cookie), spec)
                self._attach(USER, site.probe(cookie), path, site.offset, site.name, place, cookie)

    def _attach_engine(self, engine: Engine, path: str) -> None:
        binary = read_binary(path)
        before = len(self.rows)
        for probe in engine.probes:
            if not probe.wanted(self.levels) or probe.slot >= 0 or probe.learnt:
                continue
            with self._reported():
                site = next(self._sites(engine, probe, binary), None)
                if site:
                    self._attach(engine, probe, path, *site)
        if len(self.rows) > before or engine.owns(os.path.basename(path)):
            self.state[engine.name].libraries[path] = binary.build_id
        self._learn_operators(engine, binary, len(self.rows) > before)

    def _learn_operators(self, engine: Engine, binary: Binary, is_probed: bool) -> None:
        """The engine's operator names by number: read from the file's table in milliseconds, else asked of the library."""
        state = self.state[engine.name]
        can_ask = bool(engine.operator_names) and binary.symbol(engine.operator_names) is not None
        if engine.operator_table and not state.operators and (is_probed or can_ask):
            state.operators = name_tables.read(binary.path, engine.operator_table)
        if can_ask and not state.operators:
            state.operators = self._operator_names(binary.path, engine.operator_names)

    def _sites(self, engine: Engine, probe: Probe, binary: Binary) -> Iterator[Site]:
        """Where a probe stands in a binary, then where else it could."""
        if probe.usdt:
            yield from self._usdt_sites(probe, binary)
        elif not any(map(binary.find, probe.unless)) and not (probe.once and self._stands_beside(probe, binary.path)):
            yield from cheapest(self._symbol_sites(engine, probe, binary, probe.symbols))
            for name in probe.otherwise:
                yield from self._symbol_sites(engine, probe, binary, (name,))
            if probe.anchor and engine.inspects(binary.path) and needs_anchors(engine, binary):
                yield from self._anchored_sites(engine, probe, binary)

    def _usdt_sites(self, probe: Probe, binary: Binary) -> Iterator[Site]:
        offset = binary.usdt.get(probe.usdt)
        if offset is not None:
            entry = offset - len(NOP5)
            before, is_entry = binary.bytes_at(entry, len(NOP5)), binary.begins_function(entry)
            yield offset, probe.usdt, place_usdt(before, is_entry, has_fast_nop(), binary.machine)

    def _anchored_sites(self, engine: Engine, probe: Probe, binary: Binary) -> Iterator[Site]:
        said, offset = anchors.words(probe.anchor), anchors.find(binary.path, probe.anchor)
        if offset is None:
            self.warnings.append(f"{binary.path} is stripped, and not one function in it {said}: no {probe.program}")
            return
        _, name, place = self._symbol_site(engine, probe, binary, Symbol(probe.symbols[0], offset))
        yield offset, name, replace(place, why=f"{place.why}; stripped: found as the function that {said}")

    def _stands_beside(self, probe: Probe, path: str) -> bool:
        """Whether the program stands in another file of the same folder."""
        standing = {row.library for row in self.rows if row.program == probe.program and not row.retired_ns} - {path}
        return any(os.path.dirname(library) == os.path.dirname(path) for library in standing)

    def _symbol_sites(self, engine: Engine, probe: Probe, binary: Binary, names: tuple[str, ...]) -> list[Site]:
        symbols = [symbol for name in names if (symbol := binary.find(name))]
        return [self._symbol_site(engine, probe, binary, symbol) for symbol in symbols if self._usable(probe, symbol, binary)]

    def _symbol_site(self, engine: Engine, probe: Probe, binary: Binary, symbol: Symbol) -> Site:
        if not engine.inspects(binary.path):
            return symbol.offset, symbol.name, SYMBOL_SITE
        choose = place_tail if probe.at == "tail" else place_entry
        return symbol.offset, symbol.name, self._entry(binary, symbol.offset, symbol.name, choose)

    def _entry(self, binary: Binary, offset: int, name: str, choose: Callable[..., Place] = place_entry) -> Place:
        """Where a probe stands in a function."""
        try:
            return choose(binary.bytes_at(offset), binary.machine, has_fast_nop())
        except ProbeError as error:
            raise ProbeError(f"{binary.path}: {name}: {error}") from None

    def _usable(self, probe: Probe, symbol: Symbol, binary: Binary) -> bool:
        """A clone that may lack arguments cannot be probed where they are read."""
        if symbol.changed and probe.at == "entry":
            self.warnings.append(f"{binary.path}: {symbol.name} may have lost arguments in compilation: no {probe.program}")
            return False
        return True

    def attach_api(self, table: str, slots: dict[int, tuple[str, int]], version: int) -> int:
        """Attach probes at those slots (slot → file, offset) of a table of functions that `version` has; how many were added."""
        before = len(self.rows)
        for engine in self.engines:
            for probe in engine.probes:
                wanted = probe.table == table and probe.wanted(self.levels) and probe.since <= version
                if wanted and probe.slot in slots:
                    path, offset = slots[probe.slot]
                    with self._reported():
                        self._attach(
                            engine, probe, path, offset, f"{table}[{probe.slot}]", self._slot_place(engine, path, offset)
                        )
        return len(self.rows) - before

    def at_run_time(self) -> list[Row]:
        """Rows, with offset -1, of the probes whose places the program is told when it runs: slots of tables of functions."""
        rows = []
        for engine in self.engines:
            for probe in engine.probes:
                if probe.slot >= 0 and probe.level in self.levels and self.state[engine.name].libraries:
                    symbol = f"{probe.table or 'function table'}[{probe.slot}]"
                    why = "at run time: the program gets the table from the library"
                    rows.append(Row(probe.program, engine.name, probe.level, "", symbol, -1, probe.at, "", "", why))
        return rows

    def _slot_place(self, engine: Engine, path: str, offset: int) -> Place:
        if not engine.inspects(path):
            return TABLE_SITE
        return self._entry(read_binary(path), offset, f"{offset:#x}")

    def attach_table(self, engine: Engine, slots: dict[int, tuple[str, int]], api: tuple[int, ...], backend: int) -> int:
        """Attach probes at function-table slots given as slot → (file, offset); returns how many were added."""
        before = len(self.rows)
        wanted = [p for p in engine.probes if p.slot >= 0 and not p.table and p.wanted(self.levels)]
        shared = Counter(slots.values())  # what a backend does not support is often one function for all
        unshared = {slot for slot, place in slots.items() if shared[place] == 1}
        known = [p for p in wanted if api[0] == engine.api_major and api[1] >= p.since and p.slot in unshared]
        self.warnings += [line for line in unknown_slots(engine, api, backend, wanted, known) if line not in self.warnings]
        for probe in known:
            place = engine, probe, *slots[probe.slot], f"table[{probe.slot}] of backend {backend}"
            if self._is_spared(probe):
                self.spared.append(place)
            else:
                self._attach_slot(*place)
        return len(self.rows) - before

    def _attach_slot(self, engine: Engine, probe: Probe, path: str, offset: int, symbol: str) -> None:
        with self._reported():
            self._attach(engine, probe, path, offset, symbol, TABLE_SITE)

    def _is_spared(self, probe: Probe) -> bool:
        """Whether other probes tell all that it would, so far as is known."""
        standing = [row for row in self.rows if not row.retired_ns]
        files = [{row.library for row in standing if row.program == program} for program in probe.spared_by]
        return bool(files) and all(each and each == files[0] for each in files)

    def stands_for_spared(self, path: str) -> bool:
        """Whether the probes in this file tell all that the spared ones would of its calls."""
        here = {row.program for row in self.rows if row.library == path and not row.retired_ns}
        return all(here.issuperset(probe.spared_by) for _, probe, *_ in self.spared)

    def attach_spared(self) -> None:
        """Attach the probes that others were thought to stand for: there is a caller that these do not see."""
        places, self.spared = self.spared, []
        for place in places:
            self._attach_slot(*place)

    def attach_callback(self, engine: Engine, name: str, path: str, offset: int) -> None:
        """Attach the probes that are declared as learnt under `name` at a function that the program handed over."""
        for probe in engine.probes:
            if probe.learnt == name and probe.wanted(self.levels):
                with self._reported():
                    binary = read_binary(path)
                    place = self._entry(binary, offset, binary.function_at(offset))
                    self._attach(engine, probe, path, offset, binary.function_at(offset), place)

    def attach_learnt(self, engine: Engine, sites: dict[str, tuple[str, int]], why: str) -> bool:
        """Attach the probes whose sites, given as name → (file, offset behind a call), were learnt.

        False, and nothing changes, where a call is not cheap to probe.
        """
        path = sites["loop"][0]
        binary = read_binary(path)
        probes = [probe for probe in engine.probes if probe.learnt in sites and probe.wanted(self.levels)]
        offsets = [sites[probe.learnt][1] for probe in probes]
        places = [place_call(binary.bytes_at(offset - CALL_BYTES, CALL_BYTES), binary.machine, why) for offset in offsets]
        if None in places or not probes:
            return False
        for probe, offset, place in zip(probes, offsets, places, strict=True):
            assert place is not None
            self._attach(engine, probe, path, offset, f"{binary.function_at(offset)} call", place)
        return True

    def move(self, engine: Engine, level: str) -> list[str]:
        """Take the probes of a level to where else they could stand, as far as they have not; the functions there."""
        moved = []
        probes = {probe.program: probe for probe in engine.probes if probe.otherwise and probe.level == level}
        standing = [i for i, row in enumerate(self.rows) if row.program in probes and not row.retired_ns]
        for index in reversed(standing):  # ends before begins, as in `restore`
            row = self.rows[index]
            tried = {other.symbol for other in self.rows if (other.program, other.library) == (row.program, row.library)}
            with self._reported():
                probe, binary = probes[row.program], read_binary(row.library)
                site = next((each for each in self._sites(engine, probe, binary) if each[1] not in tried), None)
                if site:
                    self._retire([index])
                    self._attach(engine, probe, row.library, *site)
                    moved.append(site[1])
        return list(dict.fromkeys(moved))

    def teachers(self) -> set[str]:
        """The programs that stand and teach where others could."""
        teachers = {probe.program for engine in self.engines for probe in engine.probes if probe.teaches}
        return {row.program for row in self.rows if not row.retired_ns} & teachers

    def is_blind(self) -> bool:
        """Whether of all that teaches only the barrier was found: the program is stripped."""
        return self.teachers() == {"ggml_op_wait"}

    def retire_teachers(self, engine: Engine) -> None:
        """Remove the probes that taught where others stand by now, in the files where these do."""
        learnt = {probe.program for probe in engine.probes if probe.learnt}
        files = {row.library for row in self.rows if row.program in learnt}
        teachers = {probe.program for probe in engine.probes if probe.teaches}
        self._retire([index for index, row in enumerate(self.rows) if row.library in files and row.program in teachers])

    def give_up(self, engine: Engine, why: str) -> None:
        """Remove what records operators and experts of an engine, for good: what it tells cannot be trusted."""
        programs = {probe.program for probe in engine.probes if probe.level in ("operator", "expert")}
        standing = [i for i, row in enumerate(self.rows) if row.program in programs and not row.retired_ns]
        if standing:
            self._retire(standing)
            self.state[engine.name].untold = why
            self.warnings.append(f"{engine.name}: levels operator and expert are switched off: {why}")

    def _retire(self, indices: list[int]) -> None:
        """Remove probes for good."""
        with self._changing:
            for index in indices:
                self.rows[index].retired_ns = time.monotonic_ns()
            uprobes.detach([self._fds.pop(index) for index in indices if index in self._fds])

    def _attach(self, engine: Engine, probe: Probe, path: str, offset: int, symbol: str, place: Place, cookie: int = 0) -> None:
        try:
            status = os.stat(reach.way_to(path))
        except OSError as error:
            raise ProbeError(f"cannot probe {symbol} in {path}: {error.strerror}") from None
        key = (status.st_dev, status.st_ino, offset + place.delta, probe.program, cookie)
        if key in self._known:
            return
        at, instruction = "return" if probe.at == "return" else "entry", place.instruction
        where = path, symbol, offset + place.delta
        self._stand(Row(probe.program, engine.name, probe.level, *where, at, instruction, place.cost, place.why, cookie=cookie))
        self._known.add(key)

    def _stand(self, row: Row) -> None:
        """Attach a new row's probe, unless its level is shed, and keep the row; nothing where its program was refused."""
        if row.program in self.refused:
            return
        with self._changing:
            if not self._is_shed(row):
                self._fds[len(self.rows)] = self._open(row)
            self.rows.append(row)

    def _is_shed(self, row: Row) -> bool:
        return row.level in self.shed_levels and row.program not in FINDERS

    def shed(self, levels: Iterable[str]) -> None:
        """Remove the probes of levels; those of libraries still to come wait for `restore`."""
        with self._changing:
            self.shed_levels.update(levels)
            gone = [self._fds.pop(index) for index in list(self._fds) if self._is_shed(self.rows[index])]
        uprobes.detach(gone)

    def restore(self, levels: Iterable[str]) -> None:
        """Attach shed levels' probes again, ends before begins: a begin without its end would be an open span."""
        with self._changing:
            self.shed_levels.difference_update(levels)
            standing = [index for index, row in enumerate(self.rows) if not row.retired_ns and not self._is_shed(row)]
            missing = [index for index in standing if index not in self._fds]
        for index in reversed(missing):
            with self._reported():
                self._fds[index] = self._open(self.rows[index])

    def _open(self, row: Row) -> int:
        """Attach what a row says; returns the descriptor that holds the probe."""
        began = time.monotonic_ns()
        try:
            return self._open_now(row)
        finally:
            self.attaching_ns += time.monotonic_ns() - began

    def _open_now(self, row: Row) -> int:
        assert self.loader is not None
        program, cookie = self.loader.attachable(row.program, row.cookie)
        if row.at == "tracepoint":
            return attach_tracepoint(program, *row.symbol.split(":"))
        if row.at == SOFTWARE:
            first, *others = attach_software(program, FAULT_ENDS[row.program], row.program)
            self._more += others
            return first
        return uprobes.attach_uprobe(program, reach.way_to(row.library), row.offset, row.at == "return", cookie)

    def _operator_names(self, path: str, function: str) -> list[str]:
        """The engine's operator names by number, asked of a stripped library itself in a process of the invoking user."""
        drop = self.owner.become if os.geteuid() == 0 and self.owner.uid else None
        command = [sys.executable, "-c", OP_NAMES, path, function]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=drop, timeout=20, check=False)
        return done.stdout.split()

    @contextlib.contextmanager
    def _reported(self) -> Any:
        """A probe that fails is said and left out; the others go on."""
        try:
            yield
        except ProbeError as error:
            self.warnings.append(str(error))

    def detach(self) -> None:
        """Remove every probe."""
        uprobes.detach([*self._fds.values(), *self._more])
        self._fds.clear()
        self._more.clear()

    def libraries(self, engine: Engine) -> dict[str, str]:
        """Path → build id of the engine's files that the program opened."""
        return {path: build for path, build in self.state[engine.name].libraries.items() if path in self._opened}

    def to_json(self) -> list[dict[str, Any]]:
        """Rows for the manifest: without probes in files that the program never opened."""
        return [asdict(row) for row in self.rows if not row.library or row.library in self._opened]
