"""How late messages were handed to brokers, as a histogram."""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["EDGES_MS", "Lateness"]

EDGES_MS = (0, 50, 100, 150, 200, 300, 500, 1000, 2000, 5000, 10_000, 60_000, 3_600_000)
"""The upper edges of the histogram."""


class Lateness:
    """Counts messages by how late they were."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(EDGES_MS) + 1, np.int64)

    def add(self, late_ms: npt.NDArray[Any]) -> None:
        """Count accepted messages."""
        found = np.searchsorted(EDGES_MS, late_ms)
        self._counts += np.bincount(found, minlength=len(self._counts))

    def report(self) -> dict[str, int]:
        """Return the counts by upper edge in ms; later messages under ``more``."""
        names = [*map(str, EDGES_MS), "more"]
        pairs = zip(names, self._counts.tolist(), strict=True)
        return {name: count for name, count in pairs if count}
