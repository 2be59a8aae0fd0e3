"""FLOPs and bytes against formulas written out by hand, from shapes alone and from recordings."""

import numpy as np
import pandas as pd
import pytest

from analyzer.ceilings import Ceilings
from analyzer.complexity import BLOCKS, GGML_TYPES, Facts, Tensor, expected_distinct, work_of
from analyzer.roofline import bounds, roofline
from analyzer.tables import load
from tests.recordings import Writer
from tests.tables_fixture import make

M, K, N, H = 256, 128, 5, 4
CEILINGS = Ceilings("Some CPU", 2, {"1": 10e9, "2": 20e9}, {"1": 50e9, "2": 100e9}, 1000.0)


@pytest.mark.parametrize(
    ("kind", "out", "sources", "facts", "expected"),
    [
        ("MUL_MAT", (M, N), [(K, M), (K, N)], Facts(), (2 * M * N * K, 4 * (K * M + K * N), 4 * M * N)),
        ("MUL_MAT", (64, N, H), [(32, 64, H), (32, N, H)], Facts(), (2 * 64 * N * H * 32, 4 * 32 * H * (64 + N), 4 * 64 * N * H)),
        (
            "MUL_MAT_ID",
            (M, 2, N),
            [(K, M, 8), (K, 1, N), (2, N)],
            Facts(3),
            (2 * K * M * 2 * N, 4 * (3 * K * M + K * N + 2 * N), 8 * M * N),
        ),
        ("GET_ROWS", (K, N), [(K, 1000), (N,)], Facts(), (0, 4 * (K * N + N), 4 * K * N)),
        ("SET_ROWS", (K, 1000), [(K, N), (N,), (K, 1000)], Facts(), (0, 4 * (K * N + N), 4 * K * N)),
        ("RMS_NORM", (K, N), [(K, N)], Facts(), (3 * K * N, 4 * K * N, 4 * K * N)),
        ("RMS_NORM+MUL", (K, N), [(K, N), (K,)], Facts(), (4 * K * N, 4 * (K * N + K), 4 * K * N)),
        ("SOFT_MAX", (K, N), [(K, N)], Facts(), (5 * K * N, 4 * K * N, 4 * K * N)),
        ("ADD", (K, N), [(K, N), (K,)], Facts(), (K * N, 4 * (K * N + K), 4 * K * N)),
        ("CPY", (K, N), [(K, N)], Facts(), (0, 4 * K * N, 4 * K * N)),
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
    assert work_of("FLASH_ATTN_EXT", Tensor((d, heads, rows)), sources, Facts(context=512)).flops == 2 * work.flops


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
    return load(w.write(folder))


def test_a_recorded_product_has_its_work_and_its_bound(tmp_path):
    tables = product(tmp_path / "run", 10_000)
    row = tables["operators"].iloc[0]
    moved = 4 * (64 * 32 + 64 + 32)
    assert (row["flops"], row["read_bytes"] + row["written_bytes"]) == (2 * 64 * 32, moved)
    found = roofline(tables, CEILINGS).iloc[0]
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
    assert bounds(pd.DataFrame(row), CEILINGS)["bound"].tolist() == [bound]


def test_ceilings_of_another_machine_are_not_used_for_a_recording():
    manifest, _ = make()
    assert CEILINGS.fits(manifest["machine"])
    assert not CEILINGS.fits(manifest["machine"] | {"cpus": 8})
    assert CEILINGS.of(1) == (10e9, 50e9) and CEILINGS.of(2) == (20e9, 100e9) == CEILINGS.of(16)
