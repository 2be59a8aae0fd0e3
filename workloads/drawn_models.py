"""Random tiny models of every family with unusual settings, and the runtime's agreement with transformers on them.

The runtime generates greedy tokens after prompts of several lengths; transformers then reads prompt and tokens in one pass: if
its own best token agrees at every position, it would have generated the same. A position with its two best logits closer than the
tolerance is a tie and counts as agreement.
"""

import gc
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from runtime import MoE
from runtime.package.convert import PackageFormat, convert
from runtime.package.demo_model import train_tokenizer
from runtime.step.sampling import Sampler, Sampling

PROMPTS = (1, 15, 16, 17, 64, 65, 200)
VOCABULARY, CONTEXT = 512, 512
SEEING: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
"""The vision part of families that have no text-only model; it is not used."""
TOLERANCE = 1e-3
"""Relative to the magnitude of the largest logit, which counts as at least 1."""
Draw = Callable[..., Any]


class Agreement(NamedTuple):
    """For one config: tokens compared, equal, tied; the largest difference of logits, absolute and relative to the tolerance."""

    tokens: int
    equal: int
    ties: int
    difference: float
    share: float


def draw_attention(draw: Draw) -> dict[str, Any]:
    """Draw heads of various ratios and sizes."""
    kv, groups, head = draw([1, 2, 3]), draw([1, 2, 4]), draw([16, 32, 48, 64])
    return {"num_key_value_heads": kv, "num_attention_heads": kv * groups, "head_dim": head}


def plain_heads(draw: Draw) -> dict[str, Any]:
    """Draw heads for families with head size = hidden size / heads."""
    kv, groups, head = draw([1, 2]), draw([1, 2, 4]), draw([16, 32])
    return {"num_key_value_heads": kv, "num_attention_heads": kv * groups, "hidden_size": kv * groups * head}


def draw_rope(draw: Draw) -> dict[str, Any]:
    """Draw rotary positions of each kind, with short contexts so that scaling matters."""
    kind, theta = draw(["default", "linear", "yarn", "llama3", "yarn truncated"]), draw([1e3, 1e4, 5e5])
    scaled: dict[str, Any] = {"rope_theta": theta, "rope_type": kind.split()[0]}
    if kind != "default":
        scaled["factor"] = draw([1.5, 2.0, 4.0])
    if kind in ("yarn", "yarn truncated", "llama3"):
        scaled["original_max_position_embeddings"] = draw([64, 128])
    if kind == "yarn truncated":
        scaled["truncate"] = False
    if kind == "llama3":
        scaled |= {"low_freq_factor": 1.0, "high_freq_factor": draw([2.0, 4.0])}
    return {"rope_parameters": scaled}


def draw_common(draw: Draw) -> dict[str, Any]:
    """Draw the settings common to all families."""
    return {
        "hidden_size": draw([48, 64, 80]),
        "num_hidden_layers": draw([2, 3]),
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "intermediate_size": draw([40, 96]),
        "num_experts_per_tok": draw([1, 2, 3]),
        "initializer_range": 0.1,
        "rms_norm_eps": draw([1e-6, 1e-3]),
        "tie_word_embeddings": draw([False, True]),
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def draw_experts(draw: Draw, name: str = "num_experts") -> dict[str, Any]:
    """Draw the number and width of experts."""
    return {name: draw([4, 6, 8]), "moe_intermediate_size": draw([24, 48])}


def qwen3_moe(draw: Draw) -> dict[str, Any]:
    changes = {"norm_topk_prob": draw([False, True]), "attention_bias": draw([False, True]), "mlp_only_layers": draw([[], [0]])}
    return draw_attention(draw) | draw_rope(draw) | draw_experts(draw) | changes


def qwen3_vl_moe(draw: Draw) -> dict[str, Any]:
    changes = {"attention_bias": draw([False, True]), "mlp_only_layers": draw([[], [0]])}
    return draw_attention(draw) | draw_rope(draw) | draw_experts(draw) | changes


def qwen2_moe(draw: Draw) -> dict[str, Any]:
    changes = {"shared_expert_intermediate_size": draw([24, 40]), "norm_topk_prob": draw([False, True])}
    return plain_heads(draw) | draw_rope(draw) | draw_experts(draw) | changes


def mixtral(draw: Draw) -> dict[str, Any]:
    return draw_attention(draw) | draw_rope(draw) | {"num_local_experts": draw([4, 6]), "sliding_window": draw([None, 24, 100])}


def olmoe(draw: Draw) -> dict[str, Any]:
    changes = {"num_experts": draw([4, 6]), "clip_qkv": draw([None, 1.5]), "norm_topk_prob": draw([False, True])}
    return plain_heads(draw) | draw_rope(draw) | changes


def granitemoe(draw: Draw) -> dict[str, Any]:
    changes = {"embedding_multiplier": draw([1.0, 3.0]), "residual_multiplier": draw([1.0, 0.5])}
    changes |= {"attention_multiplier": draw([0.2, 1.0]), "logits_scaling": draw([1.0, 4.0])}
    return plain_heads(draw) | draw_rope(draw) | {"num_local_experts": draw([4, 6])} | changes


def granitemoeshared(draw: Draw) -> dict[str, Any]:
    return granitemoe(draw) | {"shared_intermediate_size": draw([0, 24, 40])}


def gpt_oss(draw: Draw) -> dict[str, Any]:
    changes = {"num_local_experts": draw([4, 6]), "sliding_window": draw([16, 100]), "tie_word_embeddings": False}
    return draw_attention(draw) | draw_rope(draw) | changes


def phimoe(draw: Draw) -> dict[str, Any]:
    changes = {"num_local_experts": draw([4, 6]), "num_experts_per_tok": 2, "router_jitter_noise": draw([0.01, 0.3])}
    changes |= {"attention_bias": draw([False, True]), "lm_head_bias": draw([False, True]), "tie_word_embeddings": False}
    heads = plain_heads(draw)
    pairs = heads["hidden_size"] // heads["num_attention_heads"] // 2
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 8 for i in range(pairs)]}
    long |= {"long_factor": [2.0] * pairs, "factor": 1.0, "short_mscale": 1.1, "long_mscale": 1.2}
    long |= {"original_max_position_embeddings": CONTEXT}
    return heads | changes | draw([{}, {"rope_parameters": long}])


def latent(draw: Draw) -> dict[str, Any]:
    heads = draw([2, 4])
    changes = {"q_lora_rank": draw([None, 24]), "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": draw([8, 16])}
    changes |= {"v_head_dim": draw([16, 24]), "num_attention_heads": heads, "num_key_value_heads": heads}
    changes |= {"n_routed_experts": 8, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2}
    changes |= {
        "first_k_dense_replace": draw([0, 1]),
        "n_shared_experts": draw([1, 2]),
        "routed_scaling_factor": draw([1.0, 2.0]),
    }
    return draw_rope(draw) | changes


def deepseek_v2(draw: Draw) -> dict[str, Any]:
    return latent(draw) | {"topk_method": draw(["greedy", "group_limited_greedy"])}


def deepseek_v3(draw: Draw) -> dict[str, Any]:
    return latent(draw) | {"norm_topk_prob": draw([False, True])}


def glm4_moe_lite(draw: Draw) -> dict[str, Any]:
    changes = deepseek_v3(draw) | {"num_hidden_layers": 3, "attention_bias": draw([False, True])}
    del changes["first_k_dense_replace"]
    return changes | {"mlp_layer_types": draw([None, ["sparse"] * 3, ["dense", "sparse", "dense"]])}


def dots1(draw: Draw) -> dict[str, Any]:
    changes = {"n_routed_experts": 8, "moe_intermediate_size": draw([24, 48]), "n_shared_experts": draw([1, 2])}
    changes |= {"first_k_dense_replace": draw([0, 1]), "attention_bias": draw([False, True]), "sliding_window": draw([16, 100])}
    changes |= dict(draw([{"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 2}]))
    changes |= {"max_window_layers": draw([1, 62]), "routed_scaling_factor": draw([1.0, 1.5])}
    return draw_attention(draw) | draw_rope(draw) | changes | {"norm_topk_prob": draw([False, True])}


def glm4_moe(draw: Draw) -> dict[str, Any]:
    changes = {"n_routed_experts": 8, "moe_intermediate_size": draw([24, 48]), "n_shared_experts": draw([1, 2])}
    changes |= {"first_k_dense_replace": draw([0, 1]), "use_qk_norm": draw([False, True]), "attention_bias": draw([False, True])}
    changes |= dict(draw([{"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 2}]))
    heads, turning = draw_attention(draw) | {"head_dim": draw([16, 32])}, draw_rope(draw)
    turning["rope_parameters"]["partial_rotary_factor"] = draw([0.5, 1.0])
    return heads | turning | changes | {"norm_topk_prob": draw([False, True]), "routed_scaling_factor": draw([1.0, 1.5])}


def ernie4_5_moe(draw: Draw) -> dict[str, Any]:
    changes = {"moe_num_experts": draw([4, 6]), "moe_k": draw([1, 2, 3]), "moe_intermediate_size": draw([24, 48])}
    changes |= {"moe_num_shared_experts": draw([0, 1, 2]), "use_bias": draw([False, True])}
    changes |= {"moe_layer_start_index": draw([0, 1]), "num_experts_per_tok": None}
    return plain_heads(draw) | draw_rope(draw) | changes


def lfm2_moe(draw: Draw) -> dict[str, Any]:
    layers = draw([["conv", "full_attention"], ["full_attention", "conv", "conv"], ["conv", "conv"]])
    changes = {"layer_types": layers, "num_hidden_layers": len(layers), "num_dense_layers": draw([0, 1])}
    changes |= {"conv_L_cache": draw([2, 3, 5]), "conv_bias": draw([False, True]), "use_expert_bias": draw([False, True])}
    changes |= {"norm_topk_prob": draw([False, True]), "routed_scaling_factor": draw([1.0, 2.0])}
    changes |= {"rms_norm_eps": None, "norm_eps": draw([1e-6, 1e-3])}
    return plain_heads(draw) | draw_rope(draw) | draw_experts(draw) | changes


def delta_net(draw: Draw) -> dict[str, Any]:
    one, other = "linear_attention", "full_attention"
    layers, keys = draw([[one, other], [other, one], [one, other, one], [one, one]]), draw([1, 2])
    changes = {"layer_types": layers, "num_hidden_layers": len(layers), "shared_expert_intermediate_size": draw([24, 40])}
    changes |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw([1, 2, 3])}
    changes |= {"linear_key_head_dim": draw([8, 16]), "linear_value_head_dim": draw([8, 24])}
    changes |= {"linear_conv_kernel_dim": draw([2, 4]), "attention_bias": draw([False, True])}
    turning = draw_rope(draw)
    turning["rope_parameters"]["partial_rotary_factor"] = draw([0.25, 0.5, 1.0])
    return draw_attention(draw) | {"head_dim": draw([32, 64])} | turning | draw_experts(draw) | changes


def qwen3_next(draw: Draw) -> dict[str, Any]:
    return delta_net(draw) | {"norm_topk_prob": draw([False, True]), "mlp_only_layers": draw([[], [0]])}


def gemma4(draw: Draw) -> dict[str, Any]:
    window, all_seen = "sliding_attention", "full_attention"
    layers = draw([[window, all_seen], [all_seen, window, all_seen], [window, window, all_seen], [all_seen]])
    heads = draw_attention(draw)
    changes = {"layer_types": layers, "num_hidden_layers": len(layers), "sliding_window": draw([16, 100])}
    changes |= {"global_head_dim": draw([32, 48, 64]), "attention_k_eq_v": draw([False, True])}
    changes |= {"num_global_key_value_heads": draw([None, 1, heads["num_key_value_heads"]])}
    changes |= {"enable_moe_block": True, "top_k_experts": draw([1, 2, 3]), "num_experts_per_tok": None}
    changes |= {"hidden_size_per_layer_input": 0, "final_logit_softcapping": draw([None, 5.0])}
    changes |= {"attention_bias": draw([False, True]), "tie_word_embeddings": draw([False, True])}
    near = draw_rope(draw)["rope_parameters"]
    far = {"rope_type": "proportional", "rope_theta": draw([1e4, 1e6]), "partial_rotary_factor": draw([0.25, 0.5, 1.0])}
    far |= {"factor": draw([1.0, 4.0])}
    turning = draw([None, {window: near, all_seen: far}, {window: near, all_seen: draw_rope(draw)["rope_parameters"]}])
    return heads | draw_experts(draw) | changes | {"rope_parameters": turning}


def minimax_m2(draw: Draw) -> dict[str, Any]:
    turning = draw_rope(draw)
    turning["rope_parameters"]["partial_rotary_factor"] = draw([0.5, 1.0])
    return draw_attention(draw) | {"head_dim": draw([16, 32])} | turning | {"num_local_experts": draw([4, 6])}


def solar_open(draw: Draw) -> dict[str, Any]:
    changes = {"n_routed_experts": 8, "moe_intermediate_size": draw([24, 48]), "n_shared_experts": draw([1, 2])}
    changes |= {"attention_bias": draw([False, True]), "norm_topk_prob": draw([False, True])}
    changes |= dict(draw([{"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 2}]))
    return draw_attention(draw) | draw_rope(draw) | changes | {"routed_scaling_factor": draw([1.0, 1.5])}


def draw_windows(draw: Draw) -> dict[str, Any]:
    """Draw layers with and without a window."""
    window, all_seen = "sliding_attention", "full_attention"
    layers = draw([[window, all_seen], [all_seen, window, all_seen], [window, window]])
    return {"layer_types": layers, "num_hidden_layers": len(layers), "sliding_window": draw([16, 100])}


def exaone_moe(draw: Draw) -> dict[str, Any]:
    changes = draw_windows(draw) | draw_experts(draw) | {"num_experts": 8, "num_shared_experts": draw([1, 2])}
    changes |= {"first_k_dense_replace": draw([0, 1]), "norm_topk_prob": draw([False, True])}
    changes |= dict(draw([{"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 2}]))
    return draw_attention(draw) | draw_rope(draw) | changes | {"routed_scaling_factor": draw([1.0, 2.5])}


def flex_olmo(draw: Draw) -> dict[str, Any]:
    changes = {"num_experts": draw([4, 6]), "norm_topk_prob": draw([False, True]), "attention_bias": draw([False, True])}
    return plain_heads(draw) | draw_rope(draw) | changes


def afmoe(draw: Draw) -> dict[str, Any]:
    changes = draw_windows(draw) | draw_experts(draw) | {"num_shared_experts": draw([1, 2]), "num_dense_layers": draw([0, 1])}
    changes |= {"route_scale": draw([1.0, 2.5]), "mup_enabled": draw([False, True]), "attention_bias": draw([False, True])}
    return draw_attention(draw) | draw_rope(draw) | changes


def granitemoehybrid(draw: Draw) -> dict[str, Any]:
    one, other = "linear_attention", "full_attention"
    layers = draw([[one, other], [other, one], [one, other, one], [one, one]])
    changes = granitemoe(draw) | {"layer_types": layers, "num_hidden_layers": len(layers)}
    changes |= {"shared_intermediate_size": draw([24, 40]), "position_embedding_type": draw([None, "rope"])}
    heads = draw([2, 4])
    changes |= {"mamba_n_heads": heads, "mamba_d_head": 2 * changes["hidden_size"] // heads, "mamba_n_groups": draw([1, 2])}
    changes |= {"mamba_d_state": draw([8, 16]), "mamba_d_conv": draw([2, 4]), "mamba_chunk_size": draw([16, 256])}
    return changes | {"mamba_conv_bias": draw([False, True]), "mamba_proj_bias": draw([False, True])}


def kimi_linear(draw: Draw) -> dict[str, Any]:
    one, other, dense, sparse = "linear_attention", "full_attention", "dense", "sparse"
    layers = draw([[one, other], [other, one], [one, one, other], [one, one]])
    changes = latent(draw) | {"layer_types": layers, "num_hidden_layers": len(layers), "norm_topk_prob": draw([False, True])}
    for name in ("rope_parameters", "n_routed_experts", "first_k_dense_replace"):
        del changes[name]
    changes |= {"num_local_experts": 8, "mlp_layer_types": [draw([dense, sparse]), *[sparse] * (len(layers) - 1)]}
    changes |= {"linear_num_heads": draw([1, 2, 3]), "linear_head_dim": draw([8, 16]), "linear_conv_kernel_dim": draw([2, 4])}
    return changes | {"attention_bias": draw([False, True]), "tie_word_embeddings": False}


def nemotron_h(draw: Draw) -> dict[str, Any]:
    """Steps of Mamba-2 without a lower bound, which transformers applies in prefill alone."""
    one, other, moe, mlp = "linear_attention", "full_attention", "moe", "mlp"
    layers = draw([[one, moe, other, moe], [one, other, moe], [moe, one, mlp], [one, one, moe, mlp, moe]])
    changes = {"layers_block_type": layers, "num_hidden_layers": None, "n_routed_experts": 8, "time_step_min": 1e-9}
    changes |= {"moe_intermediate_size": draw([24, 48]), "moe_shared_expert_intermediate_size": draw([24, 40])}
    changes |= {"norm_topk_prob": draw([False, True]), "routed_scaling_factor": draw([1.0, 2.5])}
    changes |= dict(draw([{"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 2}]))
    changes |= {"mamba_num_heads": 4, "mamba_head_dim": draw([8, 16]), "n_groups": draw([1, 2]), "ssm_state_size": draw([8, 16])}
    changes |= {"conv_kernel": draw([2, 4]), "chunk_size": draw([16, 128]), "tie_word_embeddings": False}
    changes |= {"use_conv_bias": draw([False, True]), "use_bias": draw([False, True])}
    return draw_attention(draw) | changes | {"rms_norm_eps": None, "layer_norm_epsilon": draw([1e-6, 1e-3])}


def bailing_moe(draw: Draw) -> dict[str, Any]:
    """As GLM-4.5, which does the same arithmetic."""
    top_k = draw([1, 2, 3])
    return glm4_moe(draw) | {"num_experts_per_tok": top_k, "norm_topk_prob": top_k > 1}


def write_as_ling(folder: Path) -> None:
    """Rewrite a saved GLM-4.5 with the names and keys of Ling 2."""
    config = json.loads((folder / "config.json").read_text())
    turning = config.pop("rope_parameters")
    config |= {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "score_function": "sigmoid"}
    config |= {"partial_rotary_factor": turning.pop("partial_rotary_factor"), "rope_theta": turning.pop("rope_theta")}
    config |= {"rope_scaling": turning if turning["rope_type"] != "default" else None, "use_bias": False}
    for old, new in (("n_routed_experts", "num_experts"), ("n_shared_experts", "num_shared_experts")):
        config[new] = config.pop(old)
    config["use_qkv_bias"] = config.pop("attention_bias")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace(".q_proj.", ".query_key_value.")] = np.concatenate(parts)
    names = {".self_attn.": ".attention.", ".o_proj.": ".dense.", ".q_norm.": ".query_layernorm.", ".k_norm.": ".key_layernorm."}
    names |= {".embed_tokens.": ".word_embeddings.", ".e_score_correction_bias": ".expert_bias"}
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


FAMILIES: dict[str, tuple[str, Draw]] = {
    "qwen2_moe": ("Qwen2Moe", qwen2_moe),
    "qwen3_moe": ("Qwen3Moe", qwen3_moe),
    "mixtral": ("Mixtral", mixtral),
    "olmoe": ("Olmoe", olmoe),
    "granitemoe": ("GraniteMoe", granitemoe),
    "gpt_oss": ("GptOss", gpt_oss),
    "phimoe": ("Phimoe", phimoe),
    "deepseek_v2": ("DeepseekV2", deepseek_v2),
    "deepseek_v3": ("DeepseekV3", deepseek_v3),
    "glm4_moe": ("Glm4Moe", glm4_moe),
    "ernie4_5_moe": ("Ernie4_5_Moe", ernie4_5_moe),
    "lfm2_moe": ("Lfm2Moe", lfm2_moe),
    "qwen3_next": ("Qwen3Next", qwen3_next),
    "qwen3_5_moe_text": ("Qwen3_5Moe", delta_net),
    "gemma4_text": ("Gemma4", gemma4),
    "qwen3_vl_moe": ("Qwen3VLMoe", qwen3_vl_moe),
    "granitemoeshared": ("GraniteMoeShared", granitemoeshared),
    "glm4_moe_lite": ("Glm4MoeLite", glm4_moe_lite),
    "dots1": ("Dots1", dots1),
    "minimax_m2": ("MiniMaxM2", minimax_m2),
    "solar_open": ("SolarOpen", solar_open),
    "exaone_moe": ("ExaoneMoe", exaone_moe),
    "flex_olmo": ("FlexOlmo", flex_olmo),
    "afmoe": ("Afmoe", afmoe),
    "granitemoehybrid": ("GraniteMoeHybrid", granitemoehybrid),
    "kimi_linear": ("KimiLinear", kimi_linear),
    "nemotron_h": ("NemotronH", nemotron_h),
    "bailing_moe": ("Glm4Moe", bailing_moe),
}
"""model_type → the name of its classes in transformers, and how its settings are drawn."""
REWRITTEN: dict[str, Callable[[Path], None]] = {"bailing_moe": write_as_ling}
"""model_type → what makes its checkpoint of that of a family with the same arithmetic; transformers has none."""


def drawn_config(name: str, seed: int) -> dict[str, Any]:
    """The drawn config of a family."""
    rng = np.random.default_rng([seed, list(FAMILIES).index(name)])

    def draw(options: list[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    whole = draw_common(draw) | FAMILIES[name][1](draw)
    return {key: value for key, value in whole.items() if value is not None or key.endswith("token_id")}


def build_reference(folder: Path, name: str, drawn: dict[str, Any], seed: int) -> Any:
    """The random model in transformers, saved to `folder` with a tokenizer."""
    family = FAMILIES[name][0]
    torch.manual_seed(seed)
    if hasattr(transformers, f"{family}ForCausalLM"):
        kind = "TextConfig" if name.endswith("_text") else "Config"
        model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, family + kind)(**drawn))
    else:
        whole = getattr(transformers, family + "Config")(text_config=drawn, vision_config=SEEING)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(whole)
    model.eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if (tensor.dim() == 1 or "correction_bias" in key) and "inv_freq" not in key:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    REWRITTEN.get(name, lambda folder: None)(folder)
    (folder / "tokenizer.json").write_text(str(train_tokenizer(VOCABULARY).to_str()))
    return model


def greedy_tokens(model: MoE, ids: list[int], new: int) -> tuple[list[int], np.ndarray]:
    """(greedy tokens of the runtime, the logits [new, V] from which they were chosen)."""
    sequence = model.engine.begin_sequence(len(ids) + new)
    tokens: list[int] = []
    logits = []
    feed = ids
    for _ in range(new):
        step, row = model.engine.step(sequence, feed, Sampler(Sampling()))
        tokens.append(step.sampled)
        logits.append(row)
        feed = [step.sampled]
    return tokens, np.stack(logits)


def greedy_reference(model: Any, ids: list[int], new: int) -> tuple[list[int], np.ndarray]:
    """The same from transformers' model."""
    tokens, past, logits, feed = [], None, [], torch.tensor([ids])
    with torch.no_grad():
        for _ in range(new):
            out = model(feed, past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(out.logits[0, -1].numpy())
            tokens.append(int(logits[-1].argmax()))
            feed = torch.tensor([[tokens[-1]]])
    return tokens, np.stack(logits)


def compare_prompt(reference: Any, model: MoE, ids: list[int], new: int) -> Agreement:
    """Compare both on one prompt."""
    tokens, logits = greedy_tokens(model, ids, new)
    with torch.no_grad():
        expected = reference(torch.tensor([ids + tokens[:-1]]), use_cache=False).logits[0, len(ids) - 1 :].numpy()
    size = max(1.0, float(np.abs(expected).max()))
    chosen = expected[np.arange(new), tokens]
    behind = expected.max(axis=1) - chosen
    equal, ties = behind <= 0, (behind > 0) & (behind < TOLERANCE * size)
    difference = float(np.abs(logits - expected).max())
    return Agreement(new, int((equal | ties).sum()), int(ties.sum()), difference, difference / (TOLERANCE * size))


def compare_prompts(name: str, seed: int, new: int, prompts: tuple[int, ...] = PROMPTS) -> Agreement:
    """The agreement for a drawn config over all prompts."""
    folder = Path(tempfile.mkdtemp(prefix="parity"))
    try:
        drawn = drawn_config(name, seed)
        reference = build_reference(folder, name, drawn, seed)
        convert(folder, folder / "package", None, PackageFormat(backend="cpu"))
        model = MoE.load(folder, package=folder / "package", chunk=16)
        rng = np.random.default_rng(seed)
        parts = [compare_prompt(reference, model, rng.integers(0, VOCABULARY - 12, length).tolist(), new) for length in prompts]
        model.close()
    finally:
        shutil.rmtree(folder)
        gc.collect()
    sums = (sum(part[i] for part in parts) for i in range(3))
    return Agreement(*map(int, sums), *(max(part[i] for part in parts) for i in (3, 4)))
