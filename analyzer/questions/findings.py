"""Findings: the main costs and the time that a remedy would save, each with its evidence and a query that shows it.

A finding's estimated saving is the time that its remedy would save, as a share of all steps' time.
Those of causes are parts of the steps' time; others overlap them and do not add up.
"""

from collections.abc import Iterator
from dataclasses import asdict
from math import ceil

import numpy as np
import pandas as pd

from analyzer.questions import accelerators, cache_curves, expert_loads, heat, roofline, step_time, trends
from analyzer.questions.cause_findings import NAMED, by_cause, thread_labels
from analyzer.questions.causes import CAUSES, COMPUTING, DISK
from analyzer.questions.ceilings import Ceilings
from analyzer.questions.disk_faults import disk_faults
from analyzer.questions.facts import KNOBS, Finding, RuleInputs, rows_equal
from analyzer.questions.parts import HOST_CODE, LOAD, NPU
from analyzer.questions.programs import has_only_threads, lives_as_steps, thread_lives
from analyzer.questions.wait_findings import RULE, wait_findings
from analyzer.records.intervals import Intervals, overlaps
from analyzer.records.schema import Tables
from moescope.terminal import counted

LEAST_SHARE = 0.01
"""Findings that would save less are omitted."""
WORTH = 10
"""Maximum number of findings."""


def size(count: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def at_least(count: float) -> str:
    """Bytes in MiB, rounded up: a cache of this size holds them."""
    return f"{ceil(count / 2**20 * 10) / 10:.1f} MiB"


def load_findings(facts: RuleInputs) -> Iterator[Finding]:
    """Time in which steps wait for expert loads, grouped by remedy."""
    rows = expert_loads.step_loads(facts.tables, rows_equal(facts.time, part=LOAD).groupby("token_id")["duration_ns"].sum())
    first, again = rows[~rows["again"]], rows[rows["again"]]
    better = expert_loads.larger_cache(facts.tables, rows)
    if better is not None:
        evidence = {"loads": len(rows), "first": len(first), "bytes": int(rows["bytes"].sum()), **asdict(better)}
        yield facts.finding("expert loads", _reload_text(rows, again, better, facts), better.won_ns, evidence, "expert_loads")
    waited = float((first["cost_ns"] - first["compile_ns"]).sum())
    text = f"first loads of {counted(len(first), 'expert')} fall into steps, which no cache avoids"
    text = facts.with_knob(text, "load first", waited)
    yield facts.finding("first loads", text, waited, {"loads": len(first)}, "expert_loads")
    made = rows[rows["compile_ns"] > 0]
    compiled = float(made["compile_ns"].sum())
    text = facts.with_knob(f"steps compile the NPU graphs of {counted(len(made), 'expert')}", "compile first", compiled)
    yield facts.finding("compiling", text, compiled, {"loads": len(made)}, "compiling")


def _reload_text(rows: pd.DataFrame, again: pd.DataFrame, better: expert_loads.AvoidedLoads, facts: RuleInputs) -> str:
    """Text on the reloaded experts and the cache size that would keep them."""
    had = expert_loads.observed_budget(facts.tables)
    text = f"evicted experts are loaded again: {len(again)} of {counted(len(rows), 'load')} ({size(rows['bytes'].sum())}); "
    if not np.isfinite(better.budget_bytes) or had is None:
        return text + "a cache that holds everything would avoid them"
    cache = KNOBS["cache"].format(wanted=at_least(better.budget_bytes), had=size(had), loads=better.loads)
    cliff = cache_curves.lru_cliff(facts.tables)
    below = cliff is not None and cliff.bytes == cliff.bytes and had <= cliff.nothing_below
    why = f"; the cache is smaller than one token's experts ({size(cliff.bytes)}), so LRU hits nothing" if cliff and below else ""
    return f"{text}{cache}{why}"


def disk_waits(facts: RuleInputs) -> Iterator[Finding]:
    """Page faults within operators that wait for the disk: weights that are read while they are needed."""
    waited = (facts.time["cause"] == DISK) & (facts.time["op_id"] >= 0)
    for row in disk_faults(facts.tables):
        evidence = {"phase": row.phase, "faults": row.faults, "steps": row.steps, "of_steps": row.of_steps}
        lost = facts.ns(waited & (facts.time["phase"] == row.phase))
        yield facts.finding("disk", facts.with_knob(row.text, "memory", lost), lost, evidence, "disk")


def shared_cpus(facts: RuleInputs) -> Iterator[Finding]:
    """More threads than CPUs: they displace each other."""
    crowd = facts.crowd
    if crowd:
        text = f"{crowd.threads} threads compute on {counted(crowd.cpus, 'CPU')} and displace each other"
        yield facts.finding("crowded", facts.with_knob(text, "threads", crowd.won_ns), crowd.won_ns, asdict(crowd), "crowded")


def imbalance(facts: RuleInputs) -> Iterator[Finding]:
    """Threads that wait for each other at the end of operators because some of them compute longer."""
    if facts.crowd:
        return
    operators = facts.tables["operators"]
    operators = operators[operators["token_id"].isin(facts.steps.index) & (operators["n_threads"] > 1)]
    if len(operators) == 0:
        return
    uneven = uneven_ns(facts.tables)
    uneven = uneven[uneven.index.isin(operators["op_id"])]
    share = operators["wait_ns"].sum() / max((operators["busy_ns"] + operators["wait_ns"]).sum(), 1)
    by_thread = uneven["ns"].groupby(thread_labels(facts, uneven["tid"])).sum().sort_values(ascending=False)
    longest = ", ".join(f"{name} {ns / facts.total_ns:.0%}" for name, ns in by_thread.iloc[:NAMED].items())
    text = f"uneven shares: threads wait for each other for {share:.0%} of their time in operators"
    evidence = {"wait_share": float(share), "longest": {str(name): ns / facts.total_ns for name, ns in by_thread.items()}}
    yield facts.finding("imbalance", f"{text}; slowest: {longest}", float(uneven["ns"].sum()), evidence, "imbalance")


def uneven_ns(tables: Tables) -> pd.DataFrame:
    """By op_id the thread that computes longest, `tid`, and `ns` beyond the mean; not sleep, nor lack of a CPU."""
    shares, states = tables["op_threads"], tables["thread_states"]
    spans = Intervals.of_table(shares, end="wait_ns")
    running = Intervals.of_table(states).where((states["state"] == "running").to_numpy())
    met = overlaps(spans, running)
    seen = np.isin(spans.key, running.key)
    ran = np.where(seen, np.bincount(met.left, met.length, len(shares)), spans.length)
    rows = pd.DataFrame({"op_id": shares["op_id"].to_numpy(), "tid": shares["tid"].to_numpy(), "ns": ran})
    mean = rows.groupby("op_id")["ns"].mean()
    longest = rows.sort_values("ns").drop_duplicates("op_id", keep="last").set_index("op_id").sort_index()
    return longest.assign(ns=longest["ns"] - mean)


def below_roof(facts: RuleInputs) -> Iterator[Finding]:
    """Operators that take much longer than the machine's ceilings allow."""
    if facts.ceilings is None or facts.tables["operators"]["flops"].notna().sum() == 0:
        return
    rows = facts.roofline[facts.roofline["bound"].isin(("memory", "compute"))]
    for row in rows.sort_values("above_ms", ascending=False).head(2).to_dict("records"):
        times = row["ms"] / (row["roof_us"] * row["count"] / 1e3)
        text = f"{row['type']} is {row['bound']}-bound and takes {times:.1f} times the roofline's time"
        evidence = {name: row[name] for name in ("ms", "intensity", "gflops", "gbytes_per_s", "share_of_roof")}
        yield facts.finding(f"roofline: {row['type']}", text, row["above_ms"] * 1e6, evidence, "below_roof", row)


def slower_backend(facts: RuleInputs) -> Iterator[Finding]:
    """Subgraphs that run slower on the NPU than equal ones do on the CPU."""
    compared = roofline.subgraph_backends(facts.tables)
    slow = compared[(compared["backend"] != "cpu") & (compared["times_cpu"] > 1)]
    for row in slow.to_dict("records"):
        lost = row["runs"] * row["median_us"] * (1 - 1 / row["times_cpu"]) * 1e3
        device = {NPU: "the NPU"}.get(row["backend"], row["backend"])
        graphs = f"{row['kind']} graphs of {counted(row['n_tokens'], 'row')}"
        text = f"{graphs} take {row['times_cpu']:,.1f} times as long on {device} as on the CPU"
        text = facts.with_knob(text, "placement", lost)
        yield facts.finding(f"backend: {row['kind']}", text, lost, row, "slower_backend", row)


def across_tokens(facts: RuleInputs) -> Iterator[Finding]:
    """A slow first step, steps that slow down, change level or vary periodically, and operators that grow with the context."""
    steps = trends.decode_steps(facts.tables)
    if len(steps) < trends.LEAST or "token_id" not in steps:
        return
    trend = trends.trend_summary(facts.tables, steps)
    lost = float((steps["ms"] - steps["ms"].median()).clip(lower=0).sum()) * 1e6
    if first := trend["first"]:
        text = f"the first {trend['of']} takes {first['ms']:,.0f} ms, {first['times']:,.1f} times the following ones"
        saving = first["ms"] * (1 - 1 / first["times"]) * 1e6
        yield facts.finding("first step", facts.with_knob(text, "warm up", saving), saving, first, "change_points")
    for jump in trend["change_points"]:
        if jump["after_ms"] > jump["before_ms"]:
            later = int((steps["token_id"] >= jump["token_id"]).sum())
            text = f"from step {jump['token_id']} on, steps take {jump['after_ms']:.1f} instead of {jump['before_ms']:.1f} ms"
            yield facts.finding("change point", text, (jump["after_ms"] - jump["before_ms"]) * later * 1e6, jump, "change_points")
    if beat := trend["periodic"]:
        text = f"every {beat['period']:.1f} steps, one step is slower than the others"
        saving = beat["count"] * beat["more_ms"] * 1e6 if "count" in beat else lost * beat["share"]
        yield facts.finding("periodic", text, saving, beat, "change_points")
    grown = trends.confident_rows(trends.context_growth(facts.tables, steps))
    for row in grown[grown["r2"] > 0.5].head(1).to_dict("records"):
        reach = float((steps["context"] - steps["context"].min()).sum())
        text = f"{row['type']} takes {row['ns_per_token'] / 1e3:.2f} µs more per step with every token of context"
        yield facts.finding("growth", text, row["ns_per_token"] * reach, row, "growth", row)


def throttled_clocks(facts: RuleInputs) -> Iterator[Finding]:
    """Decode while something limited clocks: when, by what, and what it cost against the rest."""
    limits = heat.limits_of(facts.tables)
    cost, found = heat.limit_cost(facts.tables, limits), heat.episodes(facts.tables, limits)
    if cost and found:
        text = f"{heat.episode_text(found)}; {cost.limited_tokens_per_s:.2f} instead of {cost.free_tokens_per_s:.2f} tok/s"
        evidence = {**asdict(cost), "episodes": [asdict(each) for each in found]}
        yield facts.finding("throttled", text, cost.lost_ns, evidence, "throttled")


def cpu_fallback(facts: RuleInputs) -> Iterator[Finding]:
    """Operators that the CPU computes in the middle of the accelerator's layers."""
    fell = accelerators.fallen_back(facts.tables)
    if not fell.any():
        return
    rows = facts.tables["operators"][fell]
    types = ", ".join(rows.groupby("type")["duration_ns"].sum().sort_values(ascending=False).index[:3])
    text = f"the CPU computes {types} within layers of the accelerator ({counted(len(rows), 'operator')})"
    there = accelerated_ns(facts.tables, rows)
    untimed, visits, worked = int(np.isnan(there).sum()), rows["graph_id"].nunique(), float(np.nansum(there))
    text += "; an upper bound: the accelerator's time for them is unknown" if untimed else ""
    spent = facts.ns(facts.time["op_id"].isin(rows["op_id"])) + visits * facts.submission_cost_ns
    evidence = {"operators": len(rows), "untimed": untimed, "visits": visits}
    evidence |= {"cpu_and_hand_over_ms": spent / 1e6, "accelerator_ms": worked / 1e6}
    yield facts.finding("fallback", text, max(spent - worked, 0.0), evidence, "fallback")


def accelerated_ns(tables: Tables, rows: pd.DataFrame) -> np.ndarray:
    """The accelerator's time for operators of the same type and shape, from its own profile; NaN if it computed none."""
    timed = tables["npu_operators"].query("us >= 0")
    usual = timed.groupby(["type", "shape"])["us"].median() * 1e3
    return usual.reindex(pd.MultiIndex.from_frame(rows[["type", "shape"]])).to_numpy(np.float64)


def small_batches(facts: RuleInputs) -> Iterator[Finding]:
    """The overhead of each submission to the accelerator."""
    count, each = len(facts.submissions), facts.submission_cost_ns
    if count:
        per_step = count / facts.submissions["token_id"].nunique()
        least = "at least " if facts.submissions["accelerator_ns"].isna().any() else ""  # its own time is unknown
        text = f"each submission to the accelerator, {per_step:,.0f} per step, costs {least}{each / 1e3:,.0f} µs beyond its work"
        yield facts.finding("submissions", text, each * count, {"submissions": count, "us_each": each / 1e3}, "submissions")


def idle_accelerator(facts: RuleInputs) -> Iterator[Finding]:
    """The accelerator is idle while the engine's own code runs in a step that uses it."""
    rows = rows_equal(facts.time, part=HOST_CODE, cause=COMPUTING)
    spent = float(rows.loc[rows["token_id"].isin(facts.submissions["token_id"]), "duration_ns"].sum())
    text = "the accelerator idles while the engine's own code runs in steps that use it"
    yield facts.finding("starved", text, spent, {"ms": spent / 1e6}, "starved")


def spinning_waits(facts: RuleInputs) -> Iterator[Finding]:
    """A thread that busy-waits for the accelerator."""
    answer = accelerators.accelerator_saving(facts.tables, facts.time)
    text = "a thread spins while it waits for the accelerator (sleeping would free a CPU and save power, but no time)"
    if answer:
        yield facts.finding("spinning", text, answer["spun_ms"] * 1e6, answer, "spinning")


COSTS = (
    by_cause,
    wait_findings,
    load_findings,
    disk_waits,
    shared_cpus,
    imbalance,
    below_roof,
    slower_backend,
    across_tokens,
    throttled_clocks,
)
ON_ACCELERATOR = (cpu_fallback, small_batches, idle_accelerator, spinning_waits)


def findings(tables: Tables, ceilings: Ceilings | None = None, time: pd.DataFrame | None = None) -> list[Finding]:
    """The findings worth at least LEAST_SHARE, the largest saving first, led by a cause and, with stacks, by its longest wait.

    `time`: step_time.step_time. Of a program without steps the findings are those of its main thread's life.
    """
    if has_only_threads(tables):
        tables, time = lives_as_steps(tables, thread_lives(tables).iloc[:1]), None
    facts = RuleInputs(tables, step_time.step_time(tables) if time is None else time, ceilings)
    if facts.total_ns <= 0:
        return []
    every = [finding for rule in (*COSTS, *ON_ACCELERATOR) for finding in rule(facts)]
    worth = [finding for finding in every if max(finding.saving_share, finding.share) >= LEAST_SHARE]
    ranked = sorted(worth, key=lambda finding: -finding.saving_share)
    cause = next((finding for finding in ranked if finding.rule in CAUSES), None)
    wait = next((finding for finding in ranked if cause and finding.rule == f"{RULE}{cause.rule}"), None)
    first = [finding for finding in (wait, cause) if finding]
    return [*first, *(finding for finding in ranked if finding not in first)][:WORTH]
