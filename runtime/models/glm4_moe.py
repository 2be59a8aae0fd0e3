"""GLM-4.5 and 4.6: partly rotated heads, optional norms of heads, sigmoid router, shared experts, dense first layers."""

from typing import Any

from runtime.models.decoder import Decoder, common, first_layers
from runtime.models.routers import Router


class Glm4Moe(Decoder):
    """The common decoder with another name of the shared experts."""

    SHARED = "shared_experts"


def read(config: dict[str, Any], windows: tuple[int, ...] = ()) -> Glm4Moe:
    """Sizes from config.json."""
    sizes = common({"partial_rotary_factor": 0.5} | config)
    rope, order = sizes.pop("rope").filling(sizes["head_dim"])
    width = int(config["moe_intermediate_size"])
    router = Router(
        "sigmoid_groups",
        sizes["top_k"],
        sizes["experts"],
        renormalize=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
    )
    return Glm4Moe(
        **sizes,
        rope=rope,
        rotary_order=order,
        windows=windows,
        intermediate=width,
        router=router,
        dense=first_layers(config.get("first_k_dense_replace", 1), sizes),
        dense_width=int(config["intermediate_size"]),
        shared_width=width * int(config.get("n_shared_experts") or 0),
        head_norms=("q_norm", "k_norm") if config.get("use_qk_norm") else (),
    )
