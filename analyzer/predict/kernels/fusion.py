"""Detects whether a backend fuses two operators: by time, T(a) + T(b) - T(ab) > 0.5·min(T(a), T(b)), and by its own report."""

from collections.abc import Iterable
from dataclasses import dataclass

from analyzer.predict.kernels import graphs
from analyzer.predict.kernels.backends import Backend

SHARE = 0.5
"""nn-Meter's threshold: share of the shorter operator's time that fusion has to save."""
APART = ("Sigmoid", "Tanh")
"""Operators that no backend fuses: the time that a pair of them saves is the fixed overhead of a run."""


@dataclass(frozen=True)
class Verdict:
    """One test case. `outputs`: one (the pair's last) | many (also the first operator's result).

    `fixed`: the fixed part of each of the three times.
    """

    first: str
    second: str
    outputs: str
    first_time: float
    second_time: float
    pair_time: float
    by_nodes: bool
    fixed: float = 0.0

    @property
    def saved(self) -> float:
        """The saved share of the shorter operator's time."""
        vanished = self.first_time + self.second_time - self.pair_time - self.fixed
        return vanished / max(min(self.first_time, self.second_time) - self.fixed, self.pair_time * 1e-3)

    @property
    def by_time(self) -> bool:
        """Whether they fuse by nn-Meter's criterion."""
        return self.saved > SHARE


def fixed_saving(backend: Backend, shape: graphs.Shape, many: bool = False) -> float:
    """The saving of a pair over its parts from being one run: its input is transferred once."""
    links = graphs.chain(list(APART), shape)
    first, second, pair = backend.times(
        [graphs.chain_model(links[:1]), graphs.chain_model(links[1:]), graphs.chain_model(links, many)]
    )
    return first + second - pair


def detect_fusion(
    backend: Backend, first: str, second: str, shape: graphs.Shape, many: bool = False, fixed_time: float = 0.0
) -> Verdict:
    """Run a, b and ab; `fixed_time`: the result of `fixed`."""
    links = graphs.chain([first, second], shape)
    pair = graphs.chain_model(links, many)
    first_time, second_time, pair_time = backend.times([graphs.chain_model(links[:1]), graphs.chain_model(links[1:]), pair])
    names = {graphs.node_name(i, name) for i, name in enumerate((first, second))}
    fused = not names <= backend.nodes(pair)
    return Verdict(first, second, "many" if many else "one", first_time, second_time, pair_time, fused, fixed_time)


def fusing_pairs(verdicts: Iterable[Verdict]) -> set[tuple[str, str]]:
    """Pairs that fuse if only the last output is requested, according to the backend's nodes."""
    return {(v.first, v.second) for v in verdicts if v.outputs == "one" and v.by_nodes}


def split_chain(links: list[graphs.Link], fused: set[tuple[str, str]]) -> list[list[graphs.Link]]:
    """A chain split into kernels: an operator joins the previous kernel if the pair fuses, at most once per kernel."""
    kernels: list[list[graphs.Link]] = []
    for link in links:
        last = kernels[-1] if kernels else []
        if len(last) == 1 and (last[0][0], link[0]) in fused:
            last.append(link)
        else:
            kernels.append([link])
    return kernels


def kernel_name(kernel: list[graphs.Link]) -> str:
    """`MatMul+Add`."""
    return "+".join(name for name, _ in kernel)
