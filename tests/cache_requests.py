"""Requests of an expert cache from events, whose keys are numbered in their order."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analyzer.questions.replays import Requests
from runtime.cache_rules.replay import Event


def requests_of_events(events: Sequence[Event], sizes: Mapping[Any, int] | None = None) -> Requests:
    """The requests; sizes: bytes of each key."""
    keys = sorted({key for event in events for key in event.keys})
    begins = np.cumsum([0, *(len(event.keys) for event in events)])
    numbers = np.array([keys.index(key) for event in events for key in event.keys], np.int64)
    bytes_of = np.array([sizes[key] for key in keys], np.int64) if sizes else None
    return Requests(begins, numbers, np.array([event.counts for event in events], bool), bytes_of, len(keys))
