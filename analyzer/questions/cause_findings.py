"""Findings by cause: the time that each cause took of the steps, and what lies below it."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analyzer.questions import causes, displacement, expert_loads
from analyzer.questions.facts import Finding, RuleInputs
from analyzer.questions.parts import LOAD
from analyzer.records.intervals import Intervals, merge_intervals, overlaps
from moescope.packaged import toml_beside

MEANING: dict[str, str] = toml_beside(__file__, "findings.toml")["causes"]
NAMED = 3
"""Maximum number of names below a cause; the rest is "other"."""
OWN_THREADS, LATE, UNKNOWN = "the program's own threads", "idle CPUs not yet reached", "unknown"


def by_cause(facts: RuleInputs) -> Iterator[Finding]:
    """One finding for each cause, with its sum and the largest amounts below it. Its saving is its time: no remedy saves more.

    Computing saves what lies above the roofline; without ceilings that is unknown, and counted as 0.
    """
    phase_ns = facts.time.groupby("phase")["duration_ns"].sum()
    for cause, rows in facts.time.groupby("cause"):
        spent, below = float(rows["duration_ns"].sum()), largest_amounts(facts, str(cause), rows)
        saving = above_roof(facts) if cause == causes.COMPUTING else spent
        named = ", ".join(f"{name} {ns / facts.total_ns:.0%}" for name, ns in below.items() if ns >= 0.005 * facts.total_ns)
        above = f"; {saving / facts.total_ns:.0%} above the roofline" if cause == causes.COMPUTING and saving else ""
        text = f"{cause} ({MEANING[str(cause)]}{above})" + (f": {named}" if named else "")
        text = KNOB_OF[str(cause)](facts, rows, text) if cause in KNOB_OF else text
        phases = rows.groupby("phase")["duration_ns"].sum() / phase_ns
        evidence = {
            "cause": cause,
            "ms": spent / 1e6,
            "share": spent / facts.total_ns,
            "phases": phases.dropna().to_dict(),
            "below_ms": (below / 1e6).to_dict(),
        }
        yield facts.finding(str(cause), text, saving, evidence, "cause", {"cause": cause})


def above_roof(facts: RuleInputs) -> float:
    """ns that the steps computed in operators beyond the roofline's time for them; 0 if that is unknown."""
    if facts.ceilings is None:
        return 0.0
    roof = facts.roofline[facts.roofline["backend"] == "cpu"]
    least = (roof["roof_us"] * roof["count"] * 1e3).groupby(roof["type"]).sum(min_count=1)
    rows = facts.time[(facts.time["cause"] == causes.COMPUTING) & (facts.time["op_id"] >= 0)]
    types = facts.tables["operators"].set_index("op_id")["type"].reindex(rows["op_id"]).to_numpy()
    return float((rows["duration_ns"].groupby(types).sum() - least).clip(lower=0).sum())


def largest_amounts(facts: RuleInputs, cause: str, rows: pd.DataFrame) -> pd.Series:
    """ns below a cause by name, largest first: at most NAMED and "other"."""
    special = {causes.RUN_QUEUE: displacing_programs, causes.OTHER_THREAD: awaited_threads, causes.EXPERT_LOAD: load_reasons}
    names = special[cause](facts, rows) if cause in special else rows.groupby("part")["duration_ns"].sum()
    ranked = names[names > 0].sort_values(ascending=False)
    rest = ranked.iloc[NAMED:].sum()
    return pd.concat([ranked.iloc[:NAMED], pd.Series({"other": rest})]) if rest else ranked


def cpu_knob(facts: RuleInputs, rows: pd.DataFrame, text: str) -> str:
    """The text with what to turn for a lack of CPUs: the one that others take, or that the program's threads take each other."""
    by = displacing_programs(facts, rows).drop([UNKNOWN, LATE], errors="ignore")
    own = float(by.get(OWN_THREADS, 0.0))
    others = float(by.sum()) - own
    return facts.with_knob(text, *(("cpus", others) if others >= own else ("threads", own)))


def disk_knob(facts: RuleInputs, rows: pd.DataFrame, text: str) -> str:
    """The text with what to turn for `rows` of `time` that wait for the disk, by what they wait for.

    Reading ahead saves no more than the steps compute meanwhile.
    """
    tables, spans = facts.tables, Intervals.of_table(rows)
    faulted = float(overlaps(spans, merge_intervals(Intervals.of_table(tables["faults"]))).length.sum())
    met = overlaps(spans, merge_intervals(Intervals.of_table(tables["reads"])))
    own = (rows["tid"].to_numpy() == facts.steps["tid"].reindex(rows["token_id"]).to_numpy())[met.left]
    here, elsewhere = float(met.length[own].sum()), float(met.length[~own].sum())
    if faulted >= max(here, elsewhere):
        return facts.with_knob(text, "memory", faulted)
    if here >= elsewhere:
        return facts.with_knob(text, "read ahead", min(here, facts.ns(facts.time["cause"] == causes.COMPUTING)))
    blocks = tables["blocks"]
    flight = merge_intervals(Intervals.of(blocks["begin_ns"].to_numpy(), blocks["end_ns"].to_numpy())).length.sum()
    depth = float(blocks["duration_ns"].sum()) / max(int(flight), 1)
    return facts.with_knob(text, "queue depth", elsewhere, depth=depth) if len(blocks) else text


KNOB_OF = {causes.RUN_QUEUE: cpu_knob, causes.DISK: disk_knob}
"""What names the knob of a cause."""


def displacing_programs(facts: RuleInputs, rows: pd.DataFrame) -> pd.Series:
    """The programs that ran instead of a ready thread, as the last one on its CPU before it came back."""
    spans = Intervals.of_table(rows)
    ran, by = displacement.split_by_runner(facts.tables["sched"], spans)
    threads = facts.tables["threads"].drop_duplicates("tid").set_index("tid").reindex(by)
    name = np.where(threads["name"].fillna("") == "", [f"thread {tid}" for tid in by], threads["name"])
    name = np.select([by == 0, by < 0, threads["target"].eq(True).to_numpy()], [LATE, UNKNOWN, OWN_THREADS], name)
    spent = pd.Series(ran.length).groupby(name).sum()
    left = spans.length.sum() - spent.sum()
    return spent.add(pd.Series({UNKNOWN: left}), fill_value=0) if left else spent


def awaited_threads(facts: RuleInputs, rows: pd.DataFrame) -> pd.Series:
    """The threads that steps waited for."""
    return rows["duration_ns"].groupby(thread_labels(facts, rows["tid"])).sum()


def thread_labels(facts: RuleInputs, tids: pd.Series) -> np.ndarray:
    """Threads' numbers with their names."""
    names = facts.tables["threads"].drop_duplicates("tid").set_index("tid")["name"].reindex(tids).fillna("")
    return np.array([f"thread {tid} {name}".strip() for tid, name in zip(tids.tolist(), names.tolist(), strict=True)], object)


def load_reasons(facts: RuleInputs, rows: pd.DataFrame) -> pd.Series:
    """Why experts were loaded. A step that waits while another thread loads, in whatever part, is beside loads."""
    again = expert_loads.with_forms(facts.tables).set_index("load_id")["again"].reindex(rows["load_id"])
    created, beside = rows["load_id"].lt(0) & rows["part"].eq(LOAD), rows["load_id"].lt(0) & rows["part"].ne(LOAD)
    kinds = [created, beside, again.eq(True).to_numpy()]
    reason = np.select(kinds, ["NPU contexts", "waiting for threads that load", "reloads"], "first loads")
    return rows["duration_ns"].groupby(reason).sum()
