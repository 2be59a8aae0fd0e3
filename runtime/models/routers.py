"""The seven kinds of router: from logits [T, E] to the chosen experts [T, k] (int64) and their weights [T, k]."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from runtime.graphs.builder import GraphBuilder

OUT = ["weights", "experts"]
# Name of the scores [T, E] by which experts compete, for predictors; in graphs without it, the logits are the scores.
SCORES = "scores"


@dataclass(frozen=True)
class Router:
    """A kind (a key of KINDS) and its parameters; groups only for the group-limited kinds, tolerance only for sparsemixer.

    floor: keeps the sum by which weights are divided above 0, for the kinds with a correction.
    """

    kind: str
    top_k: int
    experts: int
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    tolerance: float = 0.0
    floor: float = 1e-20


def sigmoid_router(config: dict[str, Any], sizes: dict[str, Any], floor: float = 1e-20) -> Router:
    """DeepSeek-V3's router, by the keys of its config, which other families use too."""
    return Router(
        "sigmoid_groups",
        sizes["top_k"],
        sizes["experts"],
        renormalize=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        floor=floor,
    )


def softmax_topk(g: GraphBuilder, logits: str, router: Router) -> None:
    """Softmax over all experts, the k largest, renormalised if the config says so (Qwen, Mixtral, OLMoE)."""
    scores = g.node("Softmax", [logits], SCORES, axis=-1)
    if not router.renormalize:
        g.nodes_of("TopK", [scores, g.ints(router.top_k)], OUT)
        return
    top, _ = g.nodes_of("TopK", [scores, g.ints(router.top_k)], ["top", "experts"])
    g.node("Div", [top, g.node("ReduceSum", [top, g.ints(-1)], keepdims=1)], "weights")


def softmax_scaled(g: GraphBuilder, logits: str, router: Router) -> None:
    """Softmax over all experts, the k largest, renormalised, each times its factor (the weight `factors` [E], Gemma 4)."""
    scores = g.node("Softmax", [logits], SCORES, axis=-1)
    top, _ = g.nodes_of("TopK", [scores, g.ints(router.top_k)], ["top", "experts"])
    shares = g.node("Div", [top, g.node("ReduceSum", [top, g.ints(-1)], keepdims=1)])
    g.node("Mul", [shares, g.node("Gather", ["factors", "experts"])], "weights")


def topk_softmax(g: GraphBuilder, logits: str, router: Router) -> None:
    """The k largest logits, softmax over them (Granite, gpt-oss)."""
    top, _ = g.nodes_of("TopK", [logits, g.ints(router.top_k)], ["top", "experts"])
    g.node("Softmax", [top], "weights", axis=-1)


def group_limited(g: GraphBuilder, logits: str, router: Router) -> None:
    """Softmax; only the groups with the largest single scores compete; weights times a scale (DeepSeek-V2)."""
    scores = g.node("Softmax", [logits], SCORES, axis=-1)
    if router.groups > 1:
        grouped = g.node("Reshape", [scores, g.ints(-1, router.groups, router.experts // router.groups)])
        group_mask = _group_mask(g, g.node("ReduceMax", [grouped, g.ints(-1)], keepdims=0), router)
        scores = g.node("Reshape", [g.node("Mul", [grouped, group_mask]), g.ints(-1, router.experts)])
    top, _ = g.nodes_of("TopK", [scores, g.ints(router.top_k)], ["top", "experts"])
    g.node("Mul", [top, g.number(router.scale)], "weights")


def sigmoid_groups(g: GraphBuilder, logits: str, router: Router) -> None:
    """Sigmoid; a correction bias [E] (the weight `correction`) is used only for choosing.

    Groups compete by the sum of their two best; weights are renormalised and scaled (DeepSeek-V3).
    """
    scores = g.node("Sigmoid", [logits])
    choice = g.node("Add", [scores, "correction"], SCORES)
    if router.groups > 1:
        grouped = g.node("Reshape", [choice, g.ints(-1, router.groups, router.experts // router.groups)])
        best = g.nodes_of("TopK", [grouped, g.ints(2)], ["best_two", "best_two_at"])[0]
        group_mask = _group_mask(g, g.node("ReduceSum", [best, g.ints(-1)], keepdims=0), router)
        inside = g.node("Cast", [group_mask], to=TensorProto.BOOL)
        barred = g.node("Where", [inside, grouped, g.number(-np.inf)])
        choice = g.node("Reshape", [barred, g.ints(-1, router.experts)])
    g.nodes_of("TopK", [choice, g.ints(router.top_k)], ["top", "experts"])
    weights = g.node("GatherElements", [scores, "experts"], axis=1)
    if router.renormalize:
        total = g.node("Add", [g.node("ReduceSum", [weights, g.ints(-1)], keepdims=1), g.number(router.floor)])
        weights = g.node("Div", [weights, total])
    g.node("Mul", [weights, g.number(router.scale)], "weights")


def softmax_corrected(g: GraphBuilder, logits: str, router: Router) -> None:
    """Softmax over all experts; a correction bias [E] (the weight `correction`) is used only for choosing (ERNIE 4.5)."""
    scores = g.node("Softmax", [logits], axis=-1)
    choice = g.node("Add", [scores, "correction"], SCORES)
    g.nodes_of("TopK", [choice, g.ints(router.top_k)], ["top", "experts"])
    weights = g.node("GatherElements", [scores, "experts"], axis=1)
    total = g.node("Max", [g.node("ReduceSum", [weights, g.ints(-1)], keepdims=1), g.number(router.floor)])
    g.node("Div", [weights, total], "weights")


def sparsemixer(g: GraphBuilder, logits: str, router: Router) -> None:
    """Two experts in sequence, each weighted by a softmax over its near rivals (Phi-3.5-MoE, arXiv 2409.12136)."""
    first, first_index = _best_with_rivals(g, logits, logits, router, "first")
    off_on = g.constant("off_on", np.array([0, 1], np.float32))
    taken = g.node("OneHot", [g.node("Squeeze", [first_index, g.ints(1)]), g.ints(router.experts), off_on], axis=-1)
    barred = g.node("Where", [g.node("Cast", [taken], to=TensorProto.BOOL), g.number(-np.inf), logits])
    second, second_index = _best_with_rivals(g, barred, logits, router, "second")
    g.node("Concat", [first, second], "weights", axis=1)
    g.node("Concat", [first_index, second_index], "experts", axis=1)


def _best_with_rivals(g: GraphBuilder, scores: str, logits: str, router: Router, name: str) -> tuple[str, str]:
    """(weight, index) [T, 1] of the largest score, with softmax over the scores within the tolerance of it."""
    best, index = g.nodes_of("TopK", [scores, g.ints(1)], [f"{name}_best", f"{name}_at"])
    size = g.node("Max", [g.node("Abs", [logits]), best])
    far = g.node("Greater", [g.node("Div", [g.node("Sub", [best, scores]), size]), g.number(2 * router.tolerance)])
    near = g.node("Where", [far, g.number(-np.inf), scores])
    return g.node("GatherElements", [g.node("Softmax", [near], axis=-1), index], axis=1), index


def _group_mask(g: GraphBuilder, scores: str, router: Router) -> str:
    """1 for the best groups and 0 for the others, [T, G, 1], from group scores [T, G]."""
    _, best = g.nodes_of("TopK", [scores, g.ints(router.top_groups)], ["group_scores", "groups"])
    off_on = g.constant("off_on", np.array([0, 1], np.float32))
    rows = g.node("OneHot", [best, g.ints(router.groups), off_on], axis=-1)
    return g.node("Unsqueeze", [g.node("ReduceSum", [rows, g.ints(1)], keepdims=0), g.ints(-1)])


KINDS = {
    "softmax_topk": softmax_topk,
    "softmax_scaled": softmax_scaled,
    "topk_softmax": topk_softmax,
    "group_limited": group_limited,
    "sigmoid_groups": sigmoid_groups,
    "softmax_corrected": softmax_corrected,
    "sparsemixer": sparsemixer,
}
CORRECTED = ("sigmoid_groups", "softmax_corrected")
"""Kinds that read the weight `correction`."""
