"""Rotary positions: angles per position, plain, YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), Llama 3's, Gemma 4's."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runtime.errors import ModelError

KINDS = ("default", "linear", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True)
class Rope:
    """`rates`: radians per position of each pair of dimensions; `scale`: factor of cosines and sines; `interleaved`: pairs are
    neighbours, not halves of the head; `long`: the rates in sequences of more than `original` tokens."""

    rates: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    original: int = 0
    long: "Rope | None" = None

    def for_length(self, tokens: int) -> "Rope":
        """The rotary positions for a sequence of `tokens`."""
        return self.long if self.long and tokens > self.original else self

    @property
    def dims(self) -> int:
        """Number of a head's dimensions that rotate."""
        return 2 * len(self.rates)

    def filling(self, head_dim: int) -> tuple["Rope", tuple[int, ...]]:
        """The same over a whole head, whose last dimensions do not rotate (pairs with rate 0).

        Also returns the order of a head's dimensions in which halves are pairs; empty if they already are.
        """
        turned, still = self.dims, head_dim - self.dims
        if turned % 2 or still < 0 or still % 2:
            raise ModelError(f"partial_rotary_factor turns {turned} of head_dim {head_dim}: this runtime turns an even part")
        pairs = [list(range(0, turned, 2)), list(range(1, turned, 2))]
        if not self.interleaved:
            pairs = [list(range(turned // 2)), list(range(turned // 2, turned))]
        middle = turned + still // 2
        order = (*pairs[0], *range(turned, middle), *pairs[1], *range(middle, head_dim))
        still_pairs = (0.0,) * (still // 2)
        long = self.long and replace(self.long, rates=(*self.long.rates, *still_pairs), interleaved=False)
        whole = replace(self, rates=(*self.rates, *still_pairs), interleaved=False, long=long)
        return whole, () if order == tuple(range(head_dim)) else order

    def table(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [positions, dims / 2] in float32."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * np.array(self.rates, np.float32)
        scale = np.where(np.array(self.rates) == 0, 1, self.scale).astype(np.float32)
        return np.cos(angles) * scale, np.sin(angles) * scale


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json about rotary positions in transformers' old layout, or in the new one where the old is absent."""
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def read_rope(config: dict[str, Any], dims: int, default_theta: float = 10000.0, interleaved: bool = False) -> Rope:
    """The rotary positions that config.json describes."""
    rope = rope_settings(config)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in KINDS:
        raise ModelError(f"rope_type {kind!r} is not supported: this runtime builds {', '.join(KINDS)}")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or default_theta)
    part = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)
    if kind == "proportional":
        return _proportional(dims, part, theta, float(rope.get("factor") or 1))
    dims = int(dims * part)
    plain = theta ** -(np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims))
    rates, scale = plain.astype(np.float32), 1.0
    if kind == "linear":
        rates = rates / np.float32(rope["factor"])
    if kind == "yarn":
        rates, scale = _yarn(rates, rope, config, theta)
    if kind == "longrope":
        return _longrope(rates, rope, config, interleaved)
    if kind == "llama3":
        rates = _llama3(rates, rope)
    return Rope(tuple(float(rate) for rate in rates), scale, interleaved)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention temperature for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


def _yarn(rates: np.ndarray, rope: dict[str, Any], config: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    """YaRN's rates and scale: slow pairs are interpolated, fast ones unchanged, with a ramp between."""
    dims = 2 * len(rates)
    original = float(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
    factor = float(rope["factor"])
    low, high = (
        dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1))
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(len(rates), dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    scale = rope.get("attention_factor")
    if scale is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        scale = yarn_scale(factor, rope["mscale"]) / yarn_scale(factor, rope["mscale_all_dim"]) if both else yarn_scale(factor)
    return rates / np.float32(factor) * ramp + rates * (1 - ramp), float(scale)


def _longrope(rates: np.ndarray, rope: dict[str, Any], config: dict[str, Any], interleaved: bool) -> Rope:
    """LongRoPE: short factors up to the original context, long ones beyond, as in transformers."""
    original = int(config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or 0)
    context = int(config.get("max_position_embeddings") or original)
    original = original or context
    factor = float(rope.get("factor") or context / original)
    stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def scaled(kind: str, **further: Any) -> Rope:
        scale = rope.get("attention_factor")
        if scale is None:
            scale = rope.get(f"{kind}_mscale") or stretch
        factors = np.array(rope[f"{kind}_factor"], np.float32)
        if len(factors) != len(rates):
            raise ModelError(f"{kind}_factor of rope_scaling has {len(factors)} numbers, this model's heads need {len(rates)}")
        turned = rates / factors
        return Rope(tuple(float(rate) for rate in turned), float(scale), interleaved, **further)

    return scaled("short", original=original, long=scaled("long") if context > original else None)


def _proportional(dims: int, part: float, theta: float, factor: float) -> Rope:
    """Rates in which the slow pairs of a head do not rotate; the others rotate as in a fully rotated head."""
    turning = int(part * dims // 2)
    rates = theta ** -(np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)) / np.float32(factor)
    return Rope(tuple(float(rate) if pair < turning else 0.0 for pair, rate in enumerate(rates.astype(np.float32))))


def _llama3(rates: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """Llama 3's rates: wavelengths beyond the original context are stretched, short ones unchanged, with a ramp between."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    if high <= low:
        raise ModelError(f"high_freq_factor {high} must be above low_freq_factor {low}: take the model's own config")
    turns = float(rope["original_max_position_embeddings"]) * rates / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0, 1)
    mixed: np.ndarray = rates / float(rope["factor"]) * (1 - ramp) + rates * ramp
    return mixed
