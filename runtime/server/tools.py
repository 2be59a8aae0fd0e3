"""Calls of tools in an answer, in the forms that chat templates write between <tool_call> and </tool_call>.

Whether a model writes one of them is seen from its template: it writes a call, which the form must read back.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.errors import RequestError
from runtime.moe import MoE
from runtime.package.channels import CLOSE, OPEN, Channels
from runtime.package.tokens import Message

Tools = dict[str, dict[str, Any]]
"""Name of each tool → the JSON schema of each of its arguments."""


@dataclass(frozen=True)
class Call:
    """A call of a tool; arguments: a JSON object as text."""

    name: str
    arguments: str


Form = Callable[[str, Tools], Call | None]
"""(text between the marks, tools) → the call; None if the text is none."""


def json_form(text: str, tools: Tools) -> Call | None:
    """{"name": .., "arguments": {..}}: Qwen3, Granite 4, Ling 2, and gpt-oss by Channels."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
        return None
    name, arguments = value["name"], value["arguments"]
    return Call(name, _as_json(arguments)) if isinstance(arguments, dict) and name in [*tools] else None


def marked_form(call: str, argument: str) -> Form:
    """A form whose call is a name and the rest, and whose rest is arguments, each a name and a value, by these patterns."""
    whole, each = re.compile(call, re.DOTALL), re.compile(argument, re.DOTALL)

    def parse(text: str, tools: Tools) -> Call | None:
        found = whole.fullmatch(text)
        if not found or found[1] not in tools or each.sub("", found[2]).strip():
            return None
        schemas = tools[found[1]]
        return Call(found[1], _as_json({name: _typed(value, schemas.get(name)) for name, value in each.findall(found[2])}))

    return parse


FORMS: dict[str, Form] = {
    "json": json_form,
    # Qwen3-Coder, Qwen3.5, Nemotron 3
    "function": marked_form(r"\s*<function=([^>\s]+)>(.*)</function>\s*", r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"),
    # GLM-4.5 to 4.7
    "pairs": marked_form(r"\s*([^\s<]+)\s*(.*)", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
}


def _as_json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _typed(text: str, schema: Any) -> Any:
    """An argument's value: the text itself if its schema says so, or if it is neither JSON nor a constant of Python's."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return CONSTANTS.get(text, text)


CONSTANTS = {"True": True, "False": False, "None": None}
PROBE = "read_probe"
ARGUMENTS: dict[str, Any] = {"place": "A b", "days": 3}
PROBED: Tools = {PROBE: {"place": {"type": "string"}, "days": {"type": "integer"}}}


def form_of(model: MoE) -> str | None:
    """The name in FORMS of the form that a model's template writes; None if it is another one."""
    function = {"name": PROBE, "description": "d", "parameters": {"type": "object", "properties": PROBED[PROBE]}}
    call = {"id": "call_0", "type": "function", "function": {"name": PROBE, "arguments": ARGUMENTS}}
    messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        tools = [{"type": "function", "function": function}]
        ids = model.apply_chat_template(messages, tools=tools, add_generation_prompt=False)
    except RequestError:
        return None
    channels, decode = Channels(model.tokenizer, calls=True), model.tokenizer.decode
    written = "".join(channels.shown(i, decode([i])) for i in ids) + channels.end() if channels.used else decode(ids)
    expected = [Call(PROBE, _as_json(ARGUMENTS))]
    for name, form in FORMS.items():
        if [part for part in CallFinder(form, PROBED).add(written, last=True) if isinstance(part, Call)] == expected:
            return name
    return None


class CallFinder:
    """Splits an answer, as it comes, into text and calls of these tools."""

    def __init__(self, form: Form, tools: Tools):
        self._form, self._tools, self._held = form, tools, ""

    def add(self, text: str, last: bool = False) -> list[str | Call]:
        """What is known now; text that may be a part of a call is held back until the `last`."""
        found: list[str | Call] = []
        self._held += text
        while CLOSE in (rest := self._held.partition(OPEN)[2]):
            before = self._held.partition(OPEN)[0]
            body, _, self._held = rest.partition(CLOSE)
            lead, _, inner = (OPEN + body).rpartition(OPEN)
            call = self._form(inner, self._tools)
            found += [before + lead, call] if call else [before + OPEN + body + CLOSE]
        known = len(self._held) if last else self._undecided()
        found.append(self._held[:known])
        self._held = self._held[known:]
        return [part for part in found if part]

    def _undecided(self) -> int:
        """Where in the held text a call may begin."""
        if OPEN in self._held:
            return self._held.index(OPEN)
        return next(i for i in range(len(self._held) + 1) if OPEN.startswith(self._held[i:]))
