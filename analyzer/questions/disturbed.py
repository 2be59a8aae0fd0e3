"""What the figures of steps do not show: steps that the tracer disturbed, and those before operators and routes were recorded."""

from collections.abc import Iterator

import pandas as pd

from analyzer.records.schema import Tables


def disturbed_counts(tokens: pd.DataFrame) -> dict[str, int]:
    """Number of complete steps of each phase that were disturbed, without zeros."""
    found = tokens.loc[tokens["complete"] & tokens["disturbed"], "phase"].value_counts()
    return {str(phase): int(n) for phase, n in found.sort_index().items()}


def in_text(parts: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), parts[-1]])


def disturbance_remarks(tables: Tables) -> Iterator[str]:
    """A line on phases whose steps were all disturbed, one on those that have others, and one for each kind of record that
    the first steps lack.
    """
    tokens = tables["tokens"]
    of = tokens.loc[tokens["complete"], "phase"].value_counts()
    whole = [f"{n:,} {phase}" for phase, n in disturbed_counts(tokens).items() if n == of[phase]]
    partly = [f"{n:,} of {of[phase]:,} {phase}" for phase, n in disturbed_counts(tokens).items() if n < of[phase]]
    if whole:
        yield f"placing and learning probes disturbed every step ({in_text(whole)}): speed may be worse than untraced"
    if partly:
        yield f"placing and learning probes disturbed {in_text(partly)} steps: left out of speed and trends"
    for name in ("operators", "routes"):
        ids = tables[name]["token_id"]
        first = ids[ids >= 0].min() if len(ids) else None
        if first is not None and first > tokens["token_id"].min():
            yield f"{name} from step {first} on: the steps before were not probed for them"
