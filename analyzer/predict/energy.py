"""Energy of predicted and simulated steps: their times at watts that a device profile or a recording with power holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from analyzer.model import Model
from analyzer.predict.devices import Device
from analyzer.predict.prediction import Prediction, predict_step
from analyzer.predict.setup import Setup
from analyzer.predict.simulator import Outcome
from analyzer.questions.energy import fitted_rails, phase_energy
from analyzer.records.schema import Tables

PHASES = ("prefill", "decode")
LOADS = ("load", "prefetch")
CONTEXT = 512
"""Tokens of the prompt, or of the cache, of the roofline that tells what bounds a phase."""


@dataclass(frozen=True)
class StepWatts:
    """Watts of a simulated run. `working`, `per_token`: above `idle`, by phase: W of work, or J of a token.

    `loading`: W of loads, above `idle`. `basis`: where they come from, and what they leave out.
    """

    idle: float
    basis: str
    working: dict[str, float] = field(default_factory=dict)
    per_token: dict[str, float] = field(default_factory=dict)
    loading: float = 0.0

    def of_outcome(self, outcome: Outcome) -> dict[str, float | None]:
        """Joules of a token by phase; None for phases without steps or without watts."""
        known = self.working or self.per_token
        found: dict[str, float | None] = {}
        for phase in PHASES:
            mine = {number for number, step in enumerate(outcome.steps) if step[0] == phase}
            tokens = sum(outcome.steps[number][1] for number in mine)
            spans = [span for span in outcome.spans if span.step in mine]
            busy = sum(span.end - span.begin for span in spans if span.kind not in LOADS)
            loads = sum(span.end - span.begin for span in spans if span.kind in LOADS)
            joules = self.idle * float(outcome.durations(phase).sum()) + self.loading * loads
            joules += self.working.get(phase, 0.0) * busy + self.per_token.get(phase, 0.0) * tokens
            found[phase] = joules / tokens if tokens and phase in known else None
        return found


def predicted_energy(prediction: Prediction) -> dict[str, Any]:
    """`joules` of a step, `j_per_token` and their `energy_basis`; {} if the profile has no watts of the unit."""
    device, watts = prediction.device, prediction.unit.watts
    if not device.idle_watts or not {"compute", "memory"} <= watts.keys():
        return {}
    turns, spent = prediction.setup.turns, {"compute": 0.0, "memory": 0.0}
    for part in prediction.parts:
        spent[part.bound] += part.seconds * part.times * turns
    busy = sum(spent.values())
    shown = min(1.0, prediction.seconds / busy) if busy else 1.0  # what overlaps is not there twice
    joules = sum(watts[bound] * seconds * shown for bound, seconds in spent.items())
    joules += device.idle_watts * max(prediction.seconds - busy, 0.0)
    basis = f"{watts['compute']:g} W while computing, {watts['memory']:g} W while moving bytes, {device.idle_watts:g} W else"
    return {"joules": joules, "j_per_token": joules / prediction.setup.tokens, "energy_basis": f"{basis}: {device.power_source}"}


def device_watts(model: Model, device: Device, units: dict[str, str]) -> StepWatts | None:
    """Watts of a simulation on a device profile, each phase's by what bounds its roofline on its unit; None if it has none."""
    working: dict[str, float] = {}
    for phase, unit in units.items():
        if unit not in device.units:
            return None
        step = predict_step(model, device, Setup(phase, 1, CONTEXT, unit=unit))
        energy = predicted_energy(step)
        if not energy:
            return None
        working[phase] = energy["joules"] / step.seconds - device.idle_watts
    loading = max(device.storage_watts - device.idle_watts, 0.0)
    named = ", ".join(f"{phase} {device.idle_watts + watts:.3g} W" for phase, watts in working.items())
    return StepWatts(device.idle_watts, f"{named}, idle {device.idle_watts:g} W: {device.power_source}", working, loading=loading)


def recorded_watts(tables: Tables) -> StepWatts | None:
    """Watts of a simulation of a recorded run, by the power rail that covers most; None without power of steps."""
    fits = fitted_rails(tables)
    if not fits:
        return None
    rows = phase_energy(tables, fits[:1]).dropna(subset=["joules"])
    idle, rail = float(fits[0].fit.watts[0]), fits[0].row["rail"]
    above = {
        row["phase"]: (row["joules"] - idle * row["seconds"]) / row["tokens"] for row in rows.to_dict("records") if row["tokens"]
    }
    named = ", ".join(f"{joules:.3g} J of {phase}" for phase, joules in above.items())
    basis = f"of the recording's {rail}: {idle:.3g} W all the time, and for each token {named}, whatever is loaded"
    return StepWatts(idle, basis, per_token=above) if above else None


def with_energy(rows: Sequence[dict[str, Any]], outcomes: Sequence[Outcome], watts: StepWatts | None) -> list[dict[str, Any]]:
    """The rows of outcomes with joules of a prompt's token and of a decoded one, null if not known."""
    found = [watts.of_outcome(outcome) if watts else dict.fromkeys(PHASES) for outcome in outcomes]
    return [
        {**row, "prefill_j_per_token": one["prefill"], "j_per_token": one["decode"]} for row, one in zip(rows, found, strict=True)
    ]
