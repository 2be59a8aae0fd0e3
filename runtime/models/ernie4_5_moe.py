"""ERNIE 4.5: rotary pairs of neighbouring dimensions, softmax router with a correction bias, shared experts, dense layers."""

from typing import Any

import numpy as np

from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder
from runtime.models.rope import read_rope
from runtime.models.routers import Router
from runtime.models.sizes import common_sizes, partly_rotated


class Ernie45Moe(Decoder):
    """Different tensor names, and biases in all but the routed experts."""

    OPTIONAL = (("use_bias", False, r"(self_attn\.[qkvo]|(mlp|shared_experts)\.(gate|up|down))_proj\.bias|^lm_head\.bias"),)
    SHARED = "shared_experts"

    def correction(self, checkpoint: Checkpoint, prefix: str) -> np.ndarray:
        """The bias added to the scores [E] for choosing experts."""
        return checkpoint.tensor(f"{prefix}mlp.moe_statics.e_score_correction_bias", (1, self.experts))[0]


def read(config: dict[str, Any]) -> Ernie45Moe:
    """Sizes from config.json."""
    config = {"num_experts": config.get("moe_num_experts"), "num_experts_per_tok": config.get("moe_k")} | config
    config = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5} | config
    sizes = common_sizes(config)
    sizes = partly_rotated(sizes | {"rope": read_rope(config, sizes["head_dim"], 500000.0, interleaved=True)})
    width = int(config["moe_intermediate_size"])
    return Ernie45Moe(
        **sizes,
        intermediate=width,
        router=Router("softmax_corrected", sizes["top_k"], sizes["experts"], floor=float(config.get("moe_norm_min") or 1e-12)),
        dense=_dense_layers(config, sizes["layers"]),
        dense_width=int(config["intermediate_size"]),
        shared_width=width * int(config.get("moe_num_shared_experts", 2) or 0),
    )


def _dense_layers(config: dict[str, Any], layers: int) -> frozenset[int]:
    """Layers without experts."""
    first, last = int(config.get("moe_layer_start_index", 1)), int(config.get("moe_layer_end_index", -1))
    last, step = layers - 1 if last == -1 else last, int(config.get("moe_layer_interval") or 1)
    return frozenset(layer for layer in range(layers) if (layer + 1) % step or not first <= layer <= last)
