"""Answers in channels, as in gpt-oss: <|channel|>NAME<|message|>TEXT<|end|>. The user sees only the final one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
FINAL = "final"


class Channels:
    """Determines, token by token, the parts of an answer that the user sees and that a chat template would keep.

    Without these marks in the tokenizer, and outside of any message, these are everything.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
        self._marks = {} if None in ids.values() else {number: mark for mark, number in ids.items()}
        self._header: str | None = None  # the part so far of an unfinished header
        self._channel = FINAL

    def shown(self, token: int, text: str) -> str:
        """The token's text if the user is to see it, otherwise empty."""
        mark = self._marks.get(token)
        if mark == "<|message|>":
            self._channel, self._header = (self._header or FINAL).split()[0], None
        elif mark == "<|end|>":
            self._header = None
        elif mark:
            self._header = ""
        elif self._header is not None:
            self._header += text
        elif self._channel == FINAL:
            return text
        return ""

    @property
    def used(self) -> bool:
        """Whether the tokenizer has the marks."""
        return bool(self._marks)

    @property
    def thinking(self) -> bool:
        """Whether the answer has not reached its final part."""
        return self._header is not None or self._channel != FINAL
