"""Scheduling as ftrace bundles: Perfetto then draws its own CPU tracks, thread states and wakers.

Switches travel in the compact form, where a switch's `prev` is the `next` before it on that cpu. Only switches that involve
the traced program are recorded. Where two others changed in between, that change is written at the moment the next recorded
switch proves it: the times of others are upper bounds, after which they sleep. A thread of the program that exits leaves its
cpu unrecorded; it leaves when `thread_states` says that it stopped running. The program's own times are exact.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from views.protobuf import Messages, field_bytes, packed_varints, tag, varint_bytes
from views.slices import Tables

TRACE_PACKET, FTRACE_EVENTS = 1, 1
CPU, EVENT, COMPACT = 1, 2, 4
SWITCH_TIMESTAMP, SWITCH_STATE, SWITCH_PID, SWITCH_PRIO, INTERN_TABLE, SWITCH_COMM = 1, 2, 3, 4, 5, 6
SCHED_SWITCH, SCHED_WAKING = 4, 20
UNKNOWN_PRIO, SLEEPING, EXITED = 120, 1, 0x10
BATCH = 1 << 16
FOREVER = np.iinfo(np.int64).max


def known_ends(switches: pd.DataFrame, states: pd.DataFrame) -> np.ndarray:
    """When the thread that each switch put on the cpu stopped running, where `thread_states` knows; -1 else."""
    running = states[states["state"] == "running"].drop_duplicates(["tid", "begin_ns"])
    keys = switches[["next_tid", "ts_ns"]].set_axis(["tid", "begin_ns"], axis=1)
    return keys.merge(running, "left", on=["tid", "begin_ns"])["end_ns"].fillna(-1).to_numpy(np.int64)


def chained(switches: pd.DataFrame, states: pd.DataFrame) -> pd.DataFrame:
    """The switches of one cpu with the unrecorded ones filled in: between other threads, and away from threads that exit."""
    after, until = switches["prev_tid"].shift(-1, fill_value=-1), switches["ts_ns"].shift(-1, fill_value=FOREVER)
    unexplained = np.flatnonzero(switches["next_tid"] != after)
    left, after, until = switches.iloc[unexplained], after.iloc[unexplained], until.iloc[unexplained]
    end = known_ends(left, states)
    known = (end >= left["ts_ns"]) & (end <= until)
    filled = left.assign(
        ts_ns=np.where(known, end, until),
        prev_tid=left["next_tid"],
        next_tid=after.clip(lower=0),
        prev_state=np.where(known, EXITED, SLEEPING),
        next_prio=UNKNOWN_PRIO,
    )[known | (until < FOREVER)]
    return pd.concat([switches, filled.set_axis(filled.index + 0.5)]).sort_index()


def first_switch(row: pd.Series, boot: int, name: str) -> bytes:
    """The first switch of a cpu in full, from which the compact ones go on."""
    values = ((2, row.prev_tid), (3, max(row.prev_prio, 0)), (4, max(row.prev_state, 0)))
    switch = b"".join(tag(field, 0) + varint_bytes(int(value)) for field, value in values)
    switch += field_bytes(5, name.encode())
    switch += b"".join(
        tag(field, 0) + varint_bytes(int(value)) for field, value in ((6, row.next_tid), (7, max(row.next_prio, 0)))
    )
    event = tag(1, 0) + varint_bytes(int(row.ts_ns) + boot) + tag(2, 0) + varint_bytes(int(row.prev_tid))
    return field_bytes(EVENT, event + field_bytes(SCHED_SWITCH, switch))


def compact(switches: pd.DataFrame, boot: int, names: dict[int, str]) -> bytes:
    """A batch of switches in packed columns."""
    tids = switches["next_tid"].to_numpy(np.int64)
    comm, labels = pd.factorize(np.array([names.get(tid, "") for tid in tids.tolist()], object))
    columns = (
        (SWITCH_TIMESTAMP, np.diff(switches["ts_ns"].to_numpy(np.int64), prepend=-boot)),
        (SWITCH_STATE, np.maximum(switches["prev_state"].to_numpy(np.int64), 0)),
        (SWITCH_PID, tids),
        (SWITCH_PRIO, np.maximum(switches["next_prio"].to_numpy(np.int64), 0)),
        (SWITCH_COMM, comm),
    )
    table = b"".join(field_bytes(INTERN_TABLE, str(label).encode()) for label in labels)
    return field_bytes(COMPACT, b"".join(field_bytes(field, packed_varints(values)) for field, values in columns) + table)


def wakings(rows: pd.DataFrame, boot: int) -> bytes:
    """A batch of wakings in full: the compact form would lose who woke."""
    waking = Messages(len(rows)).varint(2, rows["next_tid"].to_numpy(np.int64))
    waking.varint(3, np.maximum(rows["next_prio"].to_numpy(np.int64), 0)).varint(
        5, np.maximum(rows["target_cpu"].to_numpy(np.int64), 0)
    )
    event = Messages(len(rows)).varint(1, rows["ts_ns"].to_numpy(np.int64) + boot).varint(2, rows["prev_tid"].to_numpy(np.int64))
    event.message(SCHED_WAKING, waking)
    return Messages(len(rows)).message(EVENT, event).tobytes()


def bundle(cpu: int, body: bytes) -> bytes:
    """One packet of one cpu."""
    return field_bytes(TRACE_PACKET, field_bytes(FTRACE_EVENTS, tag(CPU, 0) + varint_bytes(cpu) + body))


def packets(tables: Tables, boot: int) -> Iterator[tuple[int, bytes]]:
    """(events, bytes) per cpu and batch; `boot` is CLOCK_BOOTTIME - CLOCK_MONOTONIC."""
    names = dict(zip(tables["threads"]["tid"].tolist(), tables["threads"]["name"].tolist(), strict=True)) | {0: "swapper"}
    for cpu, rows in tables["sched"].groupby("cpu", sort=True):
        number = int(str(cpu))
        rows = rows.sort_values("ts_ns", kind="stable")
        recorded = rows[rows["event"] == "switch"].reset_index(drop=True)
        switches = chained(recorded, tables["thread_states"])
        woken = rows[rows["event"] == "waking"]
        if len(switches):
            first = switches.iloc[0]
            yield 1, bundle(number, first_switch(first, boot, names.get(int(first.next_tid), "")))
        for start in range(1, len(switches), BATCH):
            part = switches.iloc[start : start + BATCH]
            yield len(part), bundle(number, compact(part, boot, names))
        for start in range(0, len(woken), BATCH):
            part = woken.iloc[start : start + BATCH]
            yield len(part), bundle(number, wakings(part, boot))
