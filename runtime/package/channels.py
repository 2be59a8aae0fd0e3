"""Answers in channels, as in gpt-oss: <|channel|>NAME<|message|>TEXT<|end|>. The user sees only the final one.

Messages whose header has to=functions.NAME are calls of tools.
"""

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
FINAL = "final"
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Channels:
    """Determines, token by token, the parts of an answer that the user sees and that a chat template would keep.

    Without these marks in the tokenizer, and outside of any message, these are everything. calls: also show calls of tools, as
    Qwen3 writes them; the prompt ends within a header, after the role.
    """

    def __init__(self, tokenizer: "Tokenizer", calls: bool = False):
        ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
        self._marks = {} if None in ids.values() else {number: mark for mark, number in ids.items()}
        self._calls = calls and bool(self._marks)
        self._header: str | None = "" if self._calls else None  # the part so far of an unfinished header
        self._role, self._channel, self._open, self._marked = "", FINAL, False, False

    def shown(self, token: int, text: str) -> str:
        """The token's text if the user is to see it, otherwise empty."""
        mark = self._marks.get(token)
        if not mark and self._header is None:
            return text if self._channel == FINAL or self._open else ""
        ended = self._end_message() if mark else ""
        self._marked |= bool(mark)
        if mark == "<|message|>":
            return ended + self._begin_message(self._header or "")
        if mark == "<|end|>":
            self._header = None
        elif mark:
            self._role, self._header = (self._header or "") if mark == "<|channel|>" else "", ""
        else:
            self._header = (self._header or "") + text
        return ended

    def _begin_message(self, header: str) -> str:
        self._channel, self._header = (header.split() or [FINAL])[0], None
        recipient = RECIPIENT.search(f"{self._role} {header}")
        self._open = self._calls and recipient is not None
        return f'{OPEN}{{"name": {json.dumps(recipient[1])}, "arguments": ' if self._open and recipient else ""

    def _end_message(self) -> str:
        ended, self._open = f"}}{CLOSE}" if self._open else "", False
        return ended

    def end(self) -> str:
        """What remains to be shown when the answer ends: all of it if it had no marks."""
        return self._end_message() + ("" if self._marked else self._header or "")

    @property
    def used(self) -> bool:
        """Whether the tokenizer has the marks."""
        return bool(self._marks)

    @property
    def thinking(self) -> bool:
        """Whether the answer has not reached its final part."""
        return self._header is not None or self._channel != FINAL
