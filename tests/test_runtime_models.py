"""Every family against transformers, tiny and random: the same tokens, the same logits, whatever the chunk and the cache."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime.backends.cpu import CpuBackend
from runtime.experts.routing import LOGITS_RULE, RouterScores, normalise_rows
from runtime.graphs.quantize import Precision, quantize
from runtime.moe import MoE
from runtime.package.convert import PackageFormat, convert
from runtime.package.demo_model import train_tokenizer
from runtime.package.layout import Package
from runtime.step.sampling import Sampler, Sampling
from tests.quantized_weights import dequantize

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from workloads import drawn_models  # noqa: E402  (needs both)

# Steps beside transformers: the longer run for one family of each kind of attention.
NEW = {"qwen3_moe": 64, "deepseek_v3": 64}
FEW = 16
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "intermediate_size": 96,
    "num_experts_per_tok": 2,
    "initializer_range": 0.15,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
WARM_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 1.0}
LONG |= {"short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 512}
DELTA: dict[str, Any] = {
    "num_experts": 6,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# name: (family, changes)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 48, "head_dim": 32, "mlp_only_layers": [1]}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 6, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    "olmoe": ("Olmoe", {"num_experts": 6, "clip_qkv": 1.5}),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 16, "sliding_window": 16}),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_shared_experts": 2, "routed_scaling_factor": 2.0},
    ),
    "deepseek_v2 biased": ("DeepseekV2", LATENT | {"mlp_bias": True, "q_lora_rank": 24, "n_shared_experts": 1}),
    "deepseek_v3": ("DeepseekV3", LATENT | {"q_lora_rank": 24, "n_shared_experts": 1, "rope_parameters": WARM_YARN}),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 4,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.3,
            "rope_parameters": LONG,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 1, "use_bias": True},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_experts": 6,
            "moe_intermediate_size": 48,
            "num_dense_layers": 1,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
        },
    ),
    "qwen3_next": ("Qwen3Next", DELTA | {"mlp_only_layers": [0]}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", DELTA),
    "flex_olmo": ("FlexOlmo", {"num_experts": 6}),
    "afmoe": (
        "Afmoe",
        {
            "num_experts": 6,
            "moe_intermediate_size": 48,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 16,
            "head_dim": 32,
            "mup_enabled": True,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "num_local_experts": 6,
            "shared_intermediate_size": 40,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "residual_multiplier": 0.7,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {name: value for name, value in LATENT.items() if name not in ("n_routed_experts", "first_k_dense_replace")}
        | {"num_local_experts": 8, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"linear_num_heads": 3, "linear_head_dim": 16},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe", "mlp"],
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "head_dim": 32,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 12,
            "time_step_min": 1e-9,
        },
    ),
    "gemma4_text": (
        "Gemma4",
        {
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
            "enable_moe_block": True,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 16,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
}


@cache
def tokenizer() -> str:
    return str(train_tokenizer(512).to_str())


class Tiny:
    """A random model in transformers' own files, its package, and transformers' greedy tokens and logits [new, V] for `ids`."""

    def __init__(self, folder: Path, name: str):
        family, changes = MODELS[name]
        torch.set_num_threads(1)
        torch.manual_seed(1)
        config = getattr(transformers, family + ("TextConfig" if name.endswith("_text") else "Config"))(**(SIZES | changes))
        model = getattr(transformers, family + "ForCausalLM")(config).eval()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.dim() == 1 and "inv_freq" not in key:
                    tensor.add_(torch.randn_like(tensor) * 0.2)
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(tokenizer())
        self.folder, self.package, self.new = folder, folder / "package", NEW.get(name, FEW)
        self.ids = np.random.default_rng(3).integers(0, 500, 37).tolist()
        convert(folder, self.package)
        self.tokens, self.logits = self._reference(model)

    def _reference(self, model: Any) -> tuple[list[int], np.ndarray]:
        return drawn_models.greedy_reference(model, self.ids, self.new)

    def generated(
        self, package: Path | None = None, new: int = 0, follow: bool = False, **options: Any
    ) -> tuple[list[int], np.ndarray]:
        """Greedy tokens and logits of the runtime; with `follow` it is fed transformers' tokens, whatever it would have said."""
        engine, new = MoE.load(package or self.package, **options).engine, new or self.new
        sequence = engine.begin_sequence(len(self.ids) + new)
        tokens, logits, ids = [], [], self.ids
        for _ in range(new):
            step, row = engine.step(sequence, ids, Sampler(Sampling()))
            tokens.append(step.sampled)
            logits.append(row)
            ids = [self.tokens[len(tokens) - 1] if follow else step.sampled]
        engine.close()
        return tokens, np.stack(logits)


@pytest.fixture(scope="module", params=MODELS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp(request.param), request.param)


def test_a_family_says_what_transformers_says_whatever_the_chunk_and_the_cache(tiny: Tiny) -> None:
    tokens, logits = tiny.generated(chunk=16)
    assert tokens == tiny.tokens
    assert np.abs(logits - tiny.logits).max() < 1e-3
    assert len(set(tokens)) > 5
    whole = logits[:2].tobytes()
    for chunk in (1, 36):
        assert tiny.generated(new=2, chunk=chunk)[1].tobytes() == whole, chunk
    cached = Package(tiny.package).expert_bytes * 3
    for prefetch in ("off", "on"):
        bits = tiny.generated(new=8, chunk=5, expert_cache=cached, prefetch=prefetch)[1].tobytes()
        assert bits == logits[:8].tobytes(), prefetch


def test_a_router_s_scores_are_those_of_the_linear_map_that_predicts_them(tiny: Tiny) -> None:
    package = Package(tiny.package)
    router = RouterScores(package, package.family.routed[0])
    found, states = router.linear(), np.random.default_rng(0).standard_normal((16, package.family.hidden)).astype(np.float32)
    assert found is not None
    assert found.normed == (package.manifest["model_type"] != "flex_olmo"), "its router reads a state without a norm"
    scores = (normalise_rows(states) if found.normed else states) @ found.rows.T + found.offsets
    if found.rule != LOGITS_RULE:
        shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True) if found.rule == "Softmax" else 1 / (1 + np.exp(-scores))
        scores = shares + found.corrections
    expected = router(states)
    assert np.allclose(scores - scores.mean(1, keepdims=True), expected, atol=0.03 * np.abs(expected).max())


def test_a_second_turn_over_kept_keys_and_states_says_what_transformers_says(tiny: Tiny) -> None:
    engine = MoE.load(tiny.package)
    whole = [*tiny.ids, *tiny.tokens]
    for split, new in ((10, 1), (len(tiny.ids) + 2, 3), (20, 3)):
        for _ in engine.generate(whole[:split], new, ignore_end=True, keep_kv=True):
            pass
        told = [token.id for token in engine.generate(tiny.ids, 8, ignore_end=True, keep_kv=True)]
        assert told == tiny.tokens[:8], split
        assert engine.log.steps[-8].position > 0 or (engine.package.family.states(0) and new > 1)
    engine.close()


def test_eight_bits_stay_close_to_transformers_whatever_the_cache(tiny: Tiny, tmp_path: Path) -> None:
    package = convert(tiny.folder, tmp_path / "package", None, PackageFormat(backend="cpu", bits=8))
    logits = tiny.generated(package.folder, follow=True)[1]
    errors = np.linalg.norm(logits - tiny.logits, axis=1) / np.linalg.norm(tiny.logits, axis=1)
    assert np.median(errors) < 0.1  # where two experts score nearly the same, rounding may choose the other one
    cached = CpuBackend(package, 1).expert_bytes * 3
    for prefetch in ("off", "on"):
        bits = tiny.generated(package.folder, new=4, follow=True, chunk=5, expert_cache=cached, prefetch=prefetch)[1].tobytes()
        assert bits == logits[:4].tobytes(), prefetch


FLOATS = ("embed", "mlp.gate.", "in_proj_ba", "in_proj_a", "in_proj_b", "conv1d", "shared_expert_gate")
"""Parts of names of matrices that stay floats in every precision."""


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_eight_bits_differ_from_transformers_with_the_same_rounded_weights_by_rounded_activations_alone(
    name: str, tmp_path: Path
) -> None:
    tiny, precision = Tiny(tmp_path / "model", name), Precision(8)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder).eval()
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if parameter.dim() > 1 and not any(part in key for part in FLOATS):
                rows = parameter.numpy().reshape(-1, parameter.shape[-1])
                rounded = dequantize(quantize(rows, precision), precision, rows.shape[1])
                parameter.copy_(torch.tensor(rounded.reshape(parameter.shape)))
        expected = theirs(torch.tensor([tiny.ids])).logits[0, -1].numpy()
    package = convert(tiny.folder, tmp_path / "package", None, PackageFormat(backend="cpu", bits=8))
    logits = tiny.generated(package.folder, new=1)[1][0]
    # Measured: 0.018, 0.029 and 0.022; a pair of matrices in each other's place gives 1 and more.
    assert np.linalg.norm(logits - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize(("bits", "most"), [(16, 0.05), (8, 0.5)])
def test_shorter_keys_and_values_change_little_and_cache_and_chunk_nothing(tiny: Tiny, bits: int, most: float) -> None:
    logits = tiny.generated(new=4, follow=True, kv_bits=bits)[1]
    assert 0 < np.abs(logits - tiny.logits[:4]).max() < most
    cached = Package(tiny.package).expert_bytes * 3
    assert tiny.generated(new=4, follow=True, kv_bits=bits, expert_cache=cached, chunk=5)[1].tobytes() == logits.tobytes()


def test_gpt_oss_in_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tiny, rng = Tiny(tmp_path / "plain", "gpt_oss"), np.random.default_rng(5)
    path = tiny.folder / "model.safetensors"
    tensors = load_file(path)
    packed = {name: tensor for name, tensor in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    for name in tensors.keys() - packed.keys():
        experts, inputs, outputs = tensors[name].shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(118, 124, (experts, outputs, inputs // 32), np.uint8)
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
        whole = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        tensors[name] = np.ascontiguousarray(whole.numpy())
        assert tensors[name].shape == (experts, inputs, outputs)
    save_file(tensors, path, {"format": "pt"})
    plain = convert(tiny.folder, tmp_path / "a").folder
    save_file(packed, path, {"format": "pt"})
    short = convert(tiny.folder, tmp_path / "b").folder
    assert tiny.generated(short, new=2)[1].tobytes() == tiny.generated(plain, new=2)[1].tobytes()


UNREAD = {
    "qwen3_5_moe": ("model.visual.patch_embed.proj.weight", "mtp.fc.weight"),
    "gemma4": ("model.vision_tower.patch_embedder.input_proj.weight", "model.embed_vision.embedding_projection.weight"),
}


@pytest.mark.parametrize("family", UNREAD)
def test_the_text_part_of_a_model_that_sees_is_read_like_a_text_model(family: str, tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "text", family + "_text")
    tensors, config = load_file(tiny.folder / "model.safetensors"), json.loads((tiny.folder / "config.json").read_text())
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed |= {name: np.ones(4, np.float32) for name in UNREAD[family]}
    save_file(renamed, tiny.folder / "model.safetensors", {"format": "pt"})
    whole = {"model_type": family, "text_config": config, "tie_word_embeddings": config["tie_word_embeddings"]}
    (tiny.folder / "config.json").write_text(json.dumps(whole))
    package = convert(tiny.folder, tmp_path / "whole").folder
    assert tiny.generated(package)[0] == tiny.tokens


def test_qwen3_vl_s_experts_are_read_as_published_and_as_transformers_writes_them(tmp_path: Path) -> None:
    name, ids = "qwen3_vl_moe", list(range(20))
    drawn = drawn_models.drawn_config(name, 3)
    reference = drawn_models.build_reference(tmp_path, name, drawn, 3)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    experts = [key for key in tensors if ".experts." in key]
    assert len(experts) == 2 * drawn["num_hidden_layers"]
    written = convert(tmp_path, tmp_path / "a").folder
    save_file(tensors | {key: np.ascontiguousarray(tensors[key].swapaxes(1, 2)) for key in experts}, path, {"format": "pt"})
    logits = []
    for package in (written, convert(tmp_path, tmp_path / "b").folder):
        engine = MoE.load(package).engine
        logits.append(engine.step(engine.begin_sequence(20), ids, Sampler(Sampling()))[1])
        engine.close()
    with torch.no_grad():
        assert np.abs(logits[0] - reference(torch.tensor([ids])).logits[0, -1].numpy()).max() < 1e-3
    assert logits[0].tobytes() == logits[1].tobytes()


def test_gemma_s_heads_of_layers_that_see_all_are_read_from_the_published_keys(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, "gemma4_text")
    config = json.loads((tiny.folder / "config.json").read_text())
    assert config.pop("per_layer_config").keys() == {"1", "2"}
    config |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    (tiny.folder / "config.json").write_text(json.dumps(config))
    assert tiny.generated(convert(tiny.folder, tmp_path / "again").folder)[0] == tiny.tokens


class FullLength(Tiny):
    """The reference computes every token anew, as transformers' generate does where LongRoPE goes over to its long factors.

    Phi-MoE's rotary module in transformers asks its LongRoPE function for no length and so gets short factors at any; here the
    function is asked for the sequence's length, as in other families.
    """

    def _reference(self, model: Any) -> tuple[list[int], np.ndarray]:
        ids, logits = list(self.ids), []
        rotary = model.model.rotary_emb
        factors = rotary.rope_init_fn
        with torch.no_grad():
            for _ in range(self.new):
                rotary.rope_init_fn = partial(factors, seq_len=len(ids))
                logits.append(model(torch.tensor([ids])).logits[0, -1].numpy())
                ids.append(int(logits[-1].argmax()))
        return ids[len(self.ids) :], np.stack(logits)


@pytest.mark.parametrize("original", [20, 36, 37, 45, 52, 100])
def test_longrope_takes_short_factors_up_to_the_original_length_and_long_ones_beyond(
    original: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = {"short_factor": np.linspace(1, 1.5, 8).tolist(), "long_factor": np.linspace(2, 6, 8).tolist()}
    rope = {name: value for name, value in LONG.items() if name != "factor"} | factors
    sizes = {"rope_parameters": rope | {"original_max_position_embeddings": original}, "max_position_embeddings": 256}
    monkeypatch.setitem(MODELS, "crossing", ("Phimoe", MODELS["phimoe"][1] | sizes))
    tiny = FullLength(tmp_path, "crossing")
    for chunk in (5, 64):
        tokens, logits = tiny.generated(chunk=chunk)
        assert tokens == tiny.tokens
        assert np.abs(logits - tiny.logits).max() < 1e-3
    # Against 16 bits without a crossing: rounded keys may choose other experts than float32 ones.
    crossed = tiny.generated(follow=True, kv_bits=16)[1][-1]
    engine = MoE.load(tiny.package, kv_bits=16).engine
    ids = [*tiny.ids, *tiny.tokens[:-1]]
    at_once = engine.step(engine.begin_sequence(len(ids)), ids, Sampler(Sampling()))[1]
    engine.close()
    assert np.abs(crossed - at_once).max() < 1e-3
