"""Periodic disturbances of a series: spikes at equal distances, which need not be whole, and a sinusoid.

Spikes. Steps above a level (LEVELS, in robust standard deviations) are marked. A comb is a period and a phase; its teeth would
hit marks as often as any step does if the marks stood in any order. With m teeth, h hits and a share q of marked steps, that has
a probability of at most exp(-m KL(h/m, q)) (W. Hoeffding, 1963), for any distribution of the noise. The comb with the smallest
one is a period if that, times the number of combs tried, is below FALSE_ALARM; in a short series, too, if it is as improbable
among the smallest ones of the shuffled series, which follow a Gumbel distribution of scale 1 or less. In noise that follows
itself (AR(1)), the matched filter of a spike subtracts its neighbours, and leaves no correlation between teeth. Spikes may stray
from their teeth by half a width (WIDTHS): marks are then widened, which makes chance hits as much more frequent.

Sinusoid. The periodogram, divided by the median power of the surrounding frequencies, has a distribution of its own in noise of
any smooth spectrum: F with 2 and 2 FLOOR degrees of freedom (fewer than the median's, to be careful).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEVELS = (1.5, 2.5, 4.0)
WIDTHS = {1: 2.0, 3: 10.0, 5: 20.0}
"""Steps within which a spike may lie → the shortest period for which that is allowed."""
FALSE_ALARM = 0.01
HALVED_FALSE_ALARM = 0.01
"""Of spikes between the teeth: they would make a right period a wrong one."""
SHUFFLES, SHUFFLED_FALSE_ALARM = 19, 0.002
MOST_SHUFFLED = 600
"""Longer series are not shuffled: it takes long, and they show a period often enough for the bound."""
WAVE_FALSE_ALARM = 0.001
LEAST_TURNS = 4
"""A period is seen at least so often in a series."""
MOST_STEPS = 4096
"""Longer series are searched in their first MOST_STEPS."""
AT_ONCE = 1 << 20
FLOOR, FLOOR_WIDTH = 15, 31
LEAST_WAVE = 32


@dataclass(frozen=True)
class Period:
    """A spike of typical height `height` every `steps` steps, seen `count` times, first at `first`."""

    steps: float
    height: float
    count: int
    first: int


class Comb(NamedTuple):
    """Teeth at begin + k steps. `evidence`: minus the logarithm of the bound on their hits' probability."""

    evidence: float
    steps: float
    begin: float
    width: int
    level: float


def matched_filter(over: np.ndarray, rho: float) -> np.ndarray:
    """The matched filter of a single step in AR(1) noise of correlation rho."""
    padded = np.pad(over, 1)
    return over - rho / (1 + rho**2) * (padded[2:] + padded[:-2])


def spikes_and_steps(over: np.ndarray, rho: float) -> tuple[Period | None, np.ndarray]:
    """(periodic spikes of a series less its level, the steps they are at); rho: correlation of neighbours in the noise."""
    signal = matched_filter(over, rho)
    comb, tried = best_comb(signal[:MOST_STEPS])
    if comb is None or not exceeds_chance(signal[:MOST_STEPS], comb.evidence, tried):
        return None, np.empty(0, np.int64)
    comb = multiple_of(signal[:MOST_STEPS], comb)
    places, turns = tooth_hits(signal[:MOST_STEPS], comb)
    steps, begin = np.polyfit(turns, places, 1)
    places, turns = tooth_hits(signal, comb._replace(steps=float(steps), begin=float(begin)))
    height = float(np.median(over[places]))
    high = over[places] > height / 2
    places, turns = places[high], turns[high]
    if len(places) < LEAST_TURNS or is_wave(over, comb.steps, places):
        return None, np.empty(0, np.int64)
    steps = float(np.polyfit(turns, places, 1)[0])
    return Period(steps, height, len(places), int(places[0])), places


def exceeds_chance(signal: np.ndarray, evidence: float, tried: int) -> bool:
    """Whether the best comb of a series has more evidence than it would have by chance.

    Of tens of thousands of combs most are nearly alike: a few spikes in a short series stay below their bound.
    """
    if evidence >= np.log(tried / FALSE_ALARM):
        return True
    if len(signal) > MOST_SHUFFLED:
        return False
    rng, chance = np.random.default_rng(0), []
    for _ in range(SHUFFLES):
        comb = best_comb(rng.permutation(signal))[0]
        chance.append(comb.evidence if comb else 0.0)
        if chance[-1] >= evidence:
            return False
    return evidence >= np.median(chance) + np.log(np.log(2) / SHUFFLED_FALSE_ALARM)


def multiple_of(signal: np.ndarray, comb: Comb) -> Comb:
    """The comb, or that of half or twice its period.

    Half if spikes lie between its teeth as well; twice if every other tooth alone is better evidence, and at the others there are
    no more spikes than chance puts there: some spikes of a series may be missing.
    """
    share = float(np.mean(running_maximum(signal, comb.width + 2) > comb.level))

    def evidence(turned: Comb) -> float:
        found = len(tooth_hits(signal, turned)[0])
        return float(hit_evidence(np.array([found]), np.array([len(signal) / turned.steps]), share)[0])

    half, steps = comb.steps / 2, comb.steps
    between = comb._replace(begin=(comb.begin + half) % steps)
    if half >= WIDTHS[comb.width] and chance_of(signal, between, comb) < HALVED_FALSE_ALARM:
        return comb._replace(steps=half, begin=comb.begin % half)
    first, second = (comb._replace(steps=2 * steps, begin=comb.begin + turn * steps) for turn in (0, 1))
    best, other = (first, second) if evidence(first) >= evidence(second) else (second, first)
    doubled = 2 * steps * LEAST_TURNS <= len(signal) and evidence(best) > evidence(comb)
    return best if doubled and chance_of(signal, other, best) > FALSE_ALARM else comb


def chance_of(signal: np.ndarray, comb: Comb, known: Comb) -> float:
    """The probability that chance makes a comb's teeth so high, away from those of a known comb.

    R. A. Fisher's sum of logarithms of each tooth's probability, which is its rank among all steps: heights count, not hits
    """
    heights = running_maximum(signal, comb.width + 1)
    taken = np.zeros(len(heights), bool)
    for tooth in np.ceil(np.arange(known.begin, len(signal), known.steps)).astype(np.int64):
        taken[max(tooth - comb.width, 0) : tooth + comb.width + 1] = True
    usual = np.sort(heights[~taken])
    places = np.ceil(np.arange(comb.begin, len(signal), comb.steps)).astype(np.int64)
    places = places[~taken[places]]
    if len(places) == 0 or len(usual) < len(places):
        return 1.0
    above = len(usual) - np.searchsorted(usual, heights[places], "left")
    logs = -np.log(np.maximum(above, 1) / len(usual))
    return erlang_tail(float(logs.sum()), len(logs))


def erlang_tail(value: float, terms: int) -> float:
    """The probability that a sum of `terms` exponential variables of mean 1 exceeds a value."""
    logs = -value + np.arange(terms) * np.log(max(value, 1e-300)) - np.cumsum(np.log(np.maximum(np.arange(terms), 1)))
    return float(np.exp(logs).sum())


def best_comb(signal: np.ndarray) -> tuple[Comb | None, int]:
    """(the comb whose hits are least probable, the number of combs tried)."""
    n, best, tried = len(signal), None, 0
    spread = 1.4826 * np.median(np.abs(signal - np.median(signal))) if n else 0.0
    for width, shortest in WIDTHS.items():
        if n <= LEAST_TURNS * shortest:
            continue
        periods = shortest * np.exp(np.arange(0, np.log(n / LEAST_TURNS / shortest), 1 / n))
        tried += len(LEVELS) * int(2 * np.ceil(periods).sum())
        highest = running_maximum(signal, width)
        for level in LEVELS:
            found = best_of(np.flatnonzero(highest > level * max(spread, 1e-12)), n, periods)
            if found and (best is None or found[0] > best.evidence):
                best = Comb(*found, width, level * spread)
    return best, tried


def running_maximum(signal: np.ndarray, width: int) -> np.ndarray:
    """The greatest value within `width` steps around each; if that is even, between steps, from before the first on."""
    padded = np.pad(signal, width // 2, constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(padded, width).max(axis=1)


def best_of(marks: np.ndarray, n: int, periods: np.ndarray) -> tuple[float, float, float] | None:
    """(evidence, period, begin) of the best comb for marked steps of n; None if they are too few, or as good as all."""
    if not LEAST_TURNS <= len(marks) < n:
        return None
    best, share = (0.0, 0.0, 0.0), len(marks) / n
    bins, rows = int(periods[-1]) + 2, max(1, AT_ONCE // max(len(marks), int(periods[-1])))
    for start in range(0, len(periods), rows):
        part = periods[start : start + rows, None]
        phase = marks - part * np.floor(marks / part)
        for offset in (0.0, 0.5):
            place = (phase + offset).astype(np.int64) + bins * np.arange(len(part))[:, None]
            counted = np.bincount(place.ravel(), minlength=bins * len(part)).reshape(len(part), bins)
            score = hit_evidence(counted.max(axis=1), n / part[:, 0], share)
            row = int(np.argmax(score))
            if score[row] > best[0]:
                best = float(score[row]), float(part[row, 0]), int(counted[row].argmax()) - offset + 0.5
    return best


def hit_evidence(hits: np.ndarray, teeth: np.ndarray, share: float) -> np.ndarray:
    """m KL(h/m, q): minus the logarithm of the bound on the probability of at least as many hits; 0 for no more than expected."""
    rate = np.minimum(hits / teeth, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        some = np.where(rate > 0, rate * np.log(rate / share), 0.0)
        rest = np.where(rate < 1, (1 - rate) * np.log((1 - rate) / (1 - share)), 0.0)
    return np.where(rate > share, teeth * (some + rest), 0.0)


def tooth_hits(signal: np.ndarray, comb: Comb) -> tuple[np.ndarray, np.ndarray]:
    """(the highest step around each of the comb's teeth, if above its level; its turn)."""
    reach = comb.width // 2
    places: list[int] = []
    turns: list[int] = []
    for turn in range(int(np.ceil((len(signal) + reach - comb.begin) / comb.steps))):
        tooth = comb.begin + turn * comb.steps
        low, high = max(int(np.floor(tooth)) - reach, 0), min(int(np.ceil(tooth)) + reach + 1, len(signal))
        if low < high:
            place = low + int(np.argmax(signal[low:high]))
            if signal[place] > comb.level:
                places.append(place)
                turns.append(turn)
    return np.array(places, np.int64), np.array(turns, np.int64)


def is_wave(over: np.ndarray, steps: float, places: np.ndarray) -> bool:
    """Whether a sinusoid of this period explains more of the series than spikes at these steps."""
    turned = over @ np.exp(-2j * np.pi * np.arange(len(over)) / steps)
    return bool(2 * abs(turned) ** 2 / len(over) > 1.001 * (over[places] ** 2).sum())


def periodic_wave(rest: np.ndarray) -> dict[str, float] | None:
    """A sinusoid in a series without level: its `period` in steps and `share` of the variance; None if none is significant.

    The series is clipped at its 5 and 95 % quantiles, so that single steps have no part in it.
    """
    n = len(rest)
    if n < LEAST_WAVE:
        return None
    clipped = np.clip(rest, *np.quantile(rest, (0.05, 0.95)))
    clipped = clipped - clipped.mean()
    if clipped @ clipped <= 1e-18 * n:
        return None
    rho = max(float(clipped[1:] @ clipped[:-1] / (clipped @ clipped)), 0.0)
    power = np.abs(np.fft.rfft(clipped)[1:]) ** 2
    # Noise that follows itself has its power at low frequencies, more than their surroundings: AR(1)'s is divided out.
    power *= 1 + rho**2 - 2 * rho * np.cos(2 * np.pi * np.arange(1, len(power) + 1) / n)
    if n % 2 == 0:
        power[-1] /= 2  # a period of two steps has one degree of freedom, whose tail is longer
    logs = np.pad(np.log(np.maximum(power, 1e-9 * power.max())), FLOOR_WIDTH // 2, mode="reflect")
    floor = np.exp(np.median(np.lib.stride_tricks.sliding_window_view(logs, FLOOR_WIDTH), axis=1)) / np.log(2)
    ratio = power / floor
    ratio[: LEAST_TURNS - 1] = 0
    peak = int(np.argmax(ratio))
    chance = len(power) * (1 + ratio[peak] / FLOOR) ** -FLOOR
    if chance >= WAVE_FALSE_ALARM:
        return None
    near = np.linspace(peak, peak + 2, 41) / n
    finer = np.abs(np.exp(-2j * np.pi * near[:, None] * np.arange(n)) @ clipped) ** 2
    best = int(np.argmax(finer))
    return {"period": float(1 / near[best]), "share": float(min(1.0, 2 * finer[best] / n / (clipped @ clipped)))}
