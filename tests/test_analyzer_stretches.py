"""Tables made stretch by stretch are those made at once, whatever a stretch holds, and whatever was lost or came late."""

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.questions.summary import summarize
from analyzer.records.reading import Source
from analyzer.tables.store import build_and_store, build_tables, input_fingerprint, load_tables
from tests.conftest import drawn
from tracer.recording.format import Recording, RecordingError
from workloads.recordings import MAIN, WORKER, Writer, runtime_step


def llama_step(w: Writer, at: int, operators: int, shares: bool) -> None:
    """A step of llama.cpp on two threads: operators by begins and waits, or by the threads' shares of a graph's nodes."""
    w.add("token_begin", ts=at, engine=2, seq=2**64 - 1, n_tokens=0, position=2**32 - 1)
    w.add("graph_begin", ts=at + 5, engine=2, handle=9, layer=-1, expert=-1)
    for i in range(operators):
        for shift, tid in ((0, MAIN), (3, WORKER)):
            begin, done = at + 10 + 40 * i + shift, at + 40 + 40 * i + shift
            if shares:
                fields = {"after": [0] * 17, "min_flt": [i] * 17, "node": [i] * 17, "maj_flt": [0] * 17}
                w.add("op_shares", ts=done, engine=2, tid=tid, graph=9, count=1, **{k: [v] for k, v in fields.items()})
            else:
                w.add("op_begin", ts=begin, engine=2, tid=tid, tensor=64 * (i + 1), type=1 + i % 2, layer=-1, min_flt=i)
                w.add("op_wait", ts=done, engine=2, tid=tid)
            w.add("pmc", ts=done, engine=2, tid=tid, values=[[at + 7 * i, 0, 0, 0]])
        w.add("sched_switch", ts=at + 30 + 40 * i, tid=MAIN, prev_tid=MAIN, next_tid=WORKER, prev_state=i % 3, comm=b"other")
        w.add("sched_waking", ts=at + 32 + 40 * i, tid=WORKER, woken_tid=MAIN, comm=b"main")
        w.add("sched_switch", ts=at + 35 + 40 * i, tid=WORKER, prev_tid=WORKER, next_tid=MAIN, prev_state=0)
    w.add("route", ts=at + 20, engine=2, layer=1, n_tokens=1, k=2, first=0, count=2, experts=[[3, 1] + [0] * 30])
    w.add("graph_end", ts=at + 15 + 40 * operators, engine=2, handle=9)
    w.add("token_end", ts=at + 20 + 40 * operators, engine=2, seq=2**64 - 1)


def recording(seed: int, steps: int, lost: float, late: float) -> Writer:
    """Steps of both engines, background reads, records between steps; `lost` of the records are gone, `late` came late."""
    w, rng = Writer(), np.random.default_rng(seed)
    at = 10_000
    for i in range(steps):
        kind = int(rng.integers(3))
        if kind == 0:
            runtime_step(w, at, i, 2, 1, 1 + i % 2)
        else:
            llama_step(w, at, int(rng.integers(1, 5)), kind == 1)
        w.add("op_begin", ts=at + 1050, engine=2, tid=WORKER, tensor=640, type=1, layer=-1)
        w.add("read_begin", ts=at + 400, tid=WORKER, ino=5, bytes=100, fd=3)
        w.add("read_end", ts=at + int(rng.integers(500, 2000)), tid=WORKER, result=100)
        w.add("qnn_execute_begin", ts=at + 150, graph=77, engine=3)
        w.add("qnn_execute_end", ts=at + 250, graph=77, engine=3)
        w.add("sched_switch", ts=at + 900, tid=MAIN, prev_tid=MAIN, next_tid=0, prev_state=1)
        at += 2200
    for i in range(4):
        w.add(
            "tensor", ts=10_010, engine=2, tensor=64 * (i + 1), type=1 + i % 2, ne=[[32, 1, 1, 1]], name=f"ffn_out-{i}".encode()
        )
        w.add("node", ts=10_010, engine=2, tensor=64 * (i + 1), graph=9, node=i)
    for stream, parts in w.slots.items():
        slots = np.concatenate(parts)
        ts = slots[:, 8:16].copy().view("<u8")[:, 0]
        kind = slots[:, 24:26].copy().view("<u2")[:, 0]
        order = np.argsort(ts + np.where(rng.random(len(ts)) < late, rng.integers(0, 500, len(ts)), 0), kind="stable")
        kept = (rng.random(len(ts)) >= lost) | (kind == 64)
        w.slots[stream] = [slots[order[kept[order]]]]
    return w


def equal(some: dict[str, pd.DataFrame], others: dict[str, pd.DataFrame]) -> None:
    assert some.keys() == others.keys()
    for name, table in some.items():
        pd.testing.assert_frame_equal(table, others[name], obj=name)


@settings(max_examples=drawn(4))
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([(0, 0), (0.02, 0.3), (0.2, 0)]), st.integers(1, 60))
def test_tables_do_not_depend_on_how_much_is_read_in_one_go(seed, steps, damage, most):
    with tempfile.TemporaryDirectory() as name:
        folder = recording(seed, steps, *damage).write(Path(name), pmc={"events": [{"name": "cycles"}]})
        source = Recording(folder)
        whole = build_tables(source)
        equal(build_tables(source, most, block=4), whole)
        build_and_store(Source(source, block=4), folder / "tables", input_fingerprint(folder), most)
        equal(load_tables(folder), whole)


def test_a_stretch_holds_what_is_asked_for(tmp_path):
    source = Source(Recording(recording(1, 7, 0, 0).write(tmp_path)), block=4)
    cuts = np.arange(10_000, 30_000, 2200)[1:]
    stretches = list(source.contents.stretches(cuts, 100))
    assert len(stretches) > 2 and stretches[0][0] == -1
    assert all(before[1] == after[0] for before, after in pairwise(stretches))


@settings(max_examples=drawn(6))
@given(st.data())
def test_a_recording_cut_at_any_byte_of_any_file_gives_tables_or_one_line(data):
    with tempfile.TemporaryDirectory() as name:
        folder = recording(3, 3, 0, 0).write(Path(name))
        path = folder / data.draw(st.sampled_from(["events.bin", "details.bin", "manifest.json"]))
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        try:
            tables = load_tables(folder)
        except RecordingError as error:
            assert path.name == "manifest.json" and "\n" not in str(error)
            return
        answer = summarize(Recording(folder), tables)
        assert json.loads(json.dumps(answer, allow_nan=False)).keys() == answer.keys()


def test_the_runtimes_attention_counts_what_its_models_config_says(tmp_path):
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1}
    config = {**shape, "vocab_size": 100, "intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    precision = {"bits": 8, "block": 32}
    w = Writer()
    runtime_step(w, 10_000, 6, 2, 1, 1)
    model = {"path": "m", "config": config, "package": {"precisions": {"attention": precision}}}
    operators = build_tables(Recording(w.write(tmp_path, model=model)))["operators"]
    row = operators[operators["type"] == "attention"].iloc[0]
    weights, context = 32 * (32 + 2 * 16) + 32 * 32, 6 + 1
    assert row["flops"] == 2 * weights + 4 * context * (4 * 8 + 5) + 5 * 32
    assert row["read_bytes"] == weights * 8.5 / 8 + 32 * 4 + (context - 1) * 2 * 16 * 4
    assert row["written_bytes"] == 32 * 4 + 2 * 16 * 4
    assert operators[operators["type"] == "experts"]["flops"].isna().all()
