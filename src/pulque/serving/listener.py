"""What happened in storage, as log lines."""

import structlog

__all__ = ["LoggingListener"]


class LoggingListener:
    """Logs what the storage engine tells, to the logger of the broker if not told otherwise."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger | None = None) -> None:
        self._log = log or structlog.get_logger(component="storage")

    def segment_sealed(self, path: str, size: int) -> None:
        """A segment of the message log is complete."""
        self._log.info("segment_sealed", path=path, bytes=size)

    def segment_removed(self, path: str, size: int) -> None:
        """Retention dropped a segment."""
        self._log.info("segment_removed", path=path, bytes=size)

    def tail_cut(self, path: str, offset: int, size: int) -> None:
        """Recovery cut a torn tail."""
        self._log.warning("tail_cut", path=path, offset=offset, bytes=size)

    def corruption_found(self, path: str, offset: int, size: int, reason: str) -> None:
        """Bytes that had been durable are damaged."""
        self._log.error("corruption_found", path=path, offset=offset, bytes=size, reason=reason)

    def index_rebuilt(self, path: str, entries: int) -> None:
        """An index was made again."""
        self._log.warning("index_rebuilt", path=path, entries=entries)

    def checkpoint_written(self, path: str, size: int) -> None:
        """A checkpoint is durable."""
        self._log.debug("checkpoint_written", path=path, bytes=size)

    def checkpoint_refused(self, path: str, reason: str) -> None:
        """A checkpoint cannot be used."""
        self._log.error("checkpoint_refused", path=path, reason=reason)
