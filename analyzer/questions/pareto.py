"""The Pareto front: which of several choices no other one beats."""

from collections.abc import Sequence


def on_front(figures: Sequence[tuple[float, ...]]) -> list[bool]:
    """Of each choice whether no other has all figures as small, and one smaller."""
    return [
        not any(all(a <= b for a, b in zip(other, mine, strict=True)) and tuple(other) != tuple(mine) for other in figures)
        for mine in figures
    ]
