"""GLM-4.5 and 4.6: a part of each head turns, optional norms of heads, sigmoid router, shared experts, dense first layers."""

from dataclasses import dataclass
from typing import Any

from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder, common
from runtime.models.qwen3_moe import Qwen3Moe
from runtime.models.routers import Router


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(Qwen3Moe):
    """`qk_norm`: queries and keys are normed head by head."""

    qk_norm: bool

    SHARED = "shared_experts"

    def projected(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, fused: bool) -> list[str]:
        """Queries, keys and values, normed where the config says so."""
        owner = Qwen3Moe if self.qk_norm else Decoder
        return owner.projected(self, g, checkpoint, layer, fused)


def read(config: dict[str, Any]) -> Glm4Moe:
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
        intermediate=width,
        router=router,
        dense=frozenset(range(min(int(config.get("first_k_dense_replace", 1)), sizes["layers"]))),
        dense_width=int(config["intermediate_size"]),
        shared_width=width * int(config.get("n_shared_experts") or 0),
        qk_norm=bool(config.get("use_qk_norm", False)),
    )
