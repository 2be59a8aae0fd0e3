"""Sizes of a model by the keys of config.json that families share."""

from collections.abc import Callable
from typing import Any

from runtime.errors import ModelError
from runtime.models.rope import read_rope

ACTIVATIONS = ("silu", "swish")
LAYER_TYPES = ("full_attention", "sliding_attention")


def text_part(config: dict[str, Any], tied: bool = False) -> dict[str, Any]:
    """The text model's settings. Of a model with several parts, the head's flag (default `tied`) and the end tokens are those of
    the whole, as in transformers.
    """
    if "text_config" not in config:
        return config
    whole = {"eos_token_id": config["eos_token_id"]} if "eos_token_id" in config else {}
    return {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings", tied), **whole}


def common_settings(
    config: dict[str, Any], theta: float = 10000.0, layer_types: tuple[str, ...] = LAYER_TYPES, partly: bool = False
) -> dict[str, Any]:
    """Settings that most families' config.json names the same way. `theta`: default base of the rotary positions.

    partly: heads may rotate in part. transformers ignores partial_rotary_factor in the other families.
    """
    sizes = common_sizes(config, layer_types)
    rope = read_rope(config, sizes["head_dim"], theta)
    if rope.dims < sizes["head_dim"] // 2 * 2 and not partly:
        raise ModelError("partial_rotary_factor is below 1, but heads of this family rotate as a whole: remove the key")
    return sizes | {"rope": rope}


def partly_rotated(sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes with rotary positions over whole heads, whose last dimensions do not rotate, and the order of dimensions."""
    rope, order = sizes["rope"].filling(sizes["head_dim"])
    return sizes | {"rope": rope, "rotary_order": order}


def common_sizes(config: dict[str, Any], layer_types: tuple[str, ...] = LAYER_TYPES) -> dict[str, Any]:
    """The sizes that every family's config.json names the same way; unsupported activations and layers are refused."""
    if config.get("hidden_act", "silu") not in ACTIVATIONS:
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported: this runtime builds silu")
    check_layer_types(config, layer_types)
    end = config.get("eos_token_id")
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if not head_dim:
        raise ModelError(
            f"hidden_size {config['hidden_size']} is too small for num_attention_heads {heads}: take the model's own"
        )
    return {
        "hidden": int(config["hidden_size"]),
        "layers": int(config["num_hidden_layers"]),
        "experts": expert_count(config),
        "top_k": int(config["num_experts_per_tok"]),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "vocabulary": int(config["vocab_size"]),
        "context": int(config.get("max_position_embeddings", 32768)),
        "epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "end_ids": tuple(end) if isinstance(end, list) else () if end is None else (int(end),),
    }


def layer_kinds(config: dict[str, Any], slides: Callable[[int], bool]) -> list[str]:
    """`full_attention` or `sliding_attention` of each layer, as the config lists them, else by the layer's number."""
    return config.get("layer_types") or [LAYER_TYPES[slides(layer)] for layer in range(int(config["num_hidden_layers"]))]


def windows_of(kinds: list[str], window: int | None) -> tuple[int, ...]:
    """Rows that each layer's attention sees: `window` in sliding layers; 0 for all."""
    return tuple(int(window or 0) if kind == "sliding_attention" else 0 for kind in kinds)


def first_layers(count: int | None, sizes: dict[str, Any]) -> frozenset[int]:
    """The first `count` layers, at most all."""
    return frozenset(range(min(int(count or 0), sizes["layers"])))


def check_layer_types(config: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse unsupported kinds of layers, and a list that does not match the number of layers."""
    kinds = config.get("layer_types") or ()
    for kind in kinds:
        if kind not in known:
            raise ModelError(f"layer_types: {kind!r} is not supported: this runtime builds {', '.join(known)}")
    if kinds and len(kinds) != int(config["num_hidden_layers"]):
        raise ModelError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {config['num_hidden_layers']}")


def expert_count(config: dict[str, Any]) -> int:
    """The number of routed experts, under any of its keys."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(name):
            return int(config[name])
    raise KeyError("num_experts")


def dense_layers(config: dict[str, Any]) -> frozenset[int]:
    """Layers without experts, by the keys of Qwen's configs."""
    step, listed = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or []
    return frozenset(layer for layer in range(int(config["num_hidden_layers"])) if layer in listed or (layer + 1) % step)
