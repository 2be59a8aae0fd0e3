"""Accuracy of MFU tables for a missing row: interpolation against the nearest row, leaving out each row once.

    python -m benchmarks.mfu_interpolation

Relative error of MFU, median with quartiles, and 90th percentile.
"""

import numpy as np

from analyzer.predict.curves import Curves
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import quartiles, single
from workloads.mfu_curves import all_curves, nearest_row, without_points


def interpolation_errors(curves: Curves, groups: list[list[int]]) -> np.ndarray:
    """[rows, 3]: |error| of interpolation, |error| of the nearest row, row is inside its curve; omitting one group at a time."""
    rows = []
    for group in groups:
        rest = without_points(curves, group)
        if not rest.points:
            continue
        for row in group:
            point = curves.points[row]
            own = [p.x for p in rest.points if p.key == point.key]
            inside = bool(own) and min(own) < point.x < max(own)
            answers = (rest.at(point.key, point.x).value, nearest_row(rest, point.key, point.x))
            rows.append((*(abs(answer / point.y - 1) for answer in answers), inside))
    return np.array(rows, float).reshape(-1, 3)


def curves_of(curves: Curves) -> list[list[int]]:
    """Row numbers of each curve."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, point in enumerate(curves.points):
        groups.setdefault(point.key, []).append(row)
    return list(groups.values())


def kind_of_table(name: str) -> str:
    """The kind of a table, by which tables are summarised."""
    return "attention decode" if name.startswith("decode attention") else " ".join(name.split()[:3])


def main() -> None:
    args = make_parser(__doc__).parse_args()
    report, errors_by = Report("mfu_interpolation", args), dict[tuple[str, str], list[np.ndarray]]()
    for name, curves in all_curves().items():
        single_rows = interpolation_errors(curves, [[row] for row in range(len(curves.points))])
        inside, whole = single_rows[single_rows[:, 2] > 0], interpolation_errors(curves, curves_of(curves))
        for label, rows in (("one row", single_rows), ("a row inside its curve", inside), ("a whole curve", whole)):
            errors_by.setdefault((kind_of_table(name), label), []).append(rows)
    for (table, label), parts in errors_by.items():
        rows = np.concatenate(parts)
        for i, method in enumerate(("interpolated", "nearest row")):
            name = f"error in {table} without {label}, {method}"
            report.add(name, "%", quartiles(100 * rows[:, i]))
            report.add(f"{name}, 90th percentile", "%", single(100 * float(np.quantile(rows[:, i], 0.9)), len(rows)))
    report.finish()


if __name__ == "__main__":
    main()
