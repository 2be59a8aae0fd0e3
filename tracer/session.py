"""One tracing session: probes on, records to disk, probes off, whatever happens to the target or to us."""

import contextlib
import os
import select
import signal
import struct
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tracer import machine
from tracer.attach import Attachments
from tracer.calibration import measure
from tracer.engines import Engine
from tracer.errors import TracerError
from tracer.libbpf import Kernel
from tracer.loaders import LOADERS, PATTERN, check_architecture, layouts
from tracer.paths import Owner
from tracer.perf_events import mount_tracefs
from tracer.recording import RING_HEADER_BYTES, SCHEMA_VERSION, STREAMS, dtype_from_json, text, write_manifest
from tracer.ring import Ring
from tracer.target import Followed, Guard, Target, children, mapped_files, mapping_of, tasks

DRAIN_SECONDS = 0.02
MANIFEST_SECONDS = 1.0
MAX_PATTERNS = 16
LAST_TABLE_PART = 48  # first slot of the last of the parts that the kernel side sends
QNN_EMULATED_MACHINES = ("x86_64",)
WATCHED = ("task_fork", "task_exit", "task_exec", "library", "qnn_table")


@dataclass
class Options:
    """What the user chose."""

    output: Path
    engines: list[Engine]
    levels: set[str]
    loader: str = "libbpf"
    ring_bytes: int = 32 << 20
    duration_s: float = 0.0
    owner: Owner = field(default_factory=lambda: Owner(0, 0, "root", "/root"))


class Session:
    """Holds everything that must be undone at the end; use as a context manager."""

    def __init__(self, options: Options):
        check_architecture(machine.describe()["arch"])
        self.options = options
        self.folder = options.output
        self.guard = Guard()
        self.undo = contextlib.ExitStack()
        self.undo.callback(self.guard.close)
        self.stop_requested = False
        self.threads: dict[int, dict[str, Any]] = {}
        self.qnn: dict[str, Any] | None = None
        self.providers: dict[int, dict[str, Any]] = {}
        self.layouts = layouts()
        self.dtypes = {n: dtype_from_json(row["fields"], row["bytes"]) for n, row in self.layouts.items()}
        self.numbers = {self.layouts[n]["kind"]: n for n in WATCHED}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo.close()

    def load(self) -> None:
        """Load programs, measure what probes cost here, map the rings, attach the kernel's tracepoints."""
        mount_tracefs()
        self.kernel = Kernel()
        self.probes = Attachments(self.options.engines, self.options.levels, self.options.owner)
        sizes = dict.fromkeys(STREAMS, self.options.ring_bytes)
        self.loader = LOADERS[self.options.loader](self.kernel, self.probes.programs() | {"empty"}, sizes)
        self.undo.callback(self.loader.close)
        self.probes.loader = self.loader
        self.undo.callback(self.probes.detach)
        self.costs = measure(self.loader.program_fd("empty"))
        self._choose()
        stats = self.kernel.enable_stats()
        if stats >= 0:
            self.undo.callback(os.close, stats)
        self.rings = {
            name: Ring(self.loader.map_fd(name), self.options.ring_bytes, width, self.folder / f"{name}.bin")
            for name, width in STREAMS.items()
        }
        self.poll = select.epoll()
        for ring in self.rings.values():
            self.undo.callback(ring.close)
            self.poll.register(ring.fd, select.EPOLLIN)
        self.undo.callback(self.poll.close)
        self.probes.attach_kernel()

    def _choose(self) -> None:
        """Tell the kernel side which libraries to watch for."""
        prefixes = sorted({p for engine in self.options.engines for p in engine.libraries})
        if len(prefixes) > MAX_PATTERNS:
            raise TracerError(f"{len(prefixes)} library prefixes declared, the kernel side holds {MAX_PATTERNS}: choose fewer engines")
        for index, prefix in enumerate(prefixes):
            raw = prefix.encode()[:28]
            self.kernel.update(self.loader.map_fd("patterns"), struct.pack("<I", index), PATTERN.pack(len(raw), raw))
        self._set_chosen(0xFFFFFFFF)

    def _set_chosen(self, mul_mat_id: int, stop: int = 1) -> None:
        self.kernel.update(self.loader.map_fd("chosen"), struct.pack("<I", 0), struct.pack("<II", mul_mat_id, stop))

    def follow(self, target: Target | Followed) -> None:
        """Mark the target's threads as ours, attach to what it has mapped already, and let it go."""
        self.target = target
        self.clocks = [machine.clocks()]
        self.started_utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        family = [target.pid, *children(target.pid)] if isinstance(target, Followed) else [target.pid]
        for pid in family:
            self.guard.add(pid)
            for tid in tasks(pid):
                self.kernel.update(self.loader.map_fd("threads"), struct.pack("<I", tid), struct.pack("<I", 1))
                self._note_thread(tid, pid)
            if isinstance(target, Followed):
                self.attach_mapped(pid)
        self.write_manifest("recording")
        target.release()

    def attach_mapped(self, pid: int) -> None:
        """Attach to every engine library, or statically linked engine, that a process has mapped."""
        executable = os.path.realpath(f"/proc/{pid}/exe")
        for path in mapped_files(pid):
            self._attach_file(path, path == executable)

    def _attach_file(self, path: str, is_executable: bool = False) -> None:
        if self.probes.attach_file(path, is_executable):
            names = self.probes.state.get("llamacpp")
            if names and "MUL_MAT_ID" in names.operators:
                self._set_chosen(names.operators.index("MUL_MAT_ID"))

    def _note_thread(self, tid: int, pid: int, name: str = "") -> None:
        with contextlib.suppress(OSError):
            name = name or Path(f"/proc/{pid}/task/{tid}/comm").read_text().strip()
        row = self.threads.setdefault(tid, {"tid": tid, "pid": pid, "name": ""})
        row["pid"], row["name"] = pid, name or row["name"]

    def drain(self) -> bool:
        """One pass over both rings; True where the target did something that we must answer. Detail slots first: they may hold a stop."""
        answered = False
        for name, ring in self.rings.items():
            for slot in ring.drain(tuple(self.numbers)):
                kind = self.numbers[int(slot[24:26].view("<u2")[0])]
                size = self.dtypes[kind].itemsize
                record = slot[RING_HEADER_BYTES : RING_HEADER_BYTES + size].view(self.dtypes[kind])[0]
                getattr(self, f"_on_{kind}")(record)
                answered |= name == "details"
        return answered

    def _on_task_fork(self, record: np.void) -> None:
        child, parent = int(record["child_tid"]), int(record["pid"])
        is_process = os.path.isdir(f"/proc/{child}") and not os.path.isdir(f"/proc/{parent}/task/{child}")
        self._note_thread(child, child if is_process else parent)
        if is_process:
            self.guard.add(child)

    def _on_task_exit(self, record: np.void) -> None:
        tid, pid = int(record["tid"]), int(record["pid"])
        self._note_thread(tid, pid, text(record["comm"]))

    def _on_task_exec(self, record: np.void) -> None:
        pid = int(record["pid"])
        self._note_thread(int(record["tid"]), pid)
        self._attach_file(os.path.realpath(f"/proc/{pid}/exe"), is_executable=True)
        self._continue(pid)

    def _on_library(self, record: np.void) -> None:
        pid = int(record["pid"])
        with contextlib.suppress(OSError):
            path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), text(record["path"]))
            if os.path.isfile(path):
                self._attach_file(path)
        self._continue(pid)

    def _on_qnn_table(self, record: np.void) -> None:
        pid, provider = int(record["pid"]), int(record["provider"])
        state = self.providers.setdefault(provider, {"slots": {}})
        first = int(record["first"])
        for index, address in enumerate(record["slots"]):
            site = mapping_of(pid, int(address)) if address else None
            if site:
                state["slots"][first + index] = site
        if first < LAST_TABLE_PART:
            return
        api, backend = tuple(int(part) for part in record["api"]), int(record["backend"])
        engine = next(engine for engine in self.options.engines if engine.name == "qnn")
        self.probes.attach_table(engine, state["slots"], api, backend)
        emulator = machine.describe()["arch"] in QNN_EMULATED_MACHINES
        self.qnn = {"backend": backend, "api": list(api), "emulator": emulator}
        if record["last"]:
            self._continue(pid)

    @staticmethod
    def _continue(pid: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)

    def run(self, progress: Any) -> None:
        """Record until the target ends, the time is up, or someone asks us to stop."""
        deadline = time.monotonic() + self.options.duration_s if self.options.duration_s else float("inf")
        next_manifest = time.monotonic() + MANIFEST_SECONDS
        alive = True
        while alive and not self.stop_requested and time.monotonic() < deadline:
            with contextlib.suppress(InterruptedError):
                self.poll.poll(DRAIN_SECONDS)
            alive = self.target.poll()
            self.drain()
            if time.monotonic() >= next_manifest:
                next_manifest += MANIFEST_SECONDS
                self.write_manifest("recording")
                progress(self)
        self.drain()

    def finish(self) -> None:
        """Stop recording, drain what is left, and complete the manifest.

        Removing a probe waits for the kernel's grace period, a tenth of a second each: where the target is gone that
        goes on in the background while results are written.
        """
        self.account()
        self._set_chosen(0xFFFFFFFF, stop=0)
        for tid in self.threads:
            self.kernel.delete(self.loader.map_fd("threads"), struct.pack("<I", tid))
        detaching = threading.Thread(target=self.probes.detach)
        detaching.start()
        self.undo.callback(detaching.join)
        if self.target.exit_code is None:
            detaching.join()
        while self.drain():
            pass
        self.clocks.append(machine.clocks())
        for pid in {row["pid"] for row in self.threads.values()}:
            for tid in tasks(pid):
                if tid in self.threads:
                    self._note_thread(tid, pid)
        self.write_manifest("complete")
        self.target.check_start()

    def account(self) -> None:
        """Fill in hits and costs of every probe from the kernel's own counts."""
        self.bpf_ns, self.trap_ns = 0, 0.0
        counted: set[str] = set()
        for row in self.probes.rows:
            row.hits, inside = self.kernel.program_stats(self.loader.program_fd(row.program))
            row.ns_per_hit = self.costs["return"] if row.at == "return" else self.costs.get(row.cost, 0.0)
            if row.program not in counted:
                counted.add(row.program)
                self.bpf_ns += inside
                self.trap_ns += row.hits * row.ns_per_hit

    def saw_engine(self) -> bool:
        """Whether any engine's code was found."""
        return any(row.engine != "kernel" for row in self.probes.rows)

    def losses(self) -> dict[str, int]:
        """Records that found a ring full, by kind, counted in the kernel."""
        found = {}
        for name, layout in self.layouts.items():
            raw = self.kernel.lookup(self.loader.map_fd("lost"), struct.pack("<I", layout["kind"]), 8)
            found[name] = struct.unpack("<Q", raw)[0]
        return {name: count for name, count in found.items() if count}

    def counts(self) -> dict[str, int]:
        """Records written so far, by kind."""
        total = sum(ring.counts for ring in self.rings.values())
        return {name: int(total[layout["kind"]]) for name, layout in self.layouts.items() if total[layout["kind"]]}

    def write_manifest(self, state: str) -> None:
        """Write down everything known so far."""
        self.account()
        try:
            program = f"moescope {version('moescope')}"
        except PackageNotFoundError:
            program = "moescope"
        engines = {
            engine.name: {
                "id": engine.id,
                "operators": self.probes.state[engine.name].operators,
                "graphs": list(engine.graphs),
                "libraries": [{"path": p, "build_id": b} for p, b in self.probes.state[engine.name].libraries.items()],
            }
            for engine in self.options.engines
        }
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "program": program,
            "state": state,
            "started_utc": self.started_utc,
            "duration_ns": time.monotonic_ns() - self.target.started,
            "machine": machine.describe(),
            "command": self.target.command,
            "target": {"pid": self.target.pid, "uid": self.options.owner.uid, "exit_code": self.target.exit_code},
            "loader": self.loader.name,
            "levels": sorted(self.options.levels),
            "engines": engines,
            "qnn": self.qnn,
            "probes": self.probes.to_json(),
            "warnings": self.probes.warnings,
            "clocks": self.clocks,
            "threads": list(self.threads.values()),
            "records": self.counts(),
            "lost": self.losses(),
            "cost": {
                "trap_ns": int(self.trap_ns),
                "bpf_ns": self.bpf_ns,
                "tracer_cpu_ns": time.process_time_ns(),
                "target_cpu_ns": self.target.cpu_ns,
                "calibration_ns": self.costs,
            },
            "layouts": self.layouts,
        }
        write_manifest(self.folder, manifest)
