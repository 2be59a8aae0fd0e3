"""moescope chat: talk with a model."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.arguments import add_model
from runtime.commands import add_count, read_objects
from runtime.commands.generate import (
    INTERRUPTED,
    add_placement,
    add_sampling,
    add_template,
    check_sampling,
    load_model,
    print_tokens,
    template_variables,
)
from runtime.errors import RequestError
from runtime.package.channels import Channels
from runtime.package.tokens import check_text

if TYPE_CHECKING:
    from runtime.moe import MoE, Token
    from runtime.package.tokens import Message

CLEAR = "/clear"
EXAMPLES = """example:
  moescope chat /models/qwen3-moe.package --expert-cache 2GiB --threads 2 --temperature 0.7 --top-p 0.9

Type /clear to begin a new conversation. When a conversation exceeds the model's context, its oldest turns are dropped."""


class Talk:
    """A conversation that stays within the model's context."""

    def __init__(self, model: "MoE", args: argparse.Namespace):
        self.model, self.args = model, args
        self.variables = template_variables(model, args)
        self.messages: list[Message] = []
        self.clear()
        self.messages += read_objects(args.messages) if args.messages else []

    def clear(self) -> None:
        """Drop everything except the system prompt."""
        self.messages = [{"role": "system", "content": self.args.system}] if self.args.system else []

    def answer(self, line: str) -> None:
        """Print the model's answer to a line; a line that does not fit the context by itself is dropped."""
        try:
            check_text(line, "this line")
        except RequestError as error:
            say(str(error))
            return
        messages, ids = self._fitting([*self.messages, {"role": "user", "content": line}])
        free = self._context - len(ids)
        if free < 1:
            what = "this line and the system prompt do" if self.args.system else "this line does"
            say(f"{what} not fit the model's context of {self._context} tokens: shorten {'them' if self.args.system else 'it'}")
            return
        if left_out := (len(self.messages) + 1 - len(messages)) // 2:
            what = "oldest turn is" if left_out == 1 else f"{left_out} oldest turns are"
            say(f"the conversation exceeds the model's context of {self._context} tokens: its {what} dropped")
        most = min(self.args.max_new_tokens, free)
        channels, answer = Channels(self.model.tokenizer), []

        def shown(token: "Token") -> str:
            answer.append(channels.shown(token.id, token.text))
            return answer[-1]

        _, interrupted = print_tokens(self.model, ids, self.args, shown, max_new_tokens=most, keep_kv=True)
        if interrupted:
            print(" [stopped]", end="", file=sys.stderr)
        print(flush=True)
        if channels.thinking and not interrupted:
            say("the answer ended while the model was still thinking: raise --max-new-tokens")
        self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def _fitting(self, messages: "list[Message]") -> "tuple[list[Message], list[int]]":
        """(messages, their ids), without the oldest turns if less than a quarter of the context is left for the answer."""
        first = int(messages[0].get("role") == "system")
        room = self._context - min(self.args.max_new_tokens, self._context // 4)
        while len(ids := self.model.apply_chat_template(messages, **self.variables)) > room and len(messages) > first + 1:
            messages = messages[:first] + messages[first + 2 :]
        return messages, ids

    @property
    def _context(self) -> int:
        return self.model.package.family.context


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    parser.add_argument("--system", default="", help="system prompt")
    parser.add_argument("--messages", type=Path, metavar="FILE", help="conversation so far: JSON list of {role, content}")
    add_count(parser, "--max-new-tokens", default=512, help="largest number of tokens in an answer")
    add_template(parser)
    add_sampling(parser)
    add_placement(parser)


def run(args: argparse.Namespace) -> int:
    """Answer line by line until the input ends; Ctrl-C ends an answer, or the conversation if pressed at the prompt."""
    check_sampling(args)
    check_text(args.system, "the system prompt")
    with load_model(args)[0] as model, suppress(KeyboardInterrupt):
        talk = Talk(model, args)
        while (line := _read_line()) is not None:
            if line.strip() == CLEAR:
                talk.clear()
            elif line.strip():
                talk.answer(line)
        return 0
    return INTERRUPTED


def say(line: str) -> None:
    """Print a message to the user, separate from the answers."""
    print(f"moescope: {line}", file=sys.stderr)


def _read_line() -> str | None:
    """The next line; None at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
