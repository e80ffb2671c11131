"""What happened in storage, for whoever logs and counts.

Storage neither logs nor counts; it tells its listener, which must not fail and not wait.
"""

from typing import Protocol

__all__ = ["Listener", "SilentListener"]


class Listener(Protocol):
    """Hears what happened."""

    def segment_sealed(self, path: str, size: int) -> None:
        """A segment of the message log is complete."""

    def segment_removed(self, path: str, size: int) -> None:
        """Retention dropped a segment."""

    def tail_cut(self, path: str, offset: int, size: int) -> None:
        """Recovery cut a torn tail that nobody had been promised."""

    def corruption_found(self, path: str, offset: int, size: int, reason: str) -> None:
        """Bytes that had been durable are damaged; the range is quarantined."""

    def index_rebuilt(self, path: str, entries: int) -> None:
        """A missing or damaged index was made again from the log."""

    def checkpoint_written(self, path: str, size: int) -> None:
        """A checkpoint is durable."""

    def checkpoint_refused(self, path: str, reason: str) -> None:
        """A checkpoint cannot be used; an older one, or the logs alone, serve instead."""


class SilentListener:
    """Hears nothing."""

    def segment_sealed(self, path: str, size: int) -> None: ...

    def segment_removed(self, path: str, size: int) -> None: ...

    def tail_cut(self, path: str, offset: int, size: int) -> None: ...

    def corruption_found(self, path: str, offset: int, size: int, reason: str) -> None: ...

    def index_rebuilt(self, path: str, entries: int) -> None: ...

    def checkpoint_written(self, path: str, size: int) -> None: ...

    def checkpoint_refused(self, path: str, reason: str) -> None: ...
