"""Answers of verbs: JSON under a schema of answers.toml, or text; both say first if figures come from an emulator."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from math import inf, isfinite
from typing import Any

from moescope.plain import print_plain

EMULATOR = "HTP emulator: results are exact; its times and cycles are those of the host, not of a device"
VERSION = 1
"""Of all schemas: raised when a field goes or changes its meaning, not when one is added."""
_labels: list[str] = []


def note_emulator(there: object = True) -> None:
    """Label the answer of the verb that is running if `there`: what reads or makes figures of the emulator calls it."""
    if there and EMULATOR not in _labels:
        _labels.append(EMULATOR)


def forget_labels() -> None:
    """Begin an answer."""
    _labels.clear()


def json_value(value: Any, largest: float = inf) -> Any:
    """A JSON-able value: tables as lists of rows, dataclasses by fields, NumPy scalars as Python's types, NaN as null.

    Integers beyond `largest` become texts, for readers that would round them.
    """
    if value is None or isinstance(value, str | int):
        return str(value) if isinstance(value, int) and abs(value) > largest else value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value):
        return json_value(vars(value), largest)
    if isinstance(value, Mapping):
        return {str(key): json_value(item, largest) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, largest) for item in value]
    if hasattr(value, "columns"):  # a table
        return [json_value(row, largest) for row in value.to_dict("records")]
    if largest == inf and getattr(getattr(value, "dtype", None), "kind", "") in ("b", "i", "u"):
        return value.tolist()  # as it is: large matrices take long item by item
    return json_value(value.tolist(), largest) if hasattr(value, "tolist") else str(value)


def json_text(value: Any) -> str:
    """The value as JSON text."""
    return json.dumps(json_value(value), allow_nan=False)


def schema_of(form: str, kind: str = "") -> str:
    """The name of an answer's schema; `kind` is for a verb that gives different ones: `moescope/time.step/1`."""
    return f"moescope/{'.'.join(filter(None, (*form.split(), kind)))}/{VERSION}"


def print_if_json(args: argparse.Namespace, answer: Mapping[str, Any], kind: str = "") -> bool:
    """Print the answer as JSON if --json is given, otherwise the label that text lacks; returns whether it was JSON."""
    label = "; ".join(_labels)
    if args.json:
        print(json_text({"schema": schema_of(args.form, kind), "emulator": label or None, **answer}))
    elif label:
        print_plain(label)
    return bool(args.json)
