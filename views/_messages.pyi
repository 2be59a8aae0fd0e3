"""What the C extension offers; views/protobuf.py and views/slices.py are the ways in."""

import numpy as np

from views.protobuf import Step

def codes(texts: np.ndarray, codes: np.ndarray) -> list[str]: ...
def encode(forms: list[list[Step]], form: np.ndarray, row: np.ndarray) -> bytes: ...
def nested(
    opening: np.ndarray, begin: np.ndarray, end: np.ndarray, instant: np.ndarray, events: np.ndarray, crossed: np.ndarray
) -> int: ...
