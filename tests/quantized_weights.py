"""What packed weights stand for: the layout of runtime/graphs/quantize.py read back."""

import numpy as np

from runtime.graphs.quantize import Precision, Quantized


def dequantize(quantized: Quantized, precision: Precision, k: int) -> np.ndarray:
    """The matrix [N, K] that the packed values stand for."""
    codes = unpack(quantized.values, precision.bits).astype(np.float32)
    middle: np.ndarray | float = float(1 << (precision.bits - 1))
    if quantized.zero_points is not None:
        middle = unpack(quantized.zero_points, precision.bits)[:, : codes.shape[1], None].astype(np.float32)
    whole: np.ndarray = ((codes - middle) * quantized.scales[:, :, None]).reshape(len(codes), -1)[:, :k]
    return whole


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 8 or 4 bits, low bits first."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
