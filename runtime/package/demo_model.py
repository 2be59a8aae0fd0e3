"""Writes a small Qwen3-MoE model from a seed: a few megabytes, real tokenizer files, no download.

The weights are random, with some structure: the head encodes the bigrams of the shipped text, so that greedy text consists of
words; attention subtracts tokens already seen (FATIGUE), evenly over the past (SHARPNESS), so that the text does not repeat one
phrase; and routers are wide enough that every expert is chosen.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = Path(__file__).with_name("demo_text.txt")
END = "<|endoftext|>"
FATIGUE = 0.4
SHARPNESS = 0.3


@dataclass(frozen=True)
class DemoSizes:
    """Sizes of the demo model; the defaults make about 5 MB of float32."""

    hidden: int = 128
    head_dim: int = 64
    heads: int = 2
    kv_heads: int = 1
    layers: int = 4
    experts: int = 8
    top_k: int = 2
    intermediate: int = 96
    vocabulary: int = 1024
    context: int = 1024


def write_demo_model(folder: Path, seed: int = 0, sizes: DemoSizes | None = None) -> Path:
    """Write the model into `folder`; the same seed and sizes give the same bytes."""
    sizes = sizes or DemoSizes()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(sizes.vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": sizes.context}
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "config.json", demo_config(sizes, tokenizer.get_vocab_size()))
    text = tokenizer.encode(" ".join(TEXT.read_text(encoding="utf-8").split())).ids
    save_file(demo_weights(sizes, seed, tokenizer.get_vocab_size(), text), folder / "model.safetensors", {"format": "pt"})
    return folder


def train_tokenizer(vocabulary: int) -> Tokenizer:
    """A byte-level BPE of the shipped text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT.read_text(encoding="utf-8")], trainer)
    return tokenizer


def demo_config(sizes: DemoSizes, vocabulary: int) -> dict[str, object]:
    """config.json as transformers reads it."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.hidden,
        "max_position_embeddings": sizes.context,
        "mlp_only_layers": [],
        "moe_intermediate_size": sizes.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": sizes.heads,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
    }


def demo_weights(sizes: DemoSizes, seed: int, vocabulary: int, text: list[int]) -> dict[str, np.ndarray]:
    """Every tensor, float32, under the names of a Hugging Face checkpoint."""
    random = np.random.default_rng(seed)
    h, d, i = sizes.hidden, sizes.head_dim, sizes.intermediate

    def normal(rows: int, columns: int, gain: float) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    embedding = random.standard_normal((vocabulary, h)).astype(np.float32)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": _bigram_head(embedding, text)}
    tensors["model.norm.weight"] = np.ones(h, np.float32)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(h, np.float32)
        tensors[f"{prefix}self_attn.q_proj.weight"] = normal(sizes.heads * d, h, 1.0)
        tensors[f"{prefix}self_attn.k_proj.weight"] = normal(sizes.kv_heads * d, h, 1.0)
        seen = normal(sizes.kv_heads * d, h, 1.0)
        tensors[f"{prefix}self_attn.v_proj.weight"] = seen
        per_head = np.repeat(seen.T.reshape(h, sizes.kv_heads, d), sizes.heads // sizes.kv_heads, axis=1)
        tensors[f"{prefix}self_attn.o_proj.weight"] = (per_head.reshape(h, sizes.heads * d) * -FATIGUE).astype(np.float32)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = np.full(d, SHARPNESS, np.float32)
        tensors[f"{prefix}mlp.gate.weight"] = normal(sizes.experts, h, 2.0)
        for expert in range(sizes.experts):
            mlp = f"{prefix}mlp.experts.{expert}."
            tensors[mlp + "gate_proj.weight"] = normal(i, h, 1.0)
            tensors[mlp + "up_proj.weight"] = normal(i, h, 1.0)
            tensors[mlp + "down_proj.weight"] = normal(h, i, 0.7)
    return tensors


def _bigram_head(embedding: np.ndarray, text: list[int]) -> np.ndarray:
    """Scores each token by how often it follows the current one in the text: a sum of its predecessors' embeddings."""
    head = np.zeros_like(embedding)
    for current, following in pairwise(text):
        head[following] += embedding[current]
    norms = np.linalg.norm(head, axis=1, keepdims=True)
    scaled = np.divide(head, np.sqrt(norms), out=np.zeros_like(head), where=norms > 0)
    return (scaled * (1.5 / np.sqrt(embedding.shape[1]))).astype(np.float32)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
