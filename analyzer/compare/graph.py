"""The ProfDAGs of two sides as one graph: every operator of a decode step, with its change."""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pandas as pd

from analyzer.compare.metrics import RunTables, described_operators
from analyzer.compare.verdicts import APPEARED, FASTER, SLOWER, VANISHED
from analyzer.questions.profdag import build_profdag, decode_steps
from analyzer.questions.structure import without_views

PHASE = "decode"
IDENTITY = ("graph", "layer", "type", "shape", "backend")
"""The columns that identify operators, as in metrics.DIMS; all experts count as one."""
CHANGED = "changed"
MOST_NODES = 20_000


@dataclass(frozen=True)
class Skeleton:
    """The operators of one run's middle decode step in order, as rows (*IDENTITY, name), and the edges between them."""

    nodes: list[tuple[Any, ...]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def packed(self) -> bytes:
        """The skeleton as bytes, for a stored result."""
        return zlib.compress(json.dumps([self.nodes, self.edges], separators=(",", ":")).encode())


def unpack_skeleton(data: bytes | None) -> Skeleton:
    """A stored skeleton; an empty one for None."""
    nodes, edges = json.loads(zlib.decompress(data)) if data else ([], [])
    return Skeleton([tuple(node) for node in nodes], [(int(a), int(b)) for a, b in edges])


def skeleton_of(facts: RunTables) -> Skeleton:
    """The skeleton of a recording; empty if no decode step has operators, or if there are too many to show."""
    steps = decode_steps(facts.tables)
    if not steps:
        return Skeleton()
    step = steps[len(steps) // 2]
    frame = described_operators(facts, np.zeros(len(facts.tables["operators"])))
    frame = frame[frame["token_id"] == step].sort_values("order")
    if len(frame) > MOST_NODES:
        return Skeleton()
    graph = without_views(build_profdag(facts.tables, step, time=facts.time))
    number = {f"op {order}": i for i, order in enumerate(frame["order"].tolist())}
    edges = [(number[a], number[b]) for a, b in graph.edges if a in number and b in number]
    rows = zip(*(frame[name].tolist() for name in (*IDENTITY, "name")), strict=True)
    return Skeleton(list(rows), edges)


def merge_skeletons(base: Skeleton, cand: Skeleton, judged: pd.DataFrame) -> dict[str, Any] | None:
    """Both sides as one graph, JSON-able: `nodes` in execution order and `edges` [from, to]; None without operators.

    A node has type, name, layer, shape, backend, verdict (of verdicts, or changed: other dims or another backend),
    `base` and `cand` (ms per step, null where unknown; `paced`: cand is at the base's pace) and `alike` (operators of its layer,
    type and shape: they share figures).
    """
    if not base.nodes or not cand.nodes:
        return None
    figures = figures_by_identity(judged)
    nodes: list[dict[str, Any]] = []
    numbers: tuple[dict[int, int], dict[int, int]] = {}, {}
    alike = [Counter(node[: len(IDENTITY)] for node in side.nodes) for side in (base, cand)]
    for i, j in align_operators(base, cand):
        for node_of, row in zip(numbers, (i, j), strict=True):
            if row is not None:
                node_of[row] = len(nodes)
        side, row, count = (cand, j, alike[1]) if j is not None else (base, i, alike[0])
        node = side.nodes[row if row is not None else 0]
        old = base.nodes[i] if i is not None else None
        facts = dict(zip((*IDENTITY, "name"), node, strict=True)) | {"alike": count[node[: len(IDENTITY)]]}
        nodes.append(facts | change_of(old, node if j is not None else None, figures))
    edges = {(node_of[a], node_of[b]): None for node_of, side in zip(numbers, (base, cand), strict=True) for a, b in side.edges}
    return {"phase": PHASE, "nodes": nodes, "edges": [list(edge) for edge in edges]}


def align_operators(base: Skeleton, cand: Skeleton) -> Iterator[tuple[int | None, int | None]]:
    """Pairs of corresponding operators, matched by layer and type in order; None if only the other side has one."""
    left, right = ([(node[1], node[2]) for node in side.nodes] for side in (base, cand))
    for tag, i0, i1, j0, j1 in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(range(i0, i1), range(j0, j1), strict=True)
        else:
            yield from ((i, None) for i in range(i0, i1))
            yield from ((None, j) for j in range(j0, j1))


def figures_by_identity(judged: pd.DataFrame) -> dict[tuple[Any, ...], dict[str, Any]]:
    """IDENTITY → base and cand (ms per step, summed over experts, cand at the base's pace if known) and the verdict of
    the row with the largest change."""
    rows = judged[(judged["family"] == "operator") & (judged["phase"] == PHASE)]
    rows = rows.assign(cand=rows["at_pace"].fillna(rows["cand"]))
    moved = (rows["cand"].fillna(0) - rows["base"].fillna(0)).abs()
    rows = rows.assign(weight=moved + 1e9 * rows["verdict"].isin([SLOWER, FASTER]))
    rows = rows.sort_values("weight", ascending=False, kind="stable")
    pooled = rows.groupby(list(IDENTITY), sort=False).agg(
        base=("base", "sum"), cand=("cand", "sum"), verdict=("verdict", "first"), paced=("paced", "any")
    )
    return {tuple(key): row for key, row in zip(pooled.index.tolist(), pooled.to_dict("records"), strict=True)}


def change_of(
    old: tuple[Any, ...] | None, new: tuple[Any, ...] | None, figures: dict[tuple[Any, ...], dict[str, Any]]
) -> dict[str, Any]:
    """verdict, base, cand, and `was` (dims and backend in the base, if they changed) of an operator."""
    was, now = (figures.get(node[: len(IDENTITY)], {}) if node else {} for node in (old, new))
    facts = {"base": was.get("base"), "cand": now.get("cand"), "paced": bool(now.get("paced")), "was": ""}
    if old is None or new is None:
        return facts | {"verdict": APPEARED if old is None else VANISHED}
    if old[: len(IDENTITY)] != new[: len(IDENTITY)]:
        parts = [str(a) for a, b in zip(old[3 : len(IDENTITY)], new[3 : len(IDENTITY)], strict=True) if a != b]
        return facts | {"verdict": CHANGED, "was": " ".join(parts).strip() or str(old[0])}
    return facts | {"verdict": now.get("verdict", "")}
