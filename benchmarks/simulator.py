"""The simulator against the runtime: settings that were never recorded, simulated and then run.

    sudo .venv/bin/python -m benchmarks.simulator PACKAGE --text FILE --caches 25%,50%,100% --chunks 8,64 --rounds 4 --keep DIR

Traced runs give the costs: a cache of 35 %, the same with prefetching, and everything resident, with chunks that are not under
test; another one, of 20 %, gives the predictor's requests.
Their untraced twins run in the same rounds as the settings under test; with these the traced costs are scaled to an untraced
run: one factor for the work of each phase and mode, one for the fixed cost of a chunk, one for loads on the thread
that needs them, one for background loads.

A machine's pace drifts from minute to minute. The reference, everything resident with a chunk not under test, runs before and
after every two other runs; a run's pace is the reference's time around it divided by its median. Errors are given raw and at
the pace; the pace comes only from the reference, never from the setting under test. If all experts are resident, a decoded
token is the reference's own work, so that its TPOT shows the noise and no prediction: figures are also given without it.

With --keep DIR a call adds its rounds to those in DIR. Figures are the errors of TTFT, TPOT and hit rate (in points),
median and quartiles over rounds, their standard errors by chance, and the agreement of the settings' ranking.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import spearmanr

from analyzer.predict import costs, simulator, trace
from analyzer.tables.store import load_tables
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import quartiles, single
from views.commands.simulate import cache_bytes

FIGURES = ("ttft_ms", "tpot_ms")
PHASES = {"ttft_ms": "prefill", "tpot_ms": "decode"}
CALIBRATION_SHARE, CALIBRATION_CHUNKS = "35%", (12, 96)
ASKING_SHARE = "20%"
"""Of the cache whose recording says what is fetched ahead: what is there already is not asked for, so the smallest tells most."""
BETWEEN_REFERENCES = 2
APART = 0.1
"""Settings nearer to each other than this have no order: their runs lie further apart."""
LEVELLING = 6
"""Times that simulated twins are brought nearer to the real ones: what waits for loads does not scale with the work."""
RESAMPLED = 1000
CHUNKED = ("attention", "router", "dispatch")
"""Work whose cost arises once per chunk of a prompt."""
LOADING = (costs.DEMAND, costs.AHEAD)
UNSEEN = 0.05
"""Weight of a factor of 1 on loads, against the modes' means."""
CHUNKS_APART = (0.1, 10.0)
"""Bounds of the factor on what a chunk costs whatever its rows."""

Run = dict[str, float]
Round = list[tuple[str, Run]]


@dataclass(frozen=True)
class Setting:
    """The runtime's settings; `prefetch` applies only to a limited cache."""

    cache: int | None
    prefetch: bool
    chunk: int

    def simulated(self) -> simulator.Settings:
        """The settings for the simulator."""
        return simulator.Settings(self.cache, self.chunk, prefetch=simulator.RECORDED if self.prefetch else None)

    def __str__(self) -> str:
        size = "all" if self.cache is None else f"{self.cache / 1e6:.2f} MB"
        return f"{size:>9} {'prefetch' if self.prefetch else '-':8} {self.chunk:5}"


class Runtime:
    """Runs the runtime's command line on one text."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder, self.prompt = args, folder, folder / "prompt.txt"
        self.prompt.write_text(args.text.read_text(encoding="utf-8")[: args.characters], encoding="utf-8")

    def words(self, one: Setting) -> list[str]:
        """The command line."""
        words = [sys.executable, "-m", "moescope", "generate", str(self.args.package), "--prompt-file", str(self.prompt)]
        words += ["--max-new-tokens", str(self.args.tokens), "--ignore-end", "--json", "--chunk", str(one.chunk)]
        cache = "all" if one.cache is None else str(one.cache)
        return [*words, "--expert-cache", cache, "--prefetch", "on" if one.prefetch else "off"]

    def run(self, one: Setting) -> Run:
        """Figures of an untraced run."""
        began = monotonic()
        done = subprocess.run(self.words(one), check=True, capture_output=True, text=True)
        statistics: dict[str, Any] = json.loads(done.stdout)["statistics"]
        loads = sum(statistics["loads"].values())
        figures = {"ttft_ms": statistics["prefill_ns"] / 1e6, "tpot_ms": statistics["decode_ns_per_token"] / 1e6}
        figures |= {"hit_rate": statistics["hit_rate"], "load_ms": statistics["load_ns"] / 1e6 / loads if loads else 0.0}
        return figures | {"total_ms": statistics["total_ns"] / 1e6, "at_s": (began + monotonic()) / 2}

    def record(self, one: Setting, number: int) -> costs.Tables:
        """Tables of a traced run."""
        folder = self.folder / "-".join([*str(one).split(), str(number)])
        if folder.exists():
            return load_tables(folder)
        command = [sys.executable, "-m", "tracer", "run", "-o", str(folder), "--no-views", "--levels", "token,operator,expert"]
        subprocess.run([*command, "--", *self.words(one)], check=True, capture_output=True)
        return load_tables(folder)


def measure_rounds(runtime: Runtime, reference: Setting, settings: list[Setting], rounds: int, figures: Path) -> list[Round]:
    """Rounds of every setting, with references in between; stored rounds come first."""
    kept: list[Round] = json.loads(figures.read_text()) if figures.exists() else []
    for number in range(rounds):
        turned = settings[number % len(settings) :] + settings[: number % len(settings)]
        runs: Round = [(str(reference), runtime.run(reference))]
        for i, one in enumerate(turned, 1):
            runs.append((str(one), runtime.run(one)))
            if i % BETWEEN_REFERENCES == 0 or i == len(turned):
                runs.append((str(reference), runtime.run(reference)))
        kept.append(runs)
        figures.write_text(json.dumps(kept))
    return kept


def runs_with_pace(rounds: list[Round], reference: str) -> dict[str, list[Run]]:
    """Runs by setting with `pace`: the reference's time around them over its median over all rounds.

    A single reference run may be disturbed: each counts as the median of itself and its neighbours.
    """
    usual = np.median([run["total_ms"] for runs in rounds for name, run in runs if name == reference])
    by_setting: dict[str, list[Run]] = {}
    for runs in rounds:
        moments, took = np.array([(run["at_s"], run["total_ms"]) for name, run in runs if name == reference]).T
        near = np.array([np.median(took[max(i - 1, 0) : i + 2]) for i in range(len(took))])
        for name, run in runs:
            pace = float(np.exp(np.interp(run["at_s"], moments, np.log(near / usual))))
            by_setting.setdefault(name, []).append(run | {"pace": pace})
    return by_setting


def median_run(runs: list[Run], at_pace: bool) -> Run:
    """Median of each figure; with `at_pace`, times are divided by their pace."""
    return {
        name: float(np.median([run[name] / (run["pace"] if at_pace and name.endswith("_ms") else 1) for run in runs]))
        for name in runs[0]
    }


def scaled_line(line: costs.Line, factor: float) -> costs.Line:
    """The line multiplied by `factor`."""
    parts = (line.fixed * factor, line.per_row * factor, line.per_pair * factor)
    return costs.Line(*parts, line.beside, line.per_load * factor)


def scaled_costs(
    cost: costs.Costs, work: dict[tuple[str, str], float], load: float, behind: float, chunk: dict[str, float]
) -> costs.Costs:
    """Costs with factors: `work` by (phase, mode), `load` and `behind` for loads, `chunk` by mode for a chunk's fixed cost."""

    def scale(key: tuple[str, ...], line: costs.Line) -> costs.Line:
        _, _, phase, mode = (*key, "", "")[:4]
        if key[0] in CHUNKED and phase == "prefill":
            line = replace(line, fixed=line.fixed * chunk.get(mode, 1.0))
        return scaled_line(line, work.get((phase, mode), 1.0))

    return replace(
        cost,
        work={key: scale(key, line) for key, line in cost.work.items()},
        load=scaled_line(cost.load, load),
        behind=scaled_line(cost.behind, behind) if cost.behind else None,
        behind_first=scaled_line(cost.behind_first, behind) if cost.behind_first else None,
        loads={key: scaled_line(line, load) for key, line in cost.loads.items()},
        first={key: seconds * work.get(key[1:], 1.0) for key, seconds in cost.first.items()},
    )


def load_factors(cost: costs.Costs, routes: trace.Trace, real: dict[str, dict[Setting, float]]) -> tuple[float, float]:
    """Factors on loads where they are needed and on a loader's thread, so that each mode's mean load takes as long as `real`.

    A prompt's loads are the loader's in every mode, so that a mode's mean has both kinds.
    """
    rows, goals = [np.eye(2) * UNSEEN], [np.full(2, UNSEEN)]
    for settings in real.values():
        spans = [span for one in settings for span in simulator.simulate_trace(routes, cost, one.simulated()).spans]
        loads = [span for span in spans if span.kind in ("load", "prefetch")]
        took = np.array([span.end - span.begin for span in loads])
        beside = np.array([span.unit.startswith(simulator.STORAGE) for span in loads])
        mean = float(np.mean(list(settings.values())))
        rows.append(np.array([[took[~beside].sum(), took[beside].sum()]]) / len(loads) / mean)
        goals.append(np.ones(1))
    factors, _ = nnls(np.concatenate(rows), np.concatenate(goals))
    return float(factors[0]), float(factors[1])


def untraced_costs(cost: costs.Costs, routes: trace.Trace, twins: dict[Setting, Run]) -> costs.Costs:
    """The traced costs scaled to the untraced twins: loads by their times, then work until simulated twins take as long."""
    size = cost.expert_bytes["cpu"]
    by_mode: dict[str, list[Setting]] = {}
    for one in twins:
        by_mode.setdefault(one.simulated().mode(size), []).append(one)
    load, behind = load_factors(cost, routes, {m: {one: twins[one]["load_ms"] / 1e3 for one in by_mode[m]} for m in LOADING})
    work, chunk = {(phase, mode): 1.0 for phase in PHASES.values() for mode in by_mode}, dict.fromkeys(by_mode, 1.0)
    for _, (mode, members) in itertools.product(range(LEVELLING), by_mode.items()):
        now = scaled_costs(cost, work, load, behind, chunk)
        simulated = {one: simulator.simulate_trace(routes, now, one.simulated()).summary() for one in members}
        for name, phase in PHASES.items():
            work[phase, mode] *= float(np.exp(np.mean([np.log(twins[one][name] / simulated[one][name]) for one in members])))
        small, large = members
        apart = [max(each[small]["ttft_ms"] - each[large]["ttft_ms"], 1e-3) for each in (twins, simulated)]
        chunk[mode] = float(np.clip(chunk[mode] * apart[0] / apart[1], *CHUNKS_APART))
    return scaled_costs(cost, work, load, behind, chunk)


def error_by_chance(real: list[Run], twins: list[list[Run]], name: str, at_pace: bool) -> float:
    """Standard error, in %, of a setting's error: what resampled rounds change its median by, over that of its mode's twins.

    The simulated time follows the twins that its costs are scaled to, so their noise is in the error like the setting's own.
    """
    rounds = np.random.default_rng(0).random((RESAMPLED, len(real)))
    middles = []
    for runs in (real, *twins):  # the reference has several runs in a round: moments are drawn, not rounds
        times = np.array([run[name] / (run["pace"] if at_pace else 1) for run in runs])
        middles.append(np.log(np.median(times[(rounds * len(runs)).astype(int)], axis=1)))
    return 100 * float(np.std(np.mean(middles[1:], axis=0) - middles[0]))


def add_errors(
    report: Report,
    real: dict[Setting, list[Run]],
    twins: dict[Setting, list[Run]],
    cost: costs.Costs,
    routes: trace.Trace,
    at_pace: bool,
) -> None:
    """Add the errors of every setting by run, then those of all settings."""
    clock = "at the reference's pace" if at_pace else "raw"
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in FIGURES}
    chance: dict[str, list[float]] = {name: [] for name in FIGURES}
    points, size = [], cost.expert_bytes["cpu"]
    for one, runs in real.items():
        seen, simulated = median_run(runs, at_pace), simulator.simulate_trace(routes, cost, one.simulated()).summary()
        for name in FIGURES:
            each = np.array([run[name] / (run["pace"] if at_pace else 1) for run in runs])
            pairs[name].append((seen[name], simulated[name]))
            alike = [of for twin, of in twins.items() if twin.simulated().mode(size) == one.simulated().mode(size)]
            chance[name].append(error_by_chance(runs, alike, name, at_pace))
            setting = " ".join(str(one).split())
            report.add(f"{clock}, {setting}: error of {name}", "%", quartiles(100 * (simulated[name] / each - 1)))
        points.append(100 * (simulated["hit_rate"] - seen["hit_rate"]))
    limited = np.array([one.cache is not None for one in real])
    for name, rows in pairs.items():
        add_summary(report, f"{clock}, {name}", np.array(rows))
        report.add(f"{clock}, {name}: standard error of a setting's error", "%", quartiles(np.array(chance[name])))
        if name == "tpot_ms":
            add_summary(report, f"{clock}, {name} without resident ones", np.array(rows)[limited])
    report.add(f"{clock}: largest error of the hit rate", "points", single(np.abs(points).max(), len(points)))


def add_summary(report: Report, name: str, rows: np.ndarray) -> None:
    """Add the accuracy of [settings, (real, simulated)]."""
    error, n = 100 * np.abs(rows[:, 1] / rows[:, 0] - 1), len(rows)
    pairs = [(a, b) for a, b in itertools.permutations(rows, 2) if a[0] > b[0] * (1 + APART)]
    right = sum(a[1] > b[1] for a, b in pairs)
    report.add(f"{name}: settings within 15 %", "%", single(100 * float((error <= 15).mean()), n))
    report.add(f"{name}: largest error", "%", single(error.max(), n))
    report.add(f"{name}: rank correlation", "", single(spearmanr(rows[:, 0], rows[:, 1]).statistic, n))
    if pairs:
        report.add(
            f"{name}: pairs more than {APART:.0%} apart in the right order", "%", single(100 * right / len(pairs), len(pairs))
        )


@dataclass(frozen=True)
class Plan:
    """Settings for calibration (the second is the reference), the one that shows prefetches, and those under test."""

    twins: list[Setting]
    asking: Setting
    tests: list[Setting]

    @property
    def reference(self) -> Setting:
        """Everything resident, with a chunk that is not under test."""
        return self.twins[1]


def parse_settings(args: argparse.Namespace) -> Plan:
    """The settings given on the command line."""
    sizes = json.loads(subprocess.check_output([sys.executable, "-m", "moescope", "inspect", str(args.package), "--json"]))
    whole = sizes["all_experts_bytes"]
    small, least = (cache_bytes(share, whole) for share in (CALIBRATION_SHARE, ASKING_SHARE))
    kinds = ((None, False), (small, False), (small, True))
    twins = [Setting(size, ahead, chunk) for (size, ahead), chunk in itertools.product(kinds, CALIBRATION_CHUNKS)]
    asking = Setting(least, True, CALIBRATION_CHUNKS[-1])
    tests = [
        Setting(cache_bytes(word, whole), prefetch, chunk)
        for word, prefetch, chunk in itertools.product(args.caches, (False, True), args.chunks)
    ]
    tests = [one for one in tests if one.cache is not None or not one.prefetch]
    if set(tests) & {*twins, asking}:
        sys.exit(f"chunks {CALIBRATION_CHUNKS} with {CALIBRATION_SHARE}, {ASKING_SHARE} or all are the calibration's")
    return Plan(twins, asking, tests)


def report_errors(plan: Plan, traced: costs.Costs, routes: trace.Trace, rounds: list[Round], report: Report) -> None:
    """Add the errors of the settings under test, raw and at the reference's pace."""
    by_setting = runs_with_pace(rounds, str(plan.reference))
    lasted = [runs[-1][1]["at_s"] - runs[0][1]["at_s"] for runs in rounds]
    paces = [run["pace"] for runs in by_setting.values() for run in runs]
    report.note(
        f"{len(plan.tests)} settings, {len(rounds)} rounds of {np.mean(lasted):.0f} s; {routes.steps[0].rows} prompt tokens, "
        f"{len(routes.steps) - 1} decode steps; paces {min(paces):.2f} to {max(paces):.2f}"
    )
    for at_pace in (False, True):
        tests, twins = ({one: by_setting[str(one)] for one in settings} for settings in (plan.tests, plan.twins))
        cost = untraced_costs(traced, routes, {one: median_run(runs, at_pace) for one, runs in twins.items()})
        add_errors(report, tests, twins, cost, routes, at_pace)


def main() -> None:
    parser = make_parser(__doc__, rounds=4)
    parser.add_argument("package", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="its beginning is the prompt")
    parser.add_argument("--characters", type=int, default=600)
    parser.add_argument("--caches", default="25%,50%,100%", type=lambda text: text.split(","))
    parser.add_argument("--chunks", default="8,64", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--recordings", type=int, default=1, help="of each calibration setting")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep recordings and figures, and go on with those that lie there"
    )
    args = parser.parse_args()
    report, plan = Report("simulator", args), parse_settings(args)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        runtime = Runtime(args, folder)
        recordings = [runtime.record(one, n) for n, one in itertools.product(range(args.recordings), plan.twins)]
        routes = trace.from_tables(runtime.record(plan.asking, 0))
        others = [one for one in [*plan.twins, *plan.tests] if one != plan.reference]
        rounds = measure_rounds(runtime, plan.reference, others, args.rounds, folder / "figures.json")
    report_errors(plan, costs.from_tables(*recordings), routes, rounds, report)
    report.finish()


if __name__ == "__main__":
    main()
