"""A clock that stands still until it is told."""

__all__ = ["ManualClock"]


class ManualClock:
    """Implements ``pulque.clock.Clock``; time passes only by ``advance``.

    Args:
        now_ms: Milliseconds since 1970 to begin with.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, ms: int) -> None:
        """Let time pass; it never goes back.

        Raises:
            ValueError: ``ms`` is negative.
        """
        if ms < 0:
            raise ValueError(f"time does not go back by {-ms} ms; set_now_ms sets the wall clock")
        self._now_ms += ms
        self._monotonic_ms += ms

    def set_now_ms(self, now_ms: int) -> None:
        """Set the wall clock, as an administrator does; the monotonic one does not notice."""
        self._now_ms = now_ms
