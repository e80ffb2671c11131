"""When little comes: the time for work that what comes would have to wait for."""

__all__ = ["Lull"]

_LITTLE_BYTES = 1024 * 1024


class Lull:
    """Watches how a log grows.

    Args:
        end: Where the log ends now.
        after_ms: How long only a little has to come before it counts.
    """

    def __init__(self, end: int, *, after_ms: int) -> None:
        self._end = end
        self._after_ms = after_ms
        self._since_ms: int | None = None
        """When much came last; None if it never did."""

    def is_now(self, end: int, now_ms: int) -> bool:
        """Return whether no more than a little came between any two calls for as long as that."""
        if end - self._end > _LITTLE_BYTES:
            self._since_ms = now_ms
        self._end = end
        return self._since_ms is None or now_ms - self._since_ms >= self._after_ms
