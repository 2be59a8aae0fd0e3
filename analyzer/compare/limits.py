"""Limits for continuous integration, such as slower:5%, and their violations."""

import argparse
from dataclasses import dataclass
from typing import Any

from analyzer.compare.verdict_text import metric_name, percent_text
from analyzer.compare.verdicts import OTHER_CLOCKS, SLOWER, UNKNOWN

KINDS = {
    "slower": ("speed", "tail"),
    "operator": ("pace", "operator", "expert", "npu", "memory", "scheduling", "phase"),
    "energy": ("energy",),
    "structure": (),
    "unlike": (),
    "inconclusive": (),
    "nothing": (),
}


@dataclass(frozen=True)
class Limit:
    """`kind`: one of KINDS; `least`: the smallest relative change that counts, in addition to the practical threshold."""

    kind: str
    least: float = 0.0


def parse_limit(text: str) -> Limit:
    """slower, slower:5%, structure ..."""
    kind, _, share = text.partition(":")
    try:
        least = float(share.removesuffix("%")) / 100 if share else 0.0
    except ValueError:
        least = -1.0
    if kind not in KINDS or least < 0 or (share and not KINDS[kind]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a limit; write one of {', '.join(KINDS)}, the first three as slower:5%"
        )
    return Limit(kind, least)


def violations(document: dict[str, Any], limits: list[Limit]) -> list[str]:
    """One sentence for each violation of a limit in a comparison."""
    return [sentence for limit in limits for sentence in _broken_by(document, limit)]


def _broken_by(document: dict[str, Any], limit: Limit) -> list[str]:
    if limit.kind == "structure":
        return [f"{c['what']} {'appeared' if c['appeared'] else 'vanished'} in {c['phase']}" for c in document["structure"]]
    if limit.kind == "unlike":
        return [f"{row['what']} differs: {row['base']} → {row['cand']}" for row in document["environment"] if row["unfair"]]
    if limit.kind == "inconclusive":
        return [
            f"{metric_name(m)}: {m['verdict']}"
            for m in document["metrics"]
            if m["family"] == "speed" and m["verdict"] in (UNKNOWN, OTHER_CLOCKS)
        ]
    slower = [m for m in document["metrics"] if m["family"] in KINDS[limit.kind] and m["verdict"] == SLOWER]
    return [f"{metric_name(m)}: {percent_text(m['ratio'])}" for m in slower if relative_worsening(m) > limit.least]


def relative_worsening(metric: dict[str, Any]) -> float:
    """The relative worsening of a metric: 0.05 for 5 % more if lower is better, or 5 % less if higher is better.

    Infinite if the base is 0.
    """
    if metric["ratio"] is None:
        return float("inf")
    return float(metric["ratio"] - 1 if metric["better"] == "lower" else 1 - metric["ratio"])
