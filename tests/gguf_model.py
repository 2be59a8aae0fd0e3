"""A small Mixture-of-Experts model for llama.cpp with seeded weights: no download, no tokenizer."""

from pathlib import Path

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, VOCABULARY, EXPERTS, TOP_K, EXPERT_WIDTH, SHARED_WIDTH = 3, 128, 4, 512, 8, 2, 64, 128


def write_moe(path: Path, seed: int = 0, layers: int = LAYERS) -> None:
    """Write a qwen2moe model of fp32 weights to `path`."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "qwen2moe")
    writer.add_name("seeded-moe")
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(SHARED_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    writer.add_expert_shared_feed_forward_length(SHARED_WIDTH)

    def tensor(name: str, *shape: int) -> None:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.0
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32) + (len(shape) == 1))

    tensor("token_embd.weight", VOCABULARY, HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    tensor("output.weight", VOCABULARY, HIDDEN)
    for layer in range(layers):
        block = f"blk.{layer}."
        tensor(block + "attn_norm.weight", HIDDEN)
        tensor(block + "ffn_norm.weight", HIDDEN)
        for name in ("q", "k", "v"):
            tensor(f"{block}attn_{name}.weight", HIDDEN, HIDDEN)
            tensor(f"{block}attn_{name}.bias", HIDDEN)
        tensor(block + "attn_output.weight", HIDDEN, HIDDEN)
        tensor(block + "ffn_gate_inp.weight", EXPERTS, HIDDEN)
        tensor(block + "ffn_gate_exps.weight", EXPERTS, EXPERT_WIDTH, HIDDEN)
        tensor(block + "ffn_up_exps.weight", EXPERTS, EXPERT_WIDTH, HIDDEN)
        tensor(block + "ffn_down_exps.weight", EXPERTS, HIDDEN, EXPERT_WIDTH)
        tensor(block + "ffn_gate_inp_shexp.weight", HIDDEN)
        tensor(block + "ffn_gate_shexp.weight", SHARED_WIDTH, HIDDEN)
        tensor(block + "ffn_up_shexp.weight", SHARED_WIDTH, HIDDEN)
        tensor(block + "ffn_down_shexp.weight", HIDDEN, SHARED_WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
