"""Recordings whose truth is known in closed form, and the tables that must come of them."""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analyzer.questions.summary import summarize
from analyzer.records.schema import TABLES
from analyzer.tables.store import build_tables, load_tables
from moescope.__main__ import main
from tests.conftest import drawn, rest_long
from tracer.recording.format import Recording, RecordingError
from workloads.recordings import MAIN, PID, WORKER, Writer, make_manifest, runtime

NO_SEQ, NO_POSITION = 2**64 - 1, 2**32 - 1
SHARED = settings(max_examples=drawn(25), suppress_health_check=[HealthCheck.function_scoped_fixture])


def tables_of(writer: Writer, folder, **changes) -> dict[str, pd.DataFrame]:
    return build_tables(Recording(writer.write(folder, **changes)))


def test_every_table_has_the_declared_columns_even_when_nothing_was_recorded(tmp_path):
    tables = tables_of(Writer(), tmp_path)
    assert list(tables) == list(TABLES)
    for name, columns in TABLES.items():
        assert [(c.name, c.dtype) for c in columns] == [(c, str(t)) for c, t in tables[name].dtypes.items()]
        assert name == "threads" or len(tables[name]) == 0


def test_the_runtimes_step_becomes_token_operators_graph_expert_and_load(tmp_path):
    t = tables_of(runtime(), tmp_path)
    assert t["tokens"]["duration_ns"].tolist() == [1000] * 3
    assert t["tokens"]["phase"].tolist() == ["prefill", "decode", "decode"]
    assert t["tokens"][["result", "maj_flt", "position"]].to_numpy().tolist() == [[90, 1, 0], [91, 1, 1], [92, 1, 2]]
    ops = t["operators"]
    assert ops["name"].tolist() == ["attention.0", "experts.0.5"] * 3
    assert ops["token_id"].tolist() == [0, 0, 1, 1, 2, 2] and ops["order"].tolist() == [0, 1] * 3
    assert ops["duration_ns"].tolist() == [200, 400] * 3 and ops["expert"].tolist() == [-1, 5] * 3
    assert t["graphs"][["token_id", "kind", "backend", "tier", "duration_ns"]].to_numpy().tolist() == [
        [i, "attention", "htp", 1 if i else 4, 160] for i in range(3)
    ]
    assert t["experts"][["op_id", "expert", "cache", "duration_ns"]].to_numpy().tolist() == [
        [1, 5, "miss", 300],
        [3, 5, "hit", 300],
        [5, 5, "hit", 300],
    ]
    assert t["loads"][["token_id", "reason", "resident_bytes", "duration_ns"]].to_numpy().tolist() == [
        [i, "demand", 640 + i, 100] for i in range(3)
    ]
    routes = t["routes"]
    assert routes[["row", "rank", "expert"]].to_numpy().tolist() == [[i // 2, i % 2, [5, 1][i % 2]] for i in range(8)]
    assert (routes["token_id"] == 0).all() and (routes["weight"] == 0.5).all()
    assert [s.tolist() for s in t["tensors"]["sources"]] == [[3, 4], [11]]
    counted = t["counters"].groupby("name")["value"].last()
    assert counted["expert cache bytes"] == 642 and counted["expert cache hits"] == 2 and counted["expert cache misses"] == 1
    assert counted["major faults"] == 5
    assert len(t["unpaired"]) == 0


def llama(tokens: int = 2, wait: bool = True) -> Writer:
    """Operators 64 and 128 on two threads; the worker begins 5 ns later; waits begin at +60 and +80 of 100 ns."""
    w = Writer()
    for i in range(tokens):
        at = 1000 * (i + 1)
        w.add("token_begin", engine=2, ts=at, seq=NO_SEQ, n_tokens=1 if i else 3, position=i * 3)
        w.add("graph_begin", engine=2, ts=at + 10, handle=9, layer=-1, expert=-1)
        for op, tensor in enumerate((64, 128)):
            for tid, late in ((MAIN, 0), (WORKER, 5)):
                begin = at + 100 + 100 * op + late
                w.add("op_begin", engine=2, tid=tid, ts=begin, tensor=tensor, type=1 + op, layer=-1, maj_flt=op)
                if wait:
                    w.add("op_wait", engine=2, tid=tid, ts=begin + 20)  # a barrier inside the operator
                    w.add("op_wait", engine=2, tid=tid, ts=begin + (80 if late else 60))
        w.add("graph_end", engine=2, ts=at + 310, handle=9)
        w.add("token_end", engine=2, ts=at + 400, seq=NO_SEQ, maj_flt=2)
    names = [b"ffn_out-0", b"attn_out-1"]
    for op, name in enumerate(names):
        source = [[77, 0, 78, 64 * op] + [0] * 6]
        w.add(
            "tensor",
            engine=2,
            ts=1101,
            tensor=64 + 64 * op,
            type=1 + op,
            name=name,
            ne=[[8, 3, 1, 1]],
            n_sources=10,
            sources=source,
        )
    return w


def test_a_step_lasts_until_each_device_was_first_waited_for_behind_it(tmp_path):
    w = Writer()
    for begin, end, tid in ((100, 200, MAIN), (400, 500, MAIN), (505, 760, WORKER), (700, 800, MAIN)):
        w.add("token_begin", engine=2, ts=begin, tid=tid, seq=NO_SEQ, n_tokens=1, position=NO_POSITION)
        w.add("token_end", engine=2, ts=end, tid=tid, seq=NO_SEQ)
    waits = [(7, 150, 160, MAIN), (7, 210, 260, MAIN), (8, 270, 290, MAIN), (7, 300, 310, MAIN), (7, 450, 460, MAIN)]
    waits += [(7, 510, 540, WORKER), (8, 520, 710, MAIN), (7, 810, 0, MAIN)]
    for device, begin, end, tid in waits:
        w.add("graph_begin", engine=2, ts=begin, tid=tid, type=1, handle=device, layer=-1, expert=-1, backend=4)
        if end:
            w.add("graph_end", engine=2, ts=end, tid=tid, handle=device)
    engine = {"id": 2, "operators": [], "graphs": ["ggml", "wait"], "libraries": []}
    tables = tables_of(w, tmp_path, engines={"llama.cpp": engine})
    assert tables["tokens"]["end_ns"].tolist() == [290, 500, 760, 800]
    assert tables["tokens"]["duration_ns"].tolist() == [190, 100, 255, 100]
    assert tables["graphs"]["token_id"].tolist() == [0, 0, 0, -1, 1, 2, 2, -1]


def test_a_process_numbers_its_contexts_and_the_first_step_of_each_is_prefill(tmp_path):
    w = Writer()
    for i, context in enumerate((0x7A00, 0x5500, 0x7A00, 0x5500, 0)):
        w.add("token_begin", engine=2, ts=10 * i, seq=NO_SEQ, n_tokens=1, position=2**32 - 1, context=context)
        w.add("token_end", engine=2, ts=10 * i + 5, seq=NO_SEQ)
    tokens = tables_of(w, tmp_path)["tokens"]
    assert tokens["context"].tolist() == [0, 1, 0, 1, -1]
    assert tokens["phase"].tolist() == ["prefill", "prefill", "decode", "decode", "prefill"]


def test_llama_operators_merge_their_threads_and_end_when_the_last_one_is_done(tmp_path):
    t = tables_of(llama(), tmp_path)
    ops = t["operators"]
    assert t["tokens"]["phase"].tolist() == ["prefill", "decode"] and t["tokens"]["seq"].tolist() == [-1, -1]
    assert ops["name"].tolist() == ["ffn_out-0", "attn_out-1"] * 2
    assert ops["type"].tolist() == ["MUL_MAT", "ADD"] * 2
    assert ops["layer"].tolist() == [0, 1] * 2 and ops["shape"].tolist() == ["8x3x1x1"] * 4
    assert ops["begin_ns"].tolist() == [1100, 1200, 2100, 2200]
    assert ops["end_ns"].tolist() == [1185, 1285, 2185, 2285]
    assert ops["n_threads"].tolist() == [2] * 4 and ops["graph_id"].tolist() == [0, 0, 1, 1]
    assert ops["busy_ns"].tolist() == [140] * 4
    assert ops["wait_ns"].tolist() == [1185 - 1160] * 4
    assert (
        ops["maj_flt"].tolist() == [2, 1] * 2
    )  # both threads' step to the second operator; the main thread's to the token's end
    assert ops["complete"].all()
    assert [s.tolist() for s in t["tensors"]["sources"]] == [[77, 78], [77, 78, 64]]
    assert len(t["op_threads"]) == 8


def test_threads_that_live_for_one_graph_of_a_step_take_part_in_its_operators_alone(tmp_path):
    w = Writer().add("token_begin", engine=2, ts=1000, seq=NO_SEQ, n_tokens=8)
    for graph, helper in ((0, WORKER), (1, WORKER + 1)):
        at = 1010 + 100 * graph
        w.add("graph_begin", engine=2, ts=at, handle=9, layer=-1, expert=-1)
        for tid, begin in ((MAIN, at + 10), (helper, at + 12)):
            w.add("op_begin", engine=2, ts=begin, tid=tid, tensor=64, type=1, layer=-1)
        w.add("graph_end", engine=2, ts=at + 90, handle=9)
    w.add("token_end", engine=2, ts=1200, seq=NO_SEQ)
    ops = tables_of(w, tmp_path)["operators"]
    assert ops["n_threads"].tolist() == [2, 2] and ops["graph_id"].tolist() == [0, 1]
    assert ops["begin_ns"].tolist() == [1020, 1120] and ops["end_ns"].tolist() == [1100, 1200]


def test_without_waits_an_operator_is_busy_to_its_end(tmp_path):
    ops = tables_of(llama(wait=False), tmp_path)["operators"]
    assert ops["wait_ns"].sum() == 0 and (ops["busy_ns"] == [200, 215] * 2).all()


def test_a_worker_threads_records_belong_to_the_step_of_its_process(tmp_path):
    w = Writer().add("token_begin", ts=10, seq=0).add("token_end", ts=20, seq=0)
    for ts, pid in ((5, PID), (10, PID), (15, PID), (20, PID), (21, PID), (15, 999)):
        w.add("evict", ts=ts, tid=WORKER, pid=pid)
    assert tables_of(w, tmp_path)["loads"]["token_id"].tolist() == [-1, 0, 0, -1, 0, -1]


def test_an_unknown_phase_is_prefill_for_several_tokens_and_for_the_first_of_a_sequence(tmp_path):
    w = Writer()
    for i, (n, position) in enumerate([(1, NO_POSITION), (1, NO_POSITION), (9, 2), (1, 11), (1, 0)]):
        w.add("token_begin", engine=2, ts=10 * i, seq=NO_SEQ, n_tokens=n, position=position)
        w.add("token_end", engine=2, ts=10 * i + 5, seq=NO_SEQ)
    phases = tables_of(w, tmp_path)["tokens"]["phase"].tolist()
    assert phases == ["prefill", "decode", "prefill", "decode", "prefill"]
    attached = tables_of(w, tmp_path / "attached", options={"pid": 7})["tokens"]["phase"].tolist()
    assert attached == ["decode", "decode", "prefill", "decode", "prefill"]


def test_a_crash_leaves_open_spans_that_end_with_the_recording_and_lost_begins_are_rows(tmp_path):
    w = Writer().add("token_begin", ts=100, seq=0).add("token_begin", ts=200, seq=1)
    w.add("op_begin", ts=210, tensor=1, type=0, layer=0).add("op_end", ts=220, tensor=1).add("op_begin", ts=230, tensor=2, type=0)
    w.add("graph_end", ts=240, handle=3).add("evict", ts=300)
    t = tables_of(w, tmp_path, state="recording")
    assert t["tokens"][["begin_ns", "end_ns", "complete"]].to_numpy().tolist() == [[100, 100, False], [200, 300, False]]
    assert t["operators"][["end_ns", "complete"]].to_numpy().tolist() == [[220, True], [300, False]]
    assert t["operators"]["token_id"].tolist() == [1, 1]
    assert t["unpaired"].to_numpy().tolist() == [["graph", PID, MAIN, 240]]


def test_an_expert_tensor_with_more_sources_than_a_record_holds_is_put_together(tmp_path):
    w = Writer()
    for first in (0, 10, 20):
        w.add("tensor", ts=10 + first, tensor=5, type=2, first=first, n_sources=23, sources=[np.arange(first + 1, first + 11)])
    sources = tables_of(w, tmp_path)["tensors"]["sources"]
    assert [s.tolist() for s in sources] == [list(range(1, 24))]


def test_a_tensor_told_again_names_the_operators_after_it(tmp_path):
    w = Writer().add("token_begin", engine=2, ts=1, seq=NO_SEQ)
    w.add("op_begin", engine=2, ts=10, tensor=5, type=2, layer=-1).add("tensor", engine=2, ts=11, tensor=5, name=b"old-1")
    w.add("op_begin", engine=2, ts=20, tensor=5, type=2, layer=-1).add("op_begin", engine=2, ts=30, tensor=5, type=2, layer=-1)
    w.add("tensor", engine=2, ts=31, tensor=5, name=b"new-2").add("token_end", engine=2, ts=40, seq=NO_SEQ)
    assert tables_of(w, tmp_path)["operators"]["name"].tolist() == ["old-1", "old-1", "new-2"]


STEP = st.tuples(st.integers(1, 4), st.lists(st.sampled_from([64, 128, 192]), max_size=6), st.integers(0, 2))


@SHARED
@given(st.lists(STEP, min_size=1, max_size=4), st.integers(1, 3))
def test_operators_of_random_tokens_equal_a_record_by_record_reading(tmp_path, steps, n_threads):
    """Every thread runs every operator; the reference walks the records one by one."""
    w, truth, at = Writer(), [], 100
    for token, (_, tensors, gap) in enumerate(steps):
        w.add("token_begin", engine=2, ts=at, seq=NO_SEQ)
        for order, tensor in enumerate(tensors):
            begins = [at + 10 * order + 1 + i for i in range(n_threads)]
            for i, begin in enumerate(begins):
                w.add("op_begin", engine=2, ts=begin, tid=MAIN + i, tensor=tensor, type=1, layer=-1)
            last = order == len(tensors) - 1
            ends = [at + 10 * len(tensors) + 5 if last else begin + 10 for begin in begins]
            busy = sum(ends) - sum(begins)
            truth.append([token, tensor, order, n_threads, min(begins), max(ends), busy])
        at += 10 * len(tensors) + 5
        w.add("token_end", engine=2, ts=at, seq=NO_SEQ)
        at += 1 + gap
    found = tables_of(w, tmp_path)["operators"]
    names = ["token_id", "tensor", "order", "n_threads", "begin_ns", "end_ns", "busy_ns"]
    assert found[names].to_numpy().tolist() == truth


def reference_states(events: list[tuple[int, str, int, int]], tid: int) -> list[list]:
    """The states of one thread, event by event. Events: (ts, what, state bits, cpu)."""
    rows, state, cpu, since = [], None, -1, 0
    for ts, what, bits, where in events:
        if what == "waking" and state == "running":
            continue
        away = "runnable" if bits == 0 else "waiting" if bits & 2 else "stopped" if bits & 4 else "sleeping"
        new, at = {"in": ("running", where), "out": (away, -1), "waking": ("runnable", -1)}[what]
        if state is not None and ts > since and (new, at) != (state, cpu):
            rows.append([tid, state, cpu, since, ts])
        if (new, at) != (state, cpu):
            state, cpu, since = new, at, ts
    if events and state is not None and events[-1][0] > since:
        last = max(e[0] for e in events if not (e[1] == "waking" and ignored(events, e)))
        if last > since:
            rows.append([tid, state, cpu, since, last])
    return rows


def ignored(events: list[tuple[int, str, int, int]], event: tuple[int, str, int, int]) -> bool:
    """Whether a waking found its thread running."""
    before = [e for e in events[: events.index(event)] if e[1] != "waking"]
    return bool(before) and before[-1][1] == "in"


EVENT = st.sampled_from(["in", "out", "waking", "wakeup"])
SWITCH = st.tuples(EVENT, st.sampled_from([0, 1, 2, 0x100 | 2, 4]), st.integers(0, 1))


@SHARED
@given(st.lists(SWITCH, max_size=15), st.lists(SWITCH, max_size=15))
def test_thread_states_equal_an_event_by_event_reading_and_tile_the_threads_time(tmp_path, main, worker):
    w, per_thread = Writer(), {MAIN: [], WORKER: []}
    for i, (tid, event) in enumerate([(MAIN, e) for e in main] + [(WORKER, e) for e in worker]):
        what, bits, cpu = event
        ts = 10 + i
        per_thread[tid].append((ts, "waking" if what == "wakeup" else what, bits, cpu))
        if what == "in":
            w.add("sched_switch", ts=ts, tid=0, pid=0, engine=0, cpu=cpu, prev_tid=0, next_tid=tid)
        elif what == "out":
            w.add("sched_switch", ts=ts, tid=tid, engine=0, cpu=cpu, prev_tid=tid, next_tid=0, prev_state=bits)
        else:
            w.add(f"sched_{what}", ts=ts, tid=77, pid=7, engine=0, cpu=cpu, woken_tid=tid, target_cpu=1)
    states = tables_of(w, tmp_path)["thread_states"]
    for tid, events in per_thread.items():
        mine = states[states["tid"] == tid]
        assert mine[["tid", "state", "cpu", "begin_ns", "end_ns"]].to_numpy().tolist() == reference_states(events, tid)
        assert (mine["begin_ns"].to_numpy()[1:] == mine["end_ns"].to_numpy()[:-1]).all()


def test_threads_know_both_sides_of_a_switch_and_who_is_the_targets(tmp_path):
    w = Writer().add("sched_switch", ts=1, engine=0, prev_tid=MAIN, next_tid=77, prev_state=1, comm_of_next=1, comm=b"kworker")
    w.add("sched_switch", ts=2, engine=0, tid=77, pid=77, prev_tid=77, next_tid=MAIN, comm=b"kworker/1")
    w.add("task_fork", ts=3, engine=0, parent_tid=MAIN, child_tid=500)
    t = tables_of(w, tmp_path)
    rows = {row["tid"]: (row["name"], row["target"]) for row in t["threads"].to_dict("records")}
    assert rows == {MAIN: ("main", True), WORKER: ("worker", True), 77: ("kworker/1", False), 500: ("", True)}
    switches = [["switch", MAIN, 77], ["switch", 77, MAIN]]
    assert t["sched"][["event", "prev_tid", "next_tid"]].to_numpy().tolist() == [*switches, ["fork", MAIN, 500]]


def test_tables_are_kept_and_made_again_when_the_recording_changes(tmp_path):
    folder = runtime().write(tmp_path / "run")
    first, again = load_tables(folder), load_tables(folder)
    assert (folder / "tables" / "index.json").exists()
    for name in TABLES:
        pd.testing.assert_frame_equal(first[name], again[name])
    more = runtime(4)
    more.write(folder)
    assert len(load_tables(folder)["tokens"]) == 4
    (folder / "tables" / "tokens.parquet").write_bytes(b"broken")
    assert len(load_tables(folder)["tokens"]) == 4


@pytest.fixture
def readable_folder():
    """A new folder that every user may read and only its owner may write."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_folder_that_cannot_be_written_is_analysed_in_memory(readable_folder, tmp_path):
    folder = runtime().write(readable_folder / "run")
    load_tables(runtime().write(tmp_path / "warm"))
    os.chmod(folder, 0o555)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        assert len(load_tables(folder)["tokens"]) == 3
    finally:
        os.seteuid(user)
    assert not (folder / "tables").exists()


def test_a_file_cut_anywhere_loses_only_what_was_cut(tmp_path):
    folder = runtime().write(tmp_path)
    whole = (folder / "events.bin").read_bytes()
    for cut in range(0, len(whole) + 1, 48):
        (folder / "events.bin").write_bytes(whole[:cut])
        tables = build_tables(Recording(folder))
        assert len(tables["tokens"]) == sum(cut >= 64 * (12 * i + 1) for i in range(3))
        assert tables["tokens"]["complete"].sum() == sum(cut >= 64 * 12 * (i + 1) for i in range(3))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"x"', '{"schema_version": 1}', '{"schema_version": 1, "layouts": 5}', '{"schema_version": 2}']
)
def test_a_manifest_that_is_none_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RecordingError) as caught:
        load_tables(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_newer_recording_is_refused_with_its_version(tmp_path):
    Writer().write(tmp_path, schema_version=7)
    with pytest.raises(RecordingError, match="schema version 7"):
        load_tables(tmp_path)


def test_a_manifest_with_missing_and_null_parts_still_reads(tmp_path):
    keep = {"schema_version", "layouts"}
    folder = runtime().write(tmp_path, **dict.fromkeys(set(make_manifest()) - keep))
    tables = load_tables(folder)
    assert tables["operators"]["name"].tolist() == ["operator 0.0", "operator 2.0.5"] * 3
    assert tables["tokens"]["engine"].tolist() == ["engine 1"] * 3


def test_the_cache_notices_a_change_within_the_same_size(tmp_path):
    folder = runtime().write(tmp_path)
    load_tables(folder)
    data = bytearray((folder / "events.bin").read_bytes())
    data[8:16] = (9_999).to_bytes(8, "little")
    (folder / "events.bin").write_bytes(data)
    os.utime(folder / "events.bin", ns=(1, 1))
    assert load_tables(folder)["tokens"]["begin_ns"].iloc[0] == 9_999


@pytest.mark.parametrize("seed", rest_long(range(20), *range(6)))
def test_random_damage_to_the_records_never_crashes_the_analysis(tmp_path, seed):
    """What the damage leaves is analysed; only RecordingError may come out."""
    folder, rng = llama(8).write(tmp_path), np.random.default_rng(seed)
    for name in ("events.bin", "details.bin"):
        data = np.frombuffer((folder / name).read_bytes(), np.uint8).copy()
        data[rng.integers(0, len(data), 60)] = rng.integers(0, 256, 60)
        (folder / name).write_bytes(data.tobytes())
    try:
        tables = load_tables(folder)
    except RecordingError:
        return
    answer = summarize(Recording(folder), tables)
    assert json.loads(json.dumps(answer, allow_nan=False)).keys() == answer.keys()


def test_a_record_of_an_impossible_time_is_left_out_and_counted(tmp_path):
    folder = runtime(1).add("token_begin", ts=2**63 + 5, seq=9).write(tmp_path)
    tables = load_tables(folder)
    assert len(tables["tokens"]) == 1
    assert summarize(Recording(folder), tables)["records"]["damaged"] == 1


def test_a_record_far_from_all_others_is_left_out_and_counted(tmp_path):
    """A time of 146 years is one that a clock could show; sums over threads would leave 64 bits."""
    sound = runtime(3).write(tmp_path / "sound")
    folder = runtime(3).add("token_begin", ts=2**62 - 5, seq=9).add("token_end", ts=2**62 - 2, seq=9).write(tmp_path / "damaged")
    tables = load_tables(folder)
    assert len(tables["tokens"]) == 3
    answer = summarize(Recording(folder), tables)
    assert answer["records"]["damaged"] == 2
    assert answer["tokens"] == summarize(Recording(sound), load_tables(sound))["tokens"]


@pytest.mark.parametrize("command", rest_long([5, "run me", {"a": 1}, [{"a": 1}, 2], None], None))
def test_a_command_of_a_foreign_manifest_is_shown_as_text(tmp_path, command, capsys):
    runtime(3).write(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"command": command}))
    for verb in ("summary", "write"):
        assert main([verb, str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("\n") == 1  # its checksum


def test_a_norm_is_fused_where_its_own_step_did_not_run_it_whatever_other_graphs_do_with_its_address(tmp_path):
    operators = ["NONE", "RMS_NORM", "MUL", "MUL_MAT"]
    norm, product = (64, 1, b"norm-0", 9), (128, 2, b"attn_norm-0", 64)
    steps = (  # what is defined, and what of it runs
        ((norm, product), (128,)),
        ((norm, product), (64, 128)),
        (((64, 3, b"Kcur-0", 9), (128, 3, b"Vcur-0", 64)), (64, 128)),
        ((norm, product), (128,)),
    )
    w = Writer()
    for i, (defined, running) in enumerate(steps):
        at = 1000 * (i + 1)
        w.add("token_begin", engine=2, ts=at, seq=NO_SEQ, n_tokens=1, position=i)
        w.add("graph_begin", engine=2, ts=at + 10, handle=9 + i % 2, layer=-1, expert=-1)
        kinds = {tensor: kind for tensor, kind, _, _ in defined}
        for tensor in running:
            w.add("op_begin", engine=2, ts=at + 2 * tensor, tensor=tensor, type=kinds[tensor], layer=-1)
        for tensor, kind, name, source in defined:
            fields = {"tensor": tensor, "type": kind, "name": name, "ne": [[8, 1, 1, 1]], "n_sources": 10}
            w.add("tensor", engine=2, ts=at + 20, sources=[[source] + [0] * 9], **fields)
        w.add("graph_end", engine=2, ts=at + 400, handle=9 + i % 2)
        w.add("token_end", engine=2, ts=at + 500, seq=NO_SEQ)
    engines = {"llama.cpp": {"id": 2, "operators": operators, "graphs": ["ggml"], "libraries": []}}
    types = tables_of(w, tmp_path, engines=engines)["operators"].groupby("token_id")["type"].agg(list).tolist()
    assert types == [["RMS_NORM+MUL"], ["RMS_NORM", "MUL"], ["MUL_MAT", "MUL_MAT"], ["RMS_NORM+MUL"]]
