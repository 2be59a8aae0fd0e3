"""Ling 2 against llama.cpp, which has the family where transformers has not; published configs of hybrid families."""

import ctypes
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from analyzer.model import model_of
from analyzer.predict.prediction import weight_bytes
from analyzer.predict.setup import Setup
from runtime.errors import ModelError
from runtime.models import read_family
from runtime.moe import MoE
from runtime.package.convert import PackageFormat, convert

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
pytest.importorskip("torch")
pytest.importorskip("transformers")
from workloads import drawn_models  # noqa: E402  (needs both)
from workloads.programs import llama_steps  # noqa: E402

SIZES: dict[str, Any] = {"use_qk_norm": True, "attention_bias": False, "head_dim": 32, "n_group": 4, "topk_group": 2}
SIZES |= {"num_experts_per_tok": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_hidden_layers": 3}
SIZES |= {"first_k_dense_replace": 1, "tie_word_embeddings": False, "hidden_size": 128, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
SIZES |= {"rope_parameters": {"rope_type": "default", "rope_theta": 600000.0, "partial_rotary_factor": 0.5}}


def write_gguf(folder: Path, path: Path) -> None:
    """The checkpoint in the names and keys of gguf's own table."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(str(path), "bailingmoe2")
    for name, key in (
        *(("context_length", "max_position_embeddings"), ("embedding_length", "hidden_size"), ("vocab_size", "vocab_size")),
        *(("block_count", "num_hidden_layers"), ("feed_forward_length", "intermediate_size"), ("rope_freq_base", "rope_theta")),
        *(("head_count", "num_attention_heads"), ("head_count_kv", "num_key_value_heads"), ("key_length", "head_dim")),
        *(("value_length", "head_dim"), ("layer_norm_rms_eps", "rms_norm_eps"), ("expert_count", "num_experts")),
        *(("expert_used_count", "num_experts_per_tok"), ("expert_feed_forward_length", "moe_intermediate_size")),
        *(("expert_shared_count", "num_shared_experts"), ("leading_dense_block_count", "first_k_dense_replace")),
        *(("expert_weights_scale", "routed_scaling_factor"), ("expert_group_count", "n_group")),
        ("expert_group_used_count", "topk_group"),
    ):
        getattr(writer, f"add_{name}")(config[key])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BAILINGMOE2, config["num_hidden_layers"])
    for name in [name for name in tensors if ".experts.0." in name]:
        own = [tensors.pop(name.replace(".experts.0.", f".experts.{expert}.")) for expert in range(config["num_experts"])]
        tensors[name.replace(".experts.0.", ".experts.")] = np.stack(own)
    for name, tensor in tensors.items():
        known = names.get_name(re.sub(r"\.weight$", "", name))
        assert known, f"gguf knows no {name}"
        writer.add_tensor(known + (".bias" if name.endswith("expert_bias") else ".weight"), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of_llama(path: Path, ids: list[int], vocabulary: int) -> np.ndarray:
    lib = llama_steps.load_library()
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model, "llama.cpp refuses the file"
    context = ctypes.c_void_p(lib.llama_init_from_model(model, lib.llama_context_default_params()))
    rows = []
    for token in ids:
        assert lib.llama_decode(context, lib.llama_batch_get_one((ctypes.c_int32 * 1)(token), 1, 0, 0)) == 0
        rows.append(lib.llama_get_logits_ith(context, -1)[:vocabulary])
    return np.array(rows)


@pytest.mark.long
def test_ling_2_says_what_llama_cpp_says(tmp_path: Path) -> None:
    drawn = drawn_models.drawn_config("bailing_moe", 1) | SIZES
    drawn_models.build_reference(tmp_path, "bailing_moe", drawn, 1)
    write_gguf(tmp_path, tmp_path / "ling.gguf")
    ids = np.random.default_rng(2).integers(0, 500, 40).tolist()
    expected = logits_of_llama(tmp_path / "ling.gguf", ids, drawn_models.VOCABULARY)
    convert(tmp_path, tmp_path / "package", None, PackageFormat(backend="cpu"))
    with MoE.load(tmp_path / "package") as model:
        found = np.stack([drawn_models.greedy_tokens(model, ids[: n + 1], 1)[1][0] for n in range(len(ids))])
    # llama.cpp keeps keys and values in half precision.
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


CONFIGS = {
    path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "data" / "published_configs").glob("*.json")
}
BILLIONS = {"nemotron_h": 31.6, "kimi_linear": 49.1, "bailing_moe": 16.3}
COUNTS = {"nemotron_h": (52, 23, 6, 128, 6), "kimi_linear": (27, 26, 7, 256, 8), "bailing_moe": (20, 19, 20, 256, 8)}
"""Layers, those with experts, those with attention, experts, chosen ones."""


@pytest.mark.parametrize("name", COUNTS)
def test_published_configs_have_the_published_sizes_here_and_in_predict(name: str) -> None:
    family = read_family(CONFIGS[name], Path(name))
    attending = sum(map(family.attends, range(family.layers)))
    assert (family.layers, len(family.routed), attending, family.experts, family.top_k) == COUNTS[name]
    model = model_of(CONFIGS[name], Path(name))
    assert (model.layers, sum(model.routed), len(model.windows)) == COUNTS[name][:3]
    assert weight_bytes(model, Setup("decode", 1, 1)) / 2e9 == pytest.approx(BILLIONS[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("bailing_moe", "score_function", "softmax"),
        ("kimi_linear", "mla_use_nope", False),
        ("kimi_linear", "gate_lower_bound", -5.0),
        ("kimi_linear", "full_attn_layers", [4]),
        ("nemotron_h", "moe_latent_size", 1024),
        ("nemotron_h", "mlp_hidden_act", "silu"),
        ("nemotron_h", "hybrid_override_pattern", "MEX"),
        ("nemotron_h", "time_step_limit", [0.01, 0.1]),
    ],
)
def test_other_variants_are_refused(name: str, key: str, value: Any) -> None:
    config = CONFIGS[name]
    linear = config.get("linear_attn_config", {})
    changes = {"linear_attn_config": linear | {key: value}} if key in linear or key == "gate_lower_bound" else {key: value}
    with pytest.raises(ModelError):
        read_family(config | changes, Path(name))
