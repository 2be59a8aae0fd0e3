"""Models for llama.cpp with seeded weights: no download, no tokenizer. A small one for tests, real shapes for benchmarks.

python -m workloads.gguf_model FILE        writes the small Mixture-of-Experts model
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; `experts` 0 makes it dense. Qwen2's attention has biases, Gemma2 has norms after its blocks."""

    architecture: str
    layers: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int = 0
    used: int = 0
    expert_width: int = 0
    shared_width: int = 0


LAYERS, HIDDEN, VOCABULARY, EXPERTS, TOP_K = 3, 128, 512, 8, 2
SMALL = Shape("qwen2moe", LAYERS, HIDDEN, 128, 4, 4, VOCABULARY, EXPERTS, TOP_K, expert_width=64, shared_width=128)
DENSE = {name: Shape(name, 2, HIDDEN, 128, 4, 4, VOCABULARY) for name in ("llama", "qwen2", "gemma2")}
"""Small dense models of three architectures."""
ENCODER = Shape("nomic-bert-moe", 2, HIDDEN, 64, 4, 4, VOCABULARY, EXPERTS, TOP_K)
"""An encoder without decoder; every second layer has experts."""
BOTH_WAYS = Shape("t5", 1, HIDDEN, 128, 4, 4, VOCABULARY)
"""An encoder with a decoder."""
BUCKETS = 32  # number of relative position buckets
SHAPES = {
    "llama-1b": Shape("llama", 16, 2048, 8192, 32, 8, 128256),  # Llama-3.2-1B
    "qwen-moe": Shape("qwen2moe", 8, 2048, 5632, 16, 16, 151936, 60, 4, 1408, 5632),  # 8 layers of Qwen1.5-MoE-A2.7B
    "small-moe": Shape("qwen2moe", 4, 1024, 1024, 8, 8, 8192, 8, 2, 512, 1024),
    "tiny-moe": Shape("qwen2moe", 4, 256, 512, 4, 4, 4096, 16, 4, 256, 512),
}


SPREAD = 4.32  # standard deviation of codes from -7 to 7
PAIRS = np.array([low | high << 4 for low in range(1, 16) for high in range(1, 16)], np.uint8)


def write_moe(path: Path, seed: int = 0, layers: int = LAYERS) -> None:
    """Write the small Mixture-of-Experts model with fp32 weights to `path`."""
    write_model(path, replace(SMALL, layers=layers), quantized=False, seed=seed)


def write_model(path: Path, shape: Shape, quantized: bool, seed: int = 0, tokenizer: bool = False) -> None:
    """Write a model with random weights; matrices are Q4_0 if `quantized`. A server needs a `tokenizer`: of bytes."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), shape.architecture)
    _add_sizes(writer, shape, quantized)
    _add_tokenizer(writer, shape.vocabulary if tokenizer else 0)
    for name, dims in tensor_shapes(shape):
        if quantized and len(dims) > 1 and "inp" not in name:
            writer.add_tensor(name, _q4_0(rng, dims, _deviation_of(name, dims)), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        else:
            writer.add_tensor(name, _random_tensor(rng, name, dims))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, shape: Shape, quantized: bool) -> None:
    writer.add_name("seeded")
    writer.add_context_length(1024)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0 if quantized else gguf.LlamaFileType.ALL_F32)
    if shape.architecture == ENCODER.architecture:
        writer.add_layer_norm_eps(1e-6)
        writer.add_token_type_count(1)
        writer.add_moe_every_n_layers(2)
        writer.add_causal_attention(False)
    if shape.architecture == BOTH_WAYS.architecture:
        writer.add_relative_attn_buckets_count(BUCKETS)
        writer.add_decoder_start_token_id(0)
    if shape.architecture == "gemma2":
        writer.add_sliding_window(512)
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
        writer.add_key_length(shape.hidden // shape.heads)
        writer.add_value_length(shape.hidden // shape.heads)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.expert_width)
        writer.add_expert_shared_feed_forward_length(shape.shared_width)


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """A tokenizer whose tokens are single bytes and, up to `vocabulary`, names that no text has; 0: none."""
    writer.add_tokenizer_model("gpt2" if vocabulary else "none")
    if vocabulary:
        writer.add_tokenizer_pre("default")
        writer.add_token_list(
            [chr(i) if 32 < i < 127 else chr(256 + i) for i in range(256)] + [f"<{i}>" for i in range(256, vocabulary)]
        )
        writer.add_token_types([gguf.TokenType.NORMAL] * vocabulary)
        writer.add_token_merges(["t h"])
        writer.add_eos_token_id(vocabulary - 1)


def tensor_shapes(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """(name, dims) of every weight, rows first."""
    if shape.architecture in (ENCODER.architecture, BOTH_WAYS.architecture):
        return _encoder_shapes(shape) if shape.experts else _encoder_and_decoder(shape)
    hidden, kv = shape.hidden, shape.kv_heads * (shape.hidden // shape.heads)
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (shape.vocabulary, hidden)),
        ("output_norm.weight", (hidden,)),
    ]
    tensors += [("output.weight", (shape.vocabulary, hidden))] if shape.experts else []
    for layer in range(shape.layers):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
        if shape.architecture == "gemma2":
            block |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            block[f"attn_{name}.weight"] = (rows, hidden)
            if shape.architecture.startswith("qwen2"):
                block[f"attn_{name}.bias"] = (rows,)
        block["attn_output.weight"] = (hidden, hidden)
        block |= _expert_shapes(shape) if shape.experts else _feed_forward("", hidden, shape.width)
        tensors += [(f"blk.{layer}.{name}", dims) for name, dims in block.items()]
    return tensors


def _encoder_shapes(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    hidden, experts = shape.hidden, shape.experts
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocabulary, hidden)} | _norm("token_embd_norm", hidden)
    for layer in range(shape.layers):
        at = f"blk.{layer}"
        found |= {f"{at}.attn_{name}.weight": (hidden, hidden) for name in ("q", "k", "v", "output")}
        found |= _norm(f"{at}.attn_output_norm", hidden) | _norm(f"{at}.layer_output_norm", hidden)
        wide, narrow = (shape.width, hidden), (hidden, shape.width)
        if layer % 2:
            found |= {f"{at}.ffn_gate_inp.weight": (experts, hidden)}
            found |= {f"{at}.ffn_up_exps.weight": (experts, *wide), f"{at}.ffn_down_exps.weight": (experts, *narrow)}
        else:
            found |= {f"{at}.ffn_up.weight": wide, f"{at}.ffn_down.weight": narrow}
    return list(found.items())


def _norm(name: str, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}


def _encoder_and_decoder(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocabulary, hidden)}
    for side, kinds in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
        found[f"{side}.output_norm.weight"] = (hidden,)
        for layer in range(shape.layers):
            at = f"{side}.blk.{layer}"
            for kind in kinds:
                found |= {f"{at}.{kind}_{name}.weight": (hidden, hidden) for name in ("q", "k", "v", "o")}
                found[f"{at}.{kind}_norm.weight"] = (hidden,)
            found[f"{at}.attn_rel_b.weight"] = (BUCKETS, shape.heads)
            found |= {f"{at}.ffn_norm.weight": (hidden,)}
            found |= {f"{at}.ffn_up.weight": (shape.width, hidden), f"{at}.ffn_down.weight": (hidden, shape.width)}
    return list(found.items())


def _feed_forward(suffix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    wide, narrow = (width, hidden), (hidden, width)
    return {f"ffn_gate{suffix}.weight": wide, f"ffn_up{suffix}.weight": wide, f"ffn_down{suffix}.weight": narrow}


def _expert_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    routed = _feed_forward("_exps", shape.hidden, shape.expert_width)
    gates = {"ffn_gate_inp.weight": (shape.experts, shape.hidden), "ffn_gate_inp_shexp.weight": (shape.hidden,)}
    return {
        **gates,
        **{name: (shape.experts, *dims) for name, dims in routed.items()},
        **_feed_forward("_shexp", shape.hidden, shape.shared_width),
    }


def _random_tensor(rng: np.random.Generator, name: str, dims: tuple[int, ...]) -> np.ndarray:
    """A tensor in fp32. Norms are 1, biases 0: a bias is equal for every token and would route all to the same experts."""
    if name.endswith("norm.weight"):
        return np.ones(dims, np.float32)
    scale = 0.0 if name.endswith(".bias") else dims[-1] ** -0.5
    return (rng.standard_normal(dims) * scale).astype(np.float32)


def _deviation_of(name: str, dims: tuple[int, ...]) -> float:
    """Standard deviation of a matrix: embeddings have the norm of a layer's contribution, so that routes differ by token."""
    return 1.0 if name == "token_embd.weight" else float(dims[-1] ** -0.5)


def _q4_0(rng: np.random.Generator, dims: tuple[int, ...], spread: float) -> np.ndarray:
    """Random Q4_0 blocks: 32 weights are an fp16 scale and 16 bytes of two weights each, from -7 to 7 times the scale.

    A nonzero mean would grow from layer to layer until every token takes the same route.
    """
    blocks = dims[-1] // 32
    raw = np.empty((int(np.prod(dims[:-1])), blocks, 18), np.uint8)
    raw[:, :, :2] = np.frombuffer(np.float16(spread / SPREAD).tobytes(), np.uint8)
    raw[:, :, 2:] = rng.choice(PAIRS, raw[:, :, 2:].shape)
    return raw.reshape(*dims[:-1], blocks * 18)


if __name__ == "__main__":
    write_moe(Path(sys.argv[1]))
