"""Scores a given text, with the routes of each layer, and holds two placements against each other layer by layer."""

from dataclasses import dataclass, field

import numpy as np

from runtime.errors import RequestError
from runtime.prepare.perplexity import losses_of
from runtime.step.engine import Engine
from runtime.telemetry.log import Step
from runtime.telemetry.probes import Phase

HALF, EIGHT_BITS = 2.0**-11, 2.0**-8
"""Relative rounding of a number in fp16, in which the NPU computes, and in the 8 bits of products with 4- and 8-bit weights."""
ROUNDINGS = 4.0
"""Roundings of that size that a layer may add to its state; measured: about one."""


@dataclass
class Score:
    """ids [n]; logprobs [n - 1] of all but the first; routes: layer → experts [n, k] in the router's order, of routed layers;
    states [layers + 1, n, H]: what enters each layer and leaves the last, empty unless asked for.
    """

    ids: list[int]
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0))
    routes: dict[int, np.ndarray] = field(default_factory=dict)
    states: list[np.ndarray] = field(default_factory=list)


class Listening:
    """Notes routes, and states if asked to (runtime.experts.routing.Listener)."""

    def __init__(self, score: Score, states: bool):
        self.score, self._states = score, states
        self._chunks: dict[int, list[np.ndarray]] = {}

    def step_begins(self, embedded: np.ndarray) -> None:
        """Nothing to note."""

    def layer_begins(self, layer: int, hidden: np.ndarray) -> None:
        """Note the state."""
        if self._states:
            self.score.states.append(hidden.copy())

    def routed(self, layer: int, attended: np.ndarray, chosen: np.ndarray) -> None:
        """Note the choice of a chunk's rows."""
        self._chunks.setdefault(layer, []).append(chosen.copy())

    def finish(self) -> None:
        """Join the chunks."""
        self.score.routes.update({layer: np.concatenate(chunks) for layer, chunks in self._chunks.items()})


def score_text(engine: Engine, ids: list[int], states: bool = False) -> Score:
    """Run ids [n] as one prompt where `engine` places it; `states`: keep every layer's, 4 * n * H bytes each."""
    if not 2 <= len(ids) <= engine.family.context:
        raise RequestError(f"a text of {len(ids)} tokens cannot be scored: give 2 to {engine.family.context}")
    score = Score(ids)
    listening = Listening(score, states)
    engine.listeners.append(listening)
    try:
        sequence = engine.begin_sequence(len(ids))
        hidden = engine.hidden(sequence, ids, Step(engine.log.next_seq, Phase.PREFILL, len(ids), 0, 0))
        engine.release(sequence)
    finally:
        engine.listeners.remove(listening)
    listening.finish()
    score.states += [hidden.copy()] if states else []
    score.logprobs = -np.concatenate(list(losses_of(engine, hidden[:-1], np.array(ids[1:]))))
    return score


@dataclass(frozen=True)
class LayerDifference:
    """One layer in two scores. state: median over tokens of |difference| / |state| behind the layer; allowed: what rounding
    explains; routes: share of tokens with the same experts, None without a router; tokens: those compared, whose experts
    have been the same so far.
    """

    layer: int
    state: float
    allowed: float
    routes: float | None
    tokens: int


def layer_differences(reference: Score, other: Score, bits: int) -> list[LayerDifference]:
    """Layer by layer, both scores having states; `bits`: the least of any of the package's weights.

    Roundings add up like independent errors, with the square root of the number of layers.
    """
    rounding = EIGHT_BITS if bits < 16 else HALF
    same, rows = np.ones(len(reference.ids), bool), []
    for layer, (mine, theirs) in enumerate(zip(reference.states[1:], other.states[1:], strict=True)):
        routes = None
        if layer in reference.routes:
            equal = (np.sort(reference.routes[layer]) == np.sort(other.routes[layer])).all(axis=1)
            routes, same = float(equal.mean()), same & equal
        ratio = np.linalg.norm(mine - theirs, axis=1) / np.maximum(np.linalg.norm(mine, axis=1), np.finfo(np.float32).tiny)
        state = float(np.median(ratio[same])) if same.any() else float("nan")
        rows.append(LayerDifference(layer, state, ROUNDINGS * rounding * float(np.sqrt(layer + 1)), routes, int(same.sum())))
    return rows


def first_beyond(rows: list[LayerDifference]) -> int | None:
    """The first layer whose difference rounding does not explain; None if there is none."""
    return next((row.layer for row in rows if not row.state <= row.allowed), None)
