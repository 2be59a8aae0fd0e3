"""Qwen2-MoE (Qwen1.5-MoE too): biased projections, softmax router, a shared expert with a sigmoid gate, some dense layers."""

from typing import Any

from runtime.models.decoder import Decoder
from runtime.models.routers import Router
from runtime.models.sizes import common_settings, dense_layers, layer_kinds, windows_of


class Qwen2Moe(Decoder):
    """The common decoder, with biases of queries, keys and values and a gated shared expert."""

    OPTIONAL = (("qkv_bias", True, r"self_attn\.[qkv]_proj\.bias"), ("", True, r"shared_expert_gate\.weight"))


def read(config: dict[str, Any]) -> Qwen2Moe:
    """Sizes from config.json."""
    sizes = common_settings(config)
    return Qwen2Moe(
        **sizes,
        intermediate=int(config["moe_intermediate_size"]),
        router=Router("softmax_topk", sizes["top_k"], sizes["experts"], renormalize=bool(config.get("norm_topk_prob", False))),
        windows=_window_sizes(config),
        dense=dense_layers(config),
        dense_width=int(config.get("intermediate_size") or 0),
        shared_width=int(config["shared_expert_intermediate_size"]),
    )


def _window_sizes(config: dict[str, Any]) -> tuple[int, ...]:
    """Sliding windows per layer, by the config."""
    if not config.get("use_sliding_window"):
        return ()
    limit = int(config.get("max_window_layers", 28))
    return windows_of(layer_kinds(config, lambda layer: layer % 2 == 0 and layer < limit), config["sliding_window"])
