"""The table `genie_events`: what Genie's own profile says of its calls, from the JSON that the program asked for."""

import json
import math
from typing import Any

import numpy as np

from analyzer.records.reading import Source
from analyzer.records.rows import decode_texts
from analyzer.records.schema import TABLES, Columns

FIGURES = {
    "init_us": ("init-time", "us"),
    "ttft_us": ("time-to-first-token", "us"),
    "prompt_tokens": ("num-prompt-tokens", ""),
    "prompt_tokens_s": ("prompt-processing-rate", "toks/sec"),
    "generated_tokens": ("num-generated-tokens", ""),
    "generated_tokens_s": ("token-generation-rate", "toks/sec"),
    "generation_us": ("token-generation-time", "us"),
}
"""Column → Genie's name of the figure, and the unit without which it is not taken."""
Event = dict[str, Any]


def genie_columns(source: Source) -> Columns:
    """The columns of `genie_events`, in the order in which profiles were read."""
    rows = [
        {"pid": pid, "profile": profile, "read_ns": read_ns, **described(component, event)}
        for (pid, profile), (read_ns, events) in last_profiles(source)
        for component, event in events
    ]
    if not rows:
        return {}
    numbered = {"event_id": np.arange(len(rows))}
    return numbered | {
        c.name: np.array([row[c.name] for row in rows], c.dtype) for c in TABLES["genie_events"] if c.name not in numbered
    }


def described(component: str, event: Event) -> Event:
    """The columns that one event of a component fills; a figure that is absent or in another unit is NaN."""
    figures = {column: figure_of(event.get(name), unit) for column, (name, unit) in FIGURES.items()}
    kind, duration = str(event.get("type", "")), number_or_nan(event.get("duration"))
    return {"component": component, "type": kind, "duration_us": duration, **figures}


def figure_of(given: Any, unit: str) -> float:
    """A figure's value if it has the unit."""
    if not isinstance(given, dict) or given.get("unit", "") != unit:
        return math.nan
    return number_or_nan(given.get("value"))


def number_or_nan(value: Any) -> float:
    """A value from JSON as a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def last_profiles(source: Source) -> list[tuple[tuple[int, int], tuple[int, list[tuple[str, Event]]]]]:
    """((process, profile), (when it was last read, its events)): a profile read again has its earlier events too."""
    kept: list[tuple[tuple[int, int], tuple[int, list[tuple[str, Event]]]]] = []
    for key, read_ns, text in profile_texts(source):
        events = events_in(text)
        before = next((i for i, (known, (_, old)) in enumerate(kept) if known == key and is_continued(old, events)), None)
        if before is not None:
            kept[before] = (key, (read_ns, events))
        elif events:
            kept.append((key, (read_ns, events)))
    return kept


def is_continued(old: list[tuple[str, Event]], events: list[tuple[str, Event]]) -> bool:
    """Whether all events of the last reading stand in a later one: else the handle belongs to another profile."""
    return all(event in events for event in old)


def profile_texts(source: Source) -> list[tuple[tuple[int, int], int, str]]:
    """((process, profile), when, JSON text) of each reading whose parts were all recorded."""
    rows = source.rows("genie_profile")
    texts: list[str] = list(decode_texts(rows["text"])) if len(rows) else []
    parts: dict[tuple[int, int, int, int], dict[int, str]] = {}
    for i in range(len(rows)):
        key = (int(rows["pid"][i]), int(rows["profile"][i]), int(rows["ts"][i]), int(rows["tid"][i]))
        parts.setdefault(key, {})[int(rows["part"][i])] = texts[i]
    whole = [(key, part) for key, part in parts.items() if sorted(part) == list(range(len(part)))]
    return [((pid, profile), ts, "".join(part[i] for i in sorted(part))) for (pid, profile, ts, _), part in whole]


def events_in(text: str) -> list[tuple[str, Event]]:
    """(component, event) of a profile's JSON; none if it is cut off or no such profile."""
    try:
        components = json.loads(text)["components"]
        return [(str(each.get("name", "")), event) for each in components for event in each["events"] if isinstance(event, dict)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
