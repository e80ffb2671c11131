"""The interface of an engine for followers. May be used from any thread."""

from pulque.storage.checkpoint import Checkpoints
from pulque.storage.files import FileSystem
from pulque.storage.logs.action_log import ActionLog
from pulque.storage.logs.message_log import MessageLog
from pulque.storage.replication.log_bytes import (
    LogBytes,
    action_size,
    bytes_from,
    message_size,
    part_of_checkpoint,
)

__all__ = ["Copyable"]


class Copyable:
    """The part of an engine that followers read: both logs as bytes, and checkpoints."""

    actions: ActionLog
    _checkpoints: Checkpoints
    _files: FileSystem
    _log: MessageLog

    def message_bytes(self, offset: int, max_bytes: int, *, may_block: bool = True) -> LogBytes:
        """Return bytes of the message log, synced or not; see ``bytes_from``.

        May be called from any thread.
        """
        segments = self._log.segments
        return bytes_from(segments, offset, max_bytes, message_size, may_block=may_block)

    def action_bytes(self, offset: int, max_bytes: int, *, may_block: bool = True) -> LogBytes:
        """Return bytes of the action log, synced or not; see ``bytes_from``.

        May be called from any thread.
        """
        segments = self.actions.segments
        return bytes_from(segments, offset, max_bytes, action_size, may_block=may_block)

    @property
    def newest_checkpoint(self) -> int:
        """The number of the newest checkpoint, 0 if there is none; from any thread."""
        return self._checkpoints.newest

    def checkpoint_part(self, number: int, offset: int, max_bytes: int) -> tuple[int, bytes]:
        """Return a checkpoint's size and a part of it; may be called from any thread.

        Raises:
            PositionLostError: The checkpoint was removed.
        """
        return part_of_checkpoint(self._files, number, offset, max_bytes)
