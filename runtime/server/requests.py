"""Bodies of OpenAI's requests as calls of `MoE.generate`: every field is used, has no effect by design, or is refused by name."""

import json
from dataclasses import dataclass
from secrets import randbits
from typing import Any

from runtime.errors import RequestError
from runtime.moe import MoE
from runtime.server.tools import Tools
from runtime.step.sampling import Sampling

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": None}
"""Fields that choose tokens, and OpenAI's defaults; the seed is drawn."""
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
}
"""Fields of which only these values can be honoured."""
SHARED = {"model", "max_tokens", "stop", "stream", "stream_options", "logprobs", *SAMPLING, *WITHOUT_EFFECT, *ONLY}
OF_CHAT = SHARED | {"messages", "max_completion_tokens", "top_logprobs", "tools", "reasoning_effort", "chat_template_kwargs"}
OF_COMPLETION = SHARED | {"prompt"}
MOST_STOPS, MOST_LOGPROBS = 16, 20
COMPLETION_TOKENS = 16
"""OpenAI's limit of a completion whose request gives none."""


@dataclass(frozen=True)
class Request:
    """What to generate. `template`: variables of the chat template; `tools`: those that the answer may call; `limit`: None for
    as many tokens as the server allows.
    """

    model: str | None
    chat: bool
    prompt: str | list[int] | list[dict[str, Any]]
    template: dict[str, Any]
    tools: Tools
    limit: int | None
    stops: tuple[str, ...]
    logprobs: int | None
    stream: bool
    stream_usage: bool
    sampling: dict[str, Any]

    def ids(self, model: MoE) -> list[int]:
        """Token ids of the prompt."""
        return model.apply_chat_template(self.prompt, **self.template) if self.chat else model.prompt_ids(self.prompt)  # type: ignore[arg-type]


def parse_request(body: Any, chat: bool) -> Request:
    """The request in a decoded body; raises RequestError with the field that is wrong."""
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(given.keys() - (OF_CHAT if chat else OF_COMPLETION)):
        raise RequestError(f"{unknown[0]!r} is not supported: leave it out")
    for name, values in ONLY.items():
        if name in given and given[name] not in values:
            raise RequestError(f"{name} {given[name]!r} is not supported: only {' or '.join(map(repr, values))}")
    sampling: dict[str, Any] = {name: given.get(name, default) for name, default in SAMPLING.items()}
    sampling["seed"] = randbits(32) if sampling["seed"] is None else sampling["seed"]
    Sampling(**sampling)
    options = _of_type(given, "stream_options", dict, {})
    limit = _of_type(given, "max_completion_tokens", int, _of_type(given, "max_tokens", int, None if chat else COMPLETION_TOKENS))
    if limit is not None and limit < 1:
        raise RequestError(f"max_tokens is {limit}: give 1 or more")
    return Request(
        model=_of_type(given, "model", str, None),
        chat=chat,
        prompt=_messages(given) if chat else _prompt(given),
        template=_template(given) if chat else {},
        tools=_tools(given) if chat else {},
        limit=limit,
        stops=_stops(given),
        logprobs=_logprobs(given, chat),
        stream=_of_type(given, "stream", bool, False),
        stream_usage=_of_type(options, "include_usage", bool, False),
        sampling=sampling,
    )


def _of_type(given: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    if value is not default and type(value) is not kind:
        raise RequestError(f"{name} is not of type {kind.__name__}")
    return value


def _messages(given: dict[str, Any]) -> list[dict[str, Any]]:
    messages = _of_type(given, "messages", list, [])
    if not messages or not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise RequestError("messages are a list of at least one {role, content}")
    return [_with_arguments(message) | {"content": _text(message.get("content"))} for message in messages]


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as objects, as templates read them."""
    try:
        calls = [call | {"function": call["function"] | _arguments(call["function"])} for call in message.get("tool_calls") or ()]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise RequestError("a message's tool_calls are a list of {function: {name, arguments: a JSON object as text}}") from None
    return message | ({"tool_calls": calls} if calls else {})


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = json.loads(function["arguments"])
    if not isinstance(arguments, dict) or not isinstance(function["name"], str):
        raise TypeError
    return {"arguments": arguments}


def _text(content: Any) -> Any:
    """A message's content, parts of text joined."""
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
        ):
            raise RequestError("a message has parts other than text: this server reads text only")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError("a message's content must be text")
    return content or ""


def _prompt(given: dict[str, Any]) -> str | list[int]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(part) is int for part in prompt)):
        return prompt
    raise RequestError("prompt is one text, or one list of token ids")


def _template(given: dict[str, Any]) -> dict[str, Any]:
    tools = None if given.get("tool_choice") == "none" else _of_type(given, "tools", list, None)
    named = {"tools": tools, "reasoning_effort": given.get("reasoning_effort")}
    extra: dict[str, Any] = _of_type(given, "chat_template_kwargs", dict, {})
    return {name: value for name, value in named.items() if value} | extra


def _tools(given: dict[str, Any]) -> Tools:
    tools: Tools = {}
    for tool in given.get("tools", ()) if given.get("tool_choice") != "none" else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("tools are a list of {type: function, function: {name, parameters}}")
        if function.get("strict"):
            raise RequestError("strict tools are not supported: nothing here enforces a schema, leave strict out")
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        tools[function["name"]] = properties if isinstance(properties, dict) else {}
    return tools


def _stops(given: dict[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise RequestError(f"stop is a text or a list of at most {MOST_STOPS}, none of them empty")
    return tuple(stops)


def _logprobs(given: dict[str, Any], chat: bool) -> int | None:
    if chat:
        count = _of_type(given, "top_logprobs", int, 0) if _of_type(given, "logprobs", bool, False) else None
    else:
        count = _of_type(given, "logprobs", int, None)
    if count is not None and not 0 <= count <= MOST_LOGPROBS:
        raise RequestError(f"at most {MOST_LOGPROBS} log probabilities are given")
    return count
