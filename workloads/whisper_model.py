"""Writes a tiny Whisper model with random weights in the format of whisper.cpp: whisper_model.py FILE."""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MAGIC, F16_WEIGHTS = 0x67676D6C, 1
VOCAB, AUDIO_CONTEXT, TEXT_CONTEXT, WIDTH, HEADS, MELS, FFT = 51864, 1500, 448, 64, 1, 80, 201
AUDIO_LAYERS, TEXT_LAYERS = 4, 2


def attention(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of an attention and the norm before it: names, and dims, outermost first."""
    for part in ("weight", "bias"):
        yield f"{name}_ln.{part}", (width,)
    for part in ("query", "key", "value", "out"):
        yield f"{name}.{part}.weight", (width, width)
        if part != "key":
            yield f"{name}.{part}.bias", (width,)


def block(name: str, width: int, crossed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a layer."""
    yield from attention(f"{name}.attn", width)
    if crossed:
        yield from attention(f"{name}.cross_attn", width)
    yield from ((f"{name}.mlp_ln.{part}", (width,)) for part in ("weight", "bias"))
    yield from ((f"{name}.mlp.0.weight", (4 * width, width)), (f"{name}.mlp.0.bias", (4 * width,)))
    yield from ((f"{name}.mlp.2.weight", (width, 4 * width)), (f"{name}.mlp.2.bias", (width,)))


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """All tensors: names, and dims, outermost first."""
    yield "encoder.positional_embedding", (AUDIO_CONTEXT, WIDTH)
    for number, inputs in ((1, MELS), (2, WIDTH)):
        yield f"encoder.conv{number}.weight", (WIDTH, inputs, 3)
        yield f"encoder.conv{number}.bias", (WIDTH, 1)
    yield from ((f"encoder.ln_post.{part}", (WIDTH,)) for part in ("weight", "bias"))
    for layer in range(AUDIO_LAYERS):
        yield from block(f"encoder.blocks.{layer}", WIDTH, False)
    yield "decoder.positional_embedding", (TEXT_CONTEXT, WIDTH)
    yield "decoder.token_embedding.weight", (VOCAB, WIDTH)
    yield from ((f"decoder.ln.{part}", (WIDTH,)) for part in ("weight", "bias"))
    for layer in range(TEXT_LAYERS):
        yield from block(f"decoder.blocks.{layer}", WIDTH, True)


def write_model(path: Path, seed: int = 0) -> None:
    """Write the file: parameters, mel filters, vocabulary, tensors."""
    random = np.random.default_rng(seed)
    sizes = (VOCAB, AUDIO_CONTEXT, WIDTH, HEADS, AUDIO_LAYERS, TEXT_CONTEXT, WIDTH, HEADS, TEXT_LAYERS, MELS, F16_WEIGHTS)
    with path.open("wb") as file:
        file.write(struct.pack("<12i2i", MAGIC, *sizes, MELS, FFT))
        file.write(random.random(MELS * FFT, np.float32).tobytes())
        words = [b" ", *(b" %d" % number for number in range(1, VOCAB - 1608))]  # the special ones are not in the file
        file.write(struct.pack("<i", len(words)) + b"".join(struct.pack("<I", len(word)) + word for word in words))
        for name, dims in tensors():
            is_weight = len(dims) > 1 and name.endswith("weight")
            values = (random.standard_normal(dims) * 0.05).astype(np.float16 if is_weight else np.float32)
            file.write(struct.pack("<3i", len(dims), len(name), int(is_weight)) + struct.pack(f"<{len(dims)}i", *dims[::-1]))
            file.write(name.encode() + values.tobytes())


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
