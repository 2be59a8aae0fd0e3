"""python -m runtime chat: talk with a model."""

import argparse
import sys
from typing import TYPE_CHECKING

from moescope.arguments import add_model
from runtime.commands import add_count
from runtime.commands.generate import INTERRUPTED, add_placement, add_sampling, load_model, speak

if TYPE_CHECKING:
    from runtime.moe import MoE

EXAMPLES = """example:
  python -m runtime chat /models/qwen3-moe.package --expert-cache 2GiB --threads 2 --temperature 0.7 --top-p 0.9"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    parser.add_argument("--system", default="", help="system prompt")
    add_count(parser, "--max-new-tokens", default=512, help="largest number of tokens in an answer")
    add_sampling(parser)
    add_placement(parser)


def run(args: argparse.Namespace) -> int:
    """Answer line by line until the input ends; Ctrl-C ends an answer, and at the prompt the talk."""
    model, _ = load_model(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    try:
        while (line := _ask()) is not None:
            if line.strip():
                messages.append({"role": "user", "content": line})
                messages.append({"role": "assistant", "content": _answer(model, messages, args)})
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        model.close()
    return 0


def _ask() -> str | None:
    """The next line; None at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _answer(model: "MoE", messages: list[dict[str, str]], args: argparse.Namespace) -> str:
    text, interrupted = speak(model, messages, args)
    if interrupted:
        print(" [stopped]", end="", file=sys.stderr)
    print(flush=True)
    return text
