"""Structural differences: operators, backends and dims that appeared or vanished, and drift of the routing."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from analyzer.compare.results import Result

ASPECTS = {
    "operator": ["type"],
    "operator on backend": ["type", "backend"],
    "subgraph on backend": ["graph", "backend"],
    "operator of dims": ["type", "shape"],
}


@dataclass(frozen=True)
class Change:
    """A feature that every run of one side has and no run of the other."""

    phase: str
    aspect: str
    what: str
    appeared: bool


@dataclass(frozen=True)
class Drift:
    """The change of a layer's distribution over experts: Jensen-Shannon distance (base 2, 0 same .. 1 disjoint).

    `usual` is the largest distance between two runs of the base; NaN with one run.
    """

    layer: int
    distance: float
    usual: float


def feature_changes(base: list[Result], cand: list[Result]) -> list[Change]:
    """Operators, backends and dims that vanished or appeared; those implied by a coarser change are omitted."""
    changed: list[Change] = []
    sides = [[run.metrics[run.metrics["family"] == "operator"] for run in side] for side in (base, cand)]
    sides = [[run for run in side if len(run)] for side in sides]
    if not all(sides):
        return []
    for phase, (aspect, names) in product(("prefill", "decode"), ASPECTS.items()):
        present = [[_present_features(run[run["phase"] == phase], names) for run in side] for side in sides]
        always = [set.intersection(*side) for side in present]
        ever = [set.union(*side) for side in present]
        for appeared, one_side, other_side in ((False, always[0], ever[1]), (True, always[1], ever[0])):
            new = [Change(phase, aspect, " ".join(what), appeared) for what in sorted(one_side - other_side)]
            changed_types = {c.what for c in changed if c.phase == phase and c.appeared == appeared and c.aspect == "operator"}
            changed += [c for c in new if aspect == "operator" or c.what.split(" ", 1)[0] not in changed_types]
    return changed


def _present_features(run: pd.DataFrame, names: list[str]) -> set[tuple[str, ...]]:
    """Distinct combinations of these columns' values, if all are known."""
    rows = run[names].drop_duplicates().itertuples(index=False, name=None)
    return {row for row in rows if all(row)}


def routing_drifts(base: list[Result], cand: list[Result]) -> list[Drift]:
    """Routing drift of every layer that both sides have."""
    left, right = ([_route_counts(run) for run in side if run.routes] for side in (base, cand))
    if not left or not right:
        return []
    width = 1 + max(max(expert for _, expert in counts.index) for counts in (*left, *right))
    drifts = []
    layers = sorted(set.intersection(*(set(counts.index.get_level_values(0)) for counts in (*left, *right))))
    for layer in layers:
        a, b = (np.array([_expert_distribution(counts, layer, width) for counts in side]) for side in (left, right))
        usual = max((js_distance(x, y) for i, x in enumerate(a) for y in a[:i]), default=np.nan)
        drifts.append(Drift(int(layer), js_distance(a.mean(axis=0), b.mean(axis=0)), float(usual)))
    return drifts


def _route_counts(run: Result) -> pd.Series:
    return pd.DataFrame(run.routes, columns=["layer", "expert", "n"]).groupby(["layer", "expert"])["n"].sum()


def _expert_distribution(counts: pd.Series, layer: int, width: int) -> np.ndarray:
    layer_counts = counts.loc[layer]
    shares = np.zeros(width)
    shares[layer_counts.index.to_numpy()] = layer_counts.to_numpy()
    return shares / max(shares.sum(), 1.0)


def js_distance(p: np.ndarray, q: np.ndarray) -> float:
    """Jensen-Shannon distance of two distributions: the root of the divergence in bits (J. Lin, 1991)."""
    middle = (p + q) / 2

    def entropy(x: np.ndarray) -> float:
        return float(-(x[x > 0] * np.log2(x[x > 0])).sum())

    return float(np.sqrt(max(0.0, entropy(middle) - (entropy(p) + entropy(q)) / 2)))
