"""Columns of tables as a trace needs them: texts as numbers of labels, equal rows computed once, rows by id."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd
import pyarrow

SMALL = 1 << 16


def drawn_frame(table: pyarrow.Table) -> pd.DataFrame:
    """A table as a new pandas frame, texts as categories, without copying values.

    Columns are looked up hundreds of times, at five times the cost if their names are Arrow strings.
    """
    return whole_frame(table) if table.num_rows else empty_frame(table.schema).copy()


@cache
def empty_frame(schema: pyarrow.Schema) -> pd.DataFrame:
    """The frame of a table without rows, as most tables of a recording are; copying it takes a tenth of making it."""
    return whole_frame(schema.empty_table())


def whole_frame(table: pyarrow.Table) -> pd.DataFrame:
    """See `drawn_frame`."""
    frame = pd.DataFrame(dict(enumerate(map(drawn_column, table.columns))), copy=False)
    frame.columns = pd.Index(table.column_names, dtype=object)
    return frame


def drawn_column(column: pyarrow.ChunkedArray) -> np.ndarray | pd.Categorical:
    """One column, which must have no nulls."""
    chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # combining would copy a single chunk
    if not pyarrow.types.is_dictionary(chunk.type):
        return chunk.to_numpy(zero_copy_only=False)
    labels = pd.Index(chunk.dictionary.to_numpy(zero_copy_only=False), dtype=object)
    return pd.Categorical.from_codes(chunk.indices.to_numpy(), labels, validate=False)


def text_column(codes: np.ndarray, labels: list[str]) -> pyarrow.DictionaryArray:
    """The texts `labels[codes[i]]`; labels may repeat."""
    return pyarrow.DictionaryArray.from_arrays(codes.astype(np.int64, copy=False), pyarrow.array(labels, pyarrow.string()))


def text_of(column: pd.Series | list[str]) -> pyarrow.DictionaryArray:
    """A text column as a dictionary array."""
    texts = pd.Categorical(column if isinstance(column, pd.Series) else pd.Series(column, dtype=object))
    return text_column(texts.codes, [str(label) for label in texts.categories])


def map_rows(make: Callable[..., str], *columns: pd.Series) -> pyarrow.DictionaryArray:
    """`make(a, b, ...)` for each row of the columns, called once per distinct row."""
    code, count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        codes, n = column_codes(column)
        code, count = code * n + codes, count * n
        if count > SMALL:
            code, among = dense_codes(code, count)
            count = len(among)
    code, among = dense_codes(code, count)
    first = np.empty(len(among), np.int64)
    first[code] = np.arange(len(code))
    return text_column(code, [make(*row) for row in zip(*(column.iloc[first].tolist() for column in columns), strict=True)])


def column_codes(column: pd.Series) -> tuple[np.ndarray, int]:
    """(codes, n): a number below `n` for each row, equal for equal rows."""
    if column.dtype.kind == "O":
        texts = pd.Categorical(column)
        return texts.codes.astype(np.int64), len(texts.categories)
    values = column.to_numpy(np.int64)
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if high - low < SMALL:
        return values - low, high - low + 1
    codes, labels = integer_codes(values)
    return codes, len(labels)


def rows_equal(column: pd.Series, text: str) -> np.ndarray:
    """Which rows of a text column equal this text [bool]."""
    return np.asarray(column == text)


def integer_codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, labels) of integers: `labels[codes[i]]` is `values[i]`."""
    low = int(values.min(initial=0))
    codes, labels = dense_codes(values.astype(np.int64) - low, int(values.max(initial=0)) - low + 1)
    return codes, labels + low


def dense_codes(values: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for numbers from 0 to `n` - 1."""
    if n > max(SMALL, 4 * len(values)):
        return pd.factorize(values)
    seen = np.zeros(n, bool)
    seen[values] = True
    return (np.cumsum(seen) - 1)[values], np.flatnonzero(seen)


def rows_of(ids: pd.Series, sought: pd.Series) -> np.ndarray:
    """The row of each `sought` id, -1 for none; fast for ids that are row numbers, as in most tables."""
    existing, sought_ids = ids.to_numpy(np.int64), sought.to_numpy(np.int64)
    if np.array_equal(existing, np.arange(len(existing))):
        return np.where((sought_ids >= 0) & (sought_ids < len(existing)), sought_ids, -1)
    return pd.Index(existing).get_indexer(sought_ids)
