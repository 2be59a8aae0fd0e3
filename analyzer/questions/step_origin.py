"""Where steps come from that no engine declared: an event that recurs, or a function that the user named."""

import pandas as pd

from analyzer.records.schema import Tables
from moescope.terminal import counted

USER = "user"
"""The engine of steps that begin at a function that the user named."""
NO_STEPS = (
    "no steps: no engine is declared for this program, and no small write or read of it recurs regularly; "
    "`--step-at FUNCTION` begins one"
)


def event_text(row: pd.Series, threads: pd.DataFrame) -> str:
    """What recurs: "a small write of thread `main` to descriptor 1", "a read of `weights` at byte 0 by thread `loader`"."""
    names = threads.loc[threads["tid"] == row["tid"], "name"]
    thread = f"thread `{names.iloc[0] if len(names) else row['tid']}`"
    if row["what"] == "write":
        return f"a small write of {thread} to descriptor {row['fd']}"
    return f"a read of `{str(row['file']).rpartition('/')[2]}` at byte {row['offset']:,} by {thread}"


def step_origin(tables: Tables) -> str:
    """A sentence on steps that no engine declared, or on why there are none; "" for those of engines."""
    chosen = tables["recurrences"][tables["recurrences"]["chosen"]]
    for _, row in chosen.iterrows():
        alike = f"{row['regular']:.0%} of {counted(int(row['steps']), 'step')} take or compute about as long as those around"
        return f"steps found, not declared: each lasts from {event_text(row, tables['threads'])} to the next; {alike}"
    if (tables["tokens"]["engine"] == USER).any():
        return "steps by --step-at: each lasts until its thread enters the function again"
    return ""


def step_event(tables: Tables) -> str:
    """What begins steps that no engine declared, in terms that two runs of a program share; "" for those of engines."""
    for _, row in tables["recurrences"][tables["recurrences"]["chosen"]].iterrows():
        return f"found, at each {row['what']}: {row['file'] or 'descriptor'} {row['offset'] if row['file'] else row['fd']}"
    return "--step-at" if (tables["tokens"]["engine"] == USER).any() else ""
