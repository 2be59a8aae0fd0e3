"""Alternates sides, so that a machine's drift affects all equally."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

Side = TypeVar("Side")


def by_turns(sides: Sequence[Side], rounds: int) -> Iterator[tuple[int, Side]]:
    """(round, side) of every round: forwards, backwards, forwards ... (A B B A for two sides)."""
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            yield number, side
