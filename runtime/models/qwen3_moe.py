"""Qwen3-MoE: per-head norms of queries and keys, softmax router, SwiGLU experts, dense layers by the config."""

from typing import Any

from runtime.models.decoder import Decoder
from runtime.models.routers import Router
from runtime.models.sizes import common_settings, dense_layers


class Qwen3Moe(Decoder):
    """The common decoder, unchanged."""


def read(config: dict[str, Any], family: type[Qwen3Moe] = Qwen3Moe, theta: float = 10000.0) -> Qwen3Moe:
    """Sizes from config.json."""
    sizes = common_settings(config, theta)
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    return family(
        **sizes,
        intermediate=int(config["moe_intermediate_size"]),
        router=Router("softmax_topk", sizes["top_k"], sizes["experts"], renormalize=bool(config.get("norm_topk_prob", False))),
        windows=(window,) * sizes["layers"] if window else (),
        head_norms=("q_norm", "k_norm"),
        dense=dense_layers(config),
        dense_width=int(config.get("intermediate_size") or 0),
    )
