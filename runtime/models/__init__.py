"""Model families: one file per family, each with a reader of its config and what its subgraphs do differently."""

import math
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.models.decoder import Decoder as Family

__all__ = ["FAMILIES", "Family", "read_family"]

# model_type of config.json → module
FAMILIES = {
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "mixtral": "mixtral",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "gpt_oss": "gpt_oss",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "phimoe": "phimoe",
    "glm4_moe": "glm4_moe",
    "ernie4_5_moe": "ernie4_5_moe",
    "lfm2_moe": "lfm2_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_next",
}


MOST_LAYERS = 10_000
PARTS = ("text_config", "rope_parameters", "rope_scaling")
NUMBERS = re.compile(r"(moe_)?num_\w+|\w+_(size|dim|eps|theta|rank)|max_position_embeddings|moe_k")
"""Keys of config.json whose values are numbers, where they are given."""


def read_family(config: dict[str, Any], folder: Path) -> Family:
    """The family that config.json names, with its sizes."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"{folder} holds a model of type {model_type!r}: this runtime knows {', '.join(FAMILIES)}")
    problem = f"{folder / 'config.json'} lacks or spoils"
    remedy = "take the config that came with the weights"
    for part in (config, *(config[name] for name in PARTS if isinstance(config.get(name), dict))):
        for key, value in part.items():
            if _spoilt(key, value):
                raise ModelError(f"{problem} {key}, which is {value!r}: {remedy}")
    try:
        if not 0 < int(config.get("num_hidden_layers", 1)) <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers, which is {config['num_hidden_layers']}")
        family: Family = import_module(f"runtime.models.{FAMILIES[model_type]}").read(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{problem} {error}: {remedy}") from None
    if not 0 < family.top_k <= family.experts:
        raise ModelError(f"{problem} num_experts_per_tok, which is {family.top_k} of {family.experts} experts: {remedy}")
    if family.context < 1:
        raise ModelError(f"{problem} max_position_embeddings, which is {family.context}: {remedy}")
    if len(family.dense) == family.layers:
        raise ModelError(f"no layer of {folder} has experts: this runtime runs Mixture-of-Experts models")
    family.check_heads()
    return family


def _spoilt(key: str, value: object) -> bool:
    """Is this a text for a truth value, or no finite number where one belongs?"""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return not math.isfinite(value)
    if NUMBERS.fullmatch(key) and value is not None:
        return True
    return isinstance(value, str) and value.lower() in ("true", "false")
