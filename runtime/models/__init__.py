"""Model families: one file per family, with a reader of its config and its differences from the common subgraphs."""

from importlib import import_module
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.graphs.published import quantization_of
from runtime.models.decoder import Decoder as Family
from runtime.models.keys import checked_config, raise_model_error

__all__ = ["FAMILIES", "Family", "read_family"]

# model_type of config.json → module
FAMILIES = {
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "mixtral": "mixtral",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "gpt_oss": "gpt_oss",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "phimoe": "phimoe",
    "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "deepseek",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5_moe",
    "lfm2_moe": "lfm2_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_next",
    "minimax_m2": "minimax_m2",
    "solar_open": "solar_open",
    "exaone_moe": "exaone_moe",
    "flex_olmo": "flex_olmo",
    "afmoe": "afmoe",
    "granitemoehybrid": "granitemoehybrid",
    "bailing_moe": "bailing_moe",
    "bailing_moe_v2": "bailing_moe",
    "kimi_linear": "kimi_linear",
    "nemotron_h": "nemotron_h",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
}


MOST_LAYERS = 10_000


def read_family(config: dict[str, Any], folder: Path) -> Family:
    """The family that config.json names, with its sizes."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"{folder} holds a model of type {model_type!r}: this runtime knows {', '.join(FAMILIES)}")
    file = folder / "config.json"
    given = checked_config(config, file)
    quantization_of(given)
    sizes = given.get("text_config", given)
    if sizes.get("num_hidden_layers", 1) > MOST_LAYERS:
        raise_model_error(file, "num_hidden_layers", sizes["num_hidden_layers"], f"at most {MOST_LAYERS}")
    try:
        family: Family = import_module(f"runtime.models.{FAMILIES[model_type]}").read(given)
    except KeyError as error:
        raise ModelError(f"{file} lacks {error}: use the config that came with the weights") from None
    if not 0 < family.top_k <= family.experts:
        raise_model_error(file, "num_experts_per_tok", family.top_k, f"from 1 to the {family.experts} experts of a layer")
    if not family.routed:
        raise ModelError(f"no layer of {folder} has experts: this runtime runs Mixture-of-Experts models")
    family.check_heads()
    return family
