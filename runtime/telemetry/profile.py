"""Four kinds of profile, enabled by one option: `profile=DIR`, `--profile DIR`.

    DIR/host.csv            host stage timers: the stages of this process by thread, in microseconds
    DIR/qnn/*.csv           QNN's own events, basic or detailed, in QNN's units
    DIR/qnn/*_qnn.log       QNN's serialized log of the same sessions, for Qualcomm's viewer
    DIR/trace.json          host stages and QNN events in one timeline (Chrome's format, which Perfetto opens)

QNN's events have no host time. An execution's events are drawn within the host's call that caused them: the n-th execution in a
session's file is the session's n-th profiled run. Cycles are not time: nodes share the accelerator's time in proportion to their
cycles, in the order of the file, and are marked as such.
"""

import csv
import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import RequestError

HOST, QNN = "host.csv", "qnn"
TRACE = "trace.json"
EXECUTE, DEVICE = "QNN (execute) time", "Accelerator (execute) time"
OTHER_WORK = ("(load binary)", "(finalize)", "(deinit)")
NPU_THREADS = {"QNN Execute": 1, "QNN Device": 2, "QNN Node": 3}
CPU_PROCESS, NPU_PROCESS = 1, 2


class Stage(NamedTuple):
    """A host thread's stage from `begin_ns` to `end_ns`; `csv`: the profile file of an NPU execution."""

    name: str
    layer: int
    expert: int
    thread: str
    begin_ns: int
    end_ns: int
    csv: str = ""


class Timers:
    """Collects stages, from any thread."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def add(self, name: str, begin_ns: int, end_ns: int, layer: int = -1, expert: int = -1, csv: str = "") -> None:
        """Add a finished stage."""
        self.stages.append(Stage(name, layer, expert, threading.current_thread().name, begin_ns, end_ns, csv))


@dataclass
class Execution:
    """QNN's events of one execution: (name, value, unit), and its nodes (name, cycles) in order."""

    events: list[tuple[str, int, str]] = field(default_factory=list)
    nodes: list[tuple[str, int]] = field(default_factory=list)

    def us(self, name: str) -> int | None:
        """An event's value in microseconds; None if there is no such event."""
        return next((value for event, value, unit in self.events if event == name and unit == "US"), None)


def write_profile(timers: Timers, folder: Path, npu: str) -> Path:
    """Write the collected profile; `npu` names the NPU. Returns the trace's path; raises RequestError if it cannot be written."""
    stages = sorted(timers.stages, key=lambda stage: stage.begin_ns)
    events = [*_host_events(stages), *_npu_events(stages, folder / QNN)]
    names = [_name_event("process_name", CPU_PROCESS, 0, "Host"), _name_event("process_name", NPU_PROCESS, 0, npu)]
    names += [_name_event("thread_name", CPU_PROCESS, tid, thread) for thread, tid in _number_threads(stages).items()]
    names += [_name_event("thread_name", NPU_PROCESS, tid, thread) for thread, tid in NPU_THREADS.items()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / HOST).open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["stage", "layer", "expert", "thread", "begin_us", "duration_us"])
            for s in stages:
                took = f"{(s.end_ns - s.begin_ns) / 1e3:.3f}"
                rows.writerow([s.name, s.layer, s.expert, s.thread, f"{s.begin_ns / 1e3:.3f}", took])
        partial = folder / f".{TRACE}.partial"
        partial.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": names + events}) + "\n", encoding="utf-8")
        os.replace(partial, folder / TRACE)
    except OSError as error:
        raise RequestError(f"{folder} cannot be written ({error.strerror}): choose another folder with --profile") from None
    return folder / TRACE


def read_executions(path: Path) -> list[Execution]:
    """The executions in one of QNN's CSV files: a root event that the current one already has begins the next."""
    runs: list[Execution] = []
    current: Execution | None = None
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file):
            name, level, unit = (str(row.get(key) or "") for key in ("Event Identifier", "Event Level", "Unit of Measurement"))
            value = str(row.get("Time") or "")
            if not value.isdigit():
                continue
            if level != "ROOT":
                if current is not None:
                    current.nodes.append((name, int(value)))
                continue
            if any(part in name for part in OTHER_WORK):
                current = None
                continue
            if current is None or any(name == event for event, _, _ in current.events):
                current = Execution()
                runs.append(current)
            current.events.append((name, int(value), unit))
    return runs


def _number_threads(stages: Iterable[Stage]) -> dict[str, int]:
    return dict(zip(dict.fromkeys(stage.thread for stage in stages), count(1), strict=False))


def _host_events(stages: list[Stage]) -> Iterator[dict[str, Any]]:
    threads = _number_threads(stages)
    for s in stages:
        place = {name: value for name, value in (("layer", s.layer), ("expert", s.expert)) if value >= 0}
        yield _slice_event(s.name, CPU_PROCESS, threads[s.thread], s.begin_ns / 1e3, (s.end_ns - s.begin_ns) / 1e3, place)


def _npu_events(stages: list[Stage], folder: Path) -> Iterator[dict[str, Any]]:
    by_file: defaultdict[str, list[Stage]] = defaultdict(list)
    for stage in stages:
        if stage.csv:
            by_file[stage.csv].append(stage)
    for name, runs in by_file.items():
        if (folder / name).is_file():
            for run, execution in zip(runs, read_executions(folder / name), strict=False):
                yield from _execution_slices(name.rsplit("_", 1)[0], run, execution)


def _execution_slices(graph: str, run: Stage, execution: Execution) -> Iterator[dict[str, Any]]:
    """QNN's execution in the middle of the host's call, the device in the middle of that, nodes one after another."""
    begin, end = run.begin_ns / 1e3, run.end_ns / 1e3
    events = {name if unit == "US" else f"{name} [{unit.lower()}]": value for name, value, unit in execution.events}
    for thread, event in (("QNN Execute", EXECUTE), ("QNN Device", DEVICE)):
        took = execution.us(event)
        if took is None:
            continue
        begin, end = _centred(begin, end, took)
        yield _slice_event(graph, NPU_PROCESS, NPU_THREADS[thread], begin, end - begin, events if thread == "QNN Execute" else {})
    cycles, span = sum(value for _, value in execution.nodes), end - begin
    for name, value in execution.nodes:
        width = span * value / cycles if cycles else 0.0
        if value:
            node = {"cycles": value, "drawn": "by its share of the cycles"}
            yield _slice_event(name.removesuffix(" (cycles)"), NPU_PROCESS, NPU_THREADS["QNN Node"], begin, width, node)
        begin += width


def _centred(begin: float, end: float, took: float) -> tuple[float, float]:
    took = min(took, end - begin)
    first = begin + (end - begin - took) / 2
    return first, first + took


def _slice_event(name: str, process: int, thread: int, begin: float, took: float, details: dict[str, Any]) -> dict[str, Any]:
    """A slice of the trace in whole nanoseconds; begin and end are rounded alike, so that neighbours touch and never overlap."""
    first, last = round(begin * 1e3), round((begin + took) * 1e3)
    when = {"ts": first / 1e3, "dur": (last - first) / 1e3}
    return {"name": name, "ph": "X", "pid": process, "tid": thread, **when, "args": details}


def _name_event(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
