"""Findings from stacks: where a step's thread waits, for which thread, and what that does or the disk brings meanwhile."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import causes
from analyzer.questions.cause_findings import disk_knob
from analyzer.questions.facts import Finding, RuleInputs
from analyzer.questions.stacks import base_name, own_functions, waiting_places
from analyzer.records.intervals import Intervals, merge_intervals, overlaps, split_intervals
from analyzer.records.schema import Tables
from analyzer.records.spans import NONE

RULE = "waits: "
"""Of these findings, before the cause."""
CAUSES = (causes.OTHER_THREAD, causes.DISK, causes.ASLEEP)
MOSTLY, MOST_OF = 0.95, 0.5
MOST = 4
IDLE, BUSY, UNSEEN = "the disk does nothing for it and ", "the disk works for it and ", ""
GROUP = ["cause", "waiter", "place", "tid", "disk"]


def waiting_pieces(facts: RuleInputs) -> pd.DataFrame:
    """Pieces of `time` in which a step waits: cause, waiter (the step's own thread), tid (the thread that decides), begin_ns,
    end_ns, place (where the waiter's stack was), and whether the disk worked.
    """
    tables, owners = facts.tables, facts.steps["tid"]
    rows = facts.time[facts.time["cause"].isin(CAUSES)]
    rows = rows.assign(waiter=owners.reindex(rows["token_id"]).to_numpy())
    rows = rows[["token_id", "cause", "waiter", "tid", "begin_ns", "end_ns"]]
    cut = split_intervals(Intervals.of_table(rows, "waiter"), Intervals.of_table(tables["waits"]))
    stacks = np.append(tables["waits"]["stack_id"].to_numpy(), NONE)[cut.right]
    rows = rows.iloc[cut.left].assign(begin_ns=cut.begin, end_ns=cut.end, place=waiting_places(tables)[stacks])
    return with_disk(tables["blocks"], rows)


def with_disk(blocks: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """`rows`, cut where a request of the program is in flight, with `disk`: whether one is, unless none was ever seen."""
    if not len(blocks):
        return rows.assign(disk=UNSEEN)
    begin, end = blocks["begin_ns"].to_numpy(), blocks["end_ns"].to_numpy()
    cut = split_intervals(
        Intervals.of(rows["begin_ns"].to_numpy(), rows["end_ns"].to_numpy()), merge_intervals(Intervals.of(begin, end))
    )
    disk = np.where(cut.right >= 0, BUSY, IDLE)
    return rows.iloc[cut.left].assign(begin_ns=cut.begin, end_ns=cut.end, disk=disk.astype(object))


def running_function(tables: Tables, rows: pd.DataFrame) -> str:
    """What the thread `tid` of these pieces does, by its samples: "runs `dequantize`"; without any, where it waits itself."""
    samples = tables["samples"]
    moments = Intervals(samples["tid"].to_numpy(), samples["ts_ns"].to_numpy(), samples["ts_ns"].to_numpy() + 1)
    met = overlaps(Intervals.of_table(rows), moments)
    functions = pd.Series(own_functions(tables)[samples["stack_id"].to_numpy()[met.right]])
    if not len(functions):
        return waiting_place(tables, rows)
    counts = functions.value_counts()
    mostly = "" if counts.iloc[0] >= MOSTLY * len(functions) else f" in {counts.iloc[0]:,} of {len(functions):,} samples"
    return f"runs `{counts.index[0]}`{mostly}"


def waiting_place(tables: Tables, rows: pd.DataFrame) -> str:
    """Where the thread `tid` of these pieces waits itself most of the time: "waits in `usleep`"; "" if it does not."""
    met = overlaps(Intervals.of_table(rows), Intervals.of_table(tables["waits"]))
    places = waiting_places(tables)[tables["waits"]["stack_id"].to_numpy()[met.right]]
    spent = pd.Series(met.length).groupby(places).sum()
    long = len(spent) and spent.max() > MOST_OF * Intervals.of_table(rows).length.sum()
    return f"waits in {quoted_place(str(spent.idxmax()))}" if long else ""


def read_files(tables: Tables, rows: pd.DataFrame) -> str:
    """What the thread `tid` of these pieces reads meanwhile: "reads `weights`", "faults in `weights`"; "" for nothing known."""
    spent: dict[str, int] = {}
    for name, verb in (("reads", "reads"), ("faults", "faults in")):
        table = tables[name]
        met = overlaps(Intervals.of_table(rows), Intervals.of_table(table))
        files = table["file"].to_numpy(object)[met.right]
        for file, ns in pd.Series(met.length).groupby(files).sum().items():
            spent[f"{verb} `{base_name(str(file)) or 'anonymous memory'}`"] = int(ns)
    return max(spent, key=spent.__getitem__) if spent else ""


def wait_findings(facts: RuleInputs) -> Iterator[Finding]:
    """A finding for each of the longest waits of steps, by place and thread; none without stacks."""
    if not len(facts.tables["waits"]):
        return
    rows = waiting_pieces(facts)
    rows = rows.assign(ns=rows["end_ns"] - rows["begin_ns"])[rows["place"] != ""]
    ranked = rows.groupby(GROUP)["ns"].sum().sort_values(ascending=False)
    groups = rows.groupby(GROUP)
    for key, ns in ranked.head(MOST).items():
        yield finding_of(facts, dict(zip(GROUP, key, strict=True)), groups.get_group(key), float(ns))


def finding_of(facts: RuleInputs, about: dict[str, Any], rows: pd.DataFrame, ns: float) -> Finding:
    """The finding of one group of waits."""
    reads = read_files(facts.tables, rows) if about["cause"] == causes.DISK else ""
    does = reads or (running_function(facts.tables, rows) if about["tid"] != about["waiter"] else "")
    waiter, other = (thread_name(facts.tables, about[name]) for name in ("waiter", "tid"))
    text = f"{about['disk']}thread {waiter} waits in {quoted_place(about['place'])}"
    if about["tid"] != about["waiter"]:
        text += f" for thread {other}" + (f", which {does}" if does else "")
    elif does:
        text += f": it {does}"
    else:
        text += ", which no thread of the program ends" * (about["cause"] == causes.ASLEEP)
    text = disk_knob(facts, rows, text) if about["cause"] == causes.DISK else text
    evidence = {"cause": about["cause"], "ms": ns / 1e6, "share": ns / facts.total_ns, "place": about["place"], "does": does}
    evidence |= {"waiter": int(about["waiter"]), "tid": int(about["tid"]), "disk_idle": about["disk"] == IDLE}
    return facts.finding(f"{RULE}{about['cause']}", text, ns, evidence, "waits", {"tid": int(about["waiter"])})


def thread_name(tables: Tables, tid: int) -> str:
    """A thread's name, else its number."""
    names = tables["threads"].loc[tables["threads"]["tid"] == tid, "name"]
    return f"`{names.iloc[0]}`" if len(names) and names.iloc[0] else str(tid)


def quoted_place(place: str) -> str:
    """A place of stacks.waiting_places with its functions as code."""
    functions, _, line = place.rpartition(" (")
    code = " in ".join(f"`{function}`" for function in (functions or place).split(" in "))
    return f"{code} ({line}" if functions else code
