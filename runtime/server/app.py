"""The HTTP side: paths, limits of body and time, keys, and answers that end when their client leaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from hmac import compare_digest
from time import monotonic, time
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import MoEError
from runtime.moe import MoE, Token
from runtime.server.answers import Ending, Writer, error_body
from runtime.server.metrics import Metrics
from runtime.server.requests import Request, parse_request
from runtime.server.tools import FORMS, CallFinder, form_of
from runtime.server.turns import Turn, Turns

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STREAM_HEAD: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


@dataclass(frozen=True)
class Limits:
    """Of one request: bytes of its body, seconds to send it, tokens of its answer by default, seconds until it must have been
    answered; `queue`: requests that run or wait.
    """

    body_bytes: int = 8 << 20
    body_s: float = 30.0
    tokens: int = 1024
    answer_s: float = 600.0
    queue: int = 64


class HttpError(Exception):
    """An answer other than 200, in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers

    def response(self) -> JSONResponse:
        """The answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return JSONResponse(error_body(str(self), kind, self.code), self.status, self.headers)


class Server:
    """Serves one model under the name `served`. Its routes are in `app`."""

    def __init__(self, model: MoE, served: str, limits: Limits, key: str = "", hosts: tuple[str, ...] = ()):
        self.model, self.served, self.limits, self.created = model, served, limits, int(time())
        self.turns = Turns()
        self.metrics = Metrics(lambda: self.turns.waiting)
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/metrics", self.show_metrics),
            Route("/health", lambda http: JSONResponse({"status": "ok"})),
        ]
        # Without a key, a page in a browser must not reach a server on loopback by a name of its own.
        guard = Middleware(KeyGuard, key=key) if key else Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts) or ["*"])
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(StatusCounter, metrics=self.metrics), guard],
            exception_handlers={HttpError: lambda _, error: error.response()},  # type: ignore[dict-item, attr-defined]
            lifespan=self._lifespan,
        )

    async def models(self, http: HttpRequest) -> Response:
        """The one model, as a list or by its name."""
        entry = {"id": self.served, "object": "model", "created": self.created, "owned_by": "moescope"}
        name = http.path_params.get("name")
        self._check_model(name)
        return JSONResponse(entry if name else {"object": "list", "data": [entry]})

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.served):
            raise HttpError(404, f"the model {name!r} is not served: use {self.served!r}", "model_not_found")

    async def show_metrics(self, http: HttpRequest) -> Response:
        """For Prometheus."""
        return Response(self.metrics.text(), media_type=METRICS_TYPE)

    async def chat(self, http: HttpRequest) -> Response:
        """Answer a conversation."""
        return await self._turn(http, chat=True)

    async def complete(self, http: HttpRequest) -> Response:
        """Continue a text."""
        return await self._turn(http, chat=False)

    async def _turn(self, http: HttpRequest, chat: bool) -> Response:
        deadline = monotonic() + self.limits.answer_s
        body = await self._body(http)
        if self.turns.waiting >= self.limits.queue:
            text = f"{self.turns.waiting} requests run or wait, no more are taken: try again later"
            raise HttpError(429, text, "queue_full", **{"retry-after": "1"})
        try:
            request = parse_request(json.loads(body), chat)
            self._check_model(request.model)
            ids = await asyncio.to_thread(request.ids, self.model)
            finder = await asyncio.to_thread(self._finder, request)
            free = self.model.package.family.context - len(ids)
            if free < 1:
                raise HttpError(400, f"a prompt of {len(ids)} tokens fills the model's context", "context_length_exceeded")
            limit = request.limit or min(self.limits.tokens, free)
            turn = Turn(self.model, request, ids, limit)
            if limit > free:
                text = f"a prompt of {len(ids)} tokens plus {limit} new ones exceeds the model's context of {free + len(ids)}"
                raise HttpError(400, text, "context_length_exceeded")
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from None
        except MoEError as error:
            raise HttpError(400, str(error)) from None
        return TurnResponse(self, turn, deadline, finder)

    def _finder(self, request: Request) -> CallFinder | None:
        """What finds calls of the request's tools; None if there are none, or if the model's form of calls is unknown."""
        form = self._tool_form if request.tools else None
        return CallFinder(FORMS[form], request.tools) if form else None

    @cached_property
    def _tool_form(self) -> str | None:
        return form_of(self.model)

    async def _body(self, http: HttpRequest) -> bytes:
        """The body within its limits; a longer one is read to its end without keeping it, since clients first send, then read."""
        if http.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise HttpError(415, "the body must be application/json")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_s):
                async for part in http.stream():
                    size += len(part)
                    parts.append(part)
                    if size > self.limits.body_bytes:
                        parts.clear()
        except TimeoutError:
            raise HttpError(408, f"the body took longer than {self.limits.body_s:g} s", connection="close") from None
        except ClientDisconnect:
            raise HttpError(400, "the client left") from None
        if size > self.limits.body_bytes:
            raise HttpError(413, f"the body has {size} bytes, more than {self.limits.body_bytes}", connection="close")
        return b"".join(parts)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.turns.close()


class TurnResponse(Response):
    """Queues a request and sends its answer; ends it if the client leaves or its time is over."""

    def __init__(self, server: Server, turn: Turn, deadline: float, finder: CallFinder | None):
        super().__init__()
        self.server, self.turn, self.deadline, self.begun = server, turn, deadline, False
        self.writer = Writer(turn.request, server.model, server.served, finder)
        server.turns.add(turn)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        answer = asyncio.create_task(self._stream(send) if self.turn.request.stream else self._whole(scope, receive, send))
        left = asyncio.create_task(_left(receive))
        try:
            left_s = max(self.deadline - monotonic(), 0)
            done, _ = await asyncio.wait({answer, left}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.turn.cancel()
            left.cancel()
        if answer in done:
            return answer.result()
        self.server.metrics.cancelled()
        answer.cancel()
        with suppress(asyncio.CancelledError):
            await answer
        if not done and not self.begun:
            text = f"no answer within {self.server.limits.answer_s:g} s"
            await HttpError(504, text, "timeout").response()(scope, receive, send)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens: list[Token] = []
        while isinstance(arrived := await self.turn.arrived.get(), Token):
            tokens.append(arrived)
        response = (
            self._refusal(arrived)
            if isinstance(arrived, Exception)
            else JSONResponse(self.writer.whole(tokens, self._ended(arrived)))
        )
        self.begun = True
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        arrived = await self.turn.arrived.get()
        self.begun = True
        if isinstance(arrived, Exception):
            return await self._refusal(arrived)({"type": "http"}, _nothing, send)
        await send(STREAM_HEAD)
        events = self.writer.first()
        while isinstance(arrived, Token):
            await _send_events(send, [*events, *self.writer.piece(arrived)])
            events, arrived = [], await self.turn.arrived.get()
        if isinstance(arrived, Ending):
            await _send_events(send, [*events, *self.writer.last(self._ended(arrived))])
        else:
            error = self._refusal(arrived).body
            await _send_events(send, [f"data: {bytes(error).decode()}\n\n"])
        await send({"type": "http.response.body", "body": b""})

    def _ended(self, ending: Ending) -> Ending:
        turn = self.turn
        self.server.metrics.ended(ending, turn.first_at - turn.asked_at, monotonic() - turn.first_at)
        return ending

    def _refusal(self, error: Exception) -> JSONResponse:
        status = 400 if isinstance(error, MoEError) else 500
        return HttpError(status, str(error) or type(error).__name__).response()


class KeyGuard:
    """Demands the key of every request."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self._expected = app, f"bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        if scope["type"] == "http" and not compare_digest(scheme.lower() + b" " + key.strip(), self._expected):
            refused = HttpError(401, "the API key is missing or wrong", "invalid_api_key", **{"www-authenticate": "Bearer"})
            await refused.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


class StatusCounter:
    """Counts answers by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # A path without a route would make a series of its own for each that somebody tries.
                path = scope["path"] if message["status"] not in (401, 404) else "other"
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counted)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Any:
    return {"type": "http.disconnect"}


async def _send_events(send: Send, events: list[str]) -> None:
    if events:
        await send({"type": "http.response.body", "body": "".join(events).encode(), "more_body": True})
