"""Ling 2 (Ling-mini, Ring-mini): GLM-4.5's decoder with queries, keys and values in one tensor.

Weights of several experts always add up to the scale; that of a single one is its score.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from runtime.errors import ModelError
from runtime.graphs.checkpoint import Checkpoint
from runtime.models import glm4_moe
from runtime.models.decoder import OptionalTensors

DEFAULTS = {"head_dim": 128, "n_group": 8, "topk_group": 4, "use_qk_norm": True, "rope_theta": 600000.0, "num_shared_experts": 1}


class BailingMoe(glm4_moe.Glm4Moe):
    """Parts of a common projection."""

    OPTIONAL: ClassVar[OptionalTensors] = (
        ("use_qkv_bias", False, r"self_attn\.qkv_proj\.bias"),
        ("use_bias", False, r"self_attn\.o_proj\.bias"),
    )

    def projection(self, checkpoint: Checkpoint, name: str, width: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Weight [width, H] and bias [width] of queries, keys or values."""
        stem, part = name.rsplit(".", 1)
        rows, keys = (self.heads + 2 * self.kv_heads) * self.head_dim, self.kv_heads * self.head_dim
        first = {"q_proj": 0, "k_proj": rows - 2 * keys, "v_proj": rows - keys}[part]
        own = slice(first, first + width)
        weight = checkpoint.tensor(stem + ".qkv_proj.weight", (rows, self.hidden), own)
        bias = checkpoint.optional(stem + ".qkv_proj.bias", (rows,))
        return weight, None if bias is None else bias[own]


def read(config: dict[str, Any]) -> glm4_moe.Glm4Moe:
    """Sizes from config.json."""
    second = config["model_type"] == "bailing_moe_v2" or "V2" in str(config.get("architectures"))
    if (function := config.get("score_function", "sigmoid" if second else "softmax")) != "sigmoid":
        raise ModelError(f"score_function {function!r} (Ling 1) is not supported: this runtime builds Ling 2's sigmoid")
    config = DEFAULTS | config
    family = glm4_moe.read(config | {"n_shared_experts": config["num_shared_experts"]}, family=BailingMoe)
    return replace(family, router=replace(family.router, renormalize=family.top_k > 1))
