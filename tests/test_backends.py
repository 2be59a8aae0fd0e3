"""Equal operators on the CPU and elsewhere stand side by side: by type, role and shape, where both have a time of their own."""

import json
from pathlib import Path

import numpy as np
import pytest

from analyzer.questions import backends
from analyzer.records.schema import TABLES, empty_table
from moescope.__main__ import main
from workloads.recordings import Writer
from workloads.tables_fixture import Tables, frame

PRODUCT, SUM = ("MUL_MAT", "16x4x1x1"), ("ADD", "16x4x1x1")


def recording(*rows: tuple[str, tuple[str, str], str, int], npu: tuple[tuple[str, tuple[str, str], int], ...] = ()) -> Tables:
    """Operators (backend, type and shape, name, µs), each in a graph of its own, and profiled ones of the NPU."""
    begin = np.arange(len(rows)) * 1_000_000
    end, ids = begin + 1000 * np.array([us for *_, us in rows]), np.arange(len(rows))
    kinds, names = [kind for _, kind, _, _ in rows], [name for _, _, name, _ in rows]
    types, shapes = ([kind[i] for kind in kinds] for i in (0, 1))
    operators = frame("operators", op_id=ids, graph_id=ids, type=types, shape=shapes, name=names, begin_ns=begin, end_ns=end)
    graphs = frame("graphs", graph_id=ids, backend=[row[0] for row in rows], kind="ggml", begin_ns=begin, end_ns=end)
    measured = frame(
        "npu_operators", name=[n for n, *_ in npu], type=[k[0] for _, k, _ in npu], shape=[k[1] for _, k, _ in npu],
        us=[us for *_, us in npu],
    ) if npu else empty_table("npu_operators")  # fmt: skip
    return {**{name: empty_table(name) for name in TABLES}, "operators": operators, "graphs": graphs, "npu_operators": measured}


def shown(*recordings: Tables) -> list[list[object]]:
    return backends.compare_backends(*recordings).to_numpy(object).tolist()


def test_equal_operators_of_any_layer_are_compared_by_their_medians() -> None:
    on_cpu = [("cpu", PRODUCT, f"ffn_out-{layer}", us) for layer, us in enumerate((10, 30, 20))]
    on_blas = [("blas", PRODUCT, "ffn_out-3", 5), ("blas", PRODUCT, "ffn_out-4", 5), ("blas", SUM, "l_out-4", 7)]
    expected = [["MUL_MAT", "ffn_out", PRODUCT[1], "blas", 2, 5.0, 3, 20.0, 0.25]]
    assert shown(recording(*on_cpu, *on_blas)) == expected
    assert shown(recording(*on_cpu), recording(*on_blas)) == expected
    assert shown(recording(*on_cpu)) == []


def test_another_role_or_shape_is_another_operator() -> None:
    rows = [("cpu", PRODUCT, "ffn_out-0", 10), ("blas", PRODUCT, "ffn_up-0", 5), ("blas", ("MUL_MAT", "8x4x1x1"), "ffn_out-0", 5)]
    assert shown(recording(*rows)) == []


def test_what_is_only_submitted_has_its_profiles_time_and_else_none() -> None:
    rows = [("cpu", PRODUCT, "ffn_out-0", 10), ("vulkan", PRODUCT, "ffn_out-1", 1), ("hexagon", PRODUCT, "ffn_out-2", 1)]
    assert shown(recording(*rows)) == []
    profiled = recording(*rows, npu=(("ffn_out-2", PRODUCT, 40), ("ffn_out-3", PRODUCT, -1)))
    assert shown(profiled) == [["MUL_MAT", "ffn_out", PRODUCT[1], "hexagon", 1, 40.0, 1, 10.0, 4.0]]


def test_the_verb_says_where_nothing_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Writer().add("token_begin", ts=1000).add("token_end", ts=2000).write(tmp_path / "run")
    assert main(["npu", "backends", str(folder), str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operators"] == []
