"""Requests take turns on the engine's thread; tokens reach the event loop as they are chosen."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from time import monotonic

from runtime.errors import InterruptedStepError
from runtime.moe import MoE, Token, until_stop
from runtime.server.answers import CacheUse, Ending
from runtime.server.requests import Request
from runtime.telemetry.log import RunLog

Arrival = Token | Ending | Exception


class CountedTokens:
    """The engine's tokens, before a stop text cuts them. `ended`: the engine has chosen the last one."""

    def __init__(self, tokens: Iterator[Token], cancelled: Event):
        self._tokens, self._cancelled = tokens, cancelled
        self.count, self.ended = 0, False

    def __iter__(self) -> Iterator[Token]:
        for token in self._tokens:
            self.count += 1
            if self._cancelled.is_set():
                return
            yield token
        self.ended = True


class Turn:
    """A request in the queue: `arrived` receives its tokens, then its ending or an error. `cancel` ends it at its next token, or
    at the next chunk of its prompt.
    """

    def __init__(self, model: MoE, request: Request, ids: list[int], limit: int):
        self.model, self.request, self.ids, self.limit = model, request, ids, limit
        self.arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        self.asked_at, self.first_at = monotonic(), 0.0
        self._cancelled, self._loop = Event(), asyncio.get_running_loop()

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._cancelled.set()

    def run(self) -> None:
        """Generate, on the engine's thread."""
        if self._cancelled.is_set():
            return
        try:
            self._generate()
        except InterruptedStepError:
            return
        except Exception as error:
            self._report(error)

    def _generate(self) -> None:
        request, log = self.request, self.model.log
        before, first = _counts(log), log.next_seq
        settings = {"keep_kv": True, "logprobs": request.logprobs, "unwanted": self._cancelled.is_set, **request.sampling}
        tokens = self.model.generate(self.ids, self.limit, **settings)
        counted = CountedTokens(tokens, self._cancelled)
        for token in until_stop(iter(counted), request.stops):
            self.first_at = self.first_at or monotonic()
            self._report(token)
        tokens.close()  # type: ignore[attr-defined]
        after = _counts(log)
        used = CacheUse(*(new - old for new, old in zip(after, before, strict=True)))
        cached = len(self.ids) - log.steps[first - log.steps_dropped].n_tokens
        reason = "length" if counted.ended and counted.count == self.limit else "stop"
        self._report(Ending(reason, len(self.ids), max(cached, 0), counted.count, used))

    def _report(self, what: Arrival) -> None:
        self._loop.call_soon_threadsafe(self.arrived.put_nowait, what)


class Turns:
    """The queue. `waiting`: requests that have not ended, of which one runs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moescope-serve")
        self._turns: dict[Turn, Future[None]] = {}

    @property
    def waiting(self) -> int:
        """Requests that run or wait."""
        return len(self._turns)

    def add(self, turn: Turn) -> None:
        """Queue a request."""
        self._turns[turn] = future = self._thread.submit(turn.run)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._turns.pop, turn))

    def close(self) -> None:
        """Cancel all, and wait for the one that runs."""
        for turn in list(self._turns):
            turn.cancel()
        self._thread.shutdown()


def _counts(log: RunLog) -> tuple[int, int, int, int]:
    return log.hits, log.misses, sum(log.loads.values()), log.loaded_bytes
