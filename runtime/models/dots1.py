"""dots.llm1: norms of heads, DeepSeek-V3's router and shared experts, dense first layers, windows in the last layers."""

from typing import Any

from runtime.models import glm4_moe
from runtime.models.decoder import Decoder
from runtime.models.sizes import layer_kinds, windows_of


class Dots1(glm4_moe.Glm4Moe):
    """GLM's decoder, whose output projection may have a bias too."""

    OPTIONAL = Decoder.OPTIONAL


def read(config: dict[str, Any]) -> glm4_moe.Glm4Moe:
    """Sizes from config.json."""
    first = int(config.get("max_window_layers", 62))
    windows = windows_of(layer_kinds(config, lambda layer: layer >= first), config.get("sliding_window"))
    defaults = {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0, "norm_topk_prob": False}
    return glm4_moe.read(defaults | config | {"use_qk_norm": True}, windows, Dots1)
