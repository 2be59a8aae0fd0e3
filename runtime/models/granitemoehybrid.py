"""Granite 4 H: GraniteMoE with layers of Mamba-2, and attention with or without rotary positions."""

from typing import Any

from runtime.errors import ModelError
from runtime.models import granitemoe
from runtime.models.decoder import Decoder
from runtime.models.mamba2 import Mamba2Decoder, check_time_steps
from runtime.models.sizes import check_layer_types

KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names of layers in published configs, and transformers'."""


class GraniteMoeHybrid(Mamba2Decoder, granitemoe.GraniteMoe):
    """Both parts' sizes."""

    OPTIONAL = (
        *Decoder.OPTIONAL,
        ("mamba_conv_bias", True, r"mamba\.conv1d\.bias"),
        ("mamba_proj_bias", False, r"mamba\.(in|out)_proj\.bias"),
    )


def read(config: dict[str, Any]) -> GraniteMoeHybrid:
    """Sizes from config.json."""
    layers = int(config["num_hidden_layers"])
    listed = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * layers
    kinds = [KINDS.get(kind, kind) for kind in listed]
    check_layer_types({"layer_types": kinds, "num_hidden_layers": layers}, tuple(KINDS.values()))
    check_time_steps(config.get("time_step_limit"))
    plain = {key: value for key, value in config.items() if key not in ("layer_types", "layers_block_type")}
    recurrent = frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    heads, width = int(config["mamba_n_heads"]), int(config.get("mamba_expand", 2)) * int(config["hidden_size"])
    dim = config.get("mamba_d_head", "auto")
    if heads * (dim := width // heads if dim == "auto" else int(dim)) != width:
        raise ModelError(f"mamba_n_heads {heads} of mamba_d_head {dim} are not mamba_expand * hidden_size, {width}")
    if heads % (groups := int(config.get("mamba_n_groups", 1))):
        raise ModelError(f"mamba_n_groups {groups} does not divide mamba_n_heads {heads}: take the model's own config")
    return granitemoe.read(
        plain,
        GraniteMoeHybrid,
        recurrent=recurrent,
        mamba_heads=heads,
        mamba_dim=dim,
        groups=groups,
        state=int(config["mamba_d_state"]),
        kernel=int(config.get("mamba_d_conv", 4)),
        unturned=frozenset(range(layers)) if config.get("position_embedding_type") != "rope" else frozenset(),
    )
