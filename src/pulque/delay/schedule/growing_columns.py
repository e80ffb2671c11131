"""Columns that grow together with spare capacity: appending costs only the new rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Growing"]

_LEAST_ROOM = 64
_Numbers = npt.NDArray[Any]


class Growing:
    """A table of numbers, by column.

    Args:
        columns: The type of each; with a shape if a row has several numbers.
    """

    def __init__(self, **columns: npt.DTypeLike) -> None:
        types = {name: np.dtype(each) for name, each in columns.items()}
        self._columns = {
            name: np.empty((_LEAST_ROOM, *each.shape), each.base) for name, each in types.items()
        }
        self.count = 0
        """The number of rows."""

    def __getitem__(self, name: str) -> _Numbers:
        """Return a column. Writes to it are kept until the next rows are added."""
        return self._columns[name][: self.count]

    def extend(self, rows: Mapping[str, Any], count: int) -> None:
        """Add rows: the numbers of each column, or one for all rows."""
        end = self.count + count
        if end > self.room:
            self._widen(max(end, self.room * 2))
        for name, column in self._columns.items():
            column[self.count : end] = rows[name]
        self.count = end

    def _widen(self, room: int) -> None:
        for name, column in self._columns.items():
            made = np.empty((room, *column.shape[1:]), column.dtype)
            made[: self.count] = column[: self.count]
            self._columns[name] = made

    @property
    def room(self) -> int:
        """The capacity in rows."""
        return len(next(iter(self._columns.values())))
