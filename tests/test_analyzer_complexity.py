"""FLOPs and bytes against formulas written out by hand, from shapes alone and from recordings."""

import os

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from analyzer.questions import ceilings
from analyzer.questions.ceilings import Ceilings
from analyzer.questions.roofline import roofline_rows, with_bounds
from analyzer.tables.complexity import BLOCKS, GGML_TYPES, OpContext, Tensor, expected_distinct, work_of
from analyzer.tables.store import load_tables
from analyzer.tables.subgraph_work import WorkQuery, model_subgraphs
from runtime.telemetry.probes import Kind
from workloads.recordings import Writer, runtime
from workloads.tables_fixture import make_tables

M, K, N, H = 256, 128, 5, 4
CEILINGS = Ceilings("Some CPU", 2, {"1": 10e9, "2": 20e9}, {"1": 50e9, "2": 100e9}, 1000.0)


@pytest.mark.parametrize(
    ("kind", "out", "sources", "facts", "expected"),
    [
        ("MUL_MAT", (M, N), [(K, M), (K, N)], OpContext(), (2 * M * N * K, 4 * (K * M + K * N), 4 * M * N)),
        (
            "MUL_MAT",
            (64, N, H),
            [(32, 64, H), (32, N, H)],
            OpContext(),
            (2 * 64 * N * H * 32, 4 * 32 * H * (64 + N), 4 * 64 * N * H),
        ),
        (
            "MUL_MAT_ID",
            (M, 2, N),
            [(K, M, 8), (K, 1, N), (2, N)],
            OpContext(3),
            (2 * K * M * 2 * N, 4 * (3 * K * M + K * N + 2 * N), 8 * M * N),
        ),
        ("GET_ROWS", (K, N), [(K, 1000), (N,)], OpContext(), (0, 4 * (K * N + N), 4 * K * N)),
        ("SET_ROWS", (K, 1000), [(K, N), (N,), (K, 1000)], OpContext(), (0, 4 * (K * N + N), 4 * K * N)),
        ("RMS_NORM", (K, N), [(K, N)], OpContext(), (3 * K * N, 4 * K * N, 4 * K * N)),
        ("RMS_NORM+MUL", (K, N), [(K, N), (K,)], OpContext(), (4 * K * N, 4 * (K * N + K), 4 * K * N)),
        ("SOFT_MAX", (K, N), [(K, N)], OpContext(), (5 * K * N, 4 * K * N, 4 * K * N)),
        ("ADD", (K, N), [(K, N), (K,)], OpContext(), (K * N, 4 * (K * N + K), 4 * K * N)),
        ("CPY", (K, N), [(K, N)], OpContext(), (0, 4 * K * N, 4 * K * N)),
    ],
)
def test_work_equals_the_closed_form(kind, out, sources, facts, expected):
    work = work_of(kind, Tensor(out), [Tensor(dims) for dims in sources], facts)
    assert (work.flops, work.read, work.written) == expected


def test_attention_over_a_cache_counts_both_products_and_the_softmax_over_at_least_the_context():
    d, heads, kept, rows = 32, 4, 256, 3
    sources = [Tensor((d, rows, heads)), Tensor((d, kept, heads)), Tensor((d, kept, heads))]
    scores = rows * heads * kept
    work = work_of("FLASH_ATTN_EXT", Tensor((d, heads, rows)), sources)
    assert work.flops == 2 * scores * d + 2 * scores * d + 5 * scores
    assert work.read == 4 * (d * rows * heads + 2 * d * kept * heads)
    assert work_of("FLASH_ATTN_EXT", Tensor((d, heads, rows)), sources, OpContext(context=512)).flops == 2 * work.flops


def test_quantized_weights_count_their_blocks():
    assert Tensor((2048, 8192), "Q4_0").bytes() == 2048 * 8192 / 32 * 18
    gguf = pytest.importorskip("gguf")
    known = {t.name: gguf.GGML_QUANT_SIZES[t] for t in gguf.GGMLQuantizationType if t.name in BLOCKS}
    assert known == BLOCKS
    assert {int(t): t.name for t in gguf.GGMLQuantizationType if int(t) in GGML_TYPES} == {k: v[0] for k, v in GGML_TYPES.items()}


def test_without_a_routing_the_experts_read_are_those_that_uniform_choices_would_name():
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(6) for e in rng.choice(16, 4, replace=False)}) for _ in range(4000)]
    assert expected_distinct(16, 4, 6) == pytest.approx(np.mean(drawn), rel=0.01)


def test_what_is_not_described_is_unknown_not_zero():
    assert np.isnan(work_of("MUL_MAT", Tensor((4, 4)), []).flops)
    assert np.isnan(work_of("attention", Tensor((4, 4)), [Tensor((4, 4))]).flops)
    assert np.isnan(work_of("ADD", Tensor((4, 4), "?"), [Tensor((4, 4), "?")]).read)


def product(folder, duration: int):
    """One decode step whose only operator is a [64, 32] x [64, 1] product in fp32 of `duration` ns."""
    w = Writer()
    w.add("tensor", engine=2, ts=5, tensor=64, type=1, n_sources=2, ne=[[32, 1, 1, 1]], sources=[[65, 66] + [0] * 8])
    w.add("tensor", engine=2, ts=6, tensor=65, type=0, ne=[[64, 32, 1, 1]], name=b"blk.0.w")
    w.add("tensor", engine=2, ts=7, tensor=66, type=0, ne=[[64, 1, 1, 1]])
    w.add("token_begin", engine=2, ts=100, seq=0, phase=2, n_tokens=1)
    w.add("op_begin", engine=2, ts=110, tensor=64, type=1, layer=-1).add("token_end", engine=2, ts=110 + duration, seq=0)
    return load_tables(w.write(folder))


def test_a_recorded_product_has_its_work_and_its_bound(tmp_path):
    tables = product(tmp_path / "run", 10_000)
    row = tables["operators"].iloc[0]
    moved = 4 * (64 * 32 + 64 + 32)
    assert (row["flops"], row["read_bytes"] + row["written_bytes"]) == (2 * 64 * 32, moved)
    found = roofline_rows(tables, CEILINGS).iloc[0]
    assert found["intensity"] == pytest.approx(2 * 64 * 32 / moved)
    assert found["gbytes_per_s"] == pytest.approx(moved / 10_000)
    assert found["roof_us"] == pytest.approx(moved / 10e9 * 1e6) and found["bound"] == "launch"


@pytest.mark.parametrize(
    ("flops", "moved", "disk", "bound"),
    [
        (1e9, 1e6, 0.0, "compute"),
        (1e6, 1e8, 0.0, "memory"),
        (10.0, 10.0, 0.0, "launch"),
        (1e9, 1e6, 0.9, "disk"),
        (np.nan, np.nan, 0.0, ""),
    ],
)
def test_the_bound_is_what_takes_longest_at_the_ceilings(flops, moved, disk, bound):
    row = {"flops": [flops], "bytes": [moved], "threads": [1], "disk_share": [disk], "backend": ["cpu"], "median_us": [1e5]}
    row |= {"count": [2], "ms": [2e2]}
    assert with_bounds(pd.DataFrame(row), CEILINGS)["bound"].tolist() == [bound]


def test_loading_an_expert_is_no_part_of_the_operator_that_waited_for_it(tmp_path):
    """Of the 400 ns of each step's experts, 100 are a load, which no faster memory nor kernel would shorten."""
    rows = roofline_rows(load_tables(runtime(3).write(tmp_path)), CEILINGS).set_index("type")
    assert rows["ms"].to_dict() == pytest.approx({"attention": 3 * 200e-6, rows.index.drop("attention")[0]: 3 * 300e-6})


def test_ceilings_are_of_the_machine_that_a_recording_describes(monkeypatch, tmp_path):
    named = {"cpu_model": "", "cpus": os.cpu_count()}  # arm64 without a name in /proc/cpuinfo
    monkeypatch.setattr(ceilings, "describe_machine", lambda: named)
    monkeypatch.setattr(ceilings, "calls_per_s", lambda *_: 1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ceilings.write_ceilings(ceilings.measure_here(), ceilings.cache_file())
    assert ceilings.ceilings_for({"machine": named}) is not None
    assert ceilings.ceilings_for({"machine": {**named, "cpu_model": "other"}}) is None


def test_a_machines_ceilings_are_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = ceilings.stored_or_measured()
    assert ceilings.stored_or_measured() == first and ceilings.read_ceilings(ceilings.cache_file()) == first
    assert all(speed > 1e8 for table in (first.bandwidth, first.flops) for speed in table.values())


def test_ceilings_of_another_machine_are_not_used_for_a_recording():
    manifest, _ = make_tables()
    assert CEILINGS.fits(manifest["machine"])
    assert not CEILINGS.fits(manifest["machine"] | {"cpus": 8})
    assert CEILINGS.of(1) == (10e9, 50e9) and CEILINGS.of(2) == (20e9, 100e9) == CEILINGS.of(16)


CONFIG = {
    "model_type": "qwen2_moe",
    **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100},
    **{"num_hidden_layers": 3, "mlp_only_layers": [0], "intermediate_size": 64, "max_position_embeddings": 512},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
}
PRECISIONS = {"attention": {"bits": 8, "block": 32}, "experts": {"bits": 4, "block": 16}, "head": {"bits": 32}}
STORED = {"attention": (8 + 16 / 32) / 8, "experts": (4 + 16 / 16) / 8, "router": 4.0, "head": 4.0}
"""Bytes of a weight: its bits and its part of a block's 16-bit scale."""
FLOAT, INDEX = 4, 8


def counted(products: list, arrays: dict, per_element: dict) -> tuple[float, float, float]:
    """Work counted piece by piece: `products` (rows, inner, outer, part whose weights are read or None), `arrays` read and
    written as lists of (numbers, bytes of each), `per_element` {operations: numbers}."""
    flops = sum(2 * rows * inner * outer for rows, inner, outer, _ in products) + sum(k * n for k, n in per_element.items())
    weights = sum(inner * outer * STORED[part] for _, inner, outer, part in products if part)
    read, written = (sum(n * size for n, size in arrays[name]) for name in ("read", "written"))
    return flops, weights + read, written


def subgraph_by_hand(kind: str, r: int, c: int, layer: int) -> tuple[float, float, float]:
    """Each subgraph of the runtime on r rows at a context of c tokens, from its definition and the numbers of CONFIG."""
    row = [(r * 32, FLOAT)]
    if kind in ("embed", "dispatch"):
        return counted([], {"read": row, "written": row}, {})
    if kind == "attention":
        projections = [(r, 32, 32, "attention"), (r, 32, 16, "attention"), (r, 32, 16, "attention"), (r, 32, 32, "attention")]
        per_head = [(r, 8, c, None), (r, c, 8, None)] * 4  # scores, values
        old, new = [((c - r) * 16, FLOAT)] * 2, [(r * 16, FLOAT)] * 2  # keys and values
        # the softmax's five for each score; the norm's four and the residual's one for each number
        return counted(projections + per_head, {"read": row + old, "written": row + new}, {5: 4 * r * c + r * 32})
    if kind == "router":
        told = [(r * 2, FLOAT), (r * 2, INDEX)]
        return counted([(r, 32, 6, "router")], {"read": row, "written": row + told}, {4: r * 32, 5: r * 6})
    if kind in ("expert", "mlp"):
        width = 16 if kind == "expert" else 64 if layer == 0 else 24
        part = "experts" if kind == "expert" else "attention"
        gated = [(r, 32, width, part), (r, 32, width, part), (r, width, 32, part)]
        return counted(gated, {"read": row, "written": row}, {2: r * width})
    if kind == "combine":
        return counted([], {"read": row * 3, "written": row}, {2: 2 * r * 32, 1: r * 32})
    if kind == "norm":
        # two norms of four; the sum of both, the residual, the factor
        return counted([], {"read": row * 3, "written": row}, {4: 2 * r * 32, 1: 3 * r * 32})
    if kind == "head":
        return counted([(r, 32, 100, "head")], {"read": row, "written": [(r * 100, FLOAT)]}, {})
    return counted([], {"read": [(r * 100, FLOAT)], "written": [(r, INDEX)]}, {1: r * 100})


KINDS = ("embed", "dispatch", "attention", "router", "expert", "mlp", "combine", "norm", "head", "sample")


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_of_the_runtimes_subgraphs_equals_what_their_definitions_add_up_to(kind):
    rows, context, layer = np.array([1, 1, 5, 32]), np.array([1, 40, 5, 100]), np.array([0, 1, 2, 0])
    known = model_subgraphs({"model": {"path": "m", "config": CONFIG, "package": {"precisions": PRECISIONS}}})
    found = known.formulas[kind](WorkQuery(rows, context.astype(np.float64), layer))
    by_hand = [subgraph_by_hand(kind, *given) for given in zip(rows.tolist(), context.tolist(), layer.tolist(), strict=True)]
    assert pytest.approx(np.array(by_hand)) == np.array(found).T


def test_a_prompt_in_chunks_does_the_work_of_each_chunk_at_the_context_so_far():
    known = model_subgraphs({"model": {"path": "m", "config": CONFIG, "package": {"precisions": PRECISIONS}}})
    # Two layers, three chunks each, layer by layer; then a decoded token. Rows are not in order of time.
    order = np.array([5, 0, 3, 1, 4, 2, 6])
    rows, layer = np.array([16, 16, 7, 16, 16, 7, 1]), np.array([0, 0, 0, 1, 1, 1, 0])
    reached = np.array([116, 132, 139, 116, 132, 139, 140])
    columns = {"engine": ["moescope"] * 7, "type": ["attention"] * 7}
    columns = {name: pa.array(values).dictionary_encode() for name, values in columns.items()}
    columns |= {"token_id": np.array([0] * 6 + [1])[order], "layer": layer[order], "n_tokens": rows[order], "begin_ns": order}
    figures = {name: np.zeros(7) for name in ("flops", "read_bytes", "written_bytes")}
    known.fill(columns, np.where(columns["token_id"] == 0, 139.0, 140.0), figures)
    by_hand = [subgraph_by_hand("attention", r, c, 0) for r, c in zip(rows[order], reached[order], strict=True)]
    assert pytest.approx(np.array(by_hand)) == np.array(list(figures.values())).T


def test_layers_that_see_all_do_the_work_of_their_own_heads_and_project_no_values_that_are_keys():
    heads = {"head_dim": 16, "num_key_value_heads": 1}
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    gemma = {"layer_types": kinds, "sliding_window": 512, "per_layer_config": {"1": heads, "2": heads}, "attention_k_eq_v": True}
    given = WorkQuery(np.array([5] * 3), np.array([9.0] * 3), np.arange(3))
    mine, near, far = (
        np.array(
            model_subgraphs({"model": {"config": CONFIG | changes, "package": {"precisions": PRECISIONS}}}).attention(given)
        ).T
        for changes in (gemma, {}, heads)
    )
    unread = 32 * 16 * STORED["attention"]
    assert pytest.approx(np.array([near[0], *(far[1:] - [2 * 5 * 32 * 16, unread, 0])])) == mine


DELTA = CONFIG | {
    **{"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 3, "linear_num_value_heads": 4, "linear_value_head_dim": 5},
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(("r", "c"), [(1, 1), (1, 40), (5, 9)])
def test_the_work_of_delta_nets_and_gated_attention_equals_what_their_definitions_add_up_to(r, c):
    known = model_subgraphs({"model": {"path": "m", "config": DELTA, "package": {"precisions": PRECISIONS}}})
    found = np.array(known.formulas["attention"](WorkQuery(np.array([r] * 3), np.array([c] * 3, float), np.arange(3)))).T
    row = [(r * 32, FLOAT)]
    # Queries, keys, values (2 * 2 * 3 + 4 * 5 channels) and z; b and a, whose weights are floats as a router's; the way back.
    products = [(r, 32, 32, "attention"), (r, 32, 20, "attention"), (r, 32, 8, "router"), (r, 20, 32, "attention")]
    # Token by token and head by head: what the key foretells, what is learnt, what the query reads.
    products += [(1, 3, 5, None), (3, 1, 5, None), (1, 3, 5, None)] * 4 * r
    states = [(4 * 3 * 5, FLOAT), (3 * 32, FLOAT)]
    # The convolution's products and sums, and its activation; fading; the heads' norm and gate; norm and residual.
    elements = {2: r * 4 * 32 + r * 20, 1: r * 32 + r * 4 * 3 * 5 + r * 32, 4: r * 20 + r * 32}
    delta = counted(products, {"read": [*row, (4 * 32, FLOAT), *states], "written": row + states}, elements)
    flops, read, written = subgraph_by_hand("attention", r, c, 1)
    # The gate is as wide as the queries, which are as wide as the hidden state.
    gated = flops + 2 * r * 32 * 32 + 2 * r * 32, read + 32 * 32 * STORED["attention"], written
    assert pytest.approx(np.array([delta, gated, delta])) == found


@pytest.mark.parametrize("r", [1, 5])
def test_the_work_of_states_that_fade_by_channel_equals_what_their_definitions_add_up_to(r):
    kimi = CONFIG | {
        "model_type": "kimi_linear",
        "layer_types": DELTA["layer_types"],
        "linear_num_heads": 4,
        "linear_head_dim": 5,
    }
    known = model_subgraphs({"model": {"path": "m", "config": kimi, "package": {"precisions": PRECISIONS}}})
    found = np.array(known.formulas["attention"](WorkQuery(np.array([r]), np.array([9.0]), np.array([0])))).T[0]
    # Queries, keys, values; the output gate and the decays through 5 dimensions; a step for each head; the way back.
    products = [(r, 32, 60, "attention"), (r, 32, 5, "attention"), (r, 5, 20, "attention"), (r, 20, 32, "attention")]
    products += [(r, 32, 5, "router"), (r, 5, 20, "router"), (r, 32, 4, "router"), *[(1, 5, 5, None)] * 3 * 4 * r]
    states, row = [(4 * 5 * 5, FLOAT), (3 * 60, FLOAT)], [(r * 32, FLOAT)]
    # The convolution and its activation; fading; a channel's decay; the heads' norm and gate; norm and residual.
    elements = {2: r * 4 * 60 + r * 20, 1: r * 60 + r * 4 * 5 * 5 + r * 32, 4: r * 20 + r * 20 + r * 32}
    by_hand = counted(products, {"read": [*row, (4 * 60, FLOAT), *states], "written": row + states}, elements)
    assert pytest.approx(np.array(by_hand)) == found


def test_layers_of_one_part_do_the_work_of_that_part_alone_and_without_gates():
    nemotron = CONFIG | {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"]}
    nemotron |= {"mamba_num_heads": 2, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 4, "conv_kernel": 4}
    known = model_subgraphs({"model": {"path": "m", "config": nemotron, "package": {"precisions": PRECISIONS}}})
    asked = WorkQuery(np.array([5] * 4), np.array([9.0] * 4), np.arange(4))
    attention, mlp, expert = (np.array(known.formulas[kind](asked)).T for kind in ("attention", "mlp", "expert"))
    row, usual = [(5 * 32, FLOAT)], subgraph_by_hand("attention", 5, 9, 0)
    moved = counted([], {"read": row, "written": row}, {})
    widths = {2: (24, "attention"), 3: (64, "attention")}
    whole = {n: [(5, 32, width, part), (5, width, 32, part)] for n, (width, part) in widths.items()}
    assert pytest.approx(np.array([usual, moved, moved])) == attention[1:] and attention[0, 0] > 2 * 5 * 32 * 42
    by_hand = [counted(whole[n], {"read": row, "written": row}, {2: 5 * widths[n][0]}) for n in (2, 3)]
    assert pytest.approx(np.array([moved, moved, *by_hand])) == mlp
    experts = [(5, 32, 16, "experts"), (5, 16, 32, "experts")]
    assert pytest.approx(np.array(counted(experts, {"read": row, "written": row}, {2: 5 * 16}))) == expert[2]


def test_every_subgraph_of_the_runtime_has_a_formula():
    known = model_subgraphs({"model": {"path": "m", "config": CONFIG, "package": {}}})
    assert set(known.formulas) == set(KINDS) == {kind.name.lower() for kind in Kind}
