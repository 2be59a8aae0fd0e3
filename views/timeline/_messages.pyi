"""What the C extension offers; views/timeline/protobuf.py and views/timeline/slices.py are the ways in."""

import numpy as np

from views.timeline.protobuf import Part, Step

def encode(steps: list[Step], offsets: np.ndarray) -> bytearray: ...
def events(
    head: bytes,
    ended: bytes,
    levels: list[list[Part]],
    order: np.ndarray,
    rank: np.ndarray,
    row: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    last: int,
) -> bytearray: ...
def nested(begin: np.ndarray, end: np.ndarray, instant: np.ndarray, events: np.ndarray, crossed: np.ndarray) -> int: ...
def varints(numbers: np.ndarray) -> bytearray: ...
