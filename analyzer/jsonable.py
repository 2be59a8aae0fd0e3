"""Results of the analyzer as JSON: tables as lists of rows, dataclasses as objects, no NaN."""

import json
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pandas as pd


def plain(value: Any) -> Any:
    """A JSON-able value: tables as lists of rows, dataclasses by fields, NumPy scalars as Python's types, NaN as null."""
    if is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, pd.DataFrame):
        return [plain(row) for row in value.to_dict("records")]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def as_json(value: Any) -> str:
    """The value as JSON text."""
    return json.dumps(plain(value))
