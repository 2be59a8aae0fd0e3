"""Sizes of caches, as the command line gives them."""

import re

from analyzer.errors import PredictError

SCALES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def byte_count(word: str) -> int:
    """Bytes of `64MiB` or `1500000`."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", word.strip().lower())
    if not match or match[2] not in SCALES:
        raise PredictError(f"{word!r} is not a cache size: write 64MiB, 1500000 or 50%")
    return int(float(match[1]) * SCALES[match[2]])
