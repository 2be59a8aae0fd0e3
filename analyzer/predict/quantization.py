"""lm-Meter's harmonic quantization score, which combines the speed gained and the accuracy kept by quantization."""

from dataclasses import dataclass

from analyzer.errors import PredictError

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class QuantizedResult:
    """One package of a model. accuracy: higher is better, above 0; ms_per_token by phase."""

    accuracy: float
    ms_per_token: dict[str, float]

    def __post_init__(self) -> None:
        if self.accuracy <= 0 or any(ms <= 0 for ms in self.ms_per_token.values()):
            raise PredictError("accuracy and ms per token must be above 0")


def from_perplexity(perplexity: float, ms_per_token: dict[str, float]) -> QuantizedResult:
    """Accuracy as the geometric mean of the model's probabilities for the text's tokens: 1 / perplexity."""
    if perplexity < 1:
        raise PredictError(f"{perplexity} is not a perplexity: it must be 1 or more")
    return QuantizedResult(1 / perplexity, ms_per_token)


def harmonic_score(quantized: QuantizedResult, original: QuantizedResult) -> dict[str, float]:
    """Score and its parts: the harmonic mean of the accuracy kept and, for each phase, the speed gained (old over new time).

    The original has score 1; a single bad part lowers the score regardless of the others.
    """
    missing = [phase for phase in PHASES if phase not in quantized.ms_per_token or phase not in original.ms_per_token]
    if missing:
        raise PredictError(f"ms per token of {' and '.join(missing)} are missing: measure both phases of both packages")
    parts = {"accuracy": quantized.accuracy / original.accuracy}
    parts |= {phase: original.ms_per_token[phase] / quantized.ms_per_token[phase] for phase in PHASES}
    return {"score": len(parts) / sum(1 / part for part in parts.values()), **parts}
