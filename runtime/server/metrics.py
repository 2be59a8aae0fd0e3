"""The server's metrics for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from runtime.server.answers import Ending

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    """Counts of answered requests; `waiting` returns how many run or wait."""

    def __init__(self, waiting: Callable[[], int]):
        self.registry = registry = CollectorRegistry()
        gauge = Gauge("moescope_requests_waiting", "Requests that run or wait for their turn", registry=registry)
        gauge.set_function(waiting)
        self.requests = Counter("moescope_requests", "Requests by path and HTTP status", ["path", "status"], registry=registry)
        self._cancelled = Counter(
            "moescope_requests_cancelled", "Requests whose client left or whose time ended", registry=registry
        )
        self._tokens = Counter(
            "moescope_tokens", "Tokens by kind: prompt, cached (of the prompt), generated", ["kind"], registry=registry
        )
        self._experts = Counter("moescope_experts", "Experts by what the cache did: hit, miss, load", ["what"], registry=registry)
        self._bytes = Counter("moescope_expert_loaded_bytes", "Bytes of experts loaded", registry=registry)
        self._first = Histogram(
            "moescope_first_token_seconds",
            "From a request to its first token, waiting included",
            buckets=SECONDS,
            registry=registry,
        )
        self._each = Histogram("moescope_token_seconds", "Mean time of a later token", buckets=PER_TOKEN, registry=registry)

    def cancelled(self) -> None:
        """A request ended before its answer."""
        self._cancelled.inc()

    def ended(self, ending: Ending, first_s: float, rest_s: float) -> None:
        """A request was answered: its first token came after `first_s`, the others took `rest_s`."""
        for kind, count in (("prompt", ending.prompt), ("cached", ending.cached), ("generated", ending.generated)):
            self._tokens.labels(kind).inc(count)
        for what, count in (("hit", ending.experts.hits), ("miss", ending.experts.misses), ("load", ending.experts.loads)):
            self._experts.labels(what).inc(count)
        self._bytes.inc(ending.experts.loaded_bytes)
        if ending.generated:
            self._first.observe(first_s)
        if ending.generated > 1:
            self._each.observe(rest_s / (ending.generated - 1))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
