"""The clock of dispatch: whether somebody has set it, and how late messages went to brokers."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pulque.clock import Clock

__all__ = ["EDGES_MS", "ClockWatch", "Lateness"]

EDGES_MS = (0, 50, 100, 150, 200, 300, 500, 1000, 2000, 5000, 10_000, 60_000, 3_600_000)
"""A message counts for the first of these that its lateness is not over."""
_LEAST_MS = 1000


class ClockWatch:
    """Compares the time of day with a clock that nobody can set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_ms, self._steady_ms = clock.now_ms(), clock.monotonic_ms()

    def step_ms(self, now_ms: int) -> int:
        """Return by how much the clock was set since the last call; 0 for next to nothing."""
        steady_ms = self._clock.monotonic_ms()
        step_ms = (now_ms - self._wall_ms) - (steady_ms - self._steady_ms)
        self._wall_ms, self._steady_ms = now_ms, steady_ms
        return step_ms if abs(step_ms) >= _LEAST_MS else 0


class Lateness:
    """Counts messages by how late they were, as a histogram."""

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
