"""Which expert a full cache evicts: the least recently used, least recently and frequently used, or least popular one."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import exp2, inf, log2
from typing import Protocol

from runtime.cache_rules.forms import Form


class Policy(Protocol):
    """Orders the held forms by how soon they may be evicted."""

    def used(self, form: Form, loaded_for_it: bool = False) -> None:
        """The form was loaded, or a layer used it. `loaded_for_it`: a load that this is the first use of was told before."""

    def left(self, form: Form) -> None:
        """The form has left the cache."""

    def order(self) -> Iterable[Form]:
        """The held forms, first to be evicted first. Valid only until the next call of another method."""


class LRU:
    """Least recently used first."""

    def __init__(self) -> None:
        self._held: OrderedDict[Form, None] = OrderedDict()

    def used(self, form: Form, loaded_for_it: bool = False) -> None:
        """Make the form the last to be evicted."""
        self._held[form] = None
        self._held.move_to_end(form)

    def left(self, form: Form) -> None:
        """The form has left the cache."""
        del self._held[form]

    def order(self) -> Iterable[Form]:
        """The forms by last use."""
        return self._held

    def ranks(self) -> tuple[float, dict[Form, float]]:
        """(number of held forms, place of each in the order of last use)."""
        return len(self._held), {form: float(place) for place, form in enumerate(self._held, 1)}

    def set_ranks(self, age: float, ranks: dict[Form, float], held: set[Form]) -> None:
        """Hold these forms in the order of their ranks."""
        self._held = OrderedDict.fromkeys(sorted(held, key=ranks.__getitem__))


class LFRU:
    """Smallest count first (LRFU, Lee et al., 2001). Counts outlive eviction, and halve as the forms ever used are used again.

    Every HALF_LIFE uses per such form halve them: a fixed number of uses would be a token of one model and fifty of another. A
    load and the use that it was for count once.
    """

    HALF_LIFE = 0.75

    def __init__(self) -> None:
        self._age = 0.0  # in half-lives
        self._weight: dict[Form, float] = {}  # log2 of the sum of 2^age over its uses: comparable at any time without decay
        self._held: set[Form] = set()

    def used(self, form: Form, loaded_for_it: bool = False) -> None:
        """Count one use."""
        self._held.add(form)
        if loaded_for_it:
            return
        before = self._weight.setdefault(form, -inf)
        self._age += 1 / (self.HALF_LIFE * len(self._weight))
        self._weight[form] = self._age + log2(1 + exp2(before - self._age))

    def left(self, form: Form) -> None:
        """The form has left the cache; its count stays."""
        self._held.discard(form)

    def order(self) -> Iterable[Form]:
        """The forms by count."""
        return sorted(self._held, key=self._weight.__getitem__)

    def ranks(self) -> tuple[float, dict[Form, float]]:
        """(half-lives so far, the weight of each form ever used)."""
        return self._age, dict(self._weight)

    def set_ranks(self, age: float, ranks: dict[Form, float], held: set[Form]) -> None:
        """Go on with these weights and held forms."""
        self._age, self._weight, self._held = age, dict(ranks), set(held)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU, "lfru": LFRU}
