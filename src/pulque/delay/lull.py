"""When little comes: the time for work that what comes would have to wait for."""

__all__ = ["Lull"]

_LITTLE_BYTES = 1024 * 1024
_LULL_MS = 5000


class Lull:
    """Watches how a log grows.

    Args:
        end: Where the log ends now.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._since_ms: int | None = None
        """When much came last; None if it never did."""

    def is_now(self, end: int, now_ms: int) -> bool:
        """Say whether no more than a little came between any two calls of the last seconds."""
        if end - self._end > _LITTLE_BYTES:
            self._since_ms = now_ms
        self._end = end
        return self._since_ms is None or now_ms - self._since_ms >= _LULL_MS
