"""The ProfDAG diff of a comparison: a card per layer, layers with equal changes on one card, operators coloured by change."""

import math
from collections.abc import Hashable
from typing import Any

import networkx as nx

from views.profdag.layout import HEIGHT, TOP, WIDTH, Layout, lay_out
from views.report.sections import Block

Node = dict[str, Any]
LEAST_STRENGTH, MOST_STRENGTH = 14, 48
MOST_CARDS, MARGIN = 200, 8
COLOURED = ("slower", "faster")


def as_graph(diff: dict[str, Any]) -> nx.DiGraph:
    """The document's nodes and edges as a graph for views/profdag/layout.py."""
    graph = nx.DiGraph()
    for number, node in enumerate(diff["nodes"]):
        graph.add_node(str(number), role="op", type=node["type"], layer=node["layer"], order=number)
    graph.add_edges_from((str(a), str(b)) for a, b in diff["edges"])
    return graph


def change_graph(diff: dict[str, Any]) -> Block:
    """The block `graph` of the report."""
    graph = as_graph(diff)
    layout = lay_out(graph)
    members: dict[int, list[int]] = {}
    for name, block in layout.block.items():
        members.setdefault(block, []).append(int(name))
    alike: dict[Hashable, list[int]] = {}
    for block, numbers in members.items():
        key = tuple((diff["nodes"][n]["type"], shown_verdict(diff["nodes"][n])) for n in sorted(numbers))
        alike.setdefault(key, []).append(block)
    most = max((abs(extra_ms(node)) for node in diff["nodes"] if node["verdict"] in COLOURED), default=0.0)
    cards = [card(graph, layout, [sorted(members[b]) for b in blocks], blocks, diff["nodes"], most) for blocks in alike.values()]
    return {
        "kind": "graph",
        "title": f"Operators of a {diff['phase']} step",
        "note": "A card is a layer, or all layers whose operators changed alike, their times added up; execution goes downward. "
        "Edges between cards are omitted. Coloured is only what the verdicts say, the stronger the more time it is.",
        "cards": cards[:MOST_CARDS],
        "left": max(0, len(cards) - MOST_CARDS),
    }


def shown_verdict(node: Node) -> str:
    """The verdict shown: operators without a certain change look the same."""
    return node["verdict"] if node["verdict"] in (*COLOURED, "appeared", "vanished", "changed") else ""


def extra_ms(node: Node) -> float:
    """The candidate's additional ms per step."""
    return (node["cand"] or 0.0) - (node["base"] or 0.0)


def card(graph: nx.DiGraph, layout: Layout, layers: list[list[int]], blocks: list[int], nodes: list[Node], most: float) -> Block:
    """One card: the positions of the first layer, times summed over the layers."""
    block = layout.blocks[blocks[0]]
    drawn_nodes = []
    for i, number in enumerate(layers[0]):
        x, y = layout.centre[str(number)]
        drawn_nodes.append(
            {"x": round(x, 1), "y": round(y, 1), **merged_operator([nodes[numbers[i]] for numbers in layers], most)}
        )
    inside = {str(number): layout.centre[str(number)] for number in layers[0]}
    edges = [[*inside[a], *inside[b]] for a, b in graph.edges if a in inside and b in inside]
    lines = [[round(x1, 1), round(y1 + HEIGHT / 2, 1), round(x2, 1), round(y2 - HEIGHT / 2, 1)] for x1, y1, x2, y2 in edges]
    size = {
        "top": TOP - MARGIN,
        "width": round(block.width),
        "height": round(block.height) - TOP + MARGIN,
        "node": [WIDTH, HEIGHT],
    }
    return {"title": card_title([layout.blocks[b].title for b in blocks]), "nodes": drawn_nodes, "edges": lines, **size}


def card_title(names: list[str]) -> str:
    """A card's title: layer 3; layers 0, 2-15 (15)."""
    if len(names) == 1:
        return names[0]
    numbers = [int(name.removeprefix("layer ")) for name in names if name.startswith("layer ")]
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [f"{low}-{high}" if high > low else str(low) for low, high in ranges]
    parts += [name for name in names if not name.startswith("layer ")]
    return f"layers {', '.join(parts)} ({len(names)})"


def known_total(times: list[float | None]) -> float | None:
    """The sum of the known times; None without any."""
    values = [ms for ms in times if ms is not None]
    return sum(values) if values else None


def merged_operator(same: list[Node], most: float) -> Node:
    """One drawn node for the same operator of several layers."""
    first = same[0]
    base, cand = (known_total([node[side] for node in same]) for side in ("base", "cand"))
    verdict, moved = shown_verdict(first), sum(map(extra_ms, same)) / len(same)
    strength = 0
    if verdict in COLOURED and most:
        strength = round(LEAST_STRENGTH + (MOST_STRENGTH - LEAST_STRENGTH) * math.sqrt(min(1.0, abs(moved) / most)))
    change = f"{100 * (cand / base - 1):+.1f} %" if base and cand is not None else verdict
    times = " → ".join("-" if ms is None else f"{ms:.4f}" for ms in (base, cand)) + " ms per step"
    times += ", at the base's pace" if first["paced"] else ""
    about = [("operator", first["type"]), ("name", first["name"]), ("verdict", first["verdict"] or "not compared")]
    about += [("base → candidate", times), ("change", change), ("was", first["was"]), ("dims", first["shape"])]
    about += [("backend", first["backend"]), ("layers", str(len(same)) if len(same) > 1 else "")]
    if first["alike"] > 1:
        about.append(("shares its figures with", f"{first['alike'] - 1} more of its type and dims in the layer"))
    second = change if verdict else "" if cand is None else f"{cand:.4f} ms"
    return {
        "type": first["type"],
        "second": second,
        "verdict": verdict,
        "strength": strength,
        "about": [[name, text] for name, text in about if text],
    }
