"""The report's section on energy: joules per token by power rail and phase, and a model of the operators' share."""

from typing import Any

from analyzer.questions.energy_readings import SUMMED
from moescope.terminal import counted
from views.report.sections import Block, Run, Section, note, table

PHASES = (
    "text power rail, text covers, text phase, number tokens, number mJ/token, number low, number high, "
    "number above the floor, number tokens/J, number W, number idle floor W"
)
TERMS = "text power rail, text phase, text where, number busy seconds, number W, number low, number high"
OPERATORS = "text part, text operator, number seconds, number CPU seconds, number J, number mJ/token, bar share %"
UNCONFIRMED = "What a sensor's numbers mean is its driver's documentation; none is confirmed on a device."
STATES = {
    "gap": "readings are missing",
    "charging": "something else fed the battery",
    "stopped": "the sensor stood still",
    "reset": "a counter began again without a known range",
}


def energy_section(run: Run) -> Section | None:
    """Energy, if power was recorded."""
    energy = run.summary.get("energy") or {}
    rails: list[dict[str, Any]] = energy.get("rails") or []
    if not rails and not energy.get("untold"):
        return None
    blocks: list[Block] = [table(PHASES, [row for rail in rails for row in phase_rows(rail)])] if rails else []
    blocks += [note(f"{row['rail']} ({row['source']}) is not used: {row['why']}.") for row in energy["untold"]]
    blocks += [note(text) for rail in rails for text in disturbance_texts(rail)]
    if rails:
        interval = "Energy per token includes the idle floor; low to high is a 95 % interval of the fit of readings to what ran."
        blocks.append(note(f"{interval} Rails may overlap: they are never added. {UNCONFIRMED}"))
        blocks += [table(TERMS, terms, "What one busy CPU adds to the power")] if (terms := term_rows(rails)) else []
        blocks += [note(text) for rail in rails if (text := clock_text(rail))]
        blocks += operator_tables(rails[0])
    return Section("energy", "Energy", blocks)


def in_mj(joules: float | None) -> float | None:
    """Joules in mJ."""
    return None if joules is None else 1e3 * joules


def phase_rows(rail: dict[str, Any]) -> list[list[Any]]:
    """A row for each phase of a rail."""
    rows = []
    for phase, e in rail["phases"].items():
        watts = e["joules"] / e["seconds"] if e["joules"] is not None else None
        per_token = [in_mj(e[name]) for name in ("j_per_token", "low", "high", "above_floor_j_per_token")]
        figures = [e["tokens"], *per_token, e["tokens_per_j"], watts]
        rows.append([f"{rail['rail']} ({rail['source']})", rail["scope"], phase, *figures, rail["floor_watts"]])
    return rows


def disturbance_texts(rail: dict[str, Any]) -> list[str]:
    """Intervals between a rail's readings that are of little or no use, and readings whose moments are not known well."""
    counts, coarse = (
        rail["disturbances"].items(),
        f"{rail['rail']}: {SUMMED}, as the moments of the sensor's updates are not known.",
    )
    texts = [
        f"{rail['rail']}: {counted(count, 'interval')} between readings in which {STATES[state]}." for state, count in counts
    ]
    return [*texts, *[coarse] * (rail["joined_by"] == SUMMED)]


def term_rows(rails: list[dict[str, Any]]) -> list[list[Any]]:
    """Watts of busy CPUs and of the accelerator, by rail and phase."""
    return [
        [rail["rail"], term["phase"], term["where"] or "CPUs", *(term[name] for name in ("seconds", "watts", "low", "high"))]
        for rail in rails
        for term in rail["model"]["terms"]
    ]


def clock_text(rail: dict[str, Any]) -> str:
    """How the power of busy CPUs grows with their clock, if the readings show it."""
    power = rail["model"]["clock_power"]
    return f"{rail['rail']}: the power of a busy CPU grows with its clock to the power {power:.1f}." if power else ""


def operator_tables(rail: dict[str, Any]) -> list[Block]:
    """A model of the energy of operators, by phase."""
    text = (
        f"By operator, {rail['rail']}: a model, not measured. Each moment of a step has the idle power and its CPU time at the "
        f"watts of the phase, whatever it computes. The fit leaves {rail['residual']:.1%} of a reading unexplained."
    )
    names = ("part", "operator", "seconds", "cpu_seconds", "joules")
    listed = {
        phase: [[*(row[name] for name in names), in_mj(row["j_per_token"]), 100 * row["share"]] for row in rows]
        for phase, rows in rail["operators"].items()
    }
    tables = [table(OPERATORS, rows, f"{phase.capitalize()}, by operator") for phase, rows in listed.items()]
    return [note(text), *tables] if tables else []
