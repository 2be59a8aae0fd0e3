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


def read_family(config: dict[str, Any], folder: Path) -> Family:
    """The family that config.json names, with its sizes."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(f"{folder} holds a model of type {model_type!r}: this runtime knows {', '.join(FAMILIES)}")
    try:
        family: Family = import_module(f"runtime.models.{FAMILIES[model_type]}").read(config)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{folder / 'config.json'} lacks or spoils {error}"
        raise ModelError(f"{problem}: take the config that came with the weights") from None
    return family
