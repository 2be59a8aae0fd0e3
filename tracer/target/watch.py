"""Answering the target: new threads and children, programs executed, libraries opened, function tables returned."""

import contextlib
import os
import signal
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracer.engines import Engine
from tracer.errors import EngineError, ProbeError, TracerError
from tracer.kernel.definitions import constant, enumeration, name_in, packed, struct_of
from tracer.kernel.libbpf import Kernel
from tracer.kernel.loaders import LibbpfLoader
from tracer.kernel.pmc import Counters, Event
from tracer.probes.attach import Attachments
from tracer.probes.disturbances import LEARNING, span
from tracer.probes.kernel_probes import FAULT_BEGINS
from tracer.probes.learning import GRAPHS, MISFITS, Learning, Loop, frame_place
from tracer.probes.reach import opened, way_to
from tracer.probes.tracefs import has_tracepoint
from tracer.recording import machine
from tracer.recording.format import KIND_OFFSET, RING_HEADER_BYTES, dtype_from_json, text
from tracer.target import qnn_tables
from tracer.target.guard import Guard
from tracer.target.io_files import Files
from tracer.target.process import executable, mappings, tasks, urgent
from tracer.target.qnn_logs import SerializedLogs

QNN_EMULATED_MACHINES = ("x86_64",)
QNN_WATCHED = ("qnn_table", "qnn_callback", "qnn_reader", "qnn_log")
WATCHED = ("task_fork", "task_exit", "task_exec", "library", "api_table", "io_file", "site", "misfit", *QNN_WATCHED)
HOLDING = ("task_exec", "library", "api_table", "qnn_table", "qnn_callback", "qnn_reader")  # the target waits for the answer


@dataclass
class Held:
    """How long the target was stopped, in ns: until the tracer woke, attaching in the kernel, and the rest reading files."""

    stops: int = 0
    ns: int = 0
    waking_ns: int = 0
    attaching_ns: int = 0

    def to_json(self) -> dict[str, int]:
        """For the manifest's costs."""
        reading = self.ns - self.waking_ns - self.attaching_ns
        shares = {"waking_ns": self.waking_ns, "attaching_ns": self.attaching_ns, "reading_ns": reading}
        return {f"held_{name}": value for name, value in {"ns": self.ns, "stops": self.stops, **shares}.items()}


def places(pid: int, addresses: Iterable[int], first: int = 0) -> dict[int, tuple[str, int]]:
    """Index of an address, counted from `first` → (file, offset), for the addresses in a process's mapped files."""
    mapped, found = mappings(pid), {}
    for number, address in enumerate(addresses, first):
        place = next((m for m in mapped if m.start <= address < m.end), None)
        if place:
            found[number] = place.path, place.file_offset(address)
    return found


class Watcher:
    """Tracks the target's threads, attaches probes to what it loads, and resumes it after the BPF programs stopped it."""

    def __init__(
        self,
        kernel: Kernel,
        loader: LibbpfLoader,
        probes: Attachments,
        guard: Guard,
        layouts: dict[str, Any],
        events: tuple[Event, ...] = (),
        everyone: bool = False,
    ):
        self.kernel, self.loader, self.probes, self.guard = kernel, loader, probes, guard
        self.everyone, self.files = everyone, Files()
        self.counters = Counters(kernel, {name: loader.map_fd(name) for name in ("counters", "counted")}, events)
        self.threads: dict[int, dict[str, Any]] = {}
        self.qnn: dict[str, Any] | None = None
        self.qnn_logs = SerializedLogs()
        self.slots: dict[tuple[Any, ...], dict[int, tuple[str, int]]] = {}
        self.dtypes = {name: dtype_from_json(layouts[name]["fields"], layouts[name]["bytes"]) for name in WATCHED}
        self.names = {layouts[name]["kind"]: name for name in WATCHED}
        self.kinds = tuple(self.names)
        self.held = Held()
        self._began_ns = self._attaching_ns = 0  # of the current answer
        self.learning: dict[int, Learning] = {}
        self.loop: Loop | None = None
        teaches = any(probe.teaches and probe.wanted(probes.levels) for engine in probes.engines for probe in engine.probes)
        self.llamacpp = constant("ENGINE_LLAMACPP")
        self.learns, self.stands_since, self.graphs_since = constant("LEARN_PLACES" if teaches else "LEARN_NOTHING"), 0, 0
        self._rounds = self.learnt_ns = 0
        self.backends = enumeration("backend_id")
        self._watch_for_libraries()
        self._declare_backends()
        self.set_chosen()

    def _watch_for_libraries(self) -> None:
        declared = {prefix for engine in self.probes.engines for prefix in engine.libraries} | self.probes.named.prefixes()
        prefixes = [one for one in sorted(declared) if not any(one != other and one.startswith(other) for other in declared)]
        most, longest = constant("MAX_PATTERNS"), struct_of("pattern")["text"].itemsize
        if len(prefixes) > most:
            raise TracerError(f"{len(prefixes)} library prefixes declared, {most} can be watched: choose fewer engines")
        for index, prefix in enumerate(prefixes):
            raw = prefix.encode()[:longest]
            self.loader.update("patterns", struct.pack("<I", index), packed("pattern", length=len(raw), text=raw))

    def _declare_backends(self) -> None:
        """Pass the identities of ggml's backends to the BPF programs."""
        declared = [pair for engine in self.probes.engines for pair in engine.backends.items()]
        for name, identity in declared:
            number = self.backends.get(f"BACKEND_{name.upper()}")
            if number is None:
                known = ", ".join(each.removeprefix("BACKEND_").lower() for each in self.backends)
                raise EngineError(f"unknown backend {name}; known: {known}")
            self.loader.update("backends", bytes.fromhex(identity)[:8], struct.pack("<I", number))

    def set_chosen(self, stop: int = 1) -> None:
        """Pass settings to the BPF programs: see struct settings in bpf/structs.h."""
        levels = self.probes.levels - self.probes.shed_levels
        mine = (self.probes.state[engine.name].operators for engine in self.probes.engines if engine.id == self.llamacpp)
        names = max(mine, key=len, default=[])
        loop = self.loop or Loop(0, 0, 0, 0, 0)
        self._rounds += 1
        wanted = packed(
            "settings",
            mul_mat_id=names.index("MUL_MAT_ID") if "MUL_MAT_ID" in names else constant("UNKNOWN_OPERATOR"),
            stop=stop,
            operators="operator" in levels,
            experts="expert" in levels,
            learn=self.learns,
            blind=self.probes.is_blind(),
            node_at=loop.node_at,
            node_more=loop.node_more,
            graph_at=loop.graph_at,
            everyone=self.everyone,
            n_counters=len(self.counters.events),
            infer_faults=not has_tracepoint("filemap", FAULT_BEGINS),
            round=self._rounds,
            files="io" in levels,
            steps="token" in levels,
            one_call=self.loop is not None and loop.last_call == loop.call,
            spared=bool(self.probes.spared),
        )
        self.loader.update("chosen", struct.pack("<I", 0), wanted)

    def attach_mapped(self, pid: int) -> None:
        """Attach to every engine library or statically linked engine that a process has mapped."""
        self._note_files(pid)
        try:
            program = executable(pid)
        except FileNotFoundError:  # the process has ended meanwhile
            return
        for path in sorted({mapping.path for mapping in mappings(pid)}):
            self._attach_file(path, path == program)
        if "qnn" in self.probes.levels:
            self._find_qnn_tables(pid)

    def _note_files(self, pid: int) -> None:
        if "io" in self.probes.levels:
            self.files.note_mapped(pid)

    def _attach_file(self, path: str, is_executable: bool = False) -> None:
        if self.probes.attach_file(path, is_executable):
            self.set_chosen()

    def note_thread(self, tid: int, pid: int, name: str = "") -> None:
        """Remember a thread under its latest known name."""
        with contextlib.suppress(OSError):
            name = name or Path(f"/proc/{pid}/task/{tid}/comm").read_text().strip()
        row = self.threads.setdefault(tid, {"tid": tid, "pid": pid, "name": ""})
        row["pid"], row["name"] = pid, name or row["name"]

    def name_living_threads(self) -> None:
        """Refresh the names of threads that still exist."""
        for pid in {row["pid"] for row in self.threads.values()}:
            for tid in self.threads.keys() & set(tasks(pid)):
                self.note_thread(tid, pid)

    def answer(self, slot: np.ndarray) -> None:
        """Act on a slot of the ring whose kind is in `kinds`."""
        self._began_ns, self._attaching_ns = time.monotonic_ns(), self.probes.attaching_ns
        name = self.names[int(slot[KIND_OFFSET : KIND_OFFSET + 2].view("<u2")[0])]
        dtype = self.dtypes[name]
        record = slot[RING_HEADER_BYTES : RING_HEADER_BYTES + dtype.itemsize].view(dtype)[0]
        pid = int(record["pid"])
        with urgent() if name in HOLDING else contextlib.nullcontext():
            try:
                getattr(self, f"_on_{name}")(record, pid)
            except ProbeError as error:  # as when the process, and with it its view of the files, has ended meanwhile
                self.probes.warnings.append(str(error))
                if name in HOLDING:
                    self._continue(record, pid)

    def _on_task_fork(self, record: np.void, pid: int) -> None:
        """Track a new thread; it is named at its end or with the living ones: now is too early, and there may be thousands."""
        child = int(record["child_tid"])
        self.counters.add(child)
        is_process = not os.path.isdir(f"/proc/{pid}/task/{child}") and os.path.isdir(f"/proc/{child}")
        if is_process:
            self.note_thread(child, child)
            self.guard.add(child)
        else:
            self.threads.setdefault(child, {"tid": child, "name": ""})["pid"] = pid

    def _on_task_exit(self, record: np.void, pid: int) -> None:
        tid = int(record["tid"])
        self.note_thread(tid, pid, text(record["comm"]))
        self.counters.remove(tid)
        if tid == pid:
            self.guard.remove(pid)

    def _on_task_exec(self, record: np.void, pid: int) -> None:
        self.note_thread(int(record["tid"]), pid)
        self._note_files(pid)
        with contextlib.suppress(OSError):
            self._attach_file(executable(pid), is_executable=True)
        self._continue(record, pid)

    def _on_library(self, record: np.void, pid: int) -> None:
        with contextlib.suppress(OSError):
            path = opened(pid, text(record["path"]))
            if os.path.isfile(way_to(path)) and self.probes.attach_file(path) + self.probes.attach_beside(path):
                self.set_chosen()
        self._continue(record, pid)

    def _on_io_file(self, record: np.void, pid: int) -> None:
        where = int(record["fd"]), int(record["dev"]), int(record["ino"])
        self.files.note_open(pid, *where, text(record["name"]))

    def _on_qnn_table(self, record: np.void, pid: int) -> None:
        """Collect a provider's slots; with the last part, attach the probes."""
        engine = next(engine for engine in self.probes.engines if engine.name == "qnn")
        if int(record["provider"]) == constant("NO_PROVIDER"):
            reason = "provided no function table: its calls are not recorded"
            self.probes.warnings.append(f"{engine.name}: a library in process {pid} {reason}")
            return
        table, backend = ("qnn", int(record["provider"])), int(record["backend"])
        if int(record["first"]) == 0:
            self.slots.pop((pid, table), None)  # another library's provider with this number
        slots = self._collect(record, pid, table)
        if int(record["first"]) < (constant("TABLE_PARTS") - 1) * constant("TABLE_SLOTS"):
            return
        self._probe_qnn_table(engine, slots, tuple(record["api"].tolist()), backend)
        if record["last"]:
            self._continue(record, pid)

    def _find_qnn_tables(self, pid: int) -> None:
        """Probe the function tables that a process obtained before it was followed."""
        for engine in (each for each in self.probes.engines if each.name == "qnn"):
            libraries = {path for path in self.probes.libraries(engine) if not engine.inspects(path)}
            providers = qnn_tables.find(pid, libraries, engine.api_major)
            for provider in providers:
                self._probe_qnn_table(engine, places(pid, provider.slots), provider.api, provider.backend)
            if libraries and not providers:
                reason = "no function table was found in its memory: calls through an earlier one are not recorded"
                self.probes.warnings.append(f"{engine.name}: process {pid} has mapped QNN, but {reason}")

    def _probe_qnn_table(self, engine: Engine, slots: dict[int, tuple[str, int]], api: tuple[int, ...], backend: int) -> None:
        self.probes.attach_table(engine, slots, api, backend)
        self.set_chosen()
        is_htp = backend == constant("QNN_HTP")
        emulator = is_htp and machine.describe()["arch"] in QNN_EMULATED_MACHINES
        if self.qnn is None or is_htp:
            self.qnn = {"backend": backend, "api": list(api), "emulator": emulator}

    def _on_qnn_callback(self, record: np.void, pid: int) -> None:
        """Probe the function that asynchronous executions call at their end, if it is in a file."""
        engine = next(engine for engine in self.probes.engines if engine.name == "qnn")
        site = self._site(pid, int(record["address"]))
        if site:
            self.probes.attach_callback(engine, "notify", *site)
        else:
            reason = "is not in a file: the end of these executions is not recorded"
            self.probes.warnings.append(f"{engine.name}: the function that graphExecuteAsync notifies {reason}")
        self._continue(record, pid)

    def _on_qnn_reader(self, record: np.void, pid: int) -> None:
        """Probe QNN's event readers, unless other probes record everything that the caller reads."""
        site = self._site(pid, int(record["address"]))
        if not site or not self.probes.stands_for_spared(site[0]):
            self.probes.attach_spared()
            self.set_chosen()
        self._continue(record, pid)

    def _on_qnn_log(self, record: np.void, pid: int) -> None:
        with contextlib.suppress(OSError):
            self.qnn_logs.note(os.path.join(os.readlink(f"/proc/{pid}/cwd"), text(record["path"])))

    def _on_api_table(self, record: np.void, pid: int) -> None:
        """Collect a function table; with its last part, attach the probes."""
        table = text(record["table"])
        slots = self._collect(record, pid, (table, int(record["address"])))
        if record["last"]:
            self.probes.attach_api(table, slots, int(record["version"]))
            self._continue(record, pid)

    def _collect(self, record: np.void, pid: int, table: Any) -> dict[int, tuple[str, int]]:
        """Slot → (file, offset) from a table's parts received so far."""
        slots = self.slots.setdefault((pid, table), {})
        slots |= places(pid, record["slots"].tolist(), int(record["first"]))
        return slots

    def _on_site(self, record: np.void, pid: int) -> None:
        """Learn where the graph loop is, probe it, and remove the learning probes once both have seen a whole graph."""
        if self.loop:
            self.graphs_since += int(record["last"] and record["ts"] > self.stands_since)
            if self.graphs_since >= GRAPHS and self.learns:
                self._learn("LEARN_NOTHING", self.loop)
                self.probes.retire_teachers(self._llamacpp())
            return
        learning = self.learning.setdefault(pid, Learning())
        loop = learning.observe(record)
        if not loop and self.learns and learning.hopeless:
            self._learn("LEARN_NOTHING", None)
        site, last = (self._site(pid, loop.call), self._site(pid, loop.last_call)) if loop else (None, None)
        if not (loop and site and last and self.learns):
            return
        self._learn("LEARN_ENDS", loop)
        place = frame_place(loop.node_at)
        why = f"the graph loop's own call, passed once per operator; learnt from its first graphs (node in {place})"
        sites = {"loop": site} if site == last else {"loop": site, "last": last}
        stands = False
        with self.probes.planner.reported():
            stands = self.probes.attach_learnt(self._llamacpp(), sites, why)
        self.set_chosen()  # makes all graphs new again, so that the probes note nodes that are new to them
        self.stands_since = time.monotonic_ns()
        if not stands:
            self._learn("LEARN_NOTHING", None)

    def _on_misfit(self, record: np.void, pid: int) -> None:
        """Stop recording what cannot be recorded correctly with this build."""
        self._learn("LEARN_NOTHING", None)
        self.probes.give_up(self._llamacpp(), MISFITS[name_in("misfit_of", int(record["what"]))])
        self.set_chosen()

    def is_learning(self) -> bool:
        """Whether probes that still search for an engine's graph loop are attached."""
        return self.learns != constant("LEARN_NOTHING") and bool(self.probes.teachers())

    def disturbances(self) -> list[dict[str, Any]]:
        """The manifest's `disturbances`: when placing, learning and slow probes disturbed the target.

        Learning probes that have seen no barrier stay for good, as the steady probes of a program with a single thread.
        """
        now = time.monotonic_ns()
        learnt = any(learning.sites for learning in self.learning.values())
        learning = [span(self.probes.teaching_ns, self.learnt_ns or now, LEARNING)] if learnt else []
        return [*self.probes.disturbances.spans, *learning, *(self.probes.stepped_teachers(now) if not self.loop else [])]

    def _learn(self, what: str, loop: Loop | None) -> None:
        """Have the programs learn what a name of enum learning says, and use a loop."""
        self.learns, self.loop = constant(what), loop
        self.learnt_ns = 0 if self.learns else time.monotonic_ns()
        self.set_chosen()

    def _llamacpp(self) -> Engine:
        return next(engine for engine in self.probes.engines if engine.id == self.llamacpp)

    def _site(self, pid: int, address: int) -> tuple[str, int] | None:
        """(file, offset) of an address in a process; None if the process is gone."""
        return places(pid, [address]).get(0)

    def _continue(self, record: np.void, pid: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
        self.held.stops += 1
        self.held.ns += time.monotonic_ns() - int(record["ts"])
        self.probes.disturbances.add(int(record["ts"]), time.monotonic_ns())
        self.held.waking_ns += self._began_ns - int(record["ts"])
        self.held.attaching_ns += self.probes.attaching_ns - self._attaching_ns
