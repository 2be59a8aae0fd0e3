"""lm-Meter's harmonic quantization score of two packages of one model: accuracy by perplexity on a text, latency by phase.

    python -m benchmarks.quantization_score ORIGINAL QUANTIZED --text FILE --tokens 256 --runs 3
    python -m benchmarks.quantization_score DIR DIR --text FILE --quantized-backend htp    (fp32 on CPU against fp16 on HTP)

Both read the same tokens one by one; runs are interleaved, and the median of each phase counts. On x86-64 HTP is Qualcomm's
emulator: its accuracy is the NPU's, its latency is not.
"""

import argparse
from pathlib import Path

import numpy as np

from analyzer.predict.quantization import from_perplexity, harmonic_score
from runtime import MoE
from runtime.step.sampling import Sampler, Sampling


def read(model: MoE, ids: list[int], prompt: int) -> tuple[float, float, float]:
    """(perplexity of ids[prompt:], seconds per token of prefill, of decode)."""
    engine, greedy = model.engine, Sampler(Sampling())
    sequence = engine.begin_sequence(len(ids))
    step, logits = engine.step(sequence, ids[:prompt], greedy)
    prefill, losses, decode = step.duration_ns / 1e9 / prompt, [], []
    for token in ids[prompt:]:
        shifted = logits.astype(np.float64) - logits.max()
        losses.append(np.log(np.exp(shifted).sum()) - shifted[token])
        step, logits = engine.step(sequence, [token], greedy)
        decode.append(step.duration_ns / 1e9)
    return float(np.exp(np.mean(losses))), prefill, float(np.median(decode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", type=Path)
    parser.add_argument("quantized", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prefill")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quantized-backend", choices=("cpu", "htp"), default="cpu")
    args = parser.parse_args()
    backend = args.quantized_backend
    models = [MoE.load(args.original), MoE.load(args.quantized, prefill_backend=backend, decode_backend=backend)]
    ids = models[0].encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    figures = np.median([[read(model, ids, args.prompt) for model in models] for _ in range(args.runs)], axis=0)
    told = [from_perplexity(row[0], {"prefill": row[1], "decode": row[2]}) for row in figures]
    for name, row in zip(("original", "quantized"), figures, strict=True):
        print(f"{name:10} perplexity {row[0]:9.3f}  prefill {row[1] * 1e3:.3f} ms/token  decode {row[2] * 1e3:.3f} ms/token")
    score = harmonic_score(told[1], told[0])
    parts = ", ".join(f"{name} {value:.3f}" for name, value in score.items() if name != "score")
    print(f"harmonic quantization score {score['score']:.3f} ({parts}); {args.runs} runs, {len(ids) - args.prompt} tokens scored")


if __name__ == "__main__":
    main()
