"""GraniteMoE: multipliers on embedding, attention, residual and logits; softmax over the chosen; fused tensors; shared MLP."""

from typing import Any

from runtime.graphs.checkpoint import Checkpoint
from runtime.models.decoder import Decoder, ExpertWeights
from runtime.models.routers import Router
from runtime.models.sizes import common_settings


class GraniteMoe(Decoder):
    """Different tensor names, and experts whose gates and ups are in one tensor."""

    MOE = "block_sparse_moe"
    GATE = "router.layer"
    SHARED = "shared_mlp"

    def expert_weights(self, checkpoint: Checkpoint, layer: int, expert: int) -> ExpertWeights:
        """One slice of input_linear and output_linear."""
        prefix = f"model.layers.{layer}.{self.MOE}."
        return self.slices(checkpoint, prefix + "input_linear.weight", prefix + "output_linear.weight", expert)

    def mlp_weights(self, checkpoint: Checkpoint, prefix: str, width: int) -> ExpertWeights:
        """Weights of the shared MLP, which is next to the block of experts."""
        prefix = prefix.replace(self.MOE + ".", "")
        both = checkpoint.tensor(prefix + ".input_linear.weight", (2 * width, self.hidden))
        return ExpertWeights(
            both[:width], both[width:], checkpoint.tensor(prefix + ".output_linear.weight", (self.hidden, width))
        )


def read(config: dict[str, Any], family: type[GraniteMoe] = GraniteMoe, **further: Any) -> Any:
    """Sizes from config.json; `further`: those of another family."""
    sizes = common_settings(config)
    sizes["scale"] = float(config.get("attention_multiplier", 1.0))
    return family(
        **sizes,
        **further,
        intermediate=int(config["intermediate_size"]),
        router=Router("topk_softmax", sizes["top_k"], sizes["experts"]),
        shared_width=int(config.get("shared_intermediate_size") or 0),
        embedding_multiplier=float(config.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(config.get("residual_multiplier", 1.0)),
        logits_divisor=float(config.get("logits_scaling", 1.0)),
    )
