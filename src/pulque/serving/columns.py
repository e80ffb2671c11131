"""Columns of a batch as numpy sees them: the whole of a column in one step.

Up to a few dozen messages ``struct`` is faster, above that numpy is (``bench/micro``).
"""

from functools import lru_cache
from struct import Struct

import numpy as np

from pulque.model.batch import COLUMNS, HEADER_SIZE, layout_of

__all__ = ["do_parts_fit", "total_and_largest"]

_FEW = 48
_ONE = Struct("<I")
_SIZES = np.dtype("<u4")
_PARTS = {c.name: f"<{c.code}" for c in COLUMNS if c.name.endswith("_size")}
"""How large the key, order key, tags and headers of each message are."""
_DTYPES = {
    name: np.dtype(code.replace("H", "u2").replace("I", "u4")) for name, code in _PARTS.items()
}
_PART = {name: Struct(code) for name, code in _PARTS.items()}


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


def do_parts_fit(batch: bytes, flags: int, count: int) -> bool:
    """Return whether no message of an uncompressed batch is smaller than its parts."""
    layout = layout_of(flags)
    names = [name for name in _PARTS if name in layout.before]
    if count == 1:
        starts = [(name, layout.column_start(name, 1)) for name in names]
        parts = sum(_PART[name].unpack_from(batch, at)[0] for name, at in starts)
        return bool(parts <= _ONE.unpack_from(batch, HEADER_SIZE)[0])
    total = np.zeros(count, np.int64)
    for name in names:
        total += np.frombuffer(batch, _DTYPES[name], count, layout.column_start(name, count))
    return bool((total <= np.frombuffer(batch, _SIZES, count, HEADER_SIZE)).all())
