"""lm-Meter's harmonic quantization score of two packages of one model: accuracy by perplexity on a text, latency by phase.

    python -m benchmarks.quantization_score ORIGINAL QUANTIZED --text FILE --tokens 256 --rounds 3
    python -m benchmarks.quantization_score DIR DIR --text FILE --quantized-backend htp    (fp32 on CPU, fp16 on HTP)

Both read the same tokens one by one; runs alternate, and the median of each phase counts. On x86-64 HTP is Qualcomm's
emulator: its accuracy is the NPU's, its latency is not.
"""

import platform
from pathlib import Path

import numpy as np

from analyzer.predict.quantization import from_perplexity, harmonic_score
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from benchmarks.lib.turns import by_turns
from runtime import MoE
from runtime.step.sampling import Sampler, Sampling


def measure_model(model: MoE, ids: list[int], prompt: int) -> tuple[float, float, float]:
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
    parser = make_parser(__doc__, rounds=3, help_rounds="runs of each")
    parser.add_argument("original", type=Path)
    parser.add_argument("quantized", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prefill")
    parser.add_argument("--quantized-backend", choices=("cpu", "htp"), default="cpu")
    args = parser.parse_args()
    report, backend = Report("quantization_score", args), args.quantized_backend
    models = [MoE.load(args.original), MoE.load(args.quantized, prefill_backend=backend, decode_backend=backend)]
    ids = models[0].encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    seen: tuple[list[tuple[float, float, float]], ...] = ([], [])
    for _, side in by_turns((0, 1), args.rounds):
        seen[side].append(measure_model(models[side], ids, args.prompt))
    labels = ("emulator",) if backend == "htp" and platform.machine() == "x86_64" else ()
    for name, runs, own in (("original", seen[0], ()), ("quantized", seen[1], labels)):
        perplexity, *seconds = np.array(runs).T
        report.add(f"perplexity, {name}", "", single(perplexity[0], len(ids) - args.prompt))
        for phase, values in zip(("prefill", "decode"), seconds, strict=True):
            report.add(f"{phase}, {name}", "ms/token", extremes(values * 1e3), labels=own)
    middle = np.median(seen, axis=1)
    original, quantized = (from_perplexity(row[0], {"prefill": 1e3 * row[1], "decode": 1e3 * row[2]}) for row in middle)
    for name, value in harmonic_score(quantized, original).items():
        report.add("harmonic quantization score" if name == "score" else f"its part {name}", "", single(value, args.rounds))
    report.finish()


if __name__ == "__main__":
    main()
