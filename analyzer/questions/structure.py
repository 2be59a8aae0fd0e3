"""The structure of ProfDAGs: views resolved, equal layers folded into one, differences between two models."""

import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import networkx as nx

LAYER_IN_NAME = re.compile(r"-\d+(?=$| )|(?<=blk\.)\d+|(?<=_l)\d+(?=$| )|\.\d+")
SUMMED = ("duration_ns", "busy_ns", "wait_ns", "maj_flt", "min_flt", "flops", "read_bytes", "written_bytes")


def without_views(graph: nx.DiGraph) -> nx.DiGraph:
    """The graph without views: a reader of a view reads from the producers of the view's memory."""
    plain = graph.copy()
    for node, role in list(graph.nodes(data="role")):
        if role == "view":
            makers, readers = list(plain.predecessors(node)), list(plain.successors(node))
            plain.add_edges_from(((a, b) for a in makers for b in readers), kind="data")
            plain.remove_node(node)
    return plain


def operator_nodes(graph: nx.DiGraph) -> list[str]:
    """The operator nodes in execution order."""
    nodes = [(values["order"], node) for node, values in graph.nodes(data=True) if values["role"] == "op"]
    return [node for _, node in sorted(nodes)]


def layers_of(graph: nx.DiGraph) -> dict[str, int]:
    """The layer of each operator; an operator without one in its name belongs to the surrounding layer, -1 outside of all."""
    order = operator_nodes(graph)
    declared = [graph.nodes[node]["layer"] for node in order]
    last = {layer: i for i, layer in enumerate(declared)}
    answer, inside = {}, -1
    for i, (node, layer) in enumerate(zip(order, declared, strict=True)):
        if layer >= 0:
            inside = layer
        elif inside >= 0 and last[inside] < i:
            inside = -1
        answer[node] = inside
    return answer


@dataclass(frozen=True)
class Block:
    """Consecutive operators of one layer (-1: none), and the number of equal layers that they represent."""

    layer: int
    nodes: tuple[str, ...]
    repeats: tuple[tuple[str, ...], ...]


def layer_blocks(graph: nx.DiGraph) -> list[Block]:
    """The operators in order, split by layer; a layer equal to the previous one is folded into it."""
    order, layer = operator_nodes(graph), layers_of(graph)
    runs: list[tuple[int, list[str]]] = []
    for node in order:
        if not runs or runs[-1][0] != layer[node]:
            runs.append((layer[node], []))
        runs[-1][1].append(node)
    answer: list[Block] = []
    for number, nodes in runs:
        before = answer[-1] if answer else None
        if before and number >= 0 and before.layer >= 0 and signature(graph, before.nodes) == signature(graph, tuple(nodes)):
            answer[-1] = Block(before.layer, before.nodes, (*before.repeats, tuple(nodes)))
        else:
            answer.append(Block(number, tuple(nodes), (tuple(nodes),)))
    return answer


def signature(graph: nx.DiGraph, nodes: tuple[str, ...]) -> Hashable:
    """The key by which layers are equal: types and shapes in order, and the edges within the layer."""
    place = {node: i for i, node in enumerate(nodes)}
    kinds = tuple((graph.nodes[node]["type"], graph.nodes[node]["shape"]) for node in nodes)
    edges = frozenset((place[a], place[b]) for a, b in graph.edges(nodes) if a in place and b in place)
    return kinds, edges


def fold_layers(graph: nx.DiGraph) -> nx.DiGraph:
    """The graph with equal layers folded: an operator's measures are the sums over the layers, whose number is `layers`.

    Edges from one such layer to the next are of kind "next layer".
    """
    plain = without_views(graph)
    stands = {node: block.nodes[i] for block in layer_blocks(plain) for nodes in block.repeats for i, node in enumerate(nodes)}
    result = nx.DiGraph(**graph.graph)
    for node, first in stands.items():
        values = plain.nodes[node]
        if first not in result:
            result.add_node(first, **{**values, **dict.fromkeys(SUMMED, 0), "layers": 0, "name": name_stem(values["name"])})
        node_sums = result.nodes[first]
        node_sums["layers"] += 1
        for name in SUMMED:
            node_sums[name] += values.get(name, 0)
    constants: dict[tuple[str, str, tuple[str, ...]], str] = {}
    for node, values in plain.nodes(data=True):
        if values["role"] == "constant":
            readers = tuple(sorted({stands[b] for b in plain.successors(node)}))
            key = name_stem(values["name"]), values["shape"], readers
            constants.setdefault(key, node)
            stands[node] = constants[key]
            result.add_node(stands[node], **{**values, "name": key[0], "layers": 1})
    for a, b, kind in plain.edges(data="kind"):
        source, target = stands[a], stands[b]
        backward = result.nodes[source]["order"] >= result.nodes[target]["order"] and result.nodes[source]["role"] == "op"
        if not result.has_edge(source, target):
            result.add_edge(source, target, kind="next layer" if backward else kind)
    return result


def name_stem(name: str) -> str:
    """A tensor's name without its layer number: attn_norm-3 → attn_norm, blk.3.attn_q.weight → blk.*.attn_q.weight."""
    return LAYER_IN_NAME.sub(lambda match: "*" if match.group().isdigit() else "", name)


@dataclass(frozen=True)
class Difference:
    """Operators at one position that only one of two models has: `sign` "-" for the first, "+" for the second."""

    sign: str
    where: str
    type: str
    name: str
    layers: int


def model_difference(first: nx.DiGraph, second: nx.DiGraph) -> dict[str, Any]:
    """Differences of two models: operators by position (after folding), counts per type in a typical layer, edges by type."""
    left, right = layer_blocks(without_views(first)), layer_blocks(without_views(second))
    differences: list[Difference] = []
    matcher = SequenceMatcher(None, [labels(first, block) for block in left], [labels(second, block) for block in right], False)
    for tag, i0, i1, j0, j1 in matcher.get_opcodes():
        if tag == "equal":
            continue
        for i in range(max(i1 - i0, j1 - j0)):
            left_block = left[i0 + i] if i0 + i < i1 else None
            right_block = right[j0 + i] if j0 + i < j1 else None
            differences += block_difference(first, left_block, second, right_block)
    typical = [max(side, key=lambda block: (block.layer >= 0) * len(block.repeats)) if side else None for side in (left, right)]
    counts = [
        Counter(graph.nodes[node]["type"] for node in block.nodes) if block else Counter()
        for graph, block in zip((first, second), typical, strict=True)
    ]
    return {
        "operators": differences,
        "layer_types": differing_numbers(*counts),
        "edges": edge_types(without_views(first), without_views(second)),
        "layers": [sum(len(block.repeats) for block in side if block.layer >= 0) for side in (left, right)],
    }


def labels(graph: nx.DiGraph, block: Block) -> tuple[str, ...]:
    """The types of a block's operators, for aligning blocks; layers align only with layers."""
    return ("layer" if block.layer >= 0 else "", *(graph.nodes[node]["type"] for node in block.nodes))


def block_difference(first: nx.DiGraph, left: Block | None, second: nx.DiGraph, right: Block | None) -> list[Difference]:
    """The operators in which two blocks differ, by their types in order."""
    sides = [(first, left, "-"), (second, right, "+")]
    kinds = [[graph.nodes[node]["type"] for node in (block.nodes if block else ())] for graph, block, _ in sides]
    answer = []
    for tag, *spans in SequenceMatcher(None, kinds[0], kinds[1], False).get_opcodes():
        if tag == "equal":
            continue
        for (graph, block, sign), (low, high) in zip(sides, (spans[:2], spans[2:]), strict=True):
            for node in block.nodes[low:high] if block else ():
                values, where = graph.nodes[node], "layer" if block and block.layer >= 0 else "outside layers"
                answer.append(
                    Difference(sign, where, values["type"], name_stem(values["name"]), len(block.repeats) if block else 0)
                )
    return answer


def edge_types(first: nx.DiGraph, second: nx.DiGraph) -> dict[str, tuple[int, int]]:
    """ "MUL_MAT → ADD": the number of such edges in each graph, if the numbers differ."""
    counts = [
        Counter(
            f"{graph.nodes[a]['type']} → {graph.nodes[b]['type']}"
            for a, b in graph.edges
            if graph.nodes[a]["role"] == graph.nodes[b]["role"] == "op"
        )
        for graph in (first, second)
    ]
    return differing_numbers(*counts)


def differing_numbers(first: Counter[str], second: Counter[str]) -> dict[str, tuple[int, int]]:
    """The numbers of both sides where they differ, by key."""
    return {key: (first[key], second[key]) for key in sorted(first | second) if first[key] != second[key]}
