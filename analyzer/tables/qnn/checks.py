"""Consistency checks of QNN's numbers: nested times, and sums that add up. Each violation is a row, each residual a figure."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.schema import conform
from analyzer.tables.qnn.enums import ACCEL_CYCLES, NODE

WITHIN = (
    ("accel_us", "htp_rpc_us"),
    ("htp_rpc_us", "host_rpc_us"),
    ("accel_us", "host_rpc_us"),
    ("host_rpc_us", "host execute"),
    ("accel_us", "host execute"),
    ("execute_us", "host execute"),
)
"""(inner, outer): the device's time lies within the RPC's, and that within the host's call."""
FIRST_OF_HTP = 1000  # event types from here on are backend-specific
MICROSECOND = 1.0  # times are given in whole microseconds


@dataclass(frozen=True)
class Check:
    """One relation over executions: the measured value must not exceed (or must equal) the expected one."""

    name: str
    unit: str
    execute_id: np.ndarray
    found: np.ndarray
    expected: np.ndarray
    broken: np.ndarray


def nesting_checks(executes: pd.DataFrame) -> Iterator[Check]:
    """accelerator <= HTP RPC <= host RPC <= host execute, for executions with a recorded end."""
    done = executes[executes["complete"] & (executes["status"] == 0)]
    host = done["duration_ns"].to_numpy() / 1e3
    for inner, outer in WITHIN:
        measured = done[inner].to_numpy(float)
        most = host if outer == "host execute" else done[outer].to_numpy(float)
        broken = measured > most + (MICROSECOND if outer == "host execute" else 0.0)
        yield Check(f"{inner} within {outer}", "us", done["execute_id"].to_numpy(), measured, most, broken)


def children_check(events: pd.DataFrame) -> Iterator[Check]:
    """The sum of an event's sub-events of the same unit does not exceed the event; the difference is its residual.

    HTP's backend-specific times are omitted: even as siblings, one contains the other (see `nesting_checks`).
    """
    of_execute = events[events["execute_id"] >= 0]
    parts = of_execute[of_execute["parent_id"] >= 0]
    parent = events.iloc[parts["parent_id"]]
    same = (parts["unit"].to_numpy() == parent["unit"].to_numpy()) & (parts["type"] < FIRST_OF_HTP).to_numpy()
    parts = parts[same]
    grouped = parts["value"].astype(np.float64).groupby(parts["parent_id"].to_numpy())
    summed, count = grouped.sum(), grouped.size()
    parent_events = events.iloc[summed.index]
    for unit, slack in (("us", count.to_numpy() * MICROSECOND), ("cycles", np.zeros(len(count)))):
        of_unit = (parent_events["unit"] == unit).to_numpy()
        found, expected = summed.to_numpy()[of_unit], parent_events["value"].to_numpy(np.float64)[of_unit]
        of = parent_events["execute_id"].to_numpy()[of_unit]
        yield Check(f"sub-events within their event ({unit})", unit, of, found, expected, found > expected + slack[of_unit])


def cycle_check(events: pd.DataFrame) -> Check:
    """The cycles of an execution's nodes add up to the accelerator's cycles."""
    counted = events[(events["execute_id"] >= 0) & (events["unit"] == "cycles")]
    nodes = counted[counted["type"] == NODE].groupby("execute_id")["value"].sum()
    total = counted[counted["type"] == ACCEL_CYCLES].groupby("execute_id")["value"].first()
    ids = nodes.index.intersection(total.index)
    found, expected = nodes[ids].to_numpy(np.float64), total[ids].to_numpy(np.float64)
    return Check("node cycles equal accelerator cycles", "cycles", ids.to_numpy(), found, expected, found != expected)


def all_checks(executes: pd.DataFrame, events: pd.DataFrame) -> list[Check]:
    """Every check of these executions and events."""
    return [*nesting_checks(executes), *children_check(events), cycle_check(events)]


def check_findings(executes: pd.DataFrame, events: pd.DataFrame) -> pd.DataFrame:
    """The table `qnn_findings`: a row for each violation."""
    rows = []
    for check in all_checks(executes, events):
        for row in np.flatnonzero(check.broken):
            text = f"{check.name}: {check.found[row]:,.0f} {check.unit} against {check.expected[row]:,.0f}"
            rows.append((int(check.execute_id[row]), check.name, check.unit, check.found[row], check.expected[row], text))
    columns = ["execute_id", "check", "unit", "found", "expected", "text"]
    return conform("qnn_findings", pd.DataFrame(rows, columns=columns).sort_values("execute_id", kind="stable"))
