"""Tensors of families that publish other names: the names that families here share."""

import re

Rules = tuple[tuple[str, str], ...]
LING: Rules = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
)
RULES: dict[str, Rules] = {
    "bailing_moe": LING,
    "bailing_moe_v2": LING,
    "kimi_linear": (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.forget_gate\.", "."),
        *((rf"(\.experts\.\d+\.){old}\.", rf"\1{new}_proj.") for old, new in (("w1", "gate"), ("w2", "down"), ("w3", "up"))),
    ),
    "nemotron_h": (
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
        (r"\.mixer\.(gate|experts|shared_experts|up_proj|down_proj)\.", r".mlp.\1."),
        (r"\.mixer\.", ".mamba."),
    ),
}
"""model_type → (pattern, replacement), applied in order."""
TEXT_PART = "model.language_model."


def shared_name(model_type: object, stored: str) -> str:
    """The name here of a stored tensor; tensors of a model's text part have a text model's names."""
    name = stored.replace(TEXT_PART, "model.", 1)
    for pattern, replacement in RULES.get(str(model_type), ()):
        name = re.sub(pattern, replacement, name)
    return name
