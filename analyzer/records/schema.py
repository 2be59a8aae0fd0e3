"""The tables that `tables.toml` declares, as Arrow tables and as pandas frames."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyarrow

from moescope.packaged import toml_beside

Tables = Mapping[str, pd.DataFrame]
"""Tables by name, as frames."""
TEXT = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
"""A column of texts: each text once, and a number for each row."""


@dataclass(frozen=True)
class Column:
    """One column: its name, NumPy dtype (`object`: text, or lists) and meaning."""

    name: str
    dtype: str
    meaning: str

    @property
    def arrow_type(self) -> pyarrow.DataType:
        """Its type in an Arrow table."""
        if self.dtype != "object":
            return pyarrow.from_numpy_dtype(self.dtype)
        return pyarrow.list_(pyarrow.uint64()) if self.name == "sources" else TEXT


def _declared_tables() -> Iterator[dict[str, tuple[Column, ...]]]:
    """The tables of each section of `tables.toml`."""
    file = toml_beside(__file__, "tables.toml")

    def columns(spec: str) -> Iterator[Column]:
        for line in spec.splitlines():
            if line.startswith("@"):
                yield from columns(file["groups"][line[1:]])
            else:
                yield Column(*line.split(None, 2))

    for section in ("tables", "imported", "compared", "derived"):
        yield {name: tuple(columns(spec)) for name, spec in file[section].items()}


TABLES, IMPORTED, COMPARED, MADE = _declared_tables()
Columns = dict[str, Any]
"""Columns of a table by name: NumPy arrays; texts as pyarrow.DictionaryArray."""


def text_array(codes: np.ndarray, values: Sequence[str] | np.ndarray) -> pyarrow.DictionaryArray:
    """A text column with values[codes[i]] in row i, indexed by NumPy's rules; values may repeat."""
    once = pyarrow.array(values, pyarrow.string()).dictionary_encode()
    if len(codes) == 0 or (len(once.dictionary) == len(values) and codes.min() >= 0):
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array(codes.astype(np.int32)), once.dictionary)
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(once.indices.to_numpy()[codes]), once.dictionary, safe=False)


def equals_any(column: pyarrow.DictionaryArray, *words: str) -> np.ndarray:
    """Which rows of a text column equal one of these words."""
    return np.array([*(value in words for value in column.dictionary.to_pylist()), False])[column.indices.to_numpy()]


@cache
def arrow_schema(table: str) -> pyarrow.Schema:
    """The declared columns."""
    return pyarrow.schema([pyarrow.field(c.name, c.arrow_type, nullable=False) for c in declared_columns(table)])


def arrow_table(table: str, columns: Mapping[str, Any]) -> pyarrow.Table:
    """The declared columns in declared order and types; no rows if `columns` is empty. Raises KeyError on a missing column."""
    schema = arrow_schema(table)
    if not len(columns):
        return schema.empty_table()
    return pyarrow.table([_text_array(columns[column.name], column) for column in declared_columns(table)], schema)


def _text_array(values: Any, column: Column) -> pyarrow.Array:
    if isinstance(values, pyarrow.DictionaryArray):
        return values
    if column.dtype != "object":
        return pyarrow.array(np.asarray(values).astype(column.dtype, copy=False))
    array = pyarrow.array(np.asarray(values, object), pyarrow.string() if column.arrow_type == TEXT else column.arrow_type)
    return array.dictionary_encode() if column.arrow_type == TEXT else array


def frame_of(table: pyarrow.Table) -> pd.DataFrame:
    """An Arrow table as a pandas frame: numbers without a copy, texts as objects that equal rows share."""
    return as_frame({name: frame_column(column) for name, column in zip(table.column_names, table.columns, strict=True)})


def as_frame(columns: dict[str, np.ndarray | pd.Series]) -> pd.DataFrame:
    """The columns as a frame. Column names have dtype object: pandas' own string type would cost a conversion per frame."""
    frame = pd.DataFrame(dict(enumerate(columns.values())), copy=False)
    frame.columns = pd.Index(list(columns), dtype=object)
    return frame


def frame_column(column: pyarrow.ChunkedArray) -> np.ndarray | pd.Series:
    """A column for pandas, without creating a string object for every row."""
    if column.num_chunks != 1:
        column = pyarrow.chunked_array([column.unify_dictionaries().combine_chunks()])
    chunk = column.chunk(0)
    if pyarrow.types.is_dictionary(column.type):
        values = np.array([*chunk.dictionary.to_pylist(), ""], object)
        return pd.Series(values[chunk.indices.to_numpy()], dtype=object, copy=False)
    if pyarrow.types.is_list(column.type):
        return pd.Series(chunk.to_pandas().to_numpy(object), dtype=object, copy=False)
    return chunk.to_numpy(zero_copy_only=False)


def declared_columns(table: str) -> tuple[Column, ...]:
    """The columns of a table."""
    return TABLES.get(table) or IMPORTED.get(table) or MADE[table]


def empty_table(table: str) -> pd.DataFrame:
    """The table with no rows and the declared dtypes."""
    return frame_of(arrow_schema(table).empty_table())


def conform(table: str, frame: pd.DataFrame | Mapping[str, Any]) -> pd.DataFrame:
    """`frame` with exactly the declared columns, order and dtypes; raises KeyError on a missing column."""
    return as_frame({c.name: _frame_column(frame[c.name], c.dtype) for c in declared_columns(table)})


def fill_missing(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """`conform` for a frame that lacks columns: -1, NaN, "" or False, but True for `complete`; rows are numbered."""
    blank = {"object": "", "bool": False, "uint64": 0, "float64": np.nan}
    absent = [column for column in declared_columns(table) if column.name not in frame]
    numbers = {c.name: np.arange(len(frame)) for c in absent if c.meaning == "row number"}
    constants = {c.name: c.name == "complete" or blank.get(c.dtype, -1) for c in absent}
    return conform(table, frame.assign(**constants | numbers))


def _frame_column(values: Any, dtype: str) -> np.ndarray | pd.Series:
    """Text stays `object`: conversion to pandas' own string type would copy every column."""
    array = values.to_numpy(dtype=dtype) if isinstance(values, pd.Series) else np.asarray(values).astype(dtype, copy=False)
    return pd.Series(array, dtype=dtype, copy=False) if dtype == "object" else array
