"""The text part of Qwen3-VL-MoE: Qwen3-MoE with renormalised weights and experts stored transposed in two tensors."""

from typing import Any

from runtime.graphs.checkpoint import Checkpoint
from runtime.models import qwen3_moe
from runtime.models.decoder import ExpertWeights
from runtime.models.sizes import text_part


class Qwen3VlMoe(qwen3_moe.Qwen3Moe):
    """Qwen3-MoE with plain rotary positions, since those of text are the same in all three parts of a head."""

    def expert_weights(self, checkpoint: Checkpoint, layer: int, expert: int) -> ExpertWeights:
        """Slices of [E, H, 2 I] and [E, I, H], as published, or of the tensors that transformers writes."""
        prefix, width = f"model.layers.{layer}.mlp.experts.", self.intermediate
        if checkpoint.shape(prefix + "down_proj") == (self.experts, self.hidden, width):
            return super().expert_weights(checkpoint, layer, expert)
        both = checkpoint.tensor(prefix + "gate_up_proj", (self.experts, self.hidden, 2 * width), expert).T
        down = checkpoint.tensor(prefix + "down_proj", (self.experts, width, self.hidden), expert).T
        return ExpertWeights(both[:width], both[width:], down)


def read(config: dict[str, Any]) -> qwen3_moe.Qwen3Moe:
    """Sizes of the text part from config.json."""
    used = {"norm_topk_prob": True, "use_sliding_window": False}
    return qwen3_moe.read({"tie_word_embeddings": True} | text_part(config) | used, Qwen3VlMoe, 500000.0)
