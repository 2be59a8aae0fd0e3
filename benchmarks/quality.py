"""Perplexity of a model at several precisions, through the runtime: quality.py MODEL TEXT [--precisions 32 8 4 4a/64+8 32k8 ...].

Every precision is converted into a temporary package and reads the same windows of the text. Prints a table, or --json.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from runtime.moe import MoE
from runtime.package.convert import PackageFormat, convert
from runtime.telemetry.log import Step
from runtime.telemetry.probes import Phase

PRECISIONS = ("32", "16", "8", "8/64", "4", "4/64", "4a", "4/16", "4+4", "4a+4")


def parse(text: str) -> PackageFormat:
    """`4a/64+8`: 4 bits, asymmetric, blocks of 64; attention and head at 8 bits (default: the runtime's own choice).

    A `k8` or `k16` behind it is of keys and values, see `kv_bits`.
    """
    text = text.partition("k")[0]
    experts, _, others = text.partition("+")
    bits, _, block = experts.partition("/")
    target = PackageFormat(backend="cpu", bits=int(bits.rstrip("as")))
    if bits.endswith(("a", "s")):
        target = replace(target, symmetric=bits.endswith("s"))
    if block:
        target = replace(target, block=int(block))
    return replace(target, attention_bits=int(others), head_bits=int(others)) if others else target


def kv_bits(text: str) -> int:
    """`32k8`: 8."""
    return int(text.partition("k")[2] or 32)


def windows(ids: list[int], size: int) -> Iterator[list[int]]:
    """Windows of the text, one behind the other."""
    for first in range(0, len(ids) - 1, size - 1):
        if len(ids) - first > 1:
            yield ids[first : first + size]


def negative_log_likelihoods(model: MoE, ids: list[int]) -> np.ndarray:
    """Of every token but the first, in nats."""
    engine = model.engine
    sequence = engine.begin_sequence(len(ids))
    hidden = engine.hidden(sequence, ids[:-1], Step(0, Phase.PREFILL, len(ids) - 1, 0, 0))
    logits = engine.logits(hidden).astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    normal = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return np.asarray(normal - logits[np.arange(len(logits)), ids[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    text, rows = args.text.read_text(encoding="utf-8"), []
    for name in dict.fromkeys(["32", *args.precisions]):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            package = convert(args.model, Path(folder) / "package", None, parse(name))
            model = MoE.load(package.folder, threads=2, kv_bits=kv_bits(name))
            ids = model.encode(text)
            middle = max(0, (len(ids) - args.tokens) // 2)
            ids = ids[middle : middle + args.tokens]
            losses = [negative_log_likelihoods(model, part) for part in windows(ids, args.window)]
            model.close()
        loss = np.concatenate(losses)
        perplexity = float(np.exp(loss.mean()))
        rows.append({"precision": name, "tokens": len(loss), "perplexity": perplexity, "expert_bytes": package.expert_bytes})
        rows[-1]["against_fp32"] = perplexity / rows[0]["perplexity"] - 1
        print(
            f"{name:>8} {len(loss)} tokens: perplexity {perplexity:.4f}, {rows[-1]['against_fp32']:+.2%} "
            f"({package.expert_bytes} bytes per expert, {time.monotonic() - began:.0f} s)",
            file=sys.stderr if args.json else sys.stdout,
            flush=True,
        )
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
