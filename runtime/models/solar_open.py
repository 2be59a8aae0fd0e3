"""Solar Open: GLM-4.5's decoder with experts in every layer and whole heads rotated."""

from typing import Any

from runtime.models import glm4_moe


def read(config: dict[str, Any]) -> glm4_moe.Glm4Moe:
    """Sizes from config.json."""
    defaults = {"partial_rotary_factor": 1.0, "head_dim": 128, "rope_theta": 1e6}
    fixed = {"first_k_dense_replace": 0, "intermediate_size": 0, "use_qk_norm": False}
    return glm4_moe.read({"rms_norm_eps": 1e-5} | defaults | config | fixed)
