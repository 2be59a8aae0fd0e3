"""Matches the operators of the Hexagon backend's batches to the ggml nodes that they compute, by order and addresses.

A batch names an operator by a number of the backend, which differs between versions; an operator may fuse several nodes.
It holds operators in the order of the graph's nodes, each with the address of its result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from analyzer.records.reading import Source
from analyzer.records.rows import decode_texts
from analyzer.tables.nodes import LLAMACPP, NEVER_RUN

FUSIONS = (
    ("CONCAT", "CPY", "SSM_CONV", "UNARY"),
    ("MUL_MAT", "MUL_MAT", "MUL_MAT"),
    ("MUL_MAT_ID", "MUL_MAT_ID", "MUL_MAT_ID"),
    ("RMS_NORM", "MUL", "UNARY"),
    ("MUL_MAT", "MUL_MAT"),
    ("MUL_MAT_ID", "MUL_MAT_ID"),
    ("MUL_MAT", "ADD"),
    ("RMS_NORM", "MUL"),
    ("GATED_DELTA_NET", "CPY"),
)
"""Nodes that versions of the backend make one operator of (`try_fuse` in ggml-hexagon.cpp)."""
LONGEST = max(map(len, FUSIONS))
BATCHES_TRIED = 4


@dataclass(frozen=True)
class Node:
    """A node of a graph, as last recorded."""

    type: str
    name: str
    tensor: int
    data: int


Group = tuple[Node, ...]
"""The nodes of one operator, in order; none where they are not known."""
Meaning = tuple[frozenset[str], bool]
"""A meaning of a number: the types of nodes, and whether there are several."""
Meanings = dict[int, set[Meaning]]
"""The meanings of each number where only one split matches."""


@dataclass(frozen=True)
class GivenGraph:
    """A graph passed to the backend, with the time and the nodes to compute, in order."""

    ts: int
    nodes: Group


def graphs_by_process(source: Source) -> dict[int, list[GivenGraph]]:
    """The graphs of each process, in time order."""
    rows, nodes = source.rows("hexagon_graph"), source.rows("hexagon_node")
    types = source.named(np.full(len(nodes), LLAMACPP), nodes["op"], "operators").to_pylist()
    names = decode_texts(nodes.records["name"]).tolist() if len(nodes) else []
    told = [Node(*node) for node in zip(types, names, nodes["tensor"].tolist(), nodes["data"].tolist(), strict=True)]
    handles, at = nodes["graph"], nodes["ts"]
    known: dict[tuple[int, int], Group] = {}
    answer: dict[int, list[GivenGraph]] = {}
    fields = (rows["ts"], rows["pid"], rows["graph"], rows["n_nodes"], rows["told"])
    for ts, pid, graph, count, is_told in zip(*(field.tolist() for field in fields), strict=True):
        if is_told:
            of_graph = (
                np.flatnonzero(handles[(first := int(np.searchsorted(at, ts))) : first + 2 * count] == graph)[:count] + first
            )
            known[pid, graph] = tuple(told[i] for i in of_graph.tolist() if told[i].type not in NEVER_RUN)
        answer.setdefault(pid, []).append(GivenGraph(ts, known.get((pid, graph), ())))
    return answer


def match_nodes(
    ts: np.ndarray, opcodes: np.ndarray, data: np.ndarray, begins: np.ndarray, given: Sequence[GivenGraph]
) -> list[Group]:
    """The nodes that each operator of a queue computes.

    `ts`, `opcodes` and `data`: send time, number and result address of each operator; `begins`: the first operator of each batch.
    A graph's operators are consecutive, also across batches, and sent after the graph began. A graph whose nodes do not match the
    operators of this batch or the next ones is skipped: it belongs to another queue or was not fully recorded.
    """
    sent, meant = np.stack((opcodes, data), axis=1), Meanings()
    _match_queue(ts, sent, begins, given, meant)  # fills `meant`: one graph may resolve what another leaves ambiguous
    return _match_queue(ts, sent, begins, given, meant)


def _match_queue(
    ts: np.ndarray, sent: np.ndarray, begins: np.ndarray, given: Sequence[GivenGraph], meant: Meanings
) -> list[Group]:
    answer: list[Group] = [()] * len(ts)
    at = 0
    last: dict[Group, tuple[np.ndarray, list[Group]]] = {}
    ends = np.searchsorted(ts, [graph.ts for graph in given[1:]])
    for graph, end in zip(given, [*ends.tolist(), len(ts)], strict=False):
        at = max(at, int(np.searchsorted(ts, graph.ts)))
        later = begins[np.searchsorted(begins, at, "right") :][:BATCHES_TRIED]
        for start in (at, *later.tolist()):
            before, groups = last.get(graph.nodes, (sent[:0], []))
            if not groups or not np.array_equal(sent[start : start + len(groups)], before):
                operators = sent[start : start + len(graph.nodes)].tolist()
                groups = cut_nodes(graph.nodes, operators, end - start, meant)
            if groups:
                at = start + len(groups)
                last[graph.nodes] = sent[start:at], groups
                answer[start:at] = groups
                break
    return answer


Cuts = list[dict[int, list[int]]]
"""For each operator: the possible ends (exclusive) of its nodes, and for each end the possible first nodes."""


def cut_nodes(nodes: Group, operators: Sequence[Sequence[int]], sent: int, meant: Meanings) -> list[Group]:
    """The nodes split into the groups that the first operators (number, address) compute; empty if they do not match.

    Among several matching splits, prefer one with as many operators as were sent before the next graph (the backend holds none
    back), then one in which each number has the same meaning everywhere, then the finest. Adds to `meant`.
    """
    ways = []
    for cuts in _possible_splits(nodes, [address for _, address in operators]):
        sure = _certain_meanings(nodes, operators, cuts)
        known = {opcode: meant.get(opcode, set()) | sure.get(opcode, set()) for opcode in (*meant, *sure)}
        ways.append((*_most_consistent(nodes, operators, cuts, known), sure))
    if not ways:
        return []
    _, groups, sure = min(ways, key=lambda way: (len(way[1]) != sent, way[0], -len(way[1])))
    for opcode, meanings in sure.items():
        meant.setdefault(opcode, set()).update(meanings)
    return groups


def _certain_meanings(nodes: Group, operators: Sequence[Sequence[int]], cuts: Cuts) -> Meanings:
    """The meaning of operator numbers for which only one group of nodes matches."""
    sure: Meanings = {}
    for (opcode, _), ends in zip(operators, cuts, strict=False):
        if len(ends) == 1 and len(starts := next(iter(ends.values()))) == 1:
            sure.setdefault(opcode, set()).add(_meaning(nodes[starts[0] : next(iter(ends))]))
    return sure


def _most_consistent(nodes: Group, operators: Sequence[Sequence[int]], cuts: Cuts, meant: Meanings) -> tuple[int, list[Group]]:
    """(number of operators that contradict the known meanings, groups) of the split with the fewest such operators."""
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for (opcode, _), ends in zip(operators, cuts, strict=False):
        known = meant.get(opcode)
        best.append(
            {
                end: min((best[-1][i][0] + (known is not None and _meaning(nodes[i:end]) not in known), i) for i in starts)
                for end, starts in ends.items()
            }
        )
    return best[-1][len(nodes)][0], _split_backwards(nodes, best)


def _meaning(group: Group) -> Meaning:
    return frozenset(node.type for node in group), len(group) > 1


def _possible_splits(nodes: Group, addresses: Sequence[int]) -> list[Cuts]:
    """Every way to split all nodes into groups that the first operators compute; one entry per possible number of operators."""
    answer: list[Cuts] = []
    cuts: Cuts = []
    reached = {0}
    for address in addresses:
        ends: dict[int, list[int]] = {}
        for i in sorted(reached):
            for n in _possible_lengths(nodes, i):
                if any(node.data == address for node in nodes[i : i + n]):
                    ends.setdefault(i + n, []).append(i)
        cuts.append(ends)
        reached = set(ends) - {len(nodes)}
        if len(nodes) in ends:
            answer.append(_that_arrive(cuts, len(nodes)))
        if not reached:
            break
    return answer


def _that_arrive(cuts: Cuts, end: int) -> Cuts:
    """`cuts` without the splits that do not reach the last node."""
    wanted = {end}
    answer: Cuts = []
    for ends in reversed(cuts):
        answer.append({at: ends[at] for at in wanted if at in ends})
        wanted = {i for starts in answer[-1].values() for i in starts}
    return answer[::-1]


def _split_backwards(nodes: Group, best: list[dict[int, tuple[int, int]]]) -> list[Group]:
    groups: list[Group] = []
    end = len(nodes)
    for ends in reversed(best[1:]):
        start = ends[end][1]
        groups.append(nodes[start:end])
        end = start
    return groups[::-1]


def _possible_lengths(nodes: Group, at: int) -> Iterator[int]:
    """The possible numbers of nodes, from this one on, that one operator computes."""
    if at < len(nodes):
        yield 1
        types = tuple(node.type for node in nodes[at : at + LONGEST])
        yield from (len(fused) for fused in FUSIONS if types[: len(fused)] == fused)
