"""The ids of messages in columns, as numbers, and what hash indexes find them by."""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ID_TYPE", "digests_of"]

ID_TYPE = np.dtype("<u8")
"""An id is two of them: half as dear to compare as sixteen bytes."""
_Numbers = npt.NDArray[Any]


def digests_of(ids: _Numbers) -> _Numbers:
    """Return a number for each id, which is two numbers; equal for equal ids."""
    mixed = ids[:, 0] ^ (ids[:, 1] * np.uint64(0x9E3779B97F4A7C15))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    found: _Numbers = mixed ^ (mixed >> np.uint64(32))
    return found
