"""Checks before a conversion: config and tensors are of one model, the family reads all of them, and they are finite."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import ModelError
from runtime.graphs.adapter import Adapter
from runtime.graphs.builder import ExternalData
from runtime.graphs.checkpoint import Checkpoint, Outline
from runtime.models import Family

IGNORABLE = re.compile(
    r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$|^(model\.)?mtp[._]"
    r"|^(model\.)?(visual|vision_tower|audio_tower|embed_vision|embed_audio)\."
)
"""Tensors that text does not need: buffers that follow from config.json, layers that predict further tokens, vision, audio."""


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROWS_AT_ONCE = 8192


def check_coverage(model: Path, family: Family, config: dict[str, Any], adapter: Adapter | None = None) -> None:
    """Raise ModelError for a tensor that is missing, has a wrong shape, would not be used, or contains NaN or infinity.

    Layers after the last one that predict further tokens (DeepSeek-V3: num_nextn_predict_layers) are omitted.
    """
    outline = Outline(model, adapter.merged if adapter else None)
    _read_all(outline, family)
    if adapter:
        adapter.check_used(outline.used)
    _check_optional(outline, family, config.get("text_config", config))
    predicted = int(config.get("num_nextn_predict_layers") or 0)
    further = tuple(f"model.layers.{family.layers + layer}." for layer in range(predicted))
    tied = (HEAD,) if family.tied else ()
    unused = [
        name
        for name in sorted(outline.names - outline.used)
        if not (IGNORABLE.search(name) or name in tied or (further and name.startswith(further)) or 0 in outline.shape(name))
    ]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        problem = f"tensor {unused[0]}{more} of {model} would not be used"
        raise ModelError(f"{problem}: this runtime does not build this variant of the architecture")
    for name in sorted(outline.used):
        outline.check_finite(name)


def with_its_head(model: Path, family: Family) -> Family:
    """The family, not tied if the checkpoint has a head that differs from the embedding, as in transformers; that is printed."""
    checkpoint, shape = Checkpoint(model), (family.vocabulary, family.hidden)
    if not (family.tied and HEAD in checkpoint and EMBEDDING in checkpoint):
        return family
    for first in range(0, family.vocabulary, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        if not np.array_equal(checkpoint.tensor(HEAD, shape, rows), checkpoint.tensor(EMBEDDING, shape, rows)):
            problem = f"config.json ties the head to the embedding, but {HEAD} of {model} differs from it"
            print(f"moescope: {problem}: it is used, as in transformers", file=sys.stderr)
            return replace(family, tied=False)
    return family


def _check_optional(outline: Outline, family: Family, config: dict[str, Any]) -> None:
    """Raise ModelError for an optional tensor that config.json demands and the checkpoint lacks, or the reverse.

    A bias of zeros, which GPTQ's writers add to every matrix, changes nothing.
    """
    for name in sorted(outline.optional_names):
        flag, demanded = family.flag_of(name, config)
        if demanded == (name in outline) or (name.endswith(".bias") and not demanded and outline.is_zero(name)):
            continue
        reason = f"config.json has {flag} {str(demanded).lower()}" if flag else "its architecture says otherwise"
        problem = f"{outline.folder} has {'no' if demanded else 'a'} tensor {name}, but {reason}"
        raise ModelError(f"{problem}: the files are incomplete or from different models")


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
    if missing := sorted(names - outline.names):
        problem = f"{outline.folder} has no tensor {missing[0]}"
        raise ModelError(f"{problem}: the checkpoint is incomplete or of another architecture")
    outline.used |= names


def _discard_weight(name: str, value: np.ndarray) -> ExternalData:
    return ExternalData("", 0, value.nbytes)
