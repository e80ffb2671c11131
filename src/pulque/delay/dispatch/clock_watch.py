"""Detect that the clock was set."""

from pulque.clock import Clock

__all__ = ["ClockWatch"]

_LEAST_MS = 1000


class ClockWatch:
    """Compares the wall clock with the monotonic clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_ms, self._steady_ms = clock.now_ms(), clock.monotonic_ms()

    def step_ms(self, now_ms: int) -> int:
        """Return by how much the clock was set since the last call; 0 for small differences."""
        steady_ms = self._clock.monotonic_ms()
        step_ms = (now_ms - self._wall_ms) - (steady_ms - self._steady_ms)
        self._wall_ms, self._steady_ms = now_ms, steady_ms
        return step_ms if abs(step_ms) >= _LEAST_MS else 0
