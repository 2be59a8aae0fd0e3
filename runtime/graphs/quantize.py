"""Block-wise quantization of weight matrices, in the layout of ONNX Runtime's MatMulNBits.

A row of K weights is split into blocks of `block`; each has a float16 scale and, if asymmetric, a zero point:
weight = (q - zero point) * scale. Codes are chosen for the rounded scale; a scale below 3e-8 is zero, as are its weights.
Packed values are uint8 [N, ceil(K / block), block * bits / 8], low bits first.
"""

from dataclasses import dataclass

import numpy as np

from runtime.errors import RequestError

BITS = (4, 8, 16, 32)
BLOCKS = (16, 32, 64, 128, 256)
# Candidate scales of a block, relative to the one that covers its largest weight: clipping that weight is often better.
SHRINK = np.linspace(1.0, 0.8, 6, dtype=np.float32)
HALF_MAX = float(np.finfo(np.float16).max)
# Number of weights quantized at once: few enough to stay in the processor's caches.
AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Precision:
    """How a matrix is stored: 32 (float32), 16 (float16, computed in float32), 8 or 4 bits in blocks."""

    bits: int = 32
    block: int = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.block not in BLOCKS:
            raise RequestError(
                f"{self.bits} bits in blocks of {self.block}: bits are one of {BITS}, a block is one of {BLOCKS} weights"
            )

    @property
    def quantized(self) -> bool:
        """Whether weights are integers with scales."""
        return self.bits < 16

    def pack(self, weight: np.ndarray) -> "Quantized":
        """Quantize a matrix [N, K] along K."""
        return quantize(weight, self)


FLOAT32 = Precision()


@dataclass(frozen=True)
class Quantized:
    """Packed values [N, blocks, block * bits / 8] uint8, scales [N, blocks] float16, packed zero points or None (the middle)."""

    values: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


def quantize(weight: np.ndarray, precision: Precision) -> Quantized:
    """Quantize a matrix [N, K] along K. Raises RequestError if a scale is too large for float16."""
    rows = max(AT_ONCE // weight.shape[1], 1)
    parts = [_quantize_blocks(weight[first : first + rows], precision) for first in range(0, len(weight), rows)]
    values, scales = np.concatenate([p.values for p in parts]), np.concatenate([p.scales for p in parts])
    zeros = [p.zero_points for p in parts if p.zero_points is not None]
    return Quantized(values, scales, np.concatenate(zeros) if zeros else None)


def _quantize_blocks(weight: np.ndarray, precision: Precision) -> Quantized:
    n, k = weight.shape
    blocks = -(-k // precision.block)
    padded = np.zeros((n, blocks * precision.block), np.float32)
    padded[:, :k] = weight
    parts = padded.reshape(n, blocks, precision.block)
    if precision.symmetric:
        codes, scales = _quantize_symmetric(parts, precision.bits)
        return Quantized(_pack_codes(codes, precision.bits), scales, None)
    codes, scales, zeros = _quantize_asymmetric(parts, precision.bits)
    return Quantized(_pack_codes(codes, precision.bits), scales, _pack_codes(zeros, precision.bits))


def _quantize_symmetric(parts: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes around the middle; the weight of largest magnitude maps to the lowest code, since that side has one step more."""
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    extreme = np.take_along_axis(parts, np.abs(parts).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    best_scale, best_error, best_codes = np.zeros_like(extreme), np.full(extreme.shape, np.inf, np.float32), None
    for shrink in SHRINK if bits == 4 else SHRINK[:1]:
        scale = _as_stored(extreme / -middle * shrink)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        codes = np.clip(np.rint(parts * inverse[..., None]) + middle, 0, top)
        error = np.square((codes - middle) * scale[..., None] - parts).sum(axis=-1)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_codes = codes if best_codes is None else np.where(better[..., None], codes, best_codes)
    assert best_codes is not None
    return best_codes.astype(np.uint8), best_scale.astype(np.float16)


def _quantize_asymmetric(parts: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes from the smallest to the largest weight of a block, zero included."""
    top = (1 << bits) - 1
    low, high = np.minimum(parts.min(axis=-1), 0), np.maximum(parts.max(axis=-1), 0)
    scale = _as_stored((high - low) / top)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    zeros = np.clip(np.rint(-low * inverse), 0, top)
    codes = np.clip(np.rint(parts * inverse[..., None]) + zeros[..., None], 0, top)
    return codes.astype(np.uint8), scale.astype(np.float16), zeros.astype(np.uint8)


def _as_stored(scale: np.ndarray) -> np.ndarray:
    """The scale as it is stored."""
    if scale.size and np.abs(scale).max() > HALF_MAX:
        raise RequestError(
            f"the scale {np.abs(scale).max():.3g} of a block of weights is too large for float16: choose --bits 32"
        )
    stored: np.ndarray = scale.astype(np.float16).astype(np.float32)
    return stored


def _pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], axis=-1)
    packed: np.ndarray = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed
