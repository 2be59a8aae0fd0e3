"""Kernel predictors: what really fuses on ONNX Runtime and QNN, and regressors against times whose law is known."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.errors import PredictError
from analyzer.model import read_config
from analyzer.predict.kernels import backends, fusion, graphs, regressors, sampling, training
from analyzer.predict.kernels.backends import Cpu, Htp
from analyzer.predict.kernels.graphs import Shape
from analyzer.predict.kernels.law import cost_terms, weight_passes
from moescope.__main__ import main
from tests.conftest import drawn
from tests.golden import Golden

PRIOR = [(64, 256), (256, 64), (512, 512)]
CONFIGS = Path(__file__).parent / "data" / "infersim" / "hf_configs"


class Made:
    """A backend whose times are a law of the model's shapes, and that fuses Gemm with Relu."""

    name, unit, epoch = "made", "s", 0

    def times(self, models: list[bytes]) -> list[float]:
        single = [1.0, 0.3, 1.05]
        return single[: len(models)]

    def nodes(self, model: bytes) -> set[str]:
        return {"n0_Gemm"}


def law(kernel: str, shapes: list[Shape], held: float = 0) -> np.ndarray:
    """Seconds: operations at 20 G/s and bytes at 8 GB/s, in turn; weights at 4 the more a model holds of them."""
    first = kernel.split("+")[0]
    own = [s.of(first) for s in shapes]
    around = [held or s.weights(first) * s.copies for s in own]
    afar = [s.weights(first) * b / (b + (2 << 20)) for s, b in zip(own, around, strict=True)]
    return np.array([s.flops(first) / 20e9 + (s.bytes(first) + a) / 8e9 for s, a in zip(own, afar, strict=True)])


def test_what_vanishes_of_the_lesser_operator_decides() -> None:
    verdict = fusion.detect_fusion(Made(), "Gemm", "Relu", Shape(4, 8, 8))
    assert verdict.saved == pytest.approx(0.25 / 0.3)
    assert verdict.by_time
    assert verdict.by_nodes


def test_what_a_run_costs_is_no_fusion() -> None:
    backend = Made()
    fixed = fusion.fixed_saving(backend, Shape(4, 8, 8))
    verdict = fusion.detect_fusion(backend, "Gemm", "Relu", Shape(4, 8, 8), fixed_time=fixed)
    assert fixed == pytest.approx(0.25)
    assert verdict.saved == pytest.approx(0.0)
    assert not verdict.by_time


def test_onnx_runtime_fuses_an_activation_into_gemm_but_not_where_its_input_is_asked_for() -> None:
    cpu, shape = Cpu(runs=3, settle=0), Shape(16, 8, 16)
    found = {
        (first, second, many): fusion.detect_fusion(cpu, first, second, shape, many)
        for first, second in (("Gemm", "Relu"), ("MatMul", "Add"), ("MatMul", "Relu"), ("Add", "Relu"))
        for many in (False, True)
    }
    assert fusion.fusing_pairs(found.values()) == {("Gemm", "Relu"), ("MatMul", "Add")}
    assert not any(verdict.by_nodes for (_, _, many), verdict in found.items() if many)
    assert all(verdict.pair_time > 0 for verdict in found.values())


@pytest.mark.needs("htp")
def test_qnn_names_the_nodes_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnative_tls.conf").touch()
    monkeypatch.chdir(tmp_path)
    htp, shape = Htp(runs=2), Shape(32, 64, 64)
    fused, apart = (fusion.detect_fusion(htp, *pair, shape) for pair in (("MatMul", "Add"), ("MatMul", "Softmax")))
    assert (fused.by_nodes, apart.by_nodes) == (True, False)
    assert min(apart.first_time, apart.second_time, apart.pair_time) > 1


def test_chains_split_into_kernels_by_the_rules() -> None:
    links = graphs.chain(["Gemm", "Relu", "Relu", "Gemm", "Softmax"], Shape(8, 16, 32))
    kernels = fusion.split_chain(links, {("Gemm", "Relu")})
    assert [fusion.kernel_name(kernel) for kernel in kernels] == ["Gemm+Relu", "Relu", "Gemm", "Softmax"]
    assert kernels[2][0][1] == Shape(8, 32, 32)


def test_copies_of_a_kernel_keep_weights_of_their_own() -> None:
    shape = Shape(4, 16, 8, copies=3)
    session = ort.InferenceSession(graphs.repeated_model(["Gemm", "Relu"], shape), providers=["CPUExecutionProvider"])
    given = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    results = session.run(None, {"x": given})
    assert [graphs.link_of(output.name) for output in session.get_outputs()] == [1, 1, 1]
    assert len({result.tobytes() for result in results}) == 3


def test_operators_without_a_matrix_follow_each_other() -> None:
    session = ort.InferenceSession(graphs.repeated_model(["Sigmoid"], Shape(2, 8, 99)), providers=["CPUExecutionProvider"])
    wanted = given = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    for _ in range(graphs.IN_A_ROW):
        wanted = 1 / (1 + np.exp(-wanted))
    (found,) = session.run(None, {"x": given})
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_times_are_told_for_models_with_many_outputs() -> None:
    cpu, shape = Cpu(runs=2, settle=0), Shape(4, 16, 8, copies=5)
    models = [
        graphs.repeated_model(["MatMul"], shape),
        graphs.chain_model(graphs.chain(["Gemm", "Relu"], shape), all_outputs=True),
    ]
    assert all(0 < seconds < 60 for seconds in cpu.times(models))


def test_a_machine_that_turns_out_faster_begins_a_new_epoch() -> None:
    cpu, model = Cpu(runs=2, settle=0), graphs.repeated_model(["MatMul"], Shape(4, 16, 8))
    cpu.times([model])
    began = cpu.epoch
    cpu._usual = 100 * cpu._usual  # as if it had been slow until now
    cpu.times([model])
    assert cpu.epoch == began + 1


@pytest.mark.parametrize(("rows", "wanted"), [(1, 1), (6, 1), (7, 2), (12, 1), (13, 2), (18, 2), (19, 3), (64, 6)])
def test_rows_left_over_take_another_pass(rows: int, wanted: int) -> None:
    assert weight_passes(rows, (12, 6)) == wanted


def test_a_width_that_an_operator_does_not_have_says_nothing() -> None:
    one, other = regressors.feature_matrix("Softmax", [Shape(4, 64, 8), Shape(4, 64, 2048)])
    np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def trained() -> regressors.Predictors:
    made = regressors.Predictors("s", {("Gemm", "Relu")}, ("law", "law and forest"))
    for kernel in ("Gemm+Relu", "Gemm", "Softmax"):
        shapes, times = sampling.sample_adaptively(PRIOR, lambda s, k=kernel: law(k, s), regressors.quick_fit(kernel), 60, 2, 20)
        made.train(kernel, shapes, times)
    return made


def test_unseen_shapes_of_a_known_law_are_met(trained: regressors.Predictors) -> None:
    unseen = sampling.draw_shapes(PRIOR, 60, np.random.default_rng(7))
    assert {kernel.chosen for kernel in trained.kernels.values()} <= set(trained.candidates)
    for kernel in trained.kernels:
        told = regressors.accuracy(trained.kernel(kernel, unseen), law(kernel, unseen))
        assert told["within_10_percent"] >= 0.9
        assert told["rmspe"] < 0.1
    shapes = trained.kernels["Gemm"].shapes
    assert regressors.choose_regressor("Gemm", shapes, law("Gemm", shapes), ("forest", "law")) == "law"


def test_a_chain_is_the_sum_of_its_kernels_and_says_what_is_out_of_range(trained: regressors.Predictors) -> None:
    links = graphs.chain(["Gemm", "Relu", "Gemm", "Softmax"], Shape(16, 256, 256))
    seconds, warnings = trained.chain(links)
    shape = [Shape(16, 256, 256)]
    assert seconds == pytest.approx(sum(float(law(k, shape)[0]) for k in ("Gemm+Relu", "Gemm", "Softmax")), rel=0.1)
    assert warnings == []
    beyond = trained.chain(graphs.chain(["Gemm"], Shape(4000, 9000, 9000)))[1]
    assert [re.findall(r"\d+", text) for text in beyond] == [["4000", "9000", "9000"]]
    with pytest.raises(PredictError, match="Tanh"):
        trained.chain(graphs.chain(["Tanh"], Shape(4, 8, 8)))


def test_weights_that_leave_the_cache_between_two_runs_cost_more(trained: regressors.Predictors) -> None:
    shapes, near, afar = [Shape(1, 256, 512)], 1 << 19, 16 << 20
    for held in (near, afar):
        found = trained.kernel("Gemm", shapes, np.array([held]))
        np.testing.assert_allclose(found, law("Gemm", shapes, held), rtol=0.1)
    one, many = (trained.chain(graphs.chain(["Gemm"] * count, Shape(1, 512, 512)))[0] / count for count in (1, 8))
    assert many > 1.2 * one


def test_predictors_are_kept_with_where_they_were_measured(trained: regressors.Predictors, tmp_path: Path) -> None:
    trained.save(tmp_path / "kernels.json", "made")
    found = regressors.load_predictors(tmp_path / "kernels.json")
    shapes = [Shape(8, 128, 64), Shape(1, 64, 512)]
    np.testing.assert_array_equal(found.kernel("Gemm", shapes), trained.kernel("Gemm", shapes))
    assert found.environment["backend"] == "made"
    (tmp_path / "other").write_bytes(b"no predictors")
    with pytest.raises(PredictError, match="train again"):
        regressors.load_predictors(tmp_path / "other")


def test_sampling_is_finer_where_the_error_is_large() -> None:
    def cliff(shapes: list[Shape]) -> np.ndarray:
        return np.array([1e-3 * (20 if s.rows >= 32 else 1) * (s.k * s.n) ** 0.5 for s in shapes])

    shapes, times = sampling.sample_adaptively(PRIOR, cliff, regressors.quick_fit("Gemm"), 40, 3, 20)
    assert len(shapes) == len(times) == 100
    near = [16 <= shape.rows <= 64 for shape in shapes]
    assert np.mean(near[40:]) > np.mean(near[:40])


def test_the_prior_holds_the_products_of_the_models() -> None:
    found = sampling.widths_of([read_config(CONFIGS / "qwen3-30B-A3B_config.json")])
    assert {(2048, 768), (768, 2048), (2048, 4096)} <= set(found)


KEYS = st.sampled_from(["format", "unit", "fused", "measured_on", "kernels"])
DOCUMENTS = st.recursive(st.none() | st.just(1) | st.text(), lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner))


@settings(max_examples=drawn(60))
@given(st.binary(max_size=60) | DOCUMENTS.map(lambda document: json.dumps(document).encode()))
def test_a_file_that_holds_no_predictors_is_one_line_of_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_bytes(content)
    with pytest.raises(PredictError, match="train again"):
        regressors.load_predictors(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("regressor", "os.system"),
        ("shapes", [[0, 8, 8, 1]] * 60),
        ("shapes", [[8, 8]] * 60),
        ("times", [1.0]),
        ("times", [-1.0] * 100),
    ],
)
def test_a_file_that_was_changed_is_refused(trained: regressors.Predictors, tmp_path: Path, key: str, value: object) -> None:
    trained.save(tmp_path / "kernels.json", "made")
    facts = json.loads((tmp_path / "kernels.json").read_text())
    facts["kernels"]["Gemm"][key] = value
    (tmp_path / "kernels.json").write_text(json.dumps(facts))
    with pytest.raises(PredictError, match="train again"):
        regressors.load_predictors(tmp_path / "kernels.json")


def test_a_file_of_another_format_is_refused(trained: regressors.Predictors, tmp_path: Path) -> None:
    trained.save(tmp_path / "kernels.json", "made")
    facts = json.loads((tmp_path / "kernels.json").read_text())
    (tmp_path / "kernels.json").write_text(json.dumps(facts | {"format": 2}))
    with pytest.raises(PredictError, match="format 2"):
        regressors.load_predictors(tmp_path / "kernels.json")


class Lawful(Made):
    """A backend whose times are the law of the first operator's shape and whose nodes fuse Gemm with Relu."""

    def times(self, models: list[bytes]) -> list[float]:
        return [self._time(onnx.load_from_string(model)) for model in models]

    def _time(self, model: onnx.ModelProto) -> float:
        rows, k = (dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim)
        weights = [one.dims for one in model.graph.initializer]
        return 1e-6 * len(model.graph.node) + sum(rows * dims[0] * dims[-1] for dims in weights) / 1e10 + rows * k / 1e9

    def nodes(self, model: bytes) -> set[str]:
        names = [node.name for node in onnx.load_from_string(model).graph.node]
        return set(names) - ({"n1_Relu"} if names == ["n0_Gemm", "n1_Relu"] else set())


@pytest.fixture
def made_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "Cpu", lambda runs: Lawful())
    monkeypatch.setattr(regressors, "choose_regressor", lambda *measured: "law")
    monkeypatch.setattr(training, "PRIOR", [(64, 128), (128, 64)])


@pytest.mark.usefixtures("made_backend")
def test_predictors_are_trained_and_asked_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    trained = ["predict", "kernels", "train", "--out", str(file), "--start", "12", "--rounds", "0", "--held-out", "6", "--json"]
    assert main(trained) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"Gemm+Relu", "Gemm", "MatMul", "Sigmoid"} <= {row["kernel"] for row in told["kernels"]}
    assert all(row["repeated_rmspe"] == 0 for row in told["kernels"]), "the same law answers twice"
    predict = ["predict", "kernels", "predict", str(file), "--rows", "1,8"]
    assert main([*predict, "--widths", "64,128,64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["rows"] for one in told["predictions"]] == [1, 8]
    for one in told["predictions"]:
        assert [part["kernel"] for part in one["kernels"]] == ["Gemm+Relu", "Gemm"]
        assert one["time"] == pytest.approx(sum(part["time"] for part in one["kernels"]))
    assert told["measured_on"]["backend"] == "made"
    assert main([*predict, "--widths", "64,128,64"]) == 0
    assert "Gemm+Relu" in capsys.readouterr().out


@pytest.mark.usefixtures("made_backend")
def test_fusion_is_shown_from_the_command_line(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert main(["predict", "kernels", "fusion", "--json"]) == 0
    pairs = json.loads(capsys.readouterr().out)["pairs"]
    assert [(row["first"], row["second"]) for row in pairs if row["by_nodes"]] == [("Gemm", "Relu")] * 2
    assert main(["predict", "kernels", "fusion"]) == 0
    golden("predict", capsys.readouterr().out)


def test_a_wrong_question_is_answered_with_the_remedy(
    trained: regressors.Predictors, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    trained.save(tmp_path / "kernels.json", "made")
    for words in ("8,8", "8,x,8", "8,8,8 --rows 0", "8,8,8 --chain Gemm,Sin", "8,8 --chain Gemm,Tanh"):
        assert main(["predict", "kernels", "predict", str(tmp_path / "kernels.json"), "--widths", *words.split()]) == 2
    golden("predict", capsys.readouterr().err)


def test_most_widths_are_round_and_none_is_left_out() -> None:
    left_out = frozenset({(512, 512), (64, 256)})
    drawn = sampling.draw_shapes(PRIOR, 600, np.random.default_rng(3), left_out=left_out)
    assert not left_out & {(shape.k, shape.n) for shape in drawn}
    assert all(shape.k % 8 == shape.n % 8 == 0 for shape in drawn)
    assert sum(shape.k % 128 == 0 for shape in drawn) > 200
    wide = sampling.draw_shapes([(1024, 2048)], 600, np.random.default_rng(3))
    assert sum(shape.k % 1024 == 0 for shape in wide) > 100


def test_rows_a_page_apart_cost_a_tall_tile_more_and_nothing_else() -> None:
    def crowded(shape: Shape) -> set[float]:
        odd = cost_terms("Gemm", Shape(shape.rows, shape.k + 8, shape.n), 1e6)
        return {a for a, b in zip(cost_terms("Gemm", shape, 1e6), odd, strict=True) if a and not b}

    assert crowded(Shape(30, 1024, 64)) == {2 * 1024 * 64}
    assert crowded(Shape(30, 512, 64)) == crowded(Shape(11, 1024, 64)) == set()


class Brief:
    """A backend on which every kernel takes a fifth of a microsecond."""

    name, unit, epoch = "brief", "s", 0

    def times(self, models: list[bytes]) -> list[float]:
        return [0.2e-6 * len(onnx.load_from_string(model).graph.node) for model in models]

    def nodes(self, model: bytes) -> set[str]:
        return set()


def test_kernels_are_learned_from_where_their_model_takes_long_enough() -> None:
    made = regressors.Predictors("s", set(), ("law",))
    trained = training.train_kernel(Brief(), "Sigmoid", made, training.TrainingPlan([["Sigmoid"]], PRIOR, 12, 0, 0, 5))
    assert (len(trained.shapes), trained.judged.all()) == (12, True)
    np.testing.assert_allclose(trained.predicted, 0.2e-6)
    with pytest.raises(PredictError, match="Gemm"):
        training.train_kernel(Brief(), "Gemm", made, training.TrainingPlan([["Gemm"]], [(2304, 2304)], 12, 0, 0, 5))


def test_what_a_model_demands_is_told_by_its_file() -> None:
    shape = Shape(3, 64, 16, copies=4)
    assert graphs.flops_and_bytes(graphs.repeated_model(["Gemm", "Relu"], shape)) == (
        4 * shape.flops("Gemm"),
        4 * shape.weights("Gemm"),
    )
    assert graphs.flops_and_bytes(graphs.repeated_model(["Sigmoid"], shape)) == (0, 0)


def test_a_slow_moment_is_taken_out_by_the_references_that_are_like_the_model() -> None:
    cpu, paces = Cpu(runs=2, settle=0), np.array([1.8, 1.3, 1.1, 1.5])
    cpu._usual = np.array([160e-6, 100e-6, 700e-6, 90e-6])
    far = graphs.repeated_model(["MatMul"], Shape(1, 1024, 1024, copies=4))
    near, arithmetic = (graphs.repeated_model(["MatMul"], Shape(rows, 512, 512)) for rows in (1, 64))
    assert cpu._pace(far, paces) == pytest.approx(1.1, abs=0.02)
    assert cpu._pace(near, paces) == pytest.approx(1.3, abs=0.1)
    assert cpu._pace(arithmetic, paces) == pytest.approx(1.8, abs=0.05)
    assert cpu._pace(graphs.repeated_model(["Sigmoid"], Shape(64, 512, 512)), paces) == 1.5


def test_cycles_of_a_node_that_runs_in_pieces_are_added_up(tmp_path: Path) -> None:
    rows = (("Input", 1), ("mul:OpId_1 (cycles)", 20), ("mul:OpId_2", 5), ("add OpId_3", 7), ("Output", 2), ("mul:OpId_1", 3))
    lines = [f"0,NODE,{cycles},CYCLES,,,{name}" for name, cycles in rows]
    (tmp_path / "profile.csv").write_text("\n".join([*lines, "0,ROOT,9,US,,,mul"]))
    assert backends._node_cycles(tmp_path / "profile.csv") == [{"mul": 25, "add": 7}, {"mul": 3}]
