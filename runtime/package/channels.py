"""Answers in channels, as gpt-oss gives them: <|channel|>NAME<|message|>TEXT<|end|>. The user sees the final one alone."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
FINAL = "final"


class Channels:
    """Separates, token by token, what of an answer is for the user and what a chat template would keep of it.

    Without these marks in the tokenizer, and outside of any message, that is everything.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
        self._marks = {} if None in ids.values() else {number: mark for mark, number in ids.items()}
        self._header: str | None = None  # what came of a header that has not ended
        self._channel = FINAL

    def shown(self, token: int, text: str) -> str:
        """The token's text where the user is to see it, else nothing."""
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
    def thinking(self) -> bool:
        """Has the answer not come to its final part?"""
        return self._header is not None or self._channel != FINAL
