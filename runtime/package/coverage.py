"""Checks before a conversion: the family reads every tensor of the checkpoint, and all of them are finite."""

import re
from pathlib import Path

import numpy as np

from runtime.errors import ModelError
from runtime.graphs.builder import ExternalData
from runtime.graphs.checkpoint import Outline
from runtime.models import Family

IGNORABLE = re.compile(
    r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$|^(model\.)?mtp[._]"
    r"|^(model\.)?(visual|vision_tower|audio_tower|embed_vision|embed_audio)\."
)
"""Tensors that text does not need: buffers that follow from config.json, layers that predict further tokens, vision, audio."""


def check_coverage(model: Path, family: Family, predicted_layers: int = 0) -> None:
    """Raise ModelError for a tensor that is missing, has a wrong shape, would not be used, or contains NaN or infinity.

    predicted_layers: layers after the last one that predict further tokens (DeepSeek-V3), which this runtime omits.
    """
    outline = Outline(model)
    _read_all(outline, family)
    further = tuple(f"model.layers.{family.layers + layer}." for layer in range(predicted_layers))
    tied = ("lm_head.weight",) if family.tied else ()
    unused = [
        name
        for name in sorted(outline.names.keys() - outline.used)
        if not (IGNORABLE.search(name) or name in tied or (further and name.startswith(further)))
    ]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        problem = f"tensor {unused[0]}{more} of {model} would not be used"
        raise ModelError(f"{problem}: this runtime does not build this variant of the architecture")
    for name in sorted(outline.used):
        outline.check_finite(name)


def _read_all(outline: Outline, family: Family) -> None:
    outline.tensor("model.embed_tokens.weight", (family.vocabulary, family.hidden))
    family.head(outline, _discard_weight)
    for layer in range(family.layers):
        family.attention(outline, layer, _discard_weight)
        for make in family.subgraphs(layer).values():
            make(outline, layer, _discard_weight)
        if layer in family.dense:
            continue
        before = set(outline.used)
        family.expert_weights(outline, layer, 0)
        _repeat_for_experts(outline, family.experts, outline.used - before)


def _repeat_for_experts(outline: Outline, experts: int, of_first: set[str]) -> None:
    """Mark the tensors of all experts as used; raises ModelError if an expert lacks one that the first has."""
    names = {re.sub(r"\.experts\.0\.", f".experts.{expert}.", name) for name in of_first for expert in range(experts)}
    if missing := sorted(names - outline.names.keys()):
        problem = f"{outline.folder} has no tensor {missing[0]}"
        raise ModelError(f"{problem}: the checkpoint is incomplete or of another architecture")
    outline.used |= names


def _discard_weight(name: str, value: np.ndarray) -> ExternalData:
    return ExternalData("", 0, value.nbytes)
