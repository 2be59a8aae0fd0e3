"""The longest chain of dependent operators by duration, which more threads cannot shorten."""

import networkx as nx


def critical_path(graph: nx.DiGraph, order: list[str]) -> tuple[list[str], int]:
    """(nodes from first to last, ns) of the longest chain by duration; `order` has the nodes in topological order."""
    spent: dict[str, int] = {}
    before: dict[str, str | None] = {}
    for node in order:
        makers = [above for above in graph.predecessors(node) if above in spent]
        best = max(makers, key=spent.__getitem__, default=None)
        before[node] = best
        spent[node] = int(graph.nodes[node].get("duration_ns") or 0) + (spent[best] if best is not None else 0)
    last = max(spent, key=spent.__getitem__, default=None)
    total, path = spent[last] if last is not None else 0, list[str]()
    while last is not None:
        path.append(last)
        last = before[last]
    return path[::-1], total
