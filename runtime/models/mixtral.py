"""Mixtral: softmax router, renormalised, experts named w1 (gate), w3 (up), w2 (down)."""

from typing import Any

from runtime.models.decoder import Decoder
from runtime.models.routers import Router
from runtime.models.sizes import common_settings


class Mixtral(Decoder):
    """The common decoder with other tensor names."""

    MOE = "block_sparse_moe"
    PROJECTIONS = ("w1", "w3", "w2")


def read(config: dict[str, Any]) -> Mixtral:
    """Sizes from config.json."""
    sizes = common_settings(config, 1e6)
    window = int(config.get("sliding_window") or 0)
    return Mixtral(
        **sizes,
        intermediate=int(config["intermediate_size"]),
        router=Router("softmax_topk", sizes["top_k"], sizes["experts"], renormalize=True),
        windows=(window,) * sizes["layers"] if window else (),
    )
