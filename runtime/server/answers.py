"""Answers in OpenAI's JSON: whole, in pieces, and errors."""

import json
from dataclasses import asdict, dataclass
from time import time
from typing import Any
from uuid import uuid4

from runtime.moe import MoE, Token
from runtime.package.channels import Channels
from runtime.server.requests import Request
from runtime.server.tools import Call, CallFinder


@dataclass(frozen=True)
class CacheUse:
    """What a request did to the expert cache: experts found and not found per layer and step, loads, and their bytes."""

    hits: int
    misses: int
    loads: int
    loaded_bytes: int


@dataclass(frozen=True)
class Ending:
    """How an answer ended: `reason` stop or length. Counts are of tokens; `cached`: of the prompt, kept from the last request."""

    reason: str
    prompt: int
    cached: int
    generated: int
    experts: CacheUse

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, with the expert cache's part."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "expert_cache": asdict(self.experts),
        }


class Writer:
    """Makes the answer to one request from its tokens and ending; `finder` finds calls of tools in it."""

    def __init__(self, request: Request, model: MoE, served: str, finder: CallFinder | None = None):
        self.request, self._decode, self._finder, self._calls = request, model.tokenizer.decode, finder, 0
        self._channels = Channels(model.tokenizer, calls=finder is not None)
        kind = "chat.completion" if request.chat else "text_completion"
        self._head: dict[str, Any] = {"id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid4().hex}", "object": kind}
        self._head |= {"created": int(time()), "model": served}
        self._offset = 0

    def whole(self, tokens: list[Token], ending: Ending) -> dict[str, Any]:
        """The answer in one object."""
        text, logprobs = "".join(map(self._shown, tokens)), self._logprobs(tokens)
        content = {"message": self._message(text)} if self.request.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": self._reason(ending)}
        return self._head | {"choices": [choice], "usage": ending.usage()}

    def _message(self, text: str) -> dict[str, Any]:
        parts = self._parts(text + self._channels.end(), last=True)
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [self._numbered(part) for part in parts if isinstance(part, Call)]
        if not calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": text if text.strip() else None, "tool_calls": calls}

    def _parts(self, text: str, last: bool = False) -> list[str | Call]:
        return self._finder.add(text, last) if self._finder else [text]

    def _numbered(self, call: Call) -> dict[str, Any]:
        self._calls += 1
        return {"id": f"call_{uuid4().hex}", "type": "function", "function": asdict(call)}

    def _reason(self, ending: Ending) -> str:
        return "tool_calls" if self._calls and ending.reason == "stop" else ending.reason

    def first(self) -> list[str]:
        """Server-sent events before the first token."""
        return [self._event({"role": "assistant", "content": ""})] if self.request.chat else []

    def piece(self, token: Token) -> list[str]:
        """Events of one token; none while no character of it is known."""
        deltas = [self._delta(part) for part in self._parts(self._shown(token)) if part]
        if self.request.logprobs is None:
            return [self._event(delta) for delta in deltas]
        first, *further = deltas or [self._delta("")]
        return [self._event(first, self._logprobs([token])), *map(self._event, further)]

    def last(self, ending: Ending) -> list[str]:
        """Events after the last token."""
        events = [self._event(self._delta(part)) for part in self._parts(self._channels.end(), last=True) if part]
        events.append(self._event({} if self.request.chat else "", None, self._reason(ending)))
        if self.request.stream_usage:
            events.append(_sse(self._chunk_head | {"choices": [], "usage": ending.usage()}))
        return [*events, "data: [DONE]\n\n"]

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self.request.chat else {})

    def _delta(self, part: str | Call) -> Any:
        if isinstance(part, Call):
            return {"tool_calls": [{"index": self._calls} | self._numbered(part)]}
        return {"content": part} if self.request.chat else part

    def _event(self, part: Any, logprobs: Any = None, reason: str | None = None) -> str:
        choice = {"index": 0, "delta" if self.request.chat else "text": part, "logprobs": logprobs, "finish_reason": reason}
        return _sse(self._chunk_head | {"choices": [choice]})

    def _shown(self, token: Token) -> str:
        return self._channels.shown(token.id, token.text) if self.request.chat else token.text

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        if self.request.chat:
            rows = [self._row(token.id, token.logprob) for token in tokens]
            tops = [[self._row(*pair) for pair in token.top] for token in tokens]
            return {"content": [row | {"top_logprobs": top} for row, top in zip(rows, tops, strict=True)]}
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [self._decode([token.id]) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._decode([i]): value for i, value in token.top} for token in tokens],
            "text_offset": offsets,
        }

    def _row(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
