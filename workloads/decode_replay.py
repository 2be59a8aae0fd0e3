"""Replays decoded tokens with a clock: how long they take, by how much is known of a layer's choice before its router tells.

One thread computes layer by layer, and the disk reads one piece after another. A layer reads at once what it has chosen and
misses, runs what is in memory first, and waits for the rest. What is known ahead is read in pieces while no layer waits: the
next layer's choice once a layer has chosen, the first layer's as a token begins. The rule is that of runtime/experts/_slots.c.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from runtime.cache_rules.eviction import Policy
from runtime.cache_rules.forms import CPU, Form

AHEAD = 2  # pieces of prefetches that are read at a time
HEAD_PARTS = 8  # of a head, between which pieces are submitted: an oracle's disk does not idle for want of a call
LEFT_OVER = math.inf  # urgency of what a layer did not choose


@dataclass(frozen=True)
class Costs:
    """Times, ns. choose: of a layer until its router has chosen; shared: until its experts run; expert: one; combine: after them.

    head: a token's work outside layers. piece: reading one of the `pieces` of an expert.
    """

    choose: float
    shared: float
    expert: float
    combine: float
    head: float
    piece: float
    pieces: int


@dataclass(frozen=True)
class Knowledge:
    """What is known ahead. recall: share of a layer's missing experts; precision: share of what is read ahead that is chosen.

    this_token: all layers' choices are known as a token begins, else the first one's, and the next one's once a layer has chosen;
    next_token: before the last token's head runs.
    """

    recall: float = 0
    precision: float = 1
    this_token: bool = False
    next_token: bool = False


DEMAND, NEXT_LAYER, THIS_TOKEN, NEXT_TOKEN = Knowledge(), Knowledge(1), Knowledge(1, 1, True), Knowledge(1, 1, True, True)


@dataclass
class Replay:
    """routes [n, L, k]: each token's experts, of `experts` per layer. room: experts in memory, at first none."""

    routes: np.ndarray
    experts: int
    room: int
    costs: Costs
    policy: Policy
    known: Knowledge
    now: float = 0
    loads: int = 0
    _ends: dict[Form, float] = field(default_factory=dict)  # of the held: when its last submitted piece has been read
    _left: dict[Form, int] = field(default_factory=dict)  # pieces that were not submitted yet
    _wishes: dict[Form, float] = field(default_factory=dict)  # known ahead and not wholly submitted: urgency, smaller is sooner
    _flights: list[float] = field(default_factory=list)  # ends of pieces
    _unused: set[Form] = field(default_factory=set)
    _waiting: set[Form] = field(default_factory=set)  # of the layer's experts, those that have not run
    _chosen: set[Form] = field(default_factory=set)

    def run(self) -> tuple[float, float]:
        """(ns, loads) per token of the second half."""
        self._random = np.random.default_rng(0)
        half, layers = len(self.routes) // 2, range(self.routes.shape[1])
        for token in range(len(self.routes)):
            if token == half:
                began, before = self.now, self.loads
            for layer in layers if self.known.this_token else layers[:1]:
                self._foresee(token, layer)
            for layer in layers:
                self._layer(token, layer)
            for layer in layers if self.known.next_token else ():
                self._foresee(token + 1, layer)
            for _ in range(HEAD_PARTS):
                self._compute(self.costs.head / HEAD_PARTS)
        return (self.now - began) / (len(self.routes) - half), (self.loads - before) / (len(self.routes) - half)

    def _layer(self, token: int, layer: int) -> None:
        costs = self.costs
        self._compute(costs.choose)
        forms = [Form(layer, expert, CPU, 0) for expert in self.routes[token, layer].tolist()]
        forms.sort(key=self._landed, reverse=True)
        self._chosen, self._waiting = set(forms), set(forms)
        for form in forms:
            while form not in self._ends and not self._begin(form):
                self.now = min(end for end in self._flights if end > self.now)
            self.policy.used(form, loaded_for_it=form in self._unused)
            self._unused.discard(form)
            self._submit(form, self._left[form])
            self._wishes.pop(form, None)
        # What the layer did not choose and has begun to arrive is finished when nothing else is to read.
        left = {form: LEFT_OVER if form.layer == layer else at for form, at in self._wishes.items()}
        self._wishes = {form: at for form, at in left.items() if at < LEFT_OVER or form in self._ends}
        self._foresee(token, layer + 1)
        self._compute(costs.shared)
        while forms:
            form = next(filter(self._landed, forms), forms[0])
            self.now = max(self.now, self._ends[form])
            forms.remove(form)
            self._waiting.discard(form)
            self._compute(costs.expert)
        self._compute(costs.combine)

    def _foresee(self, token: int, layer: int) -> None:
        """Wish for what is known of a layer's choice."""
        known = self.known
        if not known.recall or token >= len(self.routes) or layer >= self.routes.shape[1]:
            return
        missing = [e for e in range(self.experts) if Form(layer, e, CPU, 0) not in self._ends]
        right = [e for e in self.routes[token, layer].tolist() if e in missing and self._random.random() < known.recall]
        others = [e for e in missing if e not in self.routes[token, layer]]
        wrong = self._random.poisson(len(right) * (1 / known.precision - 1)) if others else 0
        for expert in right + self._random.permutation(others)[:wrong].tolist():
            self._wishes.setdefault(Form(layer, expert, CPU, 0), token * len(self.routes[0]) + layer)

    def _compute(self, ns: float) -> None:
        self._read_ahead()
        self.now += ns
        self._read_ahead()

    def _landed(self, form: Form) -> bool:
        return form in self._ends and not self._left[form] and self._ends[form] <= self.now

    def _read_ahead(self) -> None:
        while self._wishes and all(map(self._landed, self._waiting)):
            self._flights = [end for end in self._flights if end > self.now]
            form = min(self._wishes, key=self._wishes.__getitem__)
            if len(self._flights) >= AHEAD or (form not in self._ends and not self._begin(form)):
                return
            self._submit(form, 1)
            if not self._left[form]:
                del self._wishes[form]

    def _begin(self, form: Form) -> bool:
        """Make room for an expert; False if all others are being read or belong to the layer."""
        if len(self._ends) >= self.room:
            gone = next((held for held in self.policy.order() if self._landed(held) and held not in self._chosen), None)
            if gone is None:
                return False
            self.policy.left(gone)
            self._unused.discard(gone)
            del self._ends[gone], self._left[gone]
        self.policy.used(form)
        self._unused.add(form)
        self._ends[form], self._left[form] = 0, self.costs.pieces
        self.loads += 1
        return True

    def _submit(self, form: Form, pieces: int) -> None:
        """Read pieces after those that the disk has to read already."""
        for _ in range(pieces):
            self._ends[form] = max([self.now, *self._flights[-1:]]) + self.costs.piece
            self._flights.append(self._ends[form])
        self._left[form] -= pieces
