"""Interpolation in log space over measured curves, y over x, one curve for each key.

A measured key uses its own curve. Between keys, one free dimension is interpolated linearly in its logarithm;
with several, the nearest curves are weighted by the inverse square of their distance in log space. Outside the measured range,
the outermost slope continues, limited to 0 (saturated kernel) to 1 (time independent of x) and to the best measured
value; the answer then has a warning. Below the range, products keep their value: it is that of reading their weights.
"""

from dataclasses import dataclass, field

import numpy as np

NEIGHBOURS = 4
"""Number of curves between which a missing key is interpolated."""

Key = tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """One measured row. `where`: file and line."""

    key: Key
    x: float
    y: float
    where: str


@dataclass(frozen=True)
class CurveValue:
    """An interpolated value with its sources and reasons for doubt. launch_s: time that no efficiency changes. of_roofline: the
    value is a share of the roofline, of computing and bandwidth alike; else an MFU.
    """

    value: float
    source: str
    warnings: tuple[str, ...] = ()
    launch_s: float = 0.0
    of_roofline: bool = False


@dataclass
class Curves:
    """All points of one kind of kernel. `names`: the key's names, then that of x. launch_s, of_roofline: as in `CurveValue`.

    steady: below the measured range, the value is that of its begin.
    """

    names: tuple[str, ...]
    points: list[Point]
    launch_s: float = 0.0
    of_roofline: bool = False
    steady: bool = False
    _curves: dict[Key, list[Point]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for point in sorted(self.points, key=lambda p: p.x):
            self._curves.setdefault(point.key, []).append(point)
        self._keys = np.log(np.array(list(self._curves), float).reshape(len(self._curves), -1))
        self._by_row = list(self._curves.values())
        self._best = max(point.y for point in self.points)

    def at(self, key: Key, x: float) -> CurveValue:
        """y at (key, x)."""
        if key in self._curves:
            value, source, beyond = _interpolate_log(self._curves[key], x, self.steady)
            return CurveValue(min(value, self._best), source, self._beyond_x(x, self._curves[key]) if beyond else ())
        chosen, weights = self._between(key)
        parts = [
            (_interpolate_log(self._by_row[row], x, self.steady), weight) for row, weight in zip(chosen, weights, strict=True)
        ]
        value = min(float(np.exp(sum(weight * np.log(part[0]) for part, weight in parts))), self._best)
        source = "; ".join(f"{weight:.0%} {part[1]}" for part, weight in parts)
        warnings = self._beyond_key(key)
        if all(part[2] for part, _ in parts):
            warnings += self._beyond_x(x, self._by_row[chosen[0]])
        return CurveValue(value, f"between measured shapes: {source}", warnings)

    def _between(self, key: Key) -> tuple[list[int], np.ndarray]:
        """(curves, their weights) for a key that was not measured."""
        target = np.log(key)
        if len(key) == 1:
            return self._bracket(float(target[0]))
        distance = np.sqrt(((self._keys - target) ** 2).sum(1))
        chosen = np.argsort(distance, kind="stable")[:NEIGHBOURS]
        weights = 1 / distance[chosen] ** 2
        return chosen.tolist(), weights / weights.sum()

    def _bracket(self, target: float) -> tuple[list[int], np.ndarray]:
        order = np.argsort(self._keys[:, 0])
        sorted_keys = self._keys[order, 0]
        above = int(np.searchsorted(sorted_keys, target))
        if above in (0, len(order)):
            return [int(order[min(above, len(order) - 1)])], np.ones(1)
        share = (target - sorted_keys[above - 1]) / (sorted_keys[above] - sorted_keys[above - 1])
        return [int(order[above - 1]), int(order[above])], np.array([1 - share, share])

    def _beyond_key(self, key: Key) -> tuple[str, ...]:
        low, high = np.exp(self._keys.min(0)), np.exp(self._keys.max(0))
        return tuple(
            f"{name} {value:.0f} is outside the measured {small:.0f} to {large:.0f}"
            for name, value, small, large in zip(self.names, key, low, high, strict=False)
            if not small * 0.999 <= value <= large * 1.001
        )

    def _beyond_x(self, x: float, curve: list[Point]) -> tuple[str, ...]:
        return (f"{self.names[-1]} {x:.4g} is outside the measured {curve[0].x:.4g} to {curve[-1].x:.4g}",)


def _interpolate_log(curve: list[Point], x: float, steady: bool) -> tuple[float, str, bool]:
    """(y, its rows, x is outside the curve): linear in log x and log y; outside as described for the module."""
    xs, ys = np.log([p.x for p in curve]), np.log([p.y for p in curve])
    value = float(np.exp(np.interp(np.log(x), xs, ys)))
    if len(curve) > 1 and not curve[0].x <= x <= curve[-1].x and not (steady and x < curve[0].x):
        a, b, end = (0, 1, 0) if x < curve[0].x else (-2, -1, -1)
        slope = float(np.clip((ys[b] - ys[a]) / (xs[b] - xs[a]), 0, 1))
        value *= float((x / curve[end].x) ** slope)
    above = min(int(np.searchsorted(xs, np.log(x) - 1e-12)), len(curve) - 1)
    below = above if x >= curve[above].x or above == 0 else above - 1
    beyond = not curve[0].x * 0.999 <= x <= curve[-1].x * 1.001
    rows = curve[below].where if below == above else f"{curve[below].where} to {curve[above].where.rsplit(':', 1)[-1]}"
    return value, rows, beyond
