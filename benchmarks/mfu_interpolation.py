"""How well MFU tables predict a row that is not in them: interpolation against the nearest row, each row left out once.

    python -m benchmarks.mfu_interpolation

Relative error of MFU, median and 90th percentile: `inside` rows lie between two others of their curve, `curve` leaves a whole
shape out.
"""

import argparse

import numpy as np

from analyzer.predict import mfu
from analyzer.predict.curves import Curves, without


def errors(curves: Curves, groups: list[list[int]]) -> np.ndarray:
    """[rows, 3]: |error| of interpolation, of the nearest row, whether the row lay inside its curve; one group out at a time."""
    found = []
    for group in groups:
        rest = without(curves, group)
        if not rest.points:
            continue
        for row in group:
            point = curves.points[row]
            own = [p.x for p in rest.points if p.key == point.key]
            inside = bool(own) and min(own) < point.x < max(own)
            answers = (rest.at(point.key, point.x).value, rest.nearest(point.key, point.x))
            found.append((*(abs(answer / point.y - 1) for answer in answers), inside))
    return np.array(found, float).reshape(-1, 3)


def curves_of(curves: Curves) -> list[list[int]]:
    """Row numbers of each curve."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, point in enumerate(curves.points):
        groups.setdefault(point.key, []).append(row)
    return list(groups.values())


def kind(name: str) -> str:
    """Tables that are told together."""
    return "attention decode" if name.startswith("decode attention") else " ".join(name.split()[:3])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for name, curves in mfu.all_curves().items():
        single = errors(curves, [[row] for row in range(len(curves.points))])
        for label, rows in (("row", single), ("inside", single[single[:, 2] > 0]), ("curve", errors(curves, curves_of(curves)))):
            found.setdefault((kind(name), label), []).append(rows)
    print(f"{'table':24} {'left out':9} {'rows':>5}  {'interpolated':>15}  {'nearest row':>15}   (median, p90)")
    for (table, label), parts in found.items():
        rows = np.concatenate(parts)
        cells = [f"{np.median(rows[:, i]):6.1%} {np.quantile(rows[:, i], 0.9):8.1%}" for i in (0, 1)]
        print(f"{table:24} {label:9} {len(rows):5}  {cells[0]:>15}  {cells[1]:>15}")


if __name__ == "__main__":
    main()
