"""`views top`: what a turn shows of a recording that grows is what the tables of the whole recording say of its last seconds."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analyzer.questions import step_time
from analyzer.questions.figures import cache_hits
from analyzer.questions.live import MOST_HELD, TOP, LiveTables, Snapshot
from analyzer.questions.summary import operator_summary, token_summary
from analyzer.tables.store import build_tables
from tracer.recording.format import RING_HEADER_BYTES, Recording, write_manifest
from workloads.recordings import LLAMA_OPERATORS, MAIN, WORKER, make_manifest, records

OPS, STEP_NS, START = 12, 2_000_000, 10**12
NO_SEQ, UNKNOWN = 2**64 - 1, 2**32 - 1
LOADER = 403
Streams = dict[str, np.ndarray]


def decoding(steps: int, engine: int = 2, seed: int = 0) -> Streams:
    """Slots in order of time: a prefill, then decode steps of OPS operators on two threads, with experts, loads, scheduling."""
    rng = np.random.default_rng(seed)
    begin = START + np.cumsum(STEP_NS + rng.integers(0, STEP_NS // 4, steps))
    end = begin + rng.integers(STEP_NS // 2, STEP_NS, steps)
    op = (begin[:, None] + 10_000 + np.arange(OPS) * ((end - begin - 20_000) // OPS)[:, None]).ravel()
    length = np.repeat((end - begin - 20_000) // OPS, OPS)
    number = np.tile(np.arange(OPS), steps)
    tell = {"seq": np.arange(steps), "phase": np.where(np.arange(steps) == 0, 1, 2), "position": np.arange(steps)}
    silent = {"seq": NO_SEQ, "phase": 0, "position": UNKNOWN, "n_tokens": np.where(np.arange(steps) == 0, 8, 1)}
    parts = [(begin, "token_begin", {"engine": engine, "n_tokens": 1, **(tell if engine == 1 else silent)})]
    parts.append((end, "token_end", {"engine": engine, "seq": tell["seq"] if engine == 1 else NO_SEQ}))
    for tid, shift in ((MAIN, 0), (WORKER, 500)):
        kind = {"engine": engine, "tid": tid, "tensor": (number + 1) * 64, "type": number % 4 + 1, "layer": number // 4}
        parts.append((op + shift, "op_begin", kind))
        parts.append((op + length * 3 // 4 + shift, "op_wait", {"engine": engine, "tid": tid}))
        parts.append((op + length * 7 // 8 + shift, "op_end", {"engine": engine, "tid": tid, "tensor": (number + 1) * 64}))
    runs = op[number % 4 == 2] + 1000
    expert = {"engine": engine, "layer": np.tile(np.arange(OPS // 4), steps), "expert": rng.integers(0, 8, len(runs))}
    parts.append((runs, "expert_begin", {**expert, "n_tokens": 1, "cache": rng.integers(1, 4, len(runs))}))
    parts.append((runs + 5_000, "expert_end", expert))
    load = {name: column if name == "engine" else column[::9] for name, column in expert.items()} | {"tid": LOADER, "bytes": 4096}
    parts.append((runs[::9] + 2_000, "load_begin", {**load, "reason": 1}))
    parts.append((runs[::9] + rng.integers(3_000, STEP_NS, len(runs[::9])), "load_end", load))
    asleep = end[::3] + 1_000
    away = {"prev_tid": MAIN, "next_tid": 0, "prev_state": 1, "comm": b"swapper"}
    parts.append((asleep, "sched_switch", away))
    parts.append((asleep + 90_000, "sched_waking", {"tid": 0, "pid": 0, "woken_tid": MAIN, "comm": b"main"}))
    parts.append((asleep + 95_000, "sched_switch", {"tid": 0, "pid": 0, "prev_tid": 0, "next_tid": MAIN, "comm": b"main"}))
    slots = np.concatenate([records(kind, len(ts), ts=ts, **fields) for ts, kind, fields in parts])
    order = np.argsort(np.concatenate([ts for ts, _, _ in parts]), kind="stable")
    names = [f"ffn_moe_gate-{n}" if n % 4 == 2 else f"attn-{n}" for n in range(OPS)]
    described = {"tensor": np.arange(1, OPS + 1) * 64, "type": np.arange(OPS) % 4 + 1, "name": [n.encode() for n in names]}
    return {"events": slots[order], "details": records("tensor", OPS, engine=engine, ts=START, **described)}


def times(slots: np.ndarray) -> np.ndarray:
    return slots[:, RING_HEADER_BYTES : RING_HEADER_BYTES + 8].copy().view("<i8")[:, 0]


def start(folder: Path, streams: Streams, state: str = "recording") -> None:
    """A recording that has its details, and no events yet."""
    write_manifest(folder, make_manifest(state=state))
    (folder / "details.bin").write_bytes(streams["details"].tobytes())
    (folder / "events.bin").write_bytes(b"")


def append(folder: Path, slots: np.ndarray) -> None:
    with (folder / "events.bin").open("ab") as file:
        file.write(slots.tobytes())


def expected(folder: Path, seconds: float) -> dict[str, Any]:
    """The same figures from all tables of the whole recording, cut to the steps that ended in the last seconds."""
    tables = build_tables(Recording(folder))
    steps = tables["tokens"]
    ids = steps.loc[steps["end_ns"] >= int(steps["end_ns"].max() - seconds * 1e9), "token_id"]
    cut = {name: frame[frame["token_id"].isin(ids)] for name, frame in tables.items() if "token_id" in frame}
    shares = tables["op_threads"]
    row = pd.Index(cut["operators"]["op_id"]).get_indexer(shares["op_id"])
    cut["operators"] = cut["operators"].assign(op_id=np.arange(len(cut["operators"])))
    cut = {**tables, **cut, "op_threads": shares[row >= 0].assign(op_id=row[row >= 0])}
    time, counted = step_time.step_time(cut), cache_hits(cut)
    return {
        "tokens": token_summary(cut),
        "time": step_time.time_summary(cut, time),
        "operators": operator_summary(cut, step_time.operator_times(cut, time), TOP).get("top", []),
        "hits": int(counted["hits"].sum()),
        "misses": int(counted["misses"].sum()),
    }


def flat(tokens: dict[str, Any], time: dict[str, Any], operators: list[dict[str, Any]]) -> pd.DataFrame:
    """Figures as one row; the cells of a phase by part and cause."""
    sums = {**time.get("phases", {}), **({"run": time["run"]} if time else {})}
    cells = {name: {f"{cell['part']} {cell['cause']}": cell["ms"] for cell in each["cells"]} for name, each in sums.items()}
    named = {name: {**each, "cells": cells[name]} for name, each in sums.items()}
    return pd.json_normalize([{"tokens": tokens, "time": named, "operators": dict(enumerate(operators))}])


def same(now: Snapshot, folder: Path, seconds: float) -> None:
    """Each figure but for the last bits of sums that were added up in another order."""
    want = expected(folder, seconds)
    assert (now.hits, now.misses) == (want["hits"], want["misses"])
    shown, wanted = (flat(each["tokens"], each["time"], each["operators"]) for each in (vars(now), want))
    pd.testing.assert_frame_equal(shown, wanted, check_like=True, check_dtype=False, rtol=1e-9)


@pytest.mark.parametrize("engine", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_turn_shows_what_the_tables_of_the_whole_recording_say(tmp_path: Path, engine: int) -> None:
    """More than 100,000 events in eight unequal pieces, one of them in the middle of a slot."""
    streams = decoding(1300, engine)
    assert len(streams["events"]) > 100_000
    start(tmp_path, streams)
    live, rng = LiveTables(tmp_path, seconds=1.0), np.random.default_rng(engine)
    ends = np.sort(rng.integers(1, len(streams["events"]), 7)).tolist()
    for begin, end in zip([0, *ends], [*ends, len(streams["events"])], strict=True):
        append(tmp_path, streams["events"][begin:end])
        same(live.snapshot(), tmp_path, 1.0)
        assert live.snapshot() == live.snapshot()


def test_what_is_held_follows_the_open_steps_not_the_recording(tmp_path: Path) -> None:
    streams = decoding(1300)
    start(tmp_path, streams)
    live, held = LiveTables(tmp_path, seconds=0.5), []
    for piece in np.array_split(streams["events"], 6):
        append(tmp_path, piece)
        live.snapshot()
        held.append(len(live.slots["events"]))
    quarter_second = len(streams["events"]) * 0.25e9 / np.ptp(times(streams["events"]))
    assert max(held) < 1.5 * quarter_second and live.read["events"] == len(streams["events"])
    assert len(live.slots["details"]) == OPS


def test_a_long_recording_is_looked_at_from_its_last_seconds_on(tmp_path: Path) -> None:
    streams = decoding(900)
    start(tmp_path, streams, state="complete")
    append(tmp_path, streams["events"])
    live = LiveTables(tmp_path, seconds=0.4)
    same(live.snapshot(), tmp_path, 0.4)
    assert live.counted < 900 / 2


def test_records_of_several_cpus_may_come_out_of_order(tmp_path: Path) -> None:
    streams = decoding(400)
    start(tmp_path, streams)
    slots, rng = streams["events"], np.random.default_rng(3)
    late = np.argsort(times(slots) + rng.integers(0, 5_000_000, len(slots)), kind="stable")
    live = LiveTables(tmp_path, seconds=0.3)
    for piece in np.array_split(slots[late], 5):
        append(tmp_path, piece)
        now = live.snapshot()
    same(now, tmp_path, 0.3)


def test_a_recording_that_begins_anew_is_read_from_its_begin(tmp_path: Path) -> None:
    streams = decoding(300)
    start(tmp_path, streams)
    append(tmp_path, streams["events"])
    live = LiveTables(tmp_path, seconds=1.0)
    live.snapshot()
    start(tmp_path, streams)
    append(tmp_path, streams["events"][:4000])
    same(live.snapshot(), tmp_path, 1.0)


def test_an_open_step_with_more_records_than_are_held_is_counted_when_it_ends(tmp_path: Path) -> None:
    streams = decoding(40)
    start(tmp_path, streams)
    slots = streams["events"]
    inside = int(np.flatnonzero(slots[:, 24] == 1)[20]) + 30
    append(tmp_path, slots[:inside])
    live = LiveTables(tmp_path, seconds=10.0)
    before = live.snapshot().tokens["steps"]
    filler = np.repeat(records("sched_wakeup", 1, ts=times(slots)[inside], woken_tid=9), MOST_HELD + 10, axis=0)
    append(tmp_path, filler)
    live.snapshot()
    assert len(live.open) == 1 and len(live.slots["events"]) <= MOST_HELD + 100
    append(tmp_path, slots[inside:])
    after = live.snapshot().tokens
    assert before < after["steps"] == 40 and after["incomplete"] == 0


def test_without_steps_the_last_seconds_of_operators_are_shown(tmp_path: Path) -> None:
    streams = decoding(300)
    start(tmp_path, streams)
    kinds = streams["events"][:, 24].astype(int)
    append(tmp_path, streams["events"][~np.isin(kinds, (1, 2))])
    live = LiveTables(tmp_path, seconds=0.2)
    live.snapshot()
    now = live.snapshot()
    assert now.tokens == {} and now.time == {}
    assert {row["type"] for row in now.operators} <= set(LLAMA_OPERATORS) and now.operators
