"""Attribution of a token's time: every moment belongs to one operator or load, or to the residual, so that sums add up."""

from dataclasses import dataclass

import numpy as np

from analyzer.questions.groups import charged, pieces
from analyzer.records.schema import Tables


@dataclass(frozen=True)
class Charges:
    """ns of its token's time charged to each operator (by row of `operators`) and each load (by row of `loads`)."""

    operators: np.ndarray
    loads: np.ndarray


def charge(tables: Tables) -> Charges:
    """Attribute the tokens' time. Per token: operators + loads <= the token's duration; the rest is the residual."""
    rows = pieces(tables)
    ns = charged(tables, rows)

    def total(column: str) -> np.ndarray:
        of_it = rows[column].to_numpy() >= 0
        return np.bincount(rows[column][of_it], ns[of_it], len(tables[f"{column}s"]))

    return Charges(total("operator"), total("load"))
