"""EXAONE MoE: normed heads, windows whose layers alone rotate, DeepSeek-V3's router, shared experts, dense layers."""

from dataclasses import replace
from typing import Any

import numpy as np

from runtime.errors import ModelError
from runtime.graphs.checkpoint import Checkpoint
from runtime.models import glm4_moe
from runtime.models.sizes import layer_kinds, windows_of


class ExaoneMoe(glm4_moe.Glm4Moe):
    """GLM's decoder without biases."""

    OPTIONAL = ()

    def correction(self, checkpoint: Checkpoint, prefix: str) -> np.ndarray:
        """The bias added to the scores [E] for choosing experts."""
        return checkpoint.tensor(prefix + "mlp.e_score_correction_bias", (self.experts,))


def read(config: dict[str, Any]) -> glm4_moe.Glm4Moe:
    """Sizes from config.json."""
    window, every = config.get("sliding_window"), config.get("sliding_window_pattern", 4)
    if "layer_types" not in config and window and not (isinstance(every, int) and every > 0):
        raise ModelError(f"sliding_window_pattern {every!r} is not supported without layer_types: add the list of layers")
    kinds = layer_kinds(config, lambda layer: bool(window and (layer + 1) % every))
    windows = windows_of(kinds, window)
    named = {"n_shared_experts": config.get("num_shared_experts", 1), "n_routed_experts": config["num_experts"]}
    defaults = {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "use_qk_norm": True}
    family = glm4_moe.read(defaults | named | config, windows, ExaoneMoe)
    if listed := config.get("mlp_layer_types"):
        family = replace(family, dense=frozenset(layer for layer, kind in enumerate(listed) if kind == "dense"))
    return replace(family, unturned=frozenset(layer for layer, rows in enumerate(windows) if window and not rows))
