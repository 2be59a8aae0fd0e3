"""What the figures of steps do not show: steps that the tracer disturbed, and those before operators and routes were recorded."""

from collections.abc import Iterator

import pandas as pd

from analyzer.records.schema import Tables

SPEEDS = {"prefill": "TTFT and prefill speed", "decode": "TPOT and decode speed"}
"""The figures that a phase's steps determine."""


def counts(tokens: pd.DataFrame) -> dict[str, int]:
    """Number of complete steps of each phase that were disturbed, without zeros."""
    found = tokens.loc[tokens["complete"] & tokens["disturbed"], "phase"].value_counts()
    return {str(phase): int(n) for phase, n in found.sort_index().items()}


def remarks(tables: Tables) -> Iterator[str]:
    """A line for each phase with disturbed steps, and one for each kind of record that the first steps lack."""
    tokens = tables["tokens"]
    steps = tokens[tokens["complete"]]
    for phase, n in counts(tokens).items():
        of = int((steps["phase"] == phase).sum())
        which = f"all {of} {phase} steps" if n == of else f"{n:,} of {of:,} {phase} steps"
        effect = f"{SPEEDS.get(phase, 'speed')} may be worse than untraced" if n == of else "left out of speed and trends"
        yield f"placing and learning probes disturbed {which}: {effect}"
    for name in ("operators", "routes"):
        ids = tables[name]["token_id"]
        first = ids[ids >= 0].min() if len(ids) else None
        if first is not None and first > tokens["token_id"].min():
            yield f"{name} from step {first} on: the steps before were not probed for them"
