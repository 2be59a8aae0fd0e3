"""llama.cpp whose large products BLAS computes: they are told in their place among the CPU's operators, with their times."""

import subprocess

import numpy as np
import pytest

from analyzer.questions import accelerators
from tests.test_llamacpp_split import traced
from tests.test_llamacpp_truth import Both, Run, fused
from tests.test_step_time import by_step
from workloads import llama_libraries
from workloads.gguf_model import SMALL

pytestmark = [pytest.mark.long, pytest.mark.needs("probes", "BLAS")]
PROMPT = 64  # BLAS takes products of 32 rows and more


@pytest.fixture(scope="module")
def blas(tmp_path_factory: pytest.TempPathFactory) -> Both:
    try:
        library = llama_libraries.with_blas()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"llama.cpp's source cannot be fetched or built here: {error}")
    run = Run([[PROMPT, 1, PROMPT]], SMALL, library=str(library), levels="token,graph,operator,expert,sched")
    return Both(tmp_path_factory.mktemp("blas"), run)


def test_every_operator_is_seen_in_order_with_its_name_and_shape(blas: Both) -> None:
    for step in range(len(blas.place)):
        seen = traced(blas, step)
        assert fused([operator for _, operator in seen]) == fused(blas.computed(step)), f"step {step}"
        assert ("blas" in {backend for backend, _ in seen}) == (blas.tables["tokens"]["n_tokens"][step] == PROMPT)


def test_blas_computes_products_and_a_graphs_time_is_its_operators(blas: Both) -> None:
    graphs, operators = blas.tables["graphs"], blas.tables["operators"]
    on_blas = graphs.loc[graphs["backend"] == "blas", ["graph_id", "duration_ns"]]
    products = operators.merge(on_blas, on="graph_id", suffixes=("", "_of_graph"))
    assert set(products["type"]) == {"MUL_MAT"} and products["complete"].all()
    by_graph = products.groupby("graph_id")
    spent, lasted = by_graph["duration_ns"].sum(), by_graph["duration_ns_of_graph"].first()
    assert (spent <= lasted).all() and np.median(lasted - spent) < 50_000
    assert by_graph.size().max() > 1 and (products["duration_ns"] > 0).all()


def test_they_are_among_the_cpus_operators_and_the_causes_add_up(blas: Both) -> None:
    rows, total = by_step(blas.tables), blas.tables["tokens"].set_index("token_id")["duration_ns"]
    assert (rows.sum(axis=1) == total).all()
    assert rows["residual"].sum() < 0.01 * total.sum()
    assert not rows[["accelerator", "submission", "transport"]].any(axis=None)
    assert not accelerators.fallen_back(blas.tables).any() and len(accelerators.submissions(blas.tables)) == 0
