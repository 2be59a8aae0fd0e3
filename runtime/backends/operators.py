"""Model-level operators as the probes and the log see them."""

from functools import lru_cache
from time import monotonic_ns
from types import TracebackType

from runtime.telemetry import probes
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind, result_id, weight_id

WEIGHTLESS = {Kind.DISPATCH, Kind.COMBINE, Kind.SAMPLE}


class Operator:
    """One operator over n_tokens rows, for a `with` block: begin and end on the same thread."""

    __slots__ = ("began", "expert", "kind", "layer", "log", "made_from", "n_tokens", "result")

    def __init__(self, log: RunLog, kind: Kind, layer: int, n_tokens: int, made_from: bytes, expert: int = -1):
        self.log, self.kind, self.layer, self.n_tokens, self.made_from = log, kind, layer, n_tokens, made_from
        self.expert, self.began = expert, 0
        self.result = result_id(kind, layer, expert)

    def __enter__(self) -> None:
        if self.log.timers:
            self.began = monotonic_ns()
        probes.op_begin(self.kind, self.layer, self.n_tokens, self.result, self.made_from)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        probes.op_end(self.result)
        if self.log.timers:
            self.log.timers.add(self.kind.name.lower(), self.began, monotonic_ns(), self.layer, self.expert)
        with self.log.lock:
            self.log.operators[self.kind] += 1


@lru_cache(maxsize=8192)
def made_from(
    kind: Kind,
    layer: int,
    expert: int = -1,
    layers: int = 0,
    used: tuple[int, ...] = (),
    after_dense: bool = False,
    shared: bool = False,
) -> bytes:
    """Tensor identities that an operator's result is made from.

    `used`: the experts that a combine sums up, `shared`: with or as the shared expert; `after_dense`: the layer before has none.
    """
    before = result_id(Kind.MLP if after_dense else Kind.COMBINE, (layers if kind == Kind.HEAD else layer) - 1)
    producers = {
        Kind.EMBED: (),
        Kind.ATTENTION: (before if layer > 0 else result_id(Kind.EMBED),),
        Kind.ROUTER: (result_id(Kind.ATTENTION, layer),),
        Kind.MLP: (result_id(Kind.ROUTER if shared else Kind.ATTENTION, layer),),
        Kind.DISPATCH: (result_id(Kind.ROUTER, layer),),
        Kind.EXPERT: (result_id(Kind.DISPATCH, layer),),
        Kind.COMBINE: (
            result_id(Kind.ATTENTION, layer),
            result_id(Kind.ROUTER, layer),
            *((result_id(Kind.MLP, layer),) if shared else ()),
            *(result_id(Kind.EXPERT, layer, e) for e in used),
        ),
        Kind.HEAD: (before,),
        Kind.SAMPLE: (result_id(Kind.HEAD),),
    }[kind]
    weights = () if kind in WEIGHTLESS else (weight_id(kind, layer, expert),)
    return probes.sources(*producers, *weights)
