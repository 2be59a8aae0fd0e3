"""Random work of an engine that serves several sequences: its calls row by row, and what each of them truly is."""

import random
from dataclasses import dataclass, field
from typing import Any

TARGET, DRAFT = 0, 1
BUDGET = 24
"""Most prompt rows in a call."""


@dataclass
class Call:
    """A call of the engine with `rows`: (sequence, position, whether the output is wanted)."""

    context: int
    rows: list[tuple[int, int, bool]] = field(default_factory=list)
    sets: list[tuple[int, str, int, int]] = field(default_factory=list)
    """(sequence, phase, request, rows kept or -1) of each sequence."""
    refused: bool = False

    def add(self, sequence: int, position: int, outputs: list[bool], phase: str, request: int, kept: int) -> None:
        self.rows += [(sequence, position + i, output) for i, output in enumerate(outputs)]
        self.sets.append((sequence, phase, request, kept))


@dataclass
class Slot:
    """A sequence and its current request: `due` prompt rows and `wanted` output tokens are left."""

    sequence: int
    request: int = -1
    due: int = 0
    wanted: int = 0
    position: int = 0
    """The next row's."""
    prompt: int = 0
    """Length of the prompt."""
    drafted: int = 0
    """The next row's position in the draft's context."""


class Plan:
    """`calls` in order, and `requests`, each with the columns of the table of requests that do not depend on time."""

    def __init__(self, seed: int, slots: int = 4, requests: int = 12, drafts: bool = False):
        self.rng, self.drafts = random.Random(seed), drafts
        self.slots = [Slot(sequence) for sequence in range(slots)]
        self.calls: list[Call] = []
        self.requests: list[dict[str, Any]] = []
        while len(self.requests) < requests or any(slot.wanted for slot in self.slots):
            for slot in self.slots:
                if not slot.wanted and len(self.requests) < requests and self.rng.random() < 0.5:
                    self._begin(slot)
            self._turn()

    def _begin(self, slot: Slot) -> None:
        """A new request, which finds a part of what the sequence holds."""
        answered = slot.position > slot.prompt
        cached = self.rng.randint(0, slot.position - (not answered) if slot.position else 0)
        slot.due = self.rng.randint(2 if cached >= slot.prompt else 1, 40) if cached else self.rng.randint(3, 40)
        slot.position, slot.prompt, slot.drafted = cached, cached + slot.due, min(slot.drafted, cached)
        slot.wanted, slot.request = self.rng.randint(1, 20), -1
        self.requests.append({"sequence": slot.sequence, "prompt": slot.due, "cached": cached, "generated": 0})
        self.requests[-1] |= {"drafted": 0, "judged": 0, "accepted": 0}

    def _turn(self) -> None:
        """One call of the target, behind those of the draft, or a refused one."""
        call, budget = Call(TARGET), BUDGET
        decoding = [slot for slot in self.slots if slot.wanted and not slot.due]
        filling = [slot for slot in self.slots if slot.due]
        if self.rng.random() < 0.1:
            refused = [(0, self.slots[0].position + i, False) for i in range(2000)]
            self.calls.append(Call(TARGET, refused, [(0, "refused", -1, -1)], refused=True))
        for slot in decoding:
            self._decode(call, slot)
        for slot in filling:
            rows = min(slot.due, self.rng.randint(1, BUDGET), budget)
            if rows:
                self._fill(call, slot, rows)
            budget -= rows
        if call.rows:
            self.calls.append(call)

    def _fill(self, call: Call, slot: Slot, rows: int) -> None:
        if slot.request < 0:
            slot.request = self._number(slot)
        slot.due -= rows
        outputs = [False] * (rows - 1) + [not slot.due]
        call.add(slot.sequence, slot.position, outputs, "prefill", slot.request, rows)
        slot.position += rows
        if not slot.due:
            self._give(slot, 1)

    def _number(self, slot: Slot) -> int:
        """Requests count in order of their first rows."""
        mine = next(request for request in self.requests if request["sequence"] == slot.sequence and "request" not in request)
        mine["request"] = sum("request" in request for request in self.requests)
        return int(mine["request"])

    def _give(self, slot: Slot, tokens: int) -> None:
        slot.wanted = max(slot.wanted - tokens, 0)
        self._of(slot)["generated"] += tokens

    def _of(self, slot: Slot) -> dict[str, Any]:
        return next(request for request in self.requests if request.get("request") == slot.request)

    def _decode(self, call: Call, slot: Slot) -> None:
        """A row, or several with drafted ones of which the first are accepted."""
        rows = 1 + (self.rng.randint(0, 3) if self.drafts else 0)
        kept = self.rng.randint(1, rows)
        last = kept >= slot.wanted
        if rows > 1:
            self._draft(slot, rows - 1)
            self._of(slot)["drafted"] += rows - 1
            if not last:
                self._of(slot)["judged"] += rows - 1
                self._of(slot)["accepted"] += kept - 1
        judged = -1 if last and rows > 1 else kept
        call.add(slot.sequence, slot.position, [True] * rows, "decode", slot.request, judged)
        slot.position += kept
        slot.drafted = min(slot.drafted, slot.position)
        self._give(slot, 1 if judged < 0 else kept)
        if last:
            slot.wanted = 0

    def _draft(self, slot: Slot, tokens: int) -> None:
        """The draft's steps: what it has not seen yet, then one row for each further token."""
        seen = slot.position - slot.drafted
        first = Call(DRAFT)
        first.add(slot.sequence, slot.drafted, [False] * seen + [True], "draft", slot.request, seen + 1)
        self.calls.append(first)
        for i in range(1, tokens):
            following = Call(DRAFT)
            following.add(slot.sequence, slot.position + i, [True], "draft", slot.request, 1)
            self.calls.append(following)
        slot.drafted = slot.position + tokens
