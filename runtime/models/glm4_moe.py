"""GLM-4.5 and 4.6: partly rotated heads, optional norms of heads, sigmoid router, shared experts, dense first layers."""

from typing import Any, ClassVar

from runtime.models.decoder import Decoder, OptionalTensors
from runtime.models.routers import sigmoid_router
from runtime.models.sizes import common_settings, first_layers, partly_rotated


class Glm4Moe(Decoder):
    """The common decoder with another name of the shared experts."""

    OPTIONAL: ClassVar[OptionalTensors] = (("attention_bias", False, r"self_attn\.[qkv]_proj\.bias"),)
    SHARED = "shared_experts"


def read(config: dict[str, Any], windows: tuple[int, ...] = (), family: type[Glm4Moe] = Glm4Moe) -> Glm4Moe:
    """Sizes from config.json."""
    sizes = partly_rotated(common_settings({"partial_rotary_factor": 0.5} | config, partly=True))
    width = int(config["moe_intermediate_size"])
    return family(
        **sizes,
        windows=windows,
        intermediate=width,
        router=sigmoid_router(config, sizes),
        dense=first_layers(config.get("first_k_dense_replace", 1), sizes),
        dense_width=int(config["intermediate_size"]),
        shared_width=width * int(config.get("n_shared_experts") or 0),
        head_norms=("q_norm", "k_norm") if config.get("use_qk_norm") else (),
    )
