"""dots.llm1: norms of heads, DeepSeek-V3's router and shared experts, dense first layers, windows in the last layers."""

from typing import Any

from runtime.models import glm4_moe


def read(config: dict[str, Any]) -> glm4_moe.Glm4Moe:
    """Sizes from config.json."""
    layers, first = int(config["num_hidden_layers"]), int(config.get("max_window_layers", 62))
    kinds = config.get("layer_types") or ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    window = int(config.get("sliding_window") or 0)
    defaults = {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0, "norm_topk_prob": False}
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return glm4_moe.read(defaults | config | {"use_qk_norm": True}, windows)
