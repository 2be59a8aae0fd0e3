"""Positions of a ProfDAG's nodes within their block, one block per layer, in execution order downward; O(nodes + edges).

Blocks show the model's repetition: layers that run the same operators in the same order share a class, which the page
folds into one card. The page places the blocks, because positions change as cards open.
Constants and other sources not made by the step are dots on every consumer, one copy each.
"""

from dataclasses import dataclass
from typing import Any

import networkx as nx

from analyzer.questions.structure import name_stem

WIDTH, HEIGHT = 168, 40
COLUMN, ROW, TOP = 188, 66, 46
PER_ROW = 4
INPUT, OUTPUT = "input", "output"


@dataclass
class Block:
    """One layer of the model (or what comes before or after all): its class of identical layers, and its nodes."""

    title: str
    same_as: str
    rows: list[list[str]]

    @property
    def width(self) -> float:
        """The width of its widest row."""
        return max(map(len, self.rows)) * COLUMN + 24

    @property
    def height(self) -> float:
        """The height of its rows."""
        return TOP + len(self.rows) * ROW


@dataclass
class Layout:
    """Centres of nodes and dots of constants within their blocks, and the blocks."""

    centre: dict[str, tuple[float, float]]
    block: dict[str, int]
    dots: list[tuple[str, str, float, float]]
    blocks: list[Block]


def drawn_operators(graph: nx.DiGraph) -> list[str]:
    """Operators in execution order, each after the views it reads."""
    order: list[str] = []
    placed = set[str]()
    operators = (node for node, data in graph.nodes(data=True) if data["role"] == "op")
    for operator in sorted(operators, key=lambda n: graph.nodes[n]["order"]):
        stack = [operator]
        while stack:
            node = stack[-1]
            above = [p for p in graph.predecessors(node) if graph.nodes[p]["role"] == "view" and p not in placed]
            if above and len(stack) <= len(graph):
                stack.extend(above[:1])
                continue
            stack.pop()
            if node not in placed:
                placed.add(node)
                order.append(node)
    return order


def block_titles(graph: nx.DiGraph, order: list[str]) -> list[str]:
    """The block of every node: its layer; a node without one belongs to the surrounding layer, or before or after all of them."""
    layers = [int(graph.nodes[node]["layer"]) for node in order]
    last = max((i for i, layer in enumerate(layers) if layer >= 0), default=-1)
    titles, current = [], INPUT
    for i, layer in enumerate(layers):
        current = f"layer {layer}" if layer >= 0 else OUTPUT if i > last >= 0 else current
        titles.append(current)
    return titles


def block_classes(graph: nx.DiGraph, members: dict[str, list[str]]) -> dict[str, str]:
    """Title → title of the first block that runs the same operator types in the same order."""
    first: dict[tuple[str, ...], str] = {}
    return {title: first.setdefault(tuple(graph.nodes[n]["type"] for n in nodes), title) for title, nodes in members.items()}


def rows_of(graph: nx.DiGraph, nodes: list[str]) -> list[list[str]]:
    """A block's nodes in rows: below all nodes of the block that they read, else next to or below the previous node."""
    row_of, rows, before = dict[str, int](), list[list[str]](), 0
    for node in nodes:
        above = [row_of[p] for p in graph.predecessors(node) if p in row_of]
        row = max(above) + 1 if above else before
        while row < len(rows) and len(rows[row]) >= PER_ROW:
            row += 1
        while len(rows) <= row:
            rows.append([])
        rows[row].append(node)
        row_of[node] = before = row
    return rows


def arrange_block(graph: nx.DiGraph, block: Block, centre: dict[str, tuple[float, float]]) -> None:
    """Place a block's nodes: in each row by the mean position of the nodes that they read, without overlap."""
    middle, inside = block.width / 2, set[str]()
    for depth, row in enumerate(block.rows):
        target_x = {}
        for node in row:
            xs = [centre[p][0] for p in graph.predecessors(node) if p in inside]
            target_x[node] = sum(xs) / len(xs) if xs else middle
        row.sort(key=target_x.__getitem__)
        inside.update(row)
        left = middle - (len(row) - 1) * COLUMN / 2
        for i, node in enumerate(row):
            centre[node] = (left + i * COLUMN, TOP + depth * ROW + HEIGHT / 2)


def dots_of(graph: nx.DiGraph, centre: dict[str, tuple[float, float]]) -> list[tuple[str, str, float, float]]:
    """(source, consumer, x, y) of every source that is not drawn as a node, along the consumer's upper edge."""
    dots = []
    for node, (x, y) in centre.items():
        sources = [p for p in graph.predecessors(node) if p not in centre]
        dots += [(source, node, x - WIDTH / 2 + 12 + 14 * i, y - HEIGHT / 2) for i, source in enumerate(sources)]
    return dots


def lay_out(graph: nx.DiGraph) -> Layout:
    """The layout of a ProfDAG from analyzer.questions.profdag."""
    order = drawn_operators(graph)
    members: dict[str, list[str]] = {}
    for node, title in zip(order, block_titles(graph, order), strict=True):
        members.setdefault(title, []).append(node)
    same = block_classes(graph, members)
    blocks = [Block(title, same[title], rows_of(graph, nodes)) for title, nodes in members.items()]
    centre: dict[str, tuple[float, float]] = {}
    number: dict[str, int] = {}
    for i, block in enumerate(blocks):
        arrange_block(graph, block, centre)
        number |= dict.fromkeys(members[block.title], i)
    return Layout(centre, number, dots_of(graph, centre), blocks)


KEYS = (
    *("role", "type", "name", "layer", "expert", "shape", "backend", "begin_ns", "duration_ns", "busy_ns", "wait_ns", "maj_flt"),
    *("gflops", "gbytes_per_s", "cycles", "load_ns", "causes"),
)
"""What travels of each node, where it is known."""


def page_data(graph: nx.DiGraph, layout: Layout, critical: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The page's data: nodes with positions in execution order, edges as pairs of numbers, dots as small nodes."""
    nodes: list[dict[str, Any]] = []
    index: dict[str, int] = {}
    for node, (x, y) in layout.centre.items():
        index[node] = len(nodes)
        fields = {key: value for key in KEYS if (value := graph.nodes[node].get(key)) is not None and value == value}
        short = name_stem(str(fields.get("name", "")))
        fields |= {"stem": short} if short != fields.get("name") else {}
        nodes.append({**fields, "x": x, "y": y, "block": layout.block[node], "critical": node in critical})
    edges = [[index[a], index[b]] for a, b in graph.edges() if a in index and b in index]
    dots = []
    for source, consumer, x, y in layout.dots:
        data = graph.nodes[source]
        fields = {"name": data["name"], "type": data["type"], "shape": data.get("shape", "")}
        dots.append({**fields, "of": index[consumer], "x": x, "y": y})
    blocks = [{"title": b.title, "same_as": b.same_as, "width": b.width, "height": b.height} for b in layout.blocks]
    return {"nodes": nodes, "edges": edges, "dots": dots, "blocks": blocks, "size": [WIDTH, HEIGHT]}
