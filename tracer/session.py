"""One tracing session: attaches probes, writes records, and removes the probes whatever happens to target or tracer."""

import contextlib
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracer.control.budget import CHEAP, Sampling
from tracer.control.qos import Quality
from tracer.control.status import Reading
from tracer.control.switching import Switch
from tracer.control.unhit import Unhit
from tracer.engines import Engine, with_needed
from tracer.errors import RequirementError
from tracer.kernel.accounting import Accounting
from tracer.kernel.definitions import layouts, struct_of
from tracer.kernel.features import has_ring_buffers, option_state
from tracer.kernel.libbpf import Kernel
from tracer.kernel.loaders import LOADERS, check_architecture
from tracer.kernel.perf_buffer import Doorbell, PerfBuffer
from tracer.kernel.pmc import Event
from tracer.kernel.ring import Ring
from tracer.manifest import account, compose
from tracer.probes.attach import Attachments
from tracer.probes.calibration import UNKNOWN, measure
from tracer.probes.functions import Function
from tracer.probes.plan import KERNEL
from tracer.probes.uprobes import has_uprobes
from tracer.recording import machine
from tracer.recording.checksums import METHOD
from tracer.recording.cost import cost_of
from tracer.recording.drain import SLOW_S, WATCHFUL_S, Drain
from tracer.recording.format import STREAMS, write_manifest
from tracer.recording.heat import Heat
from tracer.recording.paths import Owner
from tracer.recording.tokens import Misses
from tracer.recording.user_files import act_for
from tracer.target import model_config, models
from tracer.target.guard import Guard
from tracer.target.process import Followed, Target, children, runs, tasks
from tracer.target.watch import Watcher

PROGRESS_SECONDS = 1.0
FIRST_MANIFEST_S, RAREST_MANIFEST_S = 5.0, 60.0  # so that an interrupted recording has one; each costs milliseconds of CPU time
KERNEL_LEVELS = {"sched", "io"}  # these need no probe in a program
GRACE_SECONDS = 1.0  # Ctrl-C reaches the target too: wait this long for it to end


@dataclass
class Options:
    """The options of a session."""

    output: Path
    engines: list[Engine]
    levels: set[str]
    loader: str = "libbpf"
    buffer: str = "ring"
    ring_bytes: int = 32 << 20
    duration_s: float = 0.0
    tokens: int = 0
    only_slower_ns: int = 0
    min_tps: float = 0.0
    max_overhead: float = 0.0
    given: dict[str, Any] = field(default_factory=dict)
    sched: str = "target"
    pmc: tuple[Event, ...] = ()
    btf: Path | None = None
    owner: Owner = field(default_factory=lambda: Owner(0, 0, "root", "/root"))
    functions: list[Function] = field(default_factory=list)


class Session:
    """A context manager that owns everything that must be undone at the end."""

    def __init__(self, options: Options):
        check_architecture(machine.describe()["arch"])
        self.options = options
        self.folder = options.output
        self.guard = Guard()
        self.undo = contextlib.ExitStack()
        self.undo.callback(self.guard.close)
        self.stop_requested = 0  # the signal that asks
        self.interrupted = False
        self.ended_ns = 0
        self.losses_at_end: dict[str, int] = {}
        self.model_files: list[Path] = []
        self.models: list[dict[str, Any]] = []
        self.layouts = layouts()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo.close()

    def load(self) -> None:
        """Load the programs, measure what a probe hit costs on this machine, map the rings, and attach to kernel tracepoints."""
        self.kernel = Kernel()
        without = self.go_without()
        self.options.levels, brought = with_needed(self.options.levels)
        self.probes = Attachments(self.options.engines, self.options.levels, self.options.functions)
        self.probes.warnings += without + brought
        sizes = dict.fromkeys(STREAMS, self.options.ring_bytes)
        wanted = self.probes.programs() | ({"empty"} if has_uprobes() else set())
        loader = LOADERS[self.options.loader]
        self.loader = loader(self.kernel, wanted, sizes, self.options.buffer, self.options.btf)
        self.undo.callback(self.loader.close)
        self.probes.loader, self.probes.remove = self.loader, self.guard.detach
        self.probes.drop(self.loader.refused)
        self.undo.callback(self.probes.detach)
        can_measure = "empty" in wanted - self.probes.refused
        self.probes.costs = measure(self.loader.program_fd("empty")) if can_measure else UNKNOWN
        chosen = self.options.pmc, self.options.sched == "all"
        self.watcher = Watcher(self.kernel, self.loader, self.probes, self.guard, self.layouts, *chosen)
        self.undo.callback(self.watcher.counters.close)
        self.accounting = Accounting(self.kernel, self.loader)
        self.undo.callback(self.accounting.close)
        self.unhit = Unhit(self.probes, self.accounting.runs, self.watcher.set_chosen)
        o = self.options
        watched = o.min_tps or o.max_overhead or o.only_slower_ns or o.tokens
        slowest = WATCHFUL_S if watched else SLOW_S
        with o.owner.acting():
            self.drain = Drain(self._buffers(), self.folder, self.layouts, o.only_slower_ns, slowest)
        self.undo.callback(self.drain.close)
        if self.options.buffer == "perf":
            self.wake_by_doorbell()
        self.switch = Switch(self.probes, self.watcher.set_chosen)
        self.undo.callback(self.switch.close)
        self.quality = Quality(o.min_tps, self.switch) if o.min_tps else None
        if self.quality:
            self.drain.misses = self.quality.misses = Misses(self.layouts)
        self.sampling = Sampling(o.max_overhead, self.switch, self.spent_ns) if o.max_overhead else None
        self.probes.attach_kernel()

    def wake_by_doorbell(self) -> None:
        """Wake the drain by a perf event on kernels without ring buffers."""
        doorbell = Doorbell(self.kernel, self.loader.map_fd("doorbell"))
        self.undo.callback(doorbell.close)
        for fd in doorbell.fds:
            self.drain.wake_on(fd)

    def go_without(self) -> list[str]:
        """Drop options that this kernel cannot serve; returns a message for each."""
        missing = []
        if self.options.buffer == "ring" and not has_ring_buffers(self.kernel.lib):
            self.options.buffer = "perf"
            missing.append("this kernel has no BPF ring buffers (Linux 5.8): perf buffers are used")
        if not has_uprobes():
            self.options.engines, self.options.functions = [], []
            self.options.levels &= KERNEL_LEVELS
            option = option_state("CONFIG_UPROBE_EVENTS")
            if not self.options.levels:
                raise RequirementError(f"this kernel has no uprobes ({option}), so only the levels sched and io are available")
            missing.append(f"this kernel has no uprobes ({option}): no engine is recorded, only the levels sched and io")
        return missing

    def _buffers(self) -> dict[str, Any]:
        size, maps = self.options.ring_bytes, {name: self.loader.map_fd(name) for name in STREAMS}
        if self.options.buffer == "perf":
            return {name: PerfBuffer(self.kernel, maps[name], size, width) for name, width in STREAMS.items()}
        return {name: Ring(maps[name], size, width) for name, width in STREAMS.items()}

    def follow(self, target: Target | Followed) -> None:
        """Register the target's threads, and attach to the files that it has mapped already."""
        self.target = target
        if isinstance(target, Followed):
            act_for(target.owner)
        self.clocks = [machine.clocks()]
        self.heat = Heat(self.layouts["heat"], self.drain.add)
        self.heat.turn()
        self.began_ns, self.cpu_before_ns = time.monotonic_ns(), time.process_time_ns()
        with contextlib.suppress(OSError):  # before Linux 5.3: its end is noticed at the next turn
            ending = os.pidfd_open(target.pid)
            self.undo.callback(os.close, ending)
            self.drain.wake_on(ending, once=True)
        self.started_utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        new_thread = bytes(struct_of("traced").itemsize)
        family = [target.pid, *children(target.pid)] if isinstance(target, Followed) else [target.pid]
        for pid in family:
            self.guard.add(pid)
            for tid in tasks(pid):
                self.loader.update("threads", struct.pack("<I", tid), new_thread)
                self.watcher.note_thread(tid, pid)
                self.watcher.counters.add(tid)
            if isinstance(target, Followed):
                self.watcher.attach_mapped(pid)
        if target.started_here:
            self.probes.look_ahead(target.command)
        self.model_files = models.named(target.command, target.folder())
        self.save_manifest("recording")

    def turn(self, last: bool = False) -> bool:
        """Empty the buffers once and answer the target; True if anything was answered."""
        picked = self.drain.turn(self.watcher.kinds, last)
        for slot in picked:
            self.watcher.answer(slot)
        return bool(picked)

    def run(self, progress: Callable[["Session"], None]) -> None:
        """Record until the target ends, a limit is reached, or someone asks us to stop."""
        began = time.monotonic()
        deadline = began + self.options.duration_s if self.options.duration_s else float("inf")
        next_progress, next_manifest = began + PROGRESS_SECONDS, began + FIRST_MANIFEST_S
        alive, limit_reached, looked = True, False, False
        while alive and not limit_reached:
            if self.stop_requested and self.target.started_here:
                if self.stop_requested == signal.SIGTERM:  # Ctrl-C has reached the target, too
                    self.target.end()
                self.stop_requested, self.interrupted = 0, True
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            elif self.stop_requested:
                break
            self.drain.sleep(min(deadline, self.accounting.due()) - time.monotonic())
            alive = self.target.poll()
            self.turn()
            self.unhit.turn()
            self.accounting.turn()
            if self.quality:
                self.quality.turn(self.drain.tokens.finished, self.accounting.of)
            if self.sampling:
                self.sampling.turn(self.drain.tokens.finished, self.watcher.is_learning())
            if alive and not self.model_files and not looked and self.drain.tokens.steps:
                self.model_files, looked = models.largest_in_use(self.target.pid), True
            now = time.monotonic()
            if now >= next_manifest:
                next_manifest = now + min(now - began, RAREST_MANIFEST_S)
                self.watcher.name_living_threads()
                self.save_manifest("recording")
            if time.monotonic() >= next_progress:
                next_progress += PROGRESS_SECONDS
                self.heat.turn()
                progress(self)
            limit_reached = time.monotonic() >= deadline or 0 < self.options.tokens <= self.drain.tokens.steps

    def finish(self, failure: BaseException | None = None) -> None:
        """Stop recording, drain what is left, and complete the manifest, unless recording ended by a failure.

        Removing a probe waits for a grace period of the kernel, a tenth of a second each. If the target is gone, removal
        continues in the background while results are written.
        """
        self.ended_ns = time.monotonic_ns()
        self.heat.turn(last=True)
        self.switch.close()
        self.watcher.set_chosen(stop=0)
        for tid in self.watcher.threads:
            self.kernel.delete(self.loader.map_fd("threads"), struct.pack("<I", tid))
        detaching = threading.Thread(target=self.probes.detach)
        detaching.start()
        self.undo.callback(detaching.join)
        if self.target.exit_code is None:
            detaching.join()
        while self.turn():
            pass
        self.turn(last=True)
        self.clocks.append(machine.clocks())
        self.watcher.name_living_threads()
        self.probes.warnings += self.probes.named.missing() + self.survivors()
        if "qnn" in self.options.levels:
            ended = self.target.exit_code is not None
            with self.options.owner.acting():
                self.probes.warnings += self.watcher.qnn_logs.keep(self.folder, ended, self.options.owner.uid)
        self.models = models.describe(self.model_files)
        self.losses_at_end = self.losses()
        self.target.check_start()
        if failure:
            self.probes.warnings.append(f"the recording is not complete: the tracer failed ({type(failure).__name__}: {failure})")
        self.save_manifest("recording" if failure else "complete")

    def survivors(self) -> list[str]:
        """A line for each child process that outlives the target; it is not followed further."""
        if self.target.poll():
            return []
        pids = {int(row["pid"]) for row in self.watcher.threads.values()} - {self.target.pid}
        what = "was started by the target and outlives it; it is not recorded any more"
        return [f"process {pid} {what}; follow it with `tracer attach --pid {pid}`" for pid in sorted(pids) if runs(pid)]

    def saw_engine(self) -> bool:
        """Whether any engine's code was found."""
        return any(row.engine != KERNEL for row in self.probes.rows)

    def losses(self) -> dict[str, int]:
        """Records lost because a ring was full, by kind, as counted in the kernel."""
        counts = {}
        for name, layout in self.layouts.items():
            raw = self.kernel.lookup(self.loader.map_fd("lost"), struct.pack("<I", layout["kind"]), 8)
            counts[name] = struct.unpack("<Q", raw)[0]
        return {name: count for name, count in counts.items() if count}

    def reading(self) -> Reading:
        """Current counters for the status line."""
        steps, seen, lost = self.drain.tokens.decode_steps, self.drain.seen, sum(self.losses().values())
        levels = sorted(self.options.levels - self.probes.shed_levels)
        cost = cost_of(account(self.probes.rows, self.probes.costs, self.accounting.of))
        return Reading(steps, seen, lost, int(cost.probes), tuple(levels))

    def save_manifest(self, state: str) -> None:
        """Write down everything known so far."""
        self.drain.seal()
        about = {
            "checksums": METHOD,
            "state": state,
            "started_utc": self.started_utc,
            "duration_ns": (self.ended_ns or time.monotonic_ns()) - self.target.started,
            "command": self.target.command,
            "model": model_config.of_command(self.target.command),
            "models": self.models,
            "target": {"pid": self.target.pid, "uid": self.options.owner.uid, "exit_code": self.target.exit_code},
            "tracer_pid": os.getpid(),
            "loader": self.loader.name,
            "buffer": self.options.buffer,
            "options": self.options.given,
            "levels": sorted(self.options.levels),
            "level_changes": self.switch.changes,
            "sampling": self.sampling.to_json() if self.sampling else None,
            "step_latency": self.quality.to_json() if self.quality else None,
            "sched": self.options.sched,
            "clocks": self.clocks,
            "heat": self.heat.found,
            "records": self.drain.counts(),
            "lost": self.losses(),
            "lost_by_cpu": self.drain.lost_by_cpu(),
            "dropped": self.drain.filter.to_json() if self.drain.filter else None,
            "layouts": self.layouts,
        }
        self.cost = account(self.probes.rows, self.probes.costs, self.accounting.of)
        self.cost |= {"target_cpu_ns": self.target.cpu_ns, **self.watcher.held.to_json(), **self.own_cost()}
        manifest = compose(about, self.watcher, self.cost)
        with self.options.owner.acting():
            write_manifest(self.folder, manifest)

    def spent_ns(self) -> int:
        """Time in probes of cheap levels on the target's threads, from the accounting, plus the tracer's CPU time, in ns.

        Both count in full as delay of the engine: one thread hits these probes while the others wait for it, and an engine
        that uses all CPUs waits for the thread that the tracer displaced.
        """
        cheap = account([row for row in self.probes.rows if row.level in CHEAP], self.probes.costs, self.accounting.of)
        return cheap["trap_cold_ns"] + cheap["bpf_ns"] + time.process_time_ns()

    def own_cost(self) -> dict[str, float]:
        """Costs of recording other than probes: the tracer's share of one core, and bytes on disk."""
        written, records = self.drain.bytes_written(), int(self.drain.written.sum())
        wall, cpu = time.monotonic_ns() - self.began_ns, time.process_time_ns() - self.cpu_before_ns
        share = cpu / wall if wall else 0.0
        cost = {"tracer_recording_cpu_ns": cpu, "tracer_core_share": round(share, 5)}
        return {**cost, "written_bytes": written, "bytes_per_record": written / max(records, 1)}
