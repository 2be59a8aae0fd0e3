"""Detection of planted changes in recordings of real runs: power by size, and other metrics reported by mistake.

sudo python -m benchmarks.planted record DIR [--engine llama|runtime] [--count 20]    unchanged; runtime: also half a cache
python -m benchmarks.planted power DIR [--runs 5,10] [--repeats 60]                   planted in the recorded times of these runs
sudo python -m benchmarks.planted program [--count 20] [--runs 5,10] [--repeats 60]   planted in a recorded program

`power`: both sides are drawn without replacement from the same runs, so that the unchanged rest has the machine's noise.
`found`: the verdict is slower (or the structure differs) for the culprit. `others`: an unchanged metric of the culprit's family
was also reported as changed; the rules allow this in 5 % of the repeats. `wrong word`: the culprit is reported as faster or the
same and none of its metrics as slower; without a planted change, a figure is reported as changed (share of figures; `found` are
those reported as the same). `"the same" outside the threshold`: repeats in which any such figure's interval reaches beyond it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.compare.metrics import MS, RunTables, extract_metrics
from analyzer.compare.pace import MINOR_SHARE
from analyzer.compare.results import Result, value_matrices
from analyzer.compare.structure import feature_changes
from analyzer.compare.verdicts import FASTER, PRACTICAL, SAME, SLOWER, UNKNOWN, judge_apart
from analyzer.tables.store import load_tables
from benchmarks.lib.models import demo_model, seeded_gguf
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single
from benchmarks.lib.turns import by_turns
from workloads import ROOT, planting
from workloads.compiling import WITH_SITES, compile_c
from workloads.planting import Tables

NOTHING = "nothing"
SIZES = (0.03, 0.05, 0.10)
SHARES = ("found", "others reported", "TPOT called slower", "wrong word", "inconclusive", '"the same" outside the threshold')
PROMPT = "The router looks at the token and picks a few experts. A cache keeps the experts that were used last."
GENERATE = ["-m", "moescope", "generate", "build/demo-model", "--prompt", PROMPT, "--max-new-tokens", "150", "--ignore-end"]
ENGINES = {
    "llama": {"base": ["workloads/programs/llama_steps.py", "build/models/tiny-moe.gguf", "16", "150", "0.005"]},
    "runtime": {"base": [*GENERATE, "--expert-cache", "3MiB"], "halved": [*GENERATE, "--expert-cache", "1.5MiB"]},
}
PROGRAM = ("base", "again", "slow3", "slow5", "slow10", "cold", "displaced", "split", "halved")
WORDS = (SLOWER, FASTER, SAME, UNKNOWN)


def unchanged(tables: Tables) -> Tables:
    """The tables without a planted change."""
    return tables


def main_displaced(tables: Tables, share: float) -> Tables:
    """The decoding thread loses its CPU once in every step."""
    return planting.displace_thread(tables, int(tables["tokens"]["tid"].iloc[0]), share)


@dataclass
class Plant:
    """One change: the metrics that must show it and their family, how to plant it, and a result of every run with it.

    `apart`: the runs were recorded with the change; else the change was made in the times of the unchanged runs.
    """

    what: str
    size: str
    family: str
    culprit: dict[str, Any]
    change: Callable[[Tables], Tables] = unchanged
    runs: list[Result] = field(default_factory=list)
    apart: bool = False


def results_of(path: Path, changes: list[Callable[[Tables], Tables]]) -> list[Result]:
    """A recording's results, with each of the changes planted."""
    tables = load_tables(path)
    return [Result(path.name, extract_metrics(RunTables(change(tables)))) for change in changes]


def record_runs(args: argparse.Namespace) -> None:
    """Record runs alternately, forwards and backwards, to DIR/<variant>/run-NNN, after existing ones; each first is a warm-up."""
    os.environ.setdefault("LLAMA_THREADS", "1")  # of two CPUs, one is for the tracer
    seeded_gguf("tiny-moe") if args.engine == "llama" else demo_model()
    commands, there = list(ENGINES[args.engine].items()), len(list(Path(args.folder).glob("base/run-*")))
    for number, (name, words) in by_turns(commands, args.count + 1):
        folder = Path(args.folder) / (name if number else f"warmup/{name}") / f"run-{number + there:03}"
        trace_command("--levels", "token,graph,operator,expert,sched", "-o", str(folder), "--", sys.executable, *words)
        print(f"{folder}", flush=True)


def trace_command(*words: str) -> str:
    """Trace a command; returns its output."""
    done = subprocess.run([sys.executable, "-m", "tracer", "run", "--no-views", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip()[-300:])
    return done.stdout


def operator_targets(base: list[Result]) -> list[tuple[str, int, float]]:
    """(type, layer, share of the decode step) of the largest and of the median operator among those that are tested."""
    rows = pd.concat([run.metrics for run in base]).query("family == 'operator' and phase == 'decode' and layer >= 0")
    spent = rows.groupby(["type", "layer"])["share"].sum().div(len(base)).sort_values(ascending=False)
    spent = spent[spent > 2 * MINOR_SHARE]
    chosen = dict.fromkeys((0, len(spent) // 2))
    return [(*spent.index[i], float(spent.iloc[i])) for i in chosen]


def plantable_changes(paths: list[Path], base: list[Result]) -> Iterator[Plant]:
    """All changes that can be planted in the recordings; their results are still missing."""
    for type_, layer, share in operator_targets(base):
        for size in SIZES:
            change = partial(planting.slow_operator, type_=type_, layer=layer, share=size)
            what = f"{type_} layer {layer} ({share:.1%} of a step) slower"
            yield Plant(what, f"{size:.0%}", "operator", {"type": type_, "layer": layer}, change)
    busy = base[0].metrics.query("family == 'scheduling' and type.str.endswith('(main)')")
    for thread in busy["type"].head(1):
        for size in SIZES:
            change = partial(main_displaced, share=size)
            yield Plant(f"thread {thread} displaced", f"{size:.0%} of a step", "scheduling", {"type": thread}, change)
    for layer, expert, load_ns in cold_candidates(paths):
        change = partial(planting.make_cold, layer=layer, expert=expert, load_ns=load_ns)
        what = f"expert {expert} of layer {layer} never cached"
        culprit = {"metric": "load time per step", "layer": layer, "expert": expert}
        yield Plant(what, f"{load_ns / MS:.2f} ms a load", "expert", culprit, change)
    kinds = base[0].metrics.query("family == 'operator' and phase == 'decode'").groupby("type")["share"].sum()
    fused = next((name for name in kinds.index if "+" in name), str(kinds.idxmax()))
    into = (fused.split("+")[0], fused.split("+")[-1]) if "+" in fused else (fused, f"{fused}_2")
    new, change = [kind for kind in into if kind not in kinds.index], partial(planting.split_operator, type_=fused, into=into)
    culprit = {"what": new[0] if new else fused, "also": {*into, fused}}
    yield Plant(f"{fused} split into {into[0]} and {into[1]}", "", "structure", culprit, change)


def cold_candidates(paths: list[Path]) -> Iterator[tuple[int, int, int]]:
    """(layer, expert, median ns of a load) of experts used in at least a third of the decode steps."""
    recorded = [load_tables(path, ("loads", "experts", "tokens")) for path in paths]
    loads = pd.concat([t["loads"].query("action == 'load' and reason == 'demand'") for t in recorded])
    runs = pd.concat([t["experts"].merge(t["tokens"].query("phase == 'decode'")["token_id"]) for t in recorded])
    steps = min(int((t["tokens"]["phase"] == "decode").sum()) for t in recorded)
    hits = runs[runs["cache"].isin(["hit", "prefetched"])].groupby(["layer", "expert"]).size() / len(recorded)
    hits = hits[hits > steps / 3].sort_values()
    if len(loads) and len(hits):
        layer, expert = hits.index[0]
        yield int(layer), int(expert), int(loads["duration_ns"].median())


def measure_power(args: argparse.Namespace) -> None:
    """Power for recordings."""
    folder = Path(args.folder)
    paths = sorted((folder / "base").iterdir())
    with ProcessPoolExecutor(args.workers) as pool:
        base = [one for (one,) in pool.map(partial(results_of, changes=[unchanged]), paths)]
        planted = list(plantable_changes(paths, base))
        for run in pool.map(partial(results_of, changes=[plant.change for plant in planted]), paths):
            for plant, result in zip(planted, run, strict=True):
                plant.runs.append(result)
        if (folder / "halved").exists():
            halved = pool.map(partial(results_of, changes=[unchanged]), sorted((folder / "halved").iterdir()))
            rate: dict[str, Any] = {"metric": "hit rate", "phase": "decode"}
            row = ("cache halved by the runtime's option", "1.5 of 3 MiB", "expert", rate)
            planted.append(Plant(*row, runs=[one for (one,) in halved], apart=True))
    report = Report("planted", args)
    report.note(f"{len(base)} unchanged runs; changes planted in their recorded times unless said otherwise")
    add_power(report, [Plant(NOTHING, "", "operator", {"type": ""}, runs=base), *planted], base, args)


def measure_program(args: argparse.Namespace) -> None:
    """Power for workloads/programs/planted.c, which executes the changes itself."""
    with tempfile.TemporaryDirectory() as folder:
        binary = compile_c(Path(folder) / "planted", "planted.c", flags=WITH_SITES)
        levels = ("--levels", "token,operator,expert,sched", "-o", f"{folder}/run")
        printed = trace_command(*levels, "--", str(binary), str(args.count), "20", *PROGRAM)
        results = planting.by_variant(load_tables(f"{folder}/run"), printed)
    report = Report("planted", args)
    report.note(f"{args.count} runs of each variant of workloads/programs/planted.c, recorded alternately")
    rows: dict[str, tuple[str, str, str, dict[str, Any]]] = {
        "again": (NOTHING, "", "operator", {"type": ""}),
        **{
            f"slow{n}": ("attention of layer 1 slower", f"{n}%", "operator", {"type": "attention", "layer": 1})
            for n in (3, 5, 10)
        },
        "cold": ("expert 5 of layer 2 never cached", "", "expert", {"metric": "load time per step", "layer": 2, "expert": 5}),
        "displaced": ("main thread displaced", "every ms", "scheduling", {"metric": "ready, without a cpu"}),
        "split": ("combine split", "", "structure", {"what": "dispatch", "also": set()}),
        "halved": ("cache of 3 experts, not 6", "", "expert", {"metric": "hit rate", "phase": "decode"}),
    }
    add_power(report, [Plant(*row, runs=results[name], apart=True) for name, row in rows.items()], results["base"], args)


def add_power(report: Report, planted: list[Plant], base: list[Result], args: argparse.Namespace) -> None:
    """Power by number of runs."""
    for plant in planted:
        for runs in map(int, args.runs.split(",")):
            if (runs if plant.apart else 2 * runs) <= len(base):
                name = f"{runs} + {runs} runs, {plant.what} {plant.size}".rstrip()
                for what, share in zip(SHARES, shares_of_repeats(plant, base, runs, args.repeats), strict=True):
                    report.add(f"{name}: {what}", "%", single(100 * share, args.repeats))
    report.finish()


def shares_of_repeats(plant: Plant, base: list[Result], runs: int, repeats: int) -> np.ndarray:
    """SHARES of the repeats."""
    dims, before, after, *_ = value_matrices(base, plant.runs)
    needed = dims["family"].isin([plant.family, "operator", "speed"]).to_numpy()
    dims, before, after = dims[needed], before[:, needed], after[:, needed]
    rng, counted = np.random.default_rng(runs), np.zeros(len(SHARES))
    for _ in range(repeats):
        order = rng.permutation(len(base))
        left, right = order[:runs], rng.permutation(len(plant.runs))[:runs] if plant.apart else order[runs : 2 * runs]
        judged = judge_apart(dims, before[left], after[right])[0]
        verdict, family = judged["verdict"].to_numpy(), (judged["family"] == plant.family).to_numpy()
        named = np.ones(len(judged), bool)
        for column, value in plant.culprit.items():
            named &= (judged[column] == value).to_numpy() if column in judged else False
        moved = np.isin(verdict, [SLOWER, FASTER])
        wanted = family & named
        if plant.family == "structure":
            new = {
                c.what for c in feature_changes([base[i] for i in left], [plant.runs[i] for i in right]) if c.aspect == "operator"
            }
            hit = plant.culprit["what"] in new
            others = bool(new - {plant.culprit["what"], *plant.culprit["also"]})
        else:
            hit = bool((verdict[wanted] == SLOWER).any())
            others = bool(moved[family & ~wanted & ~also_affected(judged, plant)].any())
        tpot = verdict[(judged["metric"] == "TPOT, median").to_numpy()]
        wrong = not hit and bool(np.isin(verdict[wanted], [FASTER, SAME]).any())
        told = (hit, wrong, not hit and not wrong) if plant.what != NOTHING else verdict_shares(verdict[np.isin(verdict, WORDS)])
        counted += told[0], others, bool((tpot == SLOWER).any()), *told[1:], same_outside(judged)
    return counted / repeats


def verdict_shares(verdict: np.ndarray) -> tuple[float, float, float]:
    """Shares of figures of equal sides that are reported as the same, changed, and inconclusive."""
    same, unknown = (float(np.mean(verdict == word)) for word in (SAME, UNKNOWN))
    return same, 1 - same - unknown, unknown


def same_outside(judged: pd.DataFrame) -> bool:
    """Whether any figure reported as the same has an interval beyond the practical threshold."""
    same, practical = judged[judged["verdict"] == SAME], np.log1p(PRACTICAL)
    return bool(((same["log_low"] < -practical) | (same["log_high"] > practical)).any())


def also_affected(dims: pd.DataFrame, plant: Plant) -> np.ndarray:
    """Metrics of the family that the same change also affects: hits and loads depend on each other."""
    if plant.family != "expert":
        return np.zeros(len(dims), bool)
    return dims["metric"].isin(["hit rate", "load time per step", "run time"]).to_numpy()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("record", "power", "program"))
    parser.add_argument("folder", nargs="?", default="")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="runtime")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--runs", default="5,10")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.what != "program" and not args.folder:
        parser.error("give the folder of the recordings")
    {"record": record_runs, "power": measure_power, "program": measure_program}[args.what](args)


if __name__ == "__main__":
    main()
