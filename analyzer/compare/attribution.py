"""Attribution of a step's time: every moment belongs to one operator or load, or to the residual, so that sums add up."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.schema import Tables


@dataclass(frozen=True)
class Charges:
    """ns of its step's time charged to each operator (by row of `operators`) and each load (by row of `loads`)."""

    operators: np.ndarray
    loads: np.ndarray


def charge(tables: Tables, time: pd.DataFrame) -> Charges:
    """Attribute the rows of `time`. Per step: operators + loads <= the step's duration; the rest is the residual."""
    loading = (time["load_id"] >= 0).to_numpy()
    columns = (("operators", "op_id", time[~loading]), ("loads", "load_id", time[loading]))
    spent = (
        rows["duration_ns"].groupby(rows[name]).sum().reindex(tables[table][name], fill_value=0) for table, name, rows in columns
    )
    return Charges(*(ns.to_numpy(np.float64) for ns in spent))
