"""Probes as they stand: which program is attached where, why there, and what a hit costs."""

import contextlib
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from tracer.elf import Binary, contains, read_binary
from tracer.engines import Engine, Probe
from tracer.errors import ProbeError
from tracer.paths import Owner
from tracer.perf_events import attach_software, attach_tracepoint, attach_uprobe, has_tracepoint
from tracer.placement import NOP5, Place, place_entry, place_fixed, place_tail, place_usdt

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

    def program_fd(self, name: str) -> int:
        """File descriptor of a loaded program."""
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
    hits: int = 0
    skipped: int = 0


@dataclass
class EngineState:
    """What was found of an engine in this run."""

    libraries: dict[str, str] = field(default_factory=dict)
    operators: list[str] = field(default_factory=list)


class Attachments:
    """All probes of a session; attaching the same program twice to one place is a no-op."""

    def __init__(self, engines: list[Engine], levels: set[str], owner: Owner):
        self.engines, self.levels, self.owner = engines, levels, owner
        self.rows: list[Row] = []
        self.warnings: list[str] = []
        self.state = {engine.name: EngineState(operators=list(engine.operators)) for engine in engines}
        self._fds: dict[int, int] = {}  # index of the row → the descriptor that holds its probe
        self._more: list[int] = []  # descriptors of probes that need one per cpu
        self._known: set[tuple[int, int, int, str]] = set()
        self.loader: Loader | None = None
        self.costs: dict[str, float] = {}

    def programs(self) -> set[str]:
        """Names of the BPF programs that may be needed at the chosen levels."""
        kernel = {name for name, _, _ in self.kernel_probes()}
        return kernel | {probe.program for engine in self.engines for probe in engine.probes if probe.level in self.levels}

    def attach_kernel(self) -> None:
        """Attach the kernel's own probes: of the process level, without which nothing goes, and of the chosen levels."""
        offered = self.kernel_probes()
        for name, level, category in offered:
            at = SOFTWARE if category == SOFTWARE else "tracepoint"
            self._stand(Row(name, "kernel", level, "", f"{category}:{name}", 0, at, "", "tracepoint", ""))
        for name, level, category in KERNEL_PROBES:
            if level in self.levels and (name, level, category) not in offered:
                self.warnings.append(f"this kernel has no tracepoint {category}:{name}; level {level} goes without it")

    def kernel_probes(self) -> list[tuple[str, str, str]]:
        """(program, level, category) of the kernel's own probes that the levels ask for and, beyond `process`, it offers."""
        return [
            (name, level, category)
            for name, level, category in KERNEL_PROBES
            if level == "process" or (level in self.levels and (category == SOFTWARE or has_tracepoint(category, name)))
        ]

    def attach_file(self, path: str, is_executable: bool = False) -> int:
        """Attach every engine's probes that a file offers; returns how many were added."""
        before = len(self.rows)
        real = os.path.realpath(path)
        for engine in self.engines:
            wanted = engine.owns(os.path.basename(path)) or engine.owns(os.path.basename(real))
            if is_executable:
                wanted = bool(engine.marker) and contains(real, engine.marker.encode())
            if wanted and os.path.isfile(real):
                with self._reported():
                    self._attach_engine(engine, real)
        return len(self.rows) - before

    def _attach_engine(self, engine: Engine, path: str) -> None:
        binary = read_binary(path)
        self.state[engine.name].libraries[path] = binary.build_id
        for probe in engine.probes:
            if probe.level not in self.levels or probe.slot >= 0:
                continue
            with self._reported():
                found = self._site(engine, probe, binary)
                if found:
                    self._attach(engine, probe, path, *found)
        asks = engine.operator_names and not self.state[engine.name].operators
        if asks and binary.symbol(engine.operator_names) is not None:
            self.state[engine.name].operators = self._operator_names(path, engine.operator_names)

    def _site(self, engine: Engine, probe: Probe, binary: Binary) -> tuple[int, str, Place] | None:
        """(file offset of the function, its name, the place in it) of a probe in a binary."""
        if probe.usdt:
            offset = binary.usdt.get(probe.usdt)
            if offset is None:
                return None
            entry = offset - len(NOP5)
            place = place_usdt(binary.bytes_at(entry, len(NOP5)), binary.begins_function(entry), self.costs)
            return offset, probe.usdt, place
        found = ((symbol, binary.symbol(symbol)) for symbol in probe.symbols)
        symbol, offset = next(((s, o) for s, o in found if o is not None), ("", None))
        if offset is None:
            return None
        if not engine.inspect:
            return offset, symbol, SYMBOL_SITE
        choose = place_tail if probe.at == "tail" else place_entry
        return offset, symbol, choose(binary.bytes_at(offset), binary.machine, self.costs)

    def attach_table(self, engine: Engine, slots: dict[int, tuple[str, int]], api: tuple[int, ...], backend: int) -> int:
        """Attach probes at function-table slots given as slot → (file, offset); returns how many were added."""
        before = len(self.rows)
        if api[0] != engine.api_major:
            self.warnings.append(f"{engine.name}: API {'.'.join(map(str, api))} is not known; its function table is left alone")
            return 0
        for probe in engine.probes:
            if probe.slot in slots and probe.level in self.levels:
                path, offset = slots[probe.slot]
                with self._reported():
                    self._attach(engine, probe, path, offset, f"table[{probe.slot}] of backend {backend}", TABLE_SITE)
        return len(self.rows) - before

    def _attach(self, engine: Engine, probe: Probe, path: str, offset: int, symbol: str, place: Place) -> None:
        status = os.stat(path)
        key = (status.st_dev, status.st_ino, offset + place.delta, probe.program)
        if key in self._known:
            return
        at, instruction = "return" if probe.at == "return" else "entry", place.instruction
        where = path, symbol, offset + place.delta
        self._stand(Row(probe.program, engine.name, probe.level, *where, at, instruction, place.cost, place.why))
        self._known.add(key)

    def _stand(self, row: Row) -> None:
        """Attach a new row's probe and keep the row."""
        self._fds[len(self.rows)] = self._open(row)
        self.rows.append(row)

    def _open(self, row: Row) -> int:
        """Attach what a row says; returns the descriptor that holds the probe."""
        assert self.loader is not None
        program = self.loader.program_fd(row.program)
        if row.at == "tracepoint":
            return attach_tracepoint(program, *row.symbol.split(":"))
        if row.at == SOFTWARE:
            first, *others = attach_software(program, FAULT_ENDS[row.program], row.program)
            self._more += others
            return first
        return attach_uprobe(program, row.library, row.offset, row.at == "return")

    def _operator_names(self, path: str, function: str) -> list[str]:
        """The engine's operator names by number, asked of the library itself in a process of the invoking user."""
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
        while self._fds:
            os.close(self._fds.popitem()[1])
        while self._more:
            os.close(self._more.pop())

    def to_json(self) -> list[dict[str, Any]]:
        """Rows for the manifest."""
        return [asdict(row) for row in self.rows]
