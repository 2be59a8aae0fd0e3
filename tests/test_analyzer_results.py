"""ProfDAG, experts, summary and the command line on recordings of known truth."""

import json
from itertools import pairwise

import networkx as nx
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analyzer.commands.summary import loss_lines
from analyzer.questions import experts, step_time
from analyzer.questions.critical_path import critical_path
from analyzer.questions.figures import cache_hits
from analyzer.questions.parts import part_of
from analyzer.questions.profdag import DagError, build_profdag, decode_steps, export_graph, to_json
from analyzer.questions.summary import summarize
from analyzer.tables import store as tables_module
from analyzer.tables.store import load_tables
from moescope.__main__ import main
from tests.conftest import drawn
from tests.test_analyzer_qnn import EXECUTE, Program
from tests.test_analyzer_tables import NO_SEQ, llama
from tracer.recording.format import Recording
from workloads.recordings import MAIN, PID, WORKER, Writer, runtime
from workloads.tables_fixture import frame, make_tables

SHARED = settings(max_examples=drawn(12), suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_the_profdag_has_operators_in_order_constants_for_weights_and_an_edge_per_source(tmp_path):
    graph = build_profdag(load_tables(llama().write(tmp_path)), 1)
    assert nx.is_directed_acyclic_graph(graph)
    assert sorted(graph.edges) == [
        ("constant 4d", "op 0"),
        ("constant 4d", "op 1"),
        ("constant 4e", "op 0"),
        ("constant 4e", "op 1"),
        ("op 0", "op 1"),
    ]
    node = graph.nodes["op 1"]
    assert (node["name"], node["type"], node["layer"], node["order"], node["shape"]) == ("attn_out-1", "ADD", 1, 1, "8x3x1x1")
    assert (node["begin_ns"], node["end_ns"], node["duration_ns"], node["busy_ns"], node["wait_ns"]) == (200, 285, 85, 140, 25)


def test_a_source_that_no_operator_made_but_whose_structure_is_known_is_a_view_between(tmp_path):
    w = Writer().add("token_begin", engine=2, ts=1, seq=NO_SEQ)
    for ts, tensor in ((10, 5), (20, 7)):
        w.add("op_begin", engine=2, ts=ts, tensor=tensor, type=2, layer=-1)
    w.add("token_end", engine=2, ts=40, seq=NO_SEQ)
    for tensor, source, name in ((5, 1, b"a-0"), (6, 5, b"a-0 (view)"), (7, 6, b"b-0"), (1, 0, b"blk.0.w")):
        w.add("tensor", engine=2, ts=2, tensor=tensor, name=name, n_sources=1, sources=[[source] + [0] * 9])
    graph = build_profdag(load_tables(w.write(tmp_path)), 0)
    assert sorted(graph.edges) == [("constant 1", "op 0"), ("op 0", "view 6"), ("view 6", "op 1")]
    assert graph.nodes["view 6"]["name"] == "a-0 (view)" and graph.nodes["constant 1"]["name"] == "blk.0.w"


def chunked(chunks: int) -> dict[str, pd.DataFrame]:
    """A layer of a prompt in chunks of 4 rows: attention, router and an expert's part each; then what combines all of them."""
    kinds = ["attention", "router", "expert"] * chunks + ["combine"]
    n = len(kinds)
    begin = 100 * np.arange(n)
    rows = {"op_id": np.arange(n), "token_id": 0, "order": np.arange(n), "type": kinds, "name": kinds, "begin_ns": begin}
    tensor = pd.Series(kinds).map({"attention": 1, "router": 2, "expert": 3, "combine": 4}).astype("uint64")
    rows |= {"pid": PID, "tensor": tensor, "end_ns": begin + 90, "n_tokens": [4] * (n - 1) + [4 * chunks]}
    sources = {
        "tensor": [1, 2, 3, 4],
        "sources": [[9], [1], [2], [1, 2, 3]],
        "type": ["attention", "router", "expert", "combine"],
    }
    _, tables = make_tables(tokens=1)
    none = {name: table.iloc[:0] for name, table in tables.items()}
    return {**none, "operators": frame("operators", **rows), "tensors": frame("tensors", pid=PID, since_ns=0, **sources)}


@given(st.integers(1, 6))
def test_chunks_of_a_prompt_depend_on_each_other_through_the_kv_cache_and_what_combines_them_reads_all(chunks):
    graph = build_profdag(chunked(chunks), 0)
    attention = [f"op {3 * i}" for i in range(chunks)]
    memory = [(a, b) for a, b, kind in graph.edges(data="kind") if kind == "memory"]
    assert memory == list(pairwise(attention))
    assert set(graph.predecessors(f"op {3 * chunks}")) == {f"op {i}" for i in range(3 * chunks)}
    assert list(graph.predecessors(f"op {3 * chunks - 1}")) == [f"op {3 * chunks - 2}"]
    order = [node for node, role in graph.nodes(data="role") if role == "op"]
    assert critical_path(graph, order) == ([*attention, f"op {3 * chunks - 2}", *order[-2:]], 90 * (chunks + 3))


def test_without_structure_edges_follow_the_order_of_execution(tmp_path):
    w = llama()
    w.slots["details"].clear()
    graph = build_profdag(load_tables(w.write(tmp_path)), 0)
    assert list(graph.edges(data="kind")) == [("op 0", "op 1", "order")]


def test_times_average_over_tokens_of_the_same_structure_only(tmp_path):
    w = runtime(3)
    w.add("token_begin", ts=90_000, seq=9, phase=2, n_tokens=1).add("op_begin", ts=90_100, tensor=11, type=0, layer=0)
    w.add("op_end", ts=90_900, tensor=11).add("token_end", ts=91_000, seq=9)
    tables = load_tables(w.write(tmp_path))
    assert decode_steps(tables) == [1, 2, 3]
    operators = tables["operators"].copy()
    operators.loc[operators["token_id"] == 2, "duration_ns"] *= 2
    graph = build_profdag(tables.with_table("operators", operators), 1, [1, 2, 3])
    assert (graph.graph["tokens_used"], graph.graph["tokens_skipped"]) == (2, 1)
    assert [graph.nodes[f"op {i}"]["duration_ns"] for i in (0, 1)] == [300, 600]


def test_a_profdag_survives_graphml_and_json(tmp_path):
    graph = build_profdag(load_tables(llama().write(tmp_path / "run")), 0)
    export_graph(graph, tmp_path / "dag.graphml", "graphml")
    back = nx.read_graphml(tmp_path / "dag.graphml")
    assert set(back.edges) == set(graph.edges)
    assert back.nodes["op 0"]["duration_ns"] == graph.nodes["op 0"]["duration_ns"]
    assert {n["id"] for n in json.loads(to_json(graph))["nodes"]} == set(graph.nodes)


def test_a_token_without_operators_says_which_tokens_have_some(tmp_path):
    with pytest.raises(DagError, match="0 to 1"):
        build_profdag(load_tables(llama().write(tmp_path)), 5)


def routed(choices: list[list[int]]) -> Writer:
    """One decode step per list of experts, layer 0."""
    w = Writer()
    for step, chosen in enumerate(choices):
        w.add("token_begin", ts=100 * step, seq=step, phase=2, n_tokens=1)
        count = len(chosen)
        w.add("route", ts=100 * step + 1, layer=0, n_tokens=1, k=count, count=count, experts=[chosen + [0] * (32 - count)])
        w.add("token_end", ts=100 * step + 50, seq=step)
    return w


@SHARED
@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True), min_size=1, max_size=10))
def test_activation_and_reuse_distance_equal_a_walk_over_the_steps(tmp_path, choices):
    tables = tables_module.build_tables(Recording(routed(choices).write(tmp_path)))
    ids, table = experts.activation_matrices(tables, "decode")[0]
    n_experts = max(map(max, choices)) + 1
    assert ids.tolist() == list(range(len(choices)))
    assert table.tolist() == [[int(e in chosen) for e in range(n_experts)] for chosen in choices]
    last, truth = {}, {}
    for step, chosen in enumerate(choices):
        for e in chosen:
            truth[step, e] = step - last[e] if e in last else None
            last[e] = step
    rows = experts.reuse_distance(tables)
    assert {(r.token_id, r.expert): None if np.isnan(r.distance) else r.distance for r in rows.itertuples()} == truth
    seen = experts.distinct_experts(tables)
    assert seen["experts"].tolist() == [len(last)]
    assert seen["per_step"].iloc[0] == pytest.approx(np.mean([len(c) for c in choices]))


def test_a_hit_counts_once_per_step_and_layer_however_many_runs_it_takes(tmp_path):
    w = Writer().add("token_begin", ts=1, seq=0, phase=2)
    for i, (expert, cache) in enumerate([(3, 2), (3, 1), (4, 1), (5, 3), (6, 0)]):
        w.add("expert_begin", ts=10 + 2 * i, layer=0, expert=expert, cache=cache).add(
            "expert_end", ts=11 + 2 * i, layer=0, expert=expert
        )
    w.add("token_end", ts=99, seq=0)
    rates = cache_hits(load_tables(w.write(tmp_path)))
    assert rates[["token_id", "layer", "hits", "misses"]].to_numpy().tolist() == [[0, 0, 2, 1]]
    assert rates["rate"].tolist() == [pytest.approx(2 / 3)]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ffn_moe_logits-3", "routing"),
        ("ffn_moe_topk-0", "routing"),
        ("ffn_moe_weights_norm-0", "routing"),
        ("ffn_moe_gate-3", "experts"),
        ("ffn_moe_swiglu-3", "experts"),
        ("ffn_moe_weighted-3", "experts"),
        ("ffn_moe_out-3", "experts"),
        ("ffn_up-3", "dense"),
        ("ffn_shexp-3", "shared experts"),
        ("Qcur-0", "attention"),
        ("kq_soft_max-0", "attention"),
        ("attn_norm-0", "attention"),
        ("cache_k_l0 (view)", "attention"),
        ("result_output", "head"),
        ("result_norm", "head"),
        ("inp_embd", "embedding"),
        ("embd", "embedding"),
        ("l_out-0", "other operators"),
        ("router.3", "routing"),
        ("experts.0.5", "experts"),
        ("expert.0.5", "experts"),
        ("combine.0", "experts"),
        ("norm.0", "experts"),
        ("norm-3", "other operators"),
        ("head", "head"),
        ("sampling", "sampling"),
    ],
)
def test_operators_are_parts_by_what_they_do(name, part):
    assert part_of(name) == part


def test_the_parts_and_the_causes_add_up_to_the_step(tmp_path):
    tables = load_tables(runtime().write(tmp_path))
    shares = step_time.time_summary(tables, step_time.step_time(tables))["phases"]
    assert set(shares) == {"prefill", "decode"}
    expected = {"attention": 2e-4, "experts": 3e-4, "expert load": 1e-4, "host code": 4e-4}
    for phase in shares.values():
        assert phase["part_ms"] == {part: pytest.approx(ms) for part, ms in expected.items()}
        assert phase["ms"] == pytest.approx(1e-3) == sum(phase["cause_ms"].values())
        assert [cell["cause"] for cell in phase["cells"] if cell["part"] == "host code"] == ["residual"]


@pytest.mark.parametrize("asleep", [True, False])  # or nothing is known of the thread
def test_while_the_steps_thread_does_nothing_the_work_of_others_counts_once(tmp_path, asleep):
    """Own attention 10..20; a worker's expert 15..40, another's router 30..50: the first to begin counts."""
    w = Writer().add("token_begin", ts=0, seq=0, phase=2)
    for begin, end, kind, tid in ((10, 20, 0, MAIN), (15, 40, 2, WORKER), (30, 50, 1, 402)):
        w.add("op_begin", ts=begin, tid=tid, tensor=kind + 1, type=kind, layer=0).add("op_end", ts=end, tid=tid, tensor=kind + 1)
    if asleep:
        w.add("sched_switch", ts=20, prev_tid=MAIN, next_tid=0, prev_state=1)
        w.add("sched_switch", ts=50, tid=0, pid=0, prev_tid=0, next_tid=MAIN)
    w.add("token_end", ts=100, seq=0)
    tables = load_tables(w.write(tmp_path))
    shares = step_time.time_summary(tables, step_time.step_time(tables))["phases"]["decode"]
    ns = {name: round(value * 1e6, 6) for name, value in shares["part_ms"].items()}
    assert ns == {"attention": 10, "experts": 20, "routing": 10, "host code": 60}


def test_speed_follows_from_the_steps_times(tmp_path):
    answer = summarize(Recording(runtime(5).write(tmp_path)), load_tables(tmp_path))
    t = answer["tokens"]
    assert t["ttft_ms"] == pytest.approx(0.001)
    assert t["tpot_ms"] == {"mean": pytest.approx(0.002), "median": pytest.approx(0.002), "p90": pytest.approx(0.002), "n": 4}
    assert t["decode_step_ms"]["median"] == pytest.approx(0.001)
    assert t["decode_tokens_per_s"] == pytest.approx(500_000)
    assert t["prefill_tokens_per_s"] == pytest.approx(4_000_000)
    assert (t["generations"], t["steps"], t["decode_steps"], t["major_faults"]) == (1, 5, 4, 5)
    e = answer["experts"]
    assert (e["runs"], e["hits"], e["misses"], e["hit_rate"]) == (5, 4, 1, 0.8)
    assert e["loads"] == {"demand": {"loads": 5, "bytes": 320, "ms": pytest.approx(0.0005)}}
    assert answer["records"]["kept"] == {name: n for name, n in answer["records"]["kept"].items() if n > 0}
    assert sum(answer["records"]["kept"].values()) == 5 * 12 + 3


def test_the_emulator_is_named_and_costs_are_shares(tmp_path):
    cost = {"trap_ns": 600, "bpf_ns": 400, "kernel_ns": 10**9, "tracer_cpu_ns": 1, "target_cpu_ns": 100_000}
    lost = {"op_begin": 3, "op_end": 0}
    qnn = {"backend": 6, "api": "2.40", "emulator": True}
    probes = [{"program": "sched_switch", "skipped": 7}, {"program": "sys_enter_read", "skipped": 0}]
    folder = runtime(1).write(tmp_path, qnn=qnn, cost=cost, lost=lost, probes=probes)
    answer = summarize(Recording(folder), load_tables(folder))
    assert answer["machine"]["npu"] == "HTP emulator" and answer["machine"]["emulated"] == ["HTP emulator"]
    assert answer["cost"]["share_of_token_time"] == 1.0 and answer["cost"]["share_of_target_cpu"] == 0.01
    assert "--max-overhead" in answer["cost"]["advice"]
    few = runtime(1).write(tmp_path / "few", cost={**cost, "trap_ns": 0, "bpf_ns": 90})
    assert summarize(Recording(few), load_tables(few))["cost"]["advice"] is None  # 9 %
    assert answer["records"]["lost"] == {"op_begin": 3} and answer["records"]["skipped"] == {"sched_switch": 7}
    assert any("7 events of sched_switch" in str(line) for line in loss_lines(answer))


def crashed() -> Writer:
    w = runtime(2)
    return (
        w.add("token_begin", ts=90_000, seq=9, phase=2)
        .add("op_end", ts=90_001, tensor=5)
        .add("qnn_execute_begin", ts=90_002, graph=1)
    )


def npu_only() -> Writer:
    p = Program()
    p.call(20, 2, made=3, name=b"expert_t1")
    for _ in range(3):
        p.harvest(50, EXECUTE, (p.execute(3, 50), -1))
    return p.w


def scheduled() -> Writer:
    w = llama()
    for i, tid in enumerate((MAIN, WORKER)):
        w.add("sched_switch", ts=100 + i, tid=0, pid=0, cpu=i, prev_tid=0, next_tid=tid)
        w.add("sched_switch", ts=500 + i, tid=tid, cpu=i, prev_tid=tid, next_tid=0, prev_state=1)
        w.add("sched_waking", ts=600 + i, tid=0, pid=0, woken_tid=tid)
    return w


RECORDINGS = {"runtime": runtime, "llama": llama, "npu": npu_only, "nothing": Writer, "crashed": crashed, "scheduled": scheduled}


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_summary_of_any_recording_fits_the_screen_and_is_json(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    folder = RECORDINGS[name]().write(tmp_path, state="recording" if name == "crashed" else "complete")
    code, out, _ = run(capsys, "summary", folder)
    lines = out.splitlines()
    assert code == 0 and len(lines) <= 45 and max(map(len, lines)) <= 80
    code, out, _ = run(capsys, "summary", folder, "--json")
    answer = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 0 and answer["records"]["kept"] is not None
    if name == "crashed":
        assert answer["records"]["ends_without_begin"] == {"op": 1}
        assert answer["records"]["begins_without_end"] == {"tokens": 1, "qnn_executes": 1}
    if name == "scheduled":
        assert answer["scheduling"]["running_ms"] == pytest.approx(0.0008)
        assert answer["scheduling"]["sleeping_ms"] == pytest.approx(0.0002)
    if name == "npu":
        assert (answer["npu"]["executes"], answer["npu"]["accel_us"], answer["npu"]["unjoined_events"]) == (3, 900, 0)


def test_tables_query_experts_and_dag_answer_in_json(tmp_path, capsys):
    folder = runtime().write(tmp_path / "run")
    assert json.loads(run(capsys, "query", folder, "--json")[1])["tables"]["operators"] == 6
    assert run(capsys, "write", folder, "--only", "tables", "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "qnn_events.parquet").exists()
    sql = "select type, count(*) as n, sum(duration_ns) as ns from operators group by type order by type"
    assert json.loads(run(capsys, "query", folder, sql, "--json")[1])["rows"] == [
        {"type": "attention", "n": 3, "ns": 600},
        {"type": "experts", "n": 3, "ns": 1200},
    ]
    assert "attention" in run(capsys, "query", folder, sql)[1]
    layers = json.loads(run(capsys, "experts", folder, "--json")[1])["layers"]
    assert [(row["layer"], row["experts"]) for row in layers] == [(0, 2)]
    assert run(capsys, "experts", folder)[0] == 0
    for form in ("json", "graphml"):
        assert run(capsys, "write", folder, "--only", "profdag", "--mean", "--format", form)[0] == 0
    assert len(json.loads((folder / "profdag.json").read_text())["nodes"]) == 4


def test_the_process_of_the_recording_is_in_every_table_of_spans(tmp_path):
    tables = load_tables(runtime().write(tmp_path))
    for name in ("tokens", "graphs", "operators", "experts", "loads"):
        assert (tables[name]["pid"] == PID).all()
