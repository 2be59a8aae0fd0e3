"""Perplexity of a model at several precisions, through the runtime.

    python -m benchmarks.quality MODEL TEXT [--precisions 32 8 4 4a/64+8 32k8 ...]

The model is converted into a temporary package for every precision, which reads the same windows of the text.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single
from runtime.moe import MoE
from runtime.package.convert import PackageFormat, convert
from runtime.prepare.perplexity import token_losses

PRECISIONS = ("32", "16", "8", "8/64", "4", "4/64", "4a", "4/16", "4+4", "4a+4")


def parse_format(text: str) -> PackageFormat:
    """`4a/64+8`: 4 bits, asymmetric, blocks of 64; attention and head at 8 bits (default: the runtime's own choice).

    A `k8` or `k16` after it is the precision of keys and values, see `kv_bits`.
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
    """The bits of keys and values: 8 for `32k8`."""
    return int(text.partition("k")[2] or 32)


def losses_at(model_folder: Path, name: str, text: str, args: argparse.Namespace) -> tuple[np.ndarray, int]:
    """(losses of every token at a precision, bytes of an expert)."""
    with tempfile.TemporaryDirectory() as folder:
        package = convert(model_folder, Path(folder) / "package", None, parse_format(name))
        model = MoE.load(package.folder, threads=2, kv_bits=kv_bits(name))
        ids = model.encode(text)
        middle = max(0, (len(ids) - args.tokens) // 2)
        ids = ids[middle : middle + args.tokens]
        lost = token_losses(model.engine, ids, args.window, args.window - 1)
        model.close()
        return lost, package.expert_bytes


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    args = parser.parse_args()
    report, text, best = Report("quality", args), args.text.read_text(encoding="utf-8"), 0.0
    for name in dict.fromkeys(["32", *args.precisions]):
        lost, expert_bytes = losses_at(args.model, name, text, args)
        perplexity = float(np.exp(lost.mean()))
        best = best or perplexity
        report.add(f"perplexity, {name}", "", single(perplexity, len(lost)))
        report.add(f"perplexity, {name}: more", "%", single(100 * (perplexity / best - 1), len(lost)), against="32 bits")
        report.add(f"bytes of an expert, {name}", "B", single(expert_bytes))
    report.finish()


if __name__ == "__main__":
    main()
