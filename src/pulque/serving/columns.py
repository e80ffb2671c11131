"""Columns of a batch as numpy sees them: the whole of a column in one step.

Up to a few dozen messages ``struct`` is faster, above that numpy is (``bench/micro``).
"""

from functools import lru_cache
from struct import Struct

import numpy as np

from pulque.model.batch import HEADER_SIZE

__all__ = ["total_and_largest"]

_FEW = 48
_ONE = Struct("<I")
_SIZES = np.dtype("<u4")


@lru_cache(maxsize=_FEW)
def _sizes(count: int) -> Struct:
    return Struct(f"<{count}I")


def total_and_largest(batch: bytes, count: int) -> tuple[int, int]:
    """Return the sum and the maximum of a batch's size column."""
    if count == 1:
        (size,) = _ONE.unpack_from(batch, HEADER_SIZE)
        return size, size
    if count <= _FEW:
        sizes = _sizes(count).unpack_from(batch, HEADER_SIZE)
        return sum(sizes), max(sizes)
    found = batch[HEADER_SIZE : HEADER_SIZE + 4 * count]
    if found == found[:4] * count:
        # Mostly all are the same, and this lets no other thread go first, as numpy does.
        (size,) = _ONE.unpack_from(found)
        return count * size, size
    column = np.frombuffer(found, _SIZES)
    return int(column.sum(dtype=np.uint64)), int(column.max())
