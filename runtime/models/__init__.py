"""Model families: one file per family, each with a reader of its config and the subgraphs it is split into."""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import onnx

from runtime.checkpoint import Checkpoint
from runtime.errors import ModelError

FAMILIES = {"qwen3_moe": "runtime.models.qwen3_moe"}


class Family(Protocol):
    """What the engine knows of a model: sizes, and how to build its subgraphs."""

    hidden: int
    layers: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    rope_theta: float
    end_ids: tuple[int, ...]
    expert_parameters: int

    def embed(self, checkpoint: Checkpoint) -> onnx.ModelProto:
        """Inputs ids [T]; outputs hidden [T, H]."""

    def attention(self, checkpoint: Checkpoint, layer: int) -> onnx.ModelProto:
        """Inputs hidden [T, H], cos, sin [T, 1, D], mask [T, P+T], past_k, past_v [P, KV, D].

        Outputs hidden_out [T, H], new_k, new_v [T, KV, D].
        """

    def router(self, checkpoint: Checkpoint, layer: int) -> onnx.ModelProto:
        """Inputs hidden [T, H]; outputs normed [T, H], experts [T, k] (int64), weights [T, k]."""

    def expert(self, checkpoint: Checkpoint, layer: int, expert: int) -> onnx.ModelProto:
        """Inputs rows [T, H]; outputs out [T, H]."""

    def head(self, checkpoint: Checkpoint) -> onnx.ModelProto:
        """Inputs hidden [T, H]; outputs logits [T, V]."""


def read_family(config: dict[str, Any], folder: Path) -> Family:
    """The family that config.json names, with its sizes."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(f"{folder} holds a model of type {model_type!r}: this runtime knows {', '.join(FAMILIES)}")
    try:
        family: Family = import_module(FAMILIES[model_type]).read(config)
    except (KeyError, TypeError, ValueError) as error:
        told = f"{folder / 'config.json'} lacks or spoils {error}"
        raise ModelError(f"{told}: take the config that came with the weights") from None
    return family
