"""The kinds of values that config.json may have under the keys that families read; other values are refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from runtime.errors import ModelError

MOST = 1 << 24
"""An upper bound of all counts in a config."""
SHOWN = 80  # characters of a value that a message quotes


class Kind(NamedTuple):
    """What a value is `expected` to be, in words, and a check of it."""

    expected: str
    accepts: Callable[[Any], bool]


def whole_number(least: int) -> Kind:
    """A whole number."""
    bounds = f"from {least} to {MOST}"
    return Kind(f"a whole number {bounds}", lambda value: _is_number(value) and value == int(value) and least <= value <= MOST)


def or_null(kind: Kind) -> Kind:
    """The same kind, or null."""
    return Kind(f"{kind.expected} or null", lambda value: value is None or kind.accepts(value))


def list_of(kind: Kind) -> Kind:
    """A list of values of this kind."""
    return Kind(
        f"a list of which each is {kind.expected}", lambda value: isinstance(value, list) and all(map(kind.accepts, value))
    )


def _is_number(value: object) -> bool:
    """Whether a value is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


NUMBER = Kind("a number", _is_number)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
BASE = Kind("a number above 1", lambda value: _is_number(value) and value > 1)
FRACTION = Kind("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
OBJECT = or_null(Kind("an object", lambda value: isinstance(value, dict)))
OBJECTS = Kind("an object of objects", lambda v: isinstance(v, dict) and all(isinstance(part, dict) for part in v.values()))
TOKEN = whole_number(0)
TOKENS = Kind(f"{TOKEN.expected}, a list of them or null", lambda v: v is None or TOKEN.accepts(v) or list_of(TOKEN).accepts(v))

PARTS = ("text_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "linear_attn_config")
"""Keys of nested objects whose keys are read too."""
KINDS = {
    "hidden_size num_hidden_layers num_attention_heads vocab_size max_position_embeddings num_experts_per_tok moe_k "
    "moe_intermediate_size qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim top_k_experts "
    "mamba_n_heads mamba_d_state mamba_n_groups mamba_expand rotary_dim mamba_num_heads mamba_head_dim n_groups "
    "ssm_state_size num_experts_per_token model_max_length linear_num_heads linear_head_dim num_heads": whole_number(1),
    "conv_L_cache linear_conv_kernel_dim mamba_d_conv conv_kernel short_conv_kernel_size": whole_number(2),
    "first_k_dense_replace num_dense_layers max_window_layers moe_layer_start_index": whole_number(0),
    "moe_layer_end_index": whole_number(-1),
    "num_experts num_local_experts n_routed_experts moe_num_experts intermediate_size shared_expert_intermediate_size head_dim "
    "num_key_value_heads q_lora_rank n_group topk_group n_shared_experts moe_num_shared_experts sliding_window "
    "decoder_sparse_step full_attention_interval moe_layer_interval num_nextn_predict_layers "
    "shared_intermediate_size global_head_dim num_global_key_value_heads num_kv_shared_layers "
    "hidden_size_per_layer_input num_shared_experts global_attn_every_n_layers num_expert_group moe_latent_size "
    "moe_shared_expert_intermediate_size": or_null(whole_number(0)),
    "original_max_position_embeddings": or_null(whole_number(2)),
    "rope_theta": or_null(BASE),
    "rms_norm_eps norm_eps layer_norm_epsilon low_freq_factor high_freq_factor logits_scaling attention_multiplier": POSITIVE,
    "factor beta_fast beta_slow swiglu_alpha swiglu_limit final_logit_softcapping": or_null(POSITIVE),
    "partial_rotary_factor": or_null(FRACTION),
    "embedding_multiplier residual_multiplier routed_scaling_factor router_jitter_noise route_scale": NUMBER,
    "clip_qkv moe_norm_min attention_factor mscale mscale_all_dim short_mscale long_mscale": or_null(NUMBER),
    "tie_word_embeddings tie_embedding norm_topk_prob use_sliding_window rope_interleave use_qk_norm use_expert_bias "
    "truncate enable_moe_block attention_k_eq_v mup_enabled moe_renormalize mla_use_nope use_qkv_bias "
    "use_conv_bias": FLAG,
    "layer_types mlp_layer_types layers_block_type": or_null(list_of(TEXT)),
    "mlp_only_layers": or_null(list_of(whole_number(0))),
    "full_attn_layers kda_layers": list_of(whole_number(1)),
    "short_factor long_factor": or_null(list_of(POSITIVE)),
    "eos_token_id": TOKENS,
    "hidden_act hidden_activation mlp_hidden_act mamba_hidden_act hybrid_override_pattern score_function": TEXT,
    "rope_type type topk_method use_bidirectional_attention": or_null(TEXT),
    f"{' '.join(PARTS)} quantization_config": OBJECT,
    "per_layer_config": or_null(OBJECTS),
}
"""Keys → the kind of their values."""
KIND_OF = {key: kind for keys, kind in KINDS.items() for key in keys.split()}


def checked_config(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The config without nulls; raises ModelError with file, key, value and what is expected for a value of the wrong kind."""
    for key, value in config.items():
        kind = KIND_OF.get(key)
        if kind and not kind.accepts(value):
            raise_model_error(file, key, value, kind.expected)
    given = {key: value for key, value in config.items() if value is not None}
    if "per_layer_config" in given:
        given["per_layer_config"] = {layer: checked_config(part, file) for layer, part in given["per_layer_config"].items()}
    return given | {part: checked_config(given[part], file) for part in PARTS if part in given}


def raise_model_error(file: Path, key: str, value: object, expected: str) -> NoReturn:
    """Raise a one-line ModelError."""
    shown = json.dumps(value, ensure_ascii=False)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]} ..."
    raise ModelError(f"{file} has {key} {shown}, expected is {expected}: take the config that came with the weights")
