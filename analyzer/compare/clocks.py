"""Compares the CPU clocks of two sides, and selects runs at equal clocks; sides without such: equal_heat.py."""

import numpy as np

from analyzer.compare.environment import Difference
from analyzer.compare.metrics import CLOCKS, FREQUENCY, SAME_CLOCK
from analyzer.compare.results import Result
from analyzer.compare.verdicts import FEWEST

APART = 1e3
Words = list[tuple[str, str]]
Clocks = dict[str, np.ndarray]
"""Name of a policy → its mean frequency in decode, MHz, by run; NaN where a run has none."""


def clocks_of_runs(runs: list[Result]) -> Clocks:
    """Each policy's clock in every run."""
    rows = [run.metrics[(run.metrics["family"] == CLOCKS) & (run.metrics["metric"] == FREQUENCY)] for run in runs]
    means = [mine.set_index("type")["value"] for mine in rows]
    names = dict.fromkeys(str(name) for mean in means for name in mean.index)
    return {name: np.array([mean.get(name, np.nan) for mean in means], np.float64) for name in names}


def at_equal_clocks(base: list[Result], cand: list[Result]) -> tuple[list[Result], list[Result], list[Difference], Words]:
    """(base, cand, differences, sentences): if clocks differ, only runs with a partner at equal clocks, if there are enough."""
    sides = clocks_of_runs(base), clocks_of_runs(cand)
    odd = [name for name in sides[0] if name in sides[1] and medians_differ(sides[0][name], sides[1][name])]
    if not odd:
        return base, cand, [], []
    unlike = [Difference(f"clock of {name}", clock_range(sides[0][name]), clock_range(sides[1][name]), True) for name in odd]
    rows, columns = equal_clock_pairs(*sides)
    if len(rows) < FEWEST:
        return base, cand, unlike, []
    counts = f"{len(rows)} runs of each ({len(base)} + {len(cand)}) with the same clocks"
    text = f"The sides ran at different clocks, so only {counts} were compared. This excludes the cost of a side's own heat."
    return [base[i] for i in rows], [cand[i] for i in columns], unlike, [("warn", text)]


def medians_differ(base: np.ndarray, cand: np.ndarray) -> bool:
    """Whether the medians of two sides differ."""
    return bool(abs(np.log(np.nanmedian(cand) / np.nanmedian(base))) > SAME_CLOCK)


def equal_clock_pairs(base: Clocks, cand: Clocks) -> tuple[list[int], list[int]]:
    """(base runs, candidate runs): the largest number of pairs with equal clocks, each side in order."""
    from scipy.optimize import linear_sum_assignment  # half a second, which few comparisons need

    shared = [name for name in base if name in cand]
    logs = [np.log(np.stack([side[name] for name in shared], axis=1)) for side in (base, cand)]
    distance = np.nan_to_num(np.abs(logs[0][:, None] - logs[1][None]).max(axis=2), nan=APART)
    cost = np.where(distance > SAME_CLOCK, APART, distance)
    rows, columns = linear_sum_assignment(cost)
    close = cost[rows, columns] <= SAME_CLOCK
    return sorted(rows[close].tolist()), sorted(columns[close].tolist())


def clock_range(values: np.ndarray) -> str:
    """A side's clock as text."""
    return f"{np.nanmedian(values) / 1e3:.2f} GHz"
