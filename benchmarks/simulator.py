"""The what-if simulator against the runtime: settings that were never recorded, simulated and then run for real.

    sudo .venv/bin/python -m benchmarks.simulator PACKAGE --text FILE --caches 25%,50%,100% --chunks 8,64 --rounds 7

Three traced runs show the costs: a small cache, the same with prefetching, and everything resident, at chunks that are not under
test. Their untraced twins run by turns with every setting under test, so that a drift of the machine falls on all alike; by
them the traced costs are brought to an untraced run's: one factor for the work of each phase, one for loads on the thread that
needs them, one for those beside it. Medians over rounds. Prints the errors of TTFT, TPOT and hit rate (in points), whether
settings rank alike, and how far the runs of one setting lie apart.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from analyzer.commands.simulate import cache_bytes
from analyzer.predict import costs, simulator, trace
from analyzer.tables import load

FIGURES = ("ttft_ms", "tpot_ms")
CALIBRATION_SHARE, CALIBRATION_CHUNKS = "20%", (12, 12, 96)


@dataclass(frozen=True)
class Setting:
    """What the runtime is told; `prefetch` only means something in a limited cache."""

    cache: int | None
    prefetch: bool
    chunk: int

    def simulated(self) -> simulator.Settings:
        """The same for the simulator."""
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
        words = [sys.executable, "-m", "runtime", "generate", str(self.args.package), "--prompt-file", str(self.prompt)]
        words += ["--max-new-tokens", str(self.args.tokens), "--ignore-end", "--json", "--chunk", str(one.chunk)]
        cache = "all" if one.cache is None else str(one.cache)
        return [*words, "--expert-cache", cache, "--prefetch", "on" if one.prefetch else "off"]

    def run(self, one: Setting) -> dict[str, Any]:
        """Statistics of an untraced run."""
        done = subprocess.run(self.words(one), check=True, capture_output=True, text=True)
        told: dict[str, Any] = json.loads(done.stdout)["statistics"]
        loads = sum(told["loads"].values())
        figures = {"ttft_ms": told["prefill_ns"] / 1e6, "tpot_ms": told["decode_ns_per_token"] / 1e6}
        return figures | {"hit_rate": told["hit_rate"], "load_ms": told["load_ns"] / 1e6 / loads if loads else 0.0}

    def record(self, one: Setting) -> costs.Tables:
        """Tables of a traced run."""
        folder = self.folder / "-".join(str(one).split())
        if folder.exists():
            return load(folder)
        command = [sys.executable, "-m", "tracer", "run", "-o", str(folder), "--no-views", "--levels", "token,operator,expert"]
        subprocess.run([*command, "--", *self.words(one)], check=True, capture_output=True)
        return load(folder)


def measured(runtime: Runtime, settings: list[Setting], rounds: int, figures: Path) -> dict[Setting, list[dict[str, Any]]]:
    """Runs of every setting, by turns."""
    if figures.exists():
        kept = json.loads(figures.read_text())
        return {one: kept[str(one)] for one in settings}
    real: dict[Setting, list[dict[str, Any]]] = {one: [] for one in settings}
    for _, one in itertools.product(range(rounds), settings):
        real[one].append(runtime.run(one))
    figures.write_text(json.dumps({str(one): runs for one, runs in real.items()}))
    return real


def middle(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Median of each figure."""
    return {name: float(np.median([run[name] for run in runs])) for name in runs[0]}


def untraced(cost: costs.Costs, routes: trace.Trace, twins: dict[Setting, dict[str, float]]) -> costs.Costs:
    """The traced costs as the untraced twins show them: loads by what they took, work by what is left of a step."""
    demand, ahead, whole = twins
    load = twins[demand]["load_ms"] / 1e3 / cost.load.at(cost.expert_bytes["cpu"])
    behind = 1.0
    if cost.behind:
        seen = simulator.simulate(routes, cost, ahead.simulated()).spans
        beside = np.array([span.unit.startswith(simulator.STORAGE) for span in seen if span.kind in ("load", "prefetch")])
        inline = load * cost.load.at(cost.expert_bytes["cpu"])
        mean, share = twins[ahead]["load_ms"] / 1e3, float(beside.mean())
        behind = max((mean - (1 - share) * inline) / max(share, 1e-9), 1e-6) / cost.behind.at(cost.expert_bytes["cpu"])
    loaded = cost.scaled({}, load, behind)
    factors: dict[str, list[float]] = {"prefill": [], "decode": []}
    for one in (demand, whole):
        found = simulator.simulate(routes, loaded, one.simulated())
        waited = {"prefill": 0.0, "decode": 0.0}
        for span in found.spans:
            if span.kind == "load":
                waited[routes.steps[span.step].phase] += span.end - span.begin
        for phase, figure in zip(factors, FIGURES, strict=True):
            steps = len(found.durations(phase)) if phase == "decode" else 1
            real, simulated = twins[one][figure] / 1e3 * steps, float(found.durations(phase).sum())
            factors[phase].append(max(real - waited[phase], 0.05 * real) / (simulated - waited[phase]))
    work = {phase: float(np.exp(np.mean(np.log(values)))) for phase, values in factors.items()}
    shown = ", ".join(f"{phase} {' and '.join(f'{v:.2f}' for v in values)}" for phase, values in factors.items())
    print(f"untraced over traced: loads {load:.2f}, beside {behind:.2f}; work of {shown}; slowed by the loader {cost.slowed:.2f}")
    return cost.scaled(work, load, behind)


def show(real: dict[Setting, list[dict[str, Any]]], cost: costs.Costs, routes: trace.Trace) -> None:
    """One line a setting, then what all of them say."""
    print(f"{'cache':>9} {'':8} chunk   TTFT ms (runs) simulated error     TPOT ms (runs) simulated error     hits simulated")
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in FIGURES}
    points = []
    for one, runs in real.items():
        seen, found = middle(runs), simulator.simulate(routes, cost, one.simulated()).summary()
        cells = []
        for name in FIGURES:
            spread = np.quantile([run[name] for run in runs], (0.25, 0.75)) / seen[name] - 1
            pairs[name].append((seen[name], found[name]))
            error = found[name] / seen[name] - 1
            cells.append(f"{seen[name]:8.2f} ({spread[0]:+4.0%}..{spread[1]:+4.0%}) {found[name]:8.2f} {error:+6.1%}")
        points.append(100 * (found["hit_rate"] - seen["hit_rate"]))
        print(f"{one}  {cells[0]}  {cells[1]}  {seen['hit_rate']:6.1%} {points[-1]:+5.1f} points")
    for name, rows in pairs.items():
        told = np.array(rows)
        error = np.abs(told[:, 1] / told[:, 0] - 1)
        rank = spearmanr(told[:, 0], told[:, 1]).statistic
        print(f"{name}: {int((error <= 0.15).sum())} of {len(error)} within 15 %, largest {error.max():.1%}; ranks {rank:.2f}")
    print(f"hit rate: largest difference {np.abs(points).max():.1f} points")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="its beginning is the prompt")
    parser.add_argument("--characters", type=int, default=600)
    parser.add_argument("--caches", default="25%,50%,100%", type=lambda text: text.split(","))
    parser.add_argument("--chunks", default="8,64", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep recordings and figures; where they lie already, use them")
    args = parser.parse_args()
    sizes = json.loads(subprocess.check_output([sys.executable, "-m", "runtime", "inspect", str(args.package), "--json"]))
    whole = sizes["all_experts_bytes"]
    small = cache_bytes(CALIBRATION_SHARE, whole)
    kinds = ((small, False), (small, True), (None, False))
    twins = [Setting(size, ahead, chunk) for (size, ahead), chunk in zip(kinds, CALIBRATION_CHUNKS, strict=True)]
    tests = [
        Setting(cache_bytes(word, whole), prefetch, chunk)
        for word, prefetch, chunk in itertools.product(args.caches, (False, True), args.chunks)
    ]
    tests = [one for one in tests if one.cache is not None or not one.prefetch]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        runtime, figures = Runtime(args, folder), folder / "figures.json"
        recordings = [runtime.record(one) for one in twins]
        real = measured(runtime, [*twins, *tests], args.rounds, figures)
    routes = trace.from_tables(recordings[1])
    print(
        f"{len(tests)} settings, {args.rounds} rounds; {routes.steps[0].rows} prompt tokens, {len(routes.steps) - 1} decode steps"
    )
    cost = untraced(costs.from_tables(*recordings), routes, {one: middle(real[one]) for one in twins})
    show({one: real[one] for one in tests}, cost, routes)


if __name__ == "__main__":
    main()
