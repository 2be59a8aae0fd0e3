"""Qwen3-MoE: per-head norms of queries and keys, softmax router, SwiGLU experts, dense layers where the config says so."""

from typing import Any

from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder, common, dense_layers
from runtime.models.routers import Router


class Qwen3Moe(Decoder):
    """Norms stand between projection and rotation."""

    def projected(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, fused: bool) -> list[str]:
        """Queries and keys are normed head by head."""
        q, k, v = self.heads_of(g, self.packed_projection(g, checkpoint, layer))
        prefix = f"model.layers.{layer}.self_attn."
        q = self.head_norm(g, checkpoint, q, prefix + "q_norm", self.heads)
        return [q, self.head_norm(g, checkpoint, k, prefix + "k_norm", self.kv_heads), v]


def read(config: dict[str, Any]) -> Qwen3Moe:
    """Sizes from config.json."""
    sizes = common(config)
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    return Qwen3Moe(
        **sizes,
        intermediate=int(config["moe_intermediate_size"]),
        router=Router("softmax_topk", sizes["top_k"], sizes["experts"], renormalize=bool(config.get("norm_topk_prob", False))),
        windows=(window,) * sizes["layers"] if window else (),
        dense=dense_layers(config),
        dense_width=int(config.get("intermediate_size") or 0),
    )
