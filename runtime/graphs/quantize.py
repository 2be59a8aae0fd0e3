"""Block-wise quantization of weight matrices, in the layout of ONNX Runtime's MatMulNBits.

A row of K weights is split into blocks of `block`; each has a float16 scale and, if asymmetric, a zero point:
weight = (q - zero point) * scale. Codes are chosen for the rounded scale; a scale below 3e-8 is zero, as are its weights.
Packed values are uint8 [N, ceil(K / block), block * bits / 8], low bits first.
"""

from dataclasses import dataclass, field

import numpy as np

from runtime.errors import RequestError

BITS = (4, 8, 16, 32)
BLOCKS = (16, 32, 64, 128, 256)
# Candidate scales of a block, relative to the one that covers its largest weight: clipping that weight is often better.
SHRINK = np.linspace(1.0, 0.8, 6, dtype=np.float32)
# Codes that may be the smallest one of a block whose weights are multiples of a step.
DIVISORS = (1, 2, 3)
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

    @property
    def on_grid(self) -> bool:
        """Whether most blocks hold multiples of one step, as those of a checkpoint with 4-bit weights do."""
        return False

    def pack(self, weight: np.ndarray) -> "Quantized":
        """Quantize a matrix [N, K] along K."""
        return quantize(weight, self)

    def narrow(self, weight: np.ndarray) -> np.ndarray:
        """The matrix as float32, or as float16 at 16 bits."""
        return weight.astype(np.float16 if self.bits == 16 else np.float32)


FLOAT32 = Precision()


@dataclass(frozen=True)
class MeasuredPrecision(Precision):
    """Also adds up what it costs: `sums` [2], squares of rounding errors and of weights."""

    on_grid: bool = False
    sums: np.ndarray = field(default_factory=lambda: np.zeros(2), compare=False)

    def pack(self, weight: np.ndarray) -> "Quantized":
        """Quantize and measure."""
        packed = super().pack(weight)
        self.sums[:] += packed.error, np.vdot(weight, weight)
        return packed

    def narrow(self, weight: np.ndarray) -> np.ndarray:
        """Convert and measure."""
        stored = super().narrow(weight)
        if self.bits == 16:
            self.sums[:] += np.square(stored - weight).sum(), np.vdot(weight, weight)
        return stored


@dataclass(frozen=True)
class Quantized:
    """Packed values [N, blocks, block * bits / 8] uint8, scales [N, blocks] float16, packed zero points or None (the middle).

    error: sum of the squares of what rounding changed.
    """

    values: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    error: float


def quantize(weight: np.ndarray, precision: Precision) -> Quantized:
    """Quantize a matrix [N, K] along K. Raises RequestError if a scale is too large for float16."""
    rows = max(AT_ONCE // weight.shape[1], 1)
    parts = [_quantize_blocks(weight[first : first + rows], precision) for first in range(0, len(weight), rows)]
    values, scales = np.concatenate([p.values for p in parts]), np.concatenate([p.scales for p in parts])
    zeros = [p.zero_points for p in parts if p.zero_points is not None]
    return Quantized(values, scales, np.concatenate(zeros) if zeros else None, sum(p.error for p in parts))


def _quantize_blocks(weight: np.ndarray, precision: Precision) -> Quantized:
    n, k = weight.shape
    blocks = -(-k // precision.block)
    padded = np.zeros((n, blocks * precision.block), np.float32)
    padded[:, :k] = weight
    parts = padded.reshape(n, blocks, precision.block)
    if precision.symmetric:
        codes, scales, error = _quantize_symmetric(parts, precision)
        return Quantized(_pack_codes(codes, precision.bits), scales, None, error)
    codes, scales, zeros, error = _quantize_asymmetric(parts, precision)
    return Quantized(_pack_codes(codes, precision.bits), scales, _pack_codes(zeros, precision.bits), error)


def _quantize_symmetric(parts: np.ndarray, precision: Precision) -> tuple[np.ndarray, np.ndarray, float]:
    """Codes around the middle; the weight of largest magnitude maps to the lowest code, since that side has one step more."""
    bits = precision.bits
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    extreme = np.take_along_axis(parts, np.abs(parts).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    best_scale, best_error, best_codes = np.zeros_like(extreme), np.full(extreme.shape, np.inf, np.float32), None
    candidates = [extreme / -middle * shrink for shrink in (SHRINK if bits == 4 else SHRINK[:1])]
    for candidate in [*candidates, *_steps(parts, precision)]:
        scale = _as_stored(candidate)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        codes = np.clip(np.rint(parts * inverse[..., None]) + middle, 0, top)
        error = np.square((codes - middle) * scale[..., None] - parts).sum(axis=-1)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_codes = codes if best_codes is None else np.where(better[..., None], codes, best_codes)
    assert best_codes is not None
    return best_codes.astype(np.uint8), best_scale.astype(np.float16), float(best_error.sum())


def _steps(parts: np.ndarray, precision: Precision) -> list[np.ndarray]:
    """Of weights on a grid, steps that blocks may be multiples of: the smallest magnitude above 0 and its parts."""
    if not precision.on_grid:
        return []
    smallest = np.where(parts == 0, np.inf, np.abs(parts)).min(axis=-1)
    smallest = np.where(np.isinf(smallest), 0, smallest).astype(np.float32)
    return [smallest / np.float32(divisor) for divisor in DIVISORS]


def _quantize_asymmetric(parts: np.ndarray, precision: Precision) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Codes from the smallest to the largest weight of a block, zero included."""
    top = (1 << precision.bits) - 1
    low, high = np.minimum(parts.min(axis=-1), 0), np.maximum(parts.max(axis=-1), 0)
    candidates = [(high - low) / top, *_steps(parts, precision)]
    tried = [_rounded_to(parts, low, _as_stored(candidate), top) for candidate in candidates]
    best = np.argmin([error for *_, error in tried], axis=0)
    codes = np.choose(best[..., None], [codes for codes, *_ in tried])
    scale, zeros, error = (np.choose(best, [result[i] for result in tried]) for i in (1, 2, 3))
    return codes.astype(np.uint8), scale.astype(np.float16), zeros.astype(np.uint8), float(error.sum())


def _rounded_to(parts: np.ndarray, low: np.ndarray, scale: np.ndarray, top: int) -> tuple[np.ndarray, ...]:
    """(codes, the scale, zero points, squared errors) of blocks whose smallest weight, at most 0, is `low`."""
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    zeros = np.clip(np.rint(-low * inverse), 0, top)
    codes = np.clip(np.rint(parts * inverse[..., None]) + zeros[..., None], 0, top)
    error = np.square((codes - zeros[..., None]) * scale[..., None] - parts).sum(axis=-1)
    return codes, scale, zeros, error


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
