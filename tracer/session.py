"""One tracing session: probes on, records to disk, probes off, whatever happens to the target or to us."""

import contextlib
import os
import select
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracer import machine
from tracer.attach import Attachments
from tracer.calibration import measure
from tracer.engines import Engine
from tracer.functions import Function
from tracer.libbpf import Kernel
from tracer.loaders import LOADERS, check_architecture, layouts
from tracer.manifest import account, compose
from tracer.paths import Owner
from tracer.perf_events import mount_tracefs
from tracer.recording import STREAMS, write_manifest
from tracer.ring import Ring
from tracer.target import Followed, Guard, Target, children, tasks
from tracer.watch import Watcher

DRAIN_SECONDS = 0.02
MANIFEST_SECONDS = 1.0
GRACE_SECONDS = 1.0  # Ctrl-C reaches the target too: see how it ends


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
    functions: list[Function] = field(default_factory=list)


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
        self.layouts = layouts()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo.close()

    def load(self) -> None:
        """Load programs, measure what probes cost here, map the rings, attach the kernel's tracepoints."""
        mount_tracefs()
        self.kernel = Kernel()
        self.probes = Attachments(self.options.engines, self.options.levels, self.options.owner, self.options.functions)
        sizes = dict.fromkeys(STREAMS, self.options.ring_bytes)
        self.loader = LOADERS[self.options.loader](self.kernel, self.probes.programs() | {"empty"}, sizes)
        self.undo.callback(self.loader.close)
        self.probes.loader = self.loader
        self.undo.callback(self.probes.detach)
        self.probes.costs = measure(self.loader.program_fd("empty"))
        self.watcher = Watcher(self.kernel, self.loader, self.probes, self.guard, self.layouts)
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
                self.watcher.note_thread(tid, pid)
            if isinstance(target, Followed):
                self.watcher.attach_mapped(pid)
        self.save_manifest("recording")
        target.release()

    def drain(self) -> bool:
        """One pass over both rings; True where the target did something that was answered."""
        picked = [(name, slot) for name, ring in self.rings.items() for slot in ring.drain(self.watcher.kinds)]
        for _, slot in picked:
            self.watcher.answer(slot)
        return any(name == "details" for name, _ in picked)

    def run(self, progress: Any) -> None:
        """Record until the target ends, the time is up, or someone asks us to stop."""
        deadline = time.monotonic() + self.options.duration_s if self.options.duration_s else float("inf")
        next_manifest = time.monotonic() + MANIFEST_SECONDS
        alive = True
        while alive and time.monotonic() < deadline:
            if self.stop_requested and self.target.started_here:
                self.stop_requested = False
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            elif self.stop_requested:
                break
            with contextlib.suppress(InterruptedError):
                self.poll.poll(DRAIN_SECONDS)
            alive = self.target.poll()
            self.drain()
            if time.monotonic() >= next_manifest:
                next_manifest += MANIFEST_SECONDS
                self.save_manifest("recording")
                progress(self)
        self.drain()

    def finish(self) -> None:
        """Stop recording, drain what is left, and complete the manifest.

        Removing a probe waits for the kernel's grace period, a tenth of a second each: where the target is gone that
        goes on in the background while results are written.
        """
        self.watcher.set_chosen(stop=0)
        for tid in self.watcher.threads:
            self.kernel.delete(self.loader.map_fd("threads"), struct.pack("<I", tid))
        detaching = threading.Thread(target=self.probes.detach)
        detaching.start()
        self.undo.callback(detaching.join)
        if self.target.exit_code is None:
            detaching.join()
        while self.drain():
            pass
        self.clocks.append(machine.clocks())
        self.watcher.name_living_threads()
        self.probes.warnings += self.probes.named.missing()
        self.save_manifest("complete")
        self.target.check_start()

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
        total = np.sum([ring.counts for ring in self.rings.values()], axis=0)
        return {name: int(total[layout["kind"]]) for name, layout in self.layouts.items() if total[layout["kind"]]}

    def save_manifest(self, state: str) -> None:
        """Write down everything known so far."""
        about = {
            "state": state,
            "started_utc": self.started_utc,
            "duration_ns": time.monotonic_ns() - self.target.started,
            "command": self.target.command,
            "target": {"pid": self.target.pid, "uid": self.options.owner.uid, "exit_code": self.target.exit_code},
            "loader": self.loader.name,
            "levels": sorted(self.options.levels),
            "clocks": self.clocks,
            "records": self.counts(),
            "lost": self.losses(),
            "layouts": self.layouts,
        }
        cost = account(self.probes.rows, self.probes.costs, lambda name: self.kernel.program_stats(self.loader.program_fd(name)))
        cost |= {"target_cpu_ns": self.target.cpu_ns, "held_ns": self.watcher.held_ns}
        write_manifest(self.folder, compose(about, self.watcher, cost))
