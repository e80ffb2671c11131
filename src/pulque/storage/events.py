"""Events of storage, for logging and counting.

Storage itself neither logs nor counts; it calls its listener, which must not fail and not block.
"""

from typing import Protocol

__all__ = ["Listener", "SilentListener"]


class Listener(Protocol):
    """The interface of listeners."""

    def segment_sealed(self, path: str, size: int) -> None:
        """A segment of the message log is complete."""

    def segment_removed(self, path: str, size: int) -> None:
        """Retention dropped a segment."""

    def tail_cut(self, path: str, offset: int, size: int) -> None:
        """Recovery cut a torn, never confirmed tail."""

    def corruption_found(self, path: str, offset: int, size: int, reason: str) -> None:
        """Durable bytes are damaged; the range is quarantined."""

    def index_rebuilt(self, path: str, entries: int) -> None:
        """A missing or damaged index was rebuilt from the log."""

    def checkpoint_written(self, path: str, size: int) -> None:
        """A checkpoint is durable."""

    def checkpoint_refused(self, path: str, reason: str) -> None:
        """A checkpoint is unusable; recovery used an older one, or the logs alone."""


class SilentListener:
    """Ignores all events."""

    def segment_sealed(self, path: str, size: int) -> None: ...

    def segment_removed(self, path: str, size: int) -> None: ...

    def tail_cut(self, path: str, offset: int, size: int) -> None: ...

    def corruption_found(self, path: str, offset: int, size: int, reason: str) -> None: ...

    def index_rebuilt(self, path: str, entries: int) -> None: ...

    def checkpoint_written(self, path: str, size: int) -> None: ...

    def checkpoint_refused(self, path: str, reason: str) -> None: ...
