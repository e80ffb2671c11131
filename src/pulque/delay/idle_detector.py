"""Detect pauses in the traffic, for work that would delay sends."""

__all__ = ["Lull"]

_LITTLE_BYTES = 1024 * 1024


class Lull:
    """Watches the growth of a log.

    Args:
        end: The present end of the log.
        after_ms: How long the log must grow slowly to count as a pause.
    """

    def __init__(self, end: int, *, after_ms: int) -> None:
        self._end = end
        self._after_ms = after_ms
        self._since_ms: int | None = None
        """When the log last grew fast; None if it never did."""

    def is_now(self, end: int, now_ms: int) -> bool:
        """Return whether the log has grown slowly for that long; to be called regularly."""
        if end - self._end > _LITTLE_BYTES:
            self._since_ms = now_ms
        self._end = end
        return self._since_ms is None or now_ms - self._since_ms >= self._after_ms
