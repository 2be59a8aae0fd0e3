"""Writes a tiny random upscaler (ESRGAN, one block, twice the size) for stable-diffusion.cpp: upscaler_model.py FILE."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CHANNELS, FEATURES, GROWTH, DENSE_BLOCKS, CONVOLUTIONS = 3, 64, 32, 3, 5


def convolutions() -> Iterator[tuple[str, int, int]]:
    """Name, output and input channels of each convolution of 3 x 3."""
    yield "conv_first", FEATURES, CHANNELS
    for block in range(1, DENSE_BLOCKS + 1):
        for number in range(1, CONVOLUTIONS + 1):
            out = GROWTH if number < CONVOLUTIONS else FEATURES
            yield f"body.0.rdb{block}.conv{number}", out, FEATURES + GROWTH * (number - 1)
    yield from ((name, FEATURES, FEATURES) for name in ("conv_body", "conv_up1", "conv_hr"))
    yield "conv_last", CHANNELS, FEATURES


def write_model(path: Path, seed: int = 0) -> None:
    """Write the file, in the safetensors format."""
    random, header, parts, end = np.random.default_rng(seed), {}, [], 0
    for name, out, inputs in convolutions():
        for part, dims in (("weight", (out, inputs, 3, 3)), ("bias", (out,))):
            values = (random.standard_normal(dims) * 0.05).astype(np.float32).tobytes()
            header[f"{name}.{part}"] = {"dtype": "F32", "shape": dims, "data_offsets": [end, end + len(values)]}
            parts.append(values)
            end += len(values)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
