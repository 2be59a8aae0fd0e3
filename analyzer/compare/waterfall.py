"""The parts of a step's difference, which add up exactly to the whole."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

SHOWN = 8
STEP = "step"


@dataclass(frozen=True)
class WaterfallPart:
    """One part of a step: ms per step on both sides (means over runs); `delta` = cand - base."""

    name: str
    base: float
    cand: float

    @property
    def delta(self) -> float:
        """The candidate's additional ms per step."""
        return self.cand - self.base


@dataclass(frozen=True)
class Waterfall:
    """A phase's mean step and its parts: sum of the parts' deltas = delta of the step. The last part is the residual."""

    phase: str
    step: WaterfallPart
    parts: list[WaterfallPart]


def phase_waterfall(dims: pd.DataFrame, base: np.ndarray, cand: np.ndarray, phase: str) -> Waterfall | None:
    """The parts of a phase's step from `base` and `cand`, means [runs, metrics]; a part missing in a run counts as 0.

    Operators are grouped by type and backend; those with the smallest changes form one part.
    """
    has = (dims["phase"] == phase).to_numpy() & dims["family"].isin(["operator", "closure"]).to_numpy()
    columns = np.flatnonzero(has)
    of_phase = dims.iloc[columns]
    present = [side[np.isfinite(side[:, columns]).any(axis=1)][:, columns] for side in (base, cand)]
    if not len(columns) or not all(len(side) for side in present):
        return None
    means = [np.nan_to_num(side).mean(axis=0) for side in present]
    suffix = (" on " + of_phase["backend"]).where(of_phase["backend"] != "", "")
    name = of_phase["metric"].where(of_phase["family"] == "closure", of_phase["type"] + suffix)
    sums = pd.DataFrame({"base": means[0], "cand": means[1]}).groupby(name.to_numpy()).sum()
    step = WaterfallPart(STEP, *sums.loc[STEP]) if STEP in sums.index else None
    if step is None:
        return None
    others = sums.drop(index=[STEP, "residual"], errors="ignore")
    others = others.loc[(others["cand"] - others["base"]).abs().sort_values(ascending=False).index]
    parts = [WaterfallPart(str(part), row["base"], row["cand"]) for part, row in others.head(SHOWN).iterrows()]
    if len(others) > SHOWN:
        parts.append(WaterfallPart("all others", *others.iloc[SHOWN:].sum()))
    explained = [sum(getattr(part, side) for part in parts) for side in ("base", "cand")]
    return Waterfall(phase, step, [*parts, WaterfallPart("residual", step.base - explained[0], step.cand - explained[1])])
