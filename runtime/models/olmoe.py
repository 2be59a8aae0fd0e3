"""OLMoE: joint norms over all query and over all key heads, optional clipping, softmax router without renormalisation."""

from dataclasses import dataclass
from typing import Any

from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder
from runtime.models.routers import Router
from runtime.models.sizes import common_settings


@dataclass(frozen=True, kw_only=True)
class Olmoe(Decoder):
    """`clip`: largest magnitude of queries, keys and values; 0 for no limit."""

    clip: float = 0.0

    def projected(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, fused: bool) -> list[str]:
        """Queries and keys, normed over all heads at once, and values; then everything is clipped."""
        q, k, v = self.heads_of(g, self.packed_projection(g, checkpoint, layer))
        names = (f"model.layers.{layer}.self_attn.{which}_norm" for which in "qk")
        q, k = (
            self.rms(g, value, name, self.paired(self.norm_weight(checkpoint, name, heads * self.head_dim)))
            for value, name, heads in zip((q, k), names, (self.heads, self.kv_heads), strict=True)
        )
        if not self.clip:
            return [q, k, v]
        return [g.node("Clip", [value, g.number(-self.clip), g.number(self.clip)]) for value in (q, k, v)]


def read(config: dict[str, Any]) -> Olmoe:
    """Sizes from config.json."""
    sizes = common_settings(config)
    return Olmoe(
        **sizes,
        intermediate=int(config["intermediate_size"]),
        router=Router("softmax_topk", sizes["top_k"], sizes["experts"], renormalize=bool(config.get("norm_topk_prob", False))),
        clip=float(config.get("clip_qkv") or 0),
    )
