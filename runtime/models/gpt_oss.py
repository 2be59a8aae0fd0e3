"""gpt-oss: attention sinks, sliding windows in every other layer, biases, a clamped SwiGLU, softmax over the chosen experts."""

from dataclasses import dataclass
from typing import Any

from runtime.checkpoint import Checkpoint
from runtime.errors import ModelError
from runtime.graph_builder import GraphBuilder
from runtime.models.decoder import Decoder, ExpertWeights, common, expert_count
from runtime.models.rope import read_rope
from runtime.models.routers import Router


@dataclass(frozen=True, kw_only=True)
class GptOss(Decoder):
    """`alpha` and `limit` of its activation."""

    alpha: float = 1.702
    limit: float = 7.0

    GATE = "router"

    def sinks(self, g: GraphBuilder, checkpoint: Checkpoint, layer: int) -> str:
        """One logit per head that takes a share of the softmax and gives nothing."""
        name = f"model.layers.{layer}.self_attn.sinks"
        return g.weight(name, checkpoint.tensor(name, (self.heads,)))

    def activation(self, g: GraphBuilder, gate: str, up: str) -> str:
        """(clip(up) + 1) * gate * sigmoid(alpha * gate), gate clipped from above only."""
        gate = g.node("Min", [gate, g.number(self.limit)])
        up = g.node("Clip", [up, g.number(-self.limit), g.number(self.limit)])
        glu = g.node("Mul", [gate, g.node("Sigmoid", [g.node("Mul", [gate, g.number(self.alpha)])])])
        return g.node("Mul", [g.node("Add", [up, g.number(1.0)]), glu])

    def expert_weights(self, checkpoint: Checkpoint, layer: int, expert: int) -> ExpertWeights:
        """Slices of fused tensors [E, in, out], whose gates and ups alternate."""
        prefix, e, width, hidden = f"model.layers.{layer}.mlp.experts.", self.experts, self.intermediate, self.hidden
        if prefix + "gate_up_proj_blocks" in checkpoint:
            raise ModelError("this checkpoint holds MXFP4 experts: save it once in bfloat16 with transformers, then convert that")
        both = checkpoint.tensor(prefix + "gate_up_proj", (e, hidden, 2 * width), expert)
        bias = checkpoint.tensor(prefix + "gate_up_proj_bias", (e, 2 * width), expert)
        down = checkpoint.tensor(prefix + "down_proj", (e, width, hidden), expert)
        order = [*range(0, 2 * width, 2), *range(1, 2 * width, 2)]
        down_bias = checkpoint.tensor(prefix + "down_proj_bias", (e, hidden), expert)
        return ExpertWeights(both[:, 0::2].T, both[:, 1::2].T, down.T, bias[order], down_bias)


def read(config: dict[str, Any]) -> GptOss:
    """Sizes from config.json."""
    sizes = common(config)
    experts, layers = expert_count(config), sizes["layers"]
    window = int(config.get("sliding_window") or 0)
    kinds = config.get("layer_types") or [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    return GptOss(
        **sizes,
        experts=experts,
        intermediate=int(config["intermediate_size"]),
        rope=read_rope(config, sizes["head_dim"], 150000.0),
        router=Router("topk_softmax", sizes["top_k"], experts),
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        alpha=float(config.get("swiglu_alpha") or 1.702),
        limit=float(config.get("swiglu_limit") or 7.0),
    )
