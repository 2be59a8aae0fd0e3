"""MiniMax-M2: joint norms over all query and over all key heads, partly rotated, sigmoid router with a correction bias."""

from typing import Any

import numpy as np

from runtime.graphs.checkpoint import Checkpoint
from runtime.models.olmoe import Olmoe
from runtime.models.routers import Router
from runtime.models.sizes import common_settings, partly_rotated


class MiniMaxM2(Olmoe):
    """OLMoE's attention and Mixtral's names."""

    OPTIONAL = ()
    MOE = "block_sparse_moe"
    PROJECTIONS = ("w1", "w3", "w2")

    def correction(self, checkpoint: Checkpoint, prefix: str) -> np.ndarray:
        """The bias added to the scores [E] for choosing experts."""
        return checkpoint.tensor(prefix + "block_sparse_moe.e_score_correction_bias", (self.experts,))


def read(config: dict[str, Any]) -> MiniMaxM2:
    """Sizes from config.json, which may give the rotated dimensions as a number."""
    if "rotary_dim" in config:
        config = {"partial_rotary_factor": config["rotary_dim"] / config.get("head_dim", 128)} | config
    sizes = partly_rotated(common_settings({"head_dim": 128} | config, 5e6, partly=True))
    return MiniMaxM2(
        **sizes,
        intermediate=int(config["intermediate_size"]),
        router=Router("sigmoid_groups", sizes["top_k"], sizes["experts"], renormalize=True),
    )
