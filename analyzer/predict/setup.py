"""The settings of a predicted step: phase, sizes, parallelism and overlap."""

from dataclasses import dataclass

from analyzer.errors import PredictError

KV_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5625}
"""Bytes per number in the KV cache; int4 in groups of 32 with a 16-bit scale."""

OVERLAPS = ("none", "pipeline", "hidden")


@dataclass(frozen=True)
class Setup:
    """One step on every device of a group, sizes per device.

    phase: prefill (`batch` prompts of `context` tokens each) or decode (`batch` sequences with `context` tokens each).
    ep, tp: devices that share experts, heads. overlap: none; pipeline: `micro_batches` alternate, one communicates while the
    other computes; hidden: like pipeline, but communication uses no part of the compute unit (DeepEP's low-latency decode).
    """

    phase: str
    batch: int
    context: int
    kv: str = "fp16"
    ep: int = 1
    tp: int = 1
    overlap: str = "none"
    micro_batches: int = 2
    unit: str = ""

    def __post_init__(self) -> None:
        if self.phase not in ("prefill", "decode") or self.overlap not in OVERLAPS or self.kv not in KV_BYTES:
            raise PredictError(
                f"phase {self.phase!r}, overlap {self.overlap!r}, KV type {self.kv!r}: "
                f"choose prefill or decode; {', '.join(OVERLAPS)}; {', '.join(KV_BYTES)}"
            )
        if min(self.batch, self.context, self.ep, self.tp, self.micro_batches) < 1:
            raise PredictError("batch, context, ep, tp and micro-batches must be 1 or more")
        if self.turns > self.tokens:
            raise PredictError(f"{self.turns} micro-batches of {self.tokens} tokens: ask for fewer micro-batches")

    @property
    def tokens(self) -> int:
        """Rows of input on one device in the step."""
        return self.batch * self.context if self.phase == "prefill" else self.batch

    @property
    def turns(self) -> int:
        """Number of micro-batches."""
        return 1 if self.overlap == "none" else self.micro_batches
