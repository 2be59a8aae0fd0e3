"""Mixtral: softmax router, renormalised, experts named w1 (gate), w3 (up), w2 (down)."""

from typing import Any

from runtime.models.decoder import Decoder, common, expert_count
from runtime.models.rope import read_rope
from runtime.models.routers import Router


class Mixtral(Decoder):
    """Its own names, else the common decoder."""

    MOE = "block_sparse_moe"
    PROJECTIONS = ("w1", "w3", "w2")


def read(config: dict[str, Any]) -> Mixtral:
    """Sizes from config.json."""
    sizes = common(config)
    experts = expert_count(config)
    window = int(config.get("sliding_window") or 0)
    return Mixtral(
        **sizes,
        experts=experts,
        intermediate=int(config["intermediate_size"]),
        rope=read_rope(config, sizes["head_dim"], 1e6),
        router=Router("softmax_topk", sizes["top_k"], experts, renormalize=True),
        windows=(window,) * sizes["layers"] if window else (),
    )
