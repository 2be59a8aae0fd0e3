"""Model families: one file per family, each with a reader of its config and what its subgraphs do differently."""

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


def read_family(config: dict[str, Any], folder: Path) -> Family:
    """The family that config.json names, with its sizes."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"{folder} holds a model of type {model_type!r}: this runtime knows {', '.join(FAMILIES)}")
    problem = f"{folder / 'config.json'} lacks or spoils"
    remedy = "take the config that came with the weights"
    for key, value in config.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise ModelError(f"{problem} {key}, which is the text {value!r}: {remedy}")
    try:
        if not 0 < int(config.get("num_hidden_layers", 1)) <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers, which is {config['num_hidden_layers']}")
        family: Family = import_module(f"runtime.models.{FAMILIES[model_type]}").read(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{problem} {error}: {remedy}") from None
    if not 0 < family.top_k <= family.experts:
        raise ModelError(f"{problem} num_experts_per_tok, which is {family.top_k} of {family.experts} experts: {remedy}")
    if len(family.dense) == family.layers:
        raise ModelError(f"no layer of {folder} has experts: this runtime runs Mixture-of-Experts models")
    family.check_heads()
    return family
