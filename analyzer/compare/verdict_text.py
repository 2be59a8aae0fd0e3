"""Verdict and causes as sentences, and as Markdown and JUnit XML for continuous integration."""

from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd

from analyzer.compare.environment import Difference
from analyzer.compare.functions import FUNCTION, OF_SAMPLES
from analyzer.compare.statistics import drift_factor
from analyzer.compare.structure import Change, Drift
from analyzer.compare.verdicts import FASTER, FEASIBLE, OTHER_CLOCKS, PRACTICAL, SAME, SLOWER, UNKNOWN
from analyzer.compare.waterfall import Waterfall
from analyzer.questions.stacks import short_function
from moescope.plain import markdown_text
from moescope.terminal import counted

Words = list[tuple[str, str]]
LEVEL = {SLOWER: "bad", FASTER: "good", UNKNOWN: "warn", OTHER_CLOCKS: "warn"}
CULPRITS, LISTED, MARKDOWN_ROWS = 3, 4, 40
TIMED = ("ms", "us", "s", "tok/s", "MHz", "")
"""Units of metrics that are faster or slower; the pace has none."""
COUNTED = ("bytes", "count", "cycles", "J", "W", OF_SAMPLES)
"""Units of metrics that are more or less."""
ODD_DRIFT, LEAST_DRIFT = 2.0, 0.1
PHASE_OF = {
    "TTFT": "prefill",
    "prefill speed": "prefill",
    "TPOT, median": "decode",
    "decode speed": "decode",
    "decode step": "decode",
}
ENERGY = "energy per token"
HEADLINES = ("TTFT", "TPOT, median", "decode speed", "prefill speed", "decode step", "step time", ENERGY)
"""Figures of speed, and energy, in the order of every screen."""
CAUSAL_ORDER = (
    ("clocks", ""),
    ("at a clock", ""),
    ("expert", "hit rate"),
    ("memory", ""),
    ("scheduling", ""),
    ("expert", "load time per step"),
    ("npu", ""),
    ("pace", ""),
    ("operator", ""),
    ("function", "CPU time itself"),
    ("function", ""),
    ("expert", ""),
    ("closure", ""),
)
"""(family, metric or "" for all others) that may explain a change of speed: causes stand before what they take time from."""


def figure_text(value: float | None, unit: str) -> str:
    """A figure with its unit, rounded to three or four digits."""
    if value is None or np.isnan(value):
        return "-"
    scale = {"share": 100.0}.get(unit, 1.0)
    suffix = {"share": " %", "count": "", "": ""}.get(unit, f" {unit}")
    size = abs(value * scale)
    digits = 0 if size >= 1000 or size == 0 else 1 if size >= 100 else 2 if size >= 1 else 4
    return f"{value * scale:,.{digits}f}{suffix}"


def percent_text(ratio: float | None) -> str:
    """A ratio as a percentage change."""
    return "from 0" if ratio is None or np.isnan(ratio) else f"{100 * (ratio - 1):+,.1f} %"


def direction(row: dict[str, Any]) -> str:
    """The verdict as a word that fits the metric: times are slower or faster, counts more or less, shares better or worse."""
    if row["verdict"] not in (SLOWER, FASTER):
        return str(row["verdict"])
    worse = row["verdict"] == SLOWER
    if row["unit"] in COUNTED:
        return "more" if worse == (row["better"] == "lower") else "less"
    if row["unit"] in TIMED:
        return str(row["verdict"])
    return "worse" if worse else "better"


def interval_text(row: dict[str, Any]) -> str:
    """The 95 % interval of the change, from 0 in the metric's unit; a single run shows none."""
    if min(row["n_base"], row["n_cand"]) < 2:
        return "unknown"
    if not any(row[end] is None or np.isnan(row[end]) for end in ("low", "high")):
        return f"{percent_text(row['low'])} to {percent_text(row['high'])}"
    ends = [row.get(end) for end in ("least", "most")]
    return "unknown" if None in ends else " to ".join(figure_text(end, row["unit"]) for end in ends)


def metric_name(row: dict[str, Any]) -> str:
    """A metric's display name."""
    where = [str(row["type"])] if row["type"] else []
    where += [f"layer {row['layer']}"] if row["layer"] >= 0 else []
    where += [f"expert {row['expert']}"] if row["expert"] >= 0 else []
    where += [str(row[name]) for name in ("shape", "graph") if row[name]]
    where += [f"on {row['backend']}"] if row["backend"] else []
    name = "" if row["family"] == "operator" else str(row["metric"])
    if row["family"] == FUNCTION:
        name, where = f"{name} of", [short_function(row["type"])]
    names = f" ({row['label']})" if row["label"] else ""
    phase = f" in {row['phase']}" if row["phase"] else ""
    return " ".join([*([name] if name else []), *where]) + names + phase


def with_figures(row: dict[str, Any]) -> str:
    """Name, from, to, change, interval, runs; if the pace was divided out, also the figure and the change that were judged."""
    change = f"{figure_text(row['base'], row['unit'])} → {figure_text(row['cand'], row['unit'])} ({percent_text(row['change'])}"
    judged = f"); at the base's pace {at_pace(row)}" if row.get("paced") else ""
    runs = f"{row['n_base']} + {row['n_cand']} runs"
    return f"{metric_name(row)}: {change}{judged}, 95 % interval {interval_text(row)}{'' if judged else ')'}; {runs}"


def at_pace(row: dict[str, Any]) -> str:
    """The candidate's figure and change at the base's pace; "" if the pace was not divided out."""
    return f"{figure_text(row['at_pace'], row['unit'])}, {percent_text(row['ratio'])}" if row.get("paced") else ""


def conclusions(
    judged: pd.DataFrame,
    falls: list[Waterfall],
    structure: list[Change],
    drift: list[Drift],
    unlike: list[Difference],
    practical: float = PRACTICAL,
) -> Words:
    """Sentences with a level (bad | good | warn | info): speed, its causes, what else differs. `judged` is in report order."""
    speed = judged[judged["family"] == "speed"].to_dict("records")
    out = [(LEVEL.get(row["verdict"], "info"), speed_sentence(row, practical)) for row in speed]
    if not speed:
        out.append(("warn", without_speed(judged)))
    changed = {PHASE_OF.get(str(row["metric"]), "") for row in speed if row["verdict"] in (SLOWER, FASTER)}
    out += [sentence for fall in falls if fall.phase in changed for sentence in waterfall_sentence(fall, judged)]
    out += changed_causes(judged)
    out += energy_sentences(judged)
    out += structure_sentences(structure)
    out += drifted_layers(drift)
    unfair = [difference for difference in unlike if difference.unfair]
    if unfair:
        text = "; ".join(f"{d.what}: {d.base} → {d.cand}" for d in unfair[:LISTED])
        out.append(("warn", f"The sides were measured under different conditions: {text}."))
    return out


def verdict_sentence(judged: pd.DataFrame) -> str:
    """The metrics of speed in one sentence, by verdict; if all are inconclusive, with the number of further runs needed."""
    names: dict[str, list[str]] = {}
    rows = judged[judged["family"] == "speed"].to_dict("records")
    for row in rows:
        names.setdefault(direction(row), []).append(spoken_name(row["metric"]))
    unknown, clocked = names.pop(UNKNOWN, []), names.pop(OTHER_CLOCKS, [])
    parts = [f"{'the same' if word == SAME else word} in {', '.join(metrics)}" for word, metrics in names.items()]
    clauses = [f"The candidate is {'; '.join(parts)}"] if parts else []
    clauses += (
        [f"the sides' clocks explain the change of {', '.join(clocked)}, which is no verdict on the build"] if clocked else []
    )
    clauses += [f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} inconclusive"] if unknown else []
    clauses += [runs_needed(max(rows, key=lambda row: row["more_runs"]))] if unknown and not parts else []
    text = "; ".join(clauses)
    return f"{text[:1].upper()}{text[1:]}." if clauses else without_speed(judged)


def without_speed(judged: pd.DataFrame) -> str:
    """What is compared of runs without steps, in one sentence."""
    if (judged["unit"] == OF_SAMPLES).any():
        return "No run has steps: not speed was compared, but the shares of functions, in which one's gain is the others' loss."
    return "No run has steps, so speed was not compared."


def spoken_name(metric: str) -> str:
    """A metric's name within a sentence: `median TPOT` for `TPOT, median`."""
    return " ".join(reversed(metric.split(", ")))


def speed_sentence(row: dict[str, Any], practical: float) -> str:
    """One metric of speed in a sentence; `practical`: the smallest relative change that matters."""
    words = {
        SLOWER: "is slower",
        FASTER: "is faster",
        UNKNOWN: "is inconclusive",
        OTHER_CLOCKS: "differs as the sides' clocks do",
    }.get(row["verdict"])
    more = f"; {runs_needed(row)}" if row["verdict"] == UNKNOWN else ""
    words = words or (f"is the same within {100 * practical:.1f} %" if row["verdict"] == SAME else f"has {row['verdict']}")
    return f"{spoken_name(row['metric'])} {words}: {with_figures(row).split(': ', 1)[1]}{more}."


def runs_needed(row: dict[str, Any]) -> str:
    """The number of further runs needed for a verdict, as text."""
    if row["more_runs_known"]:
        return f"about {counted(row['more_runs'], 'more run')} per side would decide"
    if row["more_runs"] >= FEASIBLE:
        return f"more than {FEASIBLE} more runs per side would be needed"
    return f"too few runs to see their spread: record at least {counted(row['more_runs'], 'more run')} per side"


def waterfall_sentence(fall: Waterfall, judged: pd.DataFrame) -> Words:
    """The parts of a phase's difference."""
    total = fall.step.delta
    if not total or not fall.step.base:
        return []
    shares = [(part, part.delta / total) for part in fall.parts if abs(part.delta / total) > 0.1]
    shares.sort(key=lambda pair: -abs(pair[1]))
    text = ", ".join(f"{part.name} {part.delta:+.3f} ms ({share:.0%})" for part, share in shares[:CULPRITS])
    change = f"The mean {fall.phase} step went from {fall.step.base:.3f} to {fall.step.cand:.3f} ms"
    return [("info", f"{change}; of the {total:+.3f} ms: {text}.")] if text else []


def causal_rank(judged: pd.DataFrame) -> pd.Series:
    """The place of each metric in CAUSAL_ORDER; len(CAUSAL_ORDER) for others."""
    rank = pd.Series(len(CAUSAL_ORDER), judged.index)
    for place, (family, metric) in reversed(list(enumerate(CAUSAL_ORDER))):
        rank = rank.mask((judged["family"] == family) & ((judged["metric"] == metric) | (metric == "")), place)
    return rank


def changed_causes(judged: pd.DataFrame) -> Words:
    """The metrics other than speed with a certain change: causes before effects, then the largest share of a step first."""
    rank = causal_rank(judged)
    listed = judged["verdict"].isin([SLOWER, FASTER]) & (rank < len(CAUSAL_ORDER))
    changed = judged[listed]
    weight = changed["estimate"].abs() * changed["share"].fillna(0.05)
    rows = changed.iloc[np.lexsort((-weight, rank[listed]))[:LISTED]].to_dict("records")
    out = [(LEVEL[row["verdict"]], f"{direction(row).capitalize()}: {with_figures(row)}.") for row in rows]
    unlisted = len(changed) - len(rows)
    return [*out, ("info", f"{unlisted} more metrics changed; see the tables.")] if unlisted else out


def energy_sentences(judged: pd.DataFrame) -> Words:
    """The phases whose energy per token changed for certain, by power rail."""
    certain = (judged["metric"] == ENERGY) & judged["verdict"].isin([SLOWER, FASTER])
    rows = judged[certain].to_dict("records")
    return [(LEVEL[row["verdict"]], f"{direction(row).capitalize()}: {with_figures(row)}.") for row in rows]


def in_turns(base: np.ndarray, cand: np.ndarray) -> Words:
    """A warning if the sides were not recorded alternately, according to the begins of their runs (s)."""
    if drift_factor(base, cand) == 1:
        return []
    dated = np.isfinite(base).all() and np.isfinite(cand).all()
    order = "One side was recorded after the other" if dated else "The recording time of some runs is unknown"
    consequence = "so a drift of the machine may look like a change: intervals are widened and only larger changes are reported"
    return [
        (
            "warn",
            f"{order}, {consequence}. Record them alternately (`moescope compare -- A :: B`).",
        )
    ]


def structure_sentences(changes: list[Change]) -> Words:
    """Operators, backends and dims that vanished or appeared."""
    out: Words = []
    for phase in dict.fromkeys(change.phase for change in changes):
        for appeared, word in ((False, "vanished"), (True, "appeared")):
            names = [f"{c.what} ({c.aspect})" for c in changes if c.phase == phase and c.appeared == appeared]
            if names:
                omitted = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
                out.append(("warn", f"In {phase} {word}: {', '.join(names[:LISTED])}{omitted}."))
    return out


def drifted_layers(drift: list[Drift]) -> Words:
    """Layers with a routing drift larger than that between runs of the base."""
    odd = [d for d in drift if d.distance > max(LEAST_DRIFT, ODD_DRIFT * (d.usual if d.usual == d.usual else 0.0))]
    if not odd:
        return []
    furthest = max(odd, key=lambda d: d.distance)
    most = f"most in layer {furthest.layer} (Jensen-Shannon distance {furthest.distance:.2f})"
    return [("warn", f"Expert routing changed in {counted(len(odd), 'layer')}, {most}.")]


def markdown_cell(text: object) -> str:
    """A text for one cell of a Markdown table, with Markdown, HTML and line breaks escaped."""
    return markdown_text(" ".join(str(text).split()))


def markdown(document: dict[str, Any]) -> str:
    """A summary for a merge request's comment."""
    mark = {"bad": "🔴", "good": "🟢", "warn": "🟡", "info": "⚪"}
    out = [
        "## MoEScope comparison",
        "",
        *(f"- {mark[sentence['level']]} {markdown_cell(sentence['text'])}" for sentence in document["words"]),
        "",
    ]
    names, rows = metric_table(document, MARKDOWN_ROWS)
    out += [f"| {' | '.join(names)} |", f"|---|{'--:|' * (len(names) - 2)}---|"]
    out += [f"| {' | '.join(map(markdown_cell, row))} |" for row in rows]
    return "\n".join(out) + "\n"


def metric_table(document: dict[str, Any], most: int) -> tuple[list[str], list[list[str]]]:
    """(column names, rows) of speed, energy and changed metrics; figures at the base's pace have a separate column.

    The change is that from base to candidate; interval and verdict are for the figure at the base's pace if there is one.
    """
    metrics = listed_metrics(document)[:most]
    paced = any(row["paced"] for row in metrics)
    names = ["metric", "base", "candidate", "change", *(["at the base's pace"] if paced else []), "95 % interval", "verdict"]
    return names, [metric_cells(row, paced) for row in metrics]


def listed_metrics(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Metrics of speed, energy per token, and changed ones."""
    return [m for m in document["metrics"] if m["family"] == "speed" or m["metric"] == ENERGY or m["verdict"] in (SLOWER, FASTER)]


def metric_cells(row: dict[str, Any], paced: bool) -> list[str]:
    """One row of `metric_table`."""
    figures = [figure_text(row[side], row["unit"]) for side in ("base", "cand")]
    more = f" +{'' if row['more_runs_known'] else '≥'}{row['more_runs']} runs" if row["more_runs"] else ""
    footing = [at_pace(row)] if paced else []
    return [metric_name(row), *figures, percent_text(row["change"]), *footing, interval_text(row), direction(row) + more]


def junit(document: dict[str, Any], failures: list[str]) -> str:
    """JUnit XML: a test per metric of speed, per changed metric, and per other violated limit.

    Tests that violate a limit fail; "inconclusive" is skipped.
    """
    rows = listed_metrics(document)
    suite = ElementTree.Element("testsuite", name="moescope compare", errors="0")
    unreported = list(failures)
    for row in rows:
        name = metric_name(row)
        case = ElementTree.SubElement(suite, "testcase", classname=f"compare.{row['family']}", name=xml_text(name))
        broken_limits = [failure for failure in unreported if failure.startswith(f"{name}: ")]
        if broken_limits:
            ElementTree.SubElement(case, "failure", message=xml_text(with_figures(row)))
            unreported = [failure for failure in unreported if failure not in broken_limits]
        elif row["verdict"] in (UNKNOWN, OTHER_CLOCKS):
            why = runs_needed(row) if row["verdict"] == UNKNOWN else "the sides ran at different clocks"
            ElementTree.SubElement(case, "skipped", message=why)
    for failure in unreported:
        case = ElementTree.SubElement(suite, "testcase", classname="compare.limit", name=xml_text(failure))
        ElementTree.SubElement(case, "failure", message=xml_text(failure))
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
        suite.set(name, str(sum(1 for _ in suite.iter(tag))))
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def xml_text(text: str) -> str:
    """A text without control characters that XML cannot represent."""
    return "".join(c if c >= " " and not 0xD800 <= ord(c) <= 0xDFFF and ord(c) < 0xFFFE else "\ufffd" for c in text)
