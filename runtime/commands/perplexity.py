"""moescope bench perplexity: how well a model predicts a text."""

import argparse
from pathlib import Path

from moescope.answers import print_if_json
from moescope.arguments import add_json, add_model
from moescope.plain import print_plain
from runtime.commands import add_count, read_text, show_progress
from runtime.commands.generate import add_placement, load_model

EXAMPLES = """examples:
  moescope bench perplexity /models/qwen3-moe.package --text wiki.test.raw --threads 2
  moescope bench perplexity /models/olmoe.package --text - --window 1024 --stride 512 --json < text.txt

As defined in transformers' documentation: windows of --window tokens begin --stride tokens apart, each token counts once, in the
first window that holds it, and the text's first token not at all. llama.cpp counts the second halves of disjoint windows."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    parser.add_argument("--text", type=Path, required=True, help="file that holds the text; -: standard input")
    add_count(parser, "--window", default=512, help="tokens of a window, at most the model's context")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens from one window to the next (default: half a window)")
    parser.add_argument("--tokens", type=int, metavar="N", help="largest number of tokens to read (default: the whole text)")
    add_json(parser)
    add_placement(parser)


def run(args: argparse.Namespace) -> int:
    """Read the text and print the figure."""
    from runtime.errors import RequestError
    from runtime.prepare.perplexity import Perplexity, token_losses

    text = read_text(args.text)
    stride = args.window // 2 if args.stride is None else args.stride
    if args.window < 2 or not 0 < stride < args.window or (args.tokens is not None and args.tokens < 2):
        raise RequestError("--window and --tokens must be 2 or more, --stride at least 1 and less than --window")
    with load_model(args)[0] as model:
        ids = model.encode(text)[: args.tokens]
        if len(ids) < 2:
            raise RequestError(f"{args.text} holds fewer than 2 tokens: give more text")
        with show_progress("reading") as progress:
            result = Perplexity.of(token_losses(model.engine, ids, args.window, stride, progress))
    engine = model.describe()
    if not print_if_json(args, {**vars(result), "window": args.window, "stride": stride, "engine": engine}):
        error = "" if result.error is None else f" ± {result.error:.4f} (standard error)"
        print_plain(f"{args.model}: perplexity {result.perplexity:.4f}{error}")
        print(f"{result.tokens} tokens in windows of {args.window}, {stride} apart, on {engine['backends']['prefill']}")
    return 0
