"""Kernel predictors: what really fuses on ONNX Runtime and QNN, and regressors against times whose law is known."""

from pathlib import Path

import numpy as np
import pytest

from analyzer.predict.errors import PredictError
from analyzer.predict.kernels import fusion, graphs, regressors, sampling
from analyzer.predict.kernels.backends import Cpu, Htp
from analyzer.predict.kernels.graphs import Shape
from analyzer.predict.model import read_config

PRIOR = [(64, 256), (256, 64), (512, 512)]
CONFIGS = Path(__file__).parent / "data" / "infersim" / "hf_configs"


class Made:
    """A backend whose times are a law of the model's shapes, and that fuses Gemm with Relu."""

    name, unit = "made", "s"

    def times(self, models: list[bytes]) -> list[float]:
        single = [1.0, 0.3, 1.05]
        return single[: len(models)]

    def nodes(self, model: bytes) -> set[str]:
        return {"n0_Gemm"}


def law(kernel: str, shapes: list[Shape]) -> np.ndarray:
    """Seconds: operations at 20 G/s and bytes at 8 GB/s, in turn."""
    first = kernel.split("+")[0]
    return np.array([s.flops(first) / 20e9 + s.bytes(first) / 8e9 for s in shapes])


def test_what_vanishes_of_the_lesser_operator_decides() -> None:
    verdict = fusion.detect(Made(), "Gemm", "Relu", Shape(4, 8, 8))
    assert verdict.saved == pytest.approx(0.25 / 0.3)
    assert verdict.by_time
    assert verdict.by_nodes


def test_onnx_runtime_fuses_an_activation_into_gemm_but_not_where_its_input_is_asked_for() -> None:
    cpu, shape = Cpu(runs=3), Shape(16, 8, 16)
    found = {
        (first, second, many): fusion.detect(cpu, first, second, shape, many)
        for first, second in (("Gemm", "Relu"), ("MatMul", "Add"), ("MatMul", "Relu"), ("Add", "Relu"))
        for many in (False, True)
    }
    assert fusion.rules(found.values()) == {("Gemm", "Relu"), ("MatMul", "Add")}
    assert not any(verdict.by_nodes for (_, _, many), verdict in found.items() if many)
    assert all(verdict.pair_time > 0 for verdict in found.values())


@pytest.mark.needs("htp")
def test_qnn_names_the_nodes_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnative_tls.conf").touch()
    monkeypatch.chdir(tmp_path)
    htp, shape = Htp(runs=2), Shape(32, 64, 64)
    fused, apart = (fusion.detect(htp, *pair, shape) for pair in (("MatMul", "Add"), ("MatMul", "Softmax")))
    assert (fused.by_nodes, apart.by_nodes) == (True, False)
    assert min(apart.first_time, apart.second_time, apart.pair_time) > 1


def test_chains_split_into_kernels_by_the_rules() -> None:
    links = graphs.chain(["Gemm", "Relu", "Relu", "Gemm", "Softmax"], Shape(8, 16, 32))
    kernels = fusion.split(links, {("Gemm", "Relu")})
    assert [fusion.kernel_name(kernel) for kernel in kernels] == ["Gemm+Relu", "Relu", "Gemm", "Softmax"]
    assert kernels[2][0][1] == Shape(8, 32, 32)


@pytest.fixture(scope="module")
def trained() -> regressors.Predictors:
    made = regressors.Predictors("s", {("Gemm", "Relu")}, ("surface", "forest"))
    for kernel in ("Gemm+Relu", "Gemm", "Softmax"):
        shapes, times = sampling.adaptive(PRIOR, lambda s, k=kernel: law(k, s), regressors.quick_fit(kernel), 60, 2, 20)
        made.train(kernel, shapes, times)
    return made


def test_unseen_shapes_of_a_known_law_are_met(trained: regressors.Predictors) -> None:
    unseen = sampling.draw(PRIOR, 60, np.random.default_rng(7))
    assert set(trained.chosen.values()) <= set(trained.candidates)
    for kernel in trained.models:
        told = regressors.accuracy(trained.kernel(kernel, unseen), law(kernel, unseen))
        assert told["within_10_percent"] >= 0.9
        assert told["rmspe"] < 0.1


def test_a_chain_is_the_sum_of_its_kernels_and_says_what_is_out_of_range(trained: regressors.Predictors) -> None:
    links = graphs.chain(["Gemm", "Relu", "Gemm", "Softmax"], Shape(16, 256, 256))
    seconds, warnings = trained.chain(links)
    shape = [Shape(16, 256, 256)]
    assert seconds == pytest.approx(sum(float(law(k, shape)[0]) for k in ("Gemm+Relu", "Gemm", "Softmax")), rel=0.1)
    assert warnings == []
    assert any(
        "outside the measured shapes" in text for text in trained.chain(graphs.chain(["Gemm"], Shape(4000, 9000, 9000)))[1]
    )
    with pytest.raises(PredictError, match="Tanh"):
        trained.chain(graphs.chain(["Tanh"], Shape(4, 8, 8)))


def test_predictors_are_kept_with_where_they_were_measured(trained: regressors.Predictors, tmp_path: Path) -> None:
    trained.save(tmp_path / "kernels.joblib", "made")
    found = regressors.load(tmp_path / "kernels.joblib")
    shapes = [Shape(8, 128, 64), Shape(1, 64, 512)]
    np.testing.assert_array_equal(found.kernel("Gemm", shapes), trained.kernel("Gemm", shapes))
    assert found.environment["backend"] == "made"
    (tmp_path / "other").write_bytes(b"no predictors")
    with pytest.raises(PredictError, match="train again"):
        regressors.load(tmp_path / "other")


def test_sampling_is_finer_where_the_error_is_large() -> None:
    def cliff(shapes: list[Shape]) -> np.ndarray:
        return np.array([1e-3 * (20 if s.rows >= 32 else 1) * (s.k * s.n) ** 0.5 for s in shapes])

    shapes, times = sampling.adaptive(PRIOR, cliff, regressors.quick_fit("Gemm"), 40, 3, 20)
    assert len(shapes) == len(times) == 100
    near = [16 <= shape.rows <= 64 for shape in shapes]
    assert np.mean(near[40:]) > np.mean(near[:40])


def test_the_prior_holds_the_products_of_the_models() -> None:
    found = sampling.widths_of([read_config(CONFIGS / "qwen3-30B-A3B_config.json")])
    assert {(2048, 768), (768, 2048), (2048, 4096)} <= set(found)
