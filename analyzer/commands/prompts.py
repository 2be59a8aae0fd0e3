"""Choose a subset of prompts whose token lengths are distributed as in the whole file (Kullback-Leibler divergence).

The file holds one prompt per line, as text or as JSON with a field "prompt" or "text". Without a tokenizer, words are counted.

examples:
  moescope bench prompts all.txt --size 100 --out some.txt
  moescope bench prompts all.jsonl --size 10% --tokenizer MODEL_DIR/tokenizer.json --json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.errors import PredictError
from analyzer.predict.prompts import matched_subset
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_out


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="file of prompts, one per line")
    parser.add_argument("--size", metavar="N", required=True, help="number or share of prompts to keep: 100, 10%%")
    parser.add_argument("--tokenizer", metavar="FILE", type=Path, help="tokenizer.json that counts the tokens")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    add_out(parser, "standard output")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Choose the subset, write it and print the result."""
    lines = [line for line in args.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    lengths = count_tokens([text_of(line) for line in lines], args.tokenizer)
    rows, divergence = matched_subset(lengths, size_of(args.size, len(lines)), args.seed)
    chosen = "".join(lines[row] + "\n" for row in rows)
    if args.out:
        args.out.write_text(chosen, encoding="utf-8")
    means = [lengths.mean(), lengths[rows].mean()]
    if print_if_json(args, {"rows": rows, "of": len(lines), "kl_nats": divergence, "mean_tokens": means}):
        return 0
    if args.out:
        text = f"mean length {means[1]:.1f} of {means[0]:.1f}"
        print(f"{len(rows)} of {len(lines)} prompts, KL divergence {divergence:.4f} nats, {text}")
    else:
        print(chosen, end="")
    return 0


def text_of(line: str) -> str:
    """The prompt of a line, plain or JSON."""
    try:
        value: Any = json.loads(line)
    except ValueError:
        return line
    return str(value.get("prompt") or value.get("text") or line) if isinstance(value, dict) else line


def count_tokens(texts: list[str], tokenizer: Path | None) -> np.ndarray:
    """The number of tokens of each text."""
    if tokenizer is None:
        return np.array([len(text.split()) for text in texts])
    from tokenizers import Tokenizer

    try:
        encoder = Tokenizer.from_file(str(tokenizer))
    except Exception as error:
        raise PredictError(f"{tokenizer} is not a tokenizer ({error}): give a tokenizer.json") from None
    return np.array([len(encoded.ids) for encoded in encoder.encode_batch(texts)])


def size_of(word: str, total: int) -> int:
    """The number of prompts from `100` or `10%` of the whole."""
    try:
        return max(round(float(word[:-1]) / 100 * total), 1) if word.endswith("%") else int(word)
    except ValueError:
        raise PredictError(f"{word!r} is not a size: write 100 or 10%") from None
