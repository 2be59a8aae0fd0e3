"""Phi-3.5-MoE: layer norms with bias, biased projections and head, sparsemixer router over two experts."""

from typing import Any

from runtime.errors import ModelError
from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder
from runtime.models.routers import Router
from runtime.models.sizes import common_settings


class Phimoe(Decoder):
    """The common decoder with other tensor names and norms."""

    OPTIONAL = (*Decoder.OPTIONAL, ("lm_head_bias", False, r"^lm_head\.bias"))
    MOE = "block_sparse_moe"
    PROJECTIONS = ("w1", "w3", "w2")

    def norm(self, g: GraphBuilder, checkpoint: Checkpoint, value: str, name: str, size: int, output: str = "") -> str:
        """Layer norm with bias."""
        parts = [g.weight(f"{name}.{part}", checkpoint.tensor(f"{name}.{part}", (size,))) for part in ("weight", "bias")]
        return g.node("LayerNormalization", [value, *parts], output, axis=-1, epsilon=self.epsilon)


def read(config: dict[str, Any]) -> Phimoe:
    """Sizes from config.json."""
    sizes = common_settings(config, 1e6)
    if sizes["top_k"] != 2:
        raise ModelError(
            f"sparsemixer chooses 2 experts, this config {sizes['top_k']}: take the config that came with the weights"
        )
    window = int(config.get("sliding_window") or 0)
    return Phimoe(
        **sizes,
        intermediate=int(config["intermediate_size"]),
        router=Router("sparsemixer", 2, sizes["experts"], tolerance=float(config.get("router_jitter_noise", 0.01))),
        windows=(window,) * sizes["layers"] if window else (),
    )
