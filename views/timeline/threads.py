"""The threads that the timeline shows, with their processes and names.

Perfetto lists a process with every thread that it saw. Threads of the program without recorded work (helpers of libraries,
the emulator's threads) and threads of other programs, known only from scheduling, would hide the rest: each kind is in one
process, so that the UI shows it as one collapsed line. That of the others is 0, the idle threads' own, since their scheduling
has no process of theirs; the program's helpers have a pid that no process has. Thread ids remain the kernel's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.records.manifest import command_of
from analyzer.records.schema import Tables
from analyzer.tables.sched import LARGEST_ID, listed_threads
from views.timeline.columns import integer_codes, rows_of

INT32 = 1 << 31
HELPERS, OTHERS = LARGEST_ID + 1, 0
"""Process ids of threads without recorded work, and of other programs' threads."""
WORK = "work of"
"""What distinguishes the name of a thread's slices from that of its states."""
TOKEN_TRACKS = rf"^{WORK} tokens(: | \(|$)"
"""The work of threads that compute steps, as `thread_roles` names them; the UI adds their ids."""
DOING = ("tokens", "graphs", "operators", "experts", "loads", "qnn_executes", "qnn_calls", "npu_batches", "calls", "samples")
WORKING = (*DOING, "reads", "faults", "waits")
"""Tables of the program's work by thread; reads and page faults also occur on threads without other work."""


@dataclass
class Process:
    """A process in the timeline; threads are (tid, name)."""

    pid: int
    name: str
    command: list[str]
    threads: list[tuple[int, str]]


def shown_processes(manifest: dict[str, Any], tables: Tables, pids: dict[int, int], target: int) -> list[Process]:
    """Every process, the target first; `pids` is the result of `thread_pids`."""
    names = {tid: name for tid, _, name in listed_threads(manifest)}
    rows = tables["threads"]
    names |= dict(zip(rows["tid"].tolist(), rows["name"].tolist(), strict=True))
    named = thread_roles(tables, pids, names)
    processes = []
    for pid in sorted({*pids.values(), target}, key=lambda pid: (pid != target, pid)):
        command = command_of(manifest) if pid == target else []
        threads = [(tid, named[tid]) for tid in sorted(named) if pids[tid] == pid]
        processes.append(Process(pid, Path(command[0]).name if command else names.get(pid, ""), command, threads))
    helpers = [(tid, names.get(tid, "")) for tid in sorted(pids) if tid not in named]
    others = [(tid, name) for tid, name in sorted(names.items()) if tid not in pids and 0 < tid < INT32]
    processes.append(Process(HELPERS, "threads without recorded work", [], helpers))
    processes.append(Process(OTHERS, "other processes", [], others))
    return [process for process in processes if process.threads or process.pid == target]


def target_group(manifest: dict[str, Any]) -> str:
    """The UI's name for the track group of the traced program."""
    command = command_of(manifest) or [""]
    return f"{Path(command[0]).name} {(manifest.get('target') or {}).get('pid', '')}"


def thread_roles(tables: Tables, pids: dict[int, int], names: dict[int, str]) -> dict[int, str]:
    """tid → role and name of every thread with recorded work, and of each process's first thread."""
    worked = {table: set(integer_codes(tables[table]["tid"].to_numpy())[1].tolist()) for table in (*DOING, "op_threads")}
    roles: dict[int, str] = {}
    for tid in sorted({tid for tids in worked.values() for tid in tids} & pids.keys() | pids.keys() & set(pids.values())):
        name = names.get(tid, "")
        role = role_of(tid, pids[tid], worked)
        roles[tid] = f"{role}: {name}" if role and name not in ("", role) else role or name
    return roles


def role_of(tid: int, pid: int, worked: dict[str, set[int]]) -> str:
    """A thread's role for the model."""
    if tid in worked["tokens"]:
        return "tokens"
    if tid in worked["op_threads"] or tid in worked["operators"] or tid in worked["graphs"]:
        return "worker"
    if tid in worked["loads"]:
        return "expert loader"
    if tid in worked["qnn_executes"] or tid in worked["qnn_calls"]:
        return "NPU calls"
    return "main" if tid == pid else ""


def pid_by_tid(frame: pd.DataFrame) -> dict[int, int]:
    """tid → pid of the threads in a table's rows."""
    tid, pid = (frame[column].to_numpy(np.int64) for column in ("tid", "pid"))
    fresh = np.flatnonzero(np.append(True, tid[1:] != tid[:-1])[: len(tid)])
    return dict(zip(tid[fresh].tolist(), pid[fresh].tolist(), strict=True))


def thread_pids(manifest: dict[str, Any], tables: Mapping[str, pd.DataFrame]) -> dict[int, int]:
    """tid → pid of every thread to draw; threads of other programs appear only on cpu tracks."""
    pids: dict[int, int] = {}
    for table in WORKING:
        pids |= pid_by_tid(tables[table])
    operators, threads = tables["operators"], tables["op_threads"]
    code, tids = integer_codes(threads["tid"].to_numpy(np.int64))
    some = np.empty(len(tids), np.int64)
    some[code] = np.arange(len(code))
    rows = rows_of(operators["op_id"], threads["op_id"].iloc[some])
    owner = operators["pid"].to_numpy()[rows[rows >= 0]]
    pids |= dict(zip(np.asarray(tids)[rows >= 0].tolist(), owner.tolist(), strict=True))
    target = tables["threads"][tables["threads"]["target"]]
    pids |= dict(zip(target["tid"].tolist(), target["pid"].tolist(), strict=True))
    pids |= {tid: pid for tid, pid, _ in listed_threads(manifest)}
    return {tid: pid for tid, pid in pids.items() if 0 <= tid < INT32 and 0 <= pid < INT32}
