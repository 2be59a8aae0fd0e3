"""Operators that wait for the disk: page faults of weights that are read while they are needed, by phase."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.intervals import Intervals, overlaps
from analyzer.records.schema import Tables
from moescope.terminal import counted


@dataclass(frozen=True)
class DiskFaults:
    """The faults of one phase's operators that waited: where, on how many of its steps, how many and how long.

    `waited_ns`: the longest wait of a thread in each operator, summed; `bytes` were brought into the page cache.
    """

    phase: str
    layers: tuple[int, int] | None
    steps: int
    of_steps: int
    faults: int
    bytes: int
    waited_ns: int

    @property
    def text(self) -> str:
        """The finding's sentence, without its share of the time."""
        where = "outside the layers (embedding, head)" if self.layers is None else f"of {layer_range(*self.layers)}"
        steps = f"{self.steps:,} of {counted(self.of_steps, f'{self.phase} step')}"
        size = f"{counted(self.faults, 'fault')}, {self.bytes / 2**20:,.1f} MiB"
        return f"page faults read weights {where} from disk in {steps} ({size})"


def layer_range(first: int, last: int) -> str:
    """`layer 3` or `layers 1 to 6`."""
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def waiting_faults(tables: Tables) -> pd.DataFrame:
    """Faults within operators of steps, with `waited_ns`: major faults, and minor ones that slept until a page was read ahead."""
    faults, states = tables["faults"], tables["thread_states"]
    faults = faults[(faults["op_id"] >= 0) & (faults["token_id"] >= 0)]
    met = overlaps(Intervals.of_table(faults), Intervals.of_table(states).where((states["state"] == "waiting").to_numpy()))
    asleep = np.bincount(met.left, met.length, len(faults))
    waited = np.where(faults["kind"] == "major", faults["duration_ns"].clip(lower=0), asleep)
    return faults.assign(waited_ns=waited)[waited > 0]


def disk_faults(tables: Tables) -> list[DiskFaults]:
    """A row for each phase with such faults, the longest wait first. Every figure of a row is of that phase's complete steps."""
    tokens = tables["tokens"].set_index("token_id")
    steps = tokens.loc[tokens["complete"], "phase"]
    faults = waiting_faults(tables)
    faults = faults.assign(
        phase=faults["token_id"].map(steps), layer=faults["op_id"].map(tables["operators"].set_index("op_id")["layer"])
    )
    rows = [of_phase(str(phase), mine, int((steps == phase).sum())) for phase, mine in faults.groupby("phase")]
    return sorted(rows, key=lambda row: -row.waited_ns)


def of_phase(phase: str, faults: pd.DataFrame, of_steps: int) -> DiskFaults:
    """The figures of one phase's faults."""
    layers = faults.loc[faults["layer"] >= 0, "layer"]
    waited = faults.groupby(["op_id", "tid"])["waited_ns"].sum().groupby("op_id").max().sum()
    return DiskFaults(
        phase,
        (int(layers.min()), int(layers.max())) if len(layers) else None,
        faults["token_id"].nunique(),
        of_steps,
        len(faults),
        int(faults["bytes"].sum()),
        int(waited),
    )
