"""FlexOlmo: OLMoE's attention and router, with norms after attention and after the experts instead of before them."""

from typing import Any

from runtime.graphs.builder import GraphBuilder
from runtime.graphs.checkpoint import Checkpoint
from runtime.models.olmoe import Olmoe
from runtime.models.routers import Router
from runtime.models.sizes import common_settings


class FlexOlmo(Olmoe):
    """Nothing is normed before attention and routers."""

    FINISHED = True
    ATTENTION_NORM = MLP_NORM = ""

    def norm(self, g: GraphBuilder, checkpoint: Checkpoint, value: str, name: str, size: int, output: str = "") -> str:
        """RMS norm over the last axis; the value itself where the family has no norm."""
        if name.endswith("."):
            return g.node("Identity", [value], output)
        return super().norm(g, checkpoint, value, name, size, output)

    def added(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int, projected: str) -> str:
        """The output of attention after a norm."""
        return self.norm(g, checkpoint, projected, f"model.layers.{layer}.post_attention_layernorm", self.hidden)


def read(config: dict[str, Any]) -> FlexOlmo:
    """Sizes from config.json."""
    sizes = common_settings(config, 5e5)
    return FlexOlmo(
        **sizes,
        intermediate=int(config["intermediate_size"]),
        router=Router("softmax_topk", sizes["top_k"], sizes["experts"], renormalize=bool(config.get("norm_topk_prob", False))),
    )
