"""Model-level operators as the probes and the log see them."""

from functools import lru_cache
from time import monotonic_ns
from types import TracebackType

from runtime.models import Family
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind, result_id, weight_id

WEIGHTLESS = {Kind.DISPATCH, Kind.COMBINE, Kind.SAMPLE}


class Operator:
    """An operator over n_tokens rows as a `with` block: begin and end are on the same thread."""

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


def last_kind(family: Family, layer: int) -> Kind:
    """The operator whose result is the layer's result."""
    if layer in family.dense:
        return Kind.MLP
    return Kind.NORM if family.FINISHED else Kind.COMBINE


@lru_cache(maxsize=8192)
def made_from(
    kind: Kind,
    layer: int,
    expert: int = -1,
    layers: int = 0,
    used: tuple[int, ...] = (),
    before: Kind = Kind.COMBINE,
    shared: bool = False,
    finished: bool = False,
) -> bytes:
    """Identities of the tensors from which an operator's result is computed.

    `used`: the experts that a combine sums; `shared`: the combine adds the shared expert, or the MLP is one; `before`: the last
    operator of the previous layer; `finished`: norms come between router and shared expert, and after the sum of the experts.
    """
    earlier = result_id(before, (layers if kind == Kind.HEAD else layer) - 1)
    attended, common = result_id(Kind.ATTENTION, layer), result_id(Kind.MLP, layer)
    producers = {
        Kind.EMBED: (),
        Kind.ATTENTION: (earlier if layer > 0 else result_id(Kind.EMBED),),
        Kind.ROUTER: (attended,),
        Kind.MLP: (result_id(Kind.ROUTER, layer) if shared and not finished else attended,),
        Kind.DISPATCH: (result_id(Kind.ROUTER, layer),),
        Kind.EXPERT: (result_id(Kind.DISPATCH, layer),),
        Kind.COMBINE: (
            *(() if finished else (attended,)),
            result_id(Kind.ROUTER, layer),
            *((common,) if shared and not finished else ()),
            *(result_id(Kind.EXPERT, layer, e) for e in used),
        ),
        Kind.NORM: (attended, common, result_id(Kind.COMBINE, layer)),
        Kind.HEAD: (earlier,),
        Kind.SAMPLE: (result_id(Kind.HEAD),),
    }[kind]
    weights = () if kind in WEIGHTLESS else (weight_id(kind, layer, expert),)
    return probes.pack_sources(*producers, *weights)
