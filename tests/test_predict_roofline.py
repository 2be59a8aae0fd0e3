"""Roofline: against published throughput, transformers' parameters, PyTorch's operation count, and closed forms."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.errors import PredictError
from analyzer.model import FAMILIES_NOT_MODELLED, FULL_EVERY, NOT_MODELLED, Indexer, Model, model_of, read_config, with_weights
from analyzer.predict import devices, links, roofline
from analyzer.predict.beside import compare_operators, setup_differences
from analyzer.predict.prediction import predict_step, weight_bytes
from analyzer.predict.setup import Setup
from analyzer.tables.complexity import expected_distinct
from moescope.__main__ import main
from tests.conftest import drawn
from workloads import tables_fixture

CONFIGS = Path(__file__).parent / "data" / "infersim" / "hf_configs"
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128}
SIZES |= {"intermediate_size": 96, "tie_word_embeddings": False, "pad_token_id": None}
GQA = {"num_key_value_heads": 2, "head_dim": 16}
MLA = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GQA},
    "mixtral": {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
    "deepseek_v3": {**MLA, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
    | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    "glm4_moe_lite": {**MLA, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"mlp_layer_types": ["dense", "sparse", "dense"], "num_key_value_heads": 4},
    "afmoe": {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
    | {"num_shared_experts": 1, "sliding_window": 512},
    "minimax_m2": {**GQA, "num_local_experts": 8, "num_experts_per_tok": 2, "attn_type_list": [1, 1, 1]},
    "solar_open": {**GQA, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "hunyuan_v1_moe": {**GQA, "num_experts": 8, "moe_topk": 2},
    "beam": {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 512},
    "laguna": {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "gating": "per-element"}
    | {"shared_expert_intermediate_size": 48},
    "ernie4_5_moe": {**GQA, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
    | {"num_hidden_layers": 6, "moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2},
    "exaone_moe": {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 512},
    "flex_olmo": {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2},
    "arcee": {**GQA},
    "qwen3_next": {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4}
    | {"shared_expert_intermediate_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    | {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    "granitemoehybrid": {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48, "mamba_n_heads": 8, "mamba_d_head": "auto"}
    | {"mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 32},
    "kimi_linear": {**MLA, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_key_value_heads": 4}
    | {"linear_num_heads": 4, "linear_head_dim": 16},
    "nemotron_h": {**GQA, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "mlp"]}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 64},
    "gemma4_text": {**GQA, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0}
    | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
}


@dataclass(frozen=True)
class Published:
    """A row of InferSim's table: tokens per second and device, measured and predicted by InferSim."""

    config: str
    device: str
    setup: Setup
    measured: float
    infersim: float
    weights: str = ""


PUBLISHED = {
    "DeepSeek-V3 prefill": Published("deepseek_v3", "h800", Setup("prefill", 4, 4096, ep=32, overlap="pipeline"), 7839, 9034),
    "DeepSeek-V3 decode": Published(
        "deepseek_v3", "h800", Setup("decode", 128, 4096 + 1786 // 2, ep=128, overlap="hidden"), 2324, 2675
    ),
    "Qwen3-30B-A3B prefill": Published("qwen3-30B-A3B", "h20", Setup("prefill", 4, 4096), 16594, 17350),
    "Qwen3-30B-A3B decode": Published("qwen3-30B-A3B", "h20", Setup("decode", 100, 5120, ep=4), 2749, 2632),
    "Qwen3-8B (dense) prefill": Published("qwen3-8B", "h20", Setup("prefill", 4, 4096), 15061, 16328, "fp8"),
    "Qwen3-8B (dense) decode": Published("qwen3-8B", "h20", Setup("decode", 64, 5120), 2682, 2581, "fp8"),
}


def config(name: str) -> Model:
    return read_config(CONFIGS / f"{name}_config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_phase_is_within_a_fifth_of_infersim(name: str) -> None:
    row = PUBLISHED[name]
    model = with_weights(config(row.config), row.weights) if row.weights else config(row.config)
    found = predict_step(model, devices.load_device(row.device), row.setup).tokens_per_s
    print(
        f"{name}: {found:.0f} tokens/s, {found / row.infersim - 1:+.1%} of InferSim, {found / row.measured - 1:+.1%} of measured"
    )
    assert found == pytest.approx(row.infersim, rel=0.20)
    assert found == pytest.approx(row.measured, rel=0.15)


def transformers_model(family: str) -> Any:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    made._attn_implementation = made._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model]:
    """transformers' model and ours, read from the config that transformers writes."""
    oracle = transformers_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    oracle.config.save_pretrained(folder)
    return oracle, read_config(folder)


def test_weights_are_those_of_transformers(both: tuple[Any, Model]) -> None:
    oracle, model = both
    skipped = ("norm", "bias", "mlp.gate.weight", "router", "shared_expert_gate", "block_sparse_moe.gate", "e_score")
    skipped += ("conv1d", "A_log", "mamba.D", "mixer.D", "mixer.gate", "mlp.gate.wg")
    counted = sum(p.numel() for name, p in oracle.named_parameters() if not any(part in name for part in skipped))
    assert weight_bytes(model, Setup("decode", 1, 1)) * 8 / 32 == pytest.approx(counted, rel=1e-9)


def test_operations_are_those_that_pytorch_counts(both: tuple[Any, Model]) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    oracle, model = both
    rows = roofline.DELTA_CHUNK
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        oracle(torch.arange(rows)[None], use_cache=False)
    setup = Setup("prefill", 1, rows)
    parts = roofline.work_items(
        model, roofline.unit_peak(devices.load_device("rk3588"), model, replace(setup, unit="cpu")), setup
    )
    whole = {part.name: part.flops * part.times for part in parts}
    whole["head"] *= rows
    for name in whole.keys() & {"attention core", "attention core, window 512"}:
        whole[name] *= 2
    if delta := model.delta:  # PyTorch does not count solving triangular systems, or products in steps with decays by channel
        solved = 2 * roofline.DELTA_CHUNK * (2 * delta.key_dim if delta.gate_rank else delta.key_dim + delta.value_dim)
        whole["delta rule"] -= model.delta_layers * rows * delta.value_heads * solved
    if state := model.mamba:  # transformers computes a group's scores for each of its heads
        whole["state space"] += model.delta_layers * rows * 2 * state.chunk * state.state * (state.heads - state.groups)
    assert sum(whole.values()) == pytest.approx(counter.get_total_flops(), rel=0.01)


@settings(max_examples=drawn(25))
@given(st.integers(4, 64), st.integers(1, 40), st.data())
def test_distinct_experts_are_those_of_uniform_routing(experts: int, tokens: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    random = np.random.default_rng(experts * 1000 + tokens)
    seen = [len(np.unique(random.random((tokens, experts)).argsort(1)[:, :k])) for _ in range(200)]
    assert expected_distinct(experts, k, tokens) == pytest.approx(np.mean(seen), abs=0.35 + 0.02 * experts)


def test_few_rows_wait_for_their_experts_weights() -> None:
    made = predict_step(config("qwen3-30B-A3B"), devices.load_device("snapdragon-x-elite"), Setup("decode", 1, 128, unit="npu"))
    up = next(part for part in made.parts if part.name == "experts up")
    assert up.bound == "memory"
    assert up.weight_bytes == 8 * 2048 * 2 * 768 * 2
    assert up.memory_s == pytest.approx((up.weight_bytes + up.activation_bytes) / 65e9)


def test_shared_experts_come_on_top_of_routed_ones() -> None:
    model = config("deepseek_v3")
    assert model.mixture
    alone = replace(model, mixture=replace(model.mixture, shared_width=0))
    setup = Setup("decode", 64, 4096, ep=64)
    both_made, one = (predict_step(m, devices.load_device("h800"), setup) for m in (model, alone))
    shared = sum(p.seconds * p.times for p in both_made.parts if p.name.startswith("shared"))
    assert shared > 0
    assert both_made.seconds - one.seconds == pytest.approx(shared)


def test_layers_without_experts_are_reduced_too() -> None:
    model, setup = config("deepseek_v3"), Setup("decode", 8, 1024, tp=4)
    prediction = predict_step(model, devices.load_device("h800"), setup)
    row = next(row for row in prediction.rows() if row["part"] == "all-reduce")
    assert sum(model.routed) < model.layers == row["layers"]
    assert row["step_ms"] == pytest.approx(row["us"] * model.layers / 1e3)


def test_decode_sends_each_row_to_each_of_its_experts() -> None:
    model, device = config("deepseek_v3"), devices.load_device("h800")
    assert model.mixture
    setup = Setup("decode", 64, 4096, ep=128)
    there = links.all_to_all("dispatch", device, model.mixture, setup, 64, model.hidden)
    back = links.all_to_all("combine", device, model.mixture, setup, 64, model.hidden)
    assert there.bytes == pytest.approx(64 * 8 * 7168 * 127 / 128)
    assert there.seconds == pytest.approx(there.bytes / (50e9 * 0.8))
    assert back.bytes == 2 * there.bytes
    assert links.all_to_all("dispatch", device, model.mixture, replace(setup, ep=1), 64, model.hidden).bytes == 0


@given(*(st.floats(1e-6, 1e-3) for _ in range(4)))
def test_hiding_communication_never_beats_computing_nor_loses_to_waiting(a: float, e: float, sent: float, back: float) -> None:
    plain, *hidden = (
        links.layer_time(a, e, sent, back, Setup("decode", 8, 8, ep=2, overlap=kind), 1.0)[0]
        for kind in ("none", "pipeline", "hidden")
    )
    for seconds in hidden:
        assert max(2 * (a + e), 2 * max(sent, back)) <= seconds * (1 + 1e-9)
        assert seconds <= 2 * plain * (1 + 1e-9)
    assert hidden[1] <= hidden[0] * (1 + 1e-9)


def test_a_window_limits_what_attention_reads(tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "qwen3-8B_config.json").read_text())
    values |= {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 18}
    (tmp_path / "config.json").write_text(json.dumps(values))
    parts = predict_step(read_config(tmp_path), devices.load_device("h20"), Setup("decode", 4, 4096)).parts
    near, far = (part for part in parts if part.name.startswith("attention core"))
    assert (near.times, far.times) == (18, 18)
    assert far.kv_bytes == 32 * near.kv_bytes


@pytest.mark.parametrize(
    ("quantization", "linear", "expert", "compute"),
    [
        ({"quant_method": "fp8"}, 8, 8, "fp8"),
        ({"quant_method": "mxfp4"}, 16, 4.25, "fp16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128, 4 + 20 / 128, "fp16"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8}, "input_activations": {"x": 1}}},
            },
            8,
            8,
            "int8",
        ),
    ],
)
def test_quantization_is_read(tmp_path: Path, quantization: dict[str, Any], linear: float, expert: float, compute: str) -> None:
    values = json.loads((CONFIGS / "qwen3-30B-A3B_config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(values))
    storage = read_config(tmp_path).storage
    assert (storage.linear, storage.expert, storage.compute) == (linear, expert, compute)


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "vocab_size", "num_experts_per_tok", "num_attention_heads"]
)
def test_a_missing_field_is_named(tmp_path: Path, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads((CONFIGS / "qwen3-30B-A3B_config.json").read_text())
    del values[field]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["predict", "--config", str(tmp_path), "--device", "h20", "--phase", "decode"]) == 2
    told = capsys.readouterr().err
    assert field in told
    assert told.count("\n") == 1


def test_layers_that_are_not_modelled_are_refused(tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "qwen3-8B_config.json").read_text()) | {"layer_types": ["chunked_attention"] * 36}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(PredictError, match="chunked_attention"):
        read_config(tmp_path)


@pytest.mark.parametrize("field", NOT_MODELLED)
def test_a_field_that_changes_the_arithmetic_is_refused(tmp_path: Path, field: str) -> None:
    values = json.loads((CONFIGS / "qwen3-8B_config.json").read_text()) | {field: 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(PredictError, match=field):
        read_config(tmp_path)


@pytest.mark.parametrize("changes", [{"mlp_layer_types": ["odd"] * 48}, {"n_routed_experts": 4}, {"moe_topk": 2}])
def test_fields_that_contradict_each_other_or_are_unknown_are_refused(changes: dict[str, Any]) -> None:
    values = json.loads((CONFIGS / "qwen3-30B-A3B_config.json").read_text()) | changes
    with pytest.raises(PredictError, match=next(iter(changes))):
        model_of(values, CONFIGS)


@pytest.mark.parametrize("family", FAMILIES_NOT_MODELLED)
def test_a_model_type_with_arithmetic_of_its_own_is_refused(tmp_path: Path, family: str) -> None:
    values = json.loads((CONFIGS / "qwen3-8B_config.json").read_text()) | {"model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(PredictError, match=family):
        read_config(tmp_path)


@pytest.mark.parametrize("family", FULL_EVERY)
def test_layers_with_a_window_are_those_of_transformers_where_the_config_does_not_list_them(family: str) -> None:
    configs = pytest.importorskip("transformers.models.auto.configuration_auto")
    values = configs.CONFIG_MAPPING[family]().to_dict()
    kinds = values.pop("layer_types")
    windows = model_of(values, Path(family)).windows
    assert [window is not None for window in windows] == [kind == "sliding_attention" for kind in kinds]
    assert len(set(kinds)) == 2


def test_a_window_in_unknown_layers_is_refused() -> None:
    values = json.loads((CONFIGS / "qwen3-8B_config.json").read_text())
    windowed = values | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}
    with pytest.raises(PredictError, match="layer_types"):
        model_of(windowed, CONFIGS)
    assert model_of(windowed | {"use_sliding_window": False}, CONFIGS).windows == (None,) * 36


def test_linear_layers_are_told_by_their_interval_or_by_name(tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "qwen3-next-80B-A3B_config.json").read_text())
    by_interval = config("qwen3-next-80B-A3B")
    values["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 12
    del values["full_attention_interval"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert replace(read_config(tmp_path), name=by_interval.name) == by_interval
    assert (len(by_interval.windows), by_interval.delta_layers) == (12, 36)


@pytest.mark.parametrize(
    ("setup", "measured_us"), [(Setup("decode", 256, 5120, ep=4), 532), (Setup("prefill", 1, 4096, ep=2), 592)]
)
def test_linear_attention_takes_what_was_measured(setup: Setup, measured_us: float) -> None:
    made = predict_step(with_weights(config("qwen3-next-80B-A3B"), "fp8"), devices.load_device("h20"), setup)
    rule = next(part for part in made.parts if part.name == "delta rule")
    assert rule.times == 36
    assert rule.seconds * 1e6 == pytest.approx(measured_us, rel=1e-3)


def test_linear_layers_cost_what_infersim_says() -> None:
    made = predict_step(
        with_weights(config("qwen3-next-80B-A3B"), "fp8"), devices.load_device("h20"), Setup("decode", 256, 5120, ep=4)
    )
    print(f"TPOT {made.seconds * 1e3:.2f} ms, InferSim 48.64")
    assert made.seconds * 1e3 == pytest.approx(48.64, rel=0.15)


@pytest.mark.parametrize(
    ("phase", "batch", "context", "scores_us", "core_us"),
    [("decode", 64, 16384, 61.446, 96.533), ("decode", 64, 131072, 394.036, 96.536)],
)
def test_indexed_attention_takes_what_was_measured(
    phase: str, batch: int, context: int, scores_us: float, core_us: float
) -> None:
    made = predict_step(config("deepseek_v3.2"), devices.load_device("h800"), Setup(phase, batch, context, ep=64))
    scores, core = (next(p for p in made.parts if p.name.startswith(name)) for name in ("index scores", "attention core"))
    assert scores.compute_s * 1e6 == pytest.approx(scores_us, rel=1e-3)
    assert core.compute_s * 1e6 == pytest.approx(core_us, rel=1e-3)


def test_indexed_attention_no_longer_grows_with_context() -> None:
    sparse, device = config("deepseek_v3.2"), devices.load_device("h800")
    dense = replace(sparse, attention=replace(sparse.attention, indexer=None))
    seconds = {
        (name, context): predict_step(model, device, Setup("decode", 64, context, ep=64)).seconds
        for name, model in (("sparse", sparse), ("dense", dense))
        for context in (2048, 16384, 131072)
    }
    assert seconds["sparse", 2048] >= seconds["dense", 2048]
    for context in (16384, 131072):
        assert seconds["sparse", context] < seconds["dense", context]
    grown = {name: seconds[name, 131072] - seconds[name, 16384] for name in ("sparse", "dense")}
    assert grown["sparse"] < 0.25 * grown["dense"]


def test_weights_of_an_indexer_are_those_of_transformers() -> None:
    pytest.importorskip("transformers.models.deepseek_v32")
    assert indexer_parameters() == sum(k * n for k, n in roofline.index_products(Indexer(4, 16, 8), 64, 48).values())


def indexer_parameters() -> int:
    """Weights of transformers' indexer, without its norm."""
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    made = DeepseekV32Config(**SIZES, **MLA, index_n_heads=4, index_head_dim=16, index_topk=8)
    parameters = DeepseekV32Indexer(made, 0).named_parameters()
    return sum(weights.numel() for name, weights in parameters if "norm" not in name)


def test_what_is_out_of_range_warns() -> None:
    model = config("qwen3-30B-A3B")
    inside = predict_step(model, devices.load_device("h20"), Setup("decode", 100, 5120, ep=4)).warnings
    outside = predict_step(model, devices.load_device("h20"), Setup("decode", 2000, 50_000, ep=4)).warnings
    assert not any("outside" in text or "exceeds" in text or "GB" in text for text in inside)
    assert all(any(figure in text for text in outside) for figure in ("batch 2000", "context 50000", "96 GB"))


def test_the_command_tells_the_source_of_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "--config", str(CONFIGS / "deepseek_v3_config.json"), "--device", "h800", "--phase", "decode"]
    assert main([*words, "--batch", "128", "--context", "4989", "--ep", "128", "--overlap", "hidden", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert all(row["source"] for row in answer["parts"])
    assert any("grouped_gemm/decode/h800/data.csv:" in row["source"] for row in answer["parts"])
    assert answer["summary"]["tpot_ms"] == pytest.approx(128 / answer["summary"]["tokens_per_s"] * 1e3)


@pytest.mark.parametrize("name", devices.packaged_names())
def test_every_profile_says_where_its_figures_are_from(name: str) -> None:
    device = devices.load_device(name)
    assert device.sources
    assert 0 < device.efficiency <= 1
    assert predict_step(config("qwen3-30B-A3B"), device, Setup("decode", 1, 512)).seconds > 0


def test_a_profile_without_a_figure_names_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[units.cpu]\ntera_per_s = { fp32 = 1 }\nmfu = 1\n[memory]\ngigabytes = 1\n')
    with pytest.raises(PredictError, match="gigabytes_per_s"):
        devices.load_device(str(path))


def test_measured_operators_stand_beside_the_predicted_parts() -> None:
    made = predict_step(config("qwen3-30B-A3B"), devices.load_device("rk3588"), Setup("decode", 1, 512))
    _, tables = tables_fixture.make_tables(tokens=8)
    found = compare_operators(made, tables).set_index("type")
    expected = sum(row["step_ms"] for row in made.rows() if row["part"].startswith("attention"))
    steps = tables["tokens"].query("phase == 'decode'")["token_id"]
    mine = tables["operators"].query("type == 'attention'")
    measured = mine[mine["token_id"].isin(steps)]["duration_ns"].sum() / len(steps) / 1e6
    assert found.loc["attention", "predicted_ms"] == pytest.approx(expected)
    assert found.loc["attention", "measured_ms"] == pytest.approx(measured)
    assert found.loc["attention", "achieved"] == pytest.approx(expected / measured)
    assert np.isnan(found.loc["rms_norm", "predicted_ms"])
    assert "512" in setup_differences(made, tables)
    with pytest.raises(PredictError, match="attention"):
        compare_operators(made, {**tables, "operators": tables["operators"].assign(type="MUL_MAT")})


@pytest.mark.parametrize("line", ["gigabytes_per_s = 0", "efficiency = 0", "mfu = 0.0", "gigabytes_per_s = -1", "mfu = nan"])
def test_a_device_without_a_speed_is_refused(tmp_path: Path, line: str) -> None:
    name, text = line.split(" = ")[0], (devices.HERE / "h20.toml").read_text()
    (tmp_path / "device.toml").write_text(re.sub(rf"^{name} = .*$", line, text, count=1, flags=re.M))
    with pytest.raises(PredictError, match=name):
        devices.load_device(str(tmp_path / "device.toml"))


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads"])
def test_a_model_without_heads_is_refused(tmp_path: Path, name: str) -> None:
    values = json.loads((CONFIGS / "qwen3-8B_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {name: 0}))
    with pytest.raises(PredictError, match=name):
        read_config(tmp_path)


ODD_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no chosen experts": ("qwen3-30B-A3B", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    "more chosen than there are": ("qwen3-30B-A3B", {"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than"),
    "heads without numbers": ("qwen3-30B-A3B", {"head_dim": 0}, "head_dim is 0"),
    "half a layer": ("qwen3-30B-A3B", {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    "no layers": ("qwen3-8B", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "32 heads over 5": ("qwen3-30B-A3B", {"num_key_value_heads": 5}, "num_attention_heads 32 are not a multiple"),
    "more KV heads than heads": ("qwen3-8B", {"num_key_value_heads": 64}, "not a multiple of num_key_value_heads 64"),
    "hidden not over heads": ("qwen3-8B", {"head_dim": None, "hidden_size": 4097}, "hidden_size 4097"),
    "no vocabulary": ("qwen3-8B", {"vocab_size": 0}, "vocab_size is 0"),
    "negative width": ("qwen3-30B-A3B", {"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
    "experts without width": (
        "qwen3-30B-A3B",
        {"moe_intermediate_size": 0, "intermediate_size": 0},
        "moe_intermediate_size is 0",
    ),
    "experts by layer": ("qwen3-30B-A3B", {"num_experts": [64, 64]}, "num_experts is"),
    "Gemma 3n streams": ("qwen3-8B", {"altup_num_inputs": 4}, "altup_num_inputs"),
    "Gemma 3n branch": ("qwen3-8B", {"laurel_rank": 64}, "laurel_rank"),
    "Gemma 3n sparsity": ("qwen3-8B", {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 26}, "activation_sparsity_pattern"),
    "Gemma 3n embeddings": ("qwen3-8B", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
    "Gemma 3n shared caches": ("qwen3-8B", {"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
    "Hunyuan's caches of several layers": ("qwen3-8B", {"use_cla": True, "cla_share_factor": 2}, "use_cla"),
    "widths by layer": ("qwen3-8B", {"intermediate_size": [16384] * 36}, "intermediate_size is"),
    "too few layer types": ("qwen3-8B", {"layer_types": ["full_attention"] * 30}, "layer_types lists 30 layers"),
    "unknown type": ("qwen3-8B", {"torch_dtype": "float12"}, "float12"),
    "dense layers without width": ("qwen3-30B-A3B", {"mlp_only_layers": [0], "intermediate_size": None}, "1 of 48 layers"),
    "linear heads that do not divide": ("qwen3-next-80B-A3B", {"linear_num_value_heads": 33}, "linear_num_value_heads 33"),
    "heads by layer": ("qwen3-8B", {"num_attention_heads_per_layer": [16] * 36}, "num_attention_heads_per_layer"),
    "0 bits": ("qwen3-8B", {"quantization_config": {"quant_method": "gptq", "bits": 99}}, "99 bits"),
    "quantization as a list": ("qwen3-8B", {"quantization_config": ["gptq"]}, "quantization_config must be an object"),
    "an indexer without its queries": ("deepseek_v3.2", {"q_lora_rank": 0}, "index_topk"),
    "a latent rank of text": ("deepseek_v3", {"kv_lora_rank": ""}, "kv_lora_rank is ''"),
    "latent queries as a list": ("deepseek_v3.2", {"q_lora_rank": []}, "q_lora_rank is []"),
    "layers as text": ("qwen3-8B", {"num_hidden_layers": "36"}, "num_hidden_layers is '36'"),
    "a flag for heads": ("qwen3-8B", {"num_attention_heads": True}, "num_attention_heads is True"),
    "no number of experts": ("qwen3-30B-A3B", {"num_experts": float("nan")}, "num_experts is nan"),
    "endless vocabulary": ("qwen3-8B", {"vocab_size": float("inf")}, "vocab_size is inf"),
    "more layers than any": ("qwen3-8B", {"num_hidden_layers": 2**70}, "num_hidden_layers is"),
    "an object for a width": ("qwen3-8B", {"hidden_size": {"a": 1}}, "hidden_size is"),
    "half a window": ("qwen3-8B", {"sliding_window": 0.5, "use_sliding_window": True}, "sliding_window is 0.5"),
    "latent attention without keys": ("deepseek_v3", {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0}, "qk_nope_head_dim"),
}


@pytest.mark.parametrize("name", ODD_CONFIGS)
def test_an_odd_config_is_refused_by_the_field_s_name(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, change, named = ODD_CONFIGS[name]
    values = json.loads((CONFIGS / f"{model}_config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["predict", "--config", str(tmp_path), "--device", "h20", "--phase", "decode"]) == 2
    told = capsys.readouterr().err
    assert named in told and told.count("\n") == 1


EVEN_CONFIGS: dict[str, tuple[str, dict[str, Any], float]] = {
    "whole numbers as floats": ("qwen3-8B", {"num_hidden_layers": 36.0}, 1.0),
    "a single expert": ("qwen3-30B-A3B", {"num_experts": 1, "num_experts_per_tok": 1}, 0.0),
    "every expert": ("qwen3-30B-A3B", {"num_experts_per_tok": 128}, 0.0),
    "sparsity of zeros": ("qwen3-8B", {"activation_sparsity_pattern": [0.0] * 36}, 1.0),
    "one KV head": ("qwen3-8B", {"num_key_value_heads": 1}, 0.0),
    "a mixture that is switched off": ("qwen3-30B-A3B", {"enable_moe_block": False}, 0.0),
    "dtype with a prefix": ("qwen3-8B", {"torch_dtype": "torch.bfloat16"}, 1.0),
}


@pytest.mark.parametrize("name", EVEN_CONFIGS)
def test_an_unusual_config_is_priced(tmp_path: Path, name: str) -> None:
    """With `same` = 1 like the original, else at a time of its own."""
    model, change, same = EVEN_CONFIGS[name]
    values = json.loads((CONFIGS / f"{model}_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    setup = Setup("decode", 4, 512)
    found = predict_step(read_config(tmp_path), devices.load_device("h20"), setup).seconds
    usual = predict_step(config(model), devices.load_device("h20"), setup).seconds
    assert 0 < found < 10 and (found == pytest.approx(usual)) == bool(same)


ODD_VALUES = [0, -1, 1, 2, 3, 7, 2.5, 1e30, 2**70, 10**6, float("nan"), float("inf"), "8", "", None, True, False, [], [4], {}]


@settings(max_examples=drawn(300), deadline=None)
@given(st.sampled_from(sorted(CONFIGS.glob("*_config.json"))), st.data())
def test_a_config_with_any_field_changed_is_priced_with_finite_numbers_or_refused(file: Path, data: st.DataObject) -> None:
    values = json.loads(file.read_text())
    changed = data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=2, unique=True))
    values |= {name: data.draw(st.sampled_from(ODD_VALUES)) for name in changed}
    phase = data.draw(st.sampled_from(["prefill", "decode"]))
    try:
        found = predict_step(model_of(values, file), devices.load_device("h20"), Setup(phase, 4, 512))
    except PredictError as error:
        assert str(error)
    else:
        figures = [found.seconds, *(part.seconds for part in found.parts)]
        assert np.isfinite(figures).all() and min(figures) >= 0 < found.seconds


@pytest.mark.parametrize(("setup", "named"), [({"tp": 5}, "--tp 5"), ({"ep": 200}, "--ep 200")])
def test_devices_that_cannot_share_a_model_are_refused(setup: dict[str, int], named: str) -> None:
    with pytest.raises(PredictError, match=named):
        predict_step(config("qwen3-30B-A3B"), devices.load_device("h20"), replace(Setup("decode", 1, 64), **setup))
