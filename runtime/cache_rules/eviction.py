"""Which expert a full cache evicts: the least recently used, least recently and frequently used, or least popular one."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import exp2, inf, log2
from typing import Protocol

from runtime.cache_rules.forms import Form


class Policy(Protocol):
    """Orders the held forms by how soon they may be evicted."""

    def used(self, form: Form) -> None:
        """A layer used the form, or it was loaded."""

    def left(self, form: Form) -> None:
        """The form has left the cache."""

    def order(self) -> Iterable[Form]:
        """The held forms, first to be evicted first. Valid only until the next call of another method."""


class LRU:
    """Least recently used first."""

    def __init__(self) -> None:
        self._held: OrderedDict[Form, None] = OrderedDict()

    def used(self, form: Form) -> None:
        """Make the form the last to be evicted."""
        self._held[form] = None
        self._held.move_to_end(form)

    def left(self, form: Form) -> None:
        """The form has left the cache."""
        del self._held[form]

    def order(self) -> Iterable[Form]:
        """The forms by last use."""
        return self._held

    def ranks(self) -> tuple[int, dict[Form, float]]:
        """(number of held forms, place of each in the order of last use)."""
        return len(self._held), {form: float(place) for place, form in enumerate(self._held, 1)}

    def set_ranks(self, uses: int, ranks: dict[Form, float], held: set[Form]) -> None:
        """Hold these forms in the order of their ranks."""
        self._held = OrderedDict.fromkeys(sorted(held, key=ranks.__getitem__))


class LFRU:
    """Smallest count first; counts halve every HALF_LIFE uses of any form (LRFU, Lee et al., 2001) and outlive eviction."""

    HALF_LIFE = 512

    def __init__(self) -> None:
        self._clock = 0
        self._weight: dict[Form, float] = {}  # log2 of the sum of 2^(time / HALF_LIFE): comparable at any time without decay
        self._held: set[Form] = set()

    def used(self, form: Form) -> None:
        """Count one use."""
        self._clock += 1
        now = self._clock / self.HALF_LIFE
        self._weight[form] = now + log2(1 + exp2(self._weight.get(form, -inf) - now))
        self._held.add(form)

    def left(self, form: Form) -> None:
        """The form has left the cache; its count stays."""
        self._held.discard(form)

    def order(self) -> Iterable[Form]:
        """The forms by count."""
        return sorted(self._held, key=self._weight.__getitem__)

    def ranks(self) -> tuple[int, dict[Form, float]]:
        """(uses so far, the weight of each form ever used)."""
        return self._clock, dict(self._weight)

    def set_ranks(self, uses: int, ranks: dict[Form, float], held: set[Form]) -> None:
        """Go on with these weights and held forms."""
        self._clock, self._weight, self._held = uses, dict(ranks), set(held)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU, "lfru": LFRU}
