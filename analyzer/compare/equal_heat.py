"""Verdicts on sides that ran at different clocks: what the clocks alone explain does not count as a change of the build.

A build's step takes between 1 and c times as long at a clock that is c times lower: its time is in proportion to
clock ** -s, s between 0 (waiting for memory) and 1 (computing). Runs whose clock changed say more of s.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analyzer.compare.metrics import AT_CLOCK, CLOCKS, PACE, SAME_CLOCK, TEMPERATURE
from analyzer.compare.verdict_text import with_figures
from analyzer.compare.verdicts import FASTER, OTHER_CLOCKS, SAME, SLOWER

PHASE_OF = {"TTFT": "prefill", "prefill speed": "prefill"}
TIMES = ("ms", "us", "s", "tok/s", "")
FEWEST_SLOPES, DEVIATIONS, MARGIN = 3, 2.5, 0.05
WARMER = 5.0
"""Sides whose hottest zones differ by more °C are not compared in energy."""


def judge_at_clocks(judged: pd.DataFrame, base: np.ndarray, cand: np.ndarray) -> tuple[pd.DataFrame, list[str]]:
    """(judged with the verdict OTHER_CLOCKS where clocks explain the change, a sentence for each phase at other clocks).

    `judged`: of verdicts.judge_apart, whose values `base` and `cand` are, shape [runs, metrics].
    """
    phases = phase_of_metrics(judged)
    verdict, sentences = judged["verdict"].to_numpy(object).copy(), []
    least, most = sensitivity(judged, base, cand)
    for phase, ratio in clock_ratios(judged, base, cand):
        ends = sorted((ratio**least, ratio**most * np.exp(np.copysign(SAME_CLOCK, np.log(ratio)))))
        mine = (phases == phase) & judged["unit"].isin(TIMES).to_numpy() & ~judged["paced"].to_numpy(bool)
        verdict[mine & judged["verdict"].isin((SLOWER, FASTER)).to_numpy() & within_reach(judged, *ends)] = OTHER_CLOCKS
        verdict[(phases == phase) & is_energy(judged) & judged["verdict"].isin((SLOWER, FASTER, SAME)).to_numpy()] = OTHER_CLOCKS
        sentences.append(clock_sentence(phase, 1 / ratio, ends))
    sentences += at_equal_clocks(judged) if sentences else []
    if abs(other_temperature(judged)) > WARMER:
        verdict[is_energy(judged) & judged["verdict"].isin((SLOWER, FASTER, SAME)).to_numpy()] = OTHER_CLOCKS
    changed = verdict != judged["verdict"].to_numpy(object)
    needed = {"more_runs": judged["more_runs"].mask(changed, 0), "more_runs_known": judged["more_runs_known"].mask(changed, True)}
    return judged.assign(verdict=verdict, **needed), sentences


def at_equal_clocks(judged: pd.DataFrame) -> list[str]:
    """A sentence for each clock at which both sides have steps, if there is a verdict."""
    rows = judged[(judged["family"] == AT_CLOCK) & judged["verdict"].isin((SLOWER, FASTER, SAME))]
    return [f"At {row['type']} on both sides, {row['verdict']}: {with_figures(row)}." for row in rows.to_dict("records")]


def is_energy(judged: pd.DataFrame) -> np.ndarray:
    """Metrics of energy: at another clock the voltage differs, too, and leakage at another temperature."""
    return (judged["family"] == "energy").to_numpy()


def phase_of_metrics(judged: pd.DataFrame) -> np.ndarray:
    """The phase of each metric whose time depends on the clock; "" for others."""
    of_speed = judged["metric"].map(PHASE_OF).fillna("decode")
    phase = judged["phase"].where(judged["phase"] != "", of_speed.where(judged["family"].isin(("speed", "tail")), ""))
    return phase.where(~judged["family"].isin((CLOCKS, AT_CLOCK)), "").to_numpy(object)


def clock_ratios(judged: pd.DataFrame, base: np.ndarray, cand: np.ndarray) -> Iterator[tuple[str, float]]:
    """(phase, clock of the base / clock of the candidate) of phases in which the sides' clocks differ, by their medians."""
    for column in np.flatnonzero(((judged["family"] == CLOCKS) & (judged["metric"] == PACE)).to_numpy()):
        sides = [side[:, column][np.isfinite(side[:, column])] for side in (base, cand)]
        if all(map(len, sides)) and abs(np.log(np.median(sides[0]) / np.median(sides[1]))) > SAME_CLOCK:
            yield str(judged["phase"].iloc[column]), float(np.median(sides[0]) / np.median(sides[1]))


def within_reach(judged: pd.DataFrame, least: float, most: float) -> np.ndarray:
    """Metrics whose interval of the ratio of times meets [least, most]."""
    low, high = (judged[name].fillna(judged["ratio"]).to_numpy(np.float64) for name in ("low", "high"))
    speed = (judged["better"] == "higher").to_numpy()
    with np.errstate(divide="ignore"):
        low, high = np.where(speed, 1 / high, low), np.where(speed, 1 / low, high)
    return (low <= most) & (high >= least)


def other_temperature(judged: pd.DataFrame) -> float:
    """By how many °C the candidate's hottest zone was hotter; 0 if that is not known."""
    rows = judged[(judged["family"] == CLOCKS) & (judged["metric"] == TEMPERATURE)]
    warmer = (rows["cand"] - rows["base"]).dropna()
    return float(warmer.iloc[0]) if len(warmer) else 0.0


def sensitivity(judged: pd.DataFrame, base: np.ndarray, cand: np.ndarray) -> tuple[float, float]:
    """(least, most) of the exponent s, by steps at several clocks of the same run; (0, 1) where too few runs have them."""
    columns = np.flatnonzero((judged["family"] == AT_CLOCK).to_numpy())
    logs = np.log(judged["type"].iloc[columns].map(lambda text: float(text.split()[0])).to_numpy(np.float64))
    slopes = [slope for run in (*base[:, columns], *cand[:, columns]) for slope in slope_of(logs, run)]
    if len(slopes) < FEWEST_SLOPES:
        return 0.0, 1.0
    reach = MARGIN + DEVIATIONS * float(np.std(slopes, ddof=1)) / np.sqrt(len(slopes))
    return float(np.clip(np.mean(slopes) - reach, 0, 1)), float(np.clip(np.mean(slopes) + reach, 0, 1))


def slope_of(logs: np.ndarray, times: np.ndarray) -> Iterator[float]:
    """The fall of log time with log clock in one run; nothing if its clocks differ too little."""
    known = np.isfinite(times) & (np.nan_to_num(times) > 0)
    if known.sum() > 1 and np.ptp(logs[known]) > 2 * SAME_CLOCK:
        yield -float(np.polyfit(logs[known], np.log(times[known]), 1)[0])


def clock_sentence(phase: str, change: float, ends: list[float]) -> str:
    """What clocks explain, in words."""
    reach = " to ".join(f"{100 * (end - 1):+.0f} %" for end in ends)
    percent = f"{100 * (change - 1):+.0f} %"
    return (
        f"In {phase} the candidate's clock differs by {percent}, which alone changes the time of a build's step by {reach}: "
        "changes within this are no verdict on the build."
    )
